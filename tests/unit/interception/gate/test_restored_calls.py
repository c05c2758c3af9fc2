"""A gate that is killed or updated starts again, whatever calls it had: one that cannot go on ends, alone."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import orjson
import pytest
from tests.support.services.inner_gate import codec, completion, inner_gate, tokenizer

from penstock_codec.chat import Sampling
from penstock_interception import testing
from penstock_interception.domain.calls import (
    CallerUpstream,
    CallRequest,
    CallState,
    Dialect,
    Mode,
    ModelFacts,
    RolloutState,
)
from penstock_interception.domain.deadlines import Clock
from penstock_interception.domain.requests import ChatRequest
from penstock_interception.domain.results import Accepted
from penstock_interception.domain.state import Rollout
from penstock_interception.gate.context import GateLimits
from penstock_interception.ingress.dialects.base import BadRequest
from penstock_interception.sources.base import Resolved
from penstock_interception.store.reading import StoredRollout
from penstock_interception.store.store import CallStore
from penstock_interception.testing import SPEC, OpenGate, open_gate, open_interceptor

BLACK_BOX = replace(
    SPEC, request_id="open-box", rollout_id="box", mode=Mode.BLACK_BOX, source=CallerUpstream("http://127.0.0.1:9/v1")
)
PASSED_ON = CallRequest(Dialect.MESSAGES, b"", sha256(b"body").digest(), "once:1", False, Sampling(), "", body_bytes=4)


@pytest.fixture
def stricter(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Texts whose bodies are refused from now on, as if by a newer version of the parser."""
    refused: list[bytes] = []
    parse = testing.parse

    def strict(dialect: Dialect, body: bytes) -> ChatRequest:
        if any(text in body for text in refused):
            raise BadRequest("messages: not taken any more", "messages")
        return parse(dialect, body)

    monkeypatch.setattr(testing, "parse", strict)
    return refused


async def answered(gate: OpenGate, text: str) -> str:
    """Opens another rollout, whose call is answered: the gate works."""
    session = gate.join()
    other = await gate.open(request_id=f"open-{text}", rollout_id=text)
    call = await gate.ask(other, text)
    verdict = await gate.interceptor.deliver(call.id, call.lease_id, completion(text), session=session)
    assert isinstance(verdict, Accepted)
    await call.ended
    return call.state


@pytest.mark.requirement("R18", "R34")
async def test_a_black_box_call_that_was_under_way_is_over_after_a_kill(tmp_path: Path) -> None:
    """Its body is nowhere and its connection is gone: the agent's retry is a call of its own."""
    async with inner_gate(tmp_path) as gate:
        box = await gate.interceptor.rollouts._open(BLACK_BOX, Resolved(ModelFacts(), None), None)
        gate.interceptor.begin_black_box(box, PASSED_ON)
    async with inner_gate(tmp_path) as gate:
        box = gate.interceptor.registry.rollout("box")
        (call,) = box.calls
        assert (call.state, call.end_reason) == (CallState.CANCELLED, "AGENT_GONE")
        again = gate.interceptor.begin_black_box(box, replace(PASSED_ON, retry_key="once:2"))
        gate.interceptor.end_black_box(again)
        assert (again.index, again.end_reason) == (1, "PASSED_THROUGH")
        assert await answered(gate, "other") == CallState.DELIVERED
    async with inner_gate(tmp_path) as gate:
        totals = gate.interceptor.registry.rollout("box").totals
        assert (totals.calls, totals.cancelled, totals.delivered, totals.failed) == (2, 1, 1, 0)


@pytest.mark.requirement("R34")
async def test_a_body_that_is_not_parsed_any_more_ends_its_call_alone(tmp_path: Path, stricter: list[bytes]) -> None:
    """Also one that holds the only text of its tools; calls beside it, of its rollout and of others, go on."""
    tools = sha256(b"tools").digest()
    async with inner_gate(tmp_path) as gate:
        rollout = await gate.open()
        await gate.ask(rollout, "old style", tools_sha256=tools)
        await gate.ask(rollout, "plain", tools_sha256=tools)
    stricter.append(b"old style")
    for _ in range(2):  # what has ended stays so
        async with inner_gate(tmp_path) as gate:
            refused, kept = gate.interceptor.registry.rollout("r1").calls
            assert (refused.state, refused.end_reason) == (CallState.FAILED, "REQUEST_UNREADABLE")
            assert kept.state is CallState.QUEUED and kept.plan is not None
    async with inner_gate(tmp_path) as gate:
        gate.join()
        _, kept = gate.interceptor.registry.rollout("r1").calls
        verdict = await gate.interceptor.deliver(kept.id, kept.lease_id, completion("answer"))
        assert isinstance(verdict, Accepted)
        assert await answered(gate, "other") == CallState.DELIVERED


