"""Watches of several drivers as one. What a driver that is away has is never left out without a word."""

import asyncio
import heapq
import math
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final

from penstock.client.errors import DeadlineExceeded, PenstockError, Unavailable
from penstock.client.transport.rpc import Backoff
from penstock.client.types.results import RolloutChanges

LOOK_AGAIN_S: Final = 2.0
"""How often a watch looks for new drivers."""
_ENDED: Final = 1000
"""How many ended rollouts a driver sends at first, unless it is asked for another number."""
_MOST_ENDED: Final = 10_000
"""Of how many ended rollouts of a driver the ids are remembered: the most that it sends at first."""
_SLACK: Final = 1000
_AWAY: Final = (Unavailable, DeadlineExceeded)


@dataclass(frozen=True, slots=True)
class Watched:
    """A driver to watch: its address, which identifies it; its name, for people; and its changes."""

    address: str
    name: str
    changes: Callable[[], AsyncGenerator[RolloutChanges, None]]


async def changes_of_all(
    drivers: Callable[[], Awaitable[Sequence[Watched]]], ended_limit: int | None = None
) -> AsyncGenerator[RolloutChanges, None]:
    """Yields the changes of all drivers, those that come later included. A driver that goes away is watched again.

    `away` of each message names the drivers that cannot be watched now. `complete` is true from when each driver that
    can be watched has sent all that it had. `gone` names also what a driver that was away has no more, and all that
    was of a driver that is none any more.

    Args:
        drivers: which there are now.
        ended_limit: how many ended rollouts each driver was asked for; None = the driver's default.

    Raises:
        Unavailable: the only driver, or every one, went away.
        PenstockError: a driver's error.
    """
    # None: it is no driver any more.
    queue: asyncio.Queue[tuple[str, RolloutChanges | PenstockError | None]] = asyncio.Queue(64)
    names: dict[str, str] = {}
    pumps: dict[str, asyncio.Task[None]] = {}
    broken: dict[str, PenstockError] = {}
    complete: set[str] = set()
    given: defaultdict[str, _Given] = defaultdict(lambda: _Given(_ENDED if ended_limit is None else ended_limit))

    def nowhere(rollout_ids: Iterable[str]) -> tuple[str, ...]:
        # A driver that changed its address is a new one here.
        return tuple(item for item in rollout_ids if not any(item in other for other in given.values()))

    async def pump(driver: Watched) -> None:
        backoff = Backoff()
        while True:
            error: PenstockError = Unavailable(f"The driver {driver.name} ended the stream", reason="STREAM_ENDED")
            try:
                async with aclosing(driver.changes()) as messages:
                    async for message in messages:
                        backoff.reset()
                        await queue.put((driver.address, message))
            except PenstockError as failure:
                error = failure
            await queue.put((driver.address, error))
            await asyncio.sleep(backoff.next(error))

    async def follow() -> None:
        while True:
            for driver in found:
                if driver.address not in pumps:
                    names[driver.address] = driver.name or driver.address
                    pumps[driver.address] = asyncio.create_task(pump(driver), name="penstock-watch")
            for address in pumps.keys() - {driver.address for driver in found}:
                pumps.pop(address).cancel()
                names.pop(address, None)
                broken.pop(address, None)
                complete.discard(address)
                await queue.put((address, None))
            await asyncio.sleep(LOOK_AGAIN_S)
            try:
                found[:] = await drivers()
            except PenstockError:
                continue  # a driver's own stream says more

    found = list(await drivers())
    following = asyncio.create_task(follow(), name="penstock-watch-drivers")
    try:
        while True:
            address, got = await queue.get()
            if got is None:
                if not (gone := nowhere(given.pop(address).ids if address in given else ())):
                    continue
                message = RolloutChanges(gone=gone)
            elif address not in names:
                continue  # it is no driver any more
            elif isinstance(got, PenstockError):
                broken[address] = got
                given[address].broke()
                if not isinstance(got, _AWAY) or len(broken) == len(names):
                    raise got
                message = RolloutChanges()
            else:
                broken.pop(address, None)
                if got.complete:
                    complete.add(address)
                message = replace(got, gone=got.gone + nowhere(given[address].taken(got)))
            yield replace(
                message,
                complete=names.keys() <= complete | broken.keys(),
                away=tuple(sorted(names[item] for item in broken)),
            )
    finally:
        following.cancel()
        await asyncio.wait([following])
        for task in pumps.values():
            task.cancel()
        if pumps:
            await asyncio.wait(pumps.values())


class _Given:
    """The rollouts that a driver's watch has given: what it has no more after a broken stream, it does not say itself.

    Invariant: it holds the ids of running rollouts, and of no more than `_MOST_ENDED + _SLACK` ended ones.
    """

    def __init__(self, ended_limit: int) -> None:
        self._ended_limit = ended_limit
        # Of this stream, and of those before it what this one has not sent: when each was created, if it has ended.
        self._now: dict[str, float | None] = {}
        self._earlier: dict[str, float | None] = {}
        self._most = _MOST_ENDED + _SLACK

    def __contains__(self, rollout_id: str) -> bool:
        return rollout_id in self._now or rollout_id in self._earlier

    @property
    def ids(self) -> Sequence[str]:
        """All of them."""
        return [*self._now, *self._earlier]

    def broke(self) -> None:
        """The stream broke: the next one begins with what there is then."""
        self._earlier = _newest(self._earlier | self._now)
        self._now = {}

    def taken(self, change: RolloutChanges) -> Sequence[str]:
        """Notes a message; returns the rollouts that the driver had before the stream broke, and has no more."""
        for item in change.rollouts:
            self._earlier.pop(item.rollout_id, None)
            created = 0.0 if item.create_time is None else item.create_time.timestamp()
            self._now[item.rollout_id] = created if item.ended else None
        for rollout_id in change.gone:
            self._earlier.pop(rollout_id, None)
            self._now.pop(rollout_id, None)
        lost = self._lost() if change.complete and self._earlier else []
        if len(self._now) > self._most:
            self._now = _newest(self._now)
            self._most = max(_MOST_ENDED, len(self._now)) + _SLACK
        return lost

    def _lost(self) -> Sequence[str]:
        """Returns the earlier ones that a whole snapshot would have; the others stay."""
        ended = [created for created in self._now.values() if created is not None]
        # With as many ended ones as were asked for, older ones were left out.
        since = -math.inf if len(ended) < self._ended_limit else min(ended, default=math.inf)
        # One that ran is in every snapshot while it runs. If it ended and was left out, it would seem to run for ever.
        lost = [name for name, created in self._earlier.items() if created is None or created > since]
        for name in lost:
            del self._earlier[name]
        self._now.update(self._earlier)
        self._earlier = {}
        return lost


def _newest(known: Mapping[str, float | None]) -> dict[str, float | None]:
    """Leaves out the oldest ended ones."""
    ended = [(created, name) for name, created in known.items() if created is not None]
    kept = {name for _, name in heapq.nlargest(_MOST_ENDED, ended)}
    return {name: created for name, created in known.items() if created is None or name in kept}
