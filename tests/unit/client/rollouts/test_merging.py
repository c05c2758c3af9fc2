"""Watches of several drivers as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

import pytest

from penstock.client import PenstockError, Unavailable
from penstock.client.rollouts.merging import Watched, changes_of_all
from penstock.client.transport.rpc import Backoff
from penstock.client.types.results import RolloutChanges

AWAY = Unavailable("Cannot reach d1", reason="TRANSPORT_UNAVAILABLE")


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
