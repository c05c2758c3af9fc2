"""Samples to rows, and rows beside those of the same name that were measured on something else in the same run."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from benchmarks.report import Row, percentile

T = TypeVar("T")


async def timed(times: list[float], work: Callable[[], Awaitable[T]]) -> T:
    """What `work` gives; the seconds that it took are added to `times`."""
    began = time.perf_counter()
    result = await work()
    times.append(time.perf_counter() - began)
    return result


def milliseconds(name: str, seconds: Sequence[float], note: str = "") -> list[Row]:
    """The median and the 99th percentile."""
    return [
        Row(f"{name}, p50", 1e3 * percentile(seconds, 0.5), "ms", note),
        Row(f"{name}, p99", 1e3 * percentile(seconds, 0.99), "ms"),
    ]


def beside(rows: Sequence[Row], others: Mapping[str, Sequence[Row]]) -> list[Row]:
    """The rows, each with its ratio to the row of the same name of every other that has one."""
    found = []
    for row in rows:
        ratios = [
            f"{row.value / other.value:.2g} x {who}"
            for who, theirs in others.items()
            for other in theirs
            if other.name == row.name and other.value
        ]
        found.append(replace(row, note="; ".join(filter(None, [row.note, *ratios]))))
    return found
