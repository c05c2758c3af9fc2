"""How much sandboxes have written, measured for those who watch.

Invariants: a sandbox is measured once at a time, for all who ask meanwhile, and goes on being measured when they have
gone; measuring has threads of its own and an end, so that whatever sandboxes make on disk keeps nothing else waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from penstock_sandbox.backends.local import layers
from penstock_sandbox.spawner import descents

AT_ONCE: Final = 2
MOST_ENTRIES: Final = 200_000
"""Of one sandbox; about a second's work."""


class DiskUse:
    """Measures upper layers. ``size`` gives bytes, or raises descents.TooMuch beyond a number of entries."""

    def __init__(self, size: Callable[[Path, int], int] = layers.size, most_entries: int = MOST_ENTRIES) -> None:
        self._size = size
        self._most_entries = most_entries
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="disk-use")
        self._under_way: dict[Path, asyncio.Future[int | None]] = {}

    async def of(self, upper: Path) -> int | None:
        """Bytes; None where there is too much to look at, or somebody made a directory that this user cannot enter."""
        measuring = self._under_way.get(upper)
        if measuring is None:
            measuring = asyncio.get_running_loop().run_in_executor(self._threads, self._measure, upper)
            self._under_way[upper] = measuring
            measuring.add_done_callback(lambda _: self._under_way.pop(upper))
        return await asyncio.shield(measuring)

    def _measure(self, upper: Path) -> int | None:
        try:
            return self._size(upper, self._most_entries)
        except (descents.TooMuch, PermissionError):
            return None

    def close(self) -> None:
        """Take nothing more; what is being measured ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)
