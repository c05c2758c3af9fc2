"""Places for what is in memory while it is sent: its readers may be slow, or not read on at all.

Invariant: the readers of one namespace take no place of another's.
"""

from __future__ import annotations

import asyncio
from typing import Final
from weakref import WeakValueDictionary

PLACES: Final = 16
"""For each namespace."""


class SlowReaders:
    """The places of all namespaces. One that nobody holds or waits for costs no memory."""

    def __init__(self) -> None:
        self._places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def of(self, namespace: str) -> asyncio.Semaphore:
        """The places of a namespace. Hold one, by `async with`, from before the reading to the end of the sending."""
        return self._places.setdefault(namespace, asyncio.Semaphore(PLACES))
