"""Anthropic Messages: the request's shape, checked by pydantic, and its translation into a `ChatRequest`.

Fields without effect here are accepted, and recorded where a user could miss them (R33). What cannot be honoured and
would change the agent's answer is refused by its path: an answer begun by the client (a prefill), conversations stored
at the provider, documents that are not text.

Adjacent messages of one role are one turn, as the API defines. A turn's results are sorted into the order of their
calls: agents send them as they finish, and most templates show no ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError

from penstock_codec.chat import (
    ImagePart,
    Message,
    Part,
    ReasoningPart,
    Role,
    Sampling,
    TextPart,
    ToolCallPart,
    ToolChoice,
    ToolChoiceMode,
    ToolResultPart,
)
from penstock_interception.domain.requests import ChatRequest
from penstock_interception.ingress.dialects.base import BadRequest
from penstock_interception.ingress.dialects.images import image_at, inline_image
from penstock_interception.ingress.dialects.messages.blocks import (
    AnyMessage,
    AssistantBlock,
    AssistantMessage,
    DocumentBlock,
    HostedBlock,
    ImageBlock,
    OutputConfig,
    OutputFormat,
    PlainDocument,
    RedactedThinkingBlock,
    SearchResultBlock,
    Shown,
    Strict,
    SystemBlock,
    SystemMessage,
    TextBlock,
    Thinking,
    ThinkingBlock,
    ToolAddition,
    ToolChoiceParam,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    UrlImage,
    UserMessage,
)
from penstock_interception.ingress.dialects.messages.tools import Toolbox, ToolDefinition, read_tools
from penstock_interception.ingress.dialects.reading import json_object, json_text, refusal

MAX_MESSAGES = 20_000
INT32 = 2**31 - 1
DISPLAY = "thinking_display"
_IGNORED = frozenset(
    {
        "metadata",
        "service_tier",
        "inference_geo",
        "cache_control",
        "diagnostics",
        "user_profile_id",
        "workspace_id",
        "speed",
    }
)
_SIGNATURE = "penstock."
_MODES = {
    "auto": ToolChoiceMode.AUTO,
    "any": ToolChoiceMode.REQUIRED,
    "tool": ToolChoiceMode.NAMED,
    "none": ToolChoiceMode.NONE,
}


class MessagesBody(Strict):
    """The fields that have an effect here."""

    model_config = ConfigDict(strict=True, extra="allow", hide_input_in_errors=True)

    model: str
    messages: Annotated[list[AnyMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1, le=INT32)] | None = None
    system: str | list[TextBlock] | None = None
    stream: bool | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoiceParam | None = None
    temperature: Annotated[float, Field(ge=0, le=5)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=INT32)] | None = None
    stop_sequences: Annotated[list[str], Field(max_length=64)] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    mcp_servers: list[Any] | None = None
    container: Any = None
    thread: None = None
    compaction: None = None


def parse_messages(body: bytes, *, counting: bool = False) -> ChatRequest:
    """Parses a body; `counting`: one of count_tokens, which requests no answer. Raises only BadRequest."""
    value = json_object(body)
    try:
        parsed = MessagesBody.model_validate(value)
    except ValidationError as error:
        raise refusal(error, value) from None
    if not counting and parsed.max_tokens is None:
        raise BadRequest("max_tokens: Field required.", "max_tokens", "invalid_value")
    if not counting and parsed.messages[-1].role == "assistant":
        path = f"messages[{len(parsed.messages) - 1}]"
        raise BadRequest(
            f"{path}: an answer cannot be prefilled: end with the user's message.",
            path,
            "prefill_unsupported",
        )
    return _request(parsed, body)


def signature_of(reasoning: str) -> str:
    """Returns a signature for reasoning that was sampled here: clients do not send back reasoning without one."""
    return _SIGNATURE + hashlib.sha256(reasoning.encode("utf-8", "replace")).hexdigest()


def _request(body: MessagesBody, sent: bytes) -> ChatRequest:
    notes: list[str] = []
    toolbox = read_tools(body.tools or ())
    notes += [f"the hosted tool {kind} was left out: it would run at the provider" for kind in toolbox.hosted]
    if body.mcp_servers:
        notes.append("mcp_servers was left out: the provider would have called them")
    if body.container is not None:
        notes.append("container was left out: hosted code execution is not supported")
    servers = ("mcp_servers",) if body.mcp_servers else ()
    container = ("container",) if body.container is not None else ()
    messages = _messages(body, toolbox, notes)
    choice = _choice(body.tool_choice, toolbox, notes)
    thinking = _thinking(body.thinking, notes)
    if body.output_config is not None and body.output_config.effort is not None:
        notes.append("output_config.effort was ignored")
    notes += [f"{name} was ignored" for name in sorted(body.model_extra or {}) if name not in _IGNORED]
    wanted = (body.output_config.format if body.output_config is not None else None) or body.output_format
    sampling = Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k or None,
        max_tokens=body.max_tokens,
        stop=tuple(body.stop_sequences) if body.stop_sequences else None,
        thinking=thinking,
        thinking_budget_tokens=body.thinking.budget_tokens if body.thinking is not None and thinking else None,
        response_format=_response_format(wanted),
    )
    display = body.thinking.display if body.thinking is not None else None
    return ChatRequest(
        model=body.model,
        messages=messages,
        tools=toolbox.loaded,
        tool_choice=choice,
        sampling=sampling,
        stream=bool(body.stream),
        normalisations=tuple(dict.fromkeys(notes)),
        template_kwargs={} if thinking is None else {"enable_thinking": thinking},
        provider_tools=(*toolbox.hosted, *servers, *container),
        echo={DISPLAY: display} if display is not None else {},
        body=sent,
        deferred=tuple(toolbox.deferred.values()),
    )


def _thinking(asked: Thinking | None, notes: list[str]) -> bool | None:
    """Returns whether to think; None leaves it to the model's template."""
    if asked is None or asked.type == "adaptive":
        return None
    if asked.type == "between_tools":
        notes.append("thinking between_tools was treated as adaptive")
        return None
    if asked.type == "enabled" and asked.budget_tokens is None:
        raise BadRequest("thinking.budget_tokens: Field required.", "thinking.budget_tokens", "invalid_value")
    return asked.type == "enabled"


