"""A gate closes the rollouts of a driver that is away for its lease, and keeps those of one that comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.services.inner_gate import tokenizer

from penstock_interception.domain.calls import CallState, RolloutState
from penstock_interception.domain.state import Rollout
from penstock_interception.gate.context import GateLimits
from penstock_interception.rollouts.agent_keys import Refusal
from penstock_interception.testing import OpenGate, open_gate

_LEASE_S = 60.0
_LIMITS = GateLimits(driver_lease_s=_LEASE_S)


def _is_closed(rollout: Rollout) -> bool:
    return rollout.state is RolloutState.CLOSED


@pytest.fixture
async def gate(tmp_path: Path) -> AsyncIterator[OpenGate]:
    async with open_gate(tmp_path, tokenizer(), limits=_LIMITS) as opened:
        yield opened


async def test_rollouts_of_a_lost_driver_are_closed_at_its_lease_s_end(gate: OpenGate) -> None:
    """With their calls and agent keys; those of others stay."""
    with gate.interceptor.gate.drivers.held("d-other"):
        other = await gate.open(request_id="2", rollout_id="r2", driver_id="d-other")
        free = await gate.open(request_id="3", rollout_id="r3")
        with gate.interceptor.gate.drivers.held("d-lost"):
            rollout = await gate.open(driver_id="d-lost")
            key = gate.interceptor.agent_keys.first_text(rollout)
            call = await gate.ask(rollout, "Hello?")
            await gate.passes(2 * _LEASE_S)
        await gate.passes(_LEASE_S - 1)
        assert not _is_closed(rollout)
        await gate.passes(1)
        assert (rollout.state, rollout.close_reason) == (RolloutState.CLOSED, "DRIVER_LOST")
        assert call.state is CallState.CANCELLED
        assert isinstance(gate.interceptor.agent_keys.check(rollout.id, key), Refusal)
        assert {other.state, free.state} == {RolloutState.OPEN}


async def test_a_driver_that_comes_back_in_time_keeps_its_rollouts(gate: OpenGate) -> None:
    """Also one that connects a second time before its first stream is seen to break."""
    drivers = gate.interceptor.gate.drivers
    with drivers.held("d1"):
        rollout = await gate.open(driver_id="d1")
    await gate.passes(_LEASE_S - 1)
    first, second = drivers.held("d1"), drivers.held("d1")
    first.__enter__()
    second.__enter__()
    await gate.passes(2 * _LEASE_S)
    first.__exit__(None, None, None)
    await gate.passes(2 * _LEASE_S)
    assert not _is_closed(rollout)
    second.__exit__(None, None, None)
    await gate.passes(_LEASE_S)
    assert _is_closed(rollout)


async def test_a_driver_that_never_watches_has_one_lease(gate: OpenGate) -> None:
    rollout = await gate.open(driver_id="d1")
    await gate.passes(_LEASE_S)
    assert rollout.close_reason == "DRIVER_LOST"


async def test_a_lease_begins_anew_when_the_gate_restarts(tmp_path: Path) -> None:
    """Drivers need time to find a gate that was away itself."""
    async with open_gate(tmp_path, tokenizer(), limits=_LIMITS) as before:
        await before.open(driver_id="d1")
        await before.passes(_LEASE_S - 1)
    async with open_gate(tmp_path, tokenizer(), limits=_LIMITS, began=before.now[0]) as after:
        rollout = after.interceptor.registry.rollout("r1")
        await after.passes(_LEASE_S - 1)
        assert not _is_closed(rollout)
        await after.passes(1)
        assert _is_closed(rollout)
