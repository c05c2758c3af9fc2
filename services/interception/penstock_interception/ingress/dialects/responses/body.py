"""OpenAI Responses: the request's shape, checked by pydantic, and its translation into a `ChatRequest`.

Fields without effect here are accepted and recorded as ignored (R33); what cannot be honoured and would change the
agent's answer is refused by name. That includes everything that the provider would have to store: nothing is stored
here, each request brings the whole conversation.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import ConfigDict, Field, ValidationError

from penstock_codec.chat import Message, Role, Sampling, TextPart, Tool, ToolChoice, ToolChoiceMode
from penstock_interception.domain.requests import ChatRequest
from penstock_interception.ingress.dialects.base import BadRequest
from penstock_interception.ingress.dialects.reading import json_object, json_text, refusal, thinking_of
from penstock_interception.ingress.dialects.responses.items import AnyItem, ToolsItem, messages_of
from penstock_interception.ingress.dialects.responses.shapes import SHAPES, Strict
from penstock_interception.ingress.dialects.responses.tools import MAX_TOOLS, AnyTool, Toolbox, flat_name

MAX_ITEMS: Final = 40_000
_INT32: Final = 2**31 - 1
_INT64: Final = 2**63 - 1
_IGNORED: Final = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "client_metadata",
        "stream_options",
    }
)
# Fields for which the provider would have to store something, or to act on its own.
_NOT_HERE: Final = {
    "previous_response_id": "responses are not stored: send the conversation as input",
    "conversation": "conversations are not stored: send the conversation as input",
    "prompt": "prompt templates are not stored: send the conversation as input",
    "background": "background responses are not supported: a response is answered on its connection",
}


class _Reasoning(Strict):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class _Format(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    # An alias, since pydantic's models have a method of that name.
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class _Text(Strict):
    format: _Format | None = None
    verbosity: str | None = None


class _Choice(Strict):
    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]] | None = None


class ResponsesBody(Strict):
    """The fields that have an effect here; sampling fields that OpenAI lacks are vLLM's."""

    model_config = ConfigDict(strict=True, extra="allow", hide_input_in_errors=True)

    input: Annotated[list[AnyItem], Field(min_length=1, max_length=MAX_ITEMS)]
    model: str = ""
    instructions: str | None = None
    stream: bool | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | _Choice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: _Reasoning | None = None
    text: _Text | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    temperature: Annotated[float, Field(ge=0, le=5)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=_INT32)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_INT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=_INT64)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None


def parse_responses(body: bytes) -> ChatRequest:
    """Parses a body. Raises only BadRequest."""
    value = json_object(body)
    for name, why in _NOT_HERE.items():
        if value.pop(name, None):
            raise BadRequest(f"{name}: {why}.", name, "unsupported_parameter")
    if isinstance(value.get("input"), str):
        value["input"] = [{"type": "message", "role": "user", "content": value["input"]}]
    try:
        parsed = ResponsesBody.model_validate(value)
    except ValidationError as error:
        raise refusal(error, value) from None
    return _request(parsed, body)


def essence(body: bytes) -> bytes | None:
    """Returns a body with sorted keys and without `client_metadata`: Codex changes both when it repeats a request."""
    try:
        value = orjson.loads(body)
        if not isinstance(value, dict):
            return None
        value.pop("client_metadata", None)
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except (ValueError, TypeError):  # not JSON, or nested deeper than orjson writes
        return None


def _request(body: ResponsesBody, sent: bytes) -> ChatRequest:
    notes: list[str] = []
    more = [tool for item in body.input if isinstance(item, ToolsItem) for tool in item.tools]
    box = Toolbox.of([*(body.tools or ()), *more])
    if len(box.known) != len(box.tools):
        raise BadRequest("tools: two tools have the same name.", "tools", "invalid_value")
    notes += box.notes
    choice, tools = _choice(body, box, notes)
    messages = messages_of(body.input, notes)
    if body.instructions:
        messages.insert(0, Message.system(body.instructions))
    messages = _with_one_preamble(messages, notes)
    if not messages:
        raise BadRequest("input: it has no content for the model.", "input", "invalid_value")
    if body.truncation == "auto":
        notes.append("truncation auto was ignored: a conversation that is too long is refused")
    include = frozenset(body.include or ())
    if body.top_logprobs or "message.output_text.logprobs" in include:
        notes.append("logprobs are captured, not returned to the agent")
    if body.text is not None and body.text.verbosity is not None:
        notes.append("text.verbosity was ignored")
    notes += [f"{name} was ignored" for name in sorted(body.model_extra or {}) if name not in _IGNORED]
    thinking, kwargs = _thinking(body.reasoning, notes)
    echo: dict[str, Any] = {}
    kinds = {name: known for name, known in box.known.items() if known.kind != "function" or known.namespace}
    if kinds:
        echo["kinds"] = kinds
    if body.reasoning is not None and (body.reasoning.summary or body.reasoning.generate_summary):
        echo["summary"] = True
    if "reasoning.encrypted_content" in include:
        echo["encrypted"] = True
    return ChatRequest(
        model=body.model,
        messages=tuple(messages),
        tools=tools,
        tool_choice=choice,
        sampling=_sampling(body, thinking),
        stream=bool(body.stream),
        normalisations=tuple(notes),
        template_kwargs=kwargs,
        provider_tools=tuple(box.hosted),
        echo=echo,
        body=sent,
    )


