"""A trainer's day, through all four services: rollouts of the reference agent in real sandboxes."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from tests.integration.client.conftest import TASK

from penstock.analysis import export
from penstock.analysis.export import write
from penstock.analysis.verify_chain import verify
from penstock.client import (
    AlreadyDelivered,
    AlreadyExists,
    Command,
    CommandFinished,
    Completion,
    Ended,
    FailedPrecondition,
    FailureCause,
    InvalidArgument,
    InvalidCompletion,
    NotFound,
    Penstock,
    Phase,
    PhaseChanged,
    ResultRejected,
    RolloutHandle,
    SandboxSpec,
    Task,
    TokenTensor,
)
from penstock.client.intercept.calls import ModelCall

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def answer_all(ps: Penstock, handle: RolloutHandle, delivered: dict[str, Completion]) -> None:
    """A trainer whose engine is the inference service."""
    async for call in handle.calls(policy_version=0):
        assert len(call.prompt_token_ids) == call.prompt_count
        completion = await ps.inference.generate(call.prompt_token_ids, call.sampling, session_id=call.rollout_id)
        await call.deliver(completion)
        delivered[call.call_id] = completion


@pytest.mark.requirement("R82", "R84")
async def test_trainer_answers_an_agents_calls_and_gets_a_trajectory(ps: Penstock) -> None:
    """Samples hold the delivered ids and logprobs, masked 1 exactly where they were sampled."""
    delivered: dict[str, Completion] = {}
    handle = await ps.rollouts.create(TASK, "shell", labels={"suite": "client"})
    await answer_all(ps, handle, delivered)
    result = await handle.result()
    assert result.failure is None and result.reward is not None and result.reward.value == 0.75

    trajectory = await handle.trajectory()
    assert [call.state for call in trajectory.calls] == ["delivered", "delivered"]
    assert (trajectory.task_id, trajectory.agent, trajectory.task_metadata) == ("copy-note", "shell", {"level": 1})
    for call in trajectory.calls:
        sent = delivered[call.call_id]
        assert call.completion is not None and call.completion.token_ids is not None
        assert sent.token_ids is not None and sent.logprobs is not None and call.completion.logprobs is not None
        assert call.completion.token_ids.tolist() == sent.token_ids.tolist()
        assert call.completion.logprobs.tolist() == sent.logprobs.tolist()
        assert len(trajectory.prompt_of(call.call_id)) == call.prompt_count
    (sample,) = trajectory.samples
    sampled = np.concatenate([c.token_ids for c in delivered.values() if c.token_ids is not None])
    assert sample.input_ids[sample.loss_mask].tolist() == sampled.tolist()
    second = trajectory.calls[1]
    assert sample.input_ids[: second.prompt_count].tolist() == trajectory.prompt_of(second.call_id).tolist()


@pytest.mark.requirement("R132")
async def test_a_trainers_routed_experts_are_in_samples_exports_and_branches(ps: Penstock) -> None:
    """Each call has the rows that earlier ones lack; a reader gets them only if it asks."""
    rows: dict[int, list[int]] = {}

    def routed(call: ModelCall, completion: Completion) -> Completion:
        start = max(0, call.shared_prefix_count - 1)
        count = call.prompt_count + len(completion) - 1 - start
        own = (np.arange(2 * count).reshape(count, 2, 1) + len(rows)) % 250
        rows.update({start + n: row for n, row in enumerate(own[:, :, 0].tolist())})
        return replace(completion, tensors=(TokenTensor.of("routed_experts", own.astype(np.uint8), start),))

    handle = await ps.rollouts.create(TASK, "shell", run_id="routed")
    async for call in handle.calls(policy_version=0):
        completion = await ps.inference.generate(call.prompt_token_ids, call.sampling, session_id=call.rollout_id)
        await call.deliver(routed(call, completion))
    whole, bare = await handle.trajectory(tensors=True), await handle.trajectory()
    (sample,) = whole.samples
    experts = sample.routed_experts()
    assert experts is not None and experts.dtype == np.uint8 and len(experts) == len(sample) - 1
    assert experts[:, :, 0].tolist() == [rows[position] for position in range(len(sample) - 1)]
    with pytest.raises(InvalidArgument, match="tensors=True"):
        bare.samples[0].routed_experts()
    assert all(call.completion is not None and call.completion.tensors[0].rows is not None for call in whole.calls)

    for trajectory in (whole, bare):
        turns, sequences = list(export.turns(trajectory)), list(export.sequences(trajectory))
        assert [row["completion_tensors"][0]["data"] is None for row in turns] == [trajectory is bare] * len(turns)
        proof = verify(turns, sequences)
        assert proof.calls == len(whole.calls) and not proof.problems
    turns = [*export.turns(whole)]
    turns[0]["completion_tensors"][0]["start"] += 1
    assert any("differ" in problem.message for problem in verify(turns).problems)
    (sequence,) = export.sequences(whole)
    sequence["tensors"][0]["sha256"] = "0" * 64
    found = [problem.message for problem in verify([*export.turns(whole)], [sequence]).problems]
    assert any("tensors does not match its calls" in message for message in found), found

    branches = await handle.branch(1)
    async for call in branches.calls(policy_version=0):
        await call.deliver(await ps.inference.generate(call.prompt_token_ids, call.sampling))
    (branch,) = await branches.results(tensors=True)
    assert branch.trajectory is not None
    replayed = branch.trajectory.samples[0].tensors[0]
    shared = whole.calls[1].prompt_shared_count
    assert replayed.rows is not None and replayed.end == shared - 1
    assert replayed.rows.tolist() == experts[: shared - 1].tolist()


@pytest.mark.requirement("R57", "R71")
async def test_events_are_ordered_and_readable_again_from_any_position(ps: Penstock) -> None:
    """Phases, commands with their real exit, and the end, resumable by sequence."""
    handle = await ps.rollouts.create(TASK, "shell", mode="transparent_proxy")
    events = [event async for event in handle.events()]
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    phases = [event.payload.phase for event in events if isinstance(event.payload, PhaseChanged)]
    assert phases[-1] is Phase.ENDED and Phase.RUNNING in phases and Phase.VERIFYING in phases
    commands = [event.payload for event in events if isinstance(event.payload, CommandFinished)]
    assert [command.exit.ok for command in commands] == [True, True]
    assert isinstance(events[-1].payload, Ended)
    again = [event async for event in handle.events(after=events[3].sequence)]
    assert [event.sequence for event in again] == [event.sequence for event in events[4:]]


async def test_a_group_runs_its_rollouts_and_gives_every_result_with_samples(ps: Penstock) -> None:
    """A group of n rollouts shares one prepared state; results come with what a trainer eats."""
    group = await ps.groups.create(TASK, "shell", 3, run_id="group-test")

    async def answer() -> None:
        async for call in group.calls():
            await call.delegate()

    answering = asyncio.create_task(answer())
    results = await group.results()
    await answering
    assert [result.rollout.index for result in results] == [0, 1, 2]
    assert {result.reward.value for result in results if result.reward is not None} == {0.75}
    assert all(result.trajectory is not None and result.trajectory.samples for result in results)
    assert group.info.complete and sorted(group.info.result_rollout_ids) == sorted(group.rollout_ids)


@pytest.mark.requirement("R29")
async def test_one_session_serves_a_run_and_each_answer_is_judged_alone(ps: Penstock) -> None:
    """A broken completion is refused by type and the call may be answered again; a second answer is refused."""
    async with ps.intercept(run_id="one-session", policy_version=0, messages=True) as session:
        handles = [await ps.rollouts.create(TASK, "shell", run_id="one-session") for _ in range(2)]
        answered = 0
        async for call in session.calls():
            assert call.messages[-1].role in ("user", "tool") and call.tools[0].name == "bash"
            with pytest.raises(InvalidCompletion):
                await call.deliver(Completion.of_tokens([1 << 30], [-1.0]))
            good = await ps.inference.generate(call.prompt_token_ids, call.sampling, session_id=call.rollout_id)
            await call.deliver(good)
            with pytest.raises(ResultRejected):
                await call.deliver(good)
            answered += 1
            if answered == 4:
                break
    for handle in handles:
        assert (await handle.result()).failure is None


async def test_pausing_holds_calls_until_resume(ps: Penstock) -> None:
    """Decision 8: the agent never sees a weight sync."""
    async with ps.intercept(run_id="paused") as session:
        assert await session.pause("weight sync") == 0
        handle = await ps.rollouts.create(TASK, "shell", run_id="paused")
        paused, answered = True, 0

        async def answer() -> None:
            nonlocal answered
            async for call in session.calls():
                assert not paused
                answered += 1
                await call.delegate()

        answering = asyncio.create_task(answer())
        async for event in handle.events():
            if isinstance(event.payload, PhaseChanged) and event.payload.phase is Phase.RUNNING:
                break
        paused = False
        await session.resume()
        assert (await handle.result()).failure is None
        assert answered == 2
        session.finish()
        await answering


@pytest.mark.requirement("R24", "R70")
async def test_a_cancelled_rollout_ends_its_calls_and_says_so(ps: Penstock) -> None:
    """Cancelling ends what waits, by type."""
    handle = await ps.rollouts.create(TASK, "shell")
    async for call in handle.calls():
        await handle.cancel("enough")
        await call.wait_ended()
        with pytest.raises(ResultRejected):
            await call.deliver(Completion.of_text("late"))
    result = await handle.result()
    assert result.failure is not None and result.failure.cause is FailureCause.CANCELLED


@pytest.mark.requirement("R29")
async def test_the_same_call_is_not_answered_twice_at_once(ps: Penstock) -> None:
    """A second answer is an error."""
    handle = await ps.rollouts.create(TASK, "shell")
    async for call in handle.calls():
        good = await ps.inference.generate(call.prompt_token_ids, session_id=call.rollout_id)
        first = asyncio.create_task(call.deliver(good))
        await asyncio.sleep(0)
        with pytest.raises(AlreadyDelivered):
            await call.deliver(good)
        with pytest.raises(InvalidArgument, match="completion: expected a Completion"):
            await call.deliver("x")  # type: ignore[arg-type]
        await first
    assert (await handle.result()).failure is None


async def test_bad_input_is_refused_by_type_before_anything_starts(ps: Penstock) -> None:
    """Errors name the field and the reason."""
    with pytest.raises(NotFound, match="shell"):
        await ps.rollouts.create(TASK, "no-such-agent")
    with pytest.raises(InvalidArgument) as caught:
        await ps.rollouts.create(TASK, "shell", options={"no_such_option": 1})
    assert caught.value.violations
    handle = await ps.rollouts.create(TASK, "shell", rollout_id="mine-1", mode="transparent_proxy")
    with pytest.raises(AlreadyExists):
        await ps.rollouts.create(TASK, "shell", rollout_id="mine-1", mode="transparent_proxy")
    await handle.result()


@pytest.mark.requirement("R58", "R74")
async def test_a_failed_setup_is_a_failure_of_the_task(ps: Penstock) -> None:
    """No agent, no verifier, no reward; R74: not graded is not zero."""
    task = Task(task_id="broken", instruction="x", setup=[Command(shell="echo no >&2; exit 3")])
    result = await (await ps.rollouts.create(task, "shell", mode="transparent_proxy")).result()
    assert result.failure is not None and result.failure.cause is FailureCause.TASK
    assert result.reward is None


@pytest.mark.parametrize("table", ["turns", "sequences"])
async def test_an_export_has_a_row_for_each_turn_or_sample(ps: Penstock, tmp_path: Path, table: str) -> None:
    """Export: lossless turns, and sequences with equal lengths."""
    handle = await ps.rollouts.create(TASK, "shell", mode="transparent_proxy", run_id=f"export-{table}")
    await handle.result()
    file = tmp_path / "out" / f"{table}.jsonl"
    count = await write(ps.rollouts.export(run_id=f"export-{table}"), file, table=table)
    rows: Sequence[dict[str, Any]] = [orjson.loads(line) for line in file.read_bytes().splitlines()]
    assert len(rows) == count == (2 if table == "turns" else 1)
    for row in rows:
        if table == "sequences":
            assert len(row["input_ids"]) == len(row["loss_mask"]) == len(row["logprobs"])
            assert row["reward"] == 0.75
        else:
            assert len(row["completion_token_ids"]) == len(row["completion_logprobs"])
            assert row["policy_spans"][-1]["end"] == len(row["completion_token_ids"])


@pytest.mark.requirement("R44")
async def test_sandboxes_and_agents_are_there_by_themselves(ps: Penstock) -> None:
    """The same services without a rollout; R44: files are bytes and every outcome is checked."""
    names = [agent.name async for agent in ps.agents.list()]
    assert {"claude-code", "codex", "opencode", "pi", "shell"} <= set(names)
    content = bytes(range(256)) * 3000
    async with await ps.sandboxes.create(SandboxSpec(env={"GREETING": "a 'b' $c"})) as sandbox:
        await sandbox.write_file("deep/er/file.bin", content, mode=0o640)
        assert await sandbox.read_file("deep/er/file.bin") == content
        said = await sandbox.run(["sh", "-c", 'printf %s "$GREETING"; cat >&2; exit 7'], stdin=b"in")
        assert (said.stdout, said.stderr, said.exit.code) == (b"a 'b' $c", b"in", 7)
        entries = [entry async for entry in sandbox.files("deep/er")]
        assert [(entry.name, entry.size_bytes) for entry in entries] == [("file.bin", len(content))]
        with pytest.raises(NotFound):
            await sandbox.read_file("absent")
        until = await sandbox.renew(600.0)
        assert 500.0 < (until - datetime.now(UTC)).total_seconds() <= 605.0
        (backend,) = [item for item in await ps.sandboxes.backends() if item.is_default]
        if not {"pause", "live_fork"} <= backend.capabilities:
            for refused in (sandbox.pause(), anext(sandbox.fork(1))):
                with pytest.raises(FailedPrecondition, match="cannot"):
                    await refused
            return
        await sandbox.pause()
        with pytest.raises(FailedPrecondition) as paused:
            await sandbox.run(["true"])
        assert paused.value.reason == "SANDBOX_PAUSED"
        async with aclosing(sandbox.fork(2, labels={"of": sandbox.sandbox_id})) as forks:
            children = [fork.made() async for fork in forks]
        await sandbox.resume()
        await sandbox.write_file("deep/er/file.bin", b"changed")
        for child in children:
            async with child:
                assert await child.read_file("deep/er/file.bin") == content
