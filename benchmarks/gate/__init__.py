"""The gate without agents or sandboxes, beside gateways of others: what a call costs, and what it keeps.

`make bench-gate-peers` installs the others under runs/gate-peers; where they are not, they are left out, and the run
says so. Each is asked by the same load, and answered by a program that needs no time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final

from benchmarks.gate import loads, memory
from benchmarks.gate.loads import FURTHER, LOADS, Handling, Load
from benchmarks.gate.targets import PEERS_PYTHON, Setting, Target
from benchmarks.report import Row, Section
from benchmarks.timing import beside

HELD: Final = 4096
HELD_BESIDE: Final = 512
"""Streams, where others are measured too: an HTTP client of theirs opens no more than 1,000 connections."""
BARE_S: Final = 15.0
BESIDE_S: Final = 40.0
GATE_S: Final = 120.0
"""Seconds of loads after which no further one begins without `full`: of the constant, of each beside it, of ours."""
VERIFIERS: Final = ("verifiers 0.4, {}", "verifiers_program.py")
AGENTCORE: Final = ("agentcore-rl-toolkit 0.2, {}", "agentcore_program.py")


async def measure(place: Path, *, full: bool = False) -> list[Section]:
    """All of it, one after another; `full` takes longer."""
    setting = Setting.at(place)
    wanted = (*LOADS, *FURTHER) if full else LOADS
    beside_it = [load for load in wanted if load.peers]
    others = {
        "constant": await _rows(setting.constant(), beside_it, None if full else BARE_S, bare=True),
        **(await _peers(setting, beside_it, full=full)),
    }
    relay = await _rows(setting.relay(), beside_it, None if full else BESIDE_S)
    gate = await _rows(setting.gate(), wanted, None if full else GATE_S, streams=HELD)
    about = "CPU of the process per call unless said otherwise"
    return [
        *(Section(f"{title}: {about}", rows) for title, rows in others.items()),
        Section(f"Penstock as a relay: {about}", beside(relay, others)),
        Section(f"Penstock's gate, answered by a trainer: {about}", beside(gate, others)),
    ]


async def _peers(setting: Setting, wanted: Sequence[Load], *, full: bool) -> dict[str, list[Row]]:
    if not PEERS_PYTHON.exists():
        print("The gateways of others are not measured: `make bench-gate-peers` installs them", flush=True)
        return {}
    kinds = [(*VERIFIERS, "train"), (*VERIFIERS, "relay"), (*AGENTCORE, "linear")]
    if full:
        kinds.append((*AGENTCORE, "tree"))
    found = {}
    for title, program, kind in kinds:
        target = setting.peer(title.format(kind), program, kind)
        found[title.format(kind)] = await _rows(target, wanted, None if full else BESIDE_S, peer=True)
    return found


async def _rows(
    starting: AbstractAsyncContextManager[Target],
    wanted: Sequence[Load],
    patience_s: float | None,
    *,
    bare: bool = False,
    peer: bool = False,
    streams: int = HELD_BESIDE,
) -> list[Row]:
    handling, left_out = Handling(), []
    started = time.perf_counter()
    async with starting as target:
        await loads.warm_up(target)
        rows = [] if bare else await memory.measure(target, streams, 1 if streams == HELD_BESIDE else 4)
        began = time.perf_counter()
        for load in wanted:
            if patience_s is not None and time.perf_counter() - began > patience_s:
                left_out.append(load.name)
                continue
            rows.append(await loads.measure(target, load, load.peers if peer else load.conversations, handling))
        if handling.rollouts and not bare:
            rows += handling.rows()
    print(f"  {target.title}: {time.perf_counter() - started:.0f} s", flush=True)
    if left_out:
        print(f"  left out for lack of time: {'; '.join(left_out)}", flush=True)
    return rows
