"""Times and spans of time, in seconds, as messages and back."""

from __future__ import annotations

import math

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

_NANOS = 10**9


def timestamp(seconds: float) -> Timestamp:
    """Seconds since the epoch."""
    whole = math.floor(seconds)
    return Timestamp(seconds=whole, nanos=int((seconds - whole) * _NANOS))


def duration(seconds: float) -> Duration:
    """Seconds, to the nearest nanosecond; less than none is none."""
    whole, nanos = divmod(round(max(0.0, seconds) * _NANOS), _NANOS)
    return Duration(seconds=whole, nanos=nanos)


def seconds(value: Duration) -> float:
    """Of a Duration."""
    return value.seconds + value.nanos / _NANOS
