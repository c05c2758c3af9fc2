"""What the members say of their load, and what the choice among them makes of it.

A service counts for all drivers, this driver only for itself. So a member's load is what runs there for others, as it
said last, and what runs there for this driver now. A member that says nothing (an older service, a token that may not
ask) has this driver's own count, and no limit.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

import structlog

from penstock_chassis.errors import PenstockError
from penstock_chassis.membership.peers import Peer
from penstock_driver.domain.ports import Load

READ_EVERY_S: Final = 2.0
READ_S: Final = 1.5
"""Deadline of one reading."""
LASTS_S: Final = 10.0
"""A member that has said nothing for so long has this driver's own count again, unless it was full."""
SLOW: Final = 2.0
"""A member that takes more than so many times as long as the fastest counts as more loaded."""
LEAST_CREATION_S: Final = 0.1
"""Shorter creations are all fast: their differences are noise."""
_JITTER: Final = (0.75, 1.25)

_log = structlog.get_logger("penstock.driver")


class Occupied(Protocol):
    """A member, and the attempts of this driver there."""

    @property
    def name(self) -> str: ...

    @property
    def peer(self) -> Peer: ...

    @property
    def occupants(self) -> Sized: ...


M = TypeVar("M", bound=Occupied)


@dataclass(frozen=True, slots=True)
class _Said:
    """What a member said, when, and how many attempts of this driver were there when it was asked."""

    load: Load
    at: float
    own: int


class Loads(Generic[M]):
    """The loads of the members that are `ready`. `ask` asks one, with a deadline in seconds; None = unknown."""

    def __init__(self, ready: Callable[[], Sequence[M]], ask: Callable[[M, float], Awaitable[Load | None]]) -> None:
        self._ready = ready
        self._ask = ask
        self._said: dict[Peer, _Said] = {}

    async def follow(self) -> None:
        """Ask all members again and again. Never returns; cancel it."""
        while True:
            ready = self._ready()
            self._said = {member.peer: self._said[member.peer] for member in ready if member.peer in self._said}
            await asyncio.gather(*(self.read(member) for member in ready))
            await asyncio.sleep(READ_EVERY_S * random.uniform(*_JITTER))  # noqa: S311 - jitter

    async def read(self, member: M) -> None:
        """Ask one member. What it said before stays for a while if it does not answer."""
        own = len(member.occupants)
        try:
            async with asyncio.timeout(READ_S):
                load = await self._ask(member, READ_S)
        except (PenstockError, TimeoutError) as error:
            _log.debug("the load of a service is unknown", name=member.name, error=repr(error))
            return
        if load is not None:
            self._said[member.peer] = _Said(load, asyncio.get_running_loop().time(), own)

    def of(self, members: Collection[M]) -> Mapping[str, float]:
        """The load of each member, by its name; a slow one has more than it runs."""
        said = {member.name: self._fresh(member) for member in members}
        took = {name: one.load.creation_s for name, one in said.items() if one and one.load.creation_s is not None}
        usual = SLOW * max(LEAST_CREATION_S, min(took.values(), default=0.0))
        found = {}
        for member in members:
            own, one = len(member.occupants), said[member.name]
            others = 0 if one is None else max(0, one.load.count - one.own)
            slowness = max(1.0, took.get(member.name, 0.0) / usual)
            # Counted with the one to come: an idle member may be slow too.
            found[member.name] = (own + others + 1) * slowness - 1
        return found

    def with_room(self, members: Collection[M], memory_bytes: int | None) -> Collection[M]:
        """The services that are not full, for work that needs so much memory; all of them if all are full."""
        return self.not_full(members, memory_bytes) or members

    def not_full(self, members: Collection[M], memory_bytes: int | None) -> Collection[M]:
        """The services that are not full, for work that needs so much memory, by what they said last."""
        return [member for member in members if self._has_room(member, memory_bytes or 0)]

    def reaching(self, members: Collection[M], inference: str) -> Collection[M]:
        """The services that reach an inference service or pool of this name; all of them if none does."""
        said = [(member, self._fresh(member)) for member in members]
        return [
            member for member, one in said if one is None or inference not in one.load.unreachable_inference
        ] or members

    def holding(self, members: Collection[M], snapshot_key: str) -> Collection[str]:
        """The names of those that have a snapshot of this content."""
        said = ((member.name, self._fresh(member)) for member in members)
        return {name for name, one in said if one and snapshot_key in one.load.snapshot_keys}

    def _has_room(self, member: M, memory_bytes: int) -> bool:
        last, one = self._said.get(member.peer), self._fresh(member)
        if one is None:
            # A full service is often a busy one, which answers late: it stays full until it says otherwise.
            return last is None or last.load.room != 0
        came = max(0, len(member.occupants) - one.own)
        free = one.load.free_memory_bytes
        return (one.load.room is None or came < one.load.room) and (free is None or memory_bytes <= free)

    def _fresh(self, member: M) -> _Said | None:
        one = self._said.get(member.peer)
        is_old = one is not None and asyncio.get_running_loop().time() > one.at + LASTS_S
        return None if is_old else one
