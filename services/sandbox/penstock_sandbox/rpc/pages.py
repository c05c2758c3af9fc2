"""Pages of a list that is in memory: the token names the last item told, so that changes in between lose nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock_sandbox.rpc.convert import page_size, refuse

Item = TypeVar("Item")


def page(
    items: Sequence[Item], key: Callable[[Item], tuple[float, str]], asked: int, token: str
) -> tuple[Sequence[Item], str]:
    """The page after ``token`` of ``items``, which are sorted by ``key`` from the greatest down, and the next token."""
    after = _parse(token)
    left = [item for item in items if key(item) < after] if after is not None else items
    shown = left[: page_size(asked)]
    return shown, _format(key(shown[-1])) if len(left) > len(shown) else ""


def _format(key: tuple[float, str]) -> str:
    return f"{key[0].hex()}~{key[1]}"


def _parse(token: str) -> tuple[float, str] | None:
    if not token:
        return None
    number, _, name = token.partition("~")
    try:
        return float.fromhex(number), name
    except ValueError:
        raise refuse("page_token", "is not one of this service's") from None


def token_of(name: str) -> str:
    """The token of a page that begins after a file's name, which may be any bytes; empty for an empty name."""
    return os.fsencode(name).hex()


def name_in(token: str) -> str:
    """The name in a token. Raises InvalidArgument."""
    try:
        return os.fsdecode(bytes.fromhex(token))
    except ValueError:
        raise refuse("page_token", "is not one of this service's") from None
