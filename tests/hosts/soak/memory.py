"""Memory and open files of the services over a soak, and whether they grow where nothing is lost any more."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from tests.hosts.fleet import Fleet

GROWTH_BYTES: Final = 8 << 20
"""What a service may have more at the end of the second half of the calm than at its begin: allocators, connections."""
PER_ROLLOUT_BYTES: Final = 12 << 10
"""And for each rollout that ended in between: a gate keeps 10 KB of each until its ring of changes has gone round."""
GROWTH_FILES: Final = 24
LEAST: Final = 6
"""Fewer readings say nothing of growth."""
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Reading:
    """Of one process."""

    ended: int
    """Rollouts that had ended."""
    pid: int
    resident: int
    files: int


@dataclass
class Growth:
    """Of one service over the second half of the calm, by the straight line through its readings."""

    name: str
    rollouts: int
    first: float
    last: float
    files: int
    """The least that were open in the second half of the readings, minus the least in the first: running sandboxes have
    some files, at one moment here and at another there."""
    readings: int

    @property
    def per_rollout(self) -> float:
        """Bytes."""
        return (self.last - self.first) / max(1, self.rollouts)

    @property
    def is_flat(self) -> bool:
        """Whether it stays within the bounds."""
        return self.last - self.first <= GROWTH_BYTES + PER_ROLLOUT_BYTES * self.rollouts and self.files <= GROWTH_FILES


@dataclass
class Memory:
    """All readings, by service. `calm_from` is the number of rollouts that had ended at the begin of the calm."""

    readings: dict[str, list[Reading]] = field(default_factory=dict)
    calm_from: int | None = None
    peak: int = 0
    """The most that all services had together."""

    def read(self, fleet: Fleet, ended: int) -> int:
        """Read every service that runs; the sum of their resident bytes."""
        total = 0
        for name, host in fleet.network.hosts.items():
            if not host.processes:
                continue
            pid = host.processes[-1].pid
            with suppress(OSError, IndexError):  # it was killed meanwhile
                resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
                files = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
                self.readings.setdefault(name, []).append(Reading(ended, pid, resident, files))
                total += resident
        self.peak = max(self.peak, total)
        return total

    def growths(self) -> Iterator[Growth]:
        """Of each service, over the second half of the calm."""
        if self.calm_from is None:
            return
        last = max((one[-1].ended for one in self.readings.values()), default=0)
        middle = self.calm_from + (last - self.calm_from) // 2
        for name, readings in sorted(self.readings.items()):
            late = [one for one in readings if one.ended >= middle and one.pid == readings[-1].pid]
            if len(late) >= LEAST:
                yield _growth(name, late)


def _growth(name: str, late: Sequence[Reading]) -> Growth:
    ended = np.array([one.ended for one in late], float)
    resident = np.array([one.resident for one in late], float)
    slope, at_zero = np.polyfit(ended, resident, 1) if np.ptp(ended) else (0.0, resident.mean())
    first, last = (float(at_zero + slope * moment) for moment in (ended[0], ended[-1]))
    before, after = (min(one.files for one in half) for half in (late[: len(late) // 2], late[len(late) // 2 :]))
    return Growth(name, int(np.ptp(ended)), first, last, after - before, len(late))
