"""Google generateContent: translates a body into a `ChatRequest`.

Fields without effect here are accepted and recorded; a field that cannot be honoured and would change the agent's
answer is refused by its path. The provider's own tools (search, code execution, ...) would bypass the gate: they are
removed and recorded.
"""

from __future__ import annotations

from typing import Any, Final

from pydantic import ValidationError

from penstock_codec.chat import Sampling, Tool, ToolChoice, ToolChoiceMode
from penstock_interception.domain.requests import ChatRequest
from penstock_interception.ingress.dialects.base import Ask, BadRequest, Route
from penstock_interception.ingress.dialects.generate_content import body
from penstock_interception.ingress.dialects.generate_content.schema import json_schema
from penstock_interception.ingress.dialects.generate_content.turns import messages_of, system_of
from penstock_interception.ingress.dialects.reading import json_object, json_text, refusal

ARRAY: Final = "array"
THOUGHTS: Final = "thoughts"

_IGNORED: Final = frozenset({"model", "safetySettings", "safety_settings", "labels", "serviceTier", "store"})
_IGNORED_CONFIG: Final = frozenset({"mediaResolution", "media_resolution"})
_CHOICES: Final = {"ANY": ToolChoiceMode.REQUIRED, "NONE": ToolChoiceMode.NONE}
_COUNTED: Final = ("generateContentRequest", "generate_content_request")
_CONFIG: Final = "generationConfig"
_ALLOWED: Final = "toolConfig.functionCallingConfig.allowedFunctionNames"
MAX_NAME: Final = 64


def parse(data: bytes, route: Route) -> ChatRequest:
    """Parses a body. Raises only BadRequest."""
    value = json_object(data)
    if route.ask is Ask.COUNT:
        inner = next((value[name] for name in _COUNTED if name in value), value)
        if not isinstance(inner, dict):
            raise BadRequest(f"{_COUNTED[0]}: must be an object.", _COUNTED[0], "invalid_value")
        value = inner
    try:
        parsed = body.GenerateContentBody.model_validate(value)
    except ValidationError as error:
        raise refusal(error, value) from None
    return _request(parsed, route, data)


def _request(parsed: body.GenerateContentBody, route: Route, data: bytes) -> ChatRequest:
    if parsed.cached_content:
        raise BadRequest(
            "cachedContent: content that the provider stores is not supported.", "cachedContent", "unsupported_value"
        )
    notes: list[str] = []
    config = parsed.generation_config or body.GenerationConfig()
    thinking = _thinking(config, notes)
    groups = parsed.tools or []
    hosted = sorted({name[:MAX_NAME] for group in groups for name in group.model_extra or {}})
    notes += [f"tools: {name} is a tool of the provider and was removed" for name in hosted]
    choice, tools = _choice(parsed.tool_config, _tools(groups), notes)
    messages = (*system_of(parsed.system_instruction), *messages_of(parsed.contents, notes))
    notes += _ignored("", parsed.model_extra, _IGNORED)
    notes += _ignored(f"{_CONFIG}.", config.model_extra, _IGNORED_CONFIG)
    stop = tuple(text for text in config.stop_sequences or () if text)
    budget = config.thinking_config.thinking_budget if config.thinking_config is not None else None
    return ChatRequest(
        model=route.model,
        messages=messages,
        tools=tools,
        tool_choice=choice,
        sampling=Sampling(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k or None,
            max_tokens=config.max_output_tokens,
            stop=stop or None,
            seed=config.seed,
            presence_penalty=config.presence_penalty,
            frequency_penalty=config.frequency_penalty,
            top_logprobs=config.logprobs or None,
            thinking=thinking,
            thinking_budget_tokens=budget if budget is not None and budget > 0 else None,
            response_format=_response_format(config, notes),
        ),
        stream=bool(route.stream),
        normalisations=tuple(notes),
        template_kwargs={} if thinking is None else {"enable_thinking": thinking},
        provider_tools=tuple(hosted),
        echo={
            ARRAY: route.array,
            THOUGHTS: bool(config.thinking_config is not None and config.thinking_config.include_thoughts),
        },
        body=data,
    )


