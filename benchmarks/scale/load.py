"""The load: groups of rollouts whose agents all wait for their model at one moment, and then go on to their ends."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks.gate.programs import Program
from benchmarks.scale import world
from penstock.client import Completion, FailureCause, InterceptSession, ModelCall, Penstock, PenstockError

LABELS: Final = {"bench": "scale"}
GROUP: Final = 50
"""Rollouts of a group."""
CREATING: Final = 8
"""Groups that are created at once."""
ATTEMPTS: Final = 4
"""Of a rollout: services are killed."""
_LOOK_S: Final = 0.2
_PROBE_S: Final = 0.5
GENERATIONS: Final = 10
"""How often a trainer creates a rollout again whose services were killed under it."""


class Model:
    """A trainer that answers each call `latency_s` after it came, and first ones not before `free`.

    After that, what waits is answered evenly over `spread_s`, as it would be had the rollouts begun one by one.
    """

    def __init__(self, session: InterceptSession, replies: Sequence[Completion], latency_s: float) -> None:
        self.session = session
        self.latency_s = latency_s
        self.calls = 0
        self._replies = replies
        self._held: list[asyncio.Future[None]] | None = None

    async def answer_all(self) -> None:
        """Until the session ends."""
        async with asyncio.TaskGroup() as tasks:
            async for call in self.session.calls():
                tasks.create_task(self._answer(call))

    def hold(self) -> None:
        """Holds first calls from now on."""
        self._held = []

    def free(self, spread_s: float) -> None:
        """Answers what is held, and later calls after their latency alone."""
        held, self._held = self._held or [], None
        loop = asyncio.get_running_loop()
        for number, one in enumerate(held):
            loop.call_later(spread_s * number / len(held), _set, one)

    async def _answer(self, call: ModelCall) -> None:
        self.calls += 1
        began = time.monotonic()
        if self._held is not None and not call.index:
            held = asyncio.get_running_loop().create_future()
            self._held.append(held)
            await held
        await asyncio.sleep(max(0.0, self.latency_s - (time.monotonic() - began)))
        try:
            await call.deliver(self._replies[min(call.index, len(self._replies) - 1)])
        except PenstockError:
            # Its rollout has ended meanwhile, or its gate is away: the gate asks again for what is still wanted.
            return


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


@dataclass(slots=True)
class Ends:
    """How the rollouts ended: by reason, "" = with their reward; and the ids that clients received."""

    by_reason: Counter[str] = field(default_factory=Counter)
    accepted: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    again: int = 0
    """How many were created again."""
    wrong: list[str] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Rollouts with their reward."""
        return self.by_reason[""]


def begin(ps: Penstock, count: int, ends: Ends) -> list[asyncio.Task[None]]:
    """So many rollouts, in groups."""
    sizes = [min(GROUP, count - start) for start in range(0, count, GROUP)]
    creating = asyncio.Semaphore(CREATING)
    return [asyncio.create_task(create(ps, size, ends, creating)) for size in sizes]


async def create(ps: Penstock, count: int, ends: Ends, creating: asyncio.Semaphore) -> None:
    """One group, to its end; those that a killed service ended, honestly and without a reward, are created again."""
    for generation in range(GENERATIONS):
        if not count:
            return
        is_last = generation == GENERATIONS - 1
        async with creating:
            handle = await ps.groups.create(world.task(), "shell", count, labels=LABELS, max_attempts=ATTEMPTS)
        ends.accepted |= set(handle.rollout_ids)
        count = 0
        for result in await handle.results():
            outcome = result.outcome
            reason = "" if outcome.failure is None else outcome.failure.reason
            ends.by_reason[reason] += 1
            ends.ended.add(result.rollout_id)
            failure = outcome.failure
            if failure and failure.retriable and failure.cause is FailureCause.INFRASTRUCTURE and not is_last:
                count += 1
            elif reason or outcome.reward is None or outcome.reward.value != 1.0:
                ends.wrong.append(f"{result.rollout_id}: {outcome}"[:300])
            elif result.trajectory is None or not result.trajectory.samples:
                ends.wrong.append(f"{result.rollout_id} has no samples")
        ends.again += count


async def all_wait(
    agents: Program, count: int, started: Sequence[asyncio.Task[None]], ends: Ends, limit_s: float
) -> None:
    """Returns when so many agents wait for their model. Raises RuntimeError if a group ended before."""
    deadline = time.monotonic() + limit_s
    while True:
        said = await agents.tell("waiting")
        if said["waiting"] >= count:
            return
        for task in started:
            if task.done():
                task.result()
                message = f"a group ended while {said['waiting']} agents waited: {said['failures']}"
                raise RuntimeError(f"{message}, ends by reason: {dict(ends.by_reason)}, {ends.wrong[:1]}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"{said['waiting']} of {count} agents wait after {limit_s:.0f} s: {said['failures']}")
        await asyncio.sleep(_LOOK_S)


async def probe(ps: Penstock, times: list[float]) -> None:
    """Asks the driver for one group again and again, until it is cancelled."""
    handle = await ps.groups.create(world.task(), "shell", 1, labels={**LABELS, "bench": "probe"})
    while True:
        began = time.monotonic()
        await handle.refresh()
        times.append(time.monotonic() - began)
        await asyncio.sleep(_PROBE_S)
