"""Times and spans as messages: what comes back is what went."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_chassis import times


@given(st.floats(0, 1e7))
def test_a_span_comes_back_to_the_nanosecond(seconds: float) -> None:
    """A duration on the wire is whole seconds and nanoseconds below one of them."""
    message = times.duration(seconds)
    assert 0 <= message.nanos < 10**9
    assert times.seconds(message) == pytest.approx(seconds, rel=1e-15, abs=0.6e-9)
    assert abs(message.ToNanoseconds() - Fraction(seconds) * 10**9) < Fraction(500_001, 10**6)


def test_a_span_below_nothing_is_none() -> None:
    """Two clocks that disagree make no message that nobody can read."""
    assert times.duration(-0.25).ToNanoseconds() == 0


@given(st.floats(0, 4e9))
def test_a_time_is_the_second_and_what_is_over(seconds: float) -> None:
    """Nanoseconds count onwards from the second before, also of a fraction."""
    message = times.timestamp(seconds)
    assert 0 <= message.nanos < 10**9
    assert message.seconds + message.nanos / 1e9 == pytest.approx(seconds, abs=1e-6)


@pytest.mark.requirement("R50", "R61")
@pytest.mark.parametrize("step", [1e9, -1e9])
def test_an_even_clock_goes_on_whatever_is_done_to_the_machines(monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    """It begins at the machine's time and takes no jump of it."""
    clock, before, real = times.even_clock(), time.time(), time.time
    assert abs(clock() - before) < 3600.0
    monkeypatch.setattr(time, "time", lambda: real() + step)
    assert abs(clock() - before) < 3600.0