def _with_one_preamble(messages: list[Message], notes: list[str]) -> list[Message]:
    """Joins the instructions at the start into one message: agents send several, and many templates accept one."""
    roles = (Role.SYSTEM, Role.DEVELOPER)
    count = next((i for i, message in enumerate(messages) if message.role not in roles), len(messages))
    first = messages[:count]
    if count < 2 or any(not isinstance(part, TextPart) for message in first for part in message.parts):
        return messages
    notes.append(f"{count} messages of instructions at the start were made one")
    role = Role.SYSTEM if any(message.role is Role.SYSTEM for message in first) else Role.DEVELOPER
    return [
        Message(role, (TextPart("\n\n".join(message.text for message in first if message.text)),)),
        *messages[count:],
    ]


def _sampling(body: ResponsesBody, thinking: bool | None) -> Sampling:
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop) if body.stop else None
    return Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k if body.top_k is not None and body.top_k > 0 else None,
        min_p=body.min_p,
        max_tokens=body.max_output_tokens,
        stop=stop,
        seed=body.seed,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        top_logprobs=body.top_logprobs or None,
        thinking=thinking,
        response_format=_response_format(body.text),
    )


def _thinking(reasoning: _Reasoning | None, notes: list[str]) -> tuple[bool | None, dict[str, Any]]:
    """Returns whether to think, and the template's arguments; a template uses those it knows."""
    effort = reasoning.effort if reasoning is not None else None
    return (None, {}) if effort is None else thinking_of(effort, "reasoning.effort", notes)


def _response_format(text: _Text | None) -> str | None:
    """Returns the format as Chat Completions writes it."""
    form = text.format if text is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return '{"type":"json_object"}'
    if form.name is None or form.schema_ is None:
        missing = "text.format.name" if form.name is None else "text.format.schema"
        raise BadRequest(f"{missing}: required for json_schema.", missing, "invalid_value")
    schema: dict[str, Any] = {"name": form.name, "schema": form.schema_}
    if form.description is not None:
        schema["description"] = form.description
    if form.strict is not None:
        schema["strict"] = form.strict
    return json_text({"type": "json_schema", "json_schema": schema}, "text.format.schema")


def _choice(body: ResponsesBody, box: Toolbox, notes: list[str]) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """Returns the choice, and the tools that it allows."""
    choice, parallel, tools = body.tool_choice, body.parallel_tool_calls, tuple(box.tools)
    if isinstance(choice, _Choice):
        if choice.type == "allowed_tools":
            allowed = {
                _chosen(item.get("type"), item.get("name"), item.get("namespace")) for item in choice.tools or ()
            }
            tools = tuple(tool for tool in tools if tool.name in allowed)
            if not tools:
                raise BadRequest("tool_choice.tools: none of them is in tools.", "tool_choice.tools", "invalid_value")
            notes.append("the tools that tool_choice does not allow were left out")
            return ToolChoice(ToolChoiceMode(choice.mode or "auto"), None, parallel), tools
        name = _chosen(choice.type, choice.name, choice.namespace)
        if name not in box.known:
            raise BadRequest("tool_choice names a tool that is not supported.", "tool_choice", "invalid_value")
        return ToolChoice(ToolChoiceMode.NAMED, name, parallel), tools
    if not tools:
        if choice is not None and choice != "none":
            notes.append("tool_choice without tools was ignored")
        if parallel is not None:
            notes.append("parallel_tool_calls without tools was ignored")
        return ToolChoice(), ()
    return ToolChoice(ToolChoiceMode(choice or "auto"), None, parallel), tools


def _chosen(kind: Any, name: Any, namespace: Any) -> str:
    """Returns the model's name of the chosen tool; "" for an invalid choice."""
    if kind in ("function", "custom") and isinstance(name, str):
        return flat_name(name, namespace if isinstance(namespace, str) else None)
    return SHAPES[kind].tool.name if isinstance(kind, str) and kind in SHAPES else ""
