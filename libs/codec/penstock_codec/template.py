"""A model's own chat template, rendered in a sandbox with the helpers that Hugging Face templates use.

The rendering environment follows the documented contract of chat templates (block trimming, `raise_exception`,
`strftime_now`, a `tojson` that keeps key order and non-ASCII text, loop controls, `generation` blocks), so the text
is the one that transformers renders. Messages go in the OpenAI shape; arguments that are a JSON object go in as an
object. Agents give instructions in the midst of a conversation; to a template that takes them at its beginning only,
they are the user's words.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from penstock_codec.chat import ImagePart, Message, Role, TextPart, Tool, ToolCallPart, ToolResultPart
from penstock_codec.errors import CodecError

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_ALPHABET = string.ascii_letters + string.digits
_PLAIN = (Role.SYSTEM, Role.USER, Role.ASSISTANT)
_INSTRUCTING = (Role.SYSTEM, Role.DEVELOPER)
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
# What dicts have as attributes, which come before their items.
_OF_DICTS = frozenset(dir(dict))
# What a template asks of its loop; none of it is callable or leads anywhere.
_OF_LOOPS = frozenset({"index", "index0", "revindex", "revindex0", "first", "last", "length", "previtem", "nextitem"})
# What templates ask of texts; all of it makes new values. (`format`, which reaches further, is the sandbox's.)
_OF_STRINGS = frozenset({"startswith", "endswith", "strip", "lstrip", "rstrip", "split", "rsplit", "replace", "upper"})
_JSON = json.JSONEncoder(ensure_ascii=False)
# Tools with longer schemas are read anew each time; 1,024 of the others are kept.
_KNOWN_SCHEMA_CHARS = 16 << 10


class ChatTemplate:
    """One compiled template. Immutable and safe to use from several threads."""

    def __init__(
        self, text: str, special_tokens: Mapping[str, str], *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        """Compile `text`; `special_tokens` become variables (`bos_token`, ...); `now` feeds `strftime_now`.

        Raises CodecError TEMPLATE_INVALID when the text is no template.
        """
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise CodecError("TEMPLATE_INVALID", f"the chat template does not compile: {error}") from error
        # What every text has, which Jinja would put together for each.
        self._given = {**self._template.globals, "documents": None, **special_tokens}
        self.text = text
        self.supports_tools = "tools" in text
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
    ) -> str:
        """The conversation as the model's text.

        Raises CodecError: TEMPLATE_REFUSED (the template raised, or a reserved name in `template_kwargs`),
        TEMPLATE_WITHOUT_TOOLS (tools given to a template that would drop them), TOOL_INVALID, IMAGE_UNSUPPORTED.
        """
        if tools and not self.supports_tools:
            raise CodecError("TEMPLATE_WITHOUT_TOOLS", "the model's chat template has no place for tools")
        extra = dict(template_kwargs or {})
        if clash := RESERVED & extra.keys():
            raise CodecError("TEMPLATE_REFUSED", f"template_kwargs may not set {', '.join(sorted(clash))}")
        try:
            variables = {
                **self._given,
                "messages": [item for message in self._placed(messages) for item in self._as_dicts(message)],
                "tools": [_tool_dict(tool) for tool in tools] or None,
                "add_generation_prompt": add_generation_prompt,
                **extra,
            }
            template = self._template
            return "".join(
                template.root_render_func(Context(template.environment, variables, template.name, template.blocks))
            )
        except CodecError:
            raise
        except Exception as error:  # a template is a program of the model's author: whatever it raises is its refusal
            raise CodecError("TEMPLATE_REFUSED", f"the chat template refused the conversation: {error}") from error

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
        """A call's id as the template takes it: some (Mistral) refuse all but nine letters and digits."""
        if not self._short_ids or _SHORT_ID.fullmatch(call_id):
            return call_id
        number = int.from_bytes(hashlib.blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=8).digest())
        return "".join(_ALPHABET[number // 62**place % 62] for place in range(9))

    def _takes_late_instructions(self) -> bool:
        """Whether a system message may follow a user's. Some templates refuse it, leave it out or put it first."""
        question, probe = "early question", "late instruction"
        try:
            text = self.render([Message.user(question), Message.system(probe)])
        except CodecError:
            return False
        return 0 <= text.find(question) < text.find(probe)

    def _placed(self, messages: Sequence[Message]) -> Sequence[Message]:
        """As the template takes them: late instructions, and a user's second message, go to the end of the first."""
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

    def _as_dicts(self, message: Message) -> list[dict[str, Any]]:
        parts = message.parts
        if len(parts) == 1 and type(parts[0]) is TextPart and not message.name and message.role in _PLAIN:
            return [{"role": message.role.value, "content": parts[0].text}]  # as below, for what most messages are
        for part in parts:
            if isinstance(part, ImagePart) or (isinstance(part, ToolResultPart) and part.images):
                raise CodecError("IMAGE_UNSUPPORTED", "images cannot be turned into this model's tokens")
        results = message.tool_results
        if results:
            # One message per result, as templates expect; text beside the results (Anthropic's shape) follows as the
            # user's.
            items: list[dict[str, Any]] = []
            for result in results:
                item: dict[str, Any] = {
                    "role": "tool",
                    "content": result.text,
                    "tool_call_id": self._id(result.call_id),
                }
                if result.name is not None:
                    item["name"] = result.name
                items.append(item)
            text = "".join(part.text for part in message.parts if isinstance(part, TextPart))
            if text:
                items.append({"role": "user", "content": text})
            return items
        role = message.role.value
        if message.role is Role.DEVELOPER and not self._knows_developer:
            role = "system"
        item = {"role": role, "content": message.text}
        if message.name:
            item["name"] = message.name
        if message.role is not Role.ASSISTANT:
            return [item]
        if reasoning := message.reasoning:
            item["reasoning_content"] = reasoning
        if calls := message.tool_calls:
            item["tool_calls"] = [
                {
                    "id": self._id(call.id),
                    "type": "function",
                    "function": {"name": call.name, "arguments": _arguments(call.arguments_json)},
                }
                for call in calls
            ]
        return [item]


def _arguments(text: str) -> Any:
    """The arguments as templates want them: an object where the text is one, else the text untouched."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


class _Known(dict[str, Any]):
    """A tool as templates see it, with its JSON once that was asked for. The sandbox lets no template change it."""

    __slots__ = ("written",)

    def __init__(self, value: dict[str, Any]) -> None:
        super().__init__(value)
        self.written: str | None = None


def _tool_dict(tool: Tool) -> dict[str, Any]:
    return _known_tool(tool) if len(tool.parameters_json_schema) <= _KNOWN_SCHEMA_CHARS else _read_tool(tool)


@lru_cache(maxsize=1024)
def _known_tool(tool: Tool) -> dict[str, Any]:
    return _read_tool(tool)


def _read_tool(tool: Tool) -> dict[str, Any]:
    try:
        parameters = json.loads(tool.parameters_json_schema)
    except (ValueError, RecursionError) as error:
        raise CodecError("TOOL_INVALID", f"the parameters of the tool {tool.name!r} are no JSON: {error}") from error
    if not isinstance(parameters, dict):
        raise CodecError("TOOL_INVALID", f"the parameters of the tool {tool.name!r} are no JSON object")
    function = _Known({"name": tool.name, "description": tool.description, "parameters": _Known(parameters)})
    return _Known({"type": "function", "function": function})


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own tojson escapes for HTML; models were trained on text without those escapes.
    if not (ensure_ascii or sort_keys or indent is not None or separators is not None):
        if type(value) is not _Known:
            return _JSON.encode(value)
        if value.written is None:
            value.written = _JSON.encode(value)
        return value.written
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox, with a short way to what templates ask for most: the items of a message, and where a loop is."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As the sandbox has it."""
        kind = type(obj)
        if (kind is dict or kind is _Known) and attribute not in _OF_DICTS:
            # Found or not, no attribute of an object is reached. The sandbox would first fail to find one.
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if kind is str and attribute in _OF_STRINGS:
            return getattr(obj, attribute)
        if kind is LoopContext and attribute in _OF_LOOPS:
            return getattr(obj, attribute)
        if kind is Namespace and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)  # it has none but what a template put there
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """As the sandbox has it."""
        if obj is Namespace and not args and "_loop_vars" not in kwargs and "_block_vars" not in kwargs:
            return Namespace(**kwargs)
        return super().call(context, obj, *args, **kwargs)


class _GenerationBlock(Extension):
    """`{% generation %}` marks what the assistant wrote; it changes nothing in the text."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an instance variable)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)
