"""The machine's clock is set forward or back by hours, while the gate lives and between two lives of it."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_codec.chat import Sampling
from penstock_interception.domain.budgets import Budgets
from penstock_interception.domain.calls import CallRequest, Dialect, Mode, RolloutSpec, TokenizerRef
from penstock_interception.domain.deadlines import Clock
from penstock_interception.domain.state import Call, Rollout
from penstock_interception.gate import call_timeouts

TIMEOUT_S = 600.0
LOOP = asyncio.new_event_loop()
HOURS = st.floats(-48, 48).map(lambda hours: hours * 3600.0)


def rollout(created: float, held_since: float | None = None) -> Rollout:
    opening = RolloutSpec(
        "q", "r", Mode.INTERCEPTION_GATE, TokenizerRef("t"), budgets=Budgets(call_timeout_s=TIMEOUT_S)
    )
    found = Rollout(opening, created)
    found.paused_since = held_since
    return found


def call(of: Rollout, received: float) -> Call:
    return Call(
        id="c",
        rollout=of,
        index=0,
        request=CallRequest(next(iter(Dialect)), b"", b"", "k", stream=False, sampling=Sampling(), model_requested="m"),
        received=received,
        expires=received + TIMEOUT_S,
        sampling=Sampling(),
        ended=LOOP.create_future(),
    )


@pytest.mark.requirement("R4", "R22", "R35", "R61")
@pytest.mark.parametrize("step", [1e5, -1e5])
def test_while_the_gate_lives_its_time_takes_no_jump(monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    """Leases, calls, tokens, pauses, rates and budgets of time go by clocks that nobody sets."""
    clock, real = Clock(), time.time
    wall, steady = clock.wall(), clock.steady()
    monkeypatch.setattr(time, "time", lambda: real() + step)
    assert 0 <= clock.wall() - wall < 3600.0
    assert 0 <= clock.steady() - steady < 3600.0


@pytest.mark.requirement("R22", "R61")
@given(jump=HOURS, waited=st.floats(0, TIMEOUT_S))
def test_after_a_restart_no_call_has_longer_than_it_was_given(jump: float, waited: float) -> None:
    """A clock that was set back in between makes nothing immortal, and no age is below nothing."""
    found = rollout(1e9)
    waits = call(found, 1e9)
    now = 1e9 + waited + jump
    call_timeouts.restore_times(found, [waits], now)
    assert waits.expires - now <= TIMEOUT_S
    assert found.age_s(now) >= 0


@pytest.mark.requirement("R59", "R61")
@given(jump=HOURS, waited=st.floats(0, TIMEOUT_S))
def test_held_call_keeps_its_remaining_time_after_a_restart(jump: float, waited: float) -> None:
    """Time stood still for it, and no jump takes any of it away."""
    found = rollout(1e9, held_since=1e9 + waited)
    waits = call(found, 1e9)
    now = 1e9 + waited + jump
    call_timeouts.restore_times(found, [waits], now)
    call_timeouts.resume_times(found, [waits], now)
    assert TIMEOUT_S - waited - 1e-3 <= waits.expires - now <= TIMEOUT_S
    assert found.age_s(now) <= waited + 1e-3