def _choice(asked: ToolChoiceParam | None, toolbox: Toolbox, notes: list[str]) -> ToolChoice:
    if asked is None:
        return ToolChoice()
    if not toolbox.loaded and not toolbox.deferred:
        notes.append("tool_choice without tools was ignored")
        return ToolChoice()
    parallel = None if asked.disable_parallel_tool_use is None else not asked.disable_parallel_tool_use
    if asked.type != "tool":
        return ToolChoice(_MODES[asked.type], None, parallel)
    if asked.name is None or toolbox.named(asked.name) is None:
        raise BadRequest("tool_choice.name: names a tool that is not in tools.", "tool_choice.name", "invalid_value")
    return ToolChoice(ToolChoiceMode.NAMED, asked.name, parallel)


def _response_format(wanted: OutputFormat | None) -> str | None:
    if wanted is None:
        return None
    shape = {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted.schema_}}
    return json_text(shape, "output_config.format.schema")


def _messages(body: MessagesBody, toolbox: Toolbox, notes: list[str]) -> tuple[Message, ...]:
    found: list[Message] = []
    if body.system:
        blocks = [TextBlock(type="text", text=body.system)] if isinstance(body.system, str) else body.system
        found.append(Message(Role.SYSTEM, tuple(TextPart(block.text) for block in blocks if block.text)))
    calls: Mapping[str, int] = {}
    indexed = enumerate(body.messages)
    for role, group in groupby(indexed, key=lambda item: item[1].role):
        if role == "user":
            turn = [(f"messages[{i}]", m) for i, m in group if isinstance(m, UserMessage)]
            found += _user(turn, calls, toolbox, notes)
        elif role == "assistant":
            reply = _assistant([m for _, m in group if isinstance(m, AssistantMessage)], notes)
            calls = {call.id: position for position, call in enumerate(reply.tool_calls)}
            found.append(reply)
        else:
            found += [_system(m, f"messages[{i}]", toolbox, notes) for i, m in group if isinstance(m, SystemMessage)]
    return tuple(found)


def _system(message: SystemMessage, path: str, toolbox: Toolbox, notes: list[str]) -> Message:
    if message.clear_at not in (None, "never"):
        notes.append("clear_at was ignored: a model's conversation is never cleared")
    if isinstance(message.content, str):
        return Message(Role.SYSTEM, _text(message.content))
    parts = [_system_part(block, f"{path}.content[{index}]", toolbox) for index, block in enumerate(message.content)]
    return Message(Role.SYSTEM, tuple(parts))


