"""kill -9 of the driver at the writes of its journal while groups run whose rollouts are paused.

Two scenarios, each with one group. In the first, a spare is surplus once the group has its results; the rollout that
gives the last of them is paused until the other has ended. In the second, the group is paused; two of its rollouts are
resumed and give it its quorum; the third stays paused, and is a straggler as soon as it is resumed too. Which writes
there are depends little on who is faster, since the trainer holds what should come later. The short form dies at each
twelfth write. All of them, before and after their commit, takes some minutes:

    pytest --full tests/faults/driver/test_every_write_of_groups.py
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest
from tests.faults.driver.test_every_write import driver_of, leaked, warm
from tests.faults.driver.test_every_write_of_branches import services
from tests.integration.driver.stack import TOKEN, Process
from tests.support.policy import Reply, Trainer, bash, in_turn
from tests.support.services.dying import Mortal, Warm

from penstock.client import (
    Command,
    Ended,
    GroupHandle,
    ModelCall,
    Penstock,
    RewardFrom,
    RolloutEvent,
    RolloutHandle,
    RolloutResult,
    Task,
    Tokenizer,
    Verifier,
    connect,
)

__all__ = ["services", "warm"]  # fixtures
pytestmark = pytest.mark.timeout(3600)  # a guard: a service is killed at each of its writes

HANGS_S: Final = 120.0
TURNS: Reply = in_turn(bash("echo kiwi > out.txt"), "Done.")
TASK: Final = Task(
    task_id="grouped",
    instruction="Write the word.",
    verifier=Verifier(commands=[Command(shell="grep -q kiwi out.txt")], reward=RewardFrom.PASSED_SHARE),
)
LABELS: Final = {"test": "grouped"}
ONE, OTHER, LAST = "g-0", "g-1", "g-2"


@dataclass
class Held:
    """A trainer that asks before it answers, and what of the promises does not hold so far."""

    trainer: Trainer
    driver: Mortal
    unsure: set[str] = field(default_factory=set)
    """The rollouts in whose resumption the driver died. It may have let an agent go, and died before it wrote so; then
    the agent may have ended in its pause, as far as the next driver knows."""
    found: list[str] = field(default_factory=list)
    may_answer: dict[tuple[str, int], asyncio.Event] = field(default_factory=dict)
    asked: dict[tuple[str, int], asyncio.Event] = field(default_factory=dict)

    def hold(self, *calls: tuple[str, int]) -> None:
        """The answers to these calls of rollouts wait for `go`."""
        self.may_answer |= {call: asyncio.Event() for call in calls}
        self.asked |= {call: asyncio.Event() for call in calls}

    def go(self, *calls: tuple[str, int]) -> None:
        """These answers may come."""
        for call in calls:
            self.may_answer[call].set()

    async def resume(self, handle: RolloutHandle | GroupHandle, *rollout_ids: str) -> None:
        """Resumes these rollouts."""
        was_dead = self.driver.died
        await handle.resume()
        if self.driver.died and not was_dead:
            self.unsure.update(rollout_ids)

    async def before(self, call: ModelCall) -> None:
        """See `Trainer`."""
        known = (call.rollout_id, call.index)
        if known in self.may_answer:
            self.asked[known].set()
            await self.may_answer[known].wait()

    async def is_paused(self, ps: Penstock, rollout_id: str, calls: int) -> None:
        """A rollout must be paused now, and the trainer have been asked so many calls of it."""
        info = (await ps.rollouts.attach(rollout_id)).info
        if info.pause is None or info.outcome is not None:
            self.found.append(f"{rollout_id} is not paused any more: {info.pause} {info.outcome}")
        asked = [call.index for call in self.trainer.calls if call.rollout_id == rollout_id]
        if asked != list(range(calls)):
            self.found.append(f"{rollout_id}, which is paused, asked {asked}")


Scenario = Callable[[Penstock, Held], Awaitable[GroupHandle]]


async def surplus(ps: Penstock, held: Held) -> GroupHandle:
    """Two of three are wanted; the second is paused, with its answer, until the first has ended."""
    held.hold((ONE, 1), (OTHER, 0), (LAST, 1))
    group = await ps.groups.create(
        TASK, "shell", 2, spares=1, group_id="g", labels=LABELS, source=Tokenizer("tiny"), max_attempts=3
    )
    for call in held.asked:
        if call != (ONE, 1):
            await held.asked[call].wait()
    other = await ps.rollouts.attach(OTHER)
    await other.pause("until the first has ended")
    held.go((OTHER, 0), (ONE, 1))
    await (await ps.rollouts.attach(ONE)).result()
    await held.is_paused(ps, OTHER, 1)
    await held.resume(other, OTHER)
    return group


async def straggler(ps: Penstock, held: Held) -> GroupHandle:
    """Three are wanted, two are enough; the group is paused, and the third is resumed last."""
    held.hold((ONE, 0), (OTHER, 0), (LAST, 0))
    group = await ps.groups.create(
        *(TASK, "shell", 3),
        quorum=2,
        straggler_grace=0.0,
        group_id="g",
        labels=LABELS,
        source=Tokenizer("tiny"),
        max_attempts=3,
    )
    for event in held.asked.values():
        await event.wait()
    await group.pause("all of them")
    held.go((ONE, 0), (OTHER, 0))
    for rollout_id in (ONE, OTHER):
        await held.is_paused(ps, rollout_id, 1)
        await held.resume(await ps.rollouts.attach(rollout_id), rollout_id)
    for rollout_id in (ONE, OTHER):
        await (await ps.rollouts.attach(rollout_id)).result()
    await held.is_paused(ps, LAST, 1)
    await held.resume(group, LAST)
    return group


UNDISTURBED: Final[Mapping[Scenario, tuple[set[tuple[str, int]], str, int]]] = {
    surplus: ({(ONE, 0), (ONE, 1), (OTHER, 0), (OTHER, 1), (LAST, 0), (LAST, 1)}, "GROUP_COMPLETE", 2),
    straggler: ({(ONE, 0), (ONE, 1), (OTHER, 0), (OTHER, 1), (LAST, 0)}, "STRAGGLER", 2),
}
"""Which calls the trainer is asked, once each, how the last rollout ends, and the results."""


PAUSES: Final = "UPDATE rollouts SET pause"
"""How the writes begin of pauses and their ends."""


async def play(driver: Mortal, services: tuple[Process, Process], scenario: Scenario) -> list[str]:
    """A scenario; what does not hold."""
    addresses = {"driver": driver.address, **{process.name: process.address for process in services}}
    async with connect(addresses, TOKEN) as ps, trained(ps, driver) as held:
        group = await scenario(ps, held)
        results = await group.results(samples_only=False)
        events = [event async for event in group.events()]
        paused = {OTHER} if scenario is surplus else {ONE, OTHER, LAST}
        found = [*held.found, *_differences(group, results, held.trainer, scenario)]
        found += _unreported(results, events, paused, held.unsure)
        await group.delete()
        return found + [f"{one.rollout_id} was not forgotten" async for one in ps.rollouts.list()]


@asynccontextmanager
async def trained(ps: Penstock, driver: Mortal) -> AsyncIterator[Held]:
    """A trainer that holds the calls that it is asked to hold."""
    async with ps.intercept(labels=LABELS) as session:
        held = Held(Trainer(session, TURNS), driver)
        held.trainer.before = held.before
        answering = asyncio.create_task(held.trainer.run())
        try:
            yield held
        finally:
            answering.cancel()
            await asyncio.wait([answering])


def _differences(
    group: GroupHandle, results: list[RolloutResult], trainer: Trainer, scenario: Scenario
) -> Iterator[str]:
    calls, reason, quorum = UNDISTURBED[scenario]
    asked = Counter((call.rollout_id, call.index) for call in trainer.calls)
    if asked != Counter(calls):
        yield f"asked were {asked}"
    if not group.info.complete or sorted(group.info.result_rollout_ids) != [ONE, OTHER] or quorum != group.info.quorum:
        yield f"the group ended as {group.info}"
    for result in results:
        failure = result.failure
        if result.rollout.attempts != 1:
            yield f"{result.rollout_id} took {result.rollout.attempts} attempts"
        if result.rollout_id == LAST:
            if result.reward is not None or failure is None or (failure.cause, failure.reason) != ("cancelled", reason):
                yield f"{LAST} ended as {result.outcome}"
        elif failure is not None or result.reward is None or result.reward.value != 1.0:
            yield f"{result.rollout_id} ended as {result.outcome}"
        elif result.trajectory is None or [call.state for call in result.trajectory.calls] != ["delivered"] * 2:
            yield f"{result.rollout_id} has other calls: {result.trajectory}"


def _unreported(
    results: list[RolloutResult], events: list[RolloutEvent], paused: set[str], unsure: set[str]
) -> Iterator[str]:
    """What the events report otherwise: each once, and one end. Of `unsure` the end of a pause may be missing."""
    for result in results:
        own = [event for event in events if event.rollout_id == result.rollout_id]
        if [event.sequence for event in own] != list(range(1, len(own) + 1)):
            yield f"{result.rollout_id} has events {[event.sequence for event in own]}"
        kinds = Counter(type(event.payload).__name__ for event in own)
        if kinds["Ended"] != 1 or not isinstance(own[-1].payload, Ended):
            yield f"{result.rollout_id} has not one end: {kinds}"
        pauses, ends = kinds["RolloutPaused"], kinds["RolloutResumed"]
        if pauses != (result.rollout_id in paused) or (
            ends != pauses and not (result.rollout_id in unsure and ends < pauses)
        ):
            yield f"{result.rollout_id} was paused as {kinds}"


@pytest.mark.requirement("R62", "R127", "R140")
@pytest.mark.parametrize(
    "every", [12, pytest.param(1, marks=pytest.mark.on_demand("each twelfth write shows it as well"))]
)
@pytest.mark.parametrize("scenario", [surplus, straggler])
async def test_kill_at_a_write_of_a_group_changes_no_end_of_its_rollouts(
    warm: Warm, services: tuple[Process, Process], tmp_path: Path, scenario: Scenario, every: int
) -> None:
    """It has its quorum once, the last ends as it would have, what is paused stays so, and no call is asked twice."""
    failed: dict[str, list[str]] = {}

    async def once(at: int, *, committed: bool) -> list[list[str]]:
        driver = driver_of(warm, tmp_path / f"{at}-{committed}", services)
        await driver.start(at, committed=committed)
        driver.restart()
        found = ["it hangs"]
        with suppress(TimeoutError):
            async with asyncio.timeout(HANGS_S):
                found = await play(driver, services, scenario)
        found += await leaked(services)
        writes = driver.writes()
        if at and not driver.died and at <= len(writes):
            found.append("it did not die")
        if found:
            failed[f"{'after' if committed else 'before'} write {at}: {next(iter(writes[at - 1 :]), [])}"] = found
        await driver.kill()
        return writes

    writes = await once(0, committed=False)
    assert not failed
    for kind in ("INSERT INTO groups", PAUSES):
        assert any(line.startswith(kind) for write in writes for line in write), kind
    for at in range(1, len(writes) + 1, every):
        for committed in (False,) if every > 1 else (False, True):
            await once(at, committed=committed)
    assert not failed
