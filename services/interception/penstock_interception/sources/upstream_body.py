"""The body of a call as an upstream gets it: the agent's own, or its like in Chat Completions, within the gate's terms.

Servers disagree which of two fields counts, and some read a field's name in any spelling. So a field that the gate sets
or reads has one name in the body, and no other spelling of it passes.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from penstock_codec.chat import Sampling
from penstock_codec.openai_chat import write_messages, write_tool, write_tool_choice
from penstock_interception.domain.requests import ChatRequest, is_hosted_field, plain_name, with_thinking
from penstock_interception.domain.state import Call
from penstock_interception.sources.base import SourceError

_SAMPLING: Final = ("temperature", "top_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty")
_LIMITS: Final = ("max_tokens", "max_completion_tokens")
_OVERRIDABLE: Final = ("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "stop")
_FORMATS: Final = ("text", "json_object", "json_schema")
# The API lacks these; vLLM and SGLang have them under the same names.
_EXTENDED: Final = ("top_k", "min_p", "min_tokens", "stop_token_ids", "repetition_penalty")
# These no server has, or none under a common name.
_ABSENT: Final = ("thinking_budget_tokens", "n")
_SPELLING: Final = {
    plain_name(name): name
    for name in (
        *("model", "messages", "tools", "tool_choice", *_SAMPLING, *_LIMITS, *_OVERRIDABLE, *_EXTENDED),
        *("response_format", "chat_template_kwargs", "reasoning_effort", "thinking", "logprobs", "top_logprobs"),
        *("return_token_ids", "return_tokens_as_token_ids"),
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


def replace_sampling(body: dict[str, Any], call: Call, agents: Sampling) -> None:
    """Writes the fields of the call's sampling that a rollout or a trainer has put in the place of the agent's.

    `agents`: what the agent asks for; of a Chat Completions body, which says it itself, it may be empty.

    One that turns the agent's `top_k` off is written as both servers know it, -1, and elsewhere as no field.

    Raises SourceError UPSTREAM_SAMPLING_UNSUPPORTED where the upstream's API has no field for one.
    """
    override, extended = call.rollout.spec.sampling_override, call.facts.extended_sampling
    if call.sampling.top_k is None and body.get("top_k") not in (None, -1, 0):
        del body["top_k"]
        if extended:
            body["top_k"] = -1  # without it the server's own default would count
    for name in (*_OVERRIDABLE, *_EXTENDED, *_ABSENT, "response_format", "thinking"):
        wanted = getattr(call.sampling, name)
        if wanted is None or (name == "n" and wanted == 1):
            continue
        field, value = _written(name, wanted, body)
        is_taken = value is not None and name not in _ABSENT and (name not in _EXTENDED or extended)
        is_agents = wanted == getattr(agents, name) or (value is not None and value == body.get(field))
        if name == "thinking":  # the agent's body may say it in other fields
            is_agents = is_agents or wanted == call.request.sampling.thinking
        if is_agents and getattr(override, name) is None:
            continue
        if not is_taken:
            raise SourceError(
                "UPSTREAM_SAMPLING_UNSUPPORTED",
                f"{name} overrides the agent's sampling, and the upstream's API (OpenAI Chat Completions"
                f"{' as vLLM and SGLang have it' if extended else ''}) does not take it.",
                retriable=False,
            )
        body[field] = value
        if name == "thinking":
            _drop_contradicting(body, wanted)


def _drop_contradicting(body: dict[str, Any], thinking: bool) -> None:
    """Removes the agent's further fields on thinking where they say the opposite."""
    effort, switch = body.get("reasoning_effort"), body.get("thinking")
    if effort is not None and (effort != "none") is not thinking:
        del body["reasoning_effort"]
    if isinstance(switch, dict) and (switch.get("type") != "disabled") is not thinking:
        del body["thinking"]


def _written(name: str, wanted: Any, body: dict[str, Any]) -> tuple[str, Any]:
    """Returns a field's name in Chat Completions, and its value; None for a response format that the API lacks."""
    if name == "response_format":
        try:
            form = orjson.loads(wanted)
        except ValueError:
            return name, None
        return name, form if isinstance(form, dict) and form.get("type") in _FORMATS else None
    if name == "thinking":
        # Not part of the API: servers of open models pass it to the chat template, others refuse it.
        given = body.get("chat_template_kwargs")
        return "chat_template_kwargs", dict(with_thinking(given if isinstance(given, dict) else {}, wanted))
    if name == "stop" and wanted == (body.get(name),):
        return name, body[name]  # one text may stand without a list
    return name, list(wanted) if isinstance(wanted, tuple) else wanted


def chat_body(request: ChatRequest, *, extended: bool = False) -> dict[str, Any]:
    """Returns a request of any dialect as a Chat Completions body, without a model and without streaming.

    `extended`: for a server that takes more than the API has; it gets the arguments of its chat template.
    """
    body: dict[str, Any] = {"messages": write_messages(request.messages)}
    sampling = request.sampling
    body |= {name: value for name in _SAMPLING if (value := getattr(sampling, name)) is not None}
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.response_format is not None:
        body["response_format"] = orjson.loads(sampling.response_format)
    if extended and request.template_kwargs:
        body["chat_template_kwargs"] = dict(request.template_kwargs)
    if request.tools:
        body["tools"] = [write_tool(tool) for tool in request.tools]
        body["tool_choice"] = write_tool_choice(request.tool_choice)
        if request.tool_choice.parallel_tool_calls is not None:
            body["parallel_tool_calls"] = request.tool_choice.parallel_tool_calls
    return body
