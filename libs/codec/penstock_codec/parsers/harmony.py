"""gpt-oss: a completion is a sequence of messages in channels, each with a header.

`<|channel|>analysis<|message|>` is reasoning, `final` the answer, `commentary` text before a call, and a header with
`to=functions.NAME` a call, whose JSON ends with `<|call|>`. `<|end|>` ends a message that another one follows,
`<|return|>` the turn. The prompt began the first header: its `<|start|>assistant` is not sampled.

The markup consists of control tokens, found by their ids. A message without such a header, or for a tool that is not
the request's (`python`, `browser`), stays text, header included.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from penstock_codec.chat import FinishReason
from penstock_codec.parsers.grammar import Grammar, Mark
from penstock_codec.parsers.scanner import Markup
from penstock_codec.parsers.state_machine import CompletionParser, Delta, ParsedCompletion, State
from penstock_codec.tool_json import MAX_NAME_CHARS, CallText, Malformed, read_arguments

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_END, _RETURN, _CALL = "<|end|>", "<|return|>", "<|call|>"
_FUNCTIONS: Final = "functions."
_HEADER_CHARS: Final = 512
# No repetition here ever backtracks: a completion may have thousands of headers made of spaces.
_TO: Final = r"(?:\s++to=([^\s<]++))?"
_HEADER: Final = re.compile(
    rf"(?:<\|start\|>assistant)?{_TO}\s*+"
    rf"(?:<\|channel\|>\s*+(\w++){_TO}\s*+(?:<\|constrain\|>\s*+)?\w*+\s*+)?"
)


def _shown_by(template: str) -> bool:
    return all(text in template for text in (_CHANNEL, _CALL, _FUNCTIONS))


HARMONY: Final = Grammar(
    "harmony",
    {
        _START: Mark.INSIDE,
        _CHANNEL: Mark.INSIDE,
        _CONSTRAIN: Mark.INSIDE,
        _MESSAGE: Mark.INSIDE,
        _END: Mark.INSIDE,
        _RETURN: Mark.INSIDE,
        _CALL: Mark.CLOSE_CALL,
    },
    shown_by=_shown_by,
    ends_with_turn=True,
    turn_ends=(_CALL, _RETURN),
    part_ends=(_END,),
    own_markup=True,
)


class HarmonyParser(CompletionParser):
    """Parses one completion in channels."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header: list[str] | None = []  # text of the current header; None: there is none
        self._header_chars = 0
        self._name = ""  # of the current call

    def finish(self, reason: FinishReason | None = None) -> tuple[list[Delta], ParsedCompletion]:
        """As the machine's; an unfinished header is text."""
        self._flush()
        self._give_up()
        return super().finish(reason)

    def _take(self, event: Markup | str) -> None:
        mark = event.text if isinstance(event, Markup) else ""
        if self._header is not None:
            self._take_in_header(event, mark)
        elif mark in (_START, _CHANNEL):
            self._end_message("")
            self._open_header(mark)
        elif mark in (_END, _RETURN, _CALL):
            self._end_message(mark)
        elif self._state is State.CALL:
            self._take_in_call(event)
        else:
            self._show(event if isinstance(event, str) else event.text)

    def _take_in_header(self, event: Markup | str, mark: str) -> None:
        if mark == _MESSAGE:
            self._open_message()
        elif mark in (_START, _END, _RETURN, _CALL):
            self._give_up()
            self._take(event)
        else:
            assert self._header is not None
            text = event if isinstance(event, str) else event.text
            self._header.append(text)
            self._header_chars += len(text)
            if self._header_chars > _HEADER_CHARS:
                self._give_up()

    def _open_header(self, mark: str) -> None:
        self._header, self._header_chars = [mark], len(mark)

    def _give_up(self) -> None:
        """Turns what looked like a header into text."""
        if self._header is not None:
            text, self._header = "".join(self._header), None
            self._show(text)

    def _open_message(self) -> None:
        assert self._header is not None
        text, self._header = "".join(self._header), None
        found = _HEADER.fullmatch(text)
        if found is None:
            self._show(text + _MESSAGE)
            return
        recipient, channel = found[1] or found[3], found[2]
        if recipient is not None:
            self._name = recipient.removeprefix(_FUNCTIONS) if recipient.startswith(_FUNCTIONS) else ""
            self._open_call(text + _MESSAGE)
        elif channel == "analysis":
            self._state, self._trim = State.THINK, True
        elif channel not in ("final", "commentary", None):
            self._show(text + _MESSAGE)

    def _end_message(self, mark: str) -> None:
        """Ends the message at `mark`, or without one where another header follows."""
        if self._state is State.CALL:
            if mark == _CALL:
                self._close_call(mark)
            else:
                self._reject("UNCLOSED", mark)
        elif self._state is State.CONTENT:
            self._emit_piece("".join(self._space))  # an answer is everything between its marks, trailing space included
        self._end_piece()
        self._state = State.CONTENT

    def _read_call(self, body: str) -> Sequence[CallText] | Malformed:
        if not self._grammar.makes_calls or not self._name or len(self._name) > MAX_NAME_CHARS:
            return Malformed("NOT_A_CALL")
        arguments = read_arguments(body)
        return arguments if isinstance(arguments, Malformed) else (CallText(self._name, arguments),)
