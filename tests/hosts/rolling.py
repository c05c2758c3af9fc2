"""A rolling upgrade: every service is stopped by SIGTERM and started again, one after another, while rollouts run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Final

from tests.hosts.fleet import Fleet
from tests.hosts.following import Follower
from tests.hosts.records import Story

from penstock.client import connect

_DRAIN_S: Final = 300.0
SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    service: {"drain_s": _DRAIN_S} for service in ("sandbox", "inference", "interception", "driver")
}
_ORDER: Final = ("sandbox", "inference", "interception", "driver")
_BEGIN: Final = 0.1
"""Share of the rollouts that ends before the first restart."""


class Rolling:
    """One run. Each rollout has one attempt."""

    def __init__(self, fleet: Fleet, count: int, work_s: float) -> None:
        self.stories: list[Story] = []
        self.exits: dict[str, int] = {}
        """Exit status of each service that was stopped."""
        self.upkeep_s = self.seconds = 0.0
        self._ended = 0
        self._fleet = fleet
        self._count = count
        self._work_s = work_s

    async def go(self, at_once: int) -> None:
        """Run it."""
        fleet, began = self._fleet, time.monotonic()
        slots, begin = asyncio.Semaphore(at_once), asyncio.Event()
        async with AsyncExitStack() as stack:
            names = fleet.size.names("driver")
            drivers = [await stack.enter_async_context(connect(fleet.endpoints(driver=name))) for name in names]

            async def one(number: int) -> None:
                index = number % len(drivers)
                follower = Follower(drivers[index], names[index], self._work_s, 1)
                async with slots:
                    story = follower.begin(number, 0)
                    self.stories.append(story)
                    await follower.follow(story)
                self._ended += 1
                if self._ended >= _BEGIN * self._count:
                    begin.set()

            async with asyncio.TaskGroup() as tasks:
                for number in range(self._count):
                    tasks.create_task(one(number))
                await begin.wait()
                await self._upkeep(began)
        self.seconds = time.monotonic() - began

    async def _upkeep(self, began: float) -> None:
        """What is done to the services while rollouts run: all are restarted."""
        first = time.monotonic()
        for service in _ORDER:
            for name in self._fleet.size.names(service):
                (process,) = self._fleet.network.hosts[name].processes
                process.terminate()
                self.exits[name] = await asyncio.to_thread(process.wait)
                self._fleet.network.hosts[name].processes.clear()
                self._fleet.spawn(name)
                await self._fleet.serving(name)
                print(f"{time.monotonic() - began:6.1f} s  {name} is restarted; {self._ended} ended", flush=True)
        self.upkeep_s = time.monotonic() - first

    def faults(self) -> list[str]:
        """Everything that is not as it must be."""
        found = [f"{name} stopped with status {status}" for name, status in self.exits.items() if status]
        for story in self.stories:
            if story.reward != 1.0:
                found.append(f"{story.rollout_id}: {story.reason}, reward {story.reward}")
            found += [f"{story.rollout_id}: an attempt failed: {one.reason}" for one in story.attempts if one.reason]
        return found

    def lines(self) -> list[str]:
        """The report, for people."""
        rewarded = sum(story.reward == 1.0 for story in self.stories)
        failed = sum(bool(one.reason) for story in self.stories for one in story.attempts)
        slowest = max((story.ended - story.created for story in self.stories), default=0.0)
        return [
            f"rollouts            {len(self.stories)} in {self.seconds:.1f} s, rewarded {rewarded}",
            f"failed attempts     {failed}",
            f"stopped or drained  {len(self.exits)} services, in {self.upkeep_s:.1f} s",
            f"slowest rollout     {slowest:.1f} s",
        ]
