"""Rollouts on a stack of a cluster, as a trainer runs them: `python -m tests.clusters.rollouts` in the job's script.

Each that ends appends a line to a file, which the harness reads to know when to lose a machine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from pathlib import Path

from tests.hosts import model

from penstock.client import Mode, NotFound, Penstock, PenstockError, Unavailable, connect

_SAME = 4
"""So many rollouts have one prepared state: these meet at one node, and a new node gets new ones alone."""
LIMIT_S = 240.0
"""Guard on one rollout, its repetitions included."""


async def run(ps: Penstock, at_once: int, work_s: float, ends: Path, enough: Path) -> None:
    """Run rollouts, `at_once` at a time, until the file `enough` exists, and record how each ended."""
    file = ends.open("a", buffering=1)
    numbers = itertools.count()

    async def worker() -> None:
        while not enough.exists():
            await one(next(numbers))

    async def one(number: int) -> None:
        began = time.monotonic()
        found: dict[str, object] = {"number": number, "created_again": []}
        again: list[str] = []
        try:
            async with asyncio.timeout(LIMIT_S):
                while True:
                    try:
                        found |= await ended(number)
                        break
                    except (Unavailable, NotFound) as error:  # its driver is lost, or came back without it
                        again.append(error.reason)
        except (PenstockError, TimeoutError) as error:
            found["reason"] = f"{type(error).__name__}: {error}"
        found |= {"seconds": round(time.monotonic() - began, 1), "created_again": again}
        file.write(json.dumps(found) + "\n")

    async def ended(number: int) -> dict[str, object]:
        handle = await ps.rollouts.create(
            model.task(number, work_s + number // _SAME / 1000),
            "shell",
            mode=Mode.TRANSPARENT_PROXY,
            max_attempts=5,
            run_id="cluster",
        )
        outcome = (await handle.result()).outcome
        now = handle.info
        return {
            "reason": "" if outcome.failure is None else outcome.failure.reason,
            "reward": None if outcome.reward is None else outcome.reward.value,
            "attempts": now.attempts,
            "node": "" if now.home is None else now.home.sandbox_service,
            "gate": "" if now.home is None else now.home.gate,
            "driver": "" if now.home is None else now.home.driver,
        }

    with file:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(worker())


async def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at-once", type=int, required=True)
    parser.add_argument("--work", type=float, required=True)
    parser.add_argument("--ends", type=Path, required=True)
    parser.add_argument("--enough", type=Path, required=True)
    given = parser.parse_args()
    async with connect() as ps:
        await run(ps, given.at_once, given.work, given.ends, given.enough)


if __name__ == "__main__":
    sys.exit(asyncio.run(_main()))
