"""Lists of several services as one."""

from collections.abc import AsyncGenerator, AsyncIterator
from datetime import UTC, datetime

import pytest

from penstock.client import NotFound, PenstockError, Unavailable
from penstock.client.transport.lists import newest_first, one_after_another

AWAY = Unavailable("Cannot reach d1", reason="TRANSPORT_UNAVAILABLE")


def at(second: int) -> datetime:
    return datetime.fromtimestamp(second, UTC)


async def listed(*items: int, error: PenstockError | None = None) -> AsyncGenerator[int, None]:
    for item in items:
        yield item
    if error is not None:
        raise error


async def gathered(items: AsyncIterator[int], into: list[int]) -> None:
    async for item in items:
        into.append(item)  # noqa: PERF401 - it has what came before an error


async def test_lists_are_merged_newest_first() -> None:
    found: list[int] = []
    await gathered(newest_first([listed(9, 4, 1), listed(), listed(8, 5, 2)], at), found)
    assert found == [9, 8, 5, 4, 2, 1]


async def test_a_list_without_a_lost_driver_ends_with_its_error() -> None:
    """Everything that the others have comes first, also when the driver is lost in the middle."""
    found: list[int] = []
    with pytest.raises(Unavailable, match="d1"):
        await gathered(newest_first([listed(9, 1), listed(8, error=AWAY)], at), found)
    assert found == [9, 8, 1]
    found = []
    with pytest.raises(Unavailable, match="d1"):
        await gathered(one_after_another([listed(error=AWAY), listed(7)]), found)
    assert found == [7]


async def test_another_error_of_a_driver_ends_a_list_at_once() -> None:
    with pytest.raises(NotFound):
        await gathered(newest_first([listed(9), listed(error=NotFound("no"))], at), [])
