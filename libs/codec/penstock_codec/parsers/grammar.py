"""A grammar: a family's markup, the meaning of each piece, and how the body of a call is read.

A grammar is data for the machine (machine.py). Each family of models has a module with its own; `registry.py` lists
them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, TypeAlias

from penstock_codec.chat import Tool
from penstock_codec.tool_json import CallText, Malformed


class Mark(Enum):
    """The meaning of a piece of markup."""

    OPEN_THINK = "open_think"
    CLOSE_THINK = "close_think"
    OPEN_CALL = "open_call"
    CLOSE_CALL = "close_call"
    AROUND = "around"  # wraps calls and has no meaning itself
    INSIDE = "inside"  # parts of a call's body


ReadCalls: TypeAlias = Callable[[str, Sequence[Tool]], Sequence[CallText] | Malformed]
"""Parses the body of a call, without the markup at both ends, to its calls. Never raises."""


def new_call_id() -> str:
    """A fresh tool-call id of 128 random bits."""
    return "call_" + secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A named format of completions."""

    name: str
    marks: Mapping[str, Mark]
    """Its markup, by text."""
    read_calls: ReadCalls = lambda body, tools: Malformed("NOT_A_CALL")
    shown_by: Callable[[str], bool] = lambda template: False
    """Whether a chat template writes calls as this grammar reads them."""
    is_json: bool = True
    """A call's body is JSON: markup inside its strings is content."""
    ends_with_turn: bool = False
    """Nothing closes a call but the next call or the end of the turn."""
    may_begin_bare: Callable[[str], bool] | None = None
    """Whether a turn with this beginning may be a bare call; asked until it returns False or after 64 characters."""
    turn_ends: tuple[str, ...] = ()
    """Tokens that may end a turn besides the one that the template shows after a plain answer."""
    part_ends: tuple[str, ...] = ()
    """Tokens with which templates close a turn, and a model a part of its current turn."""
    own_markup: bool = False
    """Its markup consists of control tokens without another meaning."""
    turn_openings: tuple[str, ...] = ()
    """For families that close no turn: the tokens that open the next turn and so end the previous one."""
    new_call_id: Callable[[], str] = new_call_id
    makes_calls: bool = True
    """Whether calls become calls; otherwise they stay text."""

    def without_calls(self) -> Grammar:
        """Returns the grammar of an answer that may call nothing: only reasoning is kept apart from text."""
        if self.own_markup:  # which parts an answer into its messages, too
            return replace(self, makes_calls=False)
        thinking = {text: mark for text, mark in self.marks.items() if mark in (Mark.OPEN_THINK, Mark.CLOSE_THINK)}
        return replace(self, marks=thinking, may_begin_bare=None, makes_calls=False)


THINK: Final[Mapping[str, Mark]] = {"<think>": Mark.OPEN_THINK, "</think>": Mark.CLOSE_THINK}
"""Reasoning markup of most families."""
