"""Seconds as protobuf times and durations, and back."""

import math

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp


def seconds(value: Duration | Timestamp) -> float:
    """Returns a Duration in seconds, or a Timestamp in seconds since the epoch."""
    return value.seconds + value.nanos / 1e9


def duration(value: float) -> Duration:
    """Returns seconds as a Duration."""
    result = Duration()
    result.FromNanoseconds(_nanoseconds(value))
    return result


def timestamp(value: float) -> Timestamp:
    """Returns seconds since the epoch as a Timestamp."""
    whole, nanos = divmod(_nanoseconds(value), 10**9)
    return Timestamp(seconds=whole, nanos=nanos)


def _nanoseconds(value: float) -> int:
    """Returns seconds to the nearest nanosecond: those of the whole seconds are exact, which a float's are not."""
    whole = math.floor(value)
    return whole * 10**9 + round((value - whole) * 1e9)
