"""What a session's window lets in: so many calls, so many bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.services.inner_gate import completion, inner_gate

from penstock_interception.domain.state import Call, Credits, Selector, SessionRequest
from penstock_interception.testing import OpenGate

SMALL, LARGE = "a", "b" * 2000
WINDOW = Credits(8, 3000)


async def answer(gate: OpenGate, call: Call) -> None:
    await gate.interceptor.deliver(call.id, call.lease_id, completion("yes"))
    await call.ended


@pytest.mark.requirement("R22")
async def test_a_call_that_passes_the_window_in_bytes_waits_until_nothing_is_held(tmp_path: Path) -> None:
    """D21. One larger than the window is sent alone; the calls behind it keep their place."""
    async with inner_gate(tmp_path) as gate:
        rollout = await gate.open()
        session = gate.interceptor.join(SessionRequest(Selector(), WINDOW))
        first = await gate.ask(rollout, SMALL)
        large = await gate.ask(rollout, LARGE)
        behind = await gate.ask(rollout, SMALL * 2)
        assert list(session.held) == [first.id]
        await answer(gate, first)
        assert list(session.held) == [large.id]
        assert session.held_bytes > session.credit.bytes
        await answer(gate, large)
        assert list(session.held) == [behind.id]


@pytest.mark.requirement("R22")
async def test_calls_behind_one_that_ends_in_the_queue_are_sent(tmp_path: Path) -> None:
    """What did not fit no longer holds up what does, for every session of the selector."""
    async with inner_gate(tmp_path) as gate:
        rollout = await gate.open()
        sessions = [gate.interceptor.join(SessionRequest(Selector(), WINDOW)) for _ in range(2)]
        held = [await gate.ask(rollout, text) for text in ("a", "aa")]
        assert [list(session.held) for session in sessions] == [[call.id] for call in held]
        large = await gate.ask(rollout, LARGE)
        behind = [await gate.ask(rollout, text) for text in ("aaa", "aaaa")]
        assert [len(session.held) for session in sessions] == [1, 1]
        gate.interceptor.gate.cancel(large, "AGENT_GONE")
        assert {call.id for session in sessions for call in session.held.values()} == {c.id for c in (*held, *behind)}


@pytest.mark.requirement("R22")
async def test_a_call_goes_to_the_session_that_has_room_for_it(tmp_path: Path) -> None:
    """The one that holds fewer calls may have less room."""
    async with inner_gate(tmp_path) as gate:
        rollout = await gate.open()
        narrow = gate.interceptor.join(SessionRequest(Selector(), WINDOW))
        wide = gate.interceptor.join(SessionRequest(Selector(), Credits(8)))
        for text in ("a", "aa", "aaa"):
            await gate.ask(rollout, text)
        assert (len(narrow.held), len(wide.held)) == (2, 1)
        await gate.ask(rollout, "aaaa")
        assert (len(narrow.held), len(wide.held)) == (2, 2)
        large = await gate.ask(rollout, LARGE)
        assert large.holder is wide
