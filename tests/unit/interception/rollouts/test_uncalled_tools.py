"""An answer has calls only where its request lets the model call something: otherwise what would be one is text."""

from __future__ import annotations

import functools
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import orjson
import pytest
from tests.support import families
from tests.support.services.inner_gate import completion, inner_gate

from penstock_codec import Codec
from penstock_codec.chat import FinishReason, Message, Sampling, Tool, ToolChoice, ToolChoiceMode
from penstock_interception.conformance.sampled_text import Speech
from penstock_interception.domain.calls import CallRequest, Dialect, Mode, RolloutSpec
from penstock_interception.domain.completions import Completion, Tokens
from penstock_interception.domain.requests import ChatRequest
from penstock_interception.domain.results import Accepted
from penstock_interception.graph import Sampled
from penstock_interception.graph.values import LogprobsMode
from penstock_interception.rollouts.conversations import Conversation
from penstock_interception.testing import parse

BASH = Tool("bash", "Run.", '{"type": "object", "properties": {"command": {"type": "string"}}}')
WITHOUT_TOOLS = ChatRequest("m", (Message.user("go"),))
WITHOUT_CALLS = replace(WITHOUT_TOOLS, tools=(BASH,), tool_choice=ToolChoice(ToolChoiceMode.NONE))
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


@functools.cache
def _codec(name: str) -> Codec:
    return Codec.load(families.build(name))


@pytest.mark.requirement("R81", "R82")
@pytest.mark.parametrize("name", ["chatml", "llama3_bare", "kimi", "harmony"])
@pytest.mark.parametrize("request_", [WITHOUT_TOOLS, WITHOUT_CALLS], ids=["without tools", "tool_choice none"])
def test_an_answer_that_may_call_nothing_is_text_and_its_echo_continues_the_line(
    name: str, request_: ChatRequest
) -> None:
    """An agent with a protocol of its own got an empty text and calls that it did not expect."""
    codec = _codec(name)
    conversation = Conversation(RolloutSpec("open", "r", Mode.INTERCEPTION_GATE), codec, vocab_size=None)
    callable_sha256 = conversation.add_tools(request_)
    plan = conversation.plan(request_)
    ids = codec.bytewise(Speech(codec).calls('{"command": "ls"}')).astype(np.int32)
    answer = conversation.parse(plan, Completion(tokens=Tokens(ids)), callable_sha256)
    assert answer is not None
    assert "ls" in answer.message.text and not answer.message.tool_calls
    assert answer.finish_reason is FinishReason.STOP
    logprobs = np.zeros(ids.size, np.float32)
    sampled = Sampled(answer.message, answer.finish_reason, ids, logprobs, LogprobsMode.RAW)
    conversation.graph.commit("c1", plan, sampled)
    echo = (*request_.messages, Message.assistant(answer.message.text), Message.user("on"))
    second = conversation.plan(replace(request_, messages=echo))
    assert (second.parent_call_id, second.new_branch) == ("c1", False)
    assert second.prompt_ids[: plan.prompt_ids.size + ids.size].tolist() == [*plan.prompt_ids, *ids]


@pytest.mark.requirement("R81", "R50")
@pytest.mark.parametrize("choice", ["auto", "none"])
@pytest.mark.parametrize("restarts", [False, True])
async def test_a_call_is_made_of_an_answer_as_its_request_allows(tmp_path: Path, choice: str, restarts: bool) -> None:
    """Also of an answer that comes after a restart: what the request allows is in its body."""
    function = {"name": "bash", "parameters": {"type": "object"}}
    asked = {
        "messages": [{"role": "user", "content": "go"}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": choice,
    }
    body = orjson.dumps(asked)
    parsed = parse(Dialect.CHAT_COMPLETIONS, body)
    request = CallRequest(
        Dialect.CHAT_COMPLETIONS, body, sha256(body).digest(), "k", False, Sampling(), "m", parsed.tools_sha256
    )
    async with inner_gate(tmp_path) as gate:
        call = await gate.interceptor.begin(await gate.open(), request, parsed)
        if not restarts:
            gate.join()
            assert isinstance(await gate.interceptor.deliver(call.id, call.lease_id, completion(CALL)), Accepted)
            await call.ended
        else:
            await gate.store.settled()
    if restarts:
        async with inner_gate(tmp_path) as gate:
            restored = gate.interceptor.registry.find_call(call.id)
            assert restored is not None
            call = restored
            gate.join()
            assert isinstance(await gate.interceptor.deliver(call.id, call.lease_id, completion(CALL)), Accepted)
            await call.ended
    assert call.message is not None
    assert (len(call.message.tool_calls), call.message.text) == ((1, "") if choice == "auto" else (0, CALL))
