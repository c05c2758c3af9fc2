"""Rollouts with several models, through the driver and the Python client."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest
from tests.integration.client.conftest import TASK

from penstock.client import (
    CallRule,
    Inference,
    InvalidArgument,
    Mode,
    Penstock,
    PolicyConstraint,
    RolloutModel,
    Upstream,
)
from penstock.client.transport.endpoints import write_connection
from penstock.local.stack import LocalStack

pytestmark = pytest.mark.asyncio(loop_scope="session")
ROOT = Path(__file__).parents[4]
TEACHER = RolloutModel(policy_id="teacher", source=Inference(), trained=False, calls=CallRule(from_index=1))


@pytest.mark.requirement("R133")
async def test_the_example_shows_who_answered_each_call(stack: LocalStack, tmp_path: Path) -> None:
    write_connection(tmp_path / "connection.json", stack.endpoints, pid=os.getpid())
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(ROOT / "examples/teacher_takes_over.py")),
        env={**os.environ, "PENSTOCK_CONNECTION": str(tmp_path / "connection.json")},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    sampled = dict.fromkeys(("student", "teacher"), 0)
    for index, (number, count, policy) in enumerate(re.findall(r"call (\d+): (\d+) tokens of (\w+)", out.decode())):
        assert int(number) == index and policy == ("teacher" if index else "student")
        sampled[policy] += int(count)
    assert sampled["teacher"]
    trained = re.findall(r"sample of (\w+): trains (\d+) of", out.decode())
    assert trained == [("student", str(sampled["student"]))]


@pytest.mark.requirement("R133")
async def test_a_trainer_answers_the_student_alone_and_a_branch_keeps_whose_the_answers_were(ps: Penstock) -> None:
    """The teacher's source answers at once also in gate mode; the parent's turns stay those of their policies."""
    models = [TEACHER, RolloutModel(policy_id="student")]
    policy = PolicyConstraint(max_staleness=7)
    async with ps.intercept(run_id="taught", policy_ids=["student"], policies={"student": 4}) as session:
        session.announce(7, "student")
        rollout = await ps.rollouts.create(TASK, "shell", models=models, policy=policy, run_id="taught")
        async for call in session.calls():
            assert (call.policy_id, call.index, call.min_policy_version) == ("student", 0, 0)
            await call.delegate()
            break
        ended = await rollout.result()
    assert ended.reward is not None
    parent = await rollout.trajectory()
    assert {call.policy_id for call in parent.calls[1:]} == {"teacher"} and parent.calls[0].policy_id == "student"
    (branch,) = await (await rollout.branch(1)).results()
    trajectory = await (await ps.rollouts.attach(branch.rollout_id)).trajectory()
    assert trajectory.calls[0].replayed_from is not None
    assert [call.policy_id for call in trajectory.calls] == [call.policy_id for call in parent.calls]
    reasons = {turn.policy_id: turn.untrained_reason for sample in trajectory.samples for turn in sample.turns}
    assert reasons == {"student": "PARENT", "teacher": "MODEL_UNTRAINED"}


@pytest.mark.requirement("R133")
async def test_each_wrong_field_of_the_models_is_named_before_anything_starts(ps: Penstock) -> None:
    models = [
        RolloutModel(policy_id="no spaces"),
        RolloutModel(policy_id="p", calls=CallRule(from_turn=3, until_turn=3)),
        RolloutModel(policy_id="p", name="x", source=Upstream(name="cloud")),
        RolloutModel(policy_id="p", name="z", policy=PolicyConstraint(min_version=-1)),
        RolloutModel(policy_id="p", delegated=True, name="y", calls=CallRule()),
    ]
    with pytest.raises(InvalidArgument) as refused:
        await ps.rollouts.create(TASK, "shell", mode=Mode.TRANSPARENT_PROXY, models=models)
    assert sorted(one.field for one in refused.value.violations) == [
        "spec.models[0].calls",
        "spec.models[0].policy_id",
        "spec.models[1].calls",
        "spec.models[1].calls.until_turn",
        "spec.models[2].trained",
        "spec.models[3].policy.min_version",
        "spec.models[4].calls",
        "spec.models[4].calls",
        "spec.models[4].delegated",
    ]
