"""Groups of whole rollouts, and the rows that one GRPO update learns from them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from penstock.client import Budgets, GroupHandle, Penstock, RolloutResult
from penstock_demo.learner import Row, advantages
from penstock_demo.tasks import CopyTask

GROUP_SIZE = 8
BUDGETS = Budgets(max_calls=4, max_tokens_per_call=48)  # a good rollout makes 3 calls of at most 26 tokens


@dataclass(frozen=True, slots=True)
class Collected:
    """What a step learns from: rollouts from their first call on, branches of them, and the rows of both."""

    whole: list[RolloutResult]
    branches: list[RolloutResult]
    rows: list[Row]


Collect: TypeAlias = Callable[[Penstock, str, int, Sequence[CopyTask]], Awaitable[Collected]]
"""Collects for a step: the connection, the run's id, the step from 0, and its tasks."""


async def by_rollout(ps: Penstock, run_id: str, step: int, tasks: Sequence[CopyTask]) -> Collected:
    """A group of rollouts of each task. A rollout has one advantage, which all its tokens share."""
    groups = await asyncio.gather(*(start_group(ps, run_id, step, i, task) for i, task in enumerate(tasks)))
    results = await asyncio.gather(*(group.results() for group in groups))
    return Collected([result for group in results for result in group], [], scored_rows(results))


async def start_group(
    ps: Penstock, run_id: str, step: int, index: int, task: CopyTask, size: int | None = None
) -> GroupHandle:
    """Rollouts of one task, GROUP_SIZE unless `size` says otherwise."""
    group_id = f"{run_id}-{step:03d}-{index}"
    return await ps.groups.create(
        task.to_task(), "shell", size or GROUP_SIZE, group_id=group_id, run_id=run_id, budgets=BUDGETS
    )


def reward_of(result: RolloutResult) -> float | None:
    """None when nobody graded it, which is not zero: a broken sandbox says nothing about the policy."""
    return None if result.reward is None or result.trajectory is None else result.reward.value


def scored_rows(groups: list[list[RolloutResult]]) -> list[Row]:
    """What the update eats: the tokens that the engine saw and sampled, with its logprobs; nothing is re-tokenised."""
    rows = []
    for group in groups:
        for result, advantage in zip(group, advantages([reward_of(result) for result in group]), strict=True):
            if advantage is None or result.trajectory is None:
                continue
            for sample in result.trajectory.samples:
                if sample.logprobs is not None:
                    mask = sample.loss_mask.astype(np.float32)
                    rows.append(Row.alike(sample.input_ids, mask, sample.logprobs, advantage * sample.weight))
    return rows
