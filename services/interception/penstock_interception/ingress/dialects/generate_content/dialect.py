"""Google generateContent, exactly as google-genai (Python and JavaScript) and Gemini CLI parse it (R30).

Model and action are in the path. A stream is server-sent events with `alt=sse`, else one JSON array; each event or item
is a whole response with the next parts: thoughts apart, since clients look only at the first part, then text, then all
calls; the last one has the finish reason and the usage. Keep-alives are empty lines: both SDKs parse every other line
as JSON, comments too. A failure after the stream has begun is the bare error object on its line, without `data:`: so
Google sends it, and the JavaScript SDK recognises no other form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from penstock_codec.chat import FinishReason, Message, Part, ReasoningPart, TextPart, ToolCallPart, Usage
from penstock_interception.domain.calls import Dialect
from penstock_interception.domain.requests import ChatRequest
from penstock_interception.domain.state import Call
from penstock_interception.ingress.dialects.base import EVENT_STREAM, Ask, PlainStreams, Problem, Route
from penstock_interception.ingress.dialects.generate_content.request import ARRAY, THOUGHTS, parse

_PATH: Final = re.compile(r"/v1(?:alpha|beta)?/models/(?P<model>.+):(?P<action>[A-Za-z]+)")
_MODELS: Final = re.compile(r"/v1(?:alpha|beta)?/models(?:/(?P<model>[^:]+))?")
_ACTIONS: Final = {
    "generateContent": Ask.COMPLETION,
    "streamGenerateContent": Ask.COMPLETION,
    "countTokens": Ask.COUNT,
}
_JSON: Final = "application/json"
_CLIENT: Final = "x-goog-api-client"
_STREAM: Final = "streamGenerateContent"
_FINISH: Final = {FinishReason.LENGTH: "MAX_TOKENS", FinishReason.CONTENT_FILTER: "SAFETY"}
_STATUSES: Final = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    413: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_TYPE: Final = "type.googleapis.com/google.rpc."
# An event's data is one line. Sampled arguments may have line breaks, which in JSON are only space between tokens.
_ONE_LINE: Final = bytes.maketrans(b"\r\n", b"  ")


class GenerateContent(PlainStreams):
    """The dialect. Stateless."""

    dialect = Dialect.GENERATE_CONTENT

    def base_path(self, rollout_id: str) -> str:
        return f"/rollout/{rollout_id}"

    def owns(self, path: str) -> bool:
        return path.startswith(("/v1beta/", "/v1alpha/")) or _PATH.fullmatch(path) is not None

    def route(self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> Route | None:
        found = _PATH.fullmatch(path)
        if found is not None:
            ask = _ACTIONS.get(found["action"])
            if ask is None:
                return None
            stream = found["action"] == _STREAM
            return Route(ask, found["model"], stream, array=stream and query.get("alt") != "sse")
        found = _MODELS.fullmatch(path)
        if found is None or method != "GET" or (path.startswith("/v1/") and _CLIENT not in headers):
            return None  # /v1/models belongs to other dialects too
        return Route(Ask.MODEL, found["model"]) if found["model"] else Route(Ask.MODELS)

    def parse(self, body: bytes, route: Route) -> ChatRequest:
        return parse(body, route)

    def problem(self, problem: Problem) -> bytes:
        return orjson.dumps(_error(problem))

    def answer(self, call: Call, request: ChatRequest) -> bytes:
        parts = [item for group in _groups(call.message, request) for item in group]
        return orjson.dumps({**_candidate(parts, _finish(call)), "usageMetadata": _usage(call), **_head(call, request)})

    def stream_type(self, request: ChatRequest) -> str:
        return _JSON if request.echo.get(ARRAY) else EVENT_STREAM

    def stream_open(self, call: Call, request: ChatRequest) -> bytes:
        return b"[" if request.echo.get(ARRAY) else b""

    def stream_keep_alive(self) -> bytes:
        return b"\n"

    def stream_answer(self, call: Call, request: ChatRequest) -> bytes:
        head = _head(call, request)
        groups = _groups(call.message, request)
        chunks: list[dict[str, Any]] = [{**_candidate(parts, None), **head} for parts in groups[:-1]]
        chunks.append({**_candidate(groups[-1], _finish(call)), "usageMetadata": _usage(call), **head})
        written = [orjson.dumps(chunk) for chunk in chunks]
        if request.echo.get(ARRAY):
            return b",\n".join(written) + b"]"
        return b"".join(b"data: " + chunk.translate(_ONE_LINE) + b"\n\n" for chunk in written)

    def stream_problem(self, problem: Problem, request: ChatRequest) -> bytes:
        return self.problem(problem) + (b"]" if request.echo.get(ARRAY) else b"\n")

    def count(self, tokens: int) -> bytes:
        return orjson.dumps(
            {"totalTokens": tokens, "promptTokensDetails": [{"modality": "TEXT", "tokenCount": tokens}]}
        )

    def models(self, names: Sequence[str]) -> bytes:
        return orjson.dumps({"models": [*map(_model, names)]})

    def model(self, name: str) -> bytes:
        return orjson.dumps(_model(name))


def _groups(message: Message | None, request: ChatRequest) -> list[list[dict[str, Any]]]:
    """Returns an answer's parts, one group per event and at least one group; thoughts only if requested."""
    groups: list[list[dict[str, Any]]] = []
    kind: type[Part] | None = None
    for part in message.parts if message is not None else ():
        written = _part(part, request)
        if written is None:
            continue
        if type(part) is kind:
            groups[-1].append(written)
        else:
            groups.append([written])
            kind = type(part)
    return groups or [[{"text": ""}]]


