"""An attempt whose sandbox is lost: the next one replays its answers, and nothing is sampled twice."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from google.protobuf.struct_pb2 import Struct
from tests.support.copying import copy_task, finish, training
from tests.support.policy import Reply, in_shell, in_turn
from tests.support.services.restarting import RestartableStack, restartable
from tests.support.services.stack import Running

from penstock.client import HostTool, HostToolCall, ModelCall, Progress, SandboxHandle, Task, Trajectory
from penstock.client.types.results import AttemptFailed
from penstock.driver.v1 import agent_pb2
from penstock.trajectory.v1 import trajectory_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

TURNS: Reply = in_turn(in_shell("echo one"), in_shell("echo two"), in_shell("bash work.sh"), "The word is copied.")
"""Four calls; the third does the work."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    async with restartable(tmp_path_factory.mktemp("replay")) as found:
        yield found


async def sandboxes_of(running: Running, call: ModelCall) -> list[SandboxHandle]:
    """Those of the attempt that asks. The next attempt has others, perhaps before a restart is seen to be over."""
    labels = {"penstock_rollout": call.rollout_id}
    return [await running.ps.sandboxes.attach(name) async for name, _ in running.ps.sandboxes.list(labels=labels)]


async def played(
    world: tuple[Running, RestartableStack], lose_at: Sequence[int], *, restart: str = "", **options: Any
) -> tuple[Any, list[int], Trajectory]:
    """A rollout whose sandbox is deleted while it waits for the answers to these calls, one in each attempt.

    Returns how it ended, the numbers of the calls that the trainer was asked, and the trajectory.
    """
    running, stack = world
    label = secrets.token_hex(8)
    left = list(lose_at)

    async with training(running, label, TURNS) as trainer:

        async def before(call: ModelCall) -> None:
            if left and call.index == left[0]:
                left.pop(0)
                lost = await sandboxes_of(running, call)
                assert lost
                if restart:
                    await stack.restart(restart)  # type: ignore[arg-type]
                for sandbox in lost:
                    await sandbox.delete()
                await asyncio.Event().wait()  # the answer comes too late for anybody

        trainer.before = before
        handle = await running.ps.rollouts.create(
            copy_task(running), "shell", labels={"test": label}, max_attempts=4, **options
        )
        finished = await finish(handle)
        trajectory = await handle.trajectory()
        asked = [call.index for call in trainer.calls]
    assert not left, "each loss happened"
    return finished, asked, trajectory


def sampled_by(trajectory: Trajectory) -> list[tuple[int, int]]:
    """The number of each call, and of the attempt that sampled it."""
    last = trajectory.attempt
    return [(one.index, one.replayed_from.attempt if one.replayed_from else last) for one in trajectory.calls]


@pytest.mark.requirement("R128", "R130")
@pytest.mark.parametrize("lose_at", [1, 2, 3])
async def test_a_lost_sandbox_costs_no_sampled_token(world: Any, lose_at: int) -> None:
    finished, asked, trajectory = await played(world, [lose_at])
    assert finished.reward == 1.0, finished.agent_said()
    failures = [event.payload for event in finished.events if isinstance(event.payload, AttemptFailed)]
    assert len(failures) == 1 and finished.result.rollout.attempts == 2
    assert sampled_by(trajectory) == [(number, 1 if number < lose_at else 2) for number in range(4)]
    # The call at which it was lost is asked again; its answer had reached nobody.
    assert sorted(asked) == sorted([*range(4), lose_at])
    assert [item for item in trajectory.findings if item.reason == "REPLAY_DIVERGED"] == []
    (sample,) = trajectory.samples
    assert sample.logprobs is not None
    assert sample.loss_mask.any() and np.isfinite(sample.logprobs[sample.loss_mask]).all()


@pytest.mark.requirement("R128")
async def test_several_losses_replay_what_each_attempt_sampled(world: Any) -> None:
    finished, _, trajectory = await played(world, [1, 2, 3])
    assert finished.reward == 1.0, finished.agent_said()
    assert sampled_by(trajectory) == [(0, 1), (1, 2), (2, 3), (3, 4)]


@pytest.mark.requirement("R128")
async def test_an_earlier_loss_in_the_next_attempt_forgets_no_recorded_answer(world: Any) -> None:
    """The second attempt is lost while its third call waits; the first one had sampled as many."""
    finished, asked, trajectory = await played(world, [3, 3])
    assert finished.reward == 1.0, finished.agent_said()
    assert sampled_by(trajectory) == [(0, 1), (1, 1), (2, 1), (3, 3)]
    assert sorted(asked) == [0, 1, 2, 3, 3, 3]


@pytest.mark.requirement("R128", "R127")
@pytest.mark.parametrize("service", ["driver", "interception"])
async def test_a_service_that_is_killed_with_the_sandbox_changes_nothing(world: Any, service: str) -> None:
    finished, _, trajectory = await played(world, [2], restart=service)
    assert finished.reward == 1.0, finished.agent_said()
    assert sampled_by(trajectory) == [(0, 1), (1, 1), (2, 2), (3, 2)]


