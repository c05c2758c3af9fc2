"""Filters black box requests: only model paths, no provider tools and few headers reach the endpoint.

The conversation is not read. The names of tools and of the model are, because an operator's policy applies in every
mode. A body from which nothing is removed is forwarded byte for byte; an ambiguous one (a repeated key) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import orjson
from multidict import CIMultiDict, CIMultiDictProxy

from penstock_interception.domain.requests import HOSTED_FIELDS, plain_name
from penstock_interception.ingress.dialects.base import BadRequest
from penstock_interception.ingress.dialects.reading import json_object, refuse_repeated_keys

# Paths that query a model. The endpoint's key may open more, such as files or an account: agents must not reach that.
_NAME: Final = r"[A-Za-z0-9_@-][A-Za-z0-9_.:@-]*"
_FIELD_PATHS: Final = re.compile(
    r"/v1/(?P<kind>chat/completions|completions|responses|messages|messages/count_tokens|embeddings)"
)
_MODEL_PATHS: Final = re.compile(
    rf"/v1(beta)?/models/(?P<model>{_NAME}(/{_NAME})?)"
    r":(generateContent|streamGenerateContent|countTokens|embedContent)"
)
_LISTINGS: Final = re.compile(rf"/v1(beta)?/models(/{_NAME})*")

# Tool types per dialect that the agent runs, or that reach nothing but the request itself.
_CHAT_TOOLS: Final = re.compile(r"function|custom")
_RESPONSES_TOOLS: Final = re.compile(
    r"function|custom|namespace|local_shell|shell|apply_patch|tool_search|computer|computer_use_preview"
)
_MESSAGES_TOOLS: Final = re.compile(r"custom|(bash|text_editor|memory|computer|tool_search_tool_(regex|bm25))_[0-9]{8}")
_RESPONSES_FIELDS: Final = frozenset({"prompt"})  # stored at the provider, with its own tools
_MESSAGES_FIELDS: Final = frozenset({"mcpservers", "container"})

_HEADERS: Final = frozenset(
    {
        "accept",
        "accept-encoding",
        "accept-language",
        "anthropic-beta",
        "anthropic-dangerous-direct-browser-access",
        "anthropic-version",
        "content-type",
        "conversation_id",
        "http-referer",
        "idempotency-key",
        "openai-beta",
        "originator",
        "session_id",
        "user-agent",
        "version",
        "x-app",
        "x-client-request-id",
        "x-goog-api-client",
        "x-request-id",
        "x-should-retry",
        "x-title",
    }
)
_HEADER_PREFIXES: Final = ("x-stainless-", "x-codex-", "x-claude-code-")
_KEPT_BACK: Final = frozenset(
    {
        "alt-svc",
        "anthropic-organization-id",
        "connection",
        "content-length",
        "keep-alive",
        "location",
        "openai-organization",
        "openai-project",
        "proxy-authenticate",
        "set-cookie",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "www-authenticate",
    }
)
_PARAMETERS: Final = frozenset(
    {"after_id", "alt", "api-version", "before_id", "beta", "limit", "pageSize", "pageToken"}
)

Object: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Onward:
    """A filtered request. `hosted` names the provider's tools that were removed from `body`."""

    path: str
    body: bytes
    hosted: tuple[str, ...] = ()
    model: str = ""


def is_offered(method: str, path: str) -> bool:
    """Returns whether a request's method and path query a model."""
    if method == "GET":
        return _LISTINGS.fullmatch(path) is not None
    return method == "POST" and (_FIELD_PATHS.fullmatch(path) or _MODEL_PATHS.fullmatch(path)) is not None


def read(path: str, body: bytes, model: str) -> Onward:
    """Filters the body of a POST to an offered path; a non-empty `model` replaces the requested one.

    Raises:
        BadRequest: the body is no JSON object, has a repeated key, or malformed tools.
    """
    value = json_object(body)
    refuse_repeated_keys(body, value)
    google = _MODEL_PATHS.fullmatch(path)
    if google is not None:
        left, hosted = _leave_out(value, frozenset(), _google_tools)
        asked = model or google["model"]
        path = path[: google.start("model")] + asked + path[google.end("model") :]
        same = not hosted
    else:
        left, hosted = _of_fields(path, value)
        asked = _model(left)
        same = not hosted and (not model or asked == model)
        if model:
            asked = left["model"] = model
    return Onward(path, body if same else orjson.dumps(left), tuple(hosted), asked)


