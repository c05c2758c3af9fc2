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


def did_you_mean_option(given: str, known: Iterable[str]) -> str:
    """Returns the same for an option such as `--port` or `--port=1`; known short ones are not suggested.

    The dashes are not compared: they would make short names alike that are not.
    """
    names = {option.removeprefix("--") for option in known if option.startswith("--")}
    return did_you_mean(given.partition("=")[0].lstrip("-"), names).replace("mean ", "mean --", 1)
