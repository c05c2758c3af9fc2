"""A model's own chat template, rendered in a sandbox with the helpers that Hugging Face templates use.

The rendering environment follows the documented contract of chat templates (block trimming, `raise_exception`,
`strftime_now`, a `tojson` that keeps key order and non-ASCII text, loop controls, `generation` blocks), so the text is
the one that transformers renders. Messages are passed in the OpenAI shape; arguments that are a JSON object are passed
as an object. Agents give instructions in the middle of a conversation; for a template that accepts them only at its
beginning, they become user text.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context

from penstock_codec import cache
from penstock_codec.chat import (
    ImagePart,
    Message,
    ReasoningPart,
    Role,
    TextPart,
    Tool,
    ToolCallPart,
    ToolResultPart,
)
from penstock_codec.control_text import Breaking, ControlText, gather
from penstock_codec.errors import CodecError
from penstock_codec.template_sandbox import WORK, Known, Sandbox, Work, joined

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_ALPHABET = string.ascii_letters + string.digits
_PLAIN = (Role.SYSTEM, Role.USER, Role.ASSISTANT)
_INSTRUCTING = (Role.SYSTEM, Role.DEVELOPER)
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_ANSWER = Role.ASSISTANT.value
_ANSWER_TEXTS = ("content", "reasoning_content")
_IMAGE = {"type": "image"}
_JSON = json.JSONEncoder(ensure_ascii=False)
MAX_TEMPLATE_CHARS = 1 << 20
MAX_TIME_CHARS = 256
MAX_INDENT = 32
_MOST_WORDS = 64
_LONGEST_WORD = 64


class ChatTemplate:
    """One compiled template. Immutable and thread-safe."""

    def __init__(
        self,
        text: str,
        special_tokens: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
        takes_images: bool = False,
    ) -> None:
        """Compiles `text`; `special_tokens` become variables (`bos_token`, ...); `now` feeds `strftime_now`.

        `takes_images`: conversations may have images, which the template gets as parts of a message's content.

        Raises CodecError TEMPLATE_INVALID when the text is no template.
        """
        environment = Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: _time_as(form, now())
        if len(text) > MAX_TEMPLATE_CHARS:
            raise CodecError("TEMPLATE_INVALID", f"the chat template has more than {MAX_TEMPLATE_CHARS} characters")
        try:
            tree = environment.parse(text)
            takes = meta.find_undeclared_variables(tree)
            words = _words(tree)
            self._template = environment.from_string(environment.bounded(tree))
        except Exception as error:
            reason = "it nests too deeply" if isinstance(error, RecursionError | MemoryError) else error
            raise CodecError("TEMPLATE_INVALID", f"the chat template does not compile: {reason}") from error
        self.words: Sequence[str] = words
        """Short texts that the template compares with others, or searches for in them."""
        # Common to all renderings; Jinja would build it for each.
        self._given = {**self._template.globals, "documents": None, **special_tokens}
        self.text = text
        self._takes_images = takes_images
        # Searching the text for a word is not enough: Phi-4-mini's reads `message['tools']`, which nobody passes.
        self.supports_tools = "tools" in takes
        self.renders_call_ids = "tool_call_id" in text or "tool_call.id" in text
        self._knows_developer = "developer" in text
        self._short_ids = False
        self._late_instructions = True
        self._joins_users = False
        self._late_instructions = self._takes_late_instructions()
        self._joins_users = self._refuses(Message.user("a"), Message.user("b")) and not self._refuses(Message.user("a"))
        self._short_ids = (
            "tool_calls" in text and self._refuses_ids("call_0123456789") and not self._refuses_ids("a1b2c3d4e")
        )

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        apart: Breaking | None = None,
    ) -> str:
        """Renders the conversation as the model's text; `apart` breaks control tokens spelled in its texts.

        Raises CodecError: TEMPLATE_REFUSED (the template raised, or a reserved name in `template_kwargs`),
        TEMPLATE_WITHOUT_TOOLS (tools given to a template that would drop them), TOOL_INVALID, IMAGE_UNSUPPORTED.
        """
        if tools and not self.supports_tools:
            raise CodecError("TEMPLATE_WITHOUT_TOOLS", "the model's chat template does not render tools")
        extra = dict(template_kwargs) if template_kwargs else {}
        if extra and (clash := RESERVED & extra.keys()):
            raise CodecError("TEMPLATE_REFUSED", f"template_kwargs may not set {', '.join(sorted(clash))}")
        try:
            items, texts = self._all_as_dicts(self._placed(messages))
            known: Sequence[Known] = [_tool_dict(tool) for tool in tools]
            if apart is not None:
                items = _all_apart(items, texts, apart)
                known = apart.known(known) if known else known
                extra = apart.broken(extra) if extra else extra
            variables = {
                **self._given,
                "messages": items,
                "tools": known or None,
                "add_generation_prompt": add_generation_prompt,
                **extra,
                WORK: Work(),
            }
            template = self._template
            return joined(
                template.root_render_func(Context(template.environment, variables, template.name, template.blocks))
            )
        except CodecError:
            raise
        except Exception as error:  # a template is a program by the model's author: anything it raises is its refusal
            reason = str(error) if apart is None else apart.hidden(str(error))
            raise CodecError("TEMPLATE_REFUSED", f"the chat template refused the conversation: {reason}") from error

    def images(self, messages: Sequence[Message]) -> list[ImagePart]:
        """Returns a conversation's images in the order in which they are rendered."""
        if not any(message.images for message in messages):
            return []
        return [image for message in self._placed(messages) for image in message.images]

    def spells(self, control_text: ControlText, messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
        """Whether texts of a conversation spell control tokens that `render` would keep apart.

        Raises CodecError: TOOL_INVALID, IMAGE_UNSUPPORTED.
        """
        breaking = Breaking(control_text)
        _all_apart(*self._all_as_dicts(messages), breaking)
        breaking.known([_tool_dict(tool) for tool in tools])
        return breaking.broke

    def _refuses_ids(self, call_id: str) -> bool:
        call = ToolCallPart(call_id, "f", "{}")
        return self._refuses(Message.user("q"), Message.assistant("", call), Message.tool(call_id, "r"))

    def _refuses(self, *messages: Message) -> bool:
        try:
            self.render(messages)
        except CodecError:
            return True
        return False

    def _id(self, call_id: str) -> str:
        """Returns a call id that the template accepts: some (Mistral) refuse all but nine letters and digits."""
        if not self._short_ids or _SHORT_ID.fullmatch(call_id):
            return call_id
        number = int.from_bytes(hashlib.blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=8).digest())
        return "".join(_ALPHABET[number // 62**place % 62] for place in range(9))

    def _takes_late_instructions(self) -> bool:
        """Whether a system message may follow a user's. Some templates refuse it, drop it or move it to the front."""
        question, probe = "early question", "late instruction"
        try:
            text = self.render([Message.user(question), Message.system(probe)])
        except CodecError:
            return False
        return 0 <= text.find(question) < text.find(probe)

    def _placed(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Moves late instructions, and a user's second message in a row, to the end of the previous user message."""
        if self._late_instructions and not self._joins_users:
            return messages
        placed: list[Message] = []
        opened = False  # the conversation itself has begun
        for message in messages:
            late = opened and message.role in _INSTRUCTING and not self._late_instructions
            opened = opened or message.role not in _INSTRUCTING
            again = self._joins_users and message.role is Role.USER and not message.tool_results
            if (late or again) and placed and placed[-1].role is Role.USER and not placed[-1].tool_results:
                placed[-1] = replace(placed[-1], parts=(*placed[-1].parts, TextPart("\n\n"), *message.parts))
            else:
                placed.append(Message(Role.USER, message.parts) if late else message)
        return placed

    def _all_as_dicts(self, messages: Sequence[Message]) -> tuple[list[dict[str, Any]], list[str]]:
        items: list[dict[str, Any]] = []
        texts: list[str] = []
        for message in messages:
            items += self._as_dicts(message, texts)
        return items, texts

    def _as_dicts(self, message: Message, texts: list[str]) -> list[dict[str, Any]]:
        """Returns a message as templates see it; appends texts that may spell control tokens to `texts`."""
        parts = message.parts
        if len(parts) == 1 and type(part := parts[0]) is TextPart and not message.name and message.role in _PLAIN:
            texts.append(part.text)
            return [{"role": message.role.value, "content": part.text}]  # as below, for the most common messages
        visible: list[str] = []
        has_images = False
        thought: list[str] = []
        calls: list[dict[str, Any]] = []
        # One message per result, as templates expect; text beside the results (Anthropic's shape) follows as a user
        # message.
        results: list[dict[str, Any]] = []
        for part in parts:
            if type(part) is TextPart:
                visible.append(part.text)
            elif type(part) is ToolCallPart:
                calls.append(self._call_dict(part, texts))
            elif type(part) is ReasoningPart:
                thought.append(part.text)
            elif type(part) is ToolResultPart and (self._takes_images or not part.images):
                results.append(self._result_dict(part, texts))
            elif type(part) is ImagePart and self._takes_images:
                has_images = True
            else:
                raise CodecError("IMAGE_UNSUPPORTED", "this model's tokenizer does not support images")
        text = "".join(visible)
        texts.append(text)
        content: Any = text
        if has_images:
            content = [
                {"type": "text", "text": part.text} if isinstance(part, TextPart) else _IMAGE
                for part in parts
                if isinstance(part, TextPart | ImagePart)
            ]
        if results:
            if content:
                results.append({"role": "user", "content": content})
            return results
        role = message.role
        item: dict[str, Any] = {
            "role": "system" if role is Role.DEVELOPER and not self._knows_developer else role.value,
            "content": content,
        }
        if message.name:
            item["name"] = message.name
            texts.append(message.name)
        if role is not Role.ASSISTANT:
            return [item]
        if reasoning := "".join(thought):
            item["reasoning_content"] = reasoning
            texts.append(reasoning)
        if calls:
            item["tool_calls"] = calls
        return [item]

    def _call_dict(self, call: ToolCallPart, texts: list[str]) -> dict[str, Any]:
        call_id, arguments = self._id(call.id), _arguments(call.arguments_json)
        texts += (call_id, call.name)
        if "\\" in call.arguments_json:
            gather(arguments, texts)
        else:
            texts.append(call.arguments_json)  # without escapes, it contains its texts verbatim
        return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}

    def _result_dict(self, result: ToolResultPart, texts: list[str]) -> dict[str, Any]:
        call_id = self._id(result.call_id)
        texts += (result.text, call_id)
        content: Any = result.text
        if result.images:
            content = [{"type": "text", "text": result.text}] if result.text else []
            content += [_IMAGE] * len(result.images)
        item = {"role": "tool", "content": content, "tool_call_id": call_id}
        if result.name is not None:
            item["name"] = result.name
            texts.append(result.name)
        return item


def _all_apart(items: list[dict[str, Any]], texts: list[str], apart: Breaking) -> list[dict[str, Any]]:
    """Returns messages as templates see them, broken where `texts` spell control tokens."""
    return items if apart.is_clear(texts) else [_apart(item, apart) for item in items]


def _apart(item: dict[str, Any], apart: Breaking) -> dict[str, Any]:
    is_answer = item["role"] == _ANSWER
    return {key: apart.broken(value, answer=is_answer and key in _ANSWER_TEXTS) for key, value in item.items()}


def _arguments(text: str) -> Any:
    """Returns the arguments as templates want them: an object if the text is one or empty, else the text."""
    if not text.strip():
        return {}  # clients write `{}` so
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _words(tree: nodes.Template) -> list[str]:
    """Returns the texts in comparisons, calls and filters; roles and names of fields last, should there be too many."""
    asked = tree.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test))
    found = (const.value for node in asked for const in node.find_all(nodes.Const))
    texts = dict.fromkeys(text for text in found if isinstance(text, str) and 0 < len(text.strip()) <= _LONGEST_WORD)
    return sorted(texts, key=str.isidentifier)[:_MOST_WORDS]


