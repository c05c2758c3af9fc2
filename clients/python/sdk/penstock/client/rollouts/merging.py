"""Watches of several drivers as one. What a driver that is away has is never left out without a word."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final

from penstock.client.errors import DeadlineExceeded, PenstockError, Unavailable
from penstock.client.transport.rpc import Backoff
from penstock.client.types.results import RolloutChanges

LOOK_AGAIN_S: Final = 2.0
"""How often a watch looks for new drivers."""
_AWAY: Final = (Unavailable, DeadlineExceeded)


@dataclass(frozen=True, slots=True)
class Watched:
    """A driver to watch: its address, which identifies it; its name, for people; and its changes."""

    address: str
    name: str
    changes: Callable[[], AsyncGenerator[RolloutChanges, None]]


async def changes_of_all(drivers: Callable[[], Awaitable[Sequence[Watched]]]) -> AsyncGenerator[RolloutChanges, None]:
    """Yields the changes of all drivers, those that come later included. A driver that goes away is watched again.

    `away` of each message names the drivers that cannot be watched now. `complete` is true from when each driver that
    can be watched has sent all that it had.

    Raises:
        Unavailable: the only driver, or every one, went away.
        PenstockError: a driver's error.
    """
    queue: asyncio.Queue[tuple[str, RolloutChanges | PenstockError]] = asyncio.Queue(64)
    names: dict[str, str] = {}
    pumps: dict[str, asyncio.Task[None]] = {}
    broken: dict[str, PenstockError] = {}
    complete: set[str] = set()

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
            if address not in names:
                continue  # it is no driver any more
            if isinstance(got, PenstockError):
                broken[address] = got
                if not isinstance(got, _AWAY) or len(broken) == len(names):
                    raise got
                message = RolloutChanges()
            else:
                broken.pop(address, None)
                if got.complete:
                    complete.add(address)
                message = got
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
