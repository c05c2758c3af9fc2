"""kill -9 of the driver at the writes of its journal while a rollout is branched, and one of its branches is replayed.

The scenario: a rollout ends; two branches of it begin; one of them loses its sandbox, and its next attempt replays its
parent's answers and its own. The writes are those from the request for the branches on; `test_every_write` has those
before. The short form dies at each ninth write. All of them, before and after their commit, takes some minutes:

    pytest --full tests/faults/driver/test_every_write_of_branches.py
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
from tests.faults.driver.test_every_write import driver_of, leaked, warm
from tests.integration.driver.stack import TOKEN, Process
from tests.support.policy import FILES, Reply, Trainer, bash, in_turn
from tests.support.services.dying import Mortal, Warm

from penstock.client import (
    Command,
    GroupHandle,
    ModelCall,
    Penstock,
    RewardFrom,
    RolloutResult,
    Task,
    Tokenizer,
    Trajectory,
    Verifier,
    connect,
)

__all__ = ["warm"]  # a fixture
pytestmark = pytest.mark.timeout(1800)  # a guard: a service is killed at each of its writes

HANGS_S: Final = 120.0
TURNS: Reply = in_turn(bash("echo one"), bash("echo two"), bash("echo kiwi > out.txt"), "Done.")
TASK: Final = Task(
    task_id="branched",
    instruction="Write the word.",
    verifier=Verifier(commands=[Command(shell="grep -q kiwi out.txt")], reward=RewardFrom.PASSED_SHARE),
)
LABELS: Final = {"test": "branched"}
AT, LOST_AT = 1, 2
"""The call that is branched, and that at which the first branch loses its sandbox."""


@pytest.fixture
def services(tmp_path: Path) -> Iterator[tuple[Process, Process]]:
    """A sandbox service and a gate, which no scenario harms."""
    tokenizer = tmp_path / "tiny"
    FILES.write(tokenizer)
    settings = {"inference_address": "", "tokenizers": json.dumps({"tiny": str(tokenizer)})}
    interception = Process("interception", tmp_path, settings)
    interception.start()
    sandbox = Process("sandbox", tmp_path, {"allowed_upstreams": json.dumps([interception.endpoints["ingress"]])})
    sandbox.start()
    yield sandbox, interception
    sandbox.stop()
    interception.stop()


async def play(driver: Mortal, services: tuple[Process, Process]) -> tuple[int, list[str]]:
    """The scenario: how many writes there were before the request for branches, and what does not hold."""
    addresses = {"driver": driver.address, **{process.name: process.address for process in services}}
    async with connect(addresses, TOKEN) as ps, ps.intercept(labels=LABELS) as session:
        trainer = Trainer(session, TURNS)
        answering = asyncio.create_task(trainer.run())
        try:
            parent = await ps.rollouts.create(
                TASK, "shell", labels=LABELS, rollout_id="p", source=Tokenizer("tiny"), max_attempts=3
            )
            await parent.result()
            before, writes = await parent.trajectory(), len(driver.writes())
            lost: list[str] = []

            async def lose(call: ModelCall) -> None:
                if call.rollout_id == "b-0" and call.index == LOST_AT and not lost:
                    lost.append(call.call_id)
                    await ps.sandboxes.delete_all({"penstock_rollout": "b-0"})
                    await asyncio.Event().wait()  # the answer comes too late for anybody

            trainer.before = lose
            group = await ps.rollouts.branch("p", AT, 2, group_id="b")
            results = await group.results(samples_only=False)
            found = [] if lost else ["no sandbox was lost"]
            for result in results:
                found += _differences(before, result)
            answered = Counter((one.rollout_id, one.index) for one in trainer.calls if one.call_id in trainer.answers)
            wanted = {("p", number) for number in range(4)}
            wanted |= {(one, number) for one in group.rollout_ids for number in range(AT, 4)}
            if answered != Counter(wanted):
                found.append(f"sampled were {answered}")
            found += await _deleted(ps, group)
            return writes, found
        finally:
            answering.cancel()
            await asyncio.wait([answering])


def _differences(before: Trajectory, result: RolloutResult) -> Iterator[str]:
    """What a branch has that it should not: its parent's tokens come first, then its own, in one piece."""
    name, after = result.rollout_id, result.trajectory
    if result.reward is None or result.reward.value != 1.0 or after is None:
        yield f"{name} ended as {result.outcome}"
        return
    if result.rollout.attempts != (2 if name == "b-0" else 1):
        yield f"{name} took {result.rollout.attempts} attempts"
    if [call.index for call in after.calls if call.branch_point] != [AT]:
        yield f"{name} parts elsewhere"
    if _tokens(before, range(AT)) != _tokens(after, range(AT)):
        yield f"{name} has other tokens than its parent"
    (sample,) = after.samples
    reasons = [turn.untrained_reason for turn in sample.turns]
    if reasons != ["PARENT"] * AT + [""] * (4 - AT):
        yield f"{name} trains {reasons}"
    if [one.reason for one in after.findings if one.reason in ("REPLAY_DIVERGED", "BRANCH_MISSED")]:
        yield f"{name} has findings {after.findings}"


def _tokens(trajectory: Trajectory, indexes: range) -> list[Any]:
    found = []
    for call in (trajectory.calls[index] for index in indexes):
        done = call.completion
        assert done is not None and done.token_ids is not None and done.logprobs is not None
        found.append((trajectory.prompt_of(call.call_id).tolist(), done.token_ids.tolist(), done.logprobs.tolist()))
    return found


async def _deleted(ps: Penstock, group: GroupHandle) -> list[str]:
    await group.delete()
    await (await ps.rollouts.attach("p")).delete()
    return [f"{one.rollout_id} was not forgotten" async for one in ps.rollouts.list()]


@pytest.mark.requirement("R127", "R128", "R129", "R130")
@pytest.mark.parametrize(
    "every", [9, pytest.param(1, marks=pytest.mark.on_demand("each ninth write shows it as well"))]
)
async def test_kill_at_a_write_of_branching_samples_nothing_twice(
    warm: Warm, services: tuple[Process, Process], tmp_path: Path, every: int
) -> None:
    """Each branch has its reward, its parent's tokens and its own; nothing of it is left anywhere."""
    failed: dict[str, list[str]] = {}

    async def once(at: int, *, committed: bool) -> tuple[int, list[list[str]]]:
        driver = driver_of(warm, tmp_path / f"{at}-{committed}", services)
        await driver.start(at, committed=committed)
        driver.restart()
        first, found = 0, ["it hangs"]
        with suppress(TimeoutError):
            async with asyncio.timeout(HANGS_S):
                first, found = await play(driver, services)
        found += await leaked(services)
        recordings = tmp_path / f"{at}-{committed}" / "state" / "recordings"
        found += [f"{path.name} is left" for path in recordings.iterdir()]
        writes = driver.writes()
        if at and not driver.died and at <= len(writes):
            found.append("it did not die")
        if found:
            failed[f"{'after' if committed else 'before'} write {at}: {next(iter(writes[at - 1 :]), [])}"] = found
        await driver.kill()
        return first, writes

    first, writes = await once(0, committed=False)
    assert not failed
    assert any(line.startswith("INSERT INTO groups") for write in writes[first:] for line in write)
    for at in range(first + 1, len(writes) + 1, every):
        for committed in (False,) if every > 1 else (False, True):
            await once(at, committed=committed)
    assert not failed
