"""`penstock up --engine none`: a tokenizer and a template alone, for a trainer whose engine is its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.copying import copy_task, finish, training
from tests.support.policy import FILES
from tests.support.services.stack import Running, disjoint_uids

from penstock.cli.connections.model_sources import require_engine
from penstock.client import Command, FailedPrecondition, Mode, Task, Upstream, Verifier, connect
from penstock.client.errors import PenstockError
from penstock.client.tasks.spec import Solution
from penstock.local.stack import LocalStack
from penstock.tasks.solutions import prove


@pytest.fixture
async def alone(tmp_path: Path) -> AsyncIterator[Running]:
    """Services whose model directory has a tokenizer and no weights."""
    tmp_path.chmod(0o755)
    model = tmp_path / "model"
    FILES.write(model)
    assert not (model / "model.safetensors").exists()
    stack = LocalStack(
        model_dir=model,
        engine="none",
        state_dir=tmp_path / "state",
        settings={"sandbox": {"first_uid": disjoint_uids()}},
    )
    async with stack, connect(stack.endpoints) as ps:
        yield Running(stack, ps, stack.state_dir)


@pytest.mark.requirement("R20")
async def test_a_trainer_answers_rollouts_with_its_own_engine(alone: Running) -> None:
    """Nothing but a tokenizer and a template is served, and the rollout is exact."""
    async with training(alone, "own-engine"):
        handle = await alone.ps.rollouts.create(copy_task(alone), "shell", labels={"test": "own-engine"})
        finished = await asyncio.wait_for(finish(handle), 120)
    assert finished.reward == 1.0, finished.agent_said()
    assert (await handle.trajectory()).grade == "exact"


@pytest.mark.requirement("R138")
async def test_tasks_are_proved_without_an_engine(alone: Running) -> None:
    """Neither a solution nor no work calls a model."""
    task = Task(
        task_id="write",
        instruction="Write hello to out.txt.",
        verifier=Verifier(commands=[Command(shell="grep -qx hello out.txt")]),
        solution=Solution(commands=[Command(shell="echo hello > out.txt")]),
    )
    (proof,) = await prove(alone.ps, [task])
    assert proof.holds and (proof.solution, proof.nothing) == (1.0, 0.0), proof.problems


@pytest.mark.requirement("R27")
async def test_engine_calls_are_refused_before_anything_starts(alone: Running) -> None:
    """A rollout that the service would have to answer, a generation, a weight push."""
    with pytest.raises(FailedPrecondition, match="engine = none") as refused:
        await alone.ps.rollouts.create(copy_task(alone), "shell", mode=Mode.TRANSPARENT_PROXY)
    assert refused.value.reason == "SOURCE_UNSUITABLE"
    with pytest.raises(FailedPrecondition, match="let the trainer answer") as nobody:
        await alone.ps.inference.generate([1, 2, 3])
    assert nobody.value.reason == "ENGINE_NONE"
    with pytest.raises(PenstockError) as weights:
        await alone.ps.inference.update_weights(1, {"weight": np.zeros(2, np.float32)})
    assert weights.value.reason == "CAPABILITY_MISSING"


@pytest.mark.requirement("R27")
async def test_the_command_line_names_what_answers_where_no_engine_does(
    alone: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rollout of the command line would be answered by the engine; one with an upstream needs none."""
    await require_engine(alone.ps, Upstream(name="mine", model="m"))
    with pytest.raises(SystemExit):
        await require_engine(alone.ps, None)
    assert "have no engine" in capsys.readouterr().err
