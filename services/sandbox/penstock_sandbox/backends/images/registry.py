"""A client of image registries: manifests and blobs by the distribution protocol, with typed errors.

Purpose: asyncio all through, so that a pull is cancelled by closing its connection, has deadlines for each step, and a
registry's limits (429, Retry-After) are known instead of guessed from a program's output.

Invariants
- Credentials come from the settings alone, go to the registry that they are for and to the token service that it names
  over TLS, and are in no message. A redirect to another host takes no credential along, and none leads away from TLS.
- What is downloaded has the digest and the length that it was asked for by, or is an error. Nothing is held in memory
  but manifests, and those are bounded.
- Plain HTTP is spoken to hosts alone that the operator lists.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlencode, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import structlog

from penstock_chassis.aio.retry import Delays, Pause, retry
from penstock_chassis.errors import PenstockError, ResourceExhausted, Unavailable
from penstock_sandbox.backends.images import errors
from penstock_sandbox.backends.images.reference import HUB, Reference
from penstock_sandbox.egress import no_answer

if TYPE_CHECKING:
    import aiohttp

MANIFESTS: Final = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_HUB_HOST = "registry-1.docker.io"
_MOST_MANIFEST = 4 * 1024 * 1024
_CHUNK = 1024 * 1024
_CONNECT_S, _SILENCE_S = 10.0, 60.0
_ATTEMPTS = 4
_DELAYS = Delays(0.5, 8.0, (0.5, 1.0))
# A registry that asks for a longer pause gets it from the caller, who has a deadline.
_LONGEST_PAUSE_S = 30.0
_PATIENCE_S = 300.0
_DEFAULT_PAUSE_S = 60.0
_MOST_TOKEN = 64 * 1024
_MOST_TOKENS = 256
_MOST_REDIRECTS = 5
_TOKEN_SHARE = 0.8
_TOKEN_S = 60.0
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')

T = TypeVar("T")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RegistryOptions:
    """Where images come from. ``mirrors``: registry -> URL that is asked first; ``credentials``: host -> user:password.

    ``plain_http``: hosts, with their ports, that are asked without TLS.
    """

    mirrors: Mapping[str, str] = field(default_factory=dict)
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)
    plain_http: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest as its registry keeps it: its digest, its media type and its content."""

    digest: str
    kind: str
    content: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Blob:
    """What a manifest refers to: digest, bytes, media type."""

    digest: str
    size: int
    kind: str


@dataclass(frozen=True, slots=True)
class _Place:
    """A registry or its mirror: its base URL, and the name that its credentials have."""

    url: str
    name: str


