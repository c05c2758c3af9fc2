"""Members of a fleet whose states a test sets, in place of the probes of real ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from penstock_chassis.aio.broadcast import Signal
from penstock_chassis.membership.members import Member
from penstock_chassis.membership.peers import Host, Peer, State


@dataclass
class Known:
    """Peers whose states the test sets."""

    changed: Signal = field(default_factory=Signal)
    peers: dict[str, Peer] = field(default_factory=dict)
    broken: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, *names: str) -> None:
        for name in names:
            self.peers[name] = Peer(Member(name, f"{name}:1"), cast(Any, None), own_name=name, state=State.SERVING)
        self.changed.notify()

    def add_unnamed(self, name: str) -> None:
        """A member that has not answered this process yet."""
        self.peers[name] = Peer(Member(name, f"{name}:1"), cast(Any, None), state=State.LOST)
        self.peers[name].loss.set()
        self.changed.notify()

    def remove(self, name: str) -> None:
        """The list has this member no more."""
        self.peers.pop(name).loss.set()
        self.changed.notify()

    def lose(self, name: str, host: Host = Host.SILENT) -> None:
        peer = self.peers[name]
        peer.state, peer.host = State.LOST, host
        peer.loss.set()
        self.changed.notify()

    def find(self, name: str) -> None:
        self.peers[name].state, self.peers[name].loss = State.SERVING, asyncio.Event()
        self.changed.notify()

    def all(self) -> Sequence[Peer]:
        return [self.peers[name] for name in sorted(self.peers)]

    def get(self, name: str) -> Peer | None:
        return self.peers.get(name)

    async def until_broken(self) -> None:
        await self.broken.wait()
        raise RuntimeError("the probes broke")
