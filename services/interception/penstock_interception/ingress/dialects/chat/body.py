"""OpenAI Chat Completions: translates a request into a `ChatRequest`.

Fields without effect here are accepted and recorded as ignored (R33); a field that cannot be honoured and would change
the agent's answer is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson
from pydantic import TypeAdapter, ValidationError

from penstock_codec.chat import (
    ImagePart,
    Message,
    Part,
    ReasoningPart,
    Role,
    Sampling,
    TextPart,
    Tool,
    ToolCallPart,
    ToolChoice,
    ToolChoiceMode,
    ToolResultPart,
)
from penstock_interception import cache
from penstock_interception.domain.requests import (
    ENABLE_THINKING,
    REASONING_EFFORT,
    ChatRequest,
    is_hosted_field,
    with_thinking,
)
from penstock_interception.ingress.dialects.base import BadRequest
from penstock_interception.ingress.dialects.chat import fields
from penstock_interception.ingress.dialects.images import image_at
from penstock_interception.ingress.dialects.reading import json_object, json_text, refusal, thinking_of

# Work that a provider would do besides the model: search, plug-ins, a server's tools.
_IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier", "prompt_cache_retention"}
)

_SWITCH: Final = {"enabled": True, "disabled": False}

# Fields that are read separately from the settings, or not at all.
_APART = frozenset({"messages", "tools", *_IGNORED})

_MESSAGE: Final[TypeAdapter[fields.AnyMessage]] = TypeAdapter(fields.AnyMessage)
_TOOLS: Final = TypeAdapter(list[fields.ToolDefinition])


def parse_chat(body: bytes) -> ChatRequest:
    """Parses a body. Raises only BadRequest."""
    value = json_object(body)
    for name in ("functions", "function_call"):
        if value.get(name) is not None:
            raise BadRequest(
                f"{name} was replaced by {'tools' if name == 'functions' else 'tool_choice'}.",
                name,
                "unsupported_parameter",
            )
    raw: Any = value.get("messages")
    try:
        messages = _messages(body, raw)
        terms = _terms({name: item for name, item in value.items() if name not in _APART}, value.get("tools"))
    except (_Unread, ValidationError):
        # Validated as a whole, so that each error has its path in the body.
        try:
            whole = fields.ChatBody.model_validate(value)
        except ValidationError as error:
            raise refusal(error, value) from None
        messages = tuple(map(_message, whole.messages))
        tools = None if whole.tools is None else tuple(_tool(tool.function) for tool in whole.tools)
        terms = _request(whole, tools)
    return terms.with_messages(messages, body)


class _Unread(Exception):
    """The body must be validated as a whole."""


def _messages(body: bytes, raw: Any) -> tuple[Message, ...]:
    """Parses the conversation. Raises _Unread, ValidationError."""
    if not isinstance(raw, list) or not 1 <= len(raw) <= fields.MAX_MESSAGES:
        raise _Unread
    return cache.messages(body, raw, _read)


def _read(item: Any) -> Message:
    message = _plain(item)
    return _message(_MESSAGE.validate_python(item)) if message is None else message


def _plain(item: Any) -> Message | None:
    """Parses a simple message of text and calls as the pydantic models do, but faster; None for any other."""
    if type(item) is not dict:
        return None
    role, content, name = item.get("role"), item.get("content"), item.get("name")
    if not (name is None or type(name) is str) or not (
        type(content) is str or (content is None and role == "assistant")
    ):
        return None
    text = (TextPart(content),) if content else ()
    if role == "user":
        return Message(Role.USER, text, name or "")
    if role == "assistant":
        parts = _assistant_parts(item, text)
        return None if parts is None else Message(Role.ASSISTANT, parts, name or "")
    if role == "tool":
        call_id = item.get("tool_call_id")
        if type(call_id) is not str:
            return None
        return Message(Role.TOOL, (ToolResultPart(call_id, content or "", False, name),))
    return Message(Role(role), text, name or "") if role in ("system", "developer") else None


def _assistant_parts(item: dict[str, Any], text: tuple[Part, ...]) -> tuple[Part, ...] | None:
    """Parses the parts of a simple assistant message, as `_plain` does."""
    thought = ""
    for field in ("reasoning_content", "reasoning", "reasoning_text"):
        found = item.get(field)
        if not (found is None or type(found) is str):
            return None
        thought = thought or found or ""
    parts: list[Part] = [ReasoningPart(thought), *text] if thought else [*text]
    calls = item.get("tool_calls")
    if calls is None:
        return tuple(parts)
    if type(calls) is not list:
        return None
    for call in calls:
        function = call.get("function") if type(call) is dict and call.get("type", "function") == "function" else None
        if type(function) is not dict:
            return None
        call_id, name, arguments = call.get("id"), function.get("name"), function.get("arguments")
        if type(call_id) is not str or type(name) is not str or type(arguments) is not str:
            return None
        parts.append(ToolCallPart(call_id, name, arguments))
    return tuple(parts)


@dataclass(frozen=True, slots=True, eq=False)
class _Given:
    """A body's tools, None if absent; compared by identity, so that a cache lookup need not compare them."""

    tools: tuple[Tool, ...] | None


