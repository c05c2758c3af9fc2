"""Figures as they are measured, printed as tables and kept as JSON."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: what was measured, the number, its unit, and what it was measured on or against.

    `also` has other figures of the same measurement by their names, units included.
    """

    name: str
    value: float
    unit: str
    note: str = ""
    also: Mapping[str, float] = field(default_factory=dict)

    @property
    def remark(self) -> str:
        """The other figures and the note, as they are printed."""
        others = ", ".join(f"{name} {_number(value)}" for name, value in self.also.items())
        return "; ".join(filter(None, [others, self.note]))


@dataclass(frozen=True, slots=True)
class Section:
    """The figures of one benchmark; `pace_ms` is `pace` before and after it.

    `faults` says which of them miss what they are judged by: with one, the command exits with 1.
    """

    title: str
    rows: Sequence[Row]
    pace_ms: tuple[float, float] | None = None
    faults: Sequence[str] = ()

    def __str__(self) -> str:
        names = max(len(row.name) for row in self.rows)
        numbers = [_number(row.value) for row in self.rows]
        width = max(map(len, numbers))
        lines = [
            f"  {row.name:<{names}}  {number:>{width}} {row.unit:<9} {row.remark}".rstrip()
            for row, number in zip(self.rows, numbers, strict=True)
        ]
        return "\n".join([self.title, *lines])


def percentile(samples: Sequence[float], share: float) -> float:
    """The nearest-rank percentile; `share` in (0, 1]."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def machine() -> dict[str, object]:
    """What the figures depend on, for the line beside them. Load is the one-minute average as the run begins."""
    model = next(
        (line.partition(":")[2].strip() for line in _read("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    memory = next((int(line.split()[1]) for line in _read("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "grpcio": version("grpcio"),
        "load_1min": round(os.getloadavg()[0], 2),
        "root": os.geteuid() == 0,
    }


def pace() -> float:
    """Milliseconds of a fixed loop, the best of three: a machine that others share is not equally fast all the time."""
    times = []
    for _ in range(3):
        began, total = time.perf_counter(), 0
        for number in range(1_000_000):
            total += number
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)


def write(path: Path, facts: dict[str, object], sections: Sequence[Section]) -> None:
    """Keeps a run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": facts, "sections": [asdict(section) for section in sections]}
    path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"


def _read(path: str) -> list[str]:
    try:
        return Path(path).read_text("utf-8").splitlines()
    except OSError:
        return []
