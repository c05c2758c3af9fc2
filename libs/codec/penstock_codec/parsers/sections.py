"""Calls in a section of special tokens, each with its own: DeepSeek V3, V3.1 and R1, and Kimi K2."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from penstock_codec.chat import Tool
from penstock_codec.parsers.grammar import THINK, Grammar, Mark
from penstock_codec.tool_json import MAX_NAME_CHARS, CallText, Malformed, read_arguments

_SEPARATOR: Final = "<｜tool▁sep｜>"  # noqa: RUF001  (the model's own characters)
_ARGUMENTS: Final = "<|tool_call_argument_begin|>"
_FENCED: Final = re.compile(r"([^\n]+)\n```json\n(.*)\n```\s*", re.DOTALL)
_KIMI_ID: Final = re.compile(r"\s*((?:functions\.)?([^\s:]+):\d+)\s*")


def _read_deepseek(body: str, tools: Sequence[Tool]) -> Sequence[CallText] | Malformed:
    name, found, text = body.partition(_SEPARATOR)
    if not found:
        return Malformed("NOT_A_CALL" if body.strip() else "EMPTY")
    if name.strip() == "function" and (fenced := _FENCED.fullmatch(text)):  # as V3 and R1 write it
        name, text = fenced.groups()
    name = name.strip()
    if not name or len(name) > MAX_NAME_CHARS:
        return Malformed("NOT_A_CALL")
    arguments = read_arguments(text)
    return arguments if isinstance(arguments, Malformed) else (CallText(name, arguments),)


def _read_kimi(body: str, tools: Sequence[Tool]) -> Sequence[CallText] | Malformed:
    head, found, text = body.partition(_ARGUMENTS)
    names = _KIMI_ID.fullmatch(head)
    if not found or names is None or len(names[1]) > MAX_NAME_CHARS:
        return Malformed("NOT_A_CALL" if body.strip() else "EMPTY")
    arguments = read_arguments(text)
    # The id that the model wrote is kept: the template shows it again with the result.
    return arguments if isinstance(arguments, Malformed) else (CallText(names[2], arguments, names[1]),)


DEEPSEEK: Final = Grammar(
    "deepseek",
    {
        **THINK,
        "<｜tool▁calls▁begin｜>": Mark.AROUND,  # noqa: RUF001
        "<｜tool▁calls▁end｜>": Mark.AROUND,  # noqa: RUF001
        "<｜tool▁call▁begin｜>": Mark.OPEN_CALL,  # noqa: RUF001
        "<｜tool▁call▁end｜>": Mark.CLOSE_CALL,  # noqa: RUF001
        _SEPARATOR: Mark.INSIDE,
    },
    _read_deepseek,
    lambda template: "<｜tool▁call▁begin｜>" in template,  # noqa: RUF001
)
KIMI: Final = Grammar(
    "kimi",
    {
        **THINK,
        "<|tool_calls_section_begin|>": Mark.AROUND,
        "<|tool_calls_section_end|>": Mark.AROUND,
        "<|tool_call_begin|>": Mark.OPEN_CALL,
        "<|tool_call_end|>": Mark.CLOSE_CALL,
        _ARGUMENTS: Mark.INSIDE,
    },
    _read_kimi,
    lambda template: "<|tool_call_begin|>" in template,
)
