"""The fidelity suite's parts: templates, dialects, and an engine whose tokens are never the canonical ones.

To put a dialect under the suite, add it to DIALECTS: a function from the messages that a client means to the messages
that the service reads after they went over that dialect's wire.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock_codec import Codec, tiny
from penstock_codec.chat import (
    FinishReason,
    Message,
    Part,
    ReasoningPart,
    Role,
    TextPart,
    Tool,
    ToolCallPart,
    ToolResultPart,
)
from penstock_interception.graph import (
    CallHints,
    CallNode,
    LogprobsMode,
    Plan,
    Sampled,
    TokenGraph,
    VersionSpan,
)
from penstock_interception.ingress.chat import ChatCompletions
from penstock_interception.ingress.dialect import Ask, Route
from penstock_interception.ingress.generate_content import GenerateContent
from penstock_interception.ingress.messages import Messages
from penstock_interception.ingress.messages_body import signature_of
from penstock_interception.ingress.responses import Responses

TEMPLATES = Path(__file__).parent / "templates"
TEXTS = ["You are a shell agent. Read the note, then write the file. List the files, please.\n"] * 4
BASH = Tool("bash", "Run a command.", '{"type": "object", "properties": {"command": {"type": "string"}}}')

Dialect = Callable[[Sequence[Message]], Sequence[Message]]


def over_chat_completions(messages: Sequence[Message]) -> Sequence[Message]:
    """As an OpenAI SDK writes the conversation into a body, and the ingress reads it."""
    written: list[dict[str, Any]] = []
    for message in messages:
        item: dict[str, Any] = {"role": message.role.value, "content": message.text}
        if message.tool_calls:
            item["content"] = message.text or None
            item["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
                for call in message.tool_calls
            ]
        if message.reasoning:
            item["reasoning_content"] = message.reasoning
        for result in message.tool_results:
            item["tool_call_id"] = result.call_id
        written.append(item)
    body = json.dumps({"model": "m", "messages": written}).encode()
    return ChatCompletions().parse(body, Route(Ask.COMPLETION)).messages


def over_messages(messages: Sequence[Message]) -> Sequence[Message]:
    """As an Anthropic SDK writes the conversation into a body, and the ingress reads it."""
    written: list[dict[str, Any]] = []
    for message in messages:
        role = "user" if message.role is Role.TOOL else message.role.value
        written.append({"role": role, "content": [_block(part) for part in message.parts]})
    body: dict[str, Any] = {"model": "m", "max_tokens": 100, "messages": written}
    if messages[0].role is Role.SYSTEM:
        body["system"] = written.pop(0)["content"]
    return Messages().parse(json.dumps(body).encode(), Route(Ask.COMPLETION)).messages


def _block(part: Part) -> dict[str, Any]:
    match part:
        case ReasoningPart():
            return {"type": "thinking", "thinking": part.text, "signature": signature_of(part.text)}
        case ToolCallPart():
            return {"type": "tool_use", "id": part.id, "name": part.name, "input": json.loads(part.arguments_json)}
        case ToolResultPart():
            return {"type": "tool_result", "tool_use_id": part.call_id, "content": part.text}
        case TextPart():
            return {"type": "text", "text": part.text}
    raise AssertionError(part)


def over_responses(messages: Sequence[Message]) -> Sequence[Message]:
    """As an OpenAI SDK writes the conversation into the items of a response's input, and the ingress reads it."""
    written: list[dict[str, Any]] = []
    for message in messages:
        if message.reasoning:
            thought = {"type": "reasoning_text", "text": message.reasoning}
            written.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": [thought]})
        written += [
            {"type": "function_call_output", "call_id": result.call_id, "output": result.text}
            for result in message.tool_results
        ]
        if message.text and not message.tool_results:
            kind = "output_text" if message.role is Role.ASSISTANT else "input_text"
            content = [{"type": kind, "text": message.text}]
            written.append({"type": "message", "role": message.role.value, "content": content})
        written += [
            {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments_json}
            for call in message.tool_calls
        ]
    body = json.dumps({"model": "m", "input": written}).encode()
    return Responses().parse(body, Route(Ask.COMPLETION)).messages


