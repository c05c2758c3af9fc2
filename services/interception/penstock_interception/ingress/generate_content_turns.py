"""Google generateContent: a history of contents as messages.

- Consecutive contents of the model are one turn: clients that stream keep each chunk as a content of its own.
- Results of tools become messages of their own, in their order; what else a user's content has stays one message.
- A call or a result without an id gets one: a call by its place in the history, a result that of the first call of its
  name that waits for one.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from typing import Any

from penstock_codec.chat import (
    ImagePart,
    Message,
    Part,
    ReasoningPart,
    Role,
    TextPart,
    ToolCallPart,
    ToolResultPart,
)
from penstock_interception.ingress import generate_content_body as body
from penstock_interception.ingress.dialect import BadRequest
from penstock_interception.ingress.reading import json_text

_HOSTED = ("executable_code", "code_execution_result", "tool_call", "tool_response")
_DATA = ("text", "inline_data", "file_data", "function_call", "function_response", *_HOSTED)
# What else a part may have without meaning anything to a model that reads text.
_WITHOUT_MEANING = frozenset({"videoMetadata", "mediaResolution", "partMetadata", "video_metadata", "media_resolution"})


def messages_of(contents: Iterable[body.Content], notes: list[str]) -> tuple[Message, ...]:
    """The conversation. Raises BadRequest; `notes` gets a sentence for what was left out."""
    history = _History(notes)
    for index, content in enumerate(contents):
        history.add(content, f"contents[{index}]")
    return tuple(history.messages)


def system_of(content: body.Content | None) -> tuple[Message, ...]:
    """The system message, if there is one. Raises BadRequest for anything but text."""
    if content is None or not content.parts:
        return ()
    for index, part in enumerate(content.parts):
        where = f"systemInstruction.parts[{index}]"
        if _kind(part, where) not in ("text", None):
            raise BadRequest(f"{where}: a system instruction is text.", where, "invalid_value")
    text = tuple(TextPart(part.text) for part in content.parts if part.text)
    return (Message(Role.SYSTEM, text),) if text else ()


class _History:
    """Messages so far, and the calls that wait for their results."""

    def __init__(self, notes: list[str]) -> None:
        self.messages: list[Message] = []
        self._notes = notes
        self._calls = 0
        self._waiting: list[ToolCallPart] = []

    def add(self, content: body.Content, path: str) -> None:
        if content.role == "system":
            raise BadRequest(
                f"{path}.role: user or model; a system prompt is systemInstruction.", f"{path}.role", "invalid_value"
            )
        if content.role == "model":
            self._model(content.parts or [], path)
        else:
            self._user(content.parts or [], path)

    def _model(self, parts: list[body.Part], path: str) -> None:
        last = self.messages[-1] if self.messages else None
        goes_on = last is not None and last.role is Role.ASSISTANT
        said: list[Part] = list(last.parts) if last is not None and goes_on else []
        if not goes_on:
            self._waiting = []
        for index, part in enumerate(parts):
            where = f"{path}.parts[{index}]"
            match _kind(part, where):
                case "text":
                    _append(said, part)
                case "function_call" if part.function_call is not None:
                    said.append(self._call(part.function_call, where))
                case "inline_data" | "file_data":
                    said.append(_image(part.inline_data, part.file_data, where))
                case "function_response":
                    raise BadRequest(f"{where}: results come from the user.", where, "invalid_value")
                case None:
                    pass
                case kind:
                    self._hosted(kind)
        message = Message(Role.ASSISTANT, tuple(said))
        if goes_on:
            self.messages[-1] = message
        else:
            self.messages.append(message)

    def _user(self, parts: list[body.Part], path: str) -> None:
        said: list[Part] = []
        results = False
        for index, part in enumerate(parts):
            where = f"{path}.parts[{index}]"
            match _kind(part, where):
                case "text":
                    if part.text:
                        said.append(TextPart(part.text))
                case "function_response" if part.function_response is not None:
                    if said:
                        self.messages.append(Message(Role.USER, tuple(said)))
                        said = []
                    results = True
                    self.messages.append(Message(Role.TOOL, (self._result(part.function_response, where),)))
                case "inline_data" | "file_data":
                    said.append(_image(part.inline_data, part.file_data, where))
                case "function_call":
                    raise BadRequest(f"{where}: calls come from the model.", where, "invalid_value")
                case None:
                    pass
                case kind:
                    self._hosted(kind)
        if said or not results:
            self.messages.append(Message(Role.USER, tuple(said)))

    def _call(self, call: body.FunctionCall, path: str) -> ToolCallPart:
        self._calls += 1
        arguments = json_text(call.args if call.args is not None else {}, f"{path}.functionCall.args")
        made = ToolCallPart(call.id or f"call_{self._calls}", call.name, arguments)
        self._waiting.append(made)
        return made

    def _result(self, result: body.FunctionResponse, path: str) -> ToolResultPart:
        waiting = next(
            (call for call in self._waiting if (call.id == result.id if result.id else call.name == result.name)), None
        )
        if waiting is not None:
            self._waiting.remove(waiting)
        call_id = result.id or (waiting.id if waiting is not None else result.name)
        text, is_error = _output(result.response, f"{path}.functionResponse.response")
        images = tuple(
            _image(part.inline_data, part.file_data, f"{path}.functionResponse.parts[{index}]")
            for index, part in enumerate(result.parts or ())
        )
        return ToolResultPart(call_id, text, is_error, result.name, images)

    def _hosted(self, kind: str) -> None:
        note = f"parts of the provider's own tools ({kind}) were left out of the history"
        if note not in self._notes:
            self._notes.append(note)


def _kind(part: body.Part, path: str) -> str | None:
    """The field that holds the part's data; None when there is none, as in a part that is only a signature."""
    kinds = [name for name in _DATA if getattr(part, name) is not None]
    if len(kinds) > 1:
        raise BadRequest(f"{path}: one of {', '.join(sorted(kinds))}.", path, "invalid_value")
    unknown = set(part.model_extra or {}) - _WITHOUT_MEANING
    if not kinds and unknown:
        raise BadRequest(f"{path}: a part of a kind that is not known here.", path, "unsupported_value")
    return kinds[0] if kinds else None


