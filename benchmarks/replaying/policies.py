"""Runs of the demo's training until its policy is good, which is computed and not sampled.

After each update the policy's success is the probability that it writes the two commands of the solution, token for
token, in the mean of all tasks. Other spellings of the solution do not count, so it is a lower bound. The tokens are
those that count as sampled in trajectories, the branches' included.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Final

import jax
import numpy as np

from penstock_codec import Codec
from penstock_demo import model, train
from penstock_demo.display import Display, Metrics
from penstock_demo.learner import Learner
from penstock_demo.rollouts import Collect, Collected
from penstock_demo.tasks import TASKS, encode, episode

GOAL: Final = 0.9
MAX_STEPS: Final = 60
COMMANDS: Final = 2
"""Turns of a solution that say a command; the last one only ends it."""
Update = Callable[[Learner, Collected], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Run:
    """One run. `tokens` were sampled until the goal was reached; None = it was not, in MAX_STEPS steps."""

    seed: int
    credit: str
    steps: int
    rollouts: int
    tokens: int | None
    success: float


class Solutions:
    """The probability of the solutions of all tasks."""

    def __init__(self, codec: Codec) -> None:
        rows = [encode(codec, episode(task, task.word, task.file)) for task in TASKS]
        length = max(len(ids) for ids, _ in rows)
        self._ids = np.zeros((len(rows), length), np.int32)
        self._mask = np.zeros((len(rows), length), np.float32)
        for number, (ids, mask) in enumerate(rows):
            turn = np.cumsum(np.diff(mask, prepend=0.0) > 0)
            self._ids[number, : len(ids)] = ids
            self._mask[number, : len(ids)] = mask * (turn <= COMMANDS)
        self._logprobs = jax.jit(model.token_logprobs, static_argnums=1)

    def success(self, learner: Learner) -> float:
        """Of a policy, from 0 to 1."""
        logprobs = np.asarray(self._logprobs(learner.params, learner.config, self._ids))
        return float(np.exp((logprobs * self._mask).sum(axis=1)).mean())


async def until_good(
    place: Path,
    codec: Codec,
    solutions: Solutions,
    seed: int,
    credit: str,
    collect: Collect,
    *,
    update: Update = train.update,
    goal: float = GOAL,
    max_steps: int = MAX_STEPS,
) -> Run:
    """Trains a policy. The run's directory has the credit's name, and so have its rollouts, whose names seed what is
    sampled."""
    folder = place / f"seed-{seed}-{credit}"
    folder.mkdir(parents=True)
    found = [0.0]

    def enough(_: Sequence[Metrics]) -> bool:
        found[0] = solutions.success(learner)
        return found[0] >= goal

    with redirect_stdout(StringIO()), Display("") as display:
        learner = train.warm_start(codec, seed, folder, display)
        course = train.Course(seed, max_steps, collect, enough, update)
        history = await train.train(learner, codec, course, folder, 0.0, display)
    tokens = sum(step["tokens"] for step in history)
    rollouts = sum(step["rollouts"] for step in history)
    return Run(seed, credit, len(history), rollouts, tokens if found[0] >= goal else None, round(found[0], 3))


def kept_runs(kept: Path | None, seeds: int) -> list[Run]:
    """The runs of a file, of the first so many seeds."""
    lines = [] if kept is None or not kept.is_file() else kept.read_text(encoding="utf-8").splitlines()
    return [run for line in lines if (run := Run(**json.loads(line))).seed <= seeds]


def keep(kept: Path | None, run: Run) -> None:
    """Adds a run to the file."""
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with kept.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(asdict(run))}\n")
