"""The example that learns by the advantages of turns, against the NumPy engine and real sandboxes."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from tests.support.policy import CODEC, FILES
from tests.support.services.stack import disjoint_uids

from penstock.client import connect
from penstock.client.transport.endpoints import write_connection
from penstock.local.stack import LocalStack
from penstock_inference.testing import random_config, random_tensors, write_model

ROOT = Path(__file__).parents[3]
STEPS = 2


@pytest.mark.requirement("R129", "R82")
@pytest.mark.asyncio(loop_scope="session")
async def test_the_deciding_turn_alone_is_learned(tmp_path: Path) -> None:
    """Each step makes the right word no less likely there; the turn behind it changes nothing, so it is left alone."""
    tmp_path.chmod(0o755)
    changes = {"vocab_size": CODEC.vocab_size, "eos_token_id": FILES.stop_token_ids[0]}
    config = random_config("qwen3", max_position_embeddings=32768, **changes)
    model = write_model(tmp_path / "model", config, random_tensors(config))
    FILES.write(model)
    stack = LocalStack(
        model_dir=model, state_dir=tmp_path / "state", settings={"sandbox": {"first_uid": disjoint_uids()}}
    )
    async with stack, connect(stack.endpoints) as ps:
        write_connection(tmp_path / "connection.json", stack.endpoints, pid=None)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(ROOT / "examples/turn_advantages.py"), str(STEPS), "1"),
            env={**os.environ, "PENSTOCK_CONNECTION": str(tmp_path / "connection.json")},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        steps = [list(map(float, line.split()[-3:])) for line in re.findall(r"^step .*$", out.decode(), re.MULTILINE)]
        rollouts = [one async for one in ps.rollouts.list(run_id="turns-1")]
    assert len(steps) == STEPS, out.decode()
    decides = [1 / 3, *(turns[1] for turns in steps)]
    assert all(after >= before - 0.001 for before, after in pairwise(decides)), steps
    # Which rollout gets which draw is the machine's business: once in thousands of runs nothing differs there.
    rewards = {one.rollout_id: one.outcome.reward.value for one in rollouts if one.outcome and one.outcome.reward}
    decided = [one for one in rollouts if one.branched_from is not None and one.branched_from.call_index == 1]
    differ = [rewards[one.rollout_id] != rewards[one.branched_from.parent_rollout_id] for one in decided]  # type: ignore[union-attr]
    assert (decides[-1] > 0.34) == any(differ), steps
    assert {turns[2] for turns in steps} == {0.333}, "what comes after the decision has no advantage"
    branches = [one for one in rollouts if one.branched_from is not None]
    assert len(rollouts) - len(branches) == 3 * STEPS and len(branches) == 3 * STEPS * 6
    assert all(one.outcome is not None and one.outcome.completed for one in rollouts)
