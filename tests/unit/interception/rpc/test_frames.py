"""How calls are put into frames."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

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


def calls_of(*tokens: int) -> list[Call]:
    """Calls of one rollout with prompts of so many tokens."""
    rollout = Rollout(RolloutSpec("r", "r", Mode.INTERCEPTION_GATE), created=0.0)
    arrival = CallRequest(
        Dialect.CHAT_COMPLETIONS, b"{}", bytes(32), "k", stream=False, sampling=Sampling(), model_requested=""
    )
    calls = []
    for index, count in enumerate(tokens):
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        call = Call(f"call-{index}", rollout, index, arrival, 0.0, 1.0, Sampling(), ended)
        call.plan = plan(count)
        calls.append(call)
    return calls


@pytest.mark.requirement("R110")
async def test_no_message_is_larger_than_the_session_accepts() -> None:
    """A call that is fails alone, by the trainer's limit and not as the agent's fault."""
    failures: dict[str, Failure] = {}
    writer = CallWriter(parse, lambda call, failure: failures.update({call.id: failure}))
    limit = 64 << 10
    calls = calls_of(10, 16_000, 16_384, 8_000, 7_000, 3_000)
    frames = list(frames_of(Outbox(calls=calls), writer, View(max_message_bytes=limit)))
    assert {name: failure.reason for name, failure in failures.items()} == {"call-2": "SESSION_MESSAGE_LIMIT"}
    assert "65536 bytes" in failures["call-2"].message
    assert [call.call_id for frame in frames for call in frame.calls.calls] == [
        f"call-{index}" for index in (0, 1, 3, 4, 5)
    ]
    assert max(frame.ByteSize() for frame in frames) <= limit


@pytest.mark.requirement("R22")
async def test_frames_stay_within_their_limit_and_lose_no_call() -> None:
    """Long prompts share frames as far as they go; one that is larger than a frame has one for itself."""
    calls = calls_of(10, 500_000, 400_000, 700_000, 2_000_000, 10, 10)
    frames = list(frames_of(Outbox(calls=calls), CallWriter(parse, failed), View(max_message_bytes=64 << 20)))
    sent = [[call.call_id for call in frame.calls.calls] for frame in frames]
    assert sent == [["call-0", "call-1", "call-2"], ["call-3"], ["call-4"], ["call-5", "call-6"]]
    assert all(frame.ByteSize() <= FRAME_BYTES for frame in frames if len(frame.calls.calls) > 1)
    ids = np.frombuffer(frames[1].calls.calls[0].prompt_token_ids, "<i4")
    assert np.array_equal(ids, np.arange(700_000))


@pytest.mark.requirement("R32")
async def test_large_bodies_are_parsed_in_a_thread_if_a_view_needs_them() -> None:
    """Once, before frames are made; one that cannot be parsed fails alone."""
    on_loop = threading.get_ident()
    parsed: list[tuple[bytes, bool]] = []

    def read(_: Dialect, body: bytes) -> ChatRequest:
        parsed.append((body[:1], threading.get_ident() == on_loop))
        if body.startswith(b"c"):
            raise ValueError("no such text")
        return ChatRequest("m", (Message.user(body[:1].decode()),))

    failures: dict[str, Failure] = {}
    writer = CallWriter(read, lambda call, failure: failures.update({call.id: failure}))
    calls = calls_of(10, 10, 10, 10)
    for call, body in zip(calls, (b"a", b"b" * 100_000, b"c" * 100_000, b"d" * 600_000), strict=True):
        call.request = replace(call.request, body=body)
    assert await writer.read_large(calls, View(max_message_bytes=500_000), asyncio.to_thread) == {}
    view = View(messages=True, max_message_bytes=500_000)
    requests = await writer.read_large(calls, view, asyncio.to_thread)
    assert parsed == [(b"b", False), (b"c", False)]
    frames = list(frames_of(Outbox(calls=calls), writer, view, requests=requests))
    assert parsed[2:] == [(b"a", True), (b"c", True)]
    texts = [[part.text.text for message in call.messages for part in message.parts] for call in frames[0].calls.calls]
    assert texts == [["a"], ["b"], []]
    assert {name: failure.reason for name, failure in failures.items()} == {"call-2": "INTERNAL"}


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
