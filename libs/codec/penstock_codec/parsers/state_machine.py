"""The parser that all families share: ids in, deltas and finally a message out; the grammar defines the markup.

Markup is found by token id where the vocabulary has it as one token, so that text which merely spells it is text;
otherwise by text. A malformed tool call stays in the message as text, with a flag. No ids make a parser raise, and its
work is linear in them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from penstock_codec.chat import FinishReason, Message, Part, ReasoningPart, Role, TextPart, Tool, ToolCallPart
from penstock_codec.decoding import Detokenizer
from penstock_codec.fast_dataclass import quick
from penstock_codec.parsers.grammar import Grammar, Mark
from penstock_codec.parsers.scanner import Markup, MarkupScanner, MarkupTexts
from penstock_codec.tool_json import MAX_CALL_CHARS, CallText, Malformed, StringTracker, depths

MAX_CALLS = 128
_BARE_CHARS = 64


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """A malformed tool call: its text with markup, right-stripped, and the reason (tool_json.Malformed)."""

    text: str
    reason: str


@quick
@dataclass(frozen=True, slots=True)
class ParsedCompletion:
    """A parsed completion. `malformed` calls are part of the message's text."""

    message: Message
    finish_reason: FinishReason
    malformed: tuple[MalformedCall, ...] = ()


@quick
@dataclass(frozen=True, slots=True)
class TextDelta:
    """More visible text."""

    text: str


@quick
@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@quick
@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A whole tool call, the `index`-th of the completion: announced once it is known to be well formed."""

    index: int
    call: ToolCallPart


Delta: TypeAlias = TextDelta | ReasoningDelta | ToolCallDelta


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A parser's view of the vocabulary: markup that is one id, control ids without text, ids that end a turn."""

    markup_ids: Mapping[int, str]
    silent_ids: frozenset[int]
    stop_ids: frozenset[int]
    size: int


class Reading:
    """Data shared by parsers of one grammar over one vocabulary, made once. Immutable."""

    __slots__ = ("grammar", "ids", "is_text", "stops", "texts")

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary) -> None:
        self.grammar = grammar
        # Markup by its id, if the grammar has it.
        self.ids = {index: Markup(text) for index, text in vocabulary.markup_ids.items() if text in grammar.marks}
        # Markup without an id of its own.
        self.texts = MarkupTexts(grammar.marks.keys() - {item.text for item in self.ids.values()})
        # For each id of the vocabulary, whether it is text.
        silent = vocabulary.silent_ids | self.ids.keys()
        self.is_text = bytes(index not in silent for index in range(vocabulary.size))
        self.stops = vocabulary.stop_ids


