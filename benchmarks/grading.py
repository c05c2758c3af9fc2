"""Rollouts that are graded in a fresh fork, which is the default, beside the same ones graded in the agent's sandbox.

By turns in one run, so that what else the machine does falls on both. The agent changes one file.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks import rollouts, world
from benchmarks.report import Row, Section, percentile
from penstock.client import Phase, RolloutResult, Task

TURNS: Final = 40
"""Rollouts of each kind, one after another, by turns."""
AT_ONCE: Final = 16
ROUNDS: Final = 4
"""Rounds of AT_ONCE rollouts of each kind, by turns."""
PLACES: Final = {"in place": False, "fresh fork": True}


async def measure(place: Path) -> list[Section]:
    """What a fresh fork adds to a rollout: alone, and among others."""
    async with world.scripted(place) as running, running.ps.intercept(labels={"bench": "rollouts"}) as session:
        answering = asyncio.create_task(rollouts.answer_calls(running, session))
        try:
            alone = await _by_turns(running)
            many = await _at_once(running)
        finally:
            session.finish()
            await answering
    return [
        Section(f"Graded in a fresh fork and in place, {TURNS} rollouts each by turns", alone),
        Section(f"The same, {AT_ONCE} at once, {ROUNDS} rounds each by turns", many),
    ]


def _graded(task: Task, *, fresh_fork: bool) -> Task:
    assert task.verifier is not None
    return replace(task, verifier=replace(task.verifier, fresh_fork=fresh_fork))


async def _by_turns(running: world.World) -> list[Row]:
    walls: dict[str, list[float]] = {name: [] for name in PLACES}
    verifying: dict[str, list[float]] = {name: [] for name in PLACES}
    for turn in range(TURNS + 1):
        for name, fresh_fork in PLACES.items():
            began = time.perf_counter()
            result = await _rollout(running, _graded(rollouts.task(), fresh_fork=fresh_fork))
            if turn:  # the first of each prepares
                walls[name].append(time.perf_counter() - began)
                verifying[name].append(result.rollout.phase_times[Phase.VERIFYING])
    return [*_rows("the whole rollout", walls), *_rows("in phase verifying", verifying)]


async def _at_once(running: world.World) -> list[Row]:
    walls: dict[str, list[float]] = {name: [] for name in PLACES}
    for _ in range(ROUNDS):
        for name, fresh_fork in PLACES.items():
            task = _graded(rollouts.task(), fresh_fork=fresh_fork)
            began = time.perf_counter()
            await asyncio.gather(*(_rollout(running, task) for _ in range(AT_ONCE)))
            walls[name].append((time.perf_counter() - began) / AT_ONCE)
    return _rows("seconds a rollout", walls)


async def _rollout(running: world.World, task: Task) -> RolloutResult:
    handle = await running.ps.rollouts.create(task, "shell", labels={"bench": "rollouts"})
    result = await handle.result()
    if result.outcome.reward is None or result.outcome.reward.value != 1.0:
        raise RuntimeError(f"rollout {result.rollout_id} went wrong: {result.outcome}")
    return result


def _rows(what: str, seconds: dict[str, list[float]]) -> list[Row]:
    middle = {name: percentile(found, 0.5) for name, found in seconds.items()}
    rows = [Row(f"{what}, {name}, p50", 1e3 * value, "ms") for name, value in middle.items()]
    return [*rows, Row(f"{what}, ratio", middle["fresh fork"] / middle["in place"], "")]
