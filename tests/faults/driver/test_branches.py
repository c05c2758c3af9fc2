"""Branches of a rollout: the parent's tokens up to the branch point, then their own; through kills of the services."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio
from tests.support.copying import copy_task, finish, training
from tests.support.policy import Reply, in_shell, in_turn
from tests.support.services.restarting import RestartableStack, restartable
from tests.support.services.stack import Running
from tests.support.terminal.commands import invoke

from penstock.client import (
    FailedPrecondition,
    GroupHandle,
    Message,
    ModelCall,
    NotFound,
    Role,
    RolloutHandle,
    RolloutResult,
    RunBudgets,
    Text,
    ToolCall,
    Trajectory,
)
from penstock.client.transport.endpoints import write_connection
from penstock.driver.v1 import rollout_service_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

World = tuple[Running, RestartableStack]
TURNS: Reply = in_turn(in_shell("echo one"), in_shell("echo two"), in_shell("bash work.sh"), "The word is copied.")
"""Four calls; the third does the work."""
LAZY: Reply = in_turn(in_shell("echo one"), in_shell("echo two"), in_shell("echo three"), "The word is copied.")
"""The same agent, whose third call does no work."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    async with restartable(tmp_path_factory.mktemp("branches")) as found:
        yield found


async def parent_of(running: Running, label: str, **options: Any) -> tuple[RolloutHandle, Trajectory]:
    """A rollout that ended with reward 1."""
    handle = await running.ps.rollouts.create(copy_task(running), "shell", labels={"test": label}, **options)
    finished = await finish(handle)
    assert finished.reward == 1.0, finished.agent_said()
    return handle, await handle.trajectory()


async def ended(group: GroupHandle) -> list[RolloutResult]:
    async with asyncio.timeout(240):
        return await group.results(samples_only=False)


def tokens(trajectory: Trajectory, index: int) -> tuple[list[int], list[int], list[float], Any]:
    """Prompt, ids, logprobs and versions of a call."""
    call = trajectory.calls[index]
    done = call.completion
    assert done is not None and done.token_ids is not None and done.logprobs is not None
    return trajectory.prompt_of(call.call_id).tolist(), done.token_ids.tolist(), done.logprobs.tolist(), done.versions


def own_turns(trajectory: Trajectory) -> list[tuple[int, str]]:
    """Index and untrained reason of each turn of the only sample, whose mask agrees."""
    (sample,) = trajectory.samples
    index = {call.call_id: call.index for call in trajectory.calls}
    for turn in sample.turns:
        assert sample.loss_mask[turn.start : turn.end].all() == (not turn.untrained_reason)
        assert sample.loss_mask[turn.start : turn.end].any() == (not turn.untrained_reason)
    assert int(sample.loss_mask.sum()) == sum(t.end - t.start for t in sample.turns if not t.untrained_reason)
    assert sample.logprobs is not None and not sample.logprobs[~sample.loss_mask].any()
    return [(index[turn.call_id], turn.untrained_reason) for turn in sample.turns]


def findings(trajectory: Trajectory) -> dict[str, str]:
    return {one.reason: one.message for one in trajectory.findings}


@pytest.mark.requirement("R129", "R130")
@pytest.mark.parametrize("at", [0, 1, 2, 3])
async def test_branches_share_the_parents_tokens_up_to_the_call(world: World, at: int) -> None:
    running, _ = world
    label = secrets.token_hex(8)
    async with training(running, label, TURNS) as trainer:
        parent, before = await parent_of(running, label)
        trainer.calls.clear()
        group = await parent.branch(at, 3)
        results = await ended(group)
        asked = sorted((call.rollout_id, call.index) for call in trainer.calls)
    assert asked == sorted((one.rollout_id, number) for one in results for number in range(at, 4))
    assert group.info.branched_from is not None and group.info.branched_from.call_index == at
    for one in results:
        after = one.trajectory
        assert one.reward is not None and one.reward.value == 1.0 and after is not None
        for number in range(at):
            assert tokens(after, number) == tokens(before, number)
            origin = after.calls[number].replayed_from
            assert origin is not None
            assert (origin.rollout_id, origin.call_id) == (parent.rollout_id, before.calls[number].call_id)
        assert after.prompt_of(after.calls[at].call_id).tolist() == tokens(before, at)[0]
        assert [call.replayed_from is None for call in after.calls] == [number >= at for number in range(4)]
        assert [call.index for call in after.calls if call.branch_point] == [at]
        assert own_turns(after) == [(number, "PARENT" if number < at else "") for number in range(4)]
        (sample,) = after.samples
        point = before.calls[at].call_id
        assert (sample.parent_rollout_id, sample.branch_call_id) == (parent.rollout_id, point)
        assert after.branched_from == one.rollout.branched_from == group.info.branched_from
        assert "BRANCHED" in findings(after) and "REPLAY_DIVERGED" not in findings(after)


