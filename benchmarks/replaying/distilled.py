"""How many rollouts the demo needs until its policy is good, if a teacher scores the tokens of its rollouts.

The teacher is a model that the demo trained by GRPO: the one of `--teacher`, or one that is trained first, from a seed
that no policy has. `policies` has when a policy is good.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.replaying.policies import GOAL, MAX_STEPS, Run, Solutions, keep, kept_runs, until_good
from benchmarks.report import Row, Section
from penstock_codec import Codec
from penstock_demo import model
from penstock_demo.distill import by_teacher, distilled, serving
from penstock_demo.rollouts import by_rollout
from penstock_demo.tasks import build_codec

SEEDS: Final = 9
FIRST: Final = 2
"""The first policy's seed: 1 is the demo's own, and so the likeliest of a teacher that is given."""
TEACHERS_SEED: Final = 1
TEACHERS_GOAL: Final = 0.95
AIM: Final = 512 // 5
"""The most rollouts, in the median: a fifth of those by GRPO, as `turns` measured them."""
_CREDIT: Final = "teacher"


async def measure(
    place: Path, seeds: int = SEEDS, kept: Path | None = None, teacher: Path | None = None
) -> list[Section]:
    """Rollouts to the goal, for each seed. `kept` has a line for each run that was made before."""
    last = FIRST + seeds - 1
    runs = kept_runs(kept, last)
    model.use_compilation_cache(place / "cache" / "xla")
    codec = build_codec()
    solutions = Solutions(codec)
    directory = await _trained(place, codec, solutions) if teacher is None else teacher.absolute()
    async with serving(directory, place / "teacher") as scoring:
        for seed in range(FIRST, last + 1):
            if not any(run.seed == seed for run in runs):
                collect = by_teacher(scoring)
                runs.append(await until_good(place, codec, solutions, seed, _CREDIT, collect, update=distilled))
                keep(kept, runs[-1])
            print(f"  {next(run for run in runs if run.seed == seed)}", flush=True)
    return [section(runs)]


async def _trained(place: Path, codec: Codec, solutions: Solutions) -> Path:
    """The model of a teacher that GRPO makes."""
    run = await until_good(place, codec, solutions, TEACHERS_SEED, "grpo", by_rollout, goal=TEACHERS_GOAL)
    print(f"  the teacher: {run}", flush=True)
    return place / f"seed-{TEACHERS_SEED}-grpo" / "model"


def section(runs: Sequence[Run]) -> Section:
    """The median, and the range; infinite where a policy did not get there."""
    rollouts = [math.inf if run.tokens is None else run.rollouts for run in runs]
    also = {"least": min(rollouts), "most": max(rollouts), "steps": statistics.median(run.steps for run in runs)}
    rows = [Row("rollouts, p50", statistics.median(rollouts), "", f"aim {AIM}", also)]
    tokens = [math.inf if run.tokens is None else run.tokens for run in runs]
    rows.append(Row("sampled tokens, p50", statistics.median(tokens), ""))
    return Section(
        f"rollouts until a distilled policy succeeds in {GOAL:g}, {len(runs)} seeds, at most {MAX_STEPS} steps", rows
    )
