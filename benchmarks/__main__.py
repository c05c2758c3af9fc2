"""`python -m benchmarks [NAME ...]`: measures, prints tables, and keeps the figures in runs/bench."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks import (
    clients,
    clouds,
    containers,
    dashboard,
    gate,
    grading,
    guests,
    inference,
    pacing,
    replayed_agents,
    report,
    rollouts,
    sandboxes,
    scale,
    tokens,
)
from benchmarks.gate import by_turns, prompts
from benchmarks.replaying import branches, credit, distilled, prefix_trees, regrades, replays, turns
from benchmarks.scale import busy, fairness

BENCHMARKS: Final[Mapping[str, Callable[[Path], Coroutine[None, None, list[report.Section]]]]] = {
    "sandboxes": sandboxes.measure,
    "companions": containers.measure_companions,
    "guests": guests.measure,
    "rollouts": rollouts.measure,
    "grading": grading.measure,
    "replays": replays.measure,
    "replayed-agents": replayed_agents.measure,
    "branches": branches.measure,
    "credit": credit.measure,
    "prefix-tree": prefix_trees.measure,
    "turns": turns.measure,
    "pacing": pacing.measure,
    "distill": distilled.measure,
    "regrade": regrades.measure,
    "gate": gate.measure,
    "gate-by-turns": by_turns.measure,
    "prompts": prompts.measure,
    "tokens": tokens.measure,
    "inference": inference.measure,
    "clients": clients.measure,
    "dashboard": dashboard.measure,
    "scale": scale.measure,
    "fairness": fairness.measure,
    "busy": busy.measure,
}
ONLY_BY_NAME: Final = frozenset({"companions", "distill", "replayed-agents", "turns"})
"""What needs a Docker daemon, what trains a policy many times, and what runs each built-in agent twenty times; the last
three go on with --kept.
"""
BACKENDS: Final[Mapping[str, Callable[[Path], Coroutine[None, None, list[report.Section]]]]] = {
    "local": sandboxes.measure,
    "docker": containers.measure,
    "e2b": clouds.measure_e2b,
    "hf": clouds.measure_hf,
}
"""What `sandboxes` measures, by --backend."""


def main() -> None:
    """Reads the command line and runs what it names, one after another."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    by_name = ", ".join(sorted(ONLY_BY_NAME))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(BENCHMARKS)}; none: all but {by_name}")
    parser.add_argument(
        "--backend", choices=tuple(BACKENDS), default="local", help="where `sandboxes` makes them (default local)"
    )
    parser.add_argument("--full", action="store_true", help="what takes longer too, of `gate`")
    parser.add_argument(
        "--rollouts",
        type=int,
        help="how many at once, of `scale`; how many, of `regrade`; how many wait as another comes, of `fairness`;"
        " each has a default of its own",
    )
    parser.add_argument(
        "--latency", type=float, default=scale.LATENCY_S, help="seconds of the model for a call, of `scale`"
    )
    parser.add_argument(
        "--kill", action="append", default=[], choices=scale.SERVICES, help="kill -9 this one meanwhile, of `scale`"
    )
    parser.add_argument("--table", action="store_true", help="what a fleet needs by these costs too, of `scale`")
    parser.add_argument(
        "--agent", action="append", default=[], metavar="NAME", help="only this one, of `replayed-agents`"
    )
    parser.add_argument("--tasks", type=int, default=replayed_agents.TASKS, help="how many, of `replayed-agents`")
    parser.add_argument(
        "--kept", type=Path, help=f"of {', '.join(sorted(ONLY_BY_NAME))}, a file of what was run: it is not run again"
    )
    parser.add_argument("--seeds", type=int, default=turns.SEEDS, help="how many, of `turns` and `distill`")
    parser.add_argument("--teacher", type=Path, help="the model of `distill`'s teacher; none = it is trained first")
    parser.add_argument("--out", type=Path, help="file for the figures (default runs/bench/TIME.json)")
    given = parser.parse_args()
    unknown = sorted(set(given.names) - set(BENCHMARKS))
    if given.seeds < 1:
        parser.error("--seeds must be at least 1")
    if given.kept and len(ONLY_BY_NAME & set(given.names)) > 1:
        parser.error(f"--kept is a file of one benchmark: run {', '.join(sorted(ONLY_BY_NAME))} apart")
    if given.kill and given.table:
        parser.error("--table is of a fleet without --kill: a service that comes back counts its CPU time from 0")
    if unknown:
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are: {', '.join(BENCHMARKS)}")
    measures = {**BENCHMARKS, "sandboxes": BACKENDS[given.backend]}
    measures["gate"] = partial(gate.measure, full=given.full)
    at_once = scale.ROLLOUTS if given.rollouts is None else given.rollouts
    plan = scale.Plan(at_once, given.latency, waiting_s=0.0 if given.kill else scale.WAITING_S, kill=given.kill)
    measures["scale"] = partial(scale.measure_table if given.table else scale.measure, plan=plan)
    chosen = replayed_agents.Plan(given.agent, given.tasks, given.kept)
    if given.rollouts is not None:
        measures["regrade"] = partial(regrades.measure, count=given.rollouts)
        measures["fairness"] = partial(fairness.measure, rollouts=given.rollouts)
    measures["replayed-agents"] = partial(replayed_agents.measure, plan=chosen)
    measures["turns"] = partial(turns.measure, seeds=given.seeds, kept=given.kept)
    measures["distill"] = partial(distilled.measure, seeds=given.seeds, kept=given.kept, teacher=given.teacher)
    facts = report.machine()
    print(", ".join(f"{name}: {value}" for name, value in facts.items()), flush=True)
    sections: list[report.Section] = []
    out = given.out or Path("runs/bench") / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    try:
        for name in given.names or [name for name in measures if name not in ONLY_BY_NAME]:
            before, began = report.pace(), time.perf_counter()
            with tempfile.TemporaryDirectory(prefix="penstock-bench-") as place:
                # Sandboxes are other users, and what is staged for them lies below.
                Path(place).chmod(0o755)
                made = asyncio.run(measures[name](Path(place)))
            took, pace = time.perf_counter() - began, (round(before, 1), round(report.pace(), 1))
            sections += (replace(section, pace_ms=pace) for section in made)
            print(*("", *made), sep="\n", flush=True)
            print(
                f"  ({name}: {took:.0f} s; a million additions took {pace[0]} ms before, {pace[1]} ms after)",
                flush=True,
            )
    finally:
        # Also when a benchmark ends the command: those before it took minutes.
        if sections:
            report.write(out, facts, sections)
            print(f"\nkept in {out}", flush=True)
    if faults := [fault for section in sections for fault in section.faults]:
        print("\nmissed:", *(f"  {fault}" for fault in faults), sep="\n")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