@pytest.mark.requirement("R129")
async def test_a_given_answer_is_acted_on_and_never_trained(world: World) -> None:
    running, _ = world
    label = secrets.token_hex(8)
    answer = Message(
        Role.ASSISTANT, (Text("I choose this."), ToolCall("", "bash", '{"command": "bash work.sh; echo given"}'))
    )
    async with training(running, label, TURNS) as trainer:
        parent, before = await parent_of(running, label)
        trainer.calls.clear()
        group = await running.ps.rollouts.branch(parent.rollout_id, before.calls[1].call_id, 2, answer=answer)
        results = await ended(group)
        asked = sorted((call.rollout_id, call.index) for call in trainer.calls)
    assert asked == sorted((one.rollout_id, number) for one in results for number in (2, 3))
    for one in results:
        after = one.trajectory
        assert after is not None and one.reward is not None and one.reward.value == 1.0
        given = after.calls[1]
        assert given.branch_point and given.injected and given.replayed_from is None
        assert given.completion is not None and given.completion.token_ids is None and given.completion.logprobs is None
        assert own_turns(after) == [(0, "PARENT"), (2, ""), (3, "")]
        assert after.capture_level == "tokens_and_logprobs" and after.grade == "exact", after.findings


async def test_the_prefix_is_trained_where_that_is_asked(world: World) -> None:
    running, _ = world
    label = secrets.token_hex(8)
    async with training(running, label, TURNS):
        parent, _ = await parent_of(running, label)
        (one,) = await ended(await parent.branch(2, train_prefix=True))
    assert one.trajectory is not None
    assert own_turns(one.trajectory) == [(number, "") for number in range(4)]


@pytest.mark.requirement("R129")
async def test_branches_are_sampled_with_the_seeds_that_are_given(world: World) -> None:
    """Their agents ask with the parent's seed, so nothing differs from what is recorded."""
    running, _ = world
    label = secrets.token_hex(8)
    async with training(running, label, TURNS) as trainer:
        parent, before = await parent_of(running, label, seed=5)
        trainer.calls.clear()
        seeded = await ended(await parent.branch(2, 2, seed=100))
        asked = {(call.rollout_id, call.sampling.seed) for call in trainer.calls}
        trainer.calls.clear()
        branch = await running.ps.rollouts.attach(seeded[1].rollout_id)
        (plain,) = await ended(await parent.branch(2))
        (second,) = await ended(await branch.branch(3))
        kept = {(call.rollout_id, call.sampling.seed) for call in trainer.calls}
    assert asked == {(one.rollout_id, 100 + one.rollout.index) for one in seeded}
    assert kept == {(plain.rollout_id, 5), (second.rollout_id, 101)}
    for one in seeded:
        assert one.rollout.branched_from is not None and one.rollout.branched_from.seed == 100
        assert one.trajectory is not None and "REPLAY_DIVERGED" not in findings(one.trajectory)
        assert [call.request_body_sha256 for call in one.trajectory.calls[:3]] == [
            call.request_body_sha256 for call in before.calls[:3]
        ]


@pytest.mark.requirement("R129")
async def test_a_running_parent_and_a_branch_are_branched(world: World) -> None:
    """The parent waits at its last call; its branch is branched in turn, which needs the parent no more."""
    running, _ = world
    label = secrets.token_hex(8)
    waits, go_on = asyncio.Event(), asyncio.Event()
    first: list[str] = []
    async with training(running, label, TURNS) as trainer:

        async def before(call: ModelCall) -> None:
            first.append(call.rollout_id)
            if call.rollout_id == first[0] and call.index == 3:
                waits.set()
                await go_on.wait()

        trainer.before = before
        parent = await running.ps.rollouts.create(copy_task(running), "shell", labels={"test": label})
        await waits.wait()
        with pytest.raises(FailedPrecondition) as caught:
            await parent.branch(3)
        assert caught.value.reason == "CALL_UNANSWERED"
        (one,) = await ended(await parent.branch(1))
        go_on.set()
        await finish(parent)
        await parent.delete()
        branch = await running.ps.rollouts.attach(one.rollout_id)
        (two,) = await ended(await branch.branch(2))
    assert one.trajectory is not None and two.trajectory is not None
    assert [call.replayed_from and call.replayed_from.rollout_id for call in two.trajectory.calls] == [
        *(parent.rollout_id, one.rollout_id, None, None)
    ]
    assert [call.branch_point for call in two.trajectory.calls] == [False, False, True, False]
    assert own_turns(two.trajectory) == [(0, "PARENT"), (1, "PARENT"), (2, ""), (3, "")]