def _thinking(config: body.GenerationConfig, notes: list[str]) -> bool | None:
    """Returns whether to think; None leaves it to the template."""
    thinking = config.thinking_config
    if thinking is None:
        return None
    if thinking.thinking_level in ("LOW", "MEDIUM", "HIGH"):
        notes.append(f"thinkingLevel {thinking.thinking_level} turns thinking on, without a limit")
        return True
    if thinking.thinking_level == "MINIMAL":
        notes.append("thinkingLevel MINIMAL turns thinking off")
        return False
    if thinking.thinking_budget is None or thinking.thinking_budget < 0:
        return None
    return thinking.thinking_budget > 0


def _response_format(config: body.GenerationConfig, notes: list[str]) -> str | None:
    """Returns the format as the OpenAI API writes it. Raises BadRequest for anything but text or JSON."""
    if any(modality not in ("TEXT", "MODALITY_UNSPECIFIED") for modality in config.response_modalities or ()):
        path = f"{_CONFIG}.responseModalities"
        raise BadRequest(f"{path}: only TEXT is supported.", path, "unsupported_value")
    if config.candidate_count not in (None, 0, 1):
        path = f"{_CONFIG}.candidateCount"
        raise BadRequest(f"{path}: only 1 candidate per request is supported.", path, "unsupported_value")
    if config.response_logprobs or config.logprobs:
        notes.append("logprobs are captured, not returned to the agent")
    mime = (config.response_mime_type or "").partition(";")[0].strip().lower()
    if mime not in ("", "text/plain", "application/json"):
        path = f"{_CONFIG}.responseMimeType"
        raise BadRequest(f"{path}: text/plain or application/json.", path, "unsupported_value")
    schema = config.response_json_schema
    if schema is None and config.response_schema is not None:
        schema = json_schema(config.response_schema, f"{_CONFIG}.responseSchema")
    if schema is not None and mime != "text/plain":
        form: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "response", "schema": schema}}
        return json_text(form, f"{_CONFIG}.responseSchema")
    if schema is not None:
        notes.append("a response schema with responseMimeType text/plain was ignored")
    return '{"type":"json_object"}' if mime == "application/json" else None


def _tools(groups: list[body.Tools]) -> tuple[Tool, ...]:
    tools: list[Tool] = []
    for index, group in enumerate(groups):
        for place, function in enumerate(group.function_declarations or ()):
            tools.append(_tool(function, f"tools[{index}].functionDeclarations[{place}]"))
    if len({tool.name for tool in tools}) != len(tools):
        raise BadRequest("tools: two functions have the same name.", "tools", "invalid_value")
    return tuple(tools)


def _tool(function: body.FunctionDeclaration, path: str) -> Tool:
    schema: dict[str, Any] = {}
    if function.parameters_json_schema is not None:
        schema = function.parameters_json_schema
    elif function.parameters is not None:
        schema = json_schema(function.parameters, f"{path}.parameters")
    return Tool(function.name, function.description or "", json_text(schema, f"{path}.parameters"))


def _choice(
    config: body.ToolConfig | None, tools: tuple[Tool, ...], notes: list[str]
) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """Returns the tool choice, and the tools that it allows."""
    calling = config.function_calling_config if config is not None else None
    if calling is None:
        return ToolChoice(), tools
    if not tools:
        notes.append("toolConfig without tools was ignored")
        return ToolChoice(), tools
    mode = calling.mode or "AUTO"
    allowed = set(calling.allowed_function_names or ())
    unknown = allowed - {tool.name for tool in tools}
    if unknown or (allowed and mode not in ("ANY", "VALIDATED")):
        why = "names a function that is not in tools" if unknown else "needs mode ANY or VALIDATED"
        raise BadRequest(f"{_ALLOWED}: {why}.", _ALLOWED, "invalid_value")
    if mode == "VALIDATED":
        notes.append("toolConfig mode VALIDATED is treated as AUTO")
    if len(allowed) == 1 and mode == "ANY":
        return ToolChoice(ToolChoiceMode.NAMED, next(iter(allowed))), tools
    if allowed and len(allowed) < len(tools):
        notes.append(f"toolConfig allows {len(allowed)} of {len(tools)} functions; the model gets only those")
        tools = tuple(tool for tool in tools if tool.name in allowed)
    return ToolChoice(_CHOICES.get(mode, ToolChoiceMode.AUTO)), tools


def _ignored(prefix: str, extra: dict[str, Any] | None, known: frozenset[str]) -> list[str]:
    return [f"{prefix}{name[:MAX_NAME]} was ignored" for name in sorted(extra or {}) if name not in known]
