"""How many sampled tokens the demo needs until its policy is good: with an advantage of each rollout, and of turns.

Both runs of a seed begin with the same weights; `policies` has when one is good.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.replaying.policies import GOAL, Run, Solutions, keep, kept_runs, until_good
from benchmarks.report import Row, Section
from penstock_demo import model
from penstock_demo.rollouts import by_rollout
from penstock_demo.tasks import build_codec
from penstock_demo.turns import by_turn

SEEDS: Final = 9
AIM: Final = 0.6
"""The most tokens by turns, as a share of those by rollouts."""
_COLLECT: Final = {"rollout": by_rollout, "turn": by_turn}


async def measure(place: Path, seeds: int = SEEDS, kept: Path | None = None) -> list[Section]:
    """Tokens to the goal of both, for each seed. `kept` has a line for each run that was made before."""
    runs = kept_runs(kept, seeds)
    model.use_compilation_cache(place / "cache" / "xla")
    codec = build_codec()
    solutions = Solutions(codec)
    for seed in range(1, seeds + 1):
        for credit, collect in _COLLECT.items():
            if not any((run.seed, run.credit) == (seed, credit) for run in runs):
                runs.append(await until_good(place, codec, solutions, seed, credit, collect))
                keep(kept, runs[-1])
            print(f"  {next(run for run in runs if (run.seed, run.credit) == (seed, credit))}", flush=True)
    return [section(runs, seeds)]


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
