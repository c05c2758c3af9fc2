"""Completion ids to an assistant message, all at once or as they come.

Markup (`<think>`, `<tool_call>`) is found by token id where the vocabulary has it as one token, so that text which
merely spells it is text; else by text. A malformed tool call stays in the message as the text that it is, with a
flag. No ids whatever make a parser raise, and its work is linear in them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from penstock_codec.chat import FinishReason, Message, Part, ReasoningPart, Role, TextPart, ToolCallPart
from penstock_codec.decoding import Detokenizer
from penstock_codec.errors import CodecError
from penstock_codec.tool_json import MAX_CALL_CHARS, CallText, JsonTracker, Malformed, parse_call

MAX_CALLS = 128


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """A tool call that is none: its text with markup, white space at its end apart, and why (tool_json.Malformed)."""

    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class ParsedCompletion:
    """What a completion says. `malformed` calls are part of the message's text."""

    message: Message
    finish_reason: FinishReason
    malformed: tuple[MalformedCall, ...] = ()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More visible text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A whole tool call, the `index`-th of the completion: announced once it is known to be well formed."""

    index: int
    call: ToolCallPart


Delta: TypeAlias = TextDelta | ReasoningDelta | ToolCallDelta


class Tag(Enum):
    """Markup that a parser may know."""

    OPEN_THINK = "<think>"
    CLOSE_THINK = "</think>"
    OPEN_CALL = "<tool_call>"
    CLOSE_CALL = "</tool_call>"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A named kind of completion: which markup has a meaning in it."""

    name: str
    tags: frozenset[Tag]


_THINK = frozenset({Tag.OPEN_THINK, Tag.CLOSE_THINK})
GRAMMARS: Mapping[str, Grammar] = {
    grammar.name: grammar
    for grammar in (
        Grammar("hermes", frozenset(Tag)),  # reasoning, and JSON calls in <tool_call>, as Hermes and Qwen write them
        Grammar("think", _THINK),  # reasoning and text
        Grammar("none", frozenset()),  # text
    )
}


