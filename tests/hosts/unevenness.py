"""Rollouts on three sandbox services, of which one is full and one is twenty times slower than the third; and many at
once on one service, which may be asked for so many sandboxes a second.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Final

from tests.hosts.fleet import Fleet
from tests.hosts.following import Follower
from tests.hosts.records import CREATIONS, calls

from penstock.client import connect

FULL: Final = "n1"
SLOW: Final = "n2"
SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {FULL: {"max_sandboxes": 1}}
"""The full one admits one sandbox, which the scenario takes."""
TIMES_SLOWER: Final = 20
_ENVIRONMENTS: Final = 16
_NODE: Final = "n0"
_CYCLE_S: Final = 0.4


class Unevenness:
    """One run."""

    def __init__(self, fleet: Fleet, count: int, work_s: float) -> None:
        self.failures: list[str] = []
        self.at: Counter[str] = Counter()
        self._fleet = fleet
        self._count = count
        self._work_s = work_s

    async def go(self, at_once: int) -> None:
        """Run it."""
        slots = asyncio.Semaphore(at_once)
        async with AsyncExitStack() as stack:
            ps = await stack.enter_async_context(connect(self._fleet.endpoints()))
            at_full = await stack.enter_async_context(connect(self._fleet.endpoints(sandbox=FULL, discover=False)))
            await stack.enter_async_context(await at_full.sandboxes.create())
            await stack.enter_async_context(slowed(self._fleet, SLOW))

            async def one(number: int) -> None:
                follower = Follower(ps, "d0", self._work_s, 1, environments=_ENVIRONMENTS)
                async with slots:
                    story = follower.begin(number, 0)
                    await follower.follow(story)
                if story.reward != 1.0:
                    self.failures.append(f"{story.rollout_id}: {story.reason}, reward {story.reward}")
                self.at[story.attempts[-1].node] += 1

            async with asyncio.TaskGroup() as tasks:
                for number in range(self._count):
                    tasks.create_task(one(number))

    def faults(self) -> list[str]:
        """Everything that is not as it must be."""
        found = list(self.failures)
        # Two of the three take work, so its share would be a half.
        if self.at[SLOW] * 4 >= self._count:
            found.append(f"the slow service {SLOW} had {self.at[SLOW]} of {self._count}: half its share, or more")
        if self.at[FULL]:
            found.append(f"the full service {FULL} had {self.at[FULL]}")
        return found

    def lines(self) -> list[str]:
        """The report, for people."""
        return [
            f"rollouts            {sum(self.at.values())}, by sandbox service {dict(sorted(self.at.items()))}",
            f"failures            {len(self.failures)}",
            f"full, slow          {FULL}, {SLOW} ({TIMES_SLOWER} times)",
        ]


class Burst:
    """Rollouts that all begin at once on one service, at which a driver makes at most `most` sandboxes a second."""

    def __init__(self, fleet: Fleet, count: int, most: int) -> None:
        self.failures: list[str] = []
        self._fleet = fleet
        self._count = count
        self._most = most

    async def go(self) -> None:
        """Run it."""
        async with connect(self._fleet.endpoints()) as ps, asyncio.TaskGroup() as tasks:
            follower = Follower(ps, "d0", 0.0, 1, environments=_ENVIRONMENTS)
            for number in range(self._count):
                tasks.create_task(self._one(follower, number))

    async def _one(self, follower: Follower, number: int) -> None:
        story = follower.begin(number, 0)
        await follower.follow(story)
        if story.reward != 1.0:
            self.failures.append(f"{story.rollout_id}: {story.reason}, reward {story.reward}")

    def _asked(self) -> list[float]:
        """When the service was asked for each sandbox and snapshot, by its own log."""
        return sorted(one.began for one in calls(self._fleet.log(_NODE), CREATIONS))

    def faults(self) -> list[str]:
        """Everything that is not as it must be."""
        found, asked = list(self.failures), self._asked()
        if len(asked) < self._count or peak(asked) < self._most / 2:
            found.append(f"{len(asked)} creations, at most {peak(asked)} in a second, show nothing of a limit")
        if peak(asked) > self._most:
            found.append(f"{_NODE} was asked for {peak(asked)} sandboxes in a second, at most {self._most}")
        return found

    def lines(self) -> list[str]:
        """The report, for people."""
        asked = self._asked()
        return [
            f"at once             {self._count} rollouts, failures {len(self.failures)}",
            f"creations           {len(asked)} at {_NODE} in {asked[-1] - asked[0]:.1f} s, "
            f"at most {peak(asked)} in a second, allowed {self._most}",
        ]


def peak(ascending: Sequence[float]) -> int:
    """The most of these times that lie within one second."""
    most = first = 0
    for last, at in enumerate(ascending):
        while ascending[first] <= at - 1.0:
            first += 1
        most = max(most, last + 1 - first)
    return most


@asynccontextmanager
async def slowed(fleet: Fleet, name: str) -> AsyncIterator[None]:
    """A service that gets one part in `TIMES_SLOWER` of its time: it is stopped for the rest."""
    (process,) = fleet.network.hosts[name].processes

    async def stop_and_go() -> None:
        while True:
            os.kill(process.pid, signal.SIGSTOP)
            await asyncio.sleep(_CYCLE_S * (TIMES_SLOWER - 1) / TIMES_SLOWER)
            os.kill(process.pid, signal.SIGCONT)
            await asyncio.sleep(_CYCLE_S / TIMES_SLOWER)

    work = asyncio.create_task(stop_and_go())
    try:
        yield
    finally:
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work
        os.kill(process.pid, signal.SIGCONT)
