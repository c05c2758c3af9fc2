"""Ids that name the service which made them: `KIND.HOME.RANDOM`, for example `sb.n1.` and 32 hexadecimal digits.

HOME is the maker's `name` setting. Rollouts of a group are `GROUP_ID-INDEX`. Ids of another form, those that a client
chose and those of older versions, have no home. Neither have ids of calls and sessions of a gate: requests about them
name the rollout.
"""

import re
from typing import Final

NAME: Final = r"[a-z0-9][a-z0-9-]{0,31}"
"""A service's name, as a regular expression."""
MAKERS: Final = {
    "r": "driver",
    "g": "driver",
    "t": "driver",
    "sb": "sandbox",
    "ss": "sandbox",
}
"""The kinds of ids with a home, and the service that makes each."""

_FORM: Final = re.compile(rf"({'|'.join(MAKERS)})\.({NAME})\.[0-9a-f]{{32}}(?:-[0-9]+)?")


def make(kind: str, home: str, random: str) -> str:
    """Returns a new id.

    Args:
        kind: a key of MAKERS.
        home: the maker's name.
        random: 32 hexadecimal digits, used once.
    """
    return f"{kind}.{home}.{random}"


def home_of(value: str) -> tuple[str, str] | None:
    """Returns the service that made an id ("driver", "sandbox") and its name; None = it names none."""
    found = _FORM.fullmatch(value)
    return None if found is None else (MAKERS[found[1]], found[2])