def choose_grammar(name: str | None, template: str) -> Grammar:
    """The grammar by name, or by what the template shows; never a silent default.

    Raises CodecError PARSER_UNKNOWN or PARSER_UNDETECTED, which name what to set.
    """
    known = ", ".join(sorted(GRAMMARS))
    if name is not None:
        if name not in GRAMMARS:
            raise CodecError("PARSER_UNKNOWN", f"no parser is called {name!r}; there are: {known}")
        return GRAMMARS[name]
    if "tools" in template:
        if (
            all(text in template for text in ("<tool_call>", "</tool_call>", "arguments"))
            and "<function" not in template
        ):
            return GRAMMARS["hermes"]
        raise CodecError(
            "PARSER_UNDETECTED",
            f"the chat template's tool calls are of no known kind: set the parser to one of {known}",
        )
    return GRAMMARS["think" if "<think>" in template else "none"]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a parser has to know of the tokens: markup that is one id, control ids without text, ids that end a turn."""

    tag_ids: Mapping[int, Tag]
    silent_ids: frozenset[int]
    stop_ids: frozenset[int]
    size: int


def new_call_id() -> str:
    """A fresh tool-call id of 128 random bits."""
    return "call_" + secrets.token_hex(16)


class CompletionParser:
    """Reads one completion. Feed it ids, then finish it; the deltas add up to the message."""

    def __init__(
        self,
        grammar: Grammar,
        vocabulary: Vocabulary,
        detokenizer: Detokenizer,
        *,
        reasoning_open: bool = False,
        call_id: Callable[[], str] = new_call_id,
    ) -> None:
        """`reasoning_open`: the prompt ends inside a <think> that it opened itself."""
        self._vocabulary = vocabulary
        self._text = detokenizer.stream()
        self._call_id = call_id
        by_id = {tag for tag in vocabulary.tag_ids.values() if tag in grammar.tags}
        self._tag_ids = {index: tag for index, tag in vocabulary.tag_ids.items() if tag in grammar.tags}
        self._scanner = _TagScanner(grammar.tags - by_id)
        self._state = _State.THINK if reasoning_open else _State.CONTENT
        self._parts: list[Part] = []
        self._malformed: list[MalformedCall] = []
        self._deltas: list[Delta] = []
        self._calls = 0
        self._stopped = False
        # The piece in hand: text or reasoning so far, and the white space that shows only if more follows.
        self._piece: list[str] = []
        self._space = ""
        self._trim = reasoning_open
        self._body: list[str] = []
        self._body_chars = 0
        self._tracker = JsonTracker()

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """Take the next ids; answer what became certain."""
        run: list[int] = []
        for index in ids:
            self._stopped = index in self._vocabulary.stop_ids
            if index in self._vocabulary.silent_ids or not 0 <= index < self._vocabulary.size:
                continue
            tag = self._tag_ids.get(index)
            if tag is None:
                run.append(index)
                continue
            self._take_text(self._text.push(run) + self._text.flush())
            run.clear()
            for event in self._scanner.flush():
                self._take(event)
            self._take(tag)
        if run:
            self._take_text(self._text.push(run))
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self, reason: FinishReason | None = None) -> tuple[list[Delta], ParsedCompletion]:
        """The last deltas and the whole. `reason` is the engine's; without one, a stop id means STOP, else LENGTH."""
        self._take_text(self._text.flush())
        for event in self._scanner.flush():
            self._take(event)
        if self._state is _State.CALL:
            self._reject(Malformed("UNCLOSED"), closed=False)
        if self._state is _State.CONTENT and (self._piece or not self._calls):
            self._emit_piece(self._space)
        self._end_piece()
        if reason is None:
            reason = FinishReason.STOP if self._stopped else FinishReason.LENGTH
        if reason is FinishReason.STOP and self._calls:
            reason = FinishReason.TOOL_CALLS
        deltas, self._deltas = self._deltas, []
        message = Message(Role.ASSISTANT, tuple(self._parts))
        return deltas, ParsedCompletion(message, reason, tuple(self._malformed))

    def _take_text(self, text: str) -> None:
        for event in self._scanner.push(text):
            self._take(event)

    def _take(self, event: Tag | str) -> None:
        if self._state is _State.CALL:
            self._take_in_call(event)
        elif event is Tag.CLOSE_THINK and self._state is _State.THINK:
            self._end_piece()
            self._state, self._trim = _State.CONTENT, True
        elif self._state is _State.THINK:
            self._show(event if isinstance(event, str) else event.value)
        elif event is Tag.OPEN_THINK:
            self._end_piece()
            self._state, self._trim = _State.THINK, True
        elif event is Tag.OPEN_CALL:
            self._open_call()
        else:
            self._show(event if isinstance(event, str) else event.value)

    def _take_in_call(self, event: Tag | str) -> None:
        if not self._tracker.in_string:  # inside a JSON string, markup is what the model talks about
            if event is Tag.CLOSE_CALL:
                self._close_call()
                return
            if event is Tag.OPEN_CALL:
                self._reject(Malformed("UNCLOSED"), closed=False)
                self._open_call()
                return
        text = event if isinstance(event, str) else event.value
        self._body.append(text)
        self._body_chars += len(text)
        if self._body_chars <= MAX_CALL_CHARS:
            self._tracker.feed(text)

    def _open_call(self) -> None:
        self._state = _State.CALL
        self._body, self._body_chars, self._tracker = [], 0, JsonTracker()

    def _close_call(self) -> None:
        parsed = parse_call("".join(self._body)) if self._calls < MAX_CALLS else Malformed("TOO_MANY")
        if isinstance(parsed, Malformed):
            self._reject(parsed, closed=True)
            return
        self._accept(parsed)

    def _accept(self, parsed: CallText) -> None:
        self._space = ""
        self._end_piece()
        call = ToolCallPart(self._call_id(), parsed.name, parsed.arguments_json)
        self._parts.append(call)
        self._deltas.append(ToolCallDelta(self._calls, call))
        self._calls += 1
        self._state, self._trim = _State.CONTENT, True

    def _reject(self, why: Malformed, *, closed: bool) -> None:
        text = Tag.OPEN_CALL.value + "".join(self._body) + (Tag.CLOSE_CALL.value if closed else "")
        self._malformed.append(MalformedCall(text.rstrip(), why.reason))
        self._state = _State.CONTENT
        self._show(text)

    def _show(self, text: str) -> None:
        """Add to the piece in hand, keeping back white space at its end."""
        if self._trim:
            text = text.lstrip("\n")
            if not text:
                return
            self._trim = False
        body = text.rstrip()
        if not body:
            self._space += text
            return
        self._emit_piece(self._space + body)
        self._space = text[len(body) :]

    def _emit_piece(self, text: str) -> None:
        if text:
            self._piece.append(text)
            thinking = self._state is _State.THINK
            self._deltas.append(ReasoningDelta(text) if thinking else TextDelta(text))

    def _end_piece(self) -> None:
        text = "".join(self._piece)
        if text:
            self._parts.append(ReasoningPart(text) if self._state is _State.THINK else TextPart(text))
        self._piece, self._space, self._trim = [], "", False


class _State(Enum):
    CONTENT = "content"
    THINK = "think"
    CALL = "call"


class _TagScanner:
    """Finds markup by text, for vocabularies that have no token for it; holds back what may become markup."""

    def __init__(self, tags: frozenset[Tag]) -> None:
        self._tags = {tag.value: tag for tag in tags}
        self._longest = max((len(text) for text in self._tags), default=0)
        self._held = ""

    def push(self, text: str) -> Iterator[Tag | str]:
        if not self._tags:
            if text:
                yield text
            return
        text = self._held + text
        at = 0
        while (found := text.find("<", at)) >= 0:
            tag = next((name for name in self._tags if text.startswith(name, found)), None)
            if tag is not None:
                if found > at:
                    yield text[at:found]
                yield self._tags[tag]
                at = found + len(tag)
                continue
            rest = text[found : found + self._longest]
            if found + len(rest) == len(text) and any(name.startswith(rest) for name in self._tags):
                break
            end = text.find("<", found + 1)
            end = len(text) if end < 0 else end
            yield text[at:end]
            at = end
        else:
            found = len(text)
        if found > at:
            yield text[at:found]
        self._held = text[found:]

    def flush(self) -> Iterator[str]:
        held, self._held = self._held, ""
        if held:
            yield held
