"""Rollouts on a stack of a cluster, as a trainer runs them: `python -m tests.clusters.rollouts` in the job's script.

Each that ends appends its story to a file, which the harness reads to know when to lose a machine. What was seen of all
of them is written at the end, for `tests.hosts.truths`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter
from tests.hosts import left, model
from tests.hosts.following import Follower, list_ends
from tests.hosts.records import Seen, Story

from penstock.client import Penstock, connect

ENDS: Final = "ends.jsonl"
ENOUGH: Final = "enough"
"""No rollout begins once there is a file of this name."""
SEEN: Final = "seen.json"
STORIES: Final = TypeAdapter(Story)
RUNS: Final = TypeAdapter(Seen)
_SAME: Final = 4
"""So many rollouts have one prepared state: these meet at one node, and a new node gets new ones alone."""


async def run(ps: Penstock, at_once: int, work_s: float, max_attempts: int, folder: Path) -> None:
    """Run rollouts, `at_once` at a time, until there are enough, and record in `folder` what is seen of them."""
    seen, began, numbers = Seen(max_attempts, places=()), time.monotonic(), itertools.count()
    follower = Follower(
        ps,
        "",
        work_s,
        max_attempts,
        task=lambda number: model.task(number, work_s + number // _SAME / 1000),
        returns=False,
    )

    async def worker() -> None:
        while not (folder / ENOUGH).exists():
            number = next(numbers)
            await follower.follow_all(number, seen)
            file.write(STORIES.dump_json(seen.final()[number]) + b"\n")

    with (folder / ENDS).open("ab", buffering=0) as file:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(worker())
    seen.seconds = time.monotonic() - began
    seen.listed = await list_ends(ps)
    seen.left, seen.left_s = await left.until_none(lambda: _open(ps))
    (folder / SEEN).write_bytes(RUNS.dump_json(seen))


async def _open(ps: Penstock) -> list[str]:
    """What the gate beside the trainer, which is never lost, has of rollouts."""
    return [f"g0: open rollout {one.rollout_id}" async for one in ps.gate.list(open_only=True)]


async def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at-once", type=int, required=True)
    parser.add_argument("--work", type=float, required=True)
    parser.add_argument("--max-attempts", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args()
    async with connect() as ps:
        await run(ps, given.at_once, given.work, given.max_attempts, given.folder)


if __name__ == "__main__":
    sys.exit(asyncio.run(_main()))