class Registry:
    """All registries. An async context: connections are closed at its end."""

    def __init__(self, options: RegistryOptions, *, pause: Pause = asyncio.sleep) -> None:
        self._options = options
        self._pause = pause
        self._session: aiohttp.ClientSession | None = None
        self._tokens: dict[tuple[str, str], tuple[str, float]] = {}

    async def aclose(self) -> None:
        """Closes all connections."""
        if self._session is not None:
            await self._session.close()

    async def manifest(self, image: Reference, digest: str = "") -> Manifest:
        """Returns the image's manifest or index, or that of ``digest``. Raises what ``errors`` has."""
        wanted = digest or image.version

        async def ask(place: _Place) -> Manifest:
            path = f"manifests/{wanted}"
            async with self._get(image, place, path, {"Accept": ", ".join(MANIFESTS)}) as answer:
                body = await _body(image, answer, "its manifest", _MOST_MANIFEST)
                kind = answer.content_type
            found = f"sha256:{hashlib.sha256(body).hexdigest()}"
            if wanted.startswith("sha256:") and found != wanted:
                raise errors.pull_failed(str(image), f"the registry gave {found} for the manifest {wanted}")
            try:
                content = json.loads(body)
            except ValueError as error:
                raise errors.unusable(str(image), "its manifest is no JSON") from error
            if not isinstance(content, dict):
                raise errors.unusable(str(image), "its manifest is no JSON object")
            return Manifest(found, str(content.get("mediaType") or kind), content)

        return await self._anywhere(image, ask)

    async def blob(
        self, image: Reference, blob: Blob, write: Callable[[bytes], object], restart: Callable[[], object]
    ) -> None:
        """Downloads a blob; ``write`` gets it in pieces, in a thread, after ``restart`` was called for each attempt.

        Returns when its length and digest are right. Raises what ``errors`` has, and what ``write`` raises.
        """

        async def ask(place: _Place) -> None:
            restart()
            digest, length = hashlib.sha256(), 0

            def take(piece: bytes) -> None:
                digest.update(piece)
                write(piece)

            async with self._get(image, place, f"blobs/{blob.digest}", {}) as answer:
                async for piece in answer.content.iter_chunked(_CHUNK):
                    length += len(piece)
                    if length > blob.size:
                        break
                    await asyncio.to_thread(take, piece)
            if length != blob.size:
                more = "more" if length > blob.size else f"{length}"
                raise errors.pull_failed(str(image), f"{blob.digest} has {blob.size} bytes; the registry sent {more}")
            if (found := f"sha256:{digest.hexdigest()}") != blob.digest:
                raise errors.pull_failed(str(image), f"the registry sent {found} for {blob.digest}")

        await self._anywhere(image, ask)

    # Places ------------------------------------------------------------------------------------------------------

    async def _anywhere(self, image: Reference, ask: Callable[[_Place], Awaitable[T]]) -> T:
        """Asks the mirror, and then the registry itself; each again after what may pass."""
        places = self._places(image.registry)
        for place in places[:-1]:
            try:
                return await self._repeated(partial(ask, place))
            except PenstockError as error:
                if error.reason in ("IMAGE_UNUSABLE", "IMAGE_TOO_LARGE"):
                    raise
                _log.info("a mirror does not have an image", image=str(image), mirror=place.url, reason=error.reason)
        return await self._repeated(partial(ask, places[-1]))

    async def _repeated(self, work: Callable[[], Awaitable[T]]) -> T:
        return await retry(work, _DELAYS, patience_s=_patience_s, attempts=_ATTEMPTS, pause=self._pause)

    def _places(self, registry: str) -> list[_Place]:
        host = _HUB_HOST if registry == HUB else registry
        scheme = "http" if registry in self._options.plain_http else "https"
        itself = _Place(f"{scheme}://{host}", registry)
        mirror = self._options.mirrors.get(registry, "").rstrip("/")
        return [_Place(mirror, urlsplit(mirror).netloc), itself] if mirror else [itself]

    # Requests ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _get(
        self, image: Reference, place: _Place, path: str, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yields the answer to a request, with a token if the registry wants one. Raises what ``errors`` has."""
        import aiohttp  # a tenth of a second of each start, for what few services need

        url = f"{place.url}/v2/{image.repository}/{path}"
        key = (place.url, image.repository)
        try:
            for attempt in range(2):
                sent = dict(headers)
                token, until = self._tokens.get(key, ("", math.inf))
                if token and until > time.monotonic():
                    sent["Authorization"] = token
                async with self._followed(image, place, url, sent) as answer:
                    if answer.status == 401 and attempt == 0:
                        given = await self._authorization(image, place, answer)
                        if len(self._tokens) >= _MOST_TOKENS:
                            self._tokens.clear()  # callers choose the names of images
                        self._tokens[key] = given
                        continue
                    _check(image, place, answer)
                    yield answer
                    return
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:  # ValueError: of a malformed address
            if isinstance(error, OSError) and not isinstance(
                error, aiohttp.ClientError | TimeoutError | ConnectionError
            ):
                raise  # the disk's, of the caller
            _log.warning("a registry failed", registry=place.name, error=no_answer.for_log(error))
            raise errors.pull_failed(str(image), f"the registry {place.name} {no_answer.why(error)}") from error

    @asynccontextmanager
    async def _followed(
        self, image: Reference, place: _Place, url: str, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yields the answer to a request, redirects followed: to TLS only, or to hosts that may be asked without."""
        sent = dict(headers)
        for _ in range(_MOST_REDIRECTS + 1):
            async with self._opened().get(url, headers=sent, proxy=proxy_of(url), allow_redirects=False) as answer:
                target = answer.headers.get("Location", "") if answer.status in (301, 302, 303, 307, 308) else ""
                if not target:
                    yield answer
                    return
            there = urljoin(url, target)
            if not self._may_be_asked(there):
                raise errors.unusable(str(image), f"the registry {place.name} redirects to a host without TLS")
            if urlsplit(there)[:2] != urlsplit(url)[:2]:
                sent.pop("Authorization", None)
            url = there
        raise errors.unusable(str(image), f"the registry {place.name} redirects more than {_MOST_REDIRECTS} times")

    def _may_be_asked(self, url: str) -> bool:
        parts = urlsplit(url)
        return parts.scheme == "https" or (parts.scheme == "http" and parts.netloc in self._options.plain_http)

    def _opened(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            # Nothing from the environment: neither a .netrc nor cookies.
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                # A blob's bytes are what is hashed, whatever the server says of their encoding.
                auto_decompress=False,
                headers={"User-Agent": "penstock", "Accept-Encoding": "identity"},
            )
        return self._session

    async def _authorization(
        self, image: Reference, place: _Place, refusal: aiohttp.ClientResponse
    ) -> tuple[str, float]:
        """Returns the header's value that a registry's refusal asks for, and until when it is valid."""
        scheme, _, rest = refusal.headers.get("WWW-Authenticate", "").partition(" ")
        asked = dict(_PARAMETER.findall(rest))
        credentials = self._options.credentials.get(place.name, "")
        basic = f"Basic {base64.b64encode(credentials.encode()).decode()}"
        if scheme.lower() == "basic" and credentials:
            return basic, math.inf
        realm = asked.get("realm", "")
        if scheme.lower() != "bearer" or not realm:
            raise errors.unauthorized(str(image), place.name, "it asks for a user and a password")
        if not self._may_be_asked(realm):
            raise errors.unauthorized(str(image), place.name, "its token service has no TLS")
        query = {"scope": asked.get("scope") or f"repository:{image.repository}:pull"}
        if service := asked.get("service"):
            query["service"] = service
        headers = {"Authorization": basic} if credentials else {}
        asked_for = f"{realm}{'&' if urlsplit(realm).query else '?'}{urlencode(query)}"
        async with self._followed(image, place, asked_for, headers) as answer:
            _check(image, place, answer)
            body = await _body(image, answer, "its registry's token", _MOST_TOKEN)
        try:
            given = json.loads(body)
            token = str(given.get("token") or given["access_token"])
            seconds = float(given.get("expires_in") or _TOKEN_S)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise errors.pull_failed(str(image), "the registry's token service gave no token") from error
        return f"Bearer {token}", time.monotonic() + seconds * _TOKEN_SHARE


