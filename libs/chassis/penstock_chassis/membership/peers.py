"""The services of one kind that a service works with: who they are, and whether each can be reached now.

Each caller finds out by itself: it asks every peer's health each second. Two misses in a row are a loss, which is
noticed after 4 to 5 s, long before TCP does; three good answers in a row end it. What runs at a lost peer fails by its
caller's decision (`Peer.loss`), not by a timeout of each call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final, TypeVar

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.ops.v1.operations_service_pb2 import GetServerInfoRequest
from penstock.ops.v1.operations_service_pb2_grpc import OperationsServiceStub
from penstock_chassis.aio.broadcast import Signal
from penstock_chassis.aio.retry import Backoff, Delays
from penstock_chassis.errors import PenstockError
from penstock_chassis.membership.members import Member, Source

PROBE_EVERY_S: Final = 1.0
PROBE_S: Final = 1.5
"""Deadline of one probe."""
MISSES: Final = 2
RETURNS: Final = 3
SILENCE_DELAYS: Final = Delays(1.0, 4.0, jitter=(0.75, 1.25))
"""Between connections to the host of a lost peer: many callers may try one host that is down."""

T = TypeVar("T")
_log = structlog.get_logger(__name__)


class State(Enum):
    """What the last probes of a peer found."""

    NEW = auto()
    """Not probed yet."""
    SERVING = auto()
    DRAINING = auto()
    """It answers, and takes no new work."""
    LOST = auto()
    """It does not answer."""


class Host(Enum):
    """What is at the address of a lost peer."""

    SILENT = auto()
    """Nothing answers: the host is gone, or the way to it."""
    REFUSING = auto()
    """The host answers, and no process listens: it may restart."""
    ACCEPTING = auto()
    """A process listens: it may only be slow."""


@dataclass(eq=False, slots=True)
class Peer:
    """One service. `loss` is set while it is lost, and for ever once it is removed."""

    member: Member
    channel: grpc.aio.Channel
    own_name: str = ""
    """Its name by its own account (its `name` setting), which its ids have; empty until it has answered."""
    unused_because: str = ""
    """Why it has no name that can be used; empty = it has, or has not answered."""
    state: State = State.NEW
    host: Host = Host.REFUSING
    """What was found at its address, while it is lost."""
    loss: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        """The peer's name in the membership."""
        return self.member.name

    @property
    def is_lost(self) -> bool:
        """Whether work there cannot go on."""
        return self.loss.is_set()


