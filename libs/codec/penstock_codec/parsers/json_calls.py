"""Families whose calls are JSON objects with a name and arguments: Hermes, Granite 3, Llama."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock_codec.chat import Tool
from penstock_codec.parsers.grammar import THINK, Grammar, Mark
from penstock_codec.tool_json import CallText, Malformed, parse_call, parse_calls

TAGS: Final = {"<tool_call>": Mark.OPEN_CALL, "</tool_call>": Mark.CLOSE_CALL}
_LLAMA3_KEYS: Final = ('"name"', '"parameters"', '"type"')


def _read_hermes(body: str, tools: Sequence[Tool]) -> Sequence[CallText] | Malformed:
    call = parse_call(body)
    return call if isinstance(call, Malformed) else (call,)


def _shows_hermes(template: str) -> bool:
    # `<function-name>` is in the instructions of Qwen 2.5, Qwen3 and Granite 4; `<function=` is Qwen3-Coder's tag.
    others = ("<function=", "<arg_key>", "<invoke", "<tool_calls>")
    return all(text in template for text in (*TAGS, "arguments")) and not any(text in template for text in others)


HERMES: Final = Grammar("hermes", {**THINK, **TAGS}, _read_hermes, _shows_hermes)
"""Hermes, Qwen 2.5, Qwen3 and Granite 4: one object in each <tool_call>."""


def _read_granite(body: str, tools: Sequence[Tool]) -> Sequence[CallText] | Malformed:
    return parse_calls(body, separator=",", brackets=True)


def _shows_granite(template: str) -> bool:
    return "<|tool_call|>" in template and "<|start_of_role|>" in template


GRANITE: Final = Grammar(
    "granite", {**THINK, "<|tool_call|>": Mark.OPEN_CALL}, _read_granite, _shows_granite, ends_with_turn=True
)
"""Granite 3: <|tool_call|>, then a JSON list of objects to the end of the turn."""


def _read_llama3(body: str, tools: Sequence[Tool]) -> Sequence[CallText] | Malformed:
    return parse_calls(body, separator=";", arguments="parameters", constants={"type": '"function"'})


def _may_begin_bare(text: str) -> bool:
    key = text[1:].lstrip()
    return any(key.startswith(known) or known.startswith(key) for known in _LLAMA3_KEYS)


def _shows_llama3(template: str) -> bool:
    headers = ("<|start_header_id|>", "<|header_start|>")  # of Llama 3 and of Llama 4
    return any(text in template for text in headers) and "ipython" in template and '"parameters"' in template


LLAMA3: Final = Grammar(
    "llama3",
    {**THINK, "<|python_tag|>": Mark.OPEN_CALL},
    _read_llama3,
    _shows_llama3,
    ends_with_turn=True,
    may_begin_bare=_may_begin_bare,
    turn_ends=("<|eom_id|>",),
)
"""Llama 3.1 to 3.3, and 4: the turn is an object with `name` and `parameters`, or has one after <|python_tag|>.

Several are separated by semicolons. A turn that begins with a brace is held back while it may still be a call; if it
turns out not to be one, it is text. A built-in tool's Python (`brave_search.call(...)`) is text.
"""
