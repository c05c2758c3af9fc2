"""Single requests for calls: what is remembered of them is small."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from tests.support.services.inner_gate import completion, inner_gate

from penstock_interception.domain.results import Accepted
from penstock_interception.domain.state import Call, Credits, Rollout, Selector, SessionRequest
from penstock_interception.rpc.polling import PollingLeases

ASKED = SessionRequest(Selector(), Credits(1), lease_s=300.0)


def kept_by(memory: object) -> list[object]:
    """What is not freed because of it: calls and rollouts."""
    seen, left = set[int](), [memory]
    found = list[object]()
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type):
            continue
        seen.add(id(one))
        found += [one] if isinstance(one, Call | Rollout) else []
        left += gc.get_referents(one)
    return found


@pytest.mark.requirement("R23")
async def test_a_remembered_request_keeps_no_rollout_in_memory(tmp_path: Path) -> None:
    """One is remembered as long as it has a call."""
    async with inner_gate(tmp_path) as gate:
        polling = PollingLeases(gate.interceptor)
        call = await gate.ask(await gate.open(), "one")
        leased = await polling.lease(ASKED, wait_s=0.0, request_id="a")
        assert leased == [(call, call.lease_id)]
        assert await polling.lease(ASKED, wait_s=0.0, request_id="a") == leased
        verdict = await gate.interceptor.deliver(call.id, call.lease_id, completion("answer"))
        assert isinstance(verdict, Accepted)
        await call.ended
        await gate.interceptor.rollouts.delete("r1")
        unary = gate.interceptor.sessions.unary
        assert not kept_by(unary._given) and not kept_by(unary._calls) and not unary._given
        assert await polling.lease(ASKED, wait_s=0.0, request_id="a") == []