def onward_headers(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Returns the headers to forward: none that selects an account, a method or a path, and no hop-by-hop headers."""
    named = {name.strip().lower() for name in headers.get("connection", "").split(",")}
    onward: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        known = name.lower()
        if (known in _HEADERS or known.startswith(_HEADER_PREFIXES)) and known not in named:
            onward.add(name, value)
    return onward


def returned_headers(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Returns the answer's headers for the agent: no hop-by-hop headers, and none that identifies the account."""
    named = {name.strip().lower() for name in headers.get("connection", "").split(",")}
    returned: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        if name.lower() not in _KEPT_BACK and name.lower() not in named:
            returned.add(name, value)
    return returned


def onward_query(raw: str) -> str:
    """Returns the parameters of a raw query that select the answer's format; drops keys and method overrides."""
    return "&".join(item for item in raw.split("&") if item.partition("=")[0] in _PARAMETERS)


def _of_fields(path: str, value: Object) -> tuple[Object, list[str]]:
    match path.removeprefix("/v1/"):
        case "chat/completions" | "completions":
            return _leave_out(value, HOSTED_FIELDS, lambda tools: _typed(tools, _CHAT_TOOLS, "function"))
        case "responses":
            return _leave_out(value, _RESPONSES_FIELDS, lambda tools: _typed(tools, _RESPONSES_TOOLS, ""))
        case "messages" | "messages/count_tokens":
            return _leave_out(value, _MESSAGES_FIELDS, lambda tools: _typed(tools, _MESSAGES_TOOLS, "custom"))
    return dict(value), []


def _leave_out(
    value: Object, fields: frozenset[str], read_tools: Callable[[list[Any]], tuple[list[Any], list[str]]]
) -> tuple[Object, list[str]]:
    """Removes these fields and the provider's tools from a body; returns the rest and the removed names."""
    left: Object = {}
    hosted: list[str] = []
    for name, inner in value.items():
        known = plain_name(name)
        if known in fields and inner not in (None, False):
            hosted.append(name)
        elif known == "tools" and inner is not None:
            tools, found = read_tools(inner if isinstance(inner, list) else [inner])
            hosted += found
            if tools or not found:
                left[name] = tools if found else inner
        else:
            left[name] = inner
    if hosted and not any(plain_name(name) == "tools" for name in left):
        left = {name: inner for name, inner in left.items() if plain_name(name) not in ("toolchoice", "toolconfig")}
    return left, hosted


def _typed(tools: list[Any], run_by_agents: re.Pattern[str], default: str) -> tuple[list[Any], list[str]]:
    """Filters typed tools, in the Responses dialect also within namespaces."""
    left: list[Any] = []
    hosted: list[str] = []
    for index, tool in enumerate(tools):
        kind = _object(tool, f"tools[{index}]").get("type") or default
        environment = tool.get("environment")
        if not isinstance(kind, str) or not run_by_agents.fullmatch(kind):
            hosted.append(kind if isinstance(kind, str) else "type")
        elif kind == "shell" and environment and _object(environment, "environment").get("type") != "local":
            hosted.append(kind)
        elif kind == "namespace" and isinstance(tool.get("tools"), list):
            members, found = _typed(tool["tools"], run_by_agents, default)
            hosted += found
            left.append({**tool, "tools": members} if found else tool)
        else:
            left.append(tool)
    return left, hosted


def _google_tools(groups: list[Any]) -> tuple[list[Any], list[str]]:
    left: list[Any] = []
    hosted: list[str] = []
    for index, group in enumerate(groups):
        items = _object(group, f"tools[{index}]").items()
        kept = {name: inner for name, inner in items if plain_name(name) == "functiondeclarations"}
        hosted += [name for name in group if name not in kept]
        if kept:
            left.append(kept)
    return left, hosted


def _object(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"{path}: an object.", path, "invalid_value")
    return value


def _model(value: Object) -> str:
    """Returns the model that a body names, or "". Refuses fallback lists (`models`) and other spellings of `model`."""
    for name in [name for name in value if plain_name(name) in ("models", "model") and name != "model"]:
        raise BadRequest(f"{name[:64]}: set `model` to one model instead.", name[:64], "unsupported_value")
    asked = value.get("model", "")
    if not isinstance(asked, str):
        raise BadRequest("model: a string.", "model", "invalid_value")
    return asked