async def _body(image: Reference, answer: aiohttp.ClientResponse, what: str, most: int) -> bytes:
    """Returns a small answer, whole. Raises FailedPrecondition (IMAGE_UNUSABLE)."""
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > most:
            raise errors.unusable(str(image), f"{what} has more than {most} bytes")
    return bytes(body)


def _check(image: Reference, place: _Place, answer: aiohttp.ClientResponse) -> None:
    """Raises for an answer that is not what was asked for."""
    status, name = answer.status, str(image)
    if status == 200:
        return
    if status in (401, 403):
        raise errors.unauthorized(name, place.name, f"HTTP {status}")
    if status == 404:
        raise errors.unknown(name, f"the registry {place.name} does not know it")
    if status == 429:
        raise errors.rate_limited(name, place.name, _pause_s(answer.headers.get("Retry-After", "")))
    if 400 <= status < 500:
        raise errors.unusable(name, f"the registry {place.name} answers HTTP {status}")
    raise errors.pull_failed(name, f"the registry {place.name} answers HTTP {status}")


def _pause_s(header: str) -> float:
    """Returns the seconds of a Retry-After, a number or a date."""
    if header.strip().isdigit():
        return float(header)
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (TypeError, ValueError):
        return _DEFAULT_PAUSE_S


def _patience_s(error: Exception) -> float:
    if isinstance(error, ResourceExhausted):
        return _PATIENCE_S if (error.retry_after_s or 0.0) <= _LONGEST_PAUSE_S else 0.0
    return _PATIENCE_S if isinstance(error, Unavailable) else 0.0


def proxy_of(url: str) -> str | None:
    """Returns the proxy that the environment names for a URL."""
    parts = urlsplit(url)
    if not parts.hostname or proxy_bypass(parts.hostname):
        return None
    return getproxies().get(parts.scheme)