def _part(part: Part, request: ChatRequest) -> dict[str, Any] | None:
    match part:
        case ReasoningPart() if request.echo.get(THOUGHTS):
            mark = {"thoughtSignature": part.signature.decode(errors="replace")} if part.signature else {}
            return {"text": part.text, "thought": True, **mark}
        case TextPart():
            return {"text": part.text}
        case ToolCallPart():
            return {"functionCall": {"id": part.id, "name": part.name, "args": _arguments(part.arguments_json)}}
    return None


def _arguments(text: str) -> Any:
    """Returns arguments as sampled, numbers included; wraps a non-object, which only a trainer can write."""
    try:
        whole = isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        whole = False
    return orjson.Fragment(text) if whole else {"arguments": text}


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _candidate(parts: list[dict[str, Any]], finish: str | None) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"parts": parts, "role": "model"}, "index": 0}
    if finish is not None:
        candidate["finishReason"] = finish
    return {"candidates": [candidate]}


def _head(call: Call, request: ChatRequest) -> dict[str, Any]:
    model = request.model or call.rollout.spec.model_name or call.rollout.facts.model
    return {"modelVersion": model, "responseId": call.id}


def _finish(call: Call) -> str:
    reason = call.completion.finish_reason if call.completion is not None else None
    return _FINISH.get(reason, "STOP") if reason is not None else "STOP"


def _usage(call: Call) -> dict[str, Any]:
    """Returns the usage; in this dialect thoughts are not counted as candidates."""
    usage = (call.completion.usage if call.completion is not None else None) or Usage(0, 0)
    thoughts = min(usage.reasoning_tokens or 0, usage.completion_tokens)
    counts: dict[str, Any] = {
        "promptTokenCount": usage.prompt_tokens,
        "candidatesTokenCount": usage.completion_tokens - thoughts,
        "totalTokenCount": usage.total_tokens,
    }
    if usage.reasoning_tokens is not None:
        counts["thoughtsTokenCount"] = thoughts
    if usage.cached_tokens is not None:
        counts["cachedContentTokenCount"] = usage.cached_tokens
    return counts


def _error(problem: Problem) -> dict[str, Any]:
    details: list[dict[str, Any]] = [
        {"@type": f"{_TYPE}ErrorInfo", "reason": problem.code.upper(), "domain": "penstock"}
    ]
    if problem.param is not None:
        violation = {"field": problem.param, "description": problem.message}
        details.append({"@type": f"{_TYPE}BadRequest", "fieldViolations": [violation]})
    if problem.retry_after_s is not None:
        delay = f"{max(0.001, problem.retry_after_s):.3f}".rstrip("0").rstrip(".")
        details.append({"@type": f"{_TYPE}RetryInfo", "retryDelay": f"{delay}s"})
    status = _STATUSES.get(problem.status, "INTERNAL")
    message = problem.beginning("The input token count exceeds the maximum number of tokens allowed.")
    return {"error": {"code": problem.status, "message": message, "status": status, "details": details}}


def _model(name: str) -> dict[str, Any]:
    return {
        "name": f"models/{name}",
        "baseModelId": name,
        "version": "1",
        "displayName": name,
        "supportedGenerationMethods": ["generateContent", "streamGenerateContent", "countTokens"],
    }