_NOTHING: Final = _Given(None)


def _terms(settings: dict[str, Any], tools: Any) -> ChatRequest:
    """Parses a request without its messages. Raises ValidationError, BadRequest.

    All calls of an agent, and of similar agents, have the same tools and usually the same settings.
    """
    given = _NOTHING if tools is None else _tools_of(orjson.dumps(tools))
    return _terms_of(orjson.dumps(settings), given)


@cache.CHAT_SETTINGS
def _terms_of(text: bytes, given: _Given) -> ChatRequest:
    return _request(fields.Settings.model_validate(orjson.loads(text)), given.tools)


@cache.CHAT_TOOLS
def _tools_of(text: bytes) -> _Given:
    return _Given(_tools_in(orjson.loads(text)))


def _tools_in(raw: Any) -> tuple[Tool, ...]:
    return tuple(_tool(tool.function) for tool in _TOOLS.validate_python(raw))


def _request(body: fields.Settings, given: tuple[Tool, ...] | None) -> ChatRequest:
    """Translates a body without its messages."""
    if body.n is not None and body.n != 1:
        raise BadRequest("n: only 1 completion per request is supported.", "n", "unsupported_value")
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs: only with logprobs true.", "top_logprobs", "invalid_value")
    notes: list[str] = []
    tools = given or ()
    if len({tool.name for tool in tools}) != len(tools):
        raise BadRequest("tools: two tools have the same name.", "tools", "invalid_value")
    if given is not None and not tools:
        notes.append("tools was empty and is treated as unset")
    choice = _choice(body, tools, notes)
    if body.stream_options is not None and not body.stream:
        notes.append("stream_options without stream was ignored")
    limits = [limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None]
    if len(set(limits)) > 1:
        notes.append("max_tokens and max_completion_tokens differ; the smaller one is used")
    extra = body.model_extra or {}
    notes += [f"{name} was ignored" for name in sorted(extra) if name not in _IGNORED]
    hosted = tuple(name for name in sorted(extra) if is_hosted_field(name) and extra[name] is not None)
    kwargs = _template_kwargs(body, notes)
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop) if body.stop else None
    sampling = Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k if body.top_k is not None and body.top_k > 0 else None,
        min_p=body.min_p,
        max_tokens=min(limits) if limits else None,
        min_tokens=body.min_tokens,
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids) if body.stop_token_ids else None,
        seed=body.seed,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        top_logprobs=body.top_logprobs or None,
        thinking=kwargs.get(ENABLE_THINKING),
        response_format=_response_format(body.response_format),
    )
    return ChatRequest(
        model=body.model,
        messages=(),
        tools=tools,
        tool_choice=choice,
        sampling=sampling,
        stream=bool(body.stream),
        include_usage=bool(body.stream and body.stream_options is not None and body.stream_options.include_usage),
        normalisations=tuple(notes),
        template_kwargs=kwargs,
        provider_tools=hosted,
        logprobs=bool(body.logprobs),
    )


