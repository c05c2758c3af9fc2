"""Rollouts of the real shell agent in real sandboxes against the real gate, through the public client."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
from tests.integration.driver.stack import TOKEN, Stack

from penstock.client import (
    AgentChoice,
    Command,
    Completion,
    InvalidArgument,
    LogprobsMode,
    ModelCall,
    NotFound,
    Penstock,
    RewardFrom,
    RolloutHandle,
    Task,
    Tokenizer,
    Verifier,
    VersionSpan,
)
from penstock.driver.v1 import rollout_service_pb2, rollout_service_pb2_grpc
from penstock.sandbox.v1 import sandbox_pb2, sandbox_service_pb2, sandbox_service_pb2_grpc
from penstock_chassis.channel import connect as channel
from penstock_codec import Codec
from penstock_driver.agents.registry import built_in_specs

TASK = Task(
    task_id="copy",
    instruction='copy note.txt to out.txt: it\'s "$(x)" `y` \\',
    setup=[Command(shell="printf word > note.txt")],
    verifier=Verifier(
        commands=[
            Command(shell="cmp note.txt out.txt && echo 1 > $PENSTOCK_REWARD_FILE || echo 0 > $PENSTOCK_REWARD_FILE")
        ],
        reward=RewardFrom.FILE,
    ),
    metadata={"split": "train"},
)
SOURCE = Tokenizer("tiny")


def completion(codec: Codec, text: str) -> Completion:
    """What an engine would have sampled."""
    assert codec.end_of_turn_id is not None
    ids = np.append(codec.encode(text), codec.end_of_turn_id).astype(np.int32)
    return Completion(
        token_ids=ids,
        logprobs=np.full(len(ids), -0.5, np.float32),
        logprobs_mode=LogprobsMode.PROCESSED,
        versions=(VersionSpan(3, 0, len(ids)),),
    )


def bash(command: str) -> str:
    """A tool call as the template's model writes it."""
    return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call>"


async def called(rollout: RolloutHandle) -> None:
    """Wait until a rollout's agent has called."""
    async with aclosing(rollout.calls()) as calls:
        async for _ in calls:
            return
    raise AssertionError(await rollout.refresh())


async def fork_kind(stack: Stack, rollout: RolloutHandle) -> int:
    """How the driver says that a rollout's sandbox was copied, which the Python client leaves out."""
    async with channel(stack.driver.address, TOKEN) as driver_channel:
        rollouts = rollout_service_pb2_grpc.RolloutServiceStub(driver_channel)
        request = rollout_service_pb2.GetRolloutRequest(rollout_id=rollout.rollout_id)
        return (await rollouts.GetRollout(request)).rollout.fork_kind


async def play(rollout: RolloutHandle, codec: Codec, *texts: str) -> list[ModelCall]:
    """Answer a rollout's calls in order."""
    calls: list[ModelCall] = []
    async with aclosing(rollout.calls()) as coming:
        async for call in coming:
            await call.deliver(completion(codec, texts[len(calls)]))
            calls.append(call)
            if len(calls) == len(texts):
                break
    assert len(calls) == len(texts), await rollout.refresh()
    return calls


@pytest.mark.requirement("R17", "R18", "R57", "R71", "R79", "R82")
async def test_a_gate_rollout_ends_with_a_reward_and_a_token_exact_trajectory(
    penstock: Penstock, stack: Stack, codec: Codec
) -> None:
    """The whole of a rollout's life, as a trainer sees it."""
    rollout = await penstock.rollouts.create(TASK, "shell", source=SOURCE, run_id="run-1", labels={"split": "train"})
    first, second = await play(rollout, codec, bash("cat note.txt > out.txt"), "done")
    result = await rollout.result()
    assert result.outcome.completed, result.outcome
    assert result.reward is not None
    assert result.reward.value == 1.0
    assert TASK.instruction in codec.decode(first.prompt_token_ids)
    assert second.prompt_token_ids[: first.prompt_count].tolist() == first.prompt_token_ids.tolist()
    trajectory = await rollout.trajectory()
    assert (trajectory.agent, trajectory.task_id, trajectory.run_id) == ("shell", "copy", "run-1")
    assert dict(trajectory.labels) == {"split": "train"}
    assert dict(trajectory.task_metadata) == {"split": "train"}
    (sample,) = trajectory.samples
    expected = [*completion(codec, bash("cat note.txt > out.txt")).token_ids, *completion(codec, "done").token_ids]  # type: ignore[misc]
    assert sample.input_ids[sample.loss_mask.astype(bool)].tolist() == [int(token) for token in expected]
    kinds = [type(event.payload).__name__ for event in [event async for event in rollout.events()]]
    assert kinds.count("CallFinished") == 2
    assert kinds[-1] == "Ended"
    resumed = [event.sequence async for event in rollout.events(after=5)]
    assert resumed == list(range(6, len(kinds) + 1))
    assert await fork_kind(stack, rollout) == sandbox_pb2.FORK_KIND_FILESYSTEM


