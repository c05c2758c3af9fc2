"""Groups, watches and exports against the real services, with the reference agent."""

from __future__ import annotations

import asyncio
import json
import secrets
from pathlib import Path

import pytest
from tests.support.copying import copy_task, finish, training
from tests.support.policy import bash, in_turn
from tests.support.services.stack import Running
from tests.support.waiting import eventually, limits

from penstock.analysis.export import write
from penstock.client import (
    AgentExited,
    Budgets,
    Command,
    CommandFinished,
    Inference,
    Limits,
    Mode,
    ModelCall,
    Phase,
    PhaseChanged,
    Resources,
    RewardFrom,
    SandboxChoice,
    Task,
    Verifier,
)


@pytest.mark.requirement("R17", "R57", "R74", "R84")
async def test_a_group_of_four_prepares_once_and_gives_four_exact_trajectories(stack: Running, tmp_path: Path) -> None:
    """One setup for all, one result each, and an export that trainers can eat."""
    label = secrets.token_hex(8)
    run_id = f"run-{label}"
    # The setup leaves a value of its own making: forks of one preparation share it, four preparations would not.
    task = copy_task(
        stack,
        setup=[Command(shell="echo kiwi > note.txt; head -c 16 /dev/urandom | base64 > made-once.txt")],
        verifier=Verifier(commands=[Command(shell='[ "$(cat out.txt)" = kiwi ]'), Command(["cat", "made-once.txt"])]),
    )
    async with training(stack, label):
        group = await stack.ps.groups.create(task, "shell", n=4, labels={"test": label}, run_id=run_id)
        events = [event async for event in group.events()]
        results = await group.results(samples_only=False)
    assert group.info.complete
    assert set(group.info.result_rollout_ids) == set(group.rollout_ids)
    assert [result.reward.value if result.reward else None for result in results] == [1.0] * 4
    assert [result.rollout.index for result in results] == [0, 1, 2, 3]
    made = {
        event.payload.stdout_tail
        for event in events
        if isinstance(event.payload, CommandFinished)
        and event.payload.phase is Phase.VERIFYING
        and event.payload.index == 1
    }
    assert len(made) == 1, made
    for rollout_id in group.rollout_ids:
        sequences = [event.sequence for event in events if event.rollout_id == rollout_id]
        assert sequences == list(range(1, len(sequences) + 1))
    for result in results:
        assert result.trajectory is not None
        assert result.trajectory.grade == "exact", result.trajectory.findings
        assert result.trajectory.group_id == group.group_id

    turns, sequences_file = tmp_path / "turns.jsonl", tmp_path / "sequences.jsonl"
    assert await write(stack.ps.rollouts.export(run_id=run_id), turns, table="turns") == 8
    assert await write(stack.ps.rollouts.export(run_id=run_id), sequences_file, table="sequences") == 4
    for line in sequences_file.read_text().splitlines():
        row = json.loads(line)
        assert row["reward"] == 1.0
        assert len(row["input_ids"]) == len(row["loss_mask"]) == len(row["logprobs"])
        assert sum(row["loss_mask"]) == sum(span["end"] - span["start"] for span in row["turn_spans"])


@pytest.mark.requirement("R62", "R70")
async def test_spares_replace_failed_rollouts_and_surplus_is_cancelled(stack: Running) -> None:
    """Two wanted of four; two get their answers first, one never gets any."""
    label = secrets.token_hex(8)
    never = asyncio.Event()
    async with training(stack, label) as trainer:

        async def hold_the_last_two(call: ModelCall) -> None:
            if call.group_index is not None and call.group_index >= 2:
                await never.wait()

        trainer.before = hold_the_last_two
        group = await stack.ps.groups.create(copy_task(stack), "shell", n=2, spares=2, labels={"test": label})
        results = await group.results()
    assert group.info.complete
    by_index = {result.rollout.index: result for result in results}
    assert {index for index, result in by_index.items() if result.reward} == {0, 1}
    for index in (2, 3):
        failure = by_index[index].failure
        assert failure is not None
        assert (failure.cause, failure.reason) == ("cancelled", "GROUP_COMPLETE")
        assert by_index[index].reward is None
    assert set(group.info.result_rollout_ids) == {by_index[0].rollout_id, by_index[1].rollout_id}
    assert [by_index[index].surplus for index in range(4)] == [False, False, True, True]


