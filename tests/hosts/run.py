"""Rollouts on a fleet that loses hosts: drives them, and records what their clients see."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress

from tests.hosts import keys, left
from tests.hosts.fleet import Fleet
from tests.hosts.following import Follower, list_ends, read
from tests.hosts.losses import How, Loss, drawn
from tests.hosts.records import Lost, Seen

from penstock.client import Limits, Penstock, PenstockError, connect

_SHORT = Limits(prepare=60, setup=30, agent=60, verify=30)
_PAUSE_S = 0.2
_ORPHANS_S = 540.0
"""Sandboxes of a driver that lost its disk end with their leases: agent and verifier of `_SHORT`, 390 s beside, and a
minute to spare."""


class Run:
    """One run. The client's rollout `number` is at driver `number` modulo their count, under an id that it chooses."""

    def __init__(
        self,
        fleet: Fleet,
        count: int,
        work_s: float,
        max_attempts: int,
        losses: Sequence[Loss],
        parts: int = 1,
        environments: int = 1,
        seed: int = 1,
    ) -> None:
        gates, dice = fleet.size.names("interception"), random.Random(seed)
        self.seen = Seen(max_attempts, (*fleet.size.names("sandbox"), *gates))
        self.seen.engines = {gate: fleet.engine_of(gate) for gate in gates}
        self._fleet = fleet
        self._count = count
        self._work_s = work_s
        self._parts = parts
        self._environments = environments
        self._orphans = any(loss.how is How.DISK and loss.name.startswith("d") for loss in losses)
        self._pending = drawn(losses, fleet.of_letter, dice)
        self._numbers = dice.sample(range(count), count)
        """In the order in which they begin: how long each takes depends on its number."""
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
                for number in self._numbers:
                    tasks.create_task(self._one(number, slots))
            self.seen.seconds = time.monotonic() - self._began
            for task in self._losing:  # which may grow meanwhile
                await task  # those that come back are back
            await self._read_again()
            await self._list()
        self.seen.left, self.seen.left_s = await left.until_nothing(
            self._fleet, self._living(), _ORPHANS_S if self._orphans else left.LEFT_S
        )
        self.seen.take_answers([self._fleet.answers_file(name) for name in self._fleet.size.names("inference")])
        self.seen.disturbances = self.seen.losses
        self.seen.undisturbed = self._fleet.answers([loss.name for loss in self.seen.losses])
        return self.seen

    async def _one(self, number: int, slots: asyncio.Semaphore) -> None:
        names = list(self._drivers)
        driver = names[number % len(names)]
        limits = _SHORT if self._orphans else None
        follower = Follower(
            self._drivers[driver],
            driver,
            self._work_s,
            self.seen.max_attempts,
            environments=self._environments,
            limits=limits,
            parts=self._parts,
        )
        async with slots:
            while self._pending and self._ended >= self._pending[0].share * self._count:
                self._losing.append(asyncio.create_task(self._lose(self._pending.pop(0))))
            await follower.follow_all(number, self.seen)
            self._ended += 1

    async def _read_again(self) -> None:
        """A trajectory that was at a gate which was away is there again, if the gate is."""
        for story in self.seen.stories:
            if story.unread:
                with suppress(PenstockError):
                    await read(story, await self._drivers[story.driver].rollouts.attach(story.rollout_id))

    async def _list(self) -> None:
        """What each driver has of this run."""
        for name, ps in self._drivers.items():
            try:
                self.seen.listed |= await list_ends(ps)
            except PenstockError:
                self.seen.unlisted_drivers.add(name)

    async def _lose(self, loss: Loss) -> None:
        host, gates = self._fleet.network.hosts[loss.name], self._fleet.size.names("interception")
        void = self._void(loss)
        while not void and self._has_keys(loss) and self._ended < self._count:
            await asyncio.sleep(_PAUSE_S)  # a cut that ends no attempt shows nothing
            void = self._void(loss)
        host.cut()
        lost = Lost(loss.name, time.time(), running=self._running_at(loss.name))
        self.seen.losses.append(lost)
        if loss.how is not How.LINK:
            await asyncio.to_thread(host.kill)
        self._say(f"{loss.name} is lost ({loss.how}); {self._ended} of {self._count} have ended")
        if self.seen.during is None:
            self.seen.during = Counter()
            self._losing.append(asyncio.create_task(self._look(self.seen.during)))
        if loss.back_s is None:
            return
        self.seen.keys += len(void)
        await asyncio.sleep(loss.back_s)
        if loss.name not in gates:
            await self._until_refused(void, gates)
        host.mend()
        if loss.how is How.DISK:
            self.seen.wiped[loss.name] = lost.at
            shutil.rmtree(self._fleet.folder / "state" / loss.name)
        if loss.how is not How.LINK:
            self._fleet.spawn(loss.name)
        lost.back = time.time()
        self._say(f"{loss.name} is back")
        await self._fleet.serving(loss.name)
        if loss.name in gates and void:
            accepted, took = await keys.until_refused(self._fleet, void, loss.name)
            self.seen.accepted_keys += accepted
            self.seen.refused_s = max(self.seen.refused_s, took)

    async def _until_refused(self, void: Sequence[keys.Key], gates: Sequence[str]) -> None:
        """While their node is still cut: its attempts end a while afterwards, on a busy machine a long while."""
        for gate in sorted(self._living().intersection(gates)):
            try:
                accepted, _ = await keys.until_refused(self._fleet, void, gate)
            except OSError:
                if gate in self._living():
                    raise
                continue  # the gate is lost meanwhile
            self.seen.accepted_keys += accepted

    async def _look(self, found: Counter[str]) -> None:
        """Counts what living hosts have, until each kind of it was seen or all rollouts have ended."""
        while self._ended < self._count and not found.keys() >= left.RUNNING:
            with suppress(PenstockError):  # another host is lost meanwhile
                found |= Counter(item.split()[1] for item in await left.left(self._fleet, self._living()))
            await asyncio.sleep(left.PAUSE_S)

    def _running_at(self, name: str) -> int:
        running = (story for story in self.seen.stories if not story.ends)
        if name.startswith("d"):
            return sum(story.driver == name for story in running)
        return sum(bool(one.attempts) and name in (one.attempts[-1].node, one.attempts[-1].gate) for one in running)

    @staticmethod
    def _has_keys(loss: Loss) -> bool:
        """Whether agents' keys outlive their attempts: the host's processes go on."""
        return loss.how is How.LINK and loss.back_s is not None and loss.name[0] in "ng"

    def _void(self, loss: Loss) -> list[keys.Key]:
        """Keys of the agents whose attempts will be over because a node or a gate is cut."""
        if not self._has_keys(loss):
            return []
        if loss.name.startswith("n"):
            return keys.on(self._fleet, loss.name)
        running = (story for story in self.seen.stories if not story.ends and story.attempts)
        return keys.at(self._fleet, {one.rollout_id for one in running if one.attempts[-1].gate == loss.name})

    def _living(self) -> set[str]:
        return set(self._fleet.network.hosts) - {loss.name for loss in self.seen.losses if loss.back is None}

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", flush=True)