@pytest.mark.requirement("R52", "R57", "R76")
async def test_a_group_shares_its_setup_and_each_rollout_is_graded_by_itself(penstock: Penstock, codec: Codec) -> None:
    """Two of four write the right word, and none sees the others' files."""
    group = await penstock.rollouts.create(TASK, "shell", n=4, source=SOURCE)

    async def answer(call: ModelCall) -> None:
        right = (call.group_index or 0) % 2 == 0
        text = (
            "done"
            if call.index
            else bash("test ! -e out.txt && cat note.txt > out.txt" if right else "echo no > out.txt")
        )
        await call.deliver(completion(codec, text))

    async with asyncio.TaskGroup() as tasks:

        async def serve() -> None:
            async for call in group.calls():
                tasks.create_task(answer(call))

        server = tasks.create_task(serve())
        results = await group.results()
        server.cancel()
    rewards = {result.rollout_id: result.reward.value for result in results if result.reward}
    assert [rewards[rollout_id] for rollout_id in group.rollout_ids] == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.requirement("R58")
async def test_a_failed_setup_reaches_neither_the_gate_nor_the_verifier(penstock: Penstock) -> None:
    task = replace(TASK, setup=[Command(shell="true"), Command(shell="echo why >&2; exit 7")])
    rollout = await penstock.rollouts.create(task, "shell", source=SOURCE)
    events = [event.payload async for event in rollout.events()]
    finished = [event for event in events if type(event).__name__ == "CommandFinished"]
    assert [(item.exit.code, item.stderr_tail) for item in finished] == [(0, b""), (7, b"why\n")]  # type: ignore[union-attr]
    outcome = (await rollout.refresh()).outcome
    assert outcome is not None
    assert outcome.failure is not None
    assert (outcome.failure.reason, outcome.reward) == ("SETUP_FAILED", None)


@pytest.mark.requirement("R70")
async def test_cancelling_returns_when_the_sandbox_is_gone(penstock: Penstock, codec: Codec) -> None:
    """While the call waits at the gate."""
    rollout = await penstock.rollouts.create(TASK, "shell", source=SOURCE)
    await called(rollout)
    await rollout.cancel("enough")
    await rollout.cancel("again")
    outcome = (await rollout.refresh()).outcome
    assert outcome is not None
    assert outcome.failure is not None
    assert outcome.failure.reason == "CANCELLED"


@pytest.mark.requirement("R63", "R65")
async def test_bad_input_is_refused_by_field_before_anything_starts(penstock: Penstock) -> None:
    """Several faults at once are all named."""
    with pytest.raises(NotFound, match="known agents: " + ", ".join(sorted(spec.name for spec in built_in_specs()))):
        await penstock.rollouts.create(TASK, "nobody")
    with pytest.raises(NotFound, match=r"there is no agent claude_cod; did you mean claude-code\? known agents: "):
        await penstock.rollouts.create(TASK, "claude_cod")
    with pytest.raises(InvalidArgument) as caught:
        await penstock.rollouts.create(TASK, AgentChoice(name="shell", options={"colour": "red", "max_turns": 0}))
    assert {violation.field for violation in caught.value.violations} == {
        "spec.agent.options.colour",
        "spec.agent.options.max_turns",
    }
    bad = Task(
        task_id="t", instruction=" ", setup=[Command(shell=" ")], verifier=Verifier(commands=[]), env={"A B": ""}
    )
    with pytest.raises(InvalidArgument) as caught:
        await penstock.rollouts.create(bad, "shell", labels={"penstock_driver": "mine"})
    assert {violation.field for violation in caught.value.violations} == {
        "spec.task.instruction",
        "spec.task.setup[0].command",
        "spec.task.verifier.commands",
        "spec.task.env.A B",
        "spec.labels.penstock_driver",
    }
    grading = Verifier(
        commands=[Command(shell="true")],
        restore=["tests/**", "**", "../x"],
        fresh_fork=False,
        changes_below=["/", "/tmp/out", "./tmp"],
        component_ranges={"a": (1.0, 0.0)},
    )
    with pytest.raises(InvalidArgument) as caught:
        await penstock.rollouts.create(Task(task_id="t", instruction="x", verifier=grading), "shell")
    assert {violation.field.removeprefix("spec.task.verifier.") for violation in caught.value.violations} == {
        *("restore[1]", "restore[2]", "component_ranges", "component_ranges.a"),
        *("changes_below", "changes_below[0]", "changes_below[1]"),
    }
    assert not [rollout async for rollout in penstock.rollouts.list(task_id="t")]


@pytest.mark.requirement("R49", "R50", "R61", "R127")
async def test_a_dead_driver_loses_no_rollout_and_leaves_no_sandbox(
    penstock: Penstock, stack: Stack, codec: Codec
) -> None:
    """Kill -9 while an agent waits at the gate; the next start goes on with it, and releases it at its end."""
    rollout = await penstock.rollouts.create(TASK, "shell", source=SOURCE)
    await called(rollout)
    await asyncio.to_thread(stack.driver.kill)
    await asyncio.to_thread(stack.driver.start)
    await play(rollout, codec, bash("cat note.txt > out.txt"), "done")
    assert (await rollout.result()).outcome.completed
    assert await fork_kind(stack, rollout) == sandbox_pb2.FORK_KIND_FILESYSTEM
    async with channel(stack.sandbox.address, TOKEN) as sandbox_channel:
        sandboxes = sandbox_service_pb2_grpc.SandboxServiceStub(sandbox_channel)
        answer = await sandboxes.ListSandboxes(sandbox_service_pb2.ListSandboxesRequest())
        assert not [item for item in answer.sandboxes if item.spec.labels["penstock_rollout"] == rollout.rollout_id]
