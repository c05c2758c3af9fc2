"""How many sampled tokens the demo needs until its policy is good: with an advantage of each rollout, and of turns.

Both runs of a seed begin with the same weights. After each update the policy's success is computed, not sampled: the
probability that it writes the two commands of the solution, token for token, in the mean of all tasks. Other spellings
of the solution do not count, so it is a lower bound. The tokens are those that count as sampled in trajectories, the
branches' included.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Final

import jax
import numpy as np

from benchmarks.report import Row, Section
from penstock_codec import Codec
from penstock_demo import model, train
from penstock_demo.display import Display, Metrics
from penstock_demo.learner import Learner
from penstock_demo.rollouts import by_rollout
from penstock_demo.tasks import TASKS, build_codec, encode, episode
from penstock_demo.turns import by_turn

SEEDS: Final = 9
GOAL: Final = 0.9
AIM: Final = 0.6
"""The most tokens by turns, as a share of those by rollouts."""
MAX_STEPS: Final = 60
COMMANDS: Final = 2
"""Turns of a solution that say a command; the last one only ends it."""
_COLLECT: Final = {"rollout": by_rollout, "turn": by_turn}


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


async def measure(place: Path, seeds: int = SEEDS, kept: Path | None = None) -> list[Section]:
    """Tokens to the goal of both, for each seed. `kept` has a line for each run that was made before."""
    runs = [run for line in _lines(kept) if (run := Run(**json.loads(line))).seed <= seeds]
    model.use_compilation_cache(place / "cache" / "xla")
    codec = build_codec()
    solutions = Solutions(codec)
    for seed in range(1, seeds + 1):
        for credit in _COLLECT:
            if not any((run.seed, run.credit) == (seed, credit) for run in runs):
                runs.append(await _run(place, codec, solutions, seed, credit))
                _keep(kept, runs[-1])
            print(f"  {next(run for run in runs if (run.seed, run.credit) == (seed, credit))}", flush=True)
    return [section(runs, seeds)]


async def _run(place: Path, codec: Codec, solutions: Solutions, seed: int, credit: str) -> Run:
    """The run's directory has the credit's name, and so have its rollouts, whose names seed what is sampled."""
    folder = place / f"seed-{seed}-{credit}"
    folder.mkdir(parents=True)
    found = [0.0]

    def enough(_: Sequence[Metrics]) -> bool:
        found[0] = solutions.success(learner)
        return found[0] >= GOAL

    with redirect_stdout(StringIO()), Display("") as display:
        learner = train.warm_start(codec, seed, folder, display)
        course = train.Course(seed, MAX_STEPS, _COLLECT[credit], enough)
        history = await train.train(learner, codec, course, folder, 0.0, display)
    tokens = sum(step["tokens"] for step in history)
    rollouts = sum(step["rollouts"] for step in history)
    return Run(seed, credit, len(history), rollouts, tokens if found[0] >= GOAL else None, round(found[0], 3))


def section(runs: Sequence[Run], seeds: int) -> Section:
    """The median share, and the medians of both."""
    tokens = {(run.seed, run.credit): math.inf if run.tokens is None else run.tokens for run in runs}
    pairs = [(tokens[seed, "turn"], tokens[seed, "rollout"]) for seed in range(1, seeds + 1)]
    shares = [turn / rollout for turn, rollout in pairs if math.isfinite(rollout)]
    also = {"least": min(shares), "most": max(shares)}
    rows = [
        Row(
            "tokens by turns, as a share of those by rollouts, p50", statistics.median(shares), "", f"aim {AIM:g}", also
        ),
        *(
            Row(
                f"by {name}: tokens, p50", statistics.median(pair[place] for pair in pairs), "", also=_steps(runs, name)
            )
            for place, name in enumerate(("turn", "rollout"))
        ),
    ]
    return Section(f"tokens that the demo samples until its policy succeeds in {GOAL:g}, {seeds} seeds", rows)


def _steps(runs: Sequence[Run], credit: str) -> dict[str, float]:
    mine = [run for run in runs if run.credit == credit]
    steps, rollouts = (
        statistics.median(values) for values in zip(*((run.steps, run.rollouts) for run in mine), strict=True)
    )
    return {"steps": steps, "rollouts": rollouts}


def _lines(kept: Path | None) -> list[str]:
    return [] if kept is None or not kept.is_file() else kept.read_text(encoding="utf-8").splitlines()


def _keep(kept: Path | None, run: Run) -> None:
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with kept.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(asdict(run))}\n")
