"""Calls that trainers hold stay theirs when the gate starts again."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.services.inner_gate import inner_gate

from penstock_interception.domain.state import Call
from penstock_interception.testing import OpenGate


async def asked(gate: OpenGate, text: str) -> Call:
    """A call of the rollout of all these tests, whose agent stays."""
    rollout = gate.interceptor.registry.find("r1") or await gate.open()
    return await gate.ask(rollout, text)


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
