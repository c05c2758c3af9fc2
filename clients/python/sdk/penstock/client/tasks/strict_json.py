"""Untrusted JSON, read strictly: it has the values that every JSON reader sees; duplicate keys and NaN are refused.

Invariant: what has more values than allowed, or nests them deeper, is refused before any of them takes up memory.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

_TOKEN: Final = re.compile(rb'"[^"]*"?|[^\s"\[\]{},:]+|[\[\]{}:]')
"""A text, a number or word, or what opens, closes or names a value; in JSON whose texts have no escaped quotes."""
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")


class InvalidJson(Exception):
    """The text cannot be read; the message says why, with line and column where they are known."""


def read_json(text: bytes, most_values: int, most_depth: int) -> tuple[Any, str | None]:
    """Returns the value of a JSON text, and a key that is twice in one of its objects; None = there is none.

    Args:
        text: in UTF-8, at most as large as the caller read.
        most_values: values that it may have, keys not counted.
        most_depth: how deep lists and objects may be nested.

    Raises:
        InvalidJson: it is no JSON in UTF-8, or has a number that is too large, half a surrogate pair, or too much.
    """
    _check_size(text, most_values, most_depth)
    twice: list[str] = []

    def pairs(found: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(found)
        if len(made) < len(found) and not twice:
            counts = Counter(key for key, _ in found)
            twice.append(next(key for key, count in counts.items() if count > 1))
        return made

    try:
        decoded = text.decode("utf-8-sig")
        value = json.loads(decoded, object_pairs_hook=pairs, parse_constant=_constant, parse_float=_number)
        if _SURROGATE.search(text):  # a whole pair is one letter; half of one is in no text of any protocol
            json.dumps([value, twice], ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise InvalidJson(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    except UnicodeEncodeError:
        raise InvalidJson("has half a surrogate pair in a text") from None
    except ValueError:  # also a whole number with more digits than Python reads
        raise InvalidJson("is not JSON in UTF-8, or has a number with too many digits") from None
    return value, twice[0] if twice else None


def _check_size(text: bytes, most_values: int, most_depth: int) -> None:
    values = depth = 0
    # Without escapes a text ends at the next quote, so that each token is found in one step.
    for token in _TOKEN.finditer(text.replace(b"\\\\", b"").replace(b'\\"', b"")):
        first = token[0][:1]
        depth += (first in b"[{") - (first in b"]}")
        values += -1 if first == b":" else first not in b"]}"
        if values > most_values + 1 or depth > most_depth:  # a key is counted until its colon
            break
    if values > most_values or depth > most_depth:
        raise InvalidJson(f"has more than {most_values} values, or nests them deeper than {most_depth}")


def _constant(name: str) -> float:
    raise InvalidJson(f"{name} is not JSON")


def _number(text: str) -> float:
    found = float(text)
    if found in (float("inf"), float("-inf")):
        raise InvalidJson(f"the number {text[:50]} is too large")
    return found
