"""Time as the gate sees it, so that tests can own it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """`wall` in seconds since 1970, for records; `steady` in seconds of a clock that never jumps, for deadlines."""

    wall: Callable[[], float] = time.time
    steady: Callable[[], float] = time.monotonic
