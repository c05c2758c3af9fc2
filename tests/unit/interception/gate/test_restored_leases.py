"""Calls that trainers hold stay theirs when the gate starts again: those of sessions, and those of single requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.services.inner_gate import completion, inner_gate

from penstock_interception.domain.calls import CallState
from penstock_interception.domain.results import Accepted
from penstock_interception.domain.state import Call, Credits, Selector, SessionRequest
from penstock_interception.gate.context import GateLimits
from penstock_interception.rpc.polling import PollingLeases
from penstock_interception.rpc.trajectory import rollout_to
from penstock_interception.testing import OpenGate

LEASE_S = 300.0
WINDOW_S = GateLimits().leasing.resume_window_s
"""Other calls of a lost session are queued again after it."""


def polled(calls: int = 1) -> SessionRequest:
    """A single request for calls."""
    return SessionRequest(Selector(), Credits(calls), lease_s=LEASE_S)


async def asked(gate: OpenGate, text: str) -> Call:
    """A call of the rollout of all these tests, whose agent stays."""
    rollout = gate.interceptor.registry.find("r1") or await gate.open()
    return await gate.ask(rollout, text)


def the_call(gate: OpenGate) -> Call:
    """The only call of the rollout after a restart; its agent has come back."""
    (call,) = gate.interceptor.registry.rollout("r1").calls
    gate.interceptor.rejoin(call)
    return call


@pytest.mark.requirement("R26", "R34", "R127")
async def test_a_session_that_resumed_another_one_keeps_the_calls_of_both(tmp_path: Path) -> None:
    """They would be cancelled at the trainer as lost, and sampled again."""
    async with inner_gate(tmp_path) as gate:
        first = gate.join()
        early = await asked(gate, "one")
        gate.interceptor.sessions.lose(first)
        second = gate.join(resume=first.id)
        late = await asked(gate, "two")
        held = {early.id, late.id}
        assert set(second.held) == held
    async with inner_gate(tmp_path) as gate:
        third = gate.join(resume=second.id)
        assert third.resumed and set(third.held) == held
        lease_ids = {call.lease_id for call in third.held.values()}
        assert lease_ids == {early.lease_id, late.lease_id}


@pytest.mark.requirement("R34", "R127")
async def test_a_lease_of_a_single_request_lasts_as_long_after_a_restart(tmp_path: Path) -> None:
    """Nobody can resume what ended with its request: the window of sessions is not for it."""
    async with inner_gate(tmp_path) as gate:
        await asked(gate, "one")
        ((_, lease_id),) = await PollingLeases(gate.interceptor).lease(polled(), wait_s=0.0)
    async with inner_gate(tmp_path, began=gate.now[0] + 1) as gate:
        call, other = the_call(gate), gate.join()
        await gate.passes(max(WINDOW_S + 1, LEASE_S - 1))
        assert call.state is CallState.LEASED and call.lease_id == lease_id
        await gate.passes(1)
        assert call.holder is other and call.lease_id != lease_id


@pytest.mark.requirement("R34", "R127")
async def test_a_lease_of_a_single_request_is_extended_by_its_length_after_a_restart(tmp_path: Path) -> None:
    async with inner_gate(tmp_path) as gate:
        await asked(gate, "one")
        ((_, lease_id),) = await PollingLeases(gate.interceptor).lease(polled(), wait_s=0.0)
    async with inner_gate(tmp_path) as gate:
        call, other, unary = the_call(gate), gate.join(), gate.interceptor.sessions.unary
        for _ in range(2):
            await gate.passes(LEASE_S - 1)
            assert unary.extend(lease_id, None)
        assert (call.state, call.lease_id, other.held) == (CallState.LEASED, lease_id, {})
        assert not unary.extend(lease_id, "elsewhere") and not unary.extend(lease_id, None, "r2")
        verdict = await gate.interceptor.deliver(call.id, lease_id, completion("answer"))
        assert isinstance(verdict, Accepted)
        await call.ended
        assert not unary.extend(lease_id, None)


@pytest.mark.requirement("R34")
async def test_a_session_that_leases_a_call_after_a_single_request_holds_it_as_sessions_do(tmp_path: Path) -> None:
    """The earlier lease's length is not the later one's."""
    async with inner_gate(tmp_path) as gate:
        call = await asked(gate, "one")
        ((_, lease_id),) = await PollingLeases(gate.interceptor).lease(polled(), wait_s=0.0)
        await gate.interceptor.release(call.id, lease_id)
        session = gate.join()
        await gate.passes(2)
        assert call.holder is session
    async with inner_gate(tmp_path) as gate:
        call = the_call(gate)
        assert not gate.interceptor.sessions.unary.extend(call.lease_id, None)
        assert list(gate.join(resume=session.id).held) == [call.id]


@pytest.mark.requirement("R34", "R127")
async def test_a_lease_of_a_single_request_that_is_over_does_not_begin_anew_with_a_restart(tmp_path: Path) -> None:
    """Nobody else could have the call until it ends a second time."""
    async with inner_gate(tmp_path) as gate:
        call = await asked(gate, "one")
        await PollingLeases(gate.interceptor).lease(polled(), wait_s=0.0)
        await gate.passes(LEASE_S)
        assert call.state is CallState.QUEUED
    async with inner_gate(tmp_path) as gate:
        call, session = the_call(gate), gate.join()
        assert call.holder is session


@pytest.mark.requirement("R34", "R127")
async def test_a_request_repeated_after_a_restart_gets_the_calls_that_it_was_given(tmp_path: Path) -> None:
    """Its answer may be lost with the service: nobody would have the calls until their leases end."""
    async with inner_gate(tmp_path) as gate:
        await asked(gate, "one")
        ((_, lease_id),) = await PollingLeases(gate.interceptor).lease(polled(), wait_s=0.0, request_id="a")
    for _ in range(2):
        async with inner_gate(tmp_path) as gate:
            call, polling = the_call(gate), PollingLeases(gate.interceptor)
            assert await polling.lease(polled(), wait_s=0.0, request_id="b") == []
            other = replace(polled(), selector=Selector(rollout_ids=frozenset({"r1"})))
            assert await polling.lease(other, wait_s=0.0, request_id="a") == []
            assert await polling.lease(polled(), wait_s=0.0, request_id="a") == [(call, lease_id)]
    async with inner_gate(tmp_path) as gate:
        call, polling = the_call(gate), PollingLeases(gate.interceptor)
        await gate.interceptor.release(call.id, lease_id)
        session = gate.join()
        await gate.passes(2)
        assert call.holder is session
        assert await polling.lease(polled(), wait_s=0.0, request_id="a") == []


@pytest.mark.requirement("R43", "R74")
async def test_a_rollout_knows_that_its_gate_was_started_again_while_it_was_open(tmp_path: Path) -> None:
    """Its driver may have been away then too; an agent that fails has done so for want of a gate."""
    async with inner_gate(tmp_path) as gate:
        rollout = await gate.open()
        ended = await gate.open(request_id="q2", rollout_id="r2")
        await gate.interceptor.rollouts.close(ended.id, "AGENT_EXITED")
        assert not rollout_to(rollout, "g1").restored
    async with inner_gate(tmp_path) as gate:
        open_and_closed = [gate.interceptor.registry.rollout(one) for one in ("r1", "r2")]
        assert [rollout_to(one, "g1").restored for one in open_and_closed] == [True, False]
