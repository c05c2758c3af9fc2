"""Admission: limits of existing sandboxes, in total and per owner, of concurrent creates, and of the disk's free space.

Purpose: when all slots are taken a create waits, for a limited time, instead of failing or overloading the machine
(R51). Each owner's creates are served first come, first served; owners take turns.

Invariants
- At most ``most`` slots are taken, and at most ``most_per_owner`` by one owner.
- No create waits while a slot is free for its owner.
- Owners do not block each other: each has a queue of its own, and a free slot goes to the owner that was served longest
  ago.
- A cancelled or expired wait leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from penstock_chassis.errors import ResourceExhausted

_RETRY_AFTER_S = 1.0
_DISK_RETRY_AFTER_S = 5.0

Owner = str | None
"""The owner that a sandbox counts towards, with its namespace; None is the service itself, which has no limit of its
own."""


class FairQueue:
    """A limited number of slots, taken one at a time by owners."""

    def __init__(self, most: int, most_per_owner: int | None = None) -> None:
        self._most = most
        self._most_per_owner = most_per_owner
        self._taken: Counter[Owner] = Counter()
        self._total = 0
        # Owners, least recently served first.
        self._queues: OrderedDict[Owner, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def full(self) -> bool:
        """Whether all slots are taken."""
        return self._total >= self._most

    @property
    def free(self) -> int:
        """How many slots are free, whoever may take them."""
        return max(0, self._most - self._total)

    @property
    def queued(self) -> int:
        """How many creates of all owners wait."""
        return sum(len(queue) for queue in self._queues.values())

    def at_limit(self, owner: Owner) -> bool:
        """Whether an owner has as many as it may."""
        limit = self._most_per_owner
        return owner is not None and limit is not None and self._taken[owner] >= limit

    def room(self, owner: Owner) -> bool:
        """Whether a slot is free for this owner now."""
        return not self.full and not self.at_limit(owner)

    def waiting(self, owner: Owner) -> int:
        """Returns the number of an owner's waiting creates."""
        return len(self._queues.get(owner, ()))

    async def take(self, owner: Owner, wait_s: float | None = None) -> None:
        """Takes a slot, waiting at most ``wait_s`` (None: no limit). Raises TimeoutError."""
        if self.room(owner):
            # No waiting create could take the slot, since none of their owners has room.
            self._take(owner)
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(owner, deque()).append(granted)
        try:
            async with asyncio.timeout(wait_s):
                await granted
        except TimeoutError:
            if _was_granted(granted):
                return  # granted at the moment of the timeout
            self._leave(owner, granted)
            raise
        except asyncio.CancelledError:
            if _was_granted(granted):
                self.give_back(owner)
            else:
                self._leave(owner, granted)
            raise

    def give_back(self, owner: Owner) -> None:
        """Frees a slot for the next owner in turn."""
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
    """Sentinel for "no owner", since None is an owner."""


_NOBODY = _Nobody()


def _was_granted(granted: asyncio.Future[None]) -> bool:
    return granted.done() and not granted.cancelled()


class Admission:
    """Slots for sandboxes, and turns to create them.

    Args:
            most: maximum number of sandboxes.
            most_per_owner: maximum number of sandboxes of one owner; None = no limit.
            most_queued: maximum number of one owner's creates that wait for a slot.
            queue_timeout_s: maximum wait in seconds.
    """

    def __init__(self, most: int, most_per_owner: int | None, most_queued: int, queue_timeout_s: float) -> None:
        self._most = most
        self._most_per_owner = most_per_owner
        self._most_queued = most_queued
        self._queue_timeout_s = queue_timeout_s
        self._slots = FairQueue(most, most_per_owner)
        self._turns: dict[str, FairQueue] = {}

    @property
    def free(self) -> int:
        """How many more sandboxes are admitted now, whoever makes them."""
        return self._slots.free

    @property
    def queued(self) -> int:
        """How many creates wait for a slot."""
        return self._slots.queued

    async def slot(self, owner: Owner, wait_s: float | None) -> Callable[[], None]:
        """Takes a slot, waiting at most ``wait_s`` and the operator's limit; returns a function that frees it.

        Raises ResourceExhausted (SANDBOX_LIMIT, OWNER_LIMIT).
        """
        wait = self._queue_timeout_s if wait_s is None else min(wait_s, self._queue_timeout_s)
        if not self._slots.room(owner) and (wait <= 0 or self._slots.waiting(owner) >= self._most_queued):
            raise self._refusal(
                owner, "and no more may wait" if wait > 0 else "and the call's deadline leaves no time to wait"
            )
        try:
            await self._slots.take(owner, wait)
        except TimeoutError:
            raise self._refusal(owner, f"and none became free in {wait:g} s") from None
        return lambda: self._slots.give_back(owner)

    def _refusal(self, owner: Owner, and_what: str) -> ResourceExhausted:
        # The owner's own limit first: a slot freed by another owner would not help.
        if not self._slots.at_limit(owner):
            return ResourceExhausted(
                f"{self._most} sandboxes exist, which is this service's limit, {and_what}",
                reason="SANDBOX_LIMIT",
                retry_after_s=_RETRY_AFTER_S,
            )
        return ResourceExhausted(
            f"{self._most_per_owner} sandboxes of this owner exist, which is the limit per owner, {and_what}",
            reason="OWNER_LIMIT",
            retry_after_s=_RETRY_AFTER_S,
        )

    @asynccontextmanager
    async def turn(self, backend: str, most: int, owner: Owner) -> AsyncIterator[None]:
        """Holds a turn to create on a backend that allows ``most`` concurrent creates; waits without limit."""
        turns = self._turns.setdefault(backend, FairQueue(most))
        await turns.take(owner)
        try:
            yield
        finally:
            turns.give_back(owner)


class Watermark:
    """Minimum free bytes and inodes for a create, so that the service's own writes have room (R95). 0 = no minimum.

    ``folder`` is in the state directory, where the journal is: for every backend that filesystem is checked.
    """

    def __init__(self, folder: Path, least_bytes: int, least_inodes: int) -> None:
        self._folder = folder
        self._least_bytes = least_bytes
        self._least_inodes = least_inodes

    def check(self) -> None:
        """Raises ResourceExhausted (DISK_LOW) below the minimum."""
        there = os.statvfs(self._folder)
        # Blocks reserved for root are not counted, whatever user this service runs as.
        free = there.f_bavail * there.f_frsize
        if free < self._least_bytes:
            raise self._low("bytes", free, self._least_bytes)
        # Some filesystems have no fixed number of inodes and report 0 of 0.
        if there.f_files and there.f_favail < self._least_inodes:
            raise self._low("inodes", there.f_favail, self._least_inodes)

    def _low(self, what: str, free: int, least: int) -> ResourceExhausted:
        return ResourceExhausted(
            f"the disk of the sandbox service has {free} {what} left, but needs {least} to make a sandbox "
            f"(min_free_{what}): delete sandboxes or snapshots, or free space",
            reason="DISK_LOW",
            retry_after_s=_DISK_RETRY_AFTER_S,
            metadata={"free": str(free), "least": str(least), "of": what},
        )
