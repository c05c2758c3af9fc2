"""A call's answer in OpenAI Responses: the response object and its output items.

Reasoning is given as `reasoning_text`; also as a summary if one was requested, since agents display that; and sealed in
`encrypted_content` if that was requested, since clients otherwise drop it.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from penstock_codec.chat import FinishReason, Sampling, ToolChoiceMode, Usage
from penstock_interception.domain.requests import ChatRequest
from penstock_interception.domain.state import Call
from penstock_interception.ingress.dialects.base import CONTEXT_EXCEEDED, Problem
from penstock_interception.ingress.dialects.openai_common import message_of
from penstock_interception.ingress.dialects.responses.items import sealed
from penstock_interception.ingress.dialects.responses.tools import call_item

_INCOMPLETE: Final = {
    FinishReason.LENGTH: "max_output_tokens",
    FinishReason.CONTENT_FILTER: "content_filter",
}


def response_of(call: Call, request: ChatRequest, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the response object; it has the usage once the call has an answer."""
    reason = _incomplete(call) if status == "incomplete" else None
    sampling = request.sampling
    return {
        "id": f"resp_{call.id}",
        "object": "response",
        "created_at": int(call.received),
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": reason} if reason is not None else None,
        "instructions": None,
        "max_output_tokens": sampling.max_tokens,
        "model": request.model or call.rollout.spec.model_name or call.rollout.facts.model,
        "output": output,
        "parallel_tool_calls": request.tool_choice.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": sampling.temperature,
        "text": {"format": _format(sampling)},
        "tool_choice": _choice(request),
        # Not repeated: they are as long as the request, and clients know what they sent.
        "tools": [],
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": _usage(call.completion.usage) if call.completion is not None else None,
        "user": None,
        "metadata": {},
    }


def status_of(call: Call) -> str:
    return "completed" if _incomplete(call) is None else "incomplete"


def failed(response: dict[str, Any], problem: Problem) -> dict[str, Any]:
    """Returns a failed response, with the code by which clients decide whether to retry.

    Codex stops on `insufficient_quota`, `context_length_exceeded` and `invalid_prompt`, and retries all others.
    """
    return {**response, "status": "failed", "error": {"code": failure_code(problem), "message": message_of(problem)}}


def failure_code(problem: Problem) -> str:
    """Returns the code of a failure within a stream."""
    if problem.code == CONTEXT_EXCEEDED:
        return problem.code
    if problem.status == 403:
        return "insufficient_quota"
    if problem.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if problem.retry else "invalid_prompt"


def output_of(call: Call, request: ChatRequest) -> list[dict[str, Any]]:
    """Returns the answer's items: reasoning, text, calls."""
    message = call.message
    if message is None:
        return []
    items: list[dict[str, Any]] = []
    if message.reasoning:
        item: dict[str, Any] = {"type": "reasoning", "id": f"rs_{call.id}", "summary": []}
        if request.echo.get("summary"):
            item["summary"] = [{"type": "summary_text", "text": message.reasoning}]
        item["content"] = [{"type": "reasoning_text", "text": message.reasoning}]
        item["encrypted_content"] = sealed(message.reasoning) if request.echo.get("encrypted") else None
        items.append({**item, "status": "completed"})
    calls = message.tool_calls
    if message.text or not (items or calls):
        status = "incomplete" if status_of(call) == "incomplete" else "completed"
        content = {"type": "output_text", "text": message.text, "annotations": [], "logprobs": []}
        items.append(
            {"type": "message", "id": f"msg_{call.id}", "role": "assistant", "status": status, "content": [content]}
        )
    known = request.echo.get("kinds", {})
    items += [call_item(item, known.get(item.name), f"{call.id}_{index}") for index, item in enumerate(calls)]
    return items


def _incomplete(call: Call) -> str | None:
    completion = call.completion
    if completion is None or completion.finish_reason is None:
        return None
    return _INCOMPLETE.get(completion.finish_reason)


def _usage(usage: Usage | None) -> dict[str, Any]:
    usage = usage or Usage(0, 0)
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.total_tokens,
    }


def _choice(request: ChatRequest) -> str | dict[str, Any]:
    choice = request.tool_choice
    if choice.mode is not ToolChoiceMode.NAMED:
        return choice.mode.value
    known = request.echo.get("kinds", {}).get(choice.name)
    if known is None or known.kind == "function":
        return {"type": "function", "name": choice.name}
    return {"type": "custom", "name": known.name} if known.kind == "custom" else {"type": known.kind}


def _format(sampling: Sampling) -> dict[str, Any]:
    if sampling.response_format is None:
        return {"type": "text"}
    form: dict[str, Any] = orjson.loads(sampling.response_format)
    return {"type": form["type"], **form.get("json_schema", {})}
