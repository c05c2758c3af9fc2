"""Lists of several services as one. What a service that is away has is never left out without a word."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from typing import Final, TypeVar

from penstock.client.errors import DeadlineExceeded, PenstockError, Unavailable

T = TypeVar("T")

_BEFORE_ALL: Final = datetime.min.replace(tzinfo=UTC)
_AWAY: Final = (Unavailable, DeadlineExceeded)


async def newest_first(
    lists: Sequence[AsyncIterator[T]], created: Callable[[T], datetime | None]
) -> AsyncGenerator[T, None]:
    """Yields the items of several lists, each newest first, as one list, newest first.

    Raises:
        Unavailable: a service was away. It is raised after the items of all others.
    """
    away: list[PenstockError] = []
    heads: dict[int, T] = {}

    async def advance(at: int) -> None:
        try:
            heads[at] = await anext(lists[at])
        except StopAsyncIteration:
            heads.pop(at, None)
        except _AWAY as error:
            heads.pop(at, None)
            away.append(error)

    await asyncio.gather(*(advance(at) for at in range(len(lists))))
    while heads:
        at = max(heads, key=lambda at: (created(heads[at]) or _BEFORE_ALL, -at))
        yield heads[at]
        await advance(at)
    _raise_first(away)


async def one_after_another(lists: Sequence[AsyncIterator[T]]) -> AsyncGenerator[T, None]:
    """Yields the items of several lists, list by list. Raises as `newest_first`."""
    away: list[PenstockError] = []
    for items in lists:
        try:
            async for item in items:
                yield item
        except _AWAY as error:
            away.append(error)
    _raise_first(away)


def _raise_first(errors: Sequence[PenstockError]) -> None:
    if errors:
        raise errors[0]
