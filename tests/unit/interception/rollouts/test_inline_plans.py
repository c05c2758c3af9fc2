"""Which prompts are made on the event loop: those whose work is small, however long their bodies are (R32)."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.support.services.inner_gate import completion, inner_gate
from tests.support.waiting import eventually

from penstock_codec.chat import Sampling
from penstock_interception import cache
from penstock_interception.domain.calls import CallRequest, CallState, Dialect
from penstock_interception.domain.results import Accepted
from penstock_interception.graph import Plan, fingerprint
from penstock_interception.interceptor import INLINE_BYTES
from penstock_interception.rollouts.conversations import INLINE_BODY_BYTES, INLINE_PARTS, Conversation
from penstock_interception.testing import parse

LONG = "word " * INLINE_BYTES
REPLY = "list the files"

Ask = Callable[..., Any]


@asynccontextmanager
async def asking(directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ask]:
    """A function that asks with these messages, answers with REPLY, and returns whether the loop made the prompt."""
    on_loop, made = threading.get_ident(), list[bool]()
    plan = Conversation.plan

    def noted(conversation: Conversation, *given: Any) -> Plan:
        planned = plan(conversation, *given)
        made.append(threading.get_ident() == on_loop)
        return planned

    monkeypatch.setattr(Conversation, "plan", noted)
    async with inner_gate(directory) as gate:
        rollout, session = await gate.open(), gate.join()

        async def ask(*messages: tuple[str, Any], **fields: Any) -> bool:
            said = [
                {"role": role, "content": given} if isinstance(given, str) else {"role": role, **given}
                for role, given in messages
            ]
            body = orjson.dumps({"messages": said, **fields})
            request = CallRequest(
                Dialect.CHAT_COMPLETIONS,
                body,
                sha256(body).digest(),
                f"k{len(made)}",
                False,
                Sampling(),
                "m",
                body_bytes=len(body),
            )
            parsed = cache.for_rollout(rollout.id, lambda: parse(Dialect.CHAT_COMPLETIONS, body))
            call = await gate.interceptor.begin(rollout, request, parsed)
            await eventually(lambda: call.state is CallState.LEASED, "its prompt is made")
            answer = await gate.interceptor.deliver(call.id, call.lease_id, completion(REPLY), session=session)
            assert isinstance(answer, Accepted)
            await call.ended
            session.drain()
            return made[-1]

        yield ask


@pytest.mark.requirement("R32")
async def test_a_body_of_padding_hides_no_later_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier body had beside its messages was never a part of a prompt."""
    async with asking(tmp_path, monkeypatch) as ask:
        await ask(("user", "a"), metadata={"padding": LONG})
        assert not await ask(("user", LONG))


@pytest.mark.requirement("R32")
@pytest.mark.parametrize(
    "rewritten",
    [
        [("user", LONG.upper())],
        [("user", LONG), ("assistant", "never said"), ("user", "more")],
        [("user", "more"), ("user", LONG)],
        [("system", "new rules"), ("user", LONG), ("assistant", REPLY), ("user", "more")],
    ],
    ids=["equal length", "another answer", "another order", "another start"],
)
async def test_a_rewritten_conversation_is_planned_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rewritten: list[tuple[str, str]]
) -> None:
    """Its text is encoded anew, though its body may be no longer than those before."""
    async with asking(tmp_path, monkeypatch) as ask:
        assert not await ask(("user", LONG))
        assert not await ask(*rewritten)


@pytest.mark.requirement("R32")
async def test_other_tools_are_planned_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stand before the conversation, which is encoded anew."""
    async with asking(tmp_path, monkeypatch) as ask:
        assert not await ask(("user", LONG))
        tool = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}
        assert not await ask(("user", LONG), ("assistant", REPLY), ("user", "more"), tools=[tool])


@pytest.mark.requirement("R32")
async def test_a_long_conversation_that_grows_is_planned_on_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it has by now: only what follows the last answer is new. So is the same prompt again."""
    async with asking(tmp_path, monkeypatch) as ask:
        said = [("user", LONG)]
        assert not await ask(*said)
        for text in ("one", "two", "three"):
            said += [("assistant", REPLY), ("user", text)]
            assert await ask(*said)
        assert await ask(*said)
        assert not await ask(*said, ("assistant", REPLY), ("user", LONG))


@pytest.mark.requirement("R32")
async def test_many_parts_or_a_long_body_are_planned_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part and each byte costs a little, even where the loop knows it already."""
    async with asking(tmp_path, monkeypatch) as ask:
        for many in ([("user", "")] * INLINE_PARTS, [("user", "x" * INLINE_BODY_BYTES)]):
            assert not await ask(*many)
            assert not await ask(*many, ("assistant", REPLY), ("user", "more"))


@pytest.mark.requirement("R32")
async def test_many_answers_in_a_row_are_planned_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of them is compared with known answers in each of its lengths."""
    async with asking(tmp_path, monkeypatch) as ask:
        assert not await ask(("user", "a"), *[("assistant", "b")] * 20, ("user", "c"))
        assert await ask(("user", "a"), ("assistant", "b"), ("assistant", "c"), ("user", "d"))


@pytest.mark.requirement("R32")
async def test_long_arguments_of_unknown_calls_are_read_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are compared as JSON values, before it is known what the prompt continues."""
    on_loop, read = threading.get_ident(), list[bool]()
    canonical = fingerprint.canonical_json

    def noted(text: str) -> bytes:
        if len(text) > INLINE_BYTES:
            read.append(threading.get_ident() == on_loop)
        return canonical(text)

    monkeypatch.setattr(fingerprint, "canonical_json", noted)
    numbers = orjson.dumps({"list": [1] * INLINE_BYTES}).decode()
    call = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": numbers}}
    async with asking(tmp_path, monkeypatch) as ask:
        assert not await ask(
            ("user", "a"),
            ("assistant", {"tool_calls": [call]}),
            ("tool", {"tool_call_id": "c", "content": "b"}),
        )
    assert read == [False]
