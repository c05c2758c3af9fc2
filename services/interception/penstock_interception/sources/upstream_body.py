"""The body of a call as an upstream gets it: the agent's own, or its like in Chat Completions, within the gate's terms.

Servers disagree which of two fields counts, and some read a field's name in any spelling. So a field that the gate sets
or reads has one name in the body, and no other spelling of it passes.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from penstock_codec.openai_chat import write_messages, write_tool, write_tool_choice
from penstock_interception.domain.requests import ChatRequest, is_hosted_field, plain_name

_SAMPLING: Final = ("temperature", "top_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty")
_LIMITS: Final = ("max_tokens", "max_completion_tokens")
_SPELLING: Final = {
    plain_name(name): name
    for name in (
        *("model", "messages", "tools", "tool_choice", "stop", "response_format", "logprobs", "top_logprobs"),
        *(*_SAMPLING, *_LIMITS, "top_k", "min_p", "min_tokens", "stop_token_ids", "repetition_penalty"),
        *("chat_template_kwargs", "return_token_ids", "return_tokens_as_token_ids"),
    )
}
# By plain name. The gate asks for one completion, whole; further models and a further limit would be beside its own.
_DROPPED: Final = frozenset({"stream", "streamoptions", "n", "bestof", "models", "maxoutputtokens"})


def passed_on(body: bytes) -> dict[str, Any]:
    """Returns the fields of an agent's Chat Completions body that an upstream gets."""
    given: dict[str, Any] = orjson.loads(body)
    return {name: value for name, value in given.items() if _passes(name)}


def _passes(name: str) -> bool:
    plain = plain_name(name)
    return plain not in _DROPPED and not is_hosted_field(name) and _SPELLING.get(plain, name) == name


def limit_tokens(body: dict[str, Any], limit: int | None) -> None:
    """Sets the most tokens to sample, under one name: OpenAI refuses both; `max_tokens` is known to every server."""
    if limit is None:
        return
    given = [name for name in _LIMITS if body.pop(name, None) is not None]
    body[given[0] if given else "max_tokens"] = limit


def chat_body(request: ChatRequest) -> dict[str, Any]:
    """Returns a request of any dialect as a Chat Completions body, without a model and without streaming."""
    body: dict[str, Any] = {"messages": write_messages(request.messages)}
    sampling = request.sampling
    body |= {name: value for name in _SAMPLING if (value := getattr(sampling, name)) is not None}
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.response_format is not None:
        body["response_format"] = orjson.loads(sampling.response_format)
    if request.tools:
        body["tools"] = [write_tool(tool) for tool in request.tools]
        body["tool_choice"] = write_tool_choice(request.tool_choice)
        if request.tool_choice.parallel_tool_calls is not None:
            body["parallel_tool_calls"] = request.tool_choice.parallel_tool_calls
    return body
