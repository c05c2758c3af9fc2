"""A limited number of slots, shared fairly: by sandboxes' owners, and by namespaces of rollouts.

The next free slot goes to the waiter that has the fewest slots for its weight, of equals to the one that got a slot
longest ago: weighted max-min fairness of what is held. It needs no history, so a newcomer is served by the next slot,
however many wait before it, and who was alone for an hour owes nothing.

Invariants
- At most ``most`` slots are held, and by no owner more than its limit.
- No request waits while a slot is free for its owner, except one that is set aside. One owner's requests are served in
  the order in which they came.
- A withdrawn, cancelled or expired request leaves nothing behind.
- A request that is set aside gets no slot, and keeps its place among its owner's.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

Owner = TypeVar("Owner")
_Request: TypeAlias = tuple[contextvars.Context, Callable[[], None]]
"""The context of who asks, and what to call in it."""


@dataclass(frozen=True, slots=True)
class Ticket(Generic[Owner]):
    """A request for a slot, to withdraw it by."""

    owner: Owner
    number: int


def _no_limit(_: object) -> None:
    return None


def _equal(_: object) -> float:
    return 1.0


def _grant(request: _Request) -> None:
    context, granted = request
    context.run(granted)


class FairQueue(Generic[Owner]):
    """Slots for owners.

    Args:
        most: number of slots, at least 1.
        limit: the most slots that an owner may hold; None = no limit of its own.
        weight: an owner's share against others' while both wait, above 0.
    """

    def __init__(
        self,
        most: int,
        limit: Callable[[Owner], int | None] = _no_limit,
        weight: Callable[[Owner], float] = _equal,
    ) -> None:
        self._most = most
        self._limit = limit
        self._weight = weight
        self._held: Counter[Owner] = Counter()
        self._total = 0
        self._numbers = itertools.count()
        # Owners with waiting requests, the one that got a slot longest ago first.
        self._waiting: OrderedDict[Owner, OrderedDict[int, _Request]] = OrderedDict()
        self._aside: dict[int, _Request] = {}

    @property
    def full(self) -> bool:
        """Whether all slots are held."""
        return self._total >= self._most

    @property
    def free(self) -> int:
        """How many slots are free, no matter who may take them."""
        return max(0, self._most - self._total)

    @property
    def queued(self) -> int:
        """How many requests of all owners wait."""
        return sum(map(len, self._waiting.values()))

    def at_limit(self, owner: Owner) -> bool:
        """Whether an owner holds as many as it may."""
        limit = self._limit(owner)
        return limit is not None and self._held[owner] >= limit

    def room(self, owner: Owner) -> bool:
        """Whether a slot is free for this owner now."""
        return not self.full and not self.at_limit(owner)

    def waiting(self, owner: Owner) -> int:
        """Returns how many requests of an owner wait."""
        return len(self._waiting.get(owner, ()))

    def request(self, owner: Owner, granted: Callable[[], None], *, aside: bool = False) -> Ticket[Owner]:
        """Calls ``granted``, in the caller's context, once the owner has a slot: maybe before this returns.

        The slot is held until `give_back`. Until then `withdraw` ends the request. ``granted`` must not raise.
        ``aside``: the request is set aside from the beginning.
        """
        ticket = Ticket(owner, next(self._numbers))
        if not aside and self.room(owner):
            # No waiting request could take the slot, since none of their owners has room.
            self._take(owner)
            granted()
            return ticket
        # Tasks that `granted` starts would otherwise belong to the request whose slot became free.
        request = contextvars.copy_context(), granted
        if aside:
            self._aside[ticket.number] = request
        else:
            self._waiting.setdefault(owner, OrderedDict())[ticket.number] = request
        return ticket

    def set_aside(self, ticket: Ticket[Owner]) -> bool:
        """Passes over a request that waits, until `put_back`. Returns False if it waits no more."""
        request = self._remove(ticket)
        if request is not None:
            self._aside[ticket.number] = request
        return ticket.number in self._aside

    def put_back(self, ticket: Ticket[Owner]) -> None:
        """Lets a request that was set aside wait again, at its place; succeeds if it is not."""
        request = self._aside.pop(ticket.number, None)
        if request is None:
            return
        if self.room(ticket.owner):
            self._take(ticket.owner)
            _grant(request)
            return
        requests = self._waiting.setdefault(ticket.owner, OrderedDict())
        later = [number for number in requests if number > ticket.number]
        requests[ticket.number] = request
        for number in later:
            requests.move_to_end(number)

    def withdraw(self, ticket: Ticket[Owner]) -> bool:
        """Ends a request that waits. Returns False if it waits no more: its slot was granted."""
        return self._aside.pop(ticket.number, None) is not None or self._remove(ticket) is not None

    def _remove(self, ticket: Ticket[Owner]) -> _Request | None:
        requests = self._waiting.get(ticket.owner)
        request = None if requests is None else requests.pop(ticket.number, None)
        if request is not None and not requests:
            del self._waiting[ticket.owner]
        return request

    async def take(self, owner: Owner, wait_s: float | None = None) -> None:
        """Takes a slot, waiting at most ``wait_s`` (None: no limit). Raises TimeoutError."""
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ticket = self.request(owner, lambda: None if slot.done() else slot.set_result(None))
        try:
            async with asyncio.timeout(wait_s):
                await asyncio.shield(slot)
        except TimeoutError:
            if self.withdraw(ticket):
                raise  # otherwise it was granted at the moment of the timeout
        except asyncio.CancelledError:
            if not self.withdraw(ticket):
                self.give_back(owner)
            raise

    def give_back(self, owner: Owner) -> None:
        """Frees a slot, and grants it to the next owner."""
        self._total -= 1
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        while able := [one for one in self._waiting if self.room(one)]:
            chosen = min(able, key=lambda one: self._held[one] / self._weight(one))  # the first of equals
            requests = self._waiting[chosen]
            _, request = requests.popitem(last=False)
            if requests:
                self._waiting.move_to_end(chosen)
            else:
                del self._waiting[chosen]
            self._take(chosen)
            _grant(request)

    def _take(self, owner: Owner) -> None:
        self._total += 1
        self._held[owner] += 1