def over_generate_content(messages: Sequence[Message]) -> Sequence[Message]:
    """As google-genai writes the conversation into a body, and the ingress reads it."""
    system = [{"text": message.text} for message in messages if message.role is Role.SYSTEM]
    contents: list[dict[str, Any]] = []
    for message in messages:
        parts: list[dict[str, Any]] = []
        for part in message.parts:
            match part:
                case TextPart():
                    parts.append({"text": part.text})
                case ReasoningPart():
                    parts.append({"text": part.text, "thought": True, "thoughtSignature": "c2lnbmF0dXJl"})
                case ToolCallPart():
                    call = {"id": part.id, "name": part.name, "args": json.loads(part.arguments_json)}
                    parts.append({"functionCall": call})
        for result in message.tool_results:
            response = {"id": result.call_id, "name": "bash", "response": {"output": result.text}}
            parts.append({"functionResponse": response})
        if message.role is not Role.SYSTEM:
            contents.append({"role": "model" if message.role is Role.ASSISTANT else "user", "parts": parts})
    body = {"contents": contents, **({"systemInstruction": {"parts": system}} if system else {})}
    return GenerateContent().parse(json.dumps(body).encode(), Route(Ask.COMPLETION, "m", False)).messages


DIALECTS: Mapping[str, Dialect] = {
    "domain": lambda messages: messages,
    "chat_completions": over_chat_completions,
    "messages": over_messages,
    "responses": over_responses,
    "generate_content": over_generate_content,
}


@dataclass
class Conversation:
    """One rollout as its service sees it: a client sends messages, an engine samples what it is told to."""

    codec: Codec
    dialect: Dialect
    graph: TokenGraph
    answered: int = 0
    plans: dict[str, Plan] = field(default_factory=dict)

    def call(
        self,
        messages: Sequence[Message],
        completion: str,
        *,
        tools: Sequence[Tool] = (BASH,),
        hints: CallHints | None = None,
        finish: FinishReason | None = None,
    ) -> CallNode:
        """One model call: the messages over the wire, then `completion` sampled one byte a token."""
        plan = self.graph.plan(self.dialect(messages), tools, hints)
        self.answered += 1
        return self.commit(f"call-{self.answered}", plan, completion, finish)

    def commit(self, call_id: str, plan: Plan, completion: str, finish: FinishReason | None = None) -> CallNode:
        """An answer to a planned call."""
        if self.codec.decode(plan.prompt_ids).endswith("<think>\n"):  # the template opened the reasoning itself
            opened = completion.startswith("<think>\n")
            completion = completion.removeprefix("<think>\n") if opened else "\n</think>\n\n" + completion
        ids = np.asarray(tiny.bytewise(completion), dtype=np.int32)
        parsed = self.codec.parse(ids, prompt_ids=plan.prompt_ids, finish_reason=finish)
        sampled = Sampled(
            message=parsed.message,
            finish_reason=parsed.finish_reason,
            token_ids=ids,
            logprobs=np.full(ids.size, -0.25, dtype=np.float32),
            logprobs_mode=LogprobsMode.PROCESSED,
            versions=(VersionSpan(self.answered, 0, int(ids.size)),),
        )
        self.plans[call_id] = plan
        self.graph.commit(call_id, plan, sampled)
        return self.graph.calls[call_id]

    def prompt(self, node: CallNode) -> list[int]:
        """The prompt ids that the engine was given for a call."""
        ids: list[int] = self.plans[node.call_id].prompt_ids.tolist()
        return ids

    def seen(self, node: CallNode) -> list[int]:
        """Prompt and completion of a call, as the engine saw and sampled them."""
        ids = node.sampled.token_ids
        assert ids is not None
        return [*self.prompt(node), *ids.tolist()]

    def continues(self, later: CallNode, earlier: CallNode) -> bool:
        """Whether the later prompt starts with exactly the earlier prompt and completion."""
        seen = self.seen(earlier)
        return self.prompt(later)[: len(seen)] == seen


@pytest.fixture(scope="session", params=["ours", "strips_old_reasoning", "shows_call_ids", "system_first"])
def codec(request: pytest.FixtureRequest) -> Codec:
    files = tiny.build(TEXTS)
    if request.param != "ours":
        template = (TEMPLATES / f"{request.param}.jinja").read_text("utf-8")
        files = replace(
            files, chat_template=template, special_tokens={**files.special_tokens, "bos_token": tiny.END_OF_TEXT}
        )
    return Codec.load(files, parser="hermes")


@pytest.fixture(params=sorted(DIALECTS))
def conversation(request: pytest.FixtureRequest, codec: Codec) -> Conversation:
    return Conversation(codec, DIALECTS[request.param], TokenGraph("rollout", codec))
