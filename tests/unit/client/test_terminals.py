"""Terminal episodes against a driver that follows a script: what is asked for, and what breaks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.unit.client.conftest import Fakes, Refusal

from penstock.client import InvalidArgument, Limits, Penstock, SandboxChoice, Task, Unavailable
from penstock.driver.v1 import terminal_service_pb2 as pb

OPENED = pb.OpenTerminalResponse(terminal=pb.Terminal(terminal_id="t1"))


class LateRefusal(Refusal):
    """UNAVAILABLE, two minutes later by the loop's clock."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__(grpc.StatusCode.UNAVAILABLE, "X")
        self._clock = clock

    async def abort(self, context: Any) -> None:
        self._clock[0] += 120.0
        await super().abort(context)


@pytest.mark.requirement("R51")
async def test_long_step_is_followed_when_its_stream_breaks(
    ps: Penstock, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same step id, as often as it breaks; a driver that is away from the beginning is still given up."""
    fakes.queue("OpenTerminal", OPENED)
    terminal = await ps.terminals.open(Task(task_id="t", instruction="i"))
    loop, clock = asyncio.get_running_loop(), [0.0]
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + clock[0])
    fakes.queue("Step", LateRefusal(clock), LateRefusal(clock), pb.StepResponse(step_id="s", ended=True))
    assert (await terminal.run("make", step_id="s")).ended
    monkeypatch.setattr("penstock.client.transport.patience._PATIENCE_S", -1.0)
    fakes.queue("Step", Refusal(grpc.StatusCode.UNAVAILABLE, "X"))
    with pytest.raises(Unavailable):
        await terminal.run("make")


@pytest.mark.requirement("R63")
async def test_tasks_sandbox_choices_hold_unless_overridden(ps: Penstock, fakes: Fakes) -> None:
    """A task for another image or an own kernel runs nowhere else; time and labels likewise."""
    task = Task(
        task_id="t",
        instruction="i",
        sandbox=SandboxChoice(image="debian:12", own_kernel=True),
        limits=Limits(agent=90.0),
        labels={"a": "task", "b": "task"},
    )
    fakes.queue("OpenTerminal", OPENED, OPENED)
    await ps.terminals.open(task)
    await ps.terminals.open(task, sandbox=SandboxChoice(backend="docker"), wall_time=7.0, labels={"b": "own"})
    first, second = fakes.requests["OpenTerminal"]
    assert (first.sandbox.image, first.sandbox.own_kernel, first.wall_time.seconds) == ("debian:12", True, 90)
    assert (second.sandbox.image, second.sandbox.backend, second.wall_time.seconds) == ("debian:12", "docker", 7)
    assert (dict(first.labels), dict(second.labels)) == ({"a": "task", "b": "task"}, {"a": "task", "b": "own"})


@pytest.mark.requirement("R63")
async def test_a_task_with_a_dockerfile_is_refused_without_its_image(ps: Penstock, tmp_path: Path) -> None:
    """It does not run in the default image instead."""
    with pytest.raises(InvalidArgument) as refused:
        await ps.terminals.open(Task(task_id="t", instruction="i", build=tmp_path))
    assert refused.value.reason == "TASK_IMAGE"
