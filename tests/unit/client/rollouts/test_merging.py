"""Watches of several drivers as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

import pytest

from penstock.client import PenstockError, Unavailable
from penstock.client.rollouts import merging
from penstock.client.rollouts.merging import Watched, changes_of_all
from penstock.client.transport.rpc import Backoff
from penstock.client.types.results import RolloutChanges
from penstock.client.wire.results import summary
from penstock.driver.v1 import rollout_pb2

AWAY = Unavailable("Cannot reach d1", reason="TRANSPORT_UNAVAILABLE")


def rows(*names: str, complete: bool = False) -> RolloutChanges:
    """A message with rollouts: `e` and a number has ended and was created then, all others run."""
    found = []
    for name in names:
        row = rollout_pb2.RolloutSummary(rollout_id=name)
        if name.startswith("e"):
            row.create_time.FromSeconds(int(name[1:]))
            row.phase = rollout_pb2.PHASE_ENDED
        found.append(summary(row))
    return RolloutChanges(rollouts=tuple(found), complete=complete)


async def gone_of(drivers: "Drivers", ended_limit: int | None = None) -> set[str]:
    """What a watch names as gone, up to a rollout `last`."""
    gone: set[str] = set()
    async with aclosing(changes_of_all(drivers, ended_limit)) as changes:
        async for change in changes:
            gone.update(change.gone)
            if any(item.rollout_id == "last" for item in change.rollouts):
                break
    return gone


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


@pytest.mark.requirement("R118")
@pytest.mark.parametrize(
    ("ended_limit", "before", "after", "gone"),
    [
        (None, ["r1", "r2", "e1", "e2"], ["r2", "e2"], {"r1", "e1"}),
        (2, ["e3", "e2"], ["e4", "e3"], set()),  # e2 was left out: there are more than two
        (2, ["e4", "e3", "r9"], ["e4", "e2"], {"e3", "r9"}),  # e2 is older
        (2, ["e4", "e3"], ["e4"], {"e3"}),  # there is no second one any more
        (0, ["r1", "e1"], [], {"r1"}),
    ],
)
async def test_a_driver_that_was_away_says_what_it_has_no_more(
    monkeypatch: pytest.MonkeyPatch, ended_limit: int | None, before: list[str], after: list[str], gone: set[str]
) -> None:
    """What was deleted meanwhile is named; what its limit leaves out is not."""
    monkeypatch.setattr(Backoff, "next", lambda *_: 0.0)
    again = [rows(*after), RolloutChanges(complete=True), rows("last")]
    # A stream that breaks before its snapshot was complete.
    half: list[RolloutChanges | PenstockError] = [RolloutChanges(), rows(*after), AWAY]
    drivers = Drivers(d0=[rows("r0", complete=True)], d1=[rows(*before, complete=True), AWAY, *half, *again])
    assert await gone_of(drivers, ended_limit) == gone


@pytest.mark.requirement("R118")
async def test_rollouts_of_a_driver_that_left_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not those that it has at its new address."""
    monkeypatch.setattr(merging, "LOOK_AGAIN_S", 0.0)
    drivers = Drivers(d0=[], d1=[rows("r1", "r2", "e1", complete=True)])
    gone: set[str] = set()
    async with aclosing(changes_of_all(drivers)) as changes:
        async for change in changes:
            gone.update(change.gone)
            names = {item.rollout_id for item in change.rollouts}
            if "r1" in names and "d2" not in drivers.scripts:
                drivers.scripts["d2"] = [rows("r2", complete=True)]
            elif "r2" in names:
                del drivers.scripts["d1"]
            elif change.gone:
                break
    assert gone == {"r1", "e1"}


@pytest.mark.requirement("R118")
async def test_a_long_watch_remembers_a_bounded_number_of_ended_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest; all that run."""
    monkeypatch.setattr(merging, "_MOST_ENDED", 10)
    monkeypatch.setattr(merging, "_SLACK", 5)
    given = merging._Given(1000)
    given.taken(rows("r1", *(f"e{at}" for at in range(20))))
    for at in range(20, 60):
        given.taken(rows(f"e{at}"))
        assert len(given.ids) <= 16
    given.broke()
    assert set(given.ids) == {"r1", *(f"e{at}" for at in range(50, 60))}
