"""The demo's training by turns and by a teacher, over real services: what is branched and which tokens are trained."""

from __future__ import annotations

import secrets
from pathlib import Path

import numpy as np
import pytest
from tests.support.services.demo_policy import RIGHT, TASK, WRONG, policy

from penstock.client import Penstock
from penstock_codec.codec import Codec
from penstock_demo import distill, turns
from penstock_inference.testing import random_config, random_tensors, write_model

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.requirement("R129")
async def test_the_uncertain_turn_is_branched_and_trained_alone(ps: Penstock, codec: Codec) -> None:
    run_id = f"demo-turns-{secrets.token_hex(4)}"
    async with policy(ps, codec, run_id, 0.5) as asked:
        collected = await turns.by_turn(ps, run_id, 0, [TASK])
    (parent,) = collected.whole
    assert len(collected.branches) == turns.BRANCHES
    assert {index for rollout, index in asked if rollout != parent.rollout_id} == {1, 2}  # the first is replayed
    assert len(collected.rows) == turns.BRANCHES + 1
    said = {codec.decode(row.ids[row.mask > 0].tolist()) for row in collected.rows}
    assert len(said) == 2 and all(any(command in text for text in said) for command in (RIGHT, WRONG))
    for row in collected.rows:
        assert (row.advantages[0] > 0) == (RIGHT in codec.decode(row.ids[row.mask > 0].tolist()))
    assert sum(row.advantages[0] for row in collected.rows) == pytest.approx(0.0, abs=1e-3)


async def test_nothing_is_branched_where_the_policy_is_sure(ps: Penstock, codec: Codec) -> None:
    run_id = f"demo-turns-{secrets.token_hex(4)}"
    async with policy(ps, codec, run_id, 0.9):
        collected = await turns.by_turn(ps, run_id, 0, [TASK])
    assert len(collected.whole) == 1 and not collected.branches and not collected.rows


@pytest.mark.requirement("R132")
async def test_a_teachers_advantages_are_those_of_the_sampled_tokens(
    ps: Penstock, codec: Codec, tmp_path: Path
) -> None:
    """Each is the teacher's logprob minus the policy's; nothing is trained that the policy did not sample."""
    config = random_config(vocab_size=codec.vocab_size, max_position_embeddings=4096, eos_token_id=None)
    directory = write_model(tmp_path / "model", config, random_tensors(config))
    run_id = f"demo-distill-{secrets.token_hex(4)}"
    async with distill.serving(directory, tmp_path / "teacher") as teacher:
        async with policy(ps, codec, run_id, 0.5) as asked:
            collected = await distill.by_teacher(teacher)(ps, run_id, 0, [TASK])
        scores = [await teacher.inference.score(row.ids, 1) for row in collected.rows]
    assert len(collected.whole) == len(collected.rows) == distill.GROUP
    assert sorted(index for _, index in asked) == sorted([0, 1, 2] * distill.GROUP)
    for row, score in zip(collected.rows, scores, strict=True):
        sampled = row.mask[1:] > 0
        assert sampled.any() and row.advantages[0] == 0.0 and not row.advantages[1:][~sampled].any()
        np.testing.assert_array_equal(row.advantages[1:][sampled], (score - row.logprobs[1:])[sampled])