_CALLER = """
import json, os, urllib.request
given = json.load(open(os.path.expanduser("~/caller.json")))
server = next(iter(given["servers"].values()))
told = [{"role": "user", "content": "begin"}]

def post(url, body, headers):
    known = {"content-type": "application/json", "accept": "application/json", **headers}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), known)))

def think():
    body = {"model": "m", "messages": told}
    answer = post(given["url"] + "/chat/completions", body, {"authorization": "Bearer " + given["key"]})
    told.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})

def work(word, number):
    call = {"name": "work", "arguments": {"word": word, "of": "test"}}
    body = {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": call}
    result = post(server["url"], body, {**server["headers"], "mcp-session-id": "s"})["result"]
    told.append({"role": "user", "content": result["content"][0]["text"]})

think()
work("a", 1)
work("a", 2)
think()
work("b", 3)
think()
work("c", 4)
think()
"""
"""An agent that asks the model four times, and a host tool in between: twice the same, then others."""


def _caller() -> agent_pb2.AgentSpec:
    settings = Struct()
    settings.update({"url": "{{base_url}}", "key": "{{api_key}}"})
    return agent_pb2.AgentSpec(
        name="caller",
        version="1",
        argv=["python3", "-c", _CALLER],
        instruction=agent_pb2.InstructionDelivery(method=agent_pb2.InstructionDelivery.METHOD_STDIN),
        files=[agent_pb2.ConfigFile(path="caller.json", json=settings)],
        mcp=agent_pb2.McpConfig(path="caller.json", key="servers", entry="{url: url, headers: headers}"),
        dialects=[trajectory_pb2.DIALECT_CHAT_COMPLETIONS],
    )


@pytest.mark.requirement("R128")
@pytest.mark.parametrize("service", ["", "driver", "interception"])
async def test_a_host_tool_runs_once_over_all_attempts(world: Any, service: str) -> None:
    """Its results are replayed with the answers, also if the gate or the driver is killed with the sandbox."""
    running, stack = world
    label = secrets.token_hex(8)
    words: list[str] = []
    left = [2, 3]

    async def work(call: HostToolCall[Any]) -> str:
        words.append(call.arguments["word"])
        return f"worked on {call.arguments['word']} as number {len(words)}"

    async with training(running, label, in_turn("one", "two", "three", "four")) as trainer:
        await trainer.session.offer_tools([HostTool(name="work", function=work)])

        async def before(call: ModelCall) -> None:
            if left and call.index == left[0]:
                left.pop(0)
                lost = await sandboxes_of(running, call)
                if service:
                    await stack.restart(service)
                for sandbox in lost:
                    await sandbox.delete()
                await asyncio.Event().wait()

        trainer.before = before
        await running.ps.agents.register(_caller())
        handle = await running.ps.rollouts.create(
            Task(task_id="tools", instruction="begin"), "caller", labels={"test": label}, max_attempts=4
        )
        finished = await finish(handle)
        trajectory = await handle.trajectory()
    assert finished.result.failure is None, finished.agent_said()
    assert finished.result.rollout.attempts == 3 and not left
    assert words == ["a", "a", "b", "c"]
    origins = [one.replayed_from for one in trajectory.host_tool_calls]
    assert [one.attempt if one is not None else 3 for one in origins] == [1, 1, 1, 2]
    assert sampled_by(trajectory) == [(0, 1), (1, 1), (2, 2), (3, 3)]
    assert [item for item in trajectory.findings if item.reason == "REPLAY_DIVERGED"] == []


@pytest.mark.requirement("R129")
async def test_a_branch_asks_no_host_again_before_its_point(world: Any) -> None:
    running, _ = world
    label = secrets.token_hex(8)
    words: list[str] = []

    async def work(call: HostToolCall[Any]) -> str:
        words.append(call.arguments["word"])
        return f"worked on {call.arguments['word']}"

    async with training(running, label, in_turn("one", "two", "three", "four")) as trainer:
        await trainer.session.offer_tools([HostTool(name="work", function=work)])
        await running.ps.agents.register(_caller())
        parent = await running.ps.rollouts.create(
            Task(task_id="tools", instruction="begin"), "caller", labels={"test": label}
        )
        await finish(parent)
        words.clear()
        (branch,) = await (await parent.branch(2)).results(samples_only=False)
    assert branch.failure is None and branch.trajectory is not None
    assert words == ["c"]
    origins = [one.replayed_from and one.replayed_from.rollout_id for one in branch.trajectory.host_tool_calls]
    assert origins == [*[parent.rollout_id] * 3, None]


async def test_replay_can_be_switched_off(world: Any) -> None:
    finished, asked, trajectory = await played(world, [2], replay="off")
    assert finished.reward == 1.0, finished.agent_said()
    assert [one.replayed_from for one in trajectory.calls] == [None] * 4
    assert sorted(asked) == [0, 0, 1, 1, 2, 2, 3]


async def test_the_events_say_what_is_replayed(world: Any) -> None:
    finished, _, _ = await played(world, [2])
    said = [event.payload.message for event in finished.events if isinstance(event.payload, Progress)]
    assert "2 recorded calls are replayed as far as the agent asks the same" in said


async def test_the_recordings_of_ended_rollouts_are_removed(world: Any) -> None:
    _, stack = world
    await played(world, [2])
    folder = Path(stack.state_dir) / "driver" / "recordings"
    assert list(folder.iterdir()) == []
