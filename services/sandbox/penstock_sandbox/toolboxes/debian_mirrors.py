"""Asks mirrors of Debian for files: where redirects may lead, and what callers learn of a failure.

Invariants
- A redirect is followed only to a place below a mirror: a mirror cannot make this service ask another host.
- Callers get a fixed sentence for each class of error. Addresses, redirects and the proxy's login are not in it, and no
  login is in the log.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import aiohttp
from yarl import URL

from penstock_sandbox.backends.images.registry import proxy_of
from penstock_sandbox.egress import no_answer

FAILURES: Final = (aiohttp.ClientError, OSError, ValueError)
"""What asking a mirror raises; a proxy or a redirect that is no URL is a ValueError."""
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_MOST_REDIRECTS: Final = 5


class Astray(aiohttp.ClientError):
    """A redirect that is not followed; the text names no place."""


@asynccontextmanager
async def opened(
    session: aiohttp.ClientSession, url: str, mirrors: Sequence[str]
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Yields the answer for ``url``, after redirects below ``mirrors``. Raises FAILURES."""
    here, tops = URL(url), [URL(mirror) for mirror in mirrors]
    for _ in range(_MOST_REDIRECTS + 1):
        async with session.get(here, proxy=proxy_of(str(here)), allow_redirects=False) as answer:
            if answer.status not in _REDIRECTS:
                yield answer
                return
            here = here.join(URL(answer.headers.get("Location", "")))
        if not any(below(here, top) for top in tops):
            raise Astray("redirects to a place that is below none of the mirrors")
    raise Astray(f"redirects more than {_MOST_REDIRECTS} times")


def below(url: URL, mirror: URL) -> bool:
    """Whether a redirect's target is below a mirror, however the target is written."""
    if not url.absolute or url.scheme not in ("http", "https") or url.user or url.password:
        return False
    parts = url.path.replace("\\", "/").split("/")
    return url.origin() == mirror.origin() and ".." not in parts and url.path.startswith(mirror.path.rstrip("/") + "/")


def why(error: BaseException) -> str:
    """Returns what failed, to follow "a mirror"."""
    return str(error) if isinstance(error, Astray) else no_answer.why(error)
