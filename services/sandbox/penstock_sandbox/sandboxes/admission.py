"""Admission: limits of existing sandboxes, in total and per owner, and of concurrent creates.

Purpose: when all slots are taken a create waits, for a limited time, instead of failing or overloading the machine
(R51). Owners do not block each other: see `FairQueue`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from penstock_chassis.aio.fair_queue import FairQueue
from penstock_chassis.errors import ResourceExhausted

_RETRY_AFTER_S = 1.0

Owner = str | None
"""The owner that a sandbox counts towards, with its namespace; None is the service itself, which has no limit of its
own."""


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
        self._slots = FairQueue[Owner](most, lambda owner: None if owner is None else most_per_owner)
        self._turns: dict[str, FairQueue[Owner]] = {}

    @property
    def free(self) -> int:
        """How many more sandboxes are admitted now, no matter who makes them."""
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
        turns = self._turns.setdefault(backend, FairQueue[Owner](most))
        await turns.take(owner)
        try:
            yield
        finally:
            turns.give_back(owner)
