"""A model that plays the user, with real services: whose each token is, and what the example shows."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.integration.client.conftest import TASK

from penstock.client import InvalidArgument, Mode, Penstock, User, UserTurn
from penstock.client.transport.endpoints import write_connection
from penstock.local.stack import LocalStack

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.requirement("R133")]
ROOT = Path(__file__).parents[4]


async def test_the_example_shows_the_conversation_and_whose_tokens_are_trained(
    stack: LocalStack, tmp_path: Path
) -> None:
    write_connection(tmp_path / "connection.json", stack.endpoints, pid=os.getpid())
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(ROOT / "examples/simulated_user.py")),
        env={**os.environ, "PENSTOCK_CONNECTION": str(tmp_path / "connection.json")},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    found = re.search(r"(\d+) calls of the agent, (\d+) of the user\ntrained: (\d+) tokens", out.decode())
    assert found and int(found[1]) > int(found[2]) > 0 and int(found[3]) > 0, out
    assert out.decode().count("user: ") >= int(found[2])


async def test_no_token_of_the_user_is_trained_and_each_is_recorded(ps: Penstock) -> None:
    """What the agent was given is what the user's model sampled; the agent's tokens alone are in the samples."""
    user = User(prompt="You want more.", max_instructions=2, max_tokens=32)
    rollout = await ps.rollouts.create(TASK, "shell", mode=Mode.TRANSPARENT_PROXY, user=user)
    result = await rollout.result()
    assert result.failure is None and result.reward is not None
    turns = [event.payload async for event in rollout.events() if isinstance(event.payload, UserTurn)]
    assert [turn.end_reason for turn in turns] == ["", "", "MAX_INSTRUCTIONS"]
    trajectory = await rollout.trajectory()
    assert {call.call_class for call in trajectory.user_calls} == {"user"}
    said = [
        call.completion.message.text for call in trajectory.user_calls if call.completion and call.completion.message
    ]
    assert [turn.instruction for turn in turns[:2]] == [text.strip() for text in said]
    assert all(call.completion is not None and call.completion.token_ids is not None for call in trajectory.user_calls)
    sampled = {call.call_id: call.completion.token_ids for call in trajectory.calls if call.completion is not None}
    trained = dict[str, np.ndarray]()
    for sample in trajectory.samples:
        for turn in sample.turns:
            assert sample.loss_mask[turn.start : turn.end].all()
            trained[turn.call_id] = sample.input_ids[turn.start : turn.end]
        assert sample.loss_mask.sum() == sum(turn.end - turn.start for turn in sample.turns)
    assert trained.keys() == sampled.keys()
    for call_id, ids in trained.items():
        np.testing.assert_array_equal(ids, sampled[call_id])


@pytest.mark.requirement("R63")
async def test_a_user_of_an_agent_that_cannot_resume_is_refused(ps: Penstock) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await ps.rollouts.create(TASK, "terminus-2", user=User(instructions=["on"]))
    assert [one.field for one in refused.value.violations] == ["spec.user"]
    for neither in ({}, {"instructions": ["a"], "prompt": "b"}):
        with pytest.raises(InvalidArgument, match="either"):
            User(**neither)  # type: ignore[arg-type]