@pytest.mark.requirement("R62")
async def test_stragglers_are_ended_once_the_quorum_and_its_grace_are_there(stack: Running) -> None:
    """A group of three with a quorum of two and no grace does not wait for the third."""
    label = secrets.token_hex(8)
    never = asyncio.Event()
    async with training(stack, label) as trainer:

        async def hold_the_first(call: ModelCall) -> None:
            if call.group_index == 0:
                await never.wait()

        trainer.before = hold_the_first
        group = await stack.ps.groups.create(
            copy_task(stack), "shell", n=3, quorum=2, straggler_grace=0.0, labels={"test": label}
        )
        results = await group.results()
    assert group.info.complete
    assert [result.reward.value if result.reward else None for result in results] == [None, 1.0, 1.0]
    assert results[0].failure is not None
    assert (results[0].failure.cause, results[0].failure.reason) == ("cancelled", "STRAGGLER")


@pytest.mark.requirement("R24", "R70", "R74")
async def test_cancelling_a_group_ends_its_agents_and_sandboxes_and_is_no_reward(stack: Running) -> None:
    label = secrets.token_hex(8)
    waiting: set[str] = set()
    never = asyncio.Event()
    async with training(stack, label) as trainer:

        async def hold(call: ModelCall) -> None:
            waiting.add(call.rollout_id)
            await never.wait()

        trainer.before = hold
        group = await stack.ps.groups.create(copy_task(stack), "shell", n=3, labels={"test": label})
        await eventually(lambda: len(waiting) == 3, "all agents wait")
        await group.cancel("the test is over")
        await group.cancel("twice is as good as once")
        results = await group.results()
        for call in trainer.calls:
            await asyncio.wait_for(call.wait_ended(), 60)
    for result in results:
        assert result.failure is not None
        assert result.failure.cause == "cancelled"
        assert result.reward is None
        live = [
            sandbox_id
            async for sandbox_id, _ in stack.ps.sandboxes.list(labels={"penstock_rollout": result.rollout_id})
        ]
        assert live == []


@pytest.mark.requirement("R71")
async def test_watch_resumes_at_any_position_without_gap_or_repeat(stack: Running) -> None:
    """The past first, then what happens, from whichever event one has seen last."""
    label = secrets.token_hex(8)
    async with training(stack, label):
        handle = await stack.ps.rollouts.create(copy_task(stack), "shell", labels={"test": label})
        first = []
        async for event in handle.events():
            first.append(event)
            if isinstance(event.payload, PhaseChanged) and event.payload.phase is Phase.RUNNING:
                break  # the connection is dropped in the middle of the run
        rest = [event async for event in handle.events(after=first[-1].sequence)]
        finished = await finish(handle)
    assert [event.sequence for event in (*first, *rest)] == [event.sequence for event in finished.events]
    assert [event.sequence for event in finished.events] == list(range(1, len(finished.events) + 1))
    for position in (1, len(finished.events) - 1):
        again = [event async for event in handle.events(after=position)]
        assert [event.sequence for event in again] == [event.sequence for event in finished.events[position:]]


@pytest.mark.requirement("R57", "R58", "R59", "R74")
async def test_setup_commands_report_exit_and_output_and_a_failure_ends_the_rollout(stack: Running) -> None:
    """No agent, no verifier, no reward; whose fault it was."""
    setup = [
        Command(shell="echo first; echo loud >&2"),
        Command(shell="echo second; exit 3"),
        Command(["touch", "third"]),
    ]
    handle = await stack.ps.rollouts.create(
        copy_task(stack, setup=setup), "shell", mode=Mode.TRANSPARENT_PROXY, source=Inference()
    )
    finished = await finish(handle)
    commands = finished.commands(Phase.SETTING_UP)
    assert [(item.exit.code, item.stdout_tail, item.stderr_tail) for item in commands] == [
        (0, b"first\n", b"loud\n"),
        (3, b"second\n", b""),
    ]
    failure = finished.result.failure
    assert failure is not None
    assert (failure.cause, failure.reason, failure.phase) == ("task", "SETUP_FAILED", "setting_up")
    assert finished.result.reward is None
    phases = [event.payload.phase for event in finished.events if isinstance(event.payload, PhaseChanged)]
    assert Phase.RUNNING not in phases
    assert Phase.VERIFYING not in phases


@pytest.mark.requirement("R72", "R73", "R74")
async def test_verifier_without_a_usable_reward_is_a_failure_not_zero(stack: Running) -> None:
    label = secrets.token_hex(8)
    writes = {
        "nothing": "true",
        "text": "echo good",
        "nan": "echo nan",
        "two": "echo 2",
        "json": "echo '{\"reward\": true}'",
    }
    reply = in_turn(bash("true"), "done")
    async with training(stack, label, reply):
        for name, command in writes.items():
            verifier = Verifier(
                commands=[Command(shell=f'{command} > "$PENSTOCK_REWARD_FILE"')], reward=RewardFrom.FILE
            )
            task = Task(task_id=name, instruction="do nothing", verifier=verifier)
            handle = await stack.ps.rollouts.create(task, "shell", labels={"test": label})
            result = await handle.result()
            assert result.reward is None, name
            assert result.failure is not None, name
            assert result.failure.cause == "verifier", (name, result.failure)


