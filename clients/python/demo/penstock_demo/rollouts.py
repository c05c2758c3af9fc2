"""Groups of whole rollouts, and the rows that one GRPO update learns from them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from penstock.client import AgentChoice, Budgets, GroupHandle, Penstock, RolloutResult, Task
from penstock_demo.learner import Row, step_advantages

AGENT = "shell"
GROUP_SIZE = 8
BUDGETS = Budgets(max_calls=4, max_tokens_per_call=48)  # a good rollout makes 3 calls of at most 26 tokens


class ToLearn(Protocol):
    """What a rollout is of."""

    def to_task(self) -> Task:
        """The task as the driver takes it."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What a step learns from: rollouts from their first call on, branches of them, and the rows of both."""

    whole: list[RolloutResult]
    branches: list[RolloutResult]
    rows: list[Row]


Collect: TypeAlias = Callable[[Penstock, str, int, Sequence[ToLearn]], Awaitable[Collected]]
"""Collects for a step: the connection, the run's id, the step from 0, and its tasks."""


async def by_rollout(
    ps: Penstock,
    run_id: str,
    step: int,
    tasks: Sequence[ToLearn],
    *,
    size: int | None = None,
    agent: str | AgentChoice = AGENT,
    budgets: Budgets = BUDGETS,
    behind: float = 0.0,
) -> Collected:
    """A group of rollouts of each task; see `start_group`. A rollout has one advantage, which all its tokens share.

    `behind`: see `step_advantages`.
    """
    started = (start_group(ps, run_id, step, i, task, size, agent, budgets) for i, task in enumerate(tasks))
    groups = await asyncio.gather(*started)
    results = await asyncio.gather(*(group.results() for group in groups))
    return Collected([result for group in results for result in group], [], scored_rows(results, behind))


async def start_group(
    ps: Penstock,
    run_id: str,
    step: int,
    index: int,
    task: ToLearn,
    size: int | None = None,
    agent: str | AgentChoice = AGENT,
    budgets: Budgets = BUDGETS,
) -> GroupHandle:
    """Rollouts of one task, GROUP_SIZE unless `size` says otherwise."""
    group_id = f"{run_id}-{step:03d}-{index}"
    return await ps.groups.create(
        task.to_task(), agent, size or GROUP_SIZE, group_id=group_id, run_id=run_id, budgets=budgets
    )


def reward_of(result: RolloutResult) -> float | None:
    """None when nobody graded it, which is not zero: a broken sandbox says nothing about the policy."""
    return None if result.reward is None or result.trajectory is None else result.reward.value


def scored_rows(groups: list[list[RolloutResult]], behind: float = 0.0) -> list[Row]:
    """What the update eats: the tokens that the engine saw and sampled, with its logprobs; nothing is re-tokenised."""
    rows = []
    scores = step_advantages([[reward_of(result) for result in group] for group in groups], behind)
    for group, scored in zip(groups, scores, strict=True):
        for result, advantage in zip(group, scored, strict=True):
            if advantage is not None:
                rows += rows_of(result, advantage)
    return rows


def rows_of(result: RolloutResult, advantage: float) -> list[Row]:
    """The rows of one rollout: its samples, of the given advantage times their weights."""
    return [
        Row.alike(sample.input_ids, sample.loss_mask.astype(np.float32), sample.logprobs, advantage * sample.weight)
        for sample in (result.trajectory.samples if result.trajectory is not None else ())
        if sample.logprobs is not None
    ]
