"""Google generateContent: converts a history of contents into messages.

- Consecutive contents of the model are one turn: clients that stream store each chunk as a content of its own.
- Tool results become messages of their own, in their order; the rest of a user's content stays one message.
- A call or result without an id gets one: a call from its position in the history, a result from the first pending
  call with its name.
"""

from __future__ import annotations

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
from penstock_interception.ingress.dialects.base import BadRequest
from penstock_interception.ingress.dialects.generate_content import body
from penstock_interception.ingress.dialects.images import inline_image
from penstock_interception.ingress.dialects.reading import json_text

_HOSTED = ("executable_code", "code_execution_result", "tool_call", "tool_response")
_DATA = ("text", "inline_data", "file_data", "function_call", "function_response", *_HOSTED)
# Other fields of a part that mean nothing to a text model.
_WITHOUT_MEANING = frozenset({"videoMetadata", "mediaResolution", "partMetadata", "video_metadata", "media_resolution"})


def messages_of(contents: Iterable[body.Content], notes: list[str]) -> tuple[Message, ...]:
    """Returns the conversation. Raises BadRequest; `notes` gets a sentence for each omission."""
    history = _History(notes)
    for index, content in enumerate(contents):
        history.add(content, f"contents[{index}]")
    return tuple(history.messages)


def system_of(content: body.Content | None) -> tuple[Message, ...]:
    """Returns the system message, if any. Raises BadRequest for anything but text."""
    if content is None or not content.parts:
        return ()
    for index, part in enumerate(content.parts):
        where = f"systemInstruction.parts[{index}]"
        if _kind(part, where) not in ("text", None):
            raise BadRequest(f"{where}: a system instruction must be text.", where, "invalid_value")
    text = tuple(TextPart(part.text) for part in content.parts if part.text)
    return (Message(Role.SYSTEM, text),) if text else ()


class _History:
    """The messages so far, and the calls that wait for their results."""

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
        collected: list[Part] = list(last.parts) if last is not None and goes_on else []
        if not goes_on:
            self._waiting = []
        for index, part in enumerate(parts):
            where = f"{path}.parts[{index}]"
            match _kind(part, where):
                case "text":
                    _append(collected, part)
                case "function_call" if part.function_call is not None:
                    collected.append(self._call(part.function_call, where))
                case "inline_data" | "file_data":
                    collected.append(_image(part.inline_data, part.file_data, where))
                case "function_response":
                    raise BadRequest(f"{where}: results must have the role user.", where, "invalid_value")
                case None:
                    pass
                case kind:
                    self._hosted(kind)
        message = Message(Role.ASSISTANT, tuple(collected))
        if goes_on:
            self.messages[-1] = message
        else:
            self.messages.append(message)

    def _user(self, parts: list[body.Part], path: str) -> None:
        collected: list[Part] = []
        results = False
        for index, part in enumerate(parts):
            where = f"{path}.parts[{index}]"
            match _kind(part, where):
                case "text":
                    if part.text:
                        collected.append(TextPart(part.text))
                case "function_response" if part.function_response is not None:
                    if collected:
                        self.messages.append(Message(Role.USER, tuple(collected)))
                        collected = []
                    results = True
                    self.messages.append(Message(Role.TOOL, (self._result(part.function_response, where),)))
                case "inline_data" | "file_data":
                    collected.append(_image(part.inline_data, part.file_data, where))
                case "function_call":
                    raise BadRequest(f"{where}: calls must have the role model.", where, "invalid_value")
                case None:
                    pass
                case kind:
                    self._hosted(kind)
        if collected or not results:
            self.messages.append(Message(Role.USER, tuple(collected)))

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
    """Returns the field with the part's data; None if there is none, as in a part with only a signature."""
    kinds = [name for name in _DATA if getattr(part, name) is not None]
    if len(kinds) > 1:
        raise BadRequest(f"{path}: one of {', '.join(sorted(kinds))}.", path, "invalid_value")
    unknown = set(part.model_extra or {}) - _WITHOUT_MEANING
    if not kinds and unknown:
        raise BadRequest(f"{path}: the kind of this part is unknown.", path, "unsupported_value")
    return kinds[0] if kinds else None


def _append(collected: list[Part], part: body.Part) -> None:
    """Appends text to the model's parts; joins pieces of one text that a stream split."""
    text = part.text or ""
    last = collected[-1] if collected else None
    if part.thought:
        mark = (part.thought_signature or "").encode()
        if isinstance(last, ReasoningPart):
            collected[-1] = ReasoningPart(last.text + text, mark or last.signature)
        elif text:
            collected.append(ReasoningPart(text, mark))
    elif isinstance(last, TextPart):
        collected[-1] = TextPart(last.text + text)
    elif text:
        collected.append(TextPart(text))


def _output(response: dict[str, Any] | None, path: str) -> tuple[str, bool]:
    """Returns a tool's output, and whether it failed.

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
                f"{path}.inlineData.mimeType: only images are supported.",
                f"{path}.inlineData.mimeType",
                "unsupported_value",
            )
        return inline_image(inline.data, inline.mime_type, f"{path}.inlineData.data")
    if file is None:
        raise BadRequest(f"{path}: must have inlineData or fileData.", path, "invalid_value")
    if file.mime_type is not None and not file.mime_type.lower().startswith("image/"):
        raise BadRequest(
            f"{path}.fileData.mimeType: only images are supported.", f"{path}.fileData.mimeType", "unsupported_value"
        )
    return ImagePart(file.file_uri, file.mime_type or "")