def _append(said: list[Part], part: body.Part) -> None:
    """Adds text to what the model said; pieces of one text, as a stream left them, become one again."""
    text = part.text or ""
    last = said[-1] if said else None
    if part.thought:
        mark = (part.thought_signature or "").encode()
        if isinstance(last, ReasoningPart):
            said[-1] = ReasoningPart(last.text + text, mark or last.signature)
        elif text:
            said.append(ReasoningPart(text, mark))
    elif isinstance(last, TextPart):
        said[-1] = TextPart(last.text + text)
    elif text:
        said.append(TextPart(text))


def _output(response: dict[str, Any] | None, path: str) -> tuple[str, bool]:
    """What a tool said, and whether it failed.

    Source: the API's reference of FunctionResponse: "output" and "error" are the keys with a meaning; without them the
    whole object is the output.
    """
    if response is None:
        return "", False
    keys = set(response)
    is_error = response.get("error") is not None and keys <= {"output", "error"}
    value = next(iter(response.values())) if keys in ({"output"}, {"error"}) else response
    return (value if isinstance(value, str) else json_text(value, path)), is_error


def _image(inline: body.Blob | None, file: body.FileData | None, path: str) -> ImagePart:
    if inline is not None:
        if not inline.mime_type.lower().startswith("image/"):
            raise BadRequest(
                f"{path}.inlineData.mimeType: only images are taken.",
                f"{path}.inlineData.mimeType",
                "unsupported_value",
            )
        data = inline.data.rstrip("=").translate(_STANDARD)
        data += "=" * (-len(data) % 4)
        try:
            base64.b64decode(data, validate=True)
        except binascii.Error:
            raise BadRequest(
                f"{path}.inlineData.data: no base64.", f"{path}.inlineData.data", "invalid_value"
            ) from None
        return ImagePart(f"data:{inline.mime_type};base64,{data}", inline.mime_type)
    if file is None:
        raise BadRequest(f"{path}: inlineData or fileData is needed.", path, "invalid_value")
    if file.mime_type is not None and not file.mime_type.lower().startswith("image/"):
        raise BadRequest(
            f"{path}.fileData.mimeType: only images are taken.", f"{path}.fileData.mimeType", "unsupported_value"
        )
    return ImagePart(file.file_uri, file.mime_type or "")


_STANDARD = str.maketrans("-_", "+/")
