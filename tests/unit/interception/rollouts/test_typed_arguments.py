"""Families that write arguments without their types get them from the tools of the call's own request."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.support import families

from penstock_codec import Codec
from penstock_codec.chat import Message, Tool
from penstock_interception.domain.calls import Mode, RolloutSpec
from penstock_interception.domain.completions import Completion, Tokens
from penstock_interception.domain.requests import ChatRequest
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
        conversation.add_tools(request)
        answer = conversation.parse(conversation.plan(request), completion, request.tools_sha256)
        assert answer is not None
        assert json.loads(answer.message.tool_calls[0].arguments_json) == {"n": value}
