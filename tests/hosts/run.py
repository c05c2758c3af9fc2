"""Rollouts on a fleet that loses hosts: drives them, and records what their clients see."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack

from tests.hosts import keys, left
from tests.hosts.fleet import Fleet
from tests.hosts.following import Follower
from tests.hosts.losses import How, Loss
from tests.hosts.records import RESTARTED, Lost, Seen

from penstock.client import Penstock, PenstockError, connect

LIMIT_S = 600.0
"""Guard on one rollout, its repetitions included."""


class Run:
    """One run. The client's rollout `number` is at driver `number` modulo their count, under an id that it chooses."""

    def __init__(self, fleet: Fleet, count: int, work_s: float, max_attempts: int, losses: Sequence[Loss]) -> None:
        self.seen = Seen(max_attempts, (*fleet.size.names("sandbox"), *fleet.size.names("interception")))
        self._fleet = fleet
        self._count = count
        self._work_s = work_s
        self._pending = sorted(losses, key=lambda loss: loss.share)
        self._losing: list[asyncio.Task[None]] = []
        self._drivers: dict[str, Penstock] = {}
        self._ended = 0
        self._began = time.monotonic()

    async def go(self, at_once: int) -> Seen:
        """Run all rollouts, `at_once` at a time, and look at what is left afterwards."""
        slots = asyncio.Semaphore(at_once)
        async with AsyncExitStack() as stack:
            for name in self._fleet.size.names("driver"):
                self._drivers[name] = await stack.enter_async_context(connect(self._fleet.endpoints(driver=name)))
            async with asyncio.TaskGroup() as tasks:
                for number in range(self._count):
                    tasks.create_task(self._one(number, slots))
            self.seen.seconds = time.monotonic() - self._began
            await asyncio.gather(*self._losing)  # those that come back are back
            await self._list()
        self.seen.left, self.seen.left_s = await left.until_nothing(self._fleet, self._living())
        self.seen.answers = self._fleet.answers()
        return self.seen

    async def _one(self, number: int, slots: asyncio.Semaphore) -> None:
        names = list(self._drivers)
        driver = names[number % len(names)]
        follower = Follower(self._drivers[driver], driver, self._work_s, self.seen.max_attempts)
        async with slots:
            while self._pending and self._ended >= self._pending[0].share * self._count:
                self._losing.append(asyncio.create_task(self._lose(self._pending.pop(0))))
            try:
                async with asyncio.timeout(LIMIT_S):
                    for generation in range(10):
                        story = follower.begin(number, generation)
                        self.seen.stories.append(story)
                        await follower.follow(story)
                        if story.reason != RESTARTED:
                            break
            except (PenstockError, TimeoutError) as error:
                self.seen.refused[number] = f"{type(error).__name__}: {error}"
            self._ended += 1

    async def _list(self) -> None:
        """What each driver has of this run."""
        for name, ps in self._drivers.items():
            try:
                async for one in ps.rollouts.list(run_id="hosts"):
                    end = None
                    if one.outcome is not None:
                        failure, reward = one.outcome.failure, one.outcome.reward
                        end = ("" if failure is None else failure.reason, None if reward is None else reward.value)
                    self.seen.listed[one.rollout_id] = end
            except PenstockError:
                self.seen.unlisted_drivers.add(name)

    async def _lose(self, loss: Loss) -> None:
        host, gates = self._fleet.network.hosts[loss.name], self._fleet.size.names("interception")
        host.cut()
        lost = Lost(loss.name, time.time())
        self.seen.losses.append(lost)
        if loss.how is How.KILL:
            await asyncio.to_thread(host.kill)
        self._say(f"{loss.name} is lost ({loss.how})")
        if self.seen.during is None:
            self.seen.during = {}
            found = await left.left(self._fleet, self._living())
            self.seen.during = Counter(item.split()[1] for item in found)
        void = keys.on(self._fleet, loss.name) if loss.name.startswith("n") and loss.how is How.LINK else []
        if loss.back_s is None:
            return
        await asyncio.sleep(loss.back_s)
        if void:
            self.seen.keys += len(void)
            living = sorted(self._living().intersection(gates))
            self.seen.accepted_keys += await keys.accepted(self._fleet, void, living)
        host.mend()
        if loss.how is How.KILL:
            self._fleet.spawn(loss.name)
        lost.back = time.time()
        self._say(f"{loss.name} is back")
        await self._fleet.serving(loss.name)

    def _living(self) -> set[str]:
        return set(self._fleet.network.hosts) - {loss.name for loss in self.seen.losses if loss.back is None}

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", flush=True)
