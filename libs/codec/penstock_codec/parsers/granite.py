"""Granite 3: <|tool_call|>, then a JSON list of objects with `name` and `arguments`, to the end of the turn.

Granite 4 writes calls as Hermes does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock_codec.chat import Tool
from penstock_codec.parsers.grammar import THINK, Grammar, Mark
from penstock_codec.tool_json import CallText, Malformed, parse_calls


def _read(body: str, tools: Sequence[Tool]) -> Sequence[CallText] | Malformed:
    return parse_calls(body, separator=",", brackets=True)


def _shown_by(template: str) -> bool:
    return "<|tool_call|>" in template and "<|start_of_role|>" in template


GRANITE: Final = Grammar("granite", {**THINK, "<|tool_call|>": Mark.OPEN_CALL}, _read, _shown_by, ends_with_turn=True)
