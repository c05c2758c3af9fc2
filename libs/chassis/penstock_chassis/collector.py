"""Python's collector of cyclic garbage, kept from stalling a service's event loop.

What a request leaves behind dies by its reference counts, or lives for long; of cycles there are a few objects for each
RPC, which gRPC makes and which are garbage at once. Collections of what is young find those. A collection of everything
that lives takes 0.3 s where the rollouts of ten thousand agents do, and Python makes one whenever a quarter has been
added. Here, what has survived one collection is frozen instead: nobody looks at it again, and its memory goes back as
ever when its last reference does. Only a cycle among it would stay, so everything is looked at when twice as much is
frozen as after the last time: without such cycles, when twice as much lives (docs/decisions/024).
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from contextvars import Context
from typing import Final

import structlog

_log = structlog.get_logger(__name__)

YOUNG: Final = 10_000
"""Objects more than were freed that make a collection of them due: two or three milliseconds."""
LEAST: Final = 500_000
"""Frozen objects up to which nothing is due: some 50 MB."""

_NEVER: Final = 1_000_000


class Collector:
    """Sets the process's collector up, for good."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, young: int = YOUNG, least: int = LEAST) -> None:
        """`loop` runs the collections of everything."""
        self._loop = loop
        self._young = young
        self._least = least
        # Frozen objects at which a collection of everything is due, and how many more may be frozen than were when they
        # were counted: to count them is to walk along all of them.
        self._most = self._room = least

    def begin(self) -> None:
        """What is loaded by now lives as long as the process."""
        if sys.version_info >= (3, 14):
            return  # its collections are incremental: they need none of this, and tell of it otherwise
        self._collect_everything()
        gc.set_threshold(self._young, _NEVER, _NEVER)
        gc.callbacks.append(self._collected)

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start" or info["generation"] != 0:
            return
        gc.freeze()
        self._room -= self._young
        if self._room > 0 or self._loop.is_closed():
            return
        frozen = gc.get_freeze_count()
        if frozen < self._most:
            self._room = max(self._most - frozen, self._most // 16)
            return
        self._room = self._most  # until it is done
        # In a context of its own: it is not the work of whoever made the last object.
        self._loop.call_soon_threadsafe(self._collect_everything, context=Context())

    def _collect_everything(self) -> None:
        began = time.perf_counter()
        gc.unfreeze()
        found = gc.collect()
        gc.freeze()
        frozen = gc.get_freeze_count()
        self._most = max(self._least, 2 * frozen)
        self._room = self._most - frozen
        _log.debug("everything was looked at for garbage", found=found, s=round(time.perf_counter() - began, 3))