class CompletionParser:
    """Parses one completion. Feed it ids, then finish it; the deltas add up to the message."""

    def __init__(
        self,
        reading: Reading,
        detokenizer: Detokenizer,
        *,
        tools: Sequence[Tool] = (),
        reasoning_open: bool = False,
        call_id: Callable[[], str] | None = None,
    ) -> None:
        """`reasoning_open`: the prompt ends inside reasoning that it opened itself.

        `tools` are those of the request: families that write values without types get the types from them. `call_id`
        makes ids for calls without one; the grammar's own by default.
        """
        self._grammar = grammar = reading.grammar
        self._reading = reading
        self._text = detokenizer.stream()
        self._tools = tools
        self._call_id = call_id or grammar.new_call_id
        self._scanner = MarkupScanner(reading.texts)
        self._state = State.THINK if reasoning_open else State.CONTENT
        self._parts: list[Part] = []
        self._malformed: list[MalformedCall] = []
        self._deltas: list[Delta] = []
        self._ids: set[str] = set()
        self._calls = 0
        self._stopped = False
        # The current piece: text or reasoning so far, and the white space that shows only if more follows.
        self._piece: list[str] = []
        self._space: list[str] = []
        self._trim = reasoning_open
        self._answered = False  # there is visible text or a call
        # The current call: the markup that opened it ("" for a bare one), and the text since.
        self._opening = ""
        self._body: list[str] = []
        self._body_chars = 0
        self._strings = StringTracker()

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """Parses the next ids; returns the deltas that became certain."""
        reading = self._reading
        is_text = reading.is_text
        known = list(ids)
        if known and not 0 <= min(known) <= max(known) < len(is_text):
            known = [index for index in known if 0 <= index < len(is_text)]
        # Non-text ids are found for all at once: a completion has thousands of ids, and few of those.
        texts = bytes(map(is_text.__getitem__, known))
        run: list[int] = []
        at = 0
        while (other := texts.find(0, at)) >= 0:
            run += known[at:other]
            at = other + 1
            markup = reading.ids.get(known[other])
            if markup is None:
                continue
            self._take_text(self._text.push(run) + self._text.flush())
            run = []
            self._take_held()
            self._take(markup)
        run += known[at:]
        if run:
            self._take_text(self._text.push(run))
        if len(ids):
            self._stopped = ids[-1] in reading.stops
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self, reason: FinishReason | None = None) -> tuple[list[Delta], ParsedCompletion]:
        """Returns the last deltas and the result. `reason` is the engine's; None: a stop id means STOP, else LENGTH."""
        self._flush()
        if self._state is State.CALL:
            if self._grammar.ends_with_turn:
                self._close_call("")
            else:
                self._reject("UNCLOSED", "")
        if self._state is State.CONTENT and (self._piece or not self._calls):
            self._emit_piece("".join(self._space))
        self._end_piece()
        if reason is None:
            reason = FinishReason.STOP if self._stopped else FinishReason.LENGTH
        if reason is FinishReason.STOP and self._calls:
            reason = FinishReason.TOOL_CALLS
        deltas, self._deltas = self._deltas, []
        message = Message(Role.ASSISTANT, tuple(self._parts))
        return deltas, ParsedCompletion(message, reason, tuple(self._malformed))

    def _flush(self) -> None:
        """Processes the text that was held back."""
        self._take_text(self._text.flush())
        self._take_held()

    def _take_text(self, text: str) -> None:
        if self._reading.texts.all:
            for event in self._scanner.push(text):
                self._take(event)
        elif text:
            self._take(text)

    def _take_held(self) -> None:
        if self._reading.texts.all:
            for event in self._scanner.flush():
                self._take(event)

    def _take(self, event: Markup | str) -> None:
        if self._state is State.CALL:
            self._take_in_call(event)
            return
        if isinstance(event, str):
            self._take_shown(event)
            return
        mark = self._grammar.marks[event.text]
        if mark is Mark.CLOSE_THINK and self._state is State.THINK:
            self._end_piece()
            self._state, self._trim = State.CONTENT, True
        elif self._state is State.THINK:
            self._show(event.text)
        elif mark is Mark.OPEN_THINK:
            self._end_piece()
            self._state, self._trim = State.THINK, True
        elif mark is Mark.OPEN_CALL:
            self._open_call(event.text)
        elif mark is Mark.AROUND:
            if self._piece or not self._calls:
                self._space.append(event.text)  # shows only if no call follows
        else:
            self._show(event.text)

    def _take_shown(self, text: str) -> None:
        bare = self._grammar.may_begin_bare
        if bare is not None and self._state is State.CONTENT and not self._answered:
            begun = text.lstrip()
            if begun.startswith("{"):
                self._show(text[: len(text) - len(begun)])
                self._open_call("")
                self._take_in_call(begun)
                return
        self._show(text)

    def _take_in_call(self, event: Markup | str) -> None:
        grammar = self._grammar
        if isinstance(event, Markup) and not (grammar.is_json and self._strings.in_string):
            mark = grammar.marks[event.text]
            if mark is Mark.CLOSE_CALL:
                self._close_call(event.text)
                return
            if mark is Mark.OPEN_CALL:
                if grammar.ends_with_turn:
                    self._close_call("")
                else:
                    self._reject("UNCLOSED", "")
                self._open_call(event.text)
                return
        text = event if isinstance(event, str) else event.text
        self._body.append(text)
        before = self._body_chars
        self._body_chars += len(text)
        if before <= MAX_CALL_CHARS and grammar.is_json:
            self._strings.feed(text)
        bare = None if self._opening or before >= _BARE_CHARS else grammar.may_begin_bare
        if bare is not None and not bare("".join(self._body)[:_BARE_CHARS]):
            self._reject("", "")

    def _open_call(self, opening: str) -> None:
        self._state = State.CALL
        self._opening = opening
        self._body, self._body_chars, self._strings = [], 0, StringTracker()

    def _close_call(self, closing: str) -> None:
        body = "".join(self._body)
        read = self._read_call(body)
        if isinstance(read, Malformed):
            open_json = self._grammar.is_json and (self._strings.in_string or depths(body)[0] > 0)
            self._reject(
                "UNCLOSED" if read.reason == "NOT_JSON" and open_json and not closing else read.reason, closing
            )
        elif self._calls + len(read) > MAX_CALLS:
            self._reject("TOO_MANY", closing)
        else:
            for call in read:
                self._accept(call)

    def _read_call(self, body: str) -> Sequence[CallText] | Malformed:
        return self._grammar.read_calls(body, self._tools)

    def _accept(self, read: CallText) -> None:
        self._space = []
        self._end_piece()
        call_id = read.id if read.id and read.id not in self._ids else self._call_id()
        self._ids.add(call_id)
        call = ToolCallPart(call_id, read.name, read.arguments_json)
        self._parts.append(call)
        self._deltas.append(ToolCallDelta(self._calls, call))
        self._calls += 1
        self._answered = True
        self._state, self._trim = State.CONTENT, True

    def _reject(self, reason: str, closing: str) -> None:
        text = self._opening + "".join(self._body) + closing
        if self._opening:  # text that could have been a bare call is no malformed one
            self._malformed.append(MalformedCall(text.rstrip(), reason))
        self._state, self._answered = State.CONTENT, True
        self._show(text)

    def _show(self, text: str) -> None:
        """Adds to the current piece, holding back trailing white space."""
        if self._trim:
            text = text.lstrip("\n")
            if not text:
                return
            self._trim = False
        body = text.rstrip()
        if not body:
            self._space.append(text)
            return
        self._emit_piece("".join(self._space) + body)
        self._space = [text[len(body) :]]

    def _emit_piece(self, text: str) -> None:
        if text:
            self._piece.append(text)
            thinking = self._state is State.THINK
            self._answered = self._answered or not thinking
            self._deltas.append(ReasoningDelta(text) if thinking else TextDelta(text))

    def _end_piece(self) -> None:
        text = "".join(self._piece)
        if text:
            self._parts.append(ReasoningPart(text) if self._state is State.THINK else TextPart(text))
        self._piece, self._space, self._trim = [], [], False


class State(Enum):
    CONTENT = "content"
    THINK = "think"
    CALL = "call"
