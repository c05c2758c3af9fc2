"""How many ended rollouts are graded again in a second, by the verifier that they had, and what an end state costs."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Final

from benchmarks import rollouts, world
from benchmarks.report import Row, Section, percentile

ROLLOUTS: Final = 1000
AT_ONCE: Final = 16
GROUP: Final = 64
COMPARED: Final = 4
"""Groups with kept end states, and as many without in turn with them."""
AIM_PER_S: Final = 20.0
RUN: Final = "regraded"


async def measure(place: Path, count: int = ROLLOUTS) -> list[Section]:
    """The rate, how many rewards are the same, the bytes of the end states of `count` rollouts, and their cost."""
    async with world.scripted(place) as running, running.ps.intercept(labels={"bench": RUN}) as session:
        answering = asyncio.create_task(rollouts.answer_calls(running, session))
        await _group(running, GROUP, "warm", keep=True)
        costs: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for number in range(2 * COMPARED):
            keep = number % 2 == 0
            costs[keep].append(await _group(running, GROUP, "compared", keep=keep))
        left = count
        while left:
            size = min(left, GROUP)
            await _group(running, size, RUN, keep=True)
            left -= size
        session.finish()
        await answering
        folder = next(place.rglob("end-states"))
        sizes = [path.stat().st_size for path in folder.iterdir()]
        load = os.getloadavg()[0]
        before, began = running.cpu_s(), time.perf_counter()
        found = [one async for one in running.ps.rollouts.regrade_all(run_id=RUN, concurrency=AT_ONCE)]
        took, after = time.perf_counter() - began, running.cpu_s()
    errors = [one.error for one in found if one.error is not None]
    if errors or len(found) != count:
        raise RuntimeError(f"{len(found)} of {count} were graded again, {len(errors)} not: {errors[:1]}")
    same = sum(
        one.grade is not None and one.rollout.outcome is not None and one.grade.reward == one.rollout.outcome.reward
        for one in found
    )
    if same != count:
        raise RuntimeError(f"{count - same} of {count} rewards differ, of the same verifier")
    parts = {name: 1e3 * (after[name] - before[name]) / count for name in after}
    rows = [
        Row("graded again", count / took, "/s", f"aim {AIM_PER_S:g}; load before it {load:.1f}"),
        Row("equal rewards", same, "", f"of {count}"),
        *(Row(f"CPU of one, {name}", cost, "ms") for name, cost in parts.items()),
        Row("CPU of one, sum", sum(parts.values()), "ms"),
    ]
    kept, without = (sorted(costs[keep]) for keep in (True, False))
    middle = COMPARED // 2
    cost = [
        Row(f"group of {GROUP}, end states kept", kept[middle][0], "s", f"{without[middle][0]:.2f} s without"),
        Row("CPU of a rollout, its end state kept", _middle_cpu(costs[True]), "ms"),
        Row("CPU of a rollout, without", _middle_cpu(costs[False]), "ms"),
        Row("files of end states", len(sizes), "", f"of {count + GROUP * (COMPARED + 1)} rollouts"),
        Row("bytes of one, p50", percentile([float(size) for size in sizes], 0.5), "B"),
    ]
    return [
        Section(f"{count} ended rollouts graded again, {AT_ONCE} at once", rows),
        Section("What keeping end states costs", cost),
    ]


async def _group(running: world.World, size: int, run_id: str, *, keep: bool) -> tuple[float, float]:
    """Run a group; the seconds that it took, and the CPU seconds of all parts."""
    before, began = running.cpu_s(), time.perf_counter()
    group = await running.ps.groups.create(
        rollouts.task(), "shell", size, run_id=run_id, labels={"bench": RUN}, keep_end_state=keep
    )
    results = await group.results(samples_only=True)
    took, after = time.perf_counter() - began, running.cpu_s()
    if any(one.reward is None for one in results):
        raise RuntimeError(f"rollouts went wrong: {[one.outcome for one in results if one.reward is None]}")
    return took, sum(after.values()) - sum(before.values())


def _middle_cpu(costs: list[tuple[float, float]]) -> float:
    """Milliseconds of one rollout, in the group in the middle."""
    used = sorted(cpu for _, cpu in costs)
    return 1e3 * used[len(used) // 2] / GROUP
