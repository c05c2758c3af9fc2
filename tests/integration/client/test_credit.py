"""Credit by branches, over real services: the pivotal call is found, groups, budgets, what cannot be credited."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.replaying.credit import BRANCHES, Planted, answering, credit_of
from tests.integration.client.conftest import TASK

from penstock.analysis import credit
from penstock.client import FailedPrecondition, Mode, Penstock, Selector
from penstock_codec.codec import Codec
from penstock_codec.tokenizer_files import TokenizerFiles

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(scope="module")
def codec(model_dir: Path) -> Codec:
    """The tokenizer of the stack."""
    return Codec.load(TokenizerFiles.from_directory(model_dir))


@pytest.mark.requirement("R129")
@pytest.mark.parametrize("seed", [2, 3])
async def test_branches_find_the_planted_call(ps: Penstock, codec: Codec, seed: int) -> None:
    """The two seeds are the two kinds of tasks: the parent spoiled it, or solved it, at one call."""
    planted = Planted(seed, f"planted-{seed}-{secrets.token_hex(4)}")
    found, trajectory = await credit_of(ps, codec, planted)
    assert found.pivotal is not None and found.pivotal.index == planted.pivot, found
    assert [turn.call_id for turn in found.turns] == [call.call_id for call in trajectory.calls]
    for turn in found.turns:
        assert turn.value is not None and turn.value.count == BRANCHES and turn.value.left_out == 0
        if turn.index > planted.pivot:
            assert turn.value.mean == planted.reward and turn.advantage == 0.0
    (sample,) = trajectory.samples
    advantages = found.token_advantages(sample)
    assert advantages[sample.loss_mask].tolist() == [
        np.float32(turn.advantage)
        for turn, span in zip(found.turns, sample.turns, strict=True)
        for _ in range(span.start, span.end)
    ]


async def test_siblings_are_the_first_value(ps: Penstock, codec: Codec) -> None:
    planted = Planted(3, f"planted-group-{secrets.token_hex(4)}")
    async with answering(ps, codec, planted):
        group = await ps.groups.create(planted.task, "shell", 3, run_id=planted.run_id)
        results = await group.results()
        found = await credit.of(ps, results, budget=9, n=2)
    rewards = {one.rollout_id: one.reward.value for one in results if one.reward is not None}
    assert found.keys() == rewards.keys() and len(rewards) == 3
    branched = 0
    for rollout_id, one in found.items():
        first = one.turns[0]
        assert first.value is not None and first.value.group_id is None
        assert sorted(first.value.rewards) == sorted(value for other, value in rewards.items() if other != rollout_id)
        groups = [turn.value.group_id for turn in one.turns[1:] if turn.value is not None]
        branched += 2 * len(groups)
        for name in groups:
            assert name is not None
            of_branches = (await ps.groups.attach(name)).info
            assert of_branches.size == 2 and of_branches.branched_from is not None
            assert of_branches.branched_from.parent_rollout_id == rollout_id
        assert all(turn.advantage is not None for turn in one.turns)
    assert branched == 8, "a budget of nine is four calls"


async def test_branches_end_with_their_caller(ps: Penstock, codec: Codec) -> None:
    planted = Planted(2, f"planted-ends-{secrets.token_hex(4)}")
    async with answering(ps, codec, planted):
        parent = await ps.rollouts.create(planted.task, "shell", run_id=planted.run_id, rollout_id=planted.run_id)
        result = await parent.result()
    async with ps.intercept(Selector(run_id=planted.run_id)) as session:
        work = asyncio.create_task(credit.of(ps, result, budget=2, n=2))
        async for _ in session.calls():  # nobody answers it
            break
        work.cancel()
        await asyncio.wait([work])
    assert work.cancelled()
    left = [one async for one in ps.rollouts.list(run_id=planted.run_id)]
    assert len(left) == 3 and all(one.outcome is not None for one in left)
    assert sorted(one.outcome.failure is not None for one in left if one.outcome) == [False, True, True]


async def test_a_rollout_without_a_reward_has_no_credit(ps: Penstock) -> None:
    handle = await ps.rollouts.create(replace(TASK, verifier=None), "shell", mode=Mode.TRANSPARENT_PROXY)
    result = await handle.result()
    with pytest.raises(FailedPrecondition) as refused:
        await credit.of(ps, result, budget=8)
    assert refused.value.reason == "REWARD_ABSENT"
    assert await credit.of(ps, [result], budget=8) == {}


async def test_branches_of_a_rollout_with_a_seed_have_their_own(ps: Penstock) -> None:
    """With its seed each would sample its answer again, and every advantage would be zero."""
    handle = await ps.rollouts.create(TASK, "shell", mode=Mode.TRANSPARENT_PROXY, seed=7)
    found = await credit.of(ps, await handle.result(), budget=2, n=2)
    (name,) = {turn.value.group_id for turn in found.turns if turn.value is not None}
    assert name is not None
    group = await ps.groups.attach(name)
    seeds = set()
    for rollout_id in group.rollout_ids:
        trajectory = await ps.rollouts.trajectory(rollout_id)
        own = [call.completion for call in trajectory.calls if call.replayed_from is None]
        seeds |= {one.sampling_used.seed for one in own if one is not None and one.sampling_used is not None}
    assert len(seeds) == 2 and 7 not in seeds, seeds


async def test_a_call_that_cannot_be_branched_is_said(ps: Penstock) -> None:
    handle = await ps.rollouts.create(TASK, "shell", mode=Mode.TRANSPARENT_PROXY)
    result = await handle.result()
    whole = await handle.trajectory()
    await handle.delete()
    with pytest.raises(Exception, match=handle.rollout_id) as refused:
        await credit.of(ps, replace(result, trajectory=whole), budget=8, n=2)
    assert getattr(refused.value, "reason", "") == "ROLLOUT_UNKNOWN"
