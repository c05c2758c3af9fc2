"""Hermes, Qwen 2.5 and Qwen3: one JSON object with `name` and `arguments` in each <tool_call>."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock_codec.chat import Tool
from penstock_codec.parsers.grammar import THINK, Grammar, Mark
from penstock_codec.tool_json import CallText, Malformed, parse_call

TAGS: Final = {"<tool_call>": Mark.OPEN_CALL, "</tool_call>": Mark.CLOSE_CALL}


def _read(body: str, tools: Sequence[Tool]) -> Sequence[CallText] | Malformed:
    call = parse_call(body)
    return call if isinstance(call, Malformed) else (call,)


def _shown_by(template: str) -> bool:
    # `<function-name>` is in the instructions of Qwen 2.5, Qwen3 and Granite 4; `<function=` is Qwen3-Coder's tag.
    others = ("<function=", "<arg_key>", "<invoke", "<tool_calls>")
    return all(text in template for text in (*TAGS, "arguments")) and not any(text in template for text in others)


HERMES: Final = Grammar("hermes", {**THINK, **TAGS}, _read, _shown_by)
