"""Families that write arguments without their types get them from the tools of the call's own request."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.support import families

from penstock_codec import Codec
from penstock_codec.chat import Message, Tool
from penstock_interception.conformance.sampled_text import Speech
from penstock_interception.domain.calls import Mode, RolloutSpec
from penstock_interception.domain.completions import Completion, Tokens
from penstock_interception.domain.requests import ChatRequest
from penstock_interception.ingress.dialects.messages.body import parse_messages
from penstock_interception.rollouts.conversations import Conversation


@pytest.mark.requirement("R81", "R82")
def test_a_value_has_the_type_of_the_requests_schema() -> None:
    """30 is a number where the tool says so, and text where it does not."""
    codec = Codec.load(families.build("qwen3_coder"))
    conversation = Conversation(RolloutSpec("open", "rollout", Mode.INTERCEPTION_GATE), codec, vocab_size=None)
    text = "<tool_call>\n<function=bash>\n<parameter=n>\n30\n</parameter>\n</function>\n</tool_call><|im_end|>"
    ids = codec.bytewise(text)
    completion = Completion(tokens=Tokens(ids.astype(np.int32)))
    for kind, value in (("integer", 30), ("string", "30")):
        tool = Tool("bash", "Run.", json.dumps({"type": "object", "properties": {"n": {"type": kind}}}))
        request = ChatRequest("m", (Message.user("go"),), (tool,))
        callable_sha256 = conversation.add_tools(request)
        answer = conversation.parse(conversation.plan(request), completion, callable_sha256)
        assert answer is not None
        assert json.loads(answer.message.tool_calls[0].arguments_json) == {"n": value}


@pytest.mark.requirement("R81", "R82")
@pytest.mark.parametrize("loaded", [(), ({"name": "ToolSearch", "input_schema": {"type": "object"}},)])
@pytest.mark.parametrize("family", ["qwen3_coder", "glm"])
def test_a_deferred_tools_value_has_the_type_of_its_schema(family: str, loaded: tuple[object, ...]) -> None:
    """The prompt does not begin with the tool, and yet its answers may call it: every value was a text."""
    codec = Codec.load(families.build(family))
    conversation = Conversation(RolloutSpec("open", "rollout", Mode.INTERCEPTION_GATE), codec, vocab_size=None)
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    late = {"name": "late", "input_schema": schema, "defer_loading": True}
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "go"}], "tools": [*loaded, late]}
    request = parse_messages(json.dumps(body).encode())
    plain = parse_messages(json.dumps({**body, "tools": [*loaded]}).encode())
    assert (request.tools_sha256, request.tools) == (plain.tools_sha256, plain.tools)
    callable_sha256 = conversation.add_tools(request)
    plan = conversation.plan(request)
    assert plan.prompt_ids.tolist() == conversation.plan(plain).prompt_ids.tolist()
    ids = codec.bytewise(Speech(codec).calls('{"n": 10}', name="late"))
    answer = conversation.parse(plan, Completion(tokens=Tokens(ids.astype(np.int32))), callable_sha256)
    assert answer is not None
    assert json.loads(answer.message.tool_calls[0].arguments_json) == {"n": 10}
