"""Admission: how many sandboxes there may be, in all and for each owner, and how many are made at once.

Purpose: a create that finds no place waits for one, for a bounded time, instead of failing or of overloading the
machine (R51); who waits longest among an owner's creates comes first, and owners take turns.

Invariants
- Never more than ``most`` are taken, nor more than ``most_per_owner`` by one owner.
- Nobody waits while there is room for him.
- One owner's queue never stands in another's way: it fills no other's queue, and a free place goes to the owner who was
  served longest ago.
- A wait that is cancelled or over leaves nothing behind.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from penstock_chassis.errors import ResourceExhausted

_RETRY_AFTER_S = 1.0

Owner = str | None
"""Who a sandbox counts for; None is the service itself, which has no limit of its own."""


class Turns:
    """A number of places, taken one at a time by owners."""

    def __init__(self, most: int, most_per_owner: int | None = None) -> None:
        self._most = most
        self._most_per_owner = most_per_owner
        self._taken: Counter[Owner] = Counter()
        self._total = 0
        # By owner, who was served longest ago first.
        self._queues: OrderedDict[Owner, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def full(self) -> bool:
        """Whether all places are taken."""
        return self._total >= self._most

    def at_limit(self, owner: Owner) -> bool:
        """Whether an owner has all that it may have."""
        limit = self._most_per_owner
        return owner is not None and limit is not None and self._taken[owner] >= limit

    def room(self, owner: Owner) -> bool:
        """Whether there is a place for this owner now."""
        return not self.full and not self.at_limit(owner)

    def waiting(self, owner: Owner) -> int:
        """How many of an owner's wait."""
        return len(self._queues.get(owner, ()))

    async def take(self, owner: Owner, wait_s: float | None = None) -> None:
        """Take a place, waiting at most ``wait_s`` (None: as long as it takes). Raises TimeoutError."""
        if self.room(owner):
            # Nobody who waits could take it: there is no room for any of them.
            self._take(owner)
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(owner, deque()).append(granted)
        try:
            async with asyncio.timeout(wait_s):
                await granted
        except TimeoutError:
            if _was_granted(granted):
                return  # in the very moment
            self._leave(owner, granted)
            raise
        except asyncio.CancelledError:
            if _was_granted(granted):
                self.give_back(owner)
            else:
                self._leave(owner, granted)
            raise

    def give_back(self, owner: Owner) -> None:
        """Free a place that was taken, for whoever's turn it is."""
        self._total -= 1
        self._taken[owner] -= 1
        if not self._taken[owner]:
            del self._taken[owner]
        while (next_owner := next((one for one in self._queues if self.room(one)), _NOBODY)) is not _NOBODY:
            assert not isinstance(next_owner, _Nobody)
            queue = self._queues[next_owner]
            granted = queue.popleft()
            self._queues.move_to_end(next_owner)
            if not queue:
                del self._queues[next_owner]
            if not granted.done():
                self._take(next_owner)
                granted.set_result(None)

    def _take(self, owner: Owner) -> None:
        self._total += 1
        self._taken[owner] += 1

    def _leave(self, owner: Owner, granted: asyncio.Future[None]) -> None:
        queue = self._queues.get(owner)
        if queue is not None and granted in queue:
            queue.remove(granted)
            if not queue:
                del self._queues[owner]


class _Nobody:
    """Stands for no owner, since None is one."""


_NOBODY = _Nobody()


def _was_granted(granted: asyncio.Future[None]) -> bool:
    return granted.done() and not granted.cancelled()


class Admission:
    """Places for sandboxes, and turns to make them.

    Args:
        most: sandboxes at once.
        most_per_owner: sandboxes at once of one owner; None = no limit.
        most_queued: creates of one owner that may wait for a place.
        queue_timeout_s: longest such wait in seconds.
    """

    def __init__(self, most: int, most_per_owner: int | None, most_queued: int, queue_timeout_s: float) -> None:
        self._most = most
        self._most_per_owner = most_per_owner
        self._most_queued = most_queued
        self._queue_timeout_s = queue_timeout_s
        self._places = Turns(most, most_per_owner)
        self._making: dict[str, Turns] = {}

    async def place(self, owner: Owner, wait_s: float | None) -> Callable[[], None]:
        """Take a place, waiting at most ``wait_s`` and the operator's limit; answers what gives it back.

        Raises ResourceExhausted (SANDBOX_LIMIT, OWNER_LIMIT).
        """
        wait = self._queue_timeout_s if wait_s is None else min(wait_s, self._queue_timeout_s)
        if not self._places.room(owner) and (wait <= 0 or self._places.waiting(owner) >= self._most_queued):
            raise self._refusal(owner, "and no more may wait" if wait > 0 else "and there is no time to wait")
        try:
            await self._places.take(owner, wait)
        except TimeoutError:
            raise self._refusal(owner, f"and none became free in {wait:g} s") from None
        return lambda: self._places.give_back(owner)

    def _refusal(self, owner: Owner, and_what: str) -> ResourceExhausted:
        # Its own limit first: whatever becomes free elsewhere would not help.
        if not self._places.at_limit(owner):
            return ResourceExhausted(
                f"{self._most} sandboxes are there, which is this service's limit, {and_what}",
                reason="SANDBOX_LIMIT",
                retry_after_s=_RETRY_AFTER_S,
            )
        return ResourceExhausted(
            f"{self._most_per_owner} sandboxes of this owner are there, which is an owner's limit, {and_what}",
            reason="OWNER_LIMIT",
            retry_after_s=_RETRY_AFTER_S,
        )

    @asynccontextmanager
    async def making(self, backend: str, most: int, owner: Owner) -> AsyncIterator[None]:
        """A turn to make a sandbox on a backend that makes ``most`` at once; waits as long as it takes."""
        turns = self._making.setdefault(backend, Turns(most))
        await turns.take(owner)
        try:
            yield
        finally:
            turns.give_back(owner)