def _template_kwargs(body: fields.Settings, notes: list[str]) -> Mapping[str, Any]:
    """Returns the template's arguments; of the fields that say whether to think, the most explicit one counts."""
    kwargs: Mapping[str, Any] = {}
    effort, thinking, options = body.reasoning_effort, body.thinking, body.chat_template_kwargs
    if isinstance(effort, str) and effort:
        _, kwargs = thinking_of(effort, REASONING_EFFORT, notes)
    elif effort is not None:
        notes.append("reasoning_effort was ignored")
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    switch = _SWITCH.get(kind) if isinstance(kind, str) else None
    if thinking is not None and switch is None:
        notes.append("thinking was ignored")
    elif switch is not None and thinking.get("budget_tokens") is not None:
        notes.append("thinking.budget_tokens was ignored")
    kwargs = with_thinking(kwargs, switch)
    return kwargs if options is None else with_thinking(kwargs, options.enable_thinking)


def _choice(body: fields.Settings, tools: tuple[Tool, ...], notes: list[str]) -> ToolChoice:
    if not tools:
        if body.tool_choice is not None:
            notes.append("tool_choice without tools was ignored")
        if body.parallel_tool_calls is not None:
            notes.append("parallel_tool_calls without tools was ignored")
        return ToolChoice()
    parallel = body.parallel_tool_calls
    if isinstance(body.tool_choice, fields.NamedChoice):
        name = body.tool_choice.function.name
        if name not in {tool.name for tool in tools}:
            raise BadRequest("tool_choice names a tool that is not in tools.", "tool_choice", "invalid_value")
        return ToolChoice(ToolChoiceMode.NAMED, name, parallel)
    return ToolChoice(ToolChoiceMode(body.tool_choice or "auto"), None, parallel)


def _tool(function: fields.ToolFunction) -> Tool:
    schema = json_text(function.parameters or {}, "tools.function.parameters")
    return Tool(function.name, function.description or "", schema, function.strict)


def _response_format(value: dict[str, Any] | None) -> str | None:
    if value is None or value.get("type") == "text":
        return None
    if value.get("type") not in ("json_object", "json_schema"):
        raise BadRequest("response_format.type: unknown.", "response_format.type", "invalid_value")
    return json_text(value, "response_format")


def _message(message: fields.System | fields.User | fields.Assistant | fields.Tool) -> Message:
    match message:
        case fields.Tool():
            if isinstance(message.content, str):
                return Message(Role.TOOL, (ToolResultPart(message.tool_call_id, message.content, False, message.name),))
            content = _parts(message.content)
            text = "".join(part.text for part in content if isinstance(part, TextPart))
            images = tuple(part for part in content if isinstance(part, ImagePart))
            result = ToolResultPart(message.tool_call_id, text, False, message.name, images)
            return Message(Role.TOOL, (result,))
        case fields.Assistant():
            thought = message.reasoning_content or message.reasoning or message.reasoning_text
            parts: list[Part] = [ReasoningPart(thought)] if thought else []
            if message.content:
                parts += _parts(message.content)
            for call in message.tool_calls or ():
                function = call.function
                parts.append(ToolCallPart(call.id, function.name, function.arguments))
            return Message(Role.ASSISTANT, tuple(parts), message.name or "")
        case fields.User():
            return Message(Role.USER, _parts(message.content), message.name or "")
        case fields.System():
            return Message(Role(message.role), _parts(message.content), message.name or "")


def _parts(content: fields.Content | fields.TextContent | None) -> tuple[Part, ...]:
    if content is None or content == "":
        return ()
    if isinstance(content, str):
        return (TextPart(content),)
    parts: list[Part] = []
    for part in content:
        match part:
            case fields.TextPart():
                parts.append(TextPart(part.text))
            case fields.ImagePart():
                parts.append(image_at(part.image_url.url, "messages.content.image_url.url"))
            case fields.RefusalPart():
                parts.append(TextPart(part.refusal))
    return tuple(parts)
