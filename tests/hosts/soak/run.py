"""Rollouts in groups while a storm blows, then in the calm: drives them, and records what their clients see."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Final, TypeVar

from tests.hosts import left, model
from tests.hosts.fleet import Fleet
from tests.hosts.following import Follower
from tests.hosts.records import Seen, Story
from tests.hosts.soak.account import Account
from tests.hosts.soak.memory import Memory
from tests.hosts.soak.plan import ENGINES, LABEL, PARTS, TRAINER, TRAINER_HOST, Plan
from tests.hosts.soak.storm import Storm

from penstock.client import AlreadyExists, GroupHandle, Mode, Penstock, PenstockError, Unavailable, connect
from penstock.client.errors import DeadlineExceeded, NotFound

GROUP_LIMIT_S: Final = 900.0
"""Guard on one group."""
_ENVIRONMENTS: Final = 8
_PAUSE_S: Final = 0.5
_READ_S: Final = 2.0
_AWAY: Final = (Unavailable, DeadlineExceeded)

T = TypeVar("T")


class Soak:
    """One run."""

    def __init__(self, fleet: Fleet, plan: Plan) -> None:
        places = (*fleet.size.names("sandbox"), *fleet.size.names("interception"))
        self._fleet = fleet
        self._plan = plan
        self._began = time.monotonic()
        self._ended = 0
        self._full = False
        self._storm = Storm(fleet, plan, self._progress, self._say)
        self._memory = Memory()
        self._dice = random.Random(plan.seed)
        self.account = Account(plan, Seen(plan.max_attempts, places), self._storm, self._memory)

    async def go(self) -> Account:
        """Run it."""
        account, seen = self.account, self.account.seen
        async with AsyncExitStack() as stack:
            self._storm.start_trainer()
            drivers = [
                await stack.enter_async_context(connect(self._fleet.endpoints(driver=name)))
                for name in self._fleet.size.names("driver")
            ]
            reading = asyncio.create_task(self._read())
            storm = asyncio.create_task(self._blow())
            try:
                await self._groups(drivers)
                await storm  # what is away comes back
            finally:
                for task in (storm, reading):
                    task.cancel()
                await asyncio.wait([storm, reading])
            seen.seconds = time.monotonic() - self._began
            for ps in drivers[:1]:
                account.kept += [one.rollout_id async for one in ps.rollouts.list(run_id="hosts")]
        hosts = set(self._fleet.network.hosts) - {TRAINER_HOST}
        seen.left, seen.left_s = await left.until_nothing(self._fleet, hosts)
        names = [*self._fleet.size.names("inference"), TRAINER_HOST]
        seen.take_answers([self._fleet.answers_file(name) for name in names])
        account.load = os.getloadavg()[0]
        return account

    async def _groups(self, drivers: list[Penstock]) -> None:
        slots = asyncio.Semaphore(max(1, self._plan.at_once // self._plan.group))
        names = self._fleet.size.names("driver")
        async with asyncio.TaskGroup() as tasks:
            for number in range(-(-self._plan.rollouts // self._plan.group)):
                await slots.acquire()
                if self._full or time.monotonic() - self._began > self._plan.seconds:
                    return
                size = min(self._plan.group, self._plan.rollouts - number * self._plan.group)
                index = number % len(drivers)
                work = self._group(drivers[index], names[index], number, size)
                tasks.create_task(work).add_done_callback(lambda _: slots.release())

    async def _group(self, ps: Penstock, driver: str, number: int, size: int) -> None:
        """One group to its deletion. Its rollouts' stories are numbered through all groups."""
        seen, first = self.account.seen, number * self._plan.group
        follower = Follower(ps, driver, self._plan.work_s, self._plan.max_attempts)
        group_id = f"soak-{number}"
        stories = [Story(f"{group_id}-{index}", first + index, driver, created=time.time()) for index in range(size)]
        seen.stories += stories
        try:
            async with asyncio.timeout(GROUP_LIMIT_S):
                handle = await _insisting(lambda: self._create(ps, number, size))
                async with asyncio.TaskGroup() as tasks:
                    for story in stories:
                        tasks.create_task(self._follow(ps, follower, story))
                ended = await _insisting(handle.wait)
                if len(ended.result_rollout_ids) != sum(story.reward is not None for story in stories):
                    self.account.faults_seen.append(f"{group_id} counts {len(ended.result_rollout_ids)} results")
                with suppress(NotFound):  # the answer to an earlier deletion was lost
                    await _insisting(handle.delete)
        except* (PenstockError, TimeoutError) as errors:
            for story in stories:
                if not story.ends:
                    seen.refused[story.number] = "; ".join(f"{type(one).__name__}: {one}" for one in errors.exceptions)
            self.account.faults_seen.append(f"{group_id}: {errors.exceptions}")

    async def _follow(self, ps: Penstock, follower: Follower, story: Story) -> None:
        handle = await _insisting(lambda: ps.rollouts.attach(story.rollout_id))
        await follower.observe(story, handle)
        now = await _insisting(handle.refresh)
        if now.outcome is not None:
            failure, reward = now.outcome.failure, now.outcome.reward
            self.account.seen.listed[story.rollout_id] = (
                "" if failure is None else failure.reason,
                None if reward is None else reward.value,
            )
            if failure is not None:
                self.account.causes[story.rollout_id] = str(failure.cause)
        self._ended += 1
        if self._ended % 200 == 0:
            self._say(f"{self._ended} have ended; load {os.getloadavg()[0]:.0f}")

    async def _create(self, ps: Penstock, number: int, size: int) -> GroupHandle:
        is_trained = number % 3 == 0
        try:
            return await ps.groups.create(
                model.task(number, self._plan.work_s, _ENVIRONMENTS, PARTS),
                "shell",
                size,
                group_id=f"soak-{number}",
                mode=Mode.INTERCEPTION_GATE if is_trained else Mode.TRANSPARENT_PROXY,
                labels={LABEL: TRAINER if is_trained else ENGINES},
                max_attempts=self._plan.max_attempts,
                run_id="hosts",
            )
        except AlreadyExists:  # the answer was lost
            return await ps.groups.attach(f"soak-{number}")

    async def _blow(self) -> None:
        await self._storm.blow()
        self._memory.calm_from = self._ended
        self._say(f"calm from here; {self._ended} have ended")

    async def _read(self) -> None:
        while True:
            if self._memory.read(self._fleet, self._ended) > self._plan.memory_bytes and not self._full:
                self._full = True
                self.account.faults_seen.append("the services have more memory than they may; nothing new is begun")
            await asyncio.sleep(_READ_S)

    def _progress(self) -> float:
        return max(self._ended / self._plan.rollouts, (time.monotonic() - self._began) / self._plan.seconds)

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", flush=True)


async def _insisting(work: Callable[[], Awaitable[T]]) -> T:
    """Does it until the services are there to do it."""
    while True:
        try:
            return await work()
        except _AWAY:
            await asyncio.sleep(_PAUSE_S)
