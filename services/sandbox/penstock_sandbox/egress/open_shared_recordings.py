"""Opens the place of shared recordings as the proxy starts.

A place is checked at every start. One that was found fit before may be away by then: the proxy starts, and refuses what
needs it (RECORDINGS_AWAY) until it is back.
"""

from __future__ import annotations

import asyncio
import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import structlog

from penstock_sandbox.egress import recording_stores
from penstock_sandbox.egress.shared_recordings import SharedRecordings

_THREADS: Final = 16
_CHECK_S: Final = 30.0
_FIT: Final = "recordings-are-fit"
_MOST: Final = 300

_log = structlog.get_logger(__name__)


class Unusable(Exception):
    """A place that cannot have recordings; the message is for the operator."""


async def opened_recordings(url: str, folder: Path, timeout_s: float) -> SharedRecordings | None:
    """Returns the recordings of a URL, None for an empty one; ``folder`` is the proxy's own. Raises Unusable."""
    if not url:
        return None
    name = hashlib.sha256(url.encode()).hexdigest()
    fit = folder / _FIT
    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="recordings")
    loop = asyncio.get_running_loop()
    try:
        place = await loop.run_in_executor(pool, recording_stores.opened, url)
    except Exception as error:  # a package that is absent, or a configuration that s3fs refuses
        raise Unusable(f"{url} cannot be opened: {_described(error)}") from error
    try:
        async with asyncio.timeout(_CHECK_S):
            await loop.run_in_executor(pool, recording_stores.check, place)
    except recording_stores.Unfit as error:
        raise Unusable(f"{url} cannot have recordings: {error}") from error
    except Exception as error:
        if not (fit.is_file() and fit.read_text() == name):
            raise Unusable(f"{url} cannot be used: {_described(error)}") from error
        _log.error("shared recordings cannot be reached", url=url, error=_described(error))
    else:
        fit.write_text(name)
    return SharedRecordings(place, pool, name=name, transfer_s=timeout_s)


def _described(error: BaseException) -> str:
    if type(error) is TimeoutError and not str(error):
        return f"it did not answer in {_CHECK_S:g} s"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_MOST]}"
