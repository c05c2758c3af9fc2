"""Six ways to pace an asynchronous trainer, on a virtual clock: what each costs in throughput, in age and in bias.

Durations have a heavy tail: a sixtieth of the rollouts last longer than eight batches do. The reference is the policy
that trains whatever is complete first. Nothing of a stack runs; the policies are those that `ps.stream` uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Final

from benchmarks.pacing.simulation import LIMIT, Run, Simulation, World
from benchmarks.report import Row, Section, percentile
from penstock.client.pacing.policies import DropStale, FirstCome, InOrder, Oversample, Paced, Policy, Window

WORLD: Final = World(steps=250, batch=16)
SEEDS: Final = (1, 2, 3)
MAX_STALENESS: Final = 8
CREDITS: Final = (MAX_STALENESS + 1) * WORLD.batch
"""Groups that are started and not trained, of the policies that have no bound of their own."""
PACED: Final = Paced(batch=WORLD.batch, max_staleness=MAX_STALENESS)
POLICIES: Final[Mapping[str, Policy]] = {
    "first come": FirstCome(batch=WORLD.batch, most=100 * WORLD.batch),
    "strictly in order": InOrder(batch=WORLD.batch, most=CREDITS),
    "window of two batches": Window(batch=WORLD.batch, most=CREDITS, window=2 * WORLD.batch),
    "dropped when stale": DropStale(batch=WORLD.batch, most=CREDITS, max_staleness=MAX_STALENESS),
    "a quarter more, cancelled": Oversample(batch=WORLD.batch, extra=WORLD.batch // 4),
    "paced": PACED,
}
OF_PACED: Final[Mapping[str, Policy]] = {
    "nothing left out": replace(PACED, leave_out=0.0),
    "1% left out": replace(PACED, leave_out=0.01),
    "3% left out": replace(PACED, leave_out=0.03),
    "4 versions": replace(PACED, max_staleness=4),
    "16 versions": replace(PACED, max_staleness=16),
    "16 versions, nothing left out": replace(PACED, max_staleness=16, leave_out=0.0),
}
LEAST_SHARE: Final = 0.95
MOST_DISTANCE: Final = 0.02


async def measure(_: Path) -> list[Section]:
    """Simulates each policy with each seed."""
    found = {name: _runs(policy) for name, policy in POLICIES.items()}
    varied = {name: _runs(policy) for name, policy in OF_PACED.items()}
    greedy = found["first come"]
    about = (
        f"{WORLD.batch} groups of {WORLD.members} a batch, {WORLD.slots} rollouts at once, {WORLD.steps} batches of "
        f"each of {len(SEEDS)} seeds"
    )
    rows = [_row(name, runs, greedy) for name, runs in found.items()]
    most = (MAX_STALENESS + 1) * WORLD.batch * WORLD.members / LIMIT / fmean(run.rate for run in greedy)
    return [
        Section(f"Throughput of first come, by policies; {about}", rows, faults=_faults(found["paced"], greedy)),
        Section(
            f"Paced, with other promises than {MAX_STALENESS} versions and {PACED.leave_out:.1%} left out; without "
            f"leaving out none can have more than {most:.0%}",
            [_row(name, runs, greedy) for name, runs in varied.items()],
        ),
        _baselines(found["paced"]),
    ]


def _runs(policy: Policy) -> list[Run]:
    return [Simulation(policy, WORLD, seed).run() for seed in SEEDS]


def share(runs: list[Run], greedy: list[Run]) -> float:
    """Returns the throughput, trained rollouts a minute, as a share of that of first come with the same seeds."""
    return fmean(run.rate / other.rate for run, other in zip(runs, greedy, strict=True))


def _row(name: str, runs: list[Run], greedy: list[Run]) -> Row:
    staleness = [age for run in runs for age in run.staleness]
    also = {
        "total variation": max(run.bias.distance for run in runs),
        "mean staleness": fmean(staleness),
        "p99": percentile(staleness, 0.99),
        "most": float(max(staleness)),
        "left out %": 100 * fmean(run.left_out / run.started for run in runs),
        "dropped %": 100 * fmean(run.dropped / run.started for run in runs),
    }
    return Row(name, 100 * share(runs, greedy), "%", also=also)


def _baselines(paced: list[Run]) -> Section:
    pairs = [pair for run in paced for pair in run.baselines]
    known, reckoned = zip(*pairs, strict=True)
    rows = [
        Row("mean of the rewards that are known", fmean(known), "too high", f"{len(pairs)} groups"),
        Row("with those left out before", fmean(reckoned), "too high"),
    ]
    return Section("Baselines of groups that lack rollouts, beside the mean of all their rewards", rows)


def _faults(paced: list[Run], greedy: list[Run]) -> list[str]:
    faults = []
    if (found := share(paced, greedy)) < LEAST_SHARE:
        faults.append(f"paced has {found:.1%} of the throughput of first come; at least {LEAST_SHARE:.0%}")
    if (distance := max(run.bias.distance for run in paced)) >= MOST_DISTANCE:
        faults.append(f"paced has a total variation of {distance:.4f}; below {MOST_DISTANCE}")
    if (oldest := max(max(run.staleness) for run in paced)) > MAX_STALENESS:
        faults.append(f"paced trained a group of {oldest} versions; at most {MAX_STALENESS}")
    return faults
