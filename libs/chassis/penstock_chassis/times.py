"""Conversions between seconds and protobuf times and durations."""

from __future__ import annotations

import time
from collections.abc import Callable

from google.protobuf.duration_pb2 import Duration

from penstock.values import times
from penstock.values.times import seconds, timestamp

__all__ = ["duration", "even_clock", "even_time", "seconds", "timestamp"]


def even_clock() -> Callable[[], float]:
    """Returns a clock of seconds since the epoch that runs monotonically from now, whatever is done to the system
    clock.

    For deadlines and ages: setting the system clock forward expires nothing, setting it back extends nothing. A
    restarted process begins from the system clock anew. The clock stands still while the machine sleeps.
    """
    began = time.time() - time.monotonic()
    return lambda: began + time.monotonic()


even_time = even_clock()
"""The process's own, from its start."""


def duration(seconds: float) -> Duration:
    """From seconds, to the nearest nanosecond; negative values become zero."""
    return times.duration(max(0.0, seconds))