@pytest.mark.requirement("R34")
async def test_tools_that_only_an_unreadable_body_has_first_are_read_from_the_open_call(
    tmp_path: Path, stricter: list[bytes]
) -> None:
    """An answer to the open call is parsed with its tools."""
    tool = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
    async with inner_gate(tmp_path) as gate:
        rollout = await gate.open()
        for text in ("old style", "plain"):
            body = orjson.dumps({"messages": [{"role": "user", "content": text}], "tools": [tool]})
            parsed = testing.parse(Dialect.CHAT_COMPLETIONS, body)
            request = CallRequest(
                Dialect.CHAT_COMPLETIONS, body, sha256(body).digest(), text, False, Sampling(), "m", parsed.tools_sha256
            )
            await gate.interceptor.begin(rollout, request, parsed)
    stricter.append(b"old style")
    async with inner_gate(tmp_path) as gate:
        conversation = gate.interceptor.conversations["r1"]
        assert [tool.name for (tool,) in conversation.tools.values()] == ["bash"]


@pytest.mark.requirement("R34", "R127")
async def test_the_time_to_come_back_begins_when_everything_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of agents, trainers and drivers: reading thousands of rollouts back takes longer than that time."""
    async with open_gate(tmp_path, tokenizer()) as gate:
        session = gate.join()
        for number in range(3):
            opened = await gate.open(request_id=f"q{number}", rollout_id=f"r{number}", driver_id=f"d{number}")
            await gate.ask(opened, "one")
    limits, load, now = GateLimits(), CallStore.load, [gate.now[0]]
    patience = {limits.rejoin_grace_s, limits.leasing.resume_window_s, limits.driver_lease_s}

    async def slow(store: CallStore, rollout: Rollout) -> StoredRollout:
        now[0] += 2 * max(patience)
        return await load(store, rollout)

    monkeypatch.setattr(CallStore, "load", slow)
    clock = Clock(lambda: now[0], lambda: now[0])
    async with open_interceptor(tmp_path, tokenizer(), clock=clock, limits=limits) as interceptor:
        rollouts, ready = list(interceptor.registry.rollouts()), now[0]
        calls = [call for rollout in rollouts for call in rollout.calls]
        now[0] = ready + min(patience) - 1
        await interceptor.tick()
        assert [call.state for call in calls] == 3 * [CallState.LEASED]
        assert interceptor.registry.find_session(session.id) is not None
        now[0] = ready + limits.rejoin_grace_s
        await interceptor.tick()
        assert [call.end_reason for call in calls] == 3 * ["AGENT_GONE"]
        assert interceptor.registry.find_session(session.id) is None
        now[0] = ready + limits.driver_lease_s - 1
        await interceptor.tick()
        assert [rollout.state for rollout in rollouts] == 3 * [RolloutState.OPEN]
        now[0] = ready + limits.driver_lease_s
        await interceptor.tick()
        assert [rollout.close_reason for rollout in rollouts] == 3 * ["DRIVER_LOST"]


@pytest.mark.requirement("R34", "R63")
async def test_restored_prompt_thinks_as_the_rollout_does(tmp_path: Path) -> None:
    """Its body, from which it is made again, does not say so."""
    async with inner_gate(tmp_path) as gate:
        rollout = await gate.open(sampling_override=Sampling(thinking=False))
        before = await gate.ask(rollout, "list the files")
        assert before.plan is not None and codec().decode(before.plan.prompt_ids).endswith("</think>\n\n")
    async with inner_gate(tmp_path) as gate:
        [after] = gate.interceptor.registry.rollout("r1").calls
        assert after.plan is not None and after.plan.prompt_sha256 == before.plan.prompt_sha256
