"""Mistral: [TOOL_CALLS] with a JSON list of calls, or, in newer models, with name[ARGS]{...} for each call.

Their templates want ids of exactly nine letters and digits. An id that the model sampled itself is kept, since the
results will refer to it.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Sequence
from typing import Final

from penstock_codec.chat import Tool
from penstock_codec.parsers.grammar import THINK, Grammar, Mark
from penstock_codec.tool_json import CallText, Malformed, parse_calls, read_arguments

_ALPHABET: Final = string.ascii_letters + string.digits
# The name, an id in some releases, then the arguments; the newest leave [ARGS] out. No repetition here ever backtracks:
# a body may be a million spaces.
_CALL: Final = re.compile(
    r"\s*+([^\[\]{}\s]{1,256}+)\s*+(?:\[CALL_ID\]\s*+([A-Za-z0-9]{9})\s*+)?(?:\[ARGS\])?\s*+(?=\{)"
)


def _new_call_id() -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


def _read(body: str, tools: Sequence[Tool]) -> Sequence[CallText] | Malformed:
    if not body.strip() or body.lstrip().startswith(("[", "{")):
        return parse_calls(body, separator=",", brackets=True, identifier="id")
    head = _CALL.match(body)
    if head is None:
        return Malformed("NOT_A_CALL")
    arguments = read_arguments(body[head.end() :])
    if isinstance(arguments, Malformed):
        return arguments
    return (CallText(head[1], arguments, head[2] or ""),)


def _shown_by(template: str) -> bool:
    return "[TOOL_CALLS]" in template


MISTRAL: Final = Grammar(
    "mistral",
    {
        **THINK,
        "[THINK]": Mark.OPEN_THINK,
        "[/THINK]": Mark.CLOSE_THINK,
        "[TOOL_CALLS]": Mark.OPEN_CALL,
        "[CALL_ID]": Mark.INSIDE,
        "[ARGS]": Mark.INSIDE,
    },
    _read,
    _shown_by,
    ends_with_turn=True,
    new_call_id=_new_call_id,
)
