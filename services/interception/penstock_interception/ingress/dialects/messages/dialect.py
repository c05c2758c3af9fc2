"""Anthropic Messages, exactly as the Anthropic SDKs and Claude Code parse it (R30).

A stream opens with `message_start` and the usage known so far. Until the call is answered, `ping` events follow, which
clients skip but count as activity. Then each block starts, has its delta and stops, in the model's order;
`message_delta` has the stop reason and the whole usage, `message_stop` ends the stream. A failure after the stream has
begun is an `error` event, which the SDKs raise; nothing follows it.

Reasoning has a signature, since clients do not send back reasoning without one. Text is shown as sampled, up to the
stop sequence that ended it (R101): the returned text must be recognised.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from penstock_codec.chat import FinishReason, ReasoningPart, TextPart, ToolCallPart, Usage
from penstock_interception.domain.calls import Dialect
from penstock_interception.domain.requests import ChatRequest
from penstock_interception.domain.state import Call
from penstock_interception.ingress.dialects.base import Ask, PlainStreams, Problem, Route
from penstock_interception.ingress.dialects.messages.body import DISPLAY, parse_messages, signature_of

_PATH = "/v1/messages"
_COUNT = "/v1/messages/count_tokens"
_MODELS = "/v1/models"
_STOP = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
    FinishReason.CONTENT_FILTER: "refusal",
}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_EPOCH = "1970-01-01T00:00:00Z"


class Messages(PlainStreams):
    """The dialect. Stateless."""

    dialect = Dialect.MESSAGES

    def base_path(self, rollout_id: str) -> str:
        return f"/rollout/{rollout_id}"

    def owns(self, path: str) -> bool:
        return path == _PATH or path.startswith(_PATH + "/")

    def route(self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> Route | None:
        if path == _PATH:
            return Route(Ask.COMPLETION)
        if path == _COUNT:
            return Route(Ask.COUNT)
        if method == "GET" and "anthropic-version" in headers:  # OpenAI's SDKs list models at the same path
            if path == _MODELS:
                return Route(Ask.MODELS)
            if path.startswith(_MODELS + "/"):
                return Route(Ask.MODEL, path.removeprefix(_MODELS + "/"))
        return None

    def parse(self, body: bytes, route: Route) -> ChatRequest:
        return parse_messages(body, counting=route.ask is Ask.COUNT)

    def status(self, problem: Problem) -> int:
        # Claude Code retries a 403 or 401 for minutes, in case its key is renewed; a 402 ends it.
        if problem.status == 403:
            return 402 if problem.code == "budget_exhausted" else 400
        return problem.status

    def problem(self, problem: Problem) -> bytes:
        return orjson.dumps(_error(problem))

    def answer(self, call: Call, request: ChatRequest) -> bytes:
        message = _message(call, request)
        message["content"] = [_whole(block) for block in _blocks(call, request)]
        message["stop_reason"], message["stop_sequence"] = _stop(call, request)
        message["usage"] = _usage(call)
        return orjson.dumps(message)

    def stream_open(self, call: Call, request: ChatRequest) -> bytes:
        message = _message(call, request)
        message["stop_reason"] = message["stop_sequence"] = None
        message["usage"] = _usage(call)
        return _event({"type": "message_start", "message": message})

    def stream_keep_alive(self) -> bytes:
        return _event({"type": "ping"})

    def stream_answer(self, call: Call, request: ChatRequest) -> bytes:
        events: list[bytes] = []
        for index, block in enumerate(_blocks(call, request)):
            events.append(_event({"type": "content_block_start", "index": index, "content_block": _begun(block)}))
            events += [
                _event({"type": "content_block_delta", "index": index, "delta": delta}) for delta in _deltas(block)
            ]
            events.append(_event({"type": "content_block_stop", "index": index}))
        reason, sequence = _stop(call, request)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        events.append(_event({"type": "message_delta", "delta": delta, "usage": _usage(call)}))
        events.append(_event({"type": "message_stop"}))
        return b"".join(events)

    def stream_problem(self, problem: Problem, request: ChatRequest) -> bytes:
        return _event(_error(problem))

    def count(self, tokens: int) -> bytes:
        return orjson.dumps({"input_tokens": tokens})

    def models(self, names: Sequence[str]) -> bytes:
        return orjson.dumps(
            {"data": [*map(_model, names)], "has_more": False, "first_id": names[0], "last_id": names[-1]}
        )

    def model(self, name: str) -> bytes:
        return orjson.dumps(_model(name))


def _model(name: str) -> dict[str, Any]:
    return {"type": "model", "id": name, "display_name": name, "created_at": _EPOCH, "lifecycle": "active"}


def _message(call: Call, request: ChatRequest) -> dict[str, Any]:
    model = request.model or call.rollout.spec.model_name or call.rollout.facts.model
    return {"id": f"msg_{call.id}", "type": "message", "role": "assistant", "model": model, "content": []}


def _blocks(call: Call, request: ChatRequest) -> Iterator[ReasoningPart | TextPart | ToolCallPart]:
    """Yields the blocks to show. Text of only white space is omitted: clients may not send such a block back."""
    if call.message is None:
        return
    hidden = request.echo.get(DISPLAY) == "omitted"
    for part in call.message.parts:
        if isinstance(part, ReasoningPart):
            yield ReasoningPart("" if hidden else part.text, part.signature or signature_of(part.text).encode())
        elif isinstance(part, ToolCallPart) or (isinstance(part, TextPart) and part.text.strip()):
            yield part


def _whole(block: ReasoningPart | TextPart | ToolCallPart) -> dict[str, Any]:
    match block:
        case ReasoningPart():
            return {"type": "thinking", "thinking": block.text, "signature": block.signature.decode("utf-8", "replace")}
        case TextPart():
            return {"type": "text", "text": block.text}
        case ToolCallPart():
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": orjson.Fragment(_input(block))}


def _begun(block: ReasoningPart | TextPart | ToolCallPart) -> dict[str, Any]:
    match block:
        case ReasoningPart():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case TextPart():
            return {"type": "text", "text": ""}
        case ToolCallPart():
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}


def _deltas(block: ReasoningPart | TextPart | ToolCallPart) -> tuple[dict[str, Any], ...]:
    match block:
        case ReasoningPart():
            signature = {"type": "signature_delta", "signature": block.signature.decode("utf-8", "replace")}
            return ({"type": "thinking_delta", "thinking": block.text}, signature)
        case TextPart():
            return ({"type": "text_delta", "text": block.text},)
        case ToolCallPart():
            return ({"type": "input_json_delta", "partial_json": _input(block)},)


def _input(call: ToolCallPart) -> str:
    """Returns arguments as sampled; a non-object, which only a trainer can write, is wrapped in one."""
    try:
        value = json.loads(call.arguments_json, parse_constant=_refuse)
    except (ValueError, RecursionError):
        value = None
    return call.arguments_json if isinstance(value, dict) else json.dumps({"arguments": call.arguments_json})


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _stop(call: Call, request: ChatRequest) -> tuple[str, str | None]:
    if call.message is not None and call.message.tool_calls:
        return "tool_use", None
    completion = call.completion
    if completion is None or completion.finish_reason is None:
        return "end_turn", None
    if completion.finish_reason is FinishReason.STOP and completion.stop_text in (request.sampling.stop or ()):
        return "stop_sequence", completion.stop_text
    return _STOP.get(completion.finish_reason, "end_turn"), None


def _usage(call: Call) -> dict[str, Any]:
    """Returns the counts so far: before the answer, the prompt's once it is made."""
    usage = call.completion.usage if call.completion is not None else None
    if usage is None:
        usage = Usage(int(call.plan.prompt_ids.size) if call.plan is not None else 0, 0)
    cached = usage.cached_tokens or 0
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens or 0},
    }


def _error(problem: Problem) -> dict[str, Any]:
    kind = "api_error" if problem.status >= 500 else "invalid_request_error"
    kind = "billing_error" if problem.code == "budget_exhausted" else _TYPES.get(problem.status, kind)
    details = {"error_code": problem.code, **({"param": problem.param} if problem.param is not None else {})}
    return {
        "type": "error",
        "error": {"type": kind, "message": problem.beginning("prompt is too long:"), "details": details},
    }


def _event(value: dict[str, Any]) -> bytes:
    return f"event: {value['type']}\ndata: ".encode() + orjson.dumps(value) + b"\n\n"
