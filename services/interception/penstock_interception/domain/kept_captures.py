"""Captures that are kept until their driver has stored them elsewhere: how much they are, and which are discarded when
no driver does.

Invariants: nothing is discarded within the retention, which all captures have; and for room, nothing of a driver that
is there: its new rollouts are refused instead. What is discarded is recorded, the newest `MOST_RECORDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from penstock_interception.domain.state import Rollout
from penstock_interception.domain.totals import journal_bytes

MOST_RECORDS: Final = 10_000
"""How many discarded captures are remembered."""


@dataclass(frozen=True, slots=True)
class CaptureLimits:
    """The most captures that are kept, their bytes in the journal, and the seconds since their rollouts' ends."""

    count: int = 50_000
    size_bytes: int = 32 << 30
    age_s: float = 7 * 24 * 3600.0


CAPTURE_LIMITS: Final = CaptureLimits()


class Why(StrEnum):
    """The limit that a capture was discarded for."""

    AGE = "age"
    COUNT = "count"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class Discarded:
    """A capture that was deleted before its driver had stored it. Times in seconds since 1970."""

    rollout_id: str
    namespace: str
    run_id: str | None
    driver_id: str
    closed: float
    at: float
    size_bytes: int
    why: Why


class KeptCaptures:
    """The captures kept now, and those discarded, oldest first."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._kept: dict[str, tuple[Rollout, int]] = {}
        self._discarded: dict[str, Discarded] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Rollout]:
        return (rollout for rollout, _ in self._kept.values())

    def add(self, rollout: Rollout) -> None:
        """Counts a rollout that is closed, if its capture is kept."""
        if rollout.is_kept and rollout.id not in self._kept:
            size = journal_bytes(rollout)
            self._kept[rollout.id] = rollout, size
            self.size_bytes += size

    def remove(self, rollout: Rollout) -> None:
        """Counts a rollout no longer, if it was counted."""
        kept = self._kept.get(rollout.id)
        if kept is not None and kept[0] is rollout:
            del self._kept[rollout.id]
            self.size_bytes -= kept[1]

    def is_full(self, limits: CaptureLimits) -> bool:
        """Whether no further rollout may be opened whose capture will be kept."""
        return len(self._kept) >= limits.count or self.size_bytes >= limits.size_bytes

    def beyond(
        self, limits: CaptureLimits, now: float, retention_s: float, is_gone: Callable[[str], bool]
    ) -> list[Discarded]:
        """Returns what is to be discarded, oldest first: what is too old, and what takes the room of a driver that is
        gone (`is_gone`, by its id) until others have some.
        """
        found: list[Discarded] = []
        count, size = len(self._kept), self.size_bytes
        ended = ((rollout.closed or rollout.created, rollout, size) for rollout, size in self._kept.values())
        for closed, rollout, own in sorted(ended, key=lambda item: item[0]):
            if now - closed < retention_s:
                break
            why = None
            if now - closed >= limits.age_s:
                why = Why.AGE
            elif (count >= limits.count or size >= limits.size_bytes) and is_gone(rollout.spec.driver_id):
                why = Why.COUNT if count >= limits.count else Why.BYTES
            if why is not None:
                spec = rollout.spec
                record = Discarded(rollout.id, spec.namespace, spec.run_id, spec.driver_id, closed, now, own, why)
                found.append(record)
                count, size = count - 1, size - own
        return found

    # What is gone ----------------------------------------------------------------------------------------------------

    def record(self, discarded: Iterable[Discarded]) -> None:
        """Remembers discarded captures."""
        for one in discarded:
            self._discarded.pop(one.rollout_id, None)
            self._discarded[one.rollout_id] = one
        while len(self._discarded) > MOST_RECORDS:
            del self._discarded[next(iter(self._discarded))]

    def discarded(self, rollout_id: str) -> Discarded | None:
        """Returns how the capture of this rollout was discarded, if it was."""
        return self._discarded.get(rollout_id)

    def discarded_since(self, moment: float) -> list[Discarded]:
        """Returns the captures that were discarded since then, the newest first."""
        found = []
        for one in reversed(self._discarded.values()):
            if one.at < moment:
                break
            found.append(one)
        return found
