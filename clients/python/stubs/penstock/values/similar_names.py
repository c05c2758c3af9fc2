"""Suggests a known name where an unknown one was given."""

import difflib
from collections.abc import Iterable
from typing import Final

_MOST: Final = 200
"""Maximum characters that are compared: the time is that of the product of both lengths."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the rest of a message about an unknown name: "; did you mean NAME?" where a known one is similar."""
    close = difflib.get_close_matches(name[:_MOST], sorted(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
