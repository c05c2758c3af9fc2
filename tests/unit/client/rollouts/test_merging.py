"""Lists and watches of several drivers as one."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from functools import partial

import pytest

from penstock.client import NotFound, PenstockError, Unavailable
from penstock.client.rollouts.merging import Watched, changes_of_all, newest_first, one_after_another
from penstock.client.transport.rpc import Backoff
from penstock.client.types.results import RolloutChanges

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


class Drivers:
    """Drivers whose watches follow scripts: messages, or an error that breaks the stream."""

    def __init__(self, **scripts: Sequence[RolloutChanges | PenstockError]) -> None:
        self.scripts = {name: list(script) for name, script in scripts.items()}

    async def __call__(self) -> list[Watched]:
        return [Watched(name, name, partial(self._changes, name)) for name in self.scripts]

    async def _changes(self, name: str) -> AsyncGenerator[RolloutChanges, None]:
        script = self.scripts[name]
        while script:
            item = script.pop(0)
            if isinstance(item, PenstockError):
                raise item
            yield item
        await asyncio.Event().wait()


async def test_a_watch_is_complete_when_each_driver_was() -> None:
    whole = RolloutChanges(complete=True)
    drivers = Drivers(d0=[whole], d1=[RolloutChanges(gone=("r1",)), whole])
    seen = []
    async with aclosing(changes_of_all(drivers)) as changes:
        async for change in changes:
            seen.append(change)
            if change.complete:
                break
    assert len(seen) == 3
    assert not any(change.away for change in seen)


async def test_a_watch_names_a_lost_driver_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backoff, "next", lambda *_: 0.0)
    drivers = Drivers(d0=[RolloutChanges(complete=True)], d1=[AWAY, RolloutChanges(gone=("r1",), complete=True)])
    away = []
    async with aclosing(changes_of_all(drivers)) as changes:
        async for change in changes:
            away.append(change.away)
            if change.gone:
                assert change.complete
                break
    assert ("d1",) in away
    assert away[-1] == ()


async def test_a_watch_ends_when_every_driver_is_lost() -> None:
    with pytest.raises(Unavailable):
        async for _ in changes_of_all(Drivers(d0=[AWAY], d1=[AWAY])):
            pass