@pytest.mark.requirement("R35", "R88")
async def test_a_budget_ends_a_rollout_cleanly_and_says_so(stack: Running) -> None:
    """The admitted turn is answered, the next is refused, and the end is typed."""
    label = secrets.token_hex(8)
    async with training(stack, label, lambda _prompt: bash("true")) as trainer:
        handle = await stack.ps.rollouts.create(
            copy_task(stack), "shell", labels={"test": label}, budgets=Budgets(max_calls=3)
        )
        result = await handle.result()
    assert len(trainer.calls) == 3
    assert result.failure is not None
    assert (result.failure.cause, result.failure.reason) == ("budget", "BUDGET_EXHAUSTED")
    trajectory = await handle.trajectory()
    assert [call.state for call in trajectory.calls] == ["delivered"] * 3


@pytest.mark.requirement("R59", "R62", "R83")
async def test_work_of_a_timed_out_agent_is_kept_and_labelled(stack: Running) -> None:
    """One answer came and one never does; the first is a sample, and says how its rollout ended."""
    never, held = asyncio.Event(), asyncio.Event()

    async def hold_the_second(call: ModelCall) -> None:
        if call.index:
            held.set()
            await never.wait()

    for limit in limits(10.0):
        label = secrets.token_hex(8)
        async with training(stack, label) as trainer:
            trainer.before = hold_the_second
            handle = await stack.ps.rollouts.create(
                copy_task(stack), "shell", labels={"test": label}, limits=Limits(agent=limit), max_attempts=3
            )
            finished = await finish(handle)
        if held.is_set():
            break  # else the time was over before the work was done
    else:
        raise AssertionError("no limit was long enough")
    failure = finished.result.failure
    assert failure is not None
    assert (failure.cause, failure.caused_by, failure.reason) == ("timeout", "agent", "AGENT_TIMED_OUT")
    assert finished.result.rollout.attempts == 1
    [exited] = [event.payload for event in finished.events if isinstance(event.payload, AgentExited)]
    assert exited.exit.reason == "timed_out"
    assert finished.reward == 1.0, "it had done its work, and is graded by what it left"
    trajectory = await handle.trajectory()
    assert (trajectory.failure_cause, trajectory.failure_caused_by) == ("TIMEOUT", "AGENT")
    assert [call.state for call in trajectory.calls] == ["delivered", "cancelled"]
    [sample] = trajectory.samples
    assert int(sample.loss_mask.sum()) == trajectory.calls[0].sampled_count


@pytest.mark.requirement("R46", "R54", "R55", "R95")
async def test_the_limits_that_a_rollout_asks_for_reach_its_sandbox(stack: Running) -> None:
    """A declared capability, never a silent downgrade; too much is refused by field."""
    [local] = [item for item in await stack.ps.sandboxes.backends() if item.name == "local"]
    assert {"limit_disk", "limit_inodes"} <= local.capabilities and local.disk_limit in ("watched", "hard")
    async with training(stack, "limits", lambda _prompt: bash("true")):
        handle = await stack.ps.rollouts.create(
            copy_task(stack),
            "shell",
            labels={"test": "limits"},
            sandbox=SandboxChoice(resources=Resources(memory_bytes=1 << 60, disk_bytes=10 << 20, inodes=1000)),
        )
        ended = await handle.result()
    assert ended.failure is not None and ended.failure.reason == "FIELD_INVALID"
    assert "memory_bytes" in ended.failure.message and "disk_bytes" not in ended.failure.message


@pytest.mark.requirement("R27", "R45")
async def test_rollout_gets_the_demanded_user_and_kernel_or_an_error(stack: Running) -> None:
    """The choice reaches the sandbox, and what it has not is named."""
    async with training(stack, "users", lambda _prompt: bash("true")):
        own, *others = [
            await stack.ps.rollouts.create(
                copy_task(stack),
                "shell",
                labels={"test": "users"},
                sandbox=sandbox,
                budgets=Budgets(max_calls=1),
            )
            for sandbox in (
                SandboxChoice(user="agent"),
                SandboxChoice(user="somebody-else"),
                SandboxChoice(own_kernel=True),
            )
        ]
        ended, refused = await own.result(), [await other.result() for other in others]
    assert ended.failure is not None and ended.failure.cause == "budget"
    assert [result.failure and result.failure.reason for result in refused] == ["CAPABILITY_MISSING"] * 2
