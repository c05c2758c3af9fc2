"""TRL's async harness worker on our sessions: the real one, in its own processes, on the real services."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from tests.support.copy_script import COPY_SCRIPT

from penstock.adapters.harness.traces import training_trace
from penstock.client import FailureCause, connect
from penstock.client.transport.endpoints import write_connection
from penstock.local.stack import LocalStack
from penstock_codec import tiny_tokenizer

WORKER = Path(__file__).with_name("worker.py")
OPENENV = Path(__file__).parents[3] / ".venv-openenv"
"""The `openenv` package, whose dependencies no other environment here can have: it is put before them."""
WANTED = 2


@pytest.fixture(scope="module")
def scripted_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a template, which is all that the scripted engine needs."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_tokenizer.build().write(folder)
    (folder / "script.yaml").write_text(COPY_SCRIPT)
    return folder


@pytest_asyncio.fixture
async def scripted(tmp_path: Path, scripted_model: Path) -> AsyncIterator[LocalStack]:
    """The services, with an engine that follows a script."""
    made = LocalStack(
        model_dir=scripted_model,
        engine="scripted",
        engine_options={"script": str(scripted_model / "script.yaml")},
        state_dir=tmp_path / "state",
    )
    async with made:
        yield made


@pytest.mark.requirement("R70", "R79", "R82", "R84")
async def test_trls_harness_worker_runs_on_our_sessions_unchanged(
    scripted: LocalStack, scripted_model: Path, tmp_path: Path
) -> None:
    """What it gives a trainer is what was captured and graded; stopping it leaves no sandbox."""
    (packages,) = OPENENV.glob("lib/python3*/site-packages")
    connection = tmp_path / "connection.json"
    write_connection(connection, scripted.endpoints, pid=os.getpid())
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(WORKER),
        str(scripted_model),
        str(connection),
        str(WANTED),
        env={**os.environ, "PYTHONPATH": str(packages), "TRL_EXPERIMENTAL_SILENCE": "1"},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0
    samples = [json.loads(line) for line in out.splitlines()]
    assert len(samples) == WANTED

    captured = []
    async with connect(scripted.endpoints) as ps:
        async for rollout in ps.rollouts.list():
            ended = await (await ps.rollouts.attach(rollout.rollout_id)).result()
            if ended.failure is not None:
                # The worker was stopped while this one ran, and closed its session.
                assert ended.failure.cause is FailureCause.CANCELLED
                continue
            trajectory = await ps.rollouts.trajectory(rollout.rollout_id, bodies=True)
            assert trajectory.reward is not None and trajectory.reward.value == 1.0
            captured.append((trajectory.samples[0], training_trace(trajectory)))
        assert [item async for item in ps.sandboxes.list()] == []
    for sample in samples:
        (whole, trace) = next(item for item in captured if item[0].input_ids.tolist() == sample["input_ids"])
        np.testing.assert_array_equal(sample["mask"], whole.loss_mask.astype(int))
        assert whole.logprobs is not None
        np.testing.assert_allclose(sample["logprobs"], whole.logprobs)
        assert sum(sample["mask"]) == sum(len(turn.completion_token_ids) for turn in trace.turns)
        assert (sample["reward"], sample["advantage"], sample["said"]) == (1.0, 0.0, "Done.")
