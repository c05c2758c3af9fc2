"""OpenAI Responses, exactly as the OpenAI SDKs and Codex parse it (R30).

A stream's events are numbered without a gap: `response.created` and `response.in_progress` before the answer is known,
then each output item with its deltas, then `response.completed` or `response.incomplete`. Keep-alives repeat
`response.in_progress`: Codex counts only events as activity, and every client knows this one. A failure after the
stream has begun is an `error` event, which the SDKs raise, and `response.failed`, which Codex reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from penstock_interception.domain.calls import Dialect
from penstock_interception.domain.requests import ChatRequest
from penstock_interception.domain.state import Call
from penstock_interception.ingress.dialects import openai_common
from penstock_interception.ingress.dialects.base import AnswerStream, Ask, DialectCodec, Problem, Route
from penstock_interception.ingress.dialects.responses.answer import (
    failed,
    failure_code,
    output_of,
    response_of,
    status_of,
)
from penstock_interception.ingress.dialects.responses.body import essence, parse_responses

_PATH: Final = "/v1/responses"


class Responses(DialectCodec):
    """The dialect. Stateless."""

    dialect = Dialect.RESPONSES

    def base_path(self, rollout_id: str) -> str:
        return f"/rollout/{rollout_id}/v1"

    def owns(self, path: str) -> bool:
        return path == _PATH or path.startswith(f"{_PATH}/")

    def route(self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> Route | None:
        if path == _PATH:
            return Route(Ask.COMPLETION)
        if path == f"{_PATH}/input_tokens":
            return Route(Ask.COUNT)
        return openai_common.models_route(method, path)

    def parse(self, body: bytes, route: Route) -> ChatRequest:
        return parse_responses(body)

    def essence(self, body: bytes) -> bytes | None:
        return essence(body)

    def status(self, problem: Problem) -> int:
        # Codex retries every refusal except a 400, five times.
        return 400 if problem.status == 403 else problem.status

    def problem(self, problem: Problem) -> bytes:
        return orjson.dumps({"error": _error(problem)})

    def answer(self, call: Call, request: ChatRequest) -> bytes:
        return orjson.dumps(response_of(call, request, status_of(call), output_of(call, request)))

    def stream(self, call: Call, request: ChatRequest) -> AnswerStream:
        return ResponsesStream(call, request)

    def count(self, tokens: int) -> bytes:
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": tokens})

    def models(self, names: Sequence[str]) -> bytes:
        return openai_common.models(names)

    def model(self, name: str) -> bytes:
        return openai_common.model(name)


class ResponsesStream(AnswerStream):
    """One stream of numbered events."""

    def __init__(self, call: Call, request: ChatRequest) -> None:
        self._call = call
        self._request = request
        self._next = 0
        self._waiting = response_of(call, request, "in_progress", []) | {"usage": None}

    def open(self) -> bytes:
        return self._event("response.created", response=self._waiting) + self.keep_alive()

    def keep_alive(self) -> bytes:
        return self._event("response.in_progress", response=self._waiting)

    def answer(self) -> bytes:
        output = output_of(self._call, self._request)
        events = [event for index, item in enumerate(output) for event in self._item(index, item)]
        status = status_of(self._call)
        events.append(
            self._event(f"response.{status}", response=response_of(self._call, self._request, status, output))
        )
        return b"".join(events)

    def problem(self, problem: Problem) -> bytes:
        error = {**_error(problem), "code": failure_code(problem)}
        fields = {"code": error["code"], "message": error["message"], "param": error["param"]}
        return self._event("error", **fields, error=error) + self._event(
            "response.failed", response=failed(self._waiting, problem)
        )

    def _item(self, index: int, item: dict[str, Any]) -> list[bytes]:
        """Returns the events of one output item; each of its texts is one delta."""
        kind = item["type"]
        place = {"item_id": item["id"], "output_index": index}
        begun, events = dict(item), []
        if "status" in item:
            begun["status"] = "in_progress"
        match kind:
            case "message":
                begun["content"] = []
                events = self._parts("response.content_part", "response.output_text", item["content"], place)
            case "reasoning":
                begun |= {"summary": [], "content": [], "encrypted_content": None}
                summary = "response.reasoning_summary"
                events = self._parts(f"{summary}_part", f"{summary}_text", item["summary"], place, "summary_index")
                events += self._parts("response.content_part", "response.reasoning_text", item["content"], place)
            case "function_call" | "custom_tool_call":
                member = "arguments" if kind == "function_call" else "input"
                begun[member] = ""
                events = self._text(f"response.{kind}_{member}", member, item[member], place)
                if kind == "function_call":
                    events[-1][1]["name"] = item["name"]
        return [
            self._event("response.output_item.added", output_index=index, item=begun),
            *(self._event(event, **fields) for event, fields in events),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    def _parts(
        self,
        part_name: str,
        text_name: str,
        parts: list[dict[str, Any]],
        place: dict[str, Any],
        at: str = "content_index",
    ) -> list[tuple[str, dict[str, Any]]]:
        """Returns the events of an item's parts, without their numbers."""
        events: list[tuple[str, dict[str, Any]]] = []
        for index, part in enumerate(parts):
            here = {**place, at: index}
            events.append((f"{part_name}.added", {**here, "part": {**part, "text": ""}}))
            more: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
            events += self._text(text_name, "text", part["text"], {**here, **more})
            events.append((f"{part_name}.done", {**here, "part": part}))
        return events

    def _text(self, name: str, member: str, text: str, here: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        delta = [(f"{name}.delta", {**here, "delta": text})] if text else []
        return [*delta, (f"{name}.done", {**here, member: text})]

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._next, **fields})
        self._next += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def _error(problem: Problem) -> dict[str, Any]:
    """Returns the `error` object; `messages` in other dialects is `input` here."""
    error = openai_common.error(problem)
    return error if error["param"] != "messages" else {**error, "param": "input"}
