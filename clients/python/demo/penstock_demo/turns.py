"""GRPO with the advantage of one turn: a rollout of each task, and branches of the turn that its reward hangs on.

The rollouts of a group sample each of their turns, also those that are the same in all of them. Here one rollout of a
task is sampled whole. Its turn whose answer surprised the policy most is sampled again by branches, which replay the
turns before. The rollout and its branches are answers to the same state: the advantage of each is its reward beside
their mean, and it is the advantage of that turn alone. Where the policy was sure of all turns, there is nothing to
learn, and no branch is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import log

import numpy as np

from penstock.analysis.credit import surprise, turns_of
from penstock.client import Penstock, RolloutResult
from penstock.client.types.trajectories import Call
from penstock_demo.learner import Row, advantages
from penstock_demo.rollouts import Collected, ToLearn, reward_of, start_group

BRANCHES = 7
SURE = 0.8  # of an answer with this probability or more, the policy is sure


async def by_turn(ps: Penstock, run_id: str, step: int, tasks: Sequence[ToLearn]) -> Collected:
    """A rollout of each task, and the branches of one of its turns. Tokens of other turns are not trained."""
    parts = await asyncio.gather(*(_of_task(ps, run_id, step, i, task) for i, task in enumerate(tasks)))
    return Collected(
        [result for part in parts for result in part.whole],
        [result for part in parts for result in part.branches],
        [row for part in parts for row in part.rows],
    )


async def _of_task(ps: Penstock, run_id: str, step: int, index: int, task: ToLearn) -> Collected:
    group = await start_group(ps, run_id, step, index, task, size=1)
    (parent,) = await group.results(samples_only=False)
    point = least_certain(parent)
    if point is None:
        return Collected([parent], [], [])
    branched = await ps.rollouts.branch(
        parent.rollout_id, point.call_id, BRANCHES, group_id=f"{group.group_id}-branches"
    )
    branches = await branched.results(samples_only=False)
    return Collected([parent], branches, rows_of_turn(point, parent, branches))


def least_certain(result: RolloutResult) -> Call | None:
    """The call whose answer surprised the policy most; None if it was sure of all, or nobody graded the rollout."""
    if reward_of(result) is None or result.trajectory is None:
        return None
    surprises = [(surprise(call) or 0.0, call) for call in turns_of(result.trajectory)]
    most, call = max(surprises, key=lambda pair: pair[0], default=(0.0, None))
    return call if most > -log(SURE) else None


def rows_of_turn(point: Call, parent: RolloutResult, branches: Sequence[RolloutResult]) -> list[Row]:
    """A row for each answer to the branched call, in which the tokens of that answer alone are trained."""
    answers = [(parent, point.call_id)]
    for branch in branches:
        calls = () if branch.trajectory is None else branch.trajectory.calls
        answers.append((branch, next((call.call_id for call in calls if call.branch_point), "")))
    rows = []
    for (result, call_id), advantage in zip(answers, advantages([reward_of(one) for one, _ in answers]), strict=True):
        if advantage is None or result.trajectory is None:
            continue
        for sample in result.trajectory.samples:
            mask = np.zeros(len(sample), np.float32)
            for span in sample.turns:
                if span.call_id == call_id:
                    mask[span.start : span.end] = sample.loss_mask[span.start : span.end]
            if sample.logprobs is not None and mask.any():
                rows.append(Row.alike(sample.input_ids, mask, sample.logprobs, advantage))
    return rows