@pytest.mark.requirement("R129", "R128")
@pytest.mark.parametrize("lost_at", [2, 3])
async def test_a_branch_whose_sandbox_is_lost_replays_both(world: World, lost_at: int) -> None:
    running, _ = world
    label = secrets.token_hex(8)
    async with training(running, label, TURNS) as trainer:
        parent, _ = await parent_of(running, label, max_attempts=3)
        lost: list[str] = []

        async def before(call: ModelCall) -> None:
            if call.index == lost_at and not lost:
                lost.append(call.rollout_id)
                await running.ps.sandboxes.delete_all({"penstock_rollout": call.rollout_id})
                await asyncio.Event().wait()

        trainer.before = before
        (one,) = await ended(await parent.branch(2))
    assert lost and one.trajectory is not None and one.rollout.attempts == 2
    assert [(c.replayed_from.rollout_id if c.replayed_from else "") for c in one.trajectory.calls[:2]] == [
        parent.rollout_id
    ] * 2
    assert [call.index for call in one.trajectory.calls if call.branch_point] == [2]
    assert own_turns(one.trajectory) == [(0, "PARENT"), (1, "PARENT"), (2, ""), (3, "")]
    origin = one.trajectory.calls[2].replayed_from
    assert (origin is None) if lost_at == 2 else (origin is not None and origin.rollout_id == one.rollout_id)


@pytest.mark.requirement("R129", "R127")
@pytest.mark.parametrize("service", ["driver", "interception"])
async def test_a_kill_while_branching_samples_nothing_twice(world: World, service: str) -> None:
    running, stack = world
    label = secrets.token_hex(8)
    async with training(running, label, TURNS) as trainer:
        parent, before = await parent_of(running, label)
        trainer.calls.clear()
        killed = asyncio.Event()

        async def restart(call: ModelCall) -> None:
            if call.index == 2 and not killed.is_set():
                killed.set()
                await stack.restart(service)  # type: ignore[arg-type]

        trainer.before = restart
        results = await ended(await parent.branch(1, 3))
        answered = [call for call in trainer.calls if call.call_id in trainer.answers]
    assert killed.is_set()
    calls = {call.call_id for call in answered}
    assert len(calls) == 3 * 3, "three branches sampled three calls each, and no call has a second one"
    for one in results:
        assert one.trajectory is not None and one.reward is not None and one.reward.value == 1.0
        assert tokens(one.trajectory, 0) == tokens(before, 0)
        assert own_turns(one.trajectory) == [(0, "PARENT"), (1, ""), (2, ""), (3, "")]
        assert [call.index for call in one.trajectory.calls if call.branch_point] == [1]


@pytest.mark.requirement("R129", "R127")
async def test_the_command_waits_for_a_driver_that_is_killed(world: World, tmp_path: Path) -> None:
    """It prints what the branches came to, as if nothing had been."""
    running, stack = world
    label = secrets.token_hex(8)
    write_connection(tmp_path / "connection.json", stack.endpoints, pid=None)
    async with training(running, label, TURNS) as trainer:
        parent, _ = await parent_of(running, label)
        killed = asyncio.Event()

        async def restart(call: ModelCall) -> None:
            if call.index == 2 and not killed.is_set():
                killed.set()
                await stack.restart("driver")

        trainer.before = restart
        given = ("branch", parent.rollout_id, "1", "-n", "2", "--no-delegate", "--json")
        environment = {"PENSTOCK_CONNECTION": str(tmp_path / "connection.json")}
        code, printed, err = await asyncio.to_thread(invoke, *given, environment=environment)
    assert killed.is_set() and code == 0, err
    ends = [line for line in map(orjson.loads, printed.splitlines()) if "completed" in line]
    assert [(line["completed"], line["reward"]) for line in ends] == [(True, 1.0), (True, 1.0)], printed


