"""Small calls of a service whose event loop is busy with other things: how many it takes, by queues of calls."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import processes
from benchmarks.gate.programs import running
from benchmarks.report import Row, Section, percentile
from benchmarks.scale.busy_service import SERVICE
from penstock_chassis.channel import connect

SETTLE_S: Final = 2.0
MEASURED_S: Final = 4.0
BODY: Final = b"x" * 100


@dataclass(frozen=True, slots=True)
class Case:
    """A service and its caller. `is_plain`: the service runs on uvloop's own loop."""

    iteration_s: float
    in_flight: int
    queues: int = 1
    connections: int = 1
    is_plain: bool = False

    @property
    def name(self) -> str:
        """As it is printed."""
        loop = "uvloop's own loop, " if self.is_plain else ""
        return f"{loop}queues {self.queues}, connections {self.connections}"


BUSY: Final = (
    Case(0.01, 100, is_plain=True),
    Case(0.01, 100, 4, 8, is_plain=True),
    Case(0.01, 100),
    *(Case(0.01, 100, queues, 8) for queues in (1, 2, 4, 8)),
)
IDLE: Final = (Case(0.0, 16, is_plain=True), Case(0.0, 16), Case(0.0, 16, 1, 8), Case(0.0, 16, 4, 8))


async def measure(_place: Path) -> list[Section]:
    """Two tables."""
    return [
        Section("Calls of a service whose iterations take 10 ms, 100 in flight", await _rows(BUSY)),
        Section("The same of a service that does nothing else, 16 in flight", await _rows(IDLE)),
    ]


async def _rows(cases: Sequence[Case]) -> list[Row]:
    return [await _taken(case) for case in cases]


async def _taken(case: Case) -> Row:
    argv = (sys.executable, "-m", "benchmarks.scale.busy_service")
    given = {"queues": case.queues, "iteration_s": case.iteration_s, "is_plain": case.is_plain}
    took: list[float] = []
    async with (
        running("the busy service", argv, **given) as service,
        connect(service.ready["address"], connections=case.connections) as channel,
    ):
        call: Any = channel.unary_unary(f"/{SERVICE}/Echo")

        async def ask() -> None:
            while True:
                began = time.perf_counter()
                await call(BODY)
                took.append(time.perf_counter() - began)

        asking = [asyncio.ensure_future(ask()) for _ in range(case.in_flight)]
        await asyncio.sleep(SETTLE_S)
        took.clear()
        began, cpu = time.perf_counter(), processes.cpu_s(service.pid)
        await asyncio.sleep(MEASURED_S)
        seconds, cpu_s, done = time.perf_counter() - began, processes.cpu_s(service.pid) - cpu, len(took)
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    also = {"p50 ms": round(1e3 * percentile(took, 0.5)), "p99 ms": round(1e3 * percentile(took, 0.99))}
    if not case.iteration_s:  # else most of it is the work that keeps the service busy
        also["service's CPU us/call"] = round(1e6 * cpu_s / done)
    return Row(case.name, done / seconds, "calls/s", also=also)
