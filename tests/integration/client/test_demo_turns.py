"""The demo's training by turns, over real services: what is branched, and which tokens are trained."""

from __future__ import annotations

import secrets

import pytest
from tests.support.demo_policy import RIGHT, TASK, WRONG, policy

from penstock.client import Penstock
from penstock_codec.codec import Codec
from penstock_demo import turns

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