def _system_part(block: SystemBlock, path: str, toolbox: Toolbox) -> TextPart:
    if isinstance(block, TextBlock):
        return TextPart(block.text)
    if isinstance(block, ToolAddition):
        return TextPart(f"This tool can be called now:\n{toolbox.definition(block.tool.name, path)}")
    return TextPart(f"The tool {block.tool.name} cannot be called any more.\n")


def _assistant(messages: Iterable[AssistantMessage], notes: list[str]) -> Message:
    parts: list[Part] = []
    for message in messages:
        if isinstance(message.content, str):
            parts += _text(message.content)
            continue
        for block in message.content:
            if isinstance(block, HostedBlock):
                notes.append(f"a block {block.type} of the conversation was left out: hosted tools are not supported")
            else:
                parts += _assistant_parts(block)
    return Message(Role.ASSISTANT, tuple(parts))


def _assistant_parts(block: AssistantBlock) -> tuple[Part, ...]:
    match block:
        case TextBlock():
            return _text(block.text)
        case ThinkingBlock():
            if block.signature.startswith(_SIGNATURE):  # sampled here, so it has no signature of its own
                return (ReasoningPart(block.thinking),) if block.thinking else ()
            return (ReasoningPart(block.thinking, block.signature.encode()),)
        case RedactedThinkingBlock():
            return (ReasoningPart("", block.data.encode()),)
        case ToolUseBlock():
            return (ToolCallPart(block.id, block.name, json_text(block.input, "messages.content.input")),)
        case _:
            return ()


def _user(
    turn: Sequence[tuple[str, UserMessage]], calls: Mapping[str, int], toolbox: Toolbox, notes: list[str]
) -> list[Message]:
    """Returns the turn's results, one message each, followed by the user's other content."""
    results: list[ToolResultPart] = []
    collected: list[Part] = []
    for path, message in turn:
        if isinstance(message.content, str):
            collected += _text(message.content)
            continue
        for index, block in enumerate(message.content):
            if isinstance(block, ToolResultBlock):
                results.append(_result(block, f"{path}.content[{index}]", toolbox, notes))
            elif isinstance(block, HostedBlock):
                notes.append(f"a block {block.type} of the conversation was left out: hosted tools are not supported")
            else:
                collected += _shown(block)
    ordered = sorted(results, key=lambda result: calls.get(result.call_id, len(calls)))
    if ordered != results:
        notes.append("the results of a turn were put into the order of their calls")
    found = [Message(Role.TOOL, (result,)) for result in ordered]
    if collected or not found:
        found.append(Message(Role.USER, tuple(collected)))
    return found


def _result(block: ToolResultBlock, path: str, toolbox: Toolbox, notes: list[str]) -> ToolResultPart:
    texts: list[str] = []
    images: list[ImagePart] = []
    items = [TextBlock(type="text", text=block.content)] if isinstance(block.content, str) else block.content or ()
    for index, item in enumerate(items):
        if isinstance(item, ToolReferenceBlock):
            texts.append(toolbox.definition(item.tool_name, f"{path}.content[{index}]"))
        elif isinstance(item, HostedBlock):
            notes.append(f"a block {item.type} of a result was left out: hosted tools are not supported")
        else:
            for part in _shown(item):
                if isinstance(part, ImagePart):
                    images.append(part)
                else:
                    texts.append(part.text)
    return ToolResultPart(block.tool_use_id, "".join(texts), bool(block.is_error), None, tuple(images))


def _shown(block: Shown) -> tuple[TextPart | ImagePart, ...]:
    match block:
        case TextBlock():
            return _text(block.text)
        case ImageBlock():
            return (_image(block),)
        case SearchResultBlock():
            text = "".join(item.text for item in block.content)
            return (TextPart(f"{block.title}\n{block.source}\n{text}\n"),)
        case DocumentBlock():
            head = _text("".join(f"{line}\n" for line in (block.title, block.context) if line))
            if isinstance(block.source, PlainDocument):
                return (*head, TextPart(block.source.data))
            if isinstance(block.source.content, str):
                return (*head, *_text(block.source.content))
            return (*head, *(part for item in block.source.content for part in _shown(item)))


def _image(block: ImageBlock) -> ImagePart:
    source = block.source
    if isinstance(source, UrlImage):
        return image_at(source.url, "messages.content.source.url")
    return inline_image(source.data, source.media_type, "messages.content.source.data")


def _text(text: str) -> tuple[TextPart, ...]:
    return (TextPart(text),) if text else ()
