"""Caches change how long a call takes, and nothing else: whatever they have and whenever it goes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any, Final

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.endpoints.dialect_bodies import DIALECTS

from penstock_codec import Codec, tiny_tokenizer
from penstock_codec import cache as codec_cache
from penstock_codec.chat import FinishReason, Message, ToolCallPart
from penstock_interception import cache
from penstock_interception.domain.calls import AgentHints, Mode, RolloutSpec
from penstock_interception.domain.requests import ChatRequest
from penstock_interception.graph import GraphRecord, LogprobsMode, Plan, Sampled
from penstock_interception.ingress.dialects.base import Ask, DialectCodec, Route
from penstock_interception.rollouts.conversations import Conversation

ROUTE: Final = Route(Ask.COMPLETION, "m")
CODEC: Final = Codec.load(tiny_tokenizer.build(["You are a shell agent. Read the note, then write the file.\n"] * 4))
WORDS: Final = st.sampled_from(["go", "on", "Read the note.", "12:30 it is", "<|im_end|>", "", "é字"])


CACHES: Final = (*cache.EVERY, *codec_cache.EVERY, CODEC.caches.words, CODEC.caches.blocks, CODEC.caches.shapes)


def _evict_all() -> None:
    for one in CACHES:
        one.clear()


def _parsed(dialect: DialectCodec, body: bytes) -> ChatRequest:
    return cache.for_rollout("rollout", lambda: dialect.parse(body, ROUTE))


def _conversation(records: Sequence[GraphRecord] = ()) -> Conversation:
    spec = RolloutSpec(
        "open", "rollout", Mode.INTERCEPTION_GATE, hints=AgentHints(volatile_line_patterns=(r"\d\d:\d\d",))
    )
    return Conversation(spec, CODEC, vocab_size=None, records=records)


def _facts(plan: Plan) -> tuple[Any, ...]:
    """A plan without the random id of a new branch."""
    branch = "" if plan.new_branch else plan.branch_id
    place = (branch, plan.new_branch, plan.call_class, plan.parent_call_id, plan.shared_prefix_len, plan.reason)
    return (*place, plan.key, plan.hints, plan.mixed_up, plan.notes, plan.prompt_sha256, plan.suffix_ids.tolist())


def _sampled(plan: Plan, text: str) -> Sampled:
    ids = np.asarray(tiny_tokenizer.bytewise(text), dtype=np.int32)
    parsed = CODEC.parse(ids, prompt_ids=plan.prompt_ids, finish_reason=FinishReason.STOP)
    logprobs = np.zeros(ids.size, dtype=np.float32)
    return Sampled(parsed.message, parsed.finish_reason, ids, logprobs, LogprobsMode.RAW)


@pytest.mark.requirement("R82", "R32")
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.dialect.value)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_request_and_plan_are_equal_with_cold_warm_and_evicted_caches(
    dialect: DialectCodec, data: st.DataObject
) -> None:
    """Conversations grow, are edited and are repeated; before each step any of the caches may be emptied."""

    def disturb() -> None:
        for place in data.draw(st.lists(st.integers(0, len(CACHES) - 1), max_size=3)):
            CACHES[place].clear()

    _evict_all()
    conversation = _conversation()
    records: list[GraphRecord] = []
    said = [Message.system("You are a shell agent."), Message.user("go")]
    for turn in range(data.draw(st.integers(1, 5))):
        tools = data.draw(st.sampled_from([["bash"], ["bash"], ["bash", "read"]]))
        body = orjson.dumps(DIALECTS[dialect](said, tools))
        disturb()
        request = _parsed(dialect, body)
        disturb()
        plan = conversation.plan(request)
        _evict_all()
        alone = dialect.parse(body, ROUTE)
        assert (request, request.tools_sha256, request.body) == (alone, alone.tools_sha256, body)
        assert _facts(plan) == _facts(_conversation(records).plan(alone))
        if data.draw(st.booleans()):  # both know this request now
            assert _facts(conversation.plan(_parsed(dialect, body))) == _facts(plan)
        text = data.draw(WORDS.filter(lambda text: "<" not in text)) or "so"
        if data.draw(st.booleans()):
            text += '\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
        records.append(conversation.graph.commit(f"call-{turn}", plan, _sampled(plan, text + "<|im_end|>")))
        reply = records[-1].sampled.message
        said = [*said[: data.draw(st.sampled_from([len(said), len(said), 2]))], reply]
        said += [Message.tool(call.id, data.draw(WORDS)) for call in reply.tool_calls]
        said.append(Message.user(data.draw(WORDS) or "on"))


@pytest.mark.requirement("R32")
def test_threads_parse_and_plan_alike_during_evictions_and_recordings() -> None:
    """Prompts are made in a thread pool while the event loop goes on."""
    call = ToolCallPart("call_1", "bash", '{"command": "ls"}')
    said = [Message.system("s"), Message.user("go"), Message.assistant("", call), Message.tool("call_1", "a b")]
    said += [Message.assistant("so"), Message.user("12:30 on")]
    wanted = {}
    for dialect, write in DIALECTS.items():
        body = orjson.dumps(write(said, ["bash"]))
        request = dialect.parse(body, ROUTE)
        wanted[dialect] = body, request, _conversation().plan(request).prompt_sha256
    conversation, done = _conversation(), Event()

    def check(dialect: DialectCodec) -> int:
        body, request, prompt = wanted[dialect]
        parsed = _parsed(dialect, body)
        assert parsed == request and conversation.plan(parsed).prompt_sha256 == prompt
        return 1

    def disturb() -> None:
        while not done.is_set():
            _evict_all()

    with ThreadPoolExecutor(5) as pool:
        disturbing = pool.submit(disturb)
        checks = [pool.submit(check, dialect) for _ in range(25) for dialect in DIALECTS]
        for number in range(25):
            side = conversation.graph.plan([Message.user(f"Title {number}?")])
            conversation.graph.commit(f"side-{number}", side, _sampled(side, "Notes<|im_end|>"))
        try:
            assert sum(item.result() for item in checks) == 100
        finally:
            done.set()
        disturbing.result()
