"""OpenAI Chat Completions, exactly as the OpenAI SDKs and ai-sdk parse it (R30).

A stream: a chunk with the role, deltas of reasoning, text and tool calls (each with its index), a chunk with the finish
reason, the usage if requested, `[DONE]`. Requested logprobs come all at once, with the first delta that has content.
Keep-alives are SSE comments, which every client skips. A failure after the stream has begun is a data event with an
`error` object, which the SDKs raise; nothing follows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from penstock_codec.chat import FinishReason, Usage
from penstock_interception.domain.calls import Dialect
from penstock_interception.domain.requests import ChatRequest, Spell
from penstock_interception.domain.state import Call
from penstock_interception.graph.values import FloatArray, IntArray
from penstock_interception.ingress.dialects import openai_common
from penstock_interception.ingress.dialects.base import Ask, PlainStreams, Problem, Route
from penstock_interception.ingress.dialects.chat.body import parse_chat

_FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
    FinishReason.CONTENT_FILTER: "content_filter",
}


class ChatCompletions(PlainStreams):
    """The dialect. Stateless."""

    dialect = Dialect.CHAT_COMPLETIONS

    def base_path(self, rollout_id: str) -> str:
        return f"/rollout/{rollout_id}/v1"

    def owns(self, path: str) -> bool:
        return path.startswith("/v1/")

    def route(self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> Route | None:
        if path == "/v1/chat/completions":
            return Route(Ask.COMPLETION)
        return openai_common.models_route(method, path)

    def parse(self, body: bytes, route: Route) -> ChatRequest:
        return parse_chat(body)

    def problem(self, problem: Problem) -> bytes:
        return orjson.dumps({"error": openai_common.error(problem)})

    def answer(self, call: Call, request: ChatRequest) -> bytes:
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        finish = None
        if call.message is not None and call.completion is not None:
            message["content"] = call.message.text or (None if call.message.tool_calls else "")
            if call.message.reasoning:
                message["reasoning_content"] = call.message.reasoning
            if call.message.tool_calls:
                message["tool_calls"] = [
                    {
                        "id": item.id,
                        "type": "function",
                        "function": {"name": item.name, "arguments": item.arguments_json},
                    }
                    for item in call.message.tool_calls
                ]
            finish = _finish(call)
        choice = {"index": 0, "message": message, "logprobs": _logprobs(call, request), "finish_reason": finish}
        head = _head(call, request, "chat.completion")
        return orjson.dumps({**head, "choices": [choice], "usage": _usage(call)})

    def stream_open(self, call: Call, request: ChatRequest) -> bytes:
        return b""

    def stream_keep_alive(self) -> bytes:
        return b": keep-alive\n\n"

    def stream_answer(self, call: Call, request: ChatRequest) -> bytes:
        head = _head(call, request, "chat.completion.chunk")
        if request.include_usage:
            head["usage"] = None
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if call.message is not None:
            if call.message.reasoning:
                deltas.append({"reasoning_content": call.message.reasoning})
            if call.message.text:
                deltas.append({"content": call.message.text})
            for index, item in enumerate(call.message.tool_calls):
                function = {"name": item.name, "arguments": item.arguments_json}
                deltas.append(
                    {"tool_calls": [{"index": index, "id": item.id, "type": "function", "function": function}]}
                )
        choices = [_choice(delta, None) for delta in deltas]
        # The logprobs of the whole answer come with its first part.
        choices[min(1, len(choices) - 1)]["logprobs"] = _logprobs(call, request)
        events = [_event({**head, "choices": [choice]}) for choice in choices]
        events.append(_event({**head, "choices": [_choice({}, _finish(call))]}))
        if request.include_usage:
            events.append(_event({**head, "choices": [], "usage": _usage(call)}))
        events.append(b"data: [DONE]\n\n")
        return b"".join(events)

    def stream_problem(self, problem: Problem, request: ChatRequest) -> bytes:
        return _event({"error": openai_common.error(problem)})

    def models(self, names: Sequence[str]) -> bytes:
        return openai_common.models(names)

    def model(self, name: str) -> bytes:
        return openai_common.model(name)


def _head(call: Call, request: ChatRequest, kind: str) -> dict[str, Any]:
    model = request.model or call.rollout.spec.model_name or call.rollout.facts.model
    return {"id": f"chatcmpl-{call.id}", "object": kind, "created": int(call.received), "model": model}


def _choice(delta: dict[str, Any], finish: str | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}


def _logprobs(call: Call, request: ChatRequest) -> dict[str, Any] | None:
    """Returns one entry per sampled token, with the requested alternatives; None unless requested and known."""
    if request.spell is None or call.completion is None:
        return None
    tokens = call.completion.tokens
    if tokens is None or tokens.logprobs is None:
        return None
    content = [{**item, "top_logprobs": []} for item in _spelled(tokens.ids, tokens.logprobs, request.spell)]
    if tokens.top is not None and (asked := request.sampling.top_logprobs):
        for item, ids, logprobs in zip(content, tokens.top.token_ids, tokens.top.logprobs, strict=True):
            known = np.isfinite(logprobs[:asked])  # neither excluded by a filter nor filled up
            item["top_logprobs"] = _spelled(ids[:asked][known], logprobs[:asked][known], request.spell)
    return {"content": content, "refusal": None}


def _spelled(ids: IntArray, logprobs: FloatArray, spell: Spell) -> list[dict[str, Any]]:
    return [
        {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}
        for data, logprob in zip(spell(ids), logprobs.tolist(), strict=True)
    ]


def _finish(call: Call) -> str:
    if call.message is not None and call.message.tool_calls:
        return "tool_calls"
    reason = call.completion.finish_reason if call.completion is not None else None
    return _FINISH.get(reason, "stop") if reason is not None else "stop"


def _usage(call: Call) -> dict[str, Any]:
    usage = (call.completion.usage if call.completion is not None else None) or Usage(0, 0)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens or 0},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
    }


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
