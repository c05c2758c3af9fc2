"""How much disk the recordings of branches may take, for each namespace.

Branches of one request share one file, those of different requests do not: without a bound, a team could have one long
rollout copied ten thousand times, by as many requests, into the queue.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from penstock_chassis.errors import ResourceExhausted
from penstock_driver.rollouts.recovery.replayed_answers import RecordingFile
from penstock_driver.store.records import Records


@dataclass(slots=True)
class Recorded:
    """The recording of one request. It counts until all of its rollouts have ended, or `BranchRoom.drop`."""

    namespace: str
    size: int = 0
    rollout_ids: Collection[str] = ()


class BranchRoom:
    """The recordings that branches which run or wait have, and those that are being written."""

    def __init__(self, most: int, records: Records, directory: Path, is_running: Callable[[str], bool]) -> None:
        """`most` is the bytes of each namespace; `directory` has the recordings."""
        self._most = most
        self._records = records
        self._directory = directory
        self._is_running = is_running
        self._used: Counter[str] = Counter()
        self._kept: dict[str, Recorded] = {}
        """By group."""
        self._reading = asyncio.Lock()
        self._is_read = False

    async def open(self, namespace: str) -> Recorded:
        """Return what the recording of a new request is counted in."""
        async with self._reading:
            if not self._is_read:
                await self._read()
                self._is_read = True
        for group_id, one in list(self._kept.items()):
            if not any(map(self._is_running, one.rollout_ids)):
                del self._kept[group_id]
                self.drop(one)
        return Recorded(namespace)

    def grow(self, one: Recorded, size: int) -> None:
        """Count further bytes before they are written; ResourceExhausted (RECORDINGS_FULL) if there is no room."""
        used = self._used[one.namespace]
        if used + size > self._most:
            raise ResourceExhausted(
                f"the recordings of branches of namespace {one.namespace} that run or wait take {used} bytes, and may "
                f"take {self._most} (max_recording_bytes): wait for some to end, or ask for branches of one call in "
                "one request, which has one recording",
                reason="RECORDINGS_FULL",
                retry_after_s=5.0,
            )
        one.size += size
        self._used[one.namespace] += size

    def keep(self, group_id: str, rollout_ids: Collection[str], one: Recorded) -> None:
        """Count it as long as one of these runs. Of an equal concurrent request, the first one is counted."""
        one.rollout_ids = rollout_ids
        if self._kept.setdefault(group_id, one) is not one:
            self.drop(one)

    def drop(self, one: Recorded) -> None:
        """Count it no more."""
        self._used[one.namespace] -= one.size
        one.size = 0

    async def _read(self) -> None:
        """Count what the last process left."""
        found: dict[str, Recorded] = {}
        for rollout_id, group_id, namespace in await self._records.unended_branches():
            one = found.setdefault(group_id, Recorded(namespace))
            one.rollout_ids = [*one.rollout_ids, rollout_id]
        sizes = await asyncio.to_thread(
            lambda: {name: _size(self._directory, one.rollout_ids) for name, one in found.items()}
        )
        for group_id, one in found.items():
            one.size = sizes[group_id]
            self._used[one.namespace] += one.size
        self._kept |= found


def _size(directory: Path, rollout_ids: Collection[str]) -> int:
    """Bytes of the files of these rollouts; those that they share count once."""
    files = (RecordingFile(directory, rollout_id).identity() for rollout_id in rollout_ids)
    return sum(dict(found for found in files if found is not None).values())
