"""One owner's long queue and another's few rollouts: when the latter begin, and what a waiting rollout takes.

On null sandboxes. While the first owner's rollouts that have a slot await their model, all others of it are submitted,
each with a spec of its own, and what they hold is read. Then the model answers, and the second owner comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks import processes, scale
from benchmarks.report import Row, Section
from benchmarks.scale import load, world
from penstock.client import Penstock, PenstockError, Phase, Rollout, RolloutHandle, connect

ROLLOUTS: Final = 5_000
"""Of the first owner, that wait."""
LATE: Final = 50
RUNNING: Final = 50
"""The driver's slots."""
LATENCY_S: Final = 1.0
FIRST: Final = 500
"""Waiting rollouts before memory is read: buffers and caches that grow with the first ones."""
MOST_KB: Final = 4.0
JUDGED_FROM: Final = 1_000
"""So many must wait that their memory is more than the gaps of an allocator."""
NAMESPACE: Final = "late"
_AT_ONCE: Final = 32
_START_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Figures:
    """What was read. `held_beside` counts sandboxes and places at the gate beyond those of the rollouts that run."""

    waiting: int
    waiting_kb: float
    held_beside: int
    mean_s: float
    """Of a rollout of the first owner, from its slot to its end."""
    first_s: float
    last_s: float
    """How long the second owner's first and last rollout waited."""
    mishaps: Sequence[str] = ()
    """Rollouts that ended wrongly, were lost, or left something."""


async def measure(place: Path, rollouts: int = ROLLOUTS) -> list[Section]:
    """The figures, and which of them are not as they must be."""
    return [section(await figures(place, rollouts))]


def section(found: Figures) -> Section:
    """The table, with its faults."""
    kb = f"{found.waiting_kb:.1f}"
    is_judged = found.waiting >= JUDGED_FROM
    rows = [
        Row("the late owner's first rollout began after", found.first_s, "s", f"at most {found.mean_s:.2f}"),
        Row("its last one began after", found.last_s, "s"),
        Row("a rollout of the early owner took, mean", found.mean_s, "s", "from its slot to its end"),
        Row(
            "memory of the driver for one that waits",
            found.waiting_kb,
            "KB",
            f"at most {MOST_KB:g}" if is_judged else f"not judged below {JUDGED_FROM:,} that wait",
        ),
        Row("sandboxes and places at the gate of those that wait", found.held_beside, "", "at most 0"),
    ]
    faults = [*found.mishaps]
    if found.first_s > found.mean_s:
        faults.append(f"the late owner's first rollout began after {found.first_s:.2f} s, at most {found.mean_s:.2f}")
    if is_judged and found.waiting_kb > MOST_KB:
        faults.append(f"memory of the driver for one that waits: {kb} KB, at most {MOST_KB:g}")
    if found.held_beside > 0:
        faults.append(f"sandboxes and places at the gate of those that wait: {found.held_beside}, at most 0")
    title = f"{found.waiting:,} rollouts of one owner wait for {RUNNING} slots when another comes with {LATE}"
    return Section(title, rows, faults=faults)


async def figures(place: Path, rollouts: int) -> Figures:
    """Runs all of it."""
    plan = scale.Plan(rollouts + FIRST + RUNNING, LATENCY_S, running=RUNNING)
    async with (
        scale.fleet(place, plan) as run,
        connect(run.stack.endpoints, namespace=NAMESPACE) as late,
        run.ps.intercept(credits=4 * RUNNING) as early_calls,
        late.intercept(credits=4 * RUNNING) as late_calls,
    ):
        replies = world.replies(run.model)
        early_model, late_model = (load.Model(calls, replies, LATENCY_S) for calls in (early_calls, late_calls))
        answering = asyncio.gather(early_model.answer_all(), late_model.answer_all())
        found = await _read(run, late, early_model, rollouts)
        early_calls.finish()
        late_calls.finish()
        await answering
    return found


async def _read(run: scale.Fleet, late: Penstock, model: load.Model, rollouts: int) -> Figures:
    model.hold()
    early = await _submitted(run.ps, RUNNING)
    await load.all_wait(run.agents, RUNNING, (), load.Ends(), _START_S)
    early += await _submitted(run.ps, FIRST)
    small = processes.resident_bytes(run.pids()["driver"])
    early += await _submitted(run.ps, rollouts)
    waiting_kb = (processes.resident_bytes(run.pids()["driver"]) - small) / rollouts / 1e3
    held = len([one async for one in run.ps.sandboxes.list()])
    held += len([one async for one in run.ps.gate.list(open_only=True)])
    model.free(world.CALLS * LATENCY_S)
    await asyncio.gather(*(one.result() for one in early[:RUNNING]))
    few = await _submitted(late, LATE)
    await asyncio.gather(*(one.result() for one in few))
    came = [one async for one in late.rollouts.list(labels=load.LABELS)]
    await _cancelled(early)
    listed = [one async for one in run.ps.rollouts.list(labels=load.LABELS)]
    _, left = await scale.settled(run)
    held_back = {one.rollout_id for one in early[:RUNNING]}
    took = [_held_s(one) for one in listed if _is_rewarded(one) and one.rollout_id not in held_back]
    waits = [one.phase_times.get(Phase.QUEUED, 0.0) for one in came]
    return Figures(
        rollouts,
        waiting_kb,
        held - 2 * RUNNING,
        sum(took) / len(took),
        min(waits),
        max(waits),
        _mishaps(early, listed, came, left),
    )


def _mishaps(
    early: Sequence[RolloutHandle], listed: Sequence[Rollout], came: Sequence[Rollout], left: Sequence[str]
) -> list[str]:
    known = {one.rollout_id for one in listed}
    found = [f"{one.rollout_id} is lost" for one in early if one.rollout_id not in known]
    found += [f"{one.rollout_id} of the late owner: {one.outcome}" for one in came if not _is_rewarded(one)]
    found += [f"{one.rollout_id} of the early owner: {one.outcome}" for one in listed if not _is_as_wanted(one)]
    return [*found, *(f"{name} is left" for name in left)]


def _is_as_wanted(rollout: Rollout) -> bool:
    failure = None if rollout.outcome is None else rollout.outcome.failure
    return _is_rewarded(rollout) or (failure is not None and failure.reason == "CANCELLED")


def _is_rewarded(rollout: Rollout) -> bool:
    reward = None if rollout.outcome is None else rollout.outcome.reward
    return reward is not None and reward.value == 1.0


def _held_s(rollout: Rollout) -> float:
    return sum(seconds for phase, seconds in rollout.phase_times.items() if phase is not Phase.QUEUED)


async def _submitted(ps: Penstock, count: int) -> list[RolloutHandle]:
    at_once = asyncio.Semaphore(_AT_ONCE)

    async def one() -> RolloutHandle:
        async with at_once:
            return await ps.rollouts.create(world.task(), "shell", labels=load.LABELS)

    return await asyncio.gather(*(one() for _ in range(count)))


async def _cancelled(handles: Sequence[RolloutHandle]) -> None:
    """Cancels those that have not ended, the last ones first: none of them begins meanwhile."""
    at_once = asyncio.Semaphore(_AT_ONCE)

    async def cancel(one: RolloutHandle) -> None:
        async with at_once:
            with suppress(PenstockError):  # what became of it is looked at afterwards
                await one.cancel()

    await asyncio.gather(*map(cancel, reversed(handles)))