@pytest.mark.requirement("R129", "R127")
async def test_a_repeated_request_makes_no_further_branches(world: World) -> None:
    """Also after a kill, and after the parent is gone: the request is remembered."""
    running, stack = world
    label = secrets.token_hex(8)
    async with training(running, label, TURNS):
        parent, _ = await parent_of(running, label)
        request = pb.BranchRolloutRequest(
            request_id=secrets.token_hex(16), rollout_id=parent.rollout_id, call_index=1, count=2
        )
        driver = running.ps.rollouts._drivers
        _, first = await driver.having(parent.rollout_id, lambda one: one.branch(request))
        await stack.restart("driver")
        _, second = await driver.having(parent.rollout_id, lambda one: one.branch(request))
        assert first.group_id == second.group_id and first.rollout_ids == second.rollout_ids
        results = await ended(await running.ps.groups.attach(first.group_id))
    assert len(results) == 2 and all(one.reward is not None for one in results)


async def test_what_cannot_be_branched_is_refused_with_its_reason(world: World) -> None:
    running, _ = world
    label = secrets.token_hex(8)
    async with training(running, label, TURNS):
        parent, _ = await parent_of(running, label)
    for call in (9, "nothing"):
        with pytest.raises(NotFound) as unknown:
            await parent.branch(call)
        assert unknown.value.reason == "CALL_UNKNOWN"
    with pytest.raises(NotFound) as nobody:
        await running.ps.rollouts.branch("r-nobody", 0)
    assert nobody.value.reason == "ROLLOUT_UNKNOWN"
    await running.ps.gate.delete(parent.rollout_id)
    with pytest.raises(FailedPrecondition) as absent:
        await parent.branch(0)
    assert absent.value.reason == "TRAJECTORY_ABSENT"
    await parent.delete()
    with pytest.raises(NotFound):
        await parent.branch(0)


async def test_an_agent_that_asks_something_else_is_no_branch(world: World) -> None:
    """Its sandbox says something else before the point: exact fails it, until_divergence goes on."""
    running, _ = world
    label = secrets.token_hex(8)
    chance: Reply = in_turn(
        in_shell("cat /proc/sys/kernel/random/uuid"), in_shell("bash work.sh"), "The word is copied."
    )
    async with training(running, label, chance):
        parent, _ = await parent_of(running, label)
        (exact,) = await ended(await parent.branch(2))
        (loose,) = await ended(await parent.branch(2, replay="until_divergence"))
    assert exact.trajectory is not None and loose.trajectory is not None
    assert [call.end_reason for call in exact.trajectory.calls][1] == "REPLAY_DIVERGED"
    failure = exact.outcome.failure
    assert failure is not None and exact.reward is None and not failure.retriable
    assert (failure.reason, failure.caused_by, failure.cause) == ("REPLAY_DIVERGED", "agent", "infrastructure")
    assert findings(exact.trajectory)["REPLAY_DIVERGED"] in failure.message and "Call 1 differs" in failure.message
    assert loose.reward is not None and loose.reward.value == 1.0
    for one in (exact.trajectory, loose.trajectory):
        assert {"BRANCH_MISSED", "REPLAY_DIVERGED"} <= set(findings(one)), findings(one)


async def test_budgets_of_a_run_count_what_was_sampled_once(world: World) -> None:
    """The parent's three calls and the branches' own two each fit into seven; a replay that counted would not."""
    running, _ = world
    label, run = secrets.token_hex(8), secrets.token_hex(8)
    async with training(running, label, TURNS):
        parent, _ = await parent_of(running, label, run_id=run, run_budgets=RunBudgets(max_calls=8))
        results = await ended(await parent.branch(2, 2))
        assert [one.reward and one.reward.value for one in results] == [1.0, 1.0]
        with pytest.raises(Exception, match="budget") as spent:
            await parent.branch(2)
    assert getattr(spent.value, "reason", "") == "BUDGET_EXHAUSTED"


async def test_files_of_ended_branches_are_removed(world: World) -> None:
    running, stack = world
    label = secrets.token_hex(8)
    async with training(running, label, TURNS):
        parent, _ = await parent_of(running, label)
        await ended(await parent.branch(2, 2))
    assert list((Path(stack.state_dir) / "driver" / "recordings").iterdir()) == []