@cache.TOOLS
def _tool_dict(tool: Tool) -> Known:
    try:
        parameters = json.loads(tool.parameters_json_schema)
    except (ValueError, RecursionError) as error:
        raise CodecError("TOOL_INVALID", f"the parameters of the tool {tool.name!r} are not JSON: {error}") from error
    if not isinstance(parameters, dict):
        raise CodecError("TOOL_INVALID", f"the parameters of the tool {tool.name!r} are not a JSON object")
    function = Known({"name": tool.name, "description": tool.description, "parameters": Known(parameters)})
    return Known({"type": "function", "function": function})


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(indent, int) and indent > MAX_INDENT:
        raise ValueError(f"the indent of JSON must be at most {MAX_INDENT}")
    # Jinja's own tojson escapes for HTML; models were trained on text without those escapes.
    if not (ensure_ascii or sort_keys or indent is not None or separators is not None):
        if type(value) is not Known:
            return _JSON.encode(value)
        if value.written is None:
            value.written = _JSON.encode(value)
        return value.written
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _time_as(form: str, now: datetime) -> str:
    if len(form) > MAX_TIME_CHARS:
        raise ValueError(f"a time format must have at most {MAX_TIME_CHARS} characters")
    return now.strftime(form)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text; it changes nothing in the text."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an instance variable)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)
