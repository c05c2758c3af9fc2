"""Keeps Python's cyclic garbage collector from stalling a service's event loop.

Most objects of a request die by reference counting or live long; gRPC leaves a few young cycles per RPC, which young
collections find. A full collection takes 0.3 s in a process with ten thousand rollouts, and Python runs one whenever
the heap has grown by a quarter. Here, objects that survive one collection are frozen: the collector no longer scans
them, and reference counting still frees them. Only a cycle among them would leak, so a full collection runs when twice
as many objects are frozen as after the last one: without such cycles, when the live heap has doubled
(docs/decisions/024).
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
"""Net allocations (made minus freed) after which a young collection is due; it takes two or three milliseconds."""
LEAST: Final = 500_000
"""Frozen objects below which no full collection is due: about 50 MB."""

_NEVER: Final = 1_000_000


class Collector:
    """Configures the process's collector, permanently."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, young: int = YOUNG, least: int = LEAST) -> None:
        """`loop` runs the full collections."""
        self._loop = loop
        self._young = young
        self._least = least
        # Frozen objects at which a full collection is due, and how many more may be frozen since the last count.
        # Counting walks all of them, so it is rarely done.
        self._most = self._room = least

    def begin(self) -> None:
        """Objects loaded by now live as long as the process: freeze them.

        A collection first would find 2 % of them, for 0.06 to 0.09 s of a processor.
        """
        if sys.version_info >= (3, 14):
            return  # its collections are incremental: none of this is needed, and its callbacks report differently
        gc.freeze()
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
        # In a context of its own: the work does not belong to the task that allocated the last object.
        self._loop.call_soon_threadsafe(self._collect_everything, context=Context())

    def _collect_everything(self) -> None:
        began = time.perf_counter()
        gc.unfreeze()
        found = gc.collect()
        gc.freeze()
        frozen = gc.get_freeze_count()
        self._most = max(self._least, 2 * frozen)
        self._room = self._most - frozen
        _log.debug("full garbage collection ended", found=found, s=round(time.perf_counter() - began, 3))
