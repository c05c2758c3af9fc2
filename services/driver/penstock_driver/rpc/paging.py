"""Pages of lists: sizes and tokens, checked."""

from __future__ import annotations

from typing import Final

from penstock_chassis.errors import InvalidArgument, Violation

DEFAULT: Final = 100
MOST: Final = 1000


def page_size(asked: int) -> int:
    """0 is the default, more than the most is the most, negative is refused."""
    if asked < 0:
        raise InvalidArgument(
            "page_size must not be negative", reason="PAGE_INVALID", violations=[Violation("page_size", "negative")]
        )
    return min(asked, MOST) or DEFAULT


def page_token(token: str) -> int:
    """The position that a token of ours stands for; 0 for none."""
    if not token:
        return 0
    if not token.isascii() or not token.isdigit() or len(token) > 18:
        raise InvalidArgument(
            "page_token is not one that this service gave",
            reason="PAGE_INVALID",
            violations=[Violation("page_token", "unknown")],
        )
    return int(token)
