"""How calls are put into frames."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from penstock_codec.chat import Message, Sampling, Tool
from penstock_interception.cache import TOOLS_CHARS
from penstock_interception.domain.calls import CallRequest, Dialect, Mode, RolloutSpec
from penstock_interception.domain.completions import Failure
from penstock_interception.domain.requests import ChatRequest
from penstock_interception.domain.state import Call, Outbox, Rollout, View
from penstock_interception.graph import TokenGraph
from penstock_interception.graph.values import Plan
from penstock_interception.rpc.frames import FRAME_BYTES, CallWriter, frames_of


def plan(tokens: int) -> Plan:
    made = TokenGraph("r", None).plan([Message.user("q")])
    ids = np.arange(tokens, dtype=np.int32)
    return Plan(
        made.rollout_id, made.branch_id, True, made.call_class, None, 0, ids, ids, True, "", made.key, made.hints
    )


def failed(call: Call, failure: Failure) -> None:
    raise AssertionError(f"{call.id}: {failure}")


def parse(_: Dialect, body: bytes) -> ChatRequest:
    raise AssertionError("no view asks for messages")


@pytest.mark.requirement("R22")
async def test_frames_stay_within_their_limit_and_lose_no_call() -> None:
    """Long prompts share frames as far as they go; one that is larger than a frame has one for itself."""
    opening = RolloutSpec("r", "r", Mode.INTERCEPTION_GATE)
    rollout = Rollout(opening, created=0.0)
    arrival = CallRequest(
        Dialect.CHAT_COMPLETIONS, b"{}", bytes(32), "k", stream=False, sampling=Sampling(), model_requested=""
    )
    calls = []
    for index, tokens in enumerate([10, 500_000, 400_000, 700_000, 2_000_000, 10, 10]):
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        call = Call(f"call-{index}", rollout, index, arrival, 0.0, 1.0, Sampling(), ended)
        call.plan = plan(tokens)
        calls.append(call)
    frames = list(frames_of(Outbox(calls=calls), CallWriter(parse, failed), View()))
    sent = [[call.call_id for call in frame.calls.calls] for frame in frames]
    assert sent == [["call-0", "call-1", "call-2"], ["call-3"], ["call-4"], ["call-5", "call-6"]]
    assert all(frame.ByteSize() <= FRAME_BYTES + 64 for frame in frames if len(frame.calls.calls) > 1)
    ids = np.frombuffer(frames[1].calls.calls[0].prompt_token_ids, "<i4")
    assert np.array_equal(ids, np.arange(700_000))


@pytest.mark.requirement("R32")
def test_equal_tools_of_two_requests_are_kept_once() -> None:
    """An agent's tools come with each of its calls; very long ones are not kept beyond them."""

    def tools(description: str) -> tuple[Tool, ...]:
        return (Tool("bash", "".join(description), '{"type":"object"}'),)

    first, second = (ChatRequest("m", (), tools("Runs a command")) for _ in range(2))
    assert first.tools is second.tools
    assert first.tools_sha256 == second.tools_sha256 != ChatRequest("m", (), tools("Another")).tools_sha256
    long = "x" * (TOOLS_CHARS + 1)
    assert ChatRequest("m", (), tools(long)).tools is not ChatRequest("m", (), tools(long)).tools
