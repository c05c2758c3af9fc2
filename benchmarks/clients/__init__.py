"""What the clients cost beside the raw stubs of their language: a call taken from a gate and answered.

The gate is a program of its own that does nothing but speak the protocol, so that what is measured is the client. Each
language has a program for its client and one for its stubs, which say what they used; they run one after another, in
several rounds, of which the median is told.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.report import Row, Section, percentile
from clients import nodejs
from tools import golang

ROOT: Final = Path(__file__).resolve().parents[2]
ROUNDS: Final = 3
CALLS: Final = {64: 5_000, 1: 1_000}
"""Calls of one round by credits; the first tenth is not counted."""

_PYTHON: Final = (sys.executable, "-m", "benchmarks.clients.python_program")
_NODE: Final = (sys.executable, "-m", "clients.nodejs", "node", "clients/typescript/bench/program.ts")

_GO: Final = (str(golang.HOME / "bench"),)

PROGRAMS: Final[Mapping[str, Sequence[str]]] = {"Python": _PYTHON, "TypeScript": _NODE, "Go": _GO}
"""By language: started with `client` or `stubs`, the gate's address, the number of calls and the credits; says on its
last line what it took, as JSON: `cpu_us` and `wall_us` of a call, `p50_us` from its coming to its acknowledgement."""


async def measure(place: Path) -> list[Section]:
    """CPU and wall time of one call, by language, for the client and for the stubs."""
    build = await asyncio.create_subprocess_exec(
        "npm", "run", "--silent", "build", cwd=ROOT / "clients" / "typescript", env=nodejs.environment()
    )
    assert await build.wait() == 0
    assert await asyncio.to_thread(golang.run, ["go", "build", "-o", *_GO, "./internal/bench"]) == 0
    sections = []
    for credits, calls in CALLS.items():
        taken: dict[tuple[str, str], list[dict[str, float]]] = {}
        for _ in range(ROUNDS):
            for language, program in PROGRAMS.items():
                for kind in ("client", "stubs"):
                    used = await _round(program, kind, calls, credits)
                    taken.setdefault((language, kind), []).append(used)
        title = f"A call of 1,000 prompt tokens, answered with 100 tokens and logprobs; {credits} held at once"
        sections.append(Section(title, _rows(taken)))
    return sections


def _rows(taken: Mapping[tuple[str, str], Sequence[Mapping[str, float]]]) -> list[Row]:
    def of(language: str, kind: str, name: str) -> float:
        return percentile([used[name] for used in taken[language, kind]], 0.5)

    rows = []
    for language, kind in taken:
        also = {"wall us": of(language, kind, "wall_us"), "p50 us": of(language, kind, "p50_us")}
        rows.append(Row(f"{language}, {kind}", of(language, kind, "cpu_us"), "us CPU", also=also))
    for language in PROGRAMS:
        cpu, wall = (of(language, "client", name) / of(language, "stubs", name) for name in ("cpu_us", "wall_us"))
        rows.append(Row(f"{language}, client beside stubs", cpu, "x CPU", also={"x wall": wall}))
    return rows


async def _round(program: Sequence[str], kind: str, calls: int, credits: int) -> dict[str, float]:
    gate = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.clients.gate_program", str(calls), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert gate.stdout is not None
        address = (await gate.stdout.readline()).decode().strip()
        client = await asyncio.create_subprocess_exec(
            *program, kind, address, str(calls), str(credits), cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )
        said, _ = await client.communicate()
        assert client.returncode == 0, f"{program} {kind} ended with {client.returncode}"
        used: dict[str, Any] = json.loads(said.splitlines()[-1])
        return used
    finally:
        gate.terminate()
        await gate.wait()
