"""GRPO with mini-SWE-agent: a small decoder learns to repair scripts through an agent as its users install it.

    penstock demo --agent mini-swe-agent --seed 1

The loop is the demo's (penstock_demo.train). A start of this agent takes seconds of a processor, so a step has fewer
rollouts, and its update takes several passes over them. So few rollouts are noise: a policy may become sure of a wrong
name, or unlearn one that no task of the step has. So a group that fails as a whole has a negative advantage, and each
update is followed by some of the successes of earlier steps, as examples (self-imitation: Oh et al. 2018,
arXiv:1806.05635, without its value function).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from penstock.client import Budgets
from penstock_demo import train
from penstock_demo.display import Display, Metrics, recent
from penstock_demo.learner import Learner, Row
from penstock_demo.repairs import agent, tasks
from penstock_demo.rollouts import Collected, by_rollout, reward_of, rows_of

RUNS: Final = train.RUNS.with_name("demo-mini-swe-agent")
PROMPTS, GROUP_SIZE = 4, 8
PASSES, LEARNING_RATE = 4, 1e-3
REMEMBERED, REMEMBERED_PASSES = 16, 2
BEHIND = 0.6
MAX_STEPS, GOAL, WINDOW = 20, 0.91, 3
BUDGETS: Final = Budgets(max_tokens_per_call=24)  # a good call has at most 17


def learned(history: Sequence[Metrics]) -> bool:
    """Whether the last steps were good enough to end."""
    return len(history) >= WINDOW and recent(history, WINDOW) >= GOAL


class Update:
    """A GRPO update, and then successes again: the newest of each of up to REMEMBERED tasks that were solved so far."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng([seed, 2])
        self._successes: dict[str, list[Row]] = {}

    def __call__(self, learner: Learner, collected: Collected) -> tuple[float, float]:
        """See `Learner.update`."""
        answer = learner.update(collected.rows, PASSES, LEARNING_RATE)
        for result in collected.whole:
            if reward_of(result) == 1.0 and result.trajectory is not None:
                self._successes[result.trajectory.task_id] = rows_of(result, 1.0)
        known = list(self._successes.values())
        drawn = [row for i in self._rng.permutation(len(known))[:REMEMBERED] for row in known[i]]
        learner.imitate(drawn, REMEMBERED_PASSES, LEARNING_RATE)
        return answer


def course(seed: int, max_steps: int, run: Path) -> train.Course:
    """How to train. What the services install is kept beside the run."""
    return train.Course(
        seed,
        max_steps,
        partial(by_rollout, size=GROUP_SIZE, agent=agent.CHOICE, budgets=BUDGETS, behind=BEHIND),
        learned,
        Update(seed),
        tasks.TASKS,
        PROMPTS,
        agent.install,
        {"sandbox": {"state_dir": str(run.parent / "cache" / "sandbox")}},
    )


def learn(seed: int, max_steps: int, run: Path, display: Display) -> list[Metrics]:
    """One training run; answers its metrics. Everything that it makes is in `run`, or kept beside it."""
    start, codec = time.perf_counter(), tasks.build_codec()
    learner = train.warm_start_from(tasks.examples(codec), codec, seed, run, display)
    return asyncio.run(train.train(learner, codec, course(seed, max_steps, run), run, start, display))