class Peers:
    """All peers of one kind. `changed` counts every change of a member or a state.

    `must_have_names`: a peer that does not say its own name, or says another's, is not used.
    """

    def __init__(
        self, what: str, connect: Callable[[Member], grpc.aio.Channel], *, must_have_names: bool = True
    ) -> None:
        self.changed = Signal()
        self._must_have_names = must_have_names
        self._what = what
        self._connect = connect
        self._peers: dict[str, Peer] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._work: asyncio.Task[None] | None = None

    def all(self) -> Sequence[Peer]:
        """Every member, in the order of their names."""
        return [self._peers[name] for name in sorted(self._peers)]

    def get(self, name: str) -> Peer | None:
        """The member with this name."""
        return self._peers.get(name)

    async def settled(self, timeout_s: float) -> None:
        """Waits until every member has been probed, at most `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._peers or any(peer.state is State.NEW for peer in self._peers.values()):
                    await self.changed.wait(self.changed.number)
        except TimeoutError:
            return

    async def until_broken(self) -> None:
        """Never returns. Raises what ended the probes or the list of members: then no loss would be seen any more."""
        if self._work is not None:
            await asyncio.shield(self._work)

    def start(self, source: Source) -> asyncio.Task[None]:
        """Keeps the members as the source has them, in a task, until it is cancelled."""
        self._work = asyncio.create_task(self._follow(source), name=f"members of {self._what}")
        return self._work

    async def _follow(self, source: Source) -> None:
        async with asyncio.TaskGroup() as probes:
            try:
                async for members in source.read():
                    await self._take(members, probes)
            finally:
                await self._take({}, probes)

    async def _take(self, members: Mapping[str, Member], probes: asyncio.TaskGroup) -> None:
        gone = [name for name, peer in self._peers.items() if members.get(name) != peer.member]
        ended = []
        for name in gone:
            peer, task = self._peers.pop(name), self._watching.pop(name)
            ended.append(task)
            peer.state = State.LOST
            peer.loss.set()
            _log.info("a service is no member any more", kind=self._what, name=name, address=peer.member.address)
        for name, member in members.items():
            if name not in self._peers:
                peer = self._peers[name] = Peer(member, self._connect(member))
                self._watching[name] = probes.create_task(self._watch(peer), name=f"probes of {name}")
                _log.info("a service is a member", kind=self._what, name=name, address=member.address)
        self.changed.notify()
        if ended:
            # Who follows the members runs first: a channel closes with its probes, and what runs there would fail.
            await asyncio.sleep(0)
            for task in ended:
                task.cancel()
            await asyncio.wait(ended)

    async def _watch(self, peer: Peer) -> None:
        """Probes one peer for ever; its channel closes at the end."""
        stub, operations = health_pb2_grpc.HealthStub(peer.channel), OperationsServiceStub(peer.channel)
        misses = returns = 0
        named = False
        silence, tried_at = Backoff(SILENCE_DELAYS), 0.0
        try:
            while True:
                began = asyncio.get_running_loop().time()
                found = await _probed(stub)
                if found is not State.LOST and self._must_have_names and not named:
                    named = await self._name(peer, operations)
                    found = found if named else State.LOST
                if found is State.LOST:
                    misses, returns = misses + 1, 0
                else:
                    misses, returns = 0, returns + 1
                named = named and peer.state is not State.LOST
                if misses >= MISSES or (misses and peer.state is State.NEW):
                    if began >= tried_at:
                        host = await _found(peer.member.address)
                        tried_at = began + silence.next()
                        if host is not peer.host:
                            peer.host = host
                            self.changed.notify()
                    self._set(peer, State.LOST)
                elif found is not State.LOST and (peer.state is not State.LOST or returns >= RETURNS):
                    silence.reset()
                    tried_at, peer.host = 0.0, Host.REFUSING
                    self._set(peer, found)
                took = asyncio.get_running_loop().time() - began
                await asyncio.sleep(max(0.0, PROBE_EVERY_S - took))
        finally:
            await peer.channel.close()

    async def _name(self, peer: Peer, operations: Any) -> bool:
        """Asks a service for its name; returns whether it has one that no other member has."""
        try:
            answer = await operations.GetServerInfo(GetServerInfoRequest(), timeout=PROBE_S)
        except grpc.aio.AioRpcError as error:
            why = f"{error.code().name}: {error.details()}"
        else:
            name = answer.server.name
            others = [other.name for other in self._peers.values() if other is not peer and other.own_name == name]
            if name and not others:
                peer.own_name, peer.unused_because = name, ""
                return True
            why = f"its name {name!r} is also that of {others[0]}" if others else "it has none"
        if why != peer.unused_because:
            _log.error("a member is not used: its name is unknown", kind=self._what, name=peer.name, why=why)
        peer.unused_because = why
        return False

    def _set(self, peer: Peer, state: State) -> None:
        if state is peer.state or self._peers.get(peer.name) is not peer:  # removed: it stays lost
            return
        before, peer.state = peer.state, state
        if state is State.LOST:
            peer.loss.set()
            _log.warning("a service is lost", kind=self._what, name=peer.name, address=peer.member.address)
        elif before is State.LOST:
            peer.loss = asyncio.Event()
            _log.info("a service is back", kind=self._what, name=peer.name)
        self.changed.notify()


class PeerLost(Exception):
    """The peer was lost, or removed, while something was done there."""


async def until_lost(peer: Peer, work: Awaitable[T]) -> T:
    """Returns the result of `work`; cancels it when the peer is lost. Raises PeerLost, also if a call failed by it."""
    task = asyncio.ensure_future(work)
    loss = asyncio.ensure_future(peer.loss.wait())
    try:
        await asyncio.wait([task, loss], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise PeerLost(f"{peer.name} does not answer any more")
        try:
            return task.result()
        except (PenstockError, grpc.aio.AioRpcError) as error:
            if peer.is_lost:
                raise PeerLost(f"{peer.name} does not answer any more") from error
            raise
    finally:
        loss.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


async def _probed(stub: Any) -> State:
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_S, wait_for_ready=False)
    except grpc.aio.AioRpcError:
        return State.LOST
    serves = answer.status == health_pb2.HealthCheckResponse.SERVING
    return State.SERVING if serves else State.DRAINING


async def _found(address: str) -> Host:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(PROBE_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return Host.REFUSING
    except (OSError, ValueError):  # TimeoutError too; ValueError, and UnicodeError, for a host that can be no name
        return Host.SILENT
    writer.close()
    return Host.ACCEPTING


@asynccontextmanager
async def following(
    what: str, source: Source, connect: Callable[[Member], grpc.aio.Channel], *, must_have_names: bool = True
) -> AsyncIterator[Peers]:
    """The peers that a source names, followed until the end of the block.

    Args:
        what: the kind of service, for the log.
        source: where the members come from.
        connect: opens a channel to a member; it is closed when the member goes.
        must_have_names: see Peers.
    """
    peers = Peers(what, connect, must_have_names=must_have_names)
    work = peers.start(source)
    try:
        yield peers
    finally:
        work.cancel()
        await asyncio.wait([work])
