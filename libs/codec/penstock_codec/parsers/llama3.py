"""Llama 3.1 to 3.3, and 4: the turn is a JSON object with `name` and `parameters`, or has one behind <|python_tag|>.

Several are separated by semicolons. A turn that begins with a brace is held back while it may still be a call; if it
turns out to be none, it is the text that it is. A built-in tool's Python (`brave_search.call(...)`) is text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock_codec.chat import Tool
from penstock_codec.parsers.grammar import THINK, Grammar, Mark
from penstock_codec.tool_json import CallText, Malformed, parse_calls

_KEYS: Final = ('"name"', '"parameters"', '"type"')


def _read(body: str, tools: Sequence[Tool]) -> Sequence[CallText] | Malformed:
    return parse_calls(body, separator=";", arguments="parameters", constants={"type": '"function"'})


def _may_begin_bare(text: str) -> bool:
    key = text[1:].lstrip()
    return any(key.startswith(known) or known.startswith(key) for known in _KEYS)


def _shown_by(template: str) -> bool:
    headers = ("<|start_header_id|>", "<|header_start|>")  # of Llama 3 and of Llama 4
    return any(text in template for text in headers) and "ipython" in template and '"parameters"' in template


LLAMA3: Final = Grammar(
    "llama3",
    {**THINK, "<|python_tag|>": Mark.OPEN_CALL},
    _read,
    _shown_by,
    ends_with_turn=True,
    may_begin_bare=_may_begin_bare,
    turn_ends=("<|eom_id|>",),
)
