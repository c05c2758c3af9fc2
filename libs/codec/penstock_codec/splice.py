"""Exact continuation: the ids to append to a conversation whose ids are already known.

Tokens that the engine saw and sampled are never rendered or tokenised again. Instead the model's own template is
probed: the last assistant turn is replaced by one with a random mark, the new messages are rendered after it, and the
text after that turn's closing special token is tokenised on its own. Since the cut is at a special token, no merge
crosses it. A turn that was cut off gets its closing token as context.

Some families (GLM) close no turn: the model ends it by sampling the token that opens the next one. That token is then
the first of the new messages' text, and is appended unless it is the very one that was sampled.

The probe needs no history, unless the template requires it: the first time a shape of continuation is seen (which
roles, with tools or without), a probe after a short history is compared with one after a longer history. Where they
differ, the real history is rendered (as text only). Where new messages change the text before them, there is no exact
continuation, and the result gives the reason.

Nor does the probe need the text of the system prompt, unless it changes what follows: SmolLM3's may turn thinking off,
which changes the generation prompt. So the first time a system prompt is seen with a shape, a probe after it is
compared with one after a short stand-in. Where they differ, the shape is verified with that system prompt, and the
probe has it.

Some templates (Nemotron Nano 2's) search every message for such a word. Such a word is a constant of the template, so
each of these is tried in a history: where one changes what follows, the real history is always rendered.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_codec.cache import LONGEST_SHAPE, Caches
from penstock_codec.chat import ImagePart, Message, Role, TextPart, Tool, ToolCallPart, ToolResultPart
from penstock_codec.errors import CodecError
from penstock_codec.fast_dataclass import quick
from penstock_codec.images import ImageRule, Placed, expanded
from penstock_codec.rendering import Rendered, Rendering

IntArray = NDArray[np.int32]
_SHOWN = 40
_QUESTION = Message.user("q")
_INSTRUCTING = (Role.SYSTEM, Role.DEVELOPER)
_RULES = (TextPart("rules"),)
_ANY_IMAGE = ImagePart.inline(b"image", "image/png")
_TOOL = Tool("f", "F.", '{"type": "object", "properties": {"a": {"type": "string"}}}')


@quick
@dataclass(frozen=True, slots=True)
class Continuation:
    """The ids to append. `closing` of them (0 or 1), at the front, close a turn that the model did not close itself.

    `mixed_up`: control tokens spelled in the new messages could not be distinguished from the template's own. `images`
    are those of the new messages, in the order of their tokens.
    """

    ids: IntArray
    closing: int
    mixed_up: bool = False
    images: tuple[Placed, ...] = ()


@dataclass(frozen=True, slots=True)
class Inexact:
    """No exact continuation exists: the caller renders anew and opens a branch.

    `reason`: TEMPLATE_REWRITES_HISTORY, TEMPLATE_HIDES_TURN, NO_END_OF_TURN, TEMPLATE_REFUSED.
    """

    reason: str
    detail: str


class _Probe(Enum):
    SHORT = "short"  # instructions, one question and the turn stand for any history
    FULL = "full"  # the real history has to be rendered


@dataclass(frozen=True, slots=True, eq=False)
class _Shape:
    """What is known of a shape of continuation. It equals only itself, so that it is a short key."""

    probe: _Probe | Inexact


@dataclass(frozen=True, slots=True)
class EndOfTurn:
    """The special token with which the template closes an assistant turn."""

    text: str
    id: int


class Splicer:
    """Exact continuation for one template and tokenizer. Thread-safe."""

    def __init__(
        self,
        rendering: Rendering,
        special_tokens: Mapping[str, int],
        caches: Caches,
        *,
        other_ends: Mapping[str, int] | None = None,
        openings: Mapping[str, int] | None = None,
        thinking: Sequence[tuple[str, str]] = (),
        images: ImageRule | None = None,
    ) -> None:
        """`special_tokens` maps the text of special tokens to ids.

        `other_ends` are tokens that may end a turn besides the one that the template shows after a plain answer;
        `openings` those that open a turn and so end the previous one; `thinking` is the markup around reasoning.
        """
        self._rendering = rendering
        self._images = images
        # Some templates (GLM 5's) leave only the closing mark of reasoning.
        pairs = "|".join(
            f"{re.escape(opening)}.*?{re.escape(closing)}|{re.escape(closing)}" for opening, closing in thinking
        )
        self._thinking = re.compile(pairs or r"(?!)", re.DOTALL)
        self._mark = "probe" + secrets.token_hex(12)
        self._shapes = caches.shapes
        self._instructed = caches.instructed
        self._openings = openings or {}
        self.end_of_turn = self._find_end_of_turn(special_tokens)
        end = {} if self.end_of_turn is None else {self.end_of_turn.text: self.end_of_turn.id}
        self._ends: Mapping[str, int] = {**self._openings, **(other_ends or {}), **end}
        self.end_ids = frozenset(self._ends.values())
        self._end = re.compile("|".join(re.escape(text) for text in self._ends))
        self._listens = self._finds_words()

    def continuation(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Tool],
        *,
        last_id: int | None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Continuation | Inexact:
        """Returns the ids for `new` after `history` (last message the assistant's, its last id `last_id`)."""
        if not history or history[-1].role is not Role.ASSISTANT:
            raise ValueError("history ends with the assistant's message")
        if self.end_of_turn is None:
            return Inexact("NO_END_OF_TURN", "the template does not close an assistant turn with a special token")
        kwargs = dict(template_kwargs or {})
        turn = self._turn_like(history[-1], tools, kwargs)
        instructions: Sequence[Message] = tuple(takewhile(lambda message: message.role in _INSTRUCTING, history))
        try:
            shape, instructions = self._shape(instructions, turn, new, tools, add_generation_prompt, kwargs)
            if isinstance(shape.probe, Inexact):
                return shape.probe
            if shape.probe is _Probe.SHORT:
                before = [*instructions, _QUESTION]
                tools = ()
            else:
                before = list(history[:-1])
            tail = self._tail([*before, turn], new, tools, add_generation_prompt, kwargs)
        except CodecError as error:
            if error.reason != "TEMPLATE_REFUSED":
                raise
            return Inexact("TEMPLATE_REFUSED", str(error))
        if isinstance(tail, Inexact):
            return tail
        # The end of turn is encoded too, so that the tail is tokenised as text after a special token.
        ids = self._rendering.ids(tail.end + tail.after, broken=tail.rendered.broken)
        if ids.size == 0 or ids[0] != self._ends[tail.end]:
            return Inexact("NO_END_OF_TURN", "the tokenizer does not keep the end of a turn as one token")
        closed = {self._ends[tail.end]} if tail.end in self._openings else self.end_ids
        closing = 0 if last_id in closed else 1
        ids = ids[1 - closing :]
        placed: tuple[Placed, ...] = ()
        if self._images is not None:
            ids, placed = expanded(ids, self._rendering.template.images(new), self._images)
        return Continuation(ids, closing, tail.rendered.mixed_up, placed)

    def _shape(
        self,
        instructions: Sequence[Message],
        turn: Message,
        new: Sequence[Message],
        tools: Sequence[Tool],
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> tuple[_Shape, Sequence[Message]]:
        """Returns the shape of a continuation, and the instructions that a short probe needs: these, or a stand-in."""
        key = (
            tuple(message.role for message in instructions),
            len(turn.tool_calls),
            # To the template, text beside a tool's result is a message of its own.
            tuple(
                (
                    message.role,
                    len(message.tool_calls),
                    len(message.tool_results),
                    _has_text(message),
                    _pictured(message),
                )
                for message in new
            ),
            bool(tools),
            add_generation_prompt,
            json.dumps(kwargs, sort_keys=True, default=repr) if kwargs else "",
        )
        is_kept = len(new) <= LONGEST_SHAPE
        rules = tuple(Message(message.role, _RULES) for message in instructions)
        shape: _Shape | None = self._shapes.get(key)
        if shape is None:
            shape = _Shape(self._verify(rules, turn, new, tools, add_generation_prompt, kwargs))
            if is_kept:
                self._shapes.keep({key: shape})
        if not instructions:
            return shape, instructions
        instructed = (shape, _digest(instructions))
        found: _Shape | None = self._instructed.get(instructed)
        if found is None:
            found = shape
            if not self._stands_in(shape, rules, instructions, turn, new, add_generation_prompt, kwargs):
                found = _Shape(self._verify(instructions, turn, new, tools, add_generation_prompt, kwargs))
            if is_kept:
                self._instructed.keep({instructed: found})
        return found, rules if found is shape else instructions

    def _stands_in(
        self,
        shape: _Shape,
        rules: Sequence[Message],
        instructions: Sequence[Message],
        turn: Message,
        new: Sequence[Message],
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> bool:
        """Whether what is known of a shape by `rules` is so after these instructions."""
        if shape.probe is not _Probe.SHORT:
            return shape.probe is _Probe.FULL  # has the real ones
        try:
            real = self._tail(_earlier(instructions, turn, new), new, (), add_generation_prompt, kwargs)
        except CodecError:
            return False
        short = self._tail([*rules, _QUESTION, turn], new, (), add_generation_prompt, kwargs)
        if isinstance(real, Inexact) or isinstance(short, Inexact):
            return False
        return (real.end, real.after) == (short.end, short.after)

    def _verify(
        self,
        instructions: Sequence[Message],
        turn: Message,
        new: Sequence[Message],
        tools: Sequence[Tool],
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> _Probe | Inexact:
        earlier = _earlier(instructions, turn, new)
        longer = self._tail(earlier, new, tools, add_generation_prompt, kwargs)
        base = self._tail(earlier, (), tools, False, kwargs)
        if isinstance(longer, Inexact):
            return longer
        if isinstance(base, Inexact):
            return base
        # Dropping old reasoning is no rewrite for us: the sampled ids are kept.
        if self._without_thinking(longer.before) != self._without_thinking(base.before):
            shown = self._rendering.shown
            change = _first_change(shown(base.before), shown(longer.before))
            return Inexact("TEMPLATE_REWRITES_HISTORY", f"new messages change the text before them: {change}")
        if self._listens:
            return _Probe.FULL
        try:
            short = self._tail([*instructions, _QUESTION, turn], new, (), add_generation_prompt, kwargs)
        except CodecError:
            return _Probe.FULL
        if isinstance(short, Inexact) or short.after != longer.after:
            return _Probe.FULL
        return _Probe.SHORT

    def _tail(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Tool],
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> _Split | Inexact:
        rendered = self._rendering.render(
            [*history, *new], tools, add_generation_prompt=add_generation_prompt, template_kwargs=kwargs
        )
        before, found, rest = rendered.text.partition(self._mark)
        if not found or self._mark in rest:
            return Inexact("TEMPLATE_HIDES_TURN", "the template does not show an assistant turn exactly once")
        closed = self._end.search(rest)
        if closed is None:
            if self._openings and not new and not add_generation_prompt:
                return _Split(before, "", "", rendered)  # nothing follows that would close it
            return Inexact("NO_END_OF_TURN", "the template does not close this turn")
        return _Split(before, closed.group(), rest[closed.end() :], rendered)

    def _turn_like(self, turn: Message, tools: Sequence[Tool], kwargs: Mapping[str, Any]) -> Message:
        """Returns a marked turn that stands for `turn`, as far as the template shows such a turn.

        Some templates write only one call of a turn, whatever the model does: the last one then stands for all. Some
        write none (Granite 3): what follows then follows any answer.
        """
        calls = len(turn.tool_calls)
        if calls > 1 and not self._shows(self._marked(turn), tools, kwargs):
            turn = replace(turn, parts=turn.tool_calls[-1:])
        if calls and not self._shows_calls and self._shows(Message.assistant(self._mark), tools, kwargs):
            turn = Message.assistant("")
        return self._marked(turn)

    @cached_property
    def _shows_calls(self) -> bool:
        """Whether the template writes a call into the history, or refuses it: probed once."""
        turn = self._marked(Message.assistant("", ToolCallPart("call_0", "f", "{}")))
        for tools in ((), (_TOOL,)):
            try:
                if self._mark in self._rendering.render([_QUESTION, turn], tools, add_generation_prompt=False).text:
                    return True
            except CodecError:
                return True
        return False

    def _shows(self, turn: Message, tools: Sequence[Tool], kwargs: Mapping[str, Any]) -> bool:
        """Whether the template shows the mark in a turn: some refuse several calls, some show the first only."""
        try:
            rendered = self._rendering.render(
                [_QUESTION, turn], tools, add_generation_prompt=False, template_kwargs=kwargs
            )
        except CodecError:
            return False
        return self._mark in rendered.text

    def _finds_words(self) -> bool:
        """Whether a word in an earlier message changes what follows a later answer."""
        turn, new = Message.assistant(self._mark), [_QUESTION]

        def after(word: str) -> str | None:
            earlier = [Message.user(word), Message.assistant(word), _QUESTION, turn]
            try:
                tail = self._tail(earlier, new, (), True, {})
            except CodecError:
                return None  # nor does it take a conversation with that word
            return None if isinstance(tail, Inexact) else tail.after

        usual = after("so")
        return usual is not None and any(
            found != usual for word in self._rendering.template.words if (found := after(word)) is not None
        )

    def _without_thinking(self, text: str) -> str:
        return "".join(self._thinking.sub("", text).split())  # the white space around it goes with it

    def _marked(self, turn: Message) -> Message:
        """Returns a turn of the same kind as `turn` that contains the mark once, at its end."""
        made = turn.tool_calls
        if not made:
            return Message.assistant(self._mark)
        *first, last = made
        calls = [ToolCallPart(call.id, call.name, "{}") for call in first]
        return Message.assistant("", *calls, ToolCallPart(last.id, last.name, f'{{"probe": "{self._mark}"}}'))

    def _find_end_of_turn(self, special_tokens: Mapping[str, int]) -> EndOfTurn | None:
        turn = [_QUESTION, Message.assistant(self._mark)]
        for tools in ((), (_TOOL,)) if self._rendering.template.supports_tools else ((),):
            end = self._end_after(turn, tools, special_tokens)
            if end is None and self._openings:
                end = self._end_after([*turn, _QUESTION], tools, self._openings)
            if end is not None:
                return end
        return None

    def _end_after(
        self, messages: Sequence[Message], tools: Sequence[Tool], tokens: Mapping[str, int]
    ) -> EndOfTurn | None:
        try:
            text = self._rendering.render(messages, tools, add_generation_prompt=False).text
        except CodecError:
            return None  # some (Hermes 3's) refuse a conversation without tools
        _, found, rest = text.partition(self._mark)
        rest = rest.lstrip()
        closing = max((token for token in tokens if token and rest.startswith(token)), key=len, default=None)
        if not found or closing is None:
            return None
        return EndOfTurn(closing, tokens[closing])


def _earlier(instructions: Sequence[Message], turn: Message, new: Sequence[Message]) -> list[Message]:
    """Returns a longer history that ends with `turn`."""
    first = Message.user("first")
    if any(message.images for message in new):
        first = replace(first, parts=(*first.parts, _ANY_IMAGE))  # some templates number the images
    return [*instructions, first, Message.assistant("so"), Message.user("second"), turn]


def _digest(messages: Sequence[Message]) -> bytes:
    """Identifies messages in a key, which holds no long texts."""
    digest = hashlib.sha256()  # processors have instructions for it: 60 KB take 30 us
    for message in messages:
        pieces = [message.role.value, message.name or ""]
        pieces += [part.text if type(part) is TextPart else repr(part) for part in message.parts]
        for piece in pieces:
            data = piece.encode("utf-8", "surrogatepass")
            digest.update(b"%d:" % len(data) + data)
        digest.update(b";")
    return digest.digest()


def _pictured(message: Message) -> tuple[int, ...]:
    """How many images each of a message's parts has."""
    if not message.images:
        return ()
    return tuple(
        len(part.images) if type(part) is ToolResultPart else int(type(part) is ImagePart) for part in message.parts
    )


def _has_text(message: Message) -> bool:
    return any(isinstance(part, TextPart) and part.text for part in message.parts)


def _first_change(old: str, new: str) -> str:
    """Describes where two texts diverge, with a few words of each."""
    at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    start = max(0, at - _SHOWN // 2)
    return f"{old[start : at + _SHOWN]!r} becomes {new[start : at + _SHOWN]!r}"


@quick
@dataclass(frozen=True, slots=True)
class _Split:
    before: str  # up to the mark
    end: str  # the text that closes the marked turn
    after: str  # after the end of the marked turn
    rendered: Rendered
