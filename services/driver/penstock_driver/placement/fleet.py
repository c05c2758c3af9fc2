"""Placement over any number of sandbox services and gates, whose members come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Generic, TypeAlias, TypeVar

from penstock.interception.v1 import rollout_gate_service_pb2
from penstock_chassis.aio.broadcast import Signal
from penstock_chassis.errors import PenstockError, Unavailable
from penstock_chassis.membership.peers import Host, Peer, PeerLost, Peers, State, until_lost
from penstock_driver.domain.ports import CallEnded, Gate, GateClient, Load, Sandboxes
from penstock_driver.domain.rollout import Cause, Component, Failure, Phase, RolloutFailed, RolloutSpec
from penstock_driver.environments.forks import ThrottledForks
from penstock_driver.environments.prepare import Environments
from penstock_driver.environments.throttle import AdaptiveThrottle, never
from penstock_driver.placement.choice import choose, ranking
from penstock_driver.placement.loads import Loads
from penstock_driver.placement.placement import Avoid, OnLoss, Place
from penstock_driver.placement.services import RunnerServices, new_loadings

PLACE_S: Final = 30.0
"""How long an attempt waits for a sandbox service and a gate that can take it."""
PATIENCE_S: Final = 30.0
"""How long a service may not answer that still accepts connections, and a gate that restarts, which keeps its calls."""
NODE_PATIENCE: Final = {Host.SILENT: 0.0, Host.REFUSING: 0.0, Host.ACCEPTING: PATIENCE_S}
RELEASE_S: Final = 30.0
_KEPT_NAMES: Final = 1024
"""Of members that were removed."""
DEFAULT_INFERENCE: Final = "default"
"""A gate's name for its inference service without a name."""

S = TypeVar("S")
T = TypeVar("T")
AskLoad: TypeAlias = Callable[[float], Awaitable[Load | None]]
"""Asks a service for its load, with a deadline in seconds."""


def gate_patience(silence_s: float) -> Mapping[Host, float]:
    """The seconds for which a gate is retried, by its host's state; on a silent host `silence_s`."""
    return {Host.SILENT: silence_s, Host.REFUSING: PATIENCE_S, Host.ACCEPTING: PATIENCE_S}


async def unknown_load(_timeout_s: float) -> None:
    """Of a service that is not asked."""


@dataclass(frozen=True, slots=True)
class NodeServices:
    """A sandbox service, with the states that are prepared there."""

    sandboxes: Sandboxes
    environments: Environments
    forks: ThrottledForks
    is_lost: Callable[[], bool]
    ask_load: AskLoad

    @classmethod
    def of(cls, sandboxes: Sandboxes, peer: Peer | None = None, ask_load: AskLoad = unknown_load) -> NodeServices:
        """Nothing is prepared yet. A peer of None: there is no other sandbox service."""
        if peer is None:
            return cls(sandboxes, Environments(sandboxes), ThrottledForks(sandboxes), never, ask_load)
        forks = ThrottledForks(sandboxes, waits_out_drains=False)
        return cls(sandboxes, Environments(sandboxes), forks, lambda: peer.is_lost, ask_load)


@dataclass(frozen=True, slots=True)
class GateServices:
    """A gate, with the throttle of the requests that open rollouts there, and the limit of loads of recordings."""

    gate: GateClient
    is_lost: Callable[[], bool] = never
    openings: AdaptiveThrottle = field(default_factory=AdaptiveThrottle)
    ask_load: AskLoad = unknown_load
    loadings: asyncio.Semaphore = field(default_factory=new_loadings)


@dataclass(eq=False, slots=True)
class Member(Generic[S]):
    """One sandbox service or gate. `occupants` are called when it is lost."""

    peer: Peer
    services: S
    occupants: dict[OnLoss, None] = field(default_factory=dict)
    lost_at: float | None = None
    timer: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        """The service's name among the members."""
        return self.peer.name


class Members(Generic[S]):
    """The members of one kind, with what the driver has of each, and the attempts that run there.

    Args:
        peers: who they are, and whether they answer.
        open_services: makes the clients of a member.
        failure: of the attempts at a member that is lost.
        patience_s: how long a member may be away before its attempts end, by what is found at its address.
    """

    def __init__(
        self,
        peers: Peers,
        open_services: Callable[[Peer], S],
        failure: Callable[[str], Failure],
        patience_s: Mapping[Host, float],
    ) -> None:
        self.changed = peers.changed
        self.returned = Signal()
        """Counts the members that were lost and are back."""
        self._peers = peers
        self._open = open_services
        self._failure = failure
        self._patience_s = patience_s
        self._members: dict[Peer, Member[S]] = {}
        self._began = asyncio.get_running_loop().time()
        self._removed: dict[str, float] = {}
        """When members were removed, by their own names; the latest last."""

    async def settled(self, timeout_s: float) -> None:
        """Wait until every member has been asked once, at most `timeout_s` seconds."""
        await self._peers.settled(timeout_s)

    def all(self) -> Sequence[Member[S]]:
        """Every member, in the order of their names."""
        return [self._of(peer) for peer in self._peers.all()]

    def ready(self) -> Sequence[Member[S]]:
        """The services that take new work."""
        return [member for member in self.all() if member.peer.state is State.SERVING]

    def answering(self) -> Sequence[Member[S]]:
        """The services that answer questions: the ones that take new work first, then those that drain."""
        return [*self.ready(), *(member for member in self.all() if member.peer.state is State.DRAINING)]

    def get(self, name: str) -> Member[S] | None:
        """The member of this name."""
        peer = self._peers.get(name)
        return None if peer is None else self._of(peer)

    def gone_s(self, own_name: str) -> float:
        """Seconds since the member that called itself so was removed; since this driver started, if it saw none.

        `own_name` must be that of no member.
        """
        if any(peer.own_name == own_name for peer in self._members):
            return 0.0  # its removal is being noticed
        return asyncio.get_running_loop().time() - self._removed.get(own_name, self._began)

    async def follow(self) -> None:
        """End the attempts at members that are lost. Never returns. Raises an error after which no loss is seen."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._peers.until_broken())
            tasks.create_task(self._follow())

    async def _follow(self) -> None:
        while True:
            number = self.changed.number
            present = set(self._peers.all())
            for peer, member in list(self._members.items()):
                if peer not in present:
                    del self._members[peer]
                    self._note_removal(peer.own_name)
                    self._end(member)
                elif peer.is_lost:
                    self._end_later(member)
                else:
                    was_lost, member.lost_at = member.lost_at is not None, None
                    self._stop_waiting(member)
                    if was_lost:
                        self.returned.notify()
            await self.changed.wait(number)

    def _note_removal(self, own_name: str) -> None:
        self._removed.pop(own_name, None)
        self._removed[own_name] = asyncio.get_running_loop().time()
        if len(self._removed) > _KEPT_NAMES:
            del self._removed[next(iter(self._removed))]

    def _end_later(self, member: Member[S]) -> None:
        """End the attempts at a lost member once it has been away too long."""
        loop = asyncio.get_running_loop()
        self._stop_waiting(member)
        if member.lost_at is None:
            member.lost_at = loop.time()
        patience_s = self._patience_s[member.peer.host]
        if loop.time() >= member.lost_at + patience_s:
            self._end(member)
        else:
            member.timer = loop.call_at(member.lost_at + patience_s, self._end, member)

    async def first(self, order: Sequence[Member[S]], ask: Callable[[S], Awaitable[T]]) -> T | None:
        """Return the answer of the first member that can be reached; None if there is none. Raises its error."""
        last: Unavailable | None = None
        for member in order:
            try:
                return await until_lost(member.peer, ask(member.services))
            except PeerLost:
                continue
            except Unavailable as error:
                last = error
        if last is not None:
            raise last
        return None

    @contextmanager
    def occupied(self, name: str, on_loss: OnLoss) -> Iterator[None]:
        """While the context is open, `on_loss` is called once if the member is lost."""
        member = self.get(name)
        if member is None:
            on_loss(self._failure(name))
            yield
            return
        member.occupants[on_loss] = None
        if member.peer.is_lost:
            self.changed.wake()
        try:
            yield
        finally:
            member.occupants.pop(on_loss, None)

    def _of(self, peer: Peer) -> Member[S]:
        if peer not in self._members:
            self._members[peer] = Member(peer, self._open(peer))
        return self._members[peer]

    def _end(self, member: Member[S]) -> None:
        self._stop_waiting(member)
        ended, member.occupants = member.occupants, {}
        for on_loss in ended:
            on_loss(self._failure(member.name))

    @staticmethod
    def _stop_waiting(member: Member[S]) -> None:
        if member.timer is not None:
            member.timer.cancel()
            member.timer = None


class FleetPlacement:
    """See Placement. `follow` runs beside it."""

    def __init__(
        self,
        nodes: Members[NodeServices],
        gates: Members[GateServices],
        compose: Callable[[NodeServices, GateServices], RunnerServices],
    ) -> None:
        self._nodes = nodes
        self._gates = gates
        self._compose = compose
        self._node_loads = Loads(nodes.ready, lambda node, timeout_s: node.services.ask_load(timeout_s))
        self._gate_loads = Loads(gates.ready, lambda gate, timeout_s: gate.services.ask_load(timeout_s))

    async def follow(self) -> None:
        """End the attempts at sandbox services and gates that are lost; read their loads. Never returns; cancel it."""
        async with asyncio.TaskGroup() as tasks:
            for work in (self._nodes, self._gates, self._node_loads, self._gate_loads):
                tasks.create_task(work.follow())

    async def place(self, spec: RolloutSpec, avoid: Avoid) -> Place:
        """See Placement."""
        node = await self._chosen(self._nodes, _node_missing, lambda: self._node(spec, avoid))
        gate = await self._chosen(self._gates, _gate_missing, lambda: self._gate(spec, avoid))
        services = self._compose(node.services, gate.services)
        elsewhere = partial(self._has_room_elsewhere, node.name, spec)
        return Place(replace(services, has_room_elsewhere=elsewhere), node.name, gate.name)

    def at(self, node: str, gate: str) -> Place:
        """See Placement."""
        its_node, its_gate = self._nodes.get(node), self._gates.get(gate)
        if its_node is None:
            raise RolloutFailed(node_lost(node))
        if its_gate is None:
            raise RolloutFailed(gate_lost(gate))
        return Place(self._compose(its_node.services, its_gate.services), node, gate)

    @contextmanager
    def occupied(self, place: Place, on_loss: OnLoss) -> Iterator[None]:
        """See Placement."""
        with self._nodes.occupied(place.node, on_loss), self._gates.occupied(place.gate, on_loss):
            yield

    async def release(self, rollout_id: str, labels: Mapping[str, str], *, sandboxes_over: bool = False) -> None:
        """See Placement. What a lost member has is released when it is back, or goes with it when it is removed.

        Sandboxes there also end by their leases; a rollout that a lost gate has does not.
        """
        nodes = [node for node in self._nodes.all() if not (node.peer.is_lost and sandboxes_over)]
        work: list[tuple[Peer, Callable[[], Awaitable[object]]]] = [
            *((node.peer, partial(node.services.sandboxes.delete_labelled, labels)) for node in nodes),
            *((one.peer, partial(one.services.gate.close, rollout_id, "ROLLOUT_ENDED")) for one in self._gates.all()),
        ]
        async with asyncio.timeout(RELEASE_S):
            results = await asyncio.gather(*(tried(peer, release) for peer, release in work))
        failures = [failure for failure in results if failure is not None]
        if failures:
            raise failures[0]

    def on_return(self, listener: Callable[[], None]) -> None:
        """See Placement."""
        self._nodes.returned.call_on_change(listener)
        self._gates.returned.call_on_change(listener)

    def peers(self) -> Mapping[str, Sequence[Peer]]:
        """See Placement."""
        return {
            "sandbox": [node.peer for node in self._nodes.all()],
            "interception": [gate.peer for gate in self._gates.all()],
        }

    async def calls(self, labels: Mapping[str, str]) -> AsyncIterator[CallEnded]:
        """See Placement."""
        merged: asyncio.Queue[CallEnded] = asyncio.Queue(1024)
        watching: dict[Peer, asyncio.Task[None]] = {}

        async def watch(gate: Gate) -> None:
            async for ended in gate.calls(labels):
                await merged.put(ended)

        async def follow() -> None:
            while True:
                number = self._gates.changed.number
                present = {member.peer: member for member in self._gates.all()}
                for peer in watching.keys() - present.keys():
                    watching.pop(peer).cancel()
                for peer, member in present.items():
                    if peer not in watching or watching[peer].done():
                        watching[peer] = asyncio.create_task(watch(member.services.gate))
                await self._gates.changed.wait(number)

        following = asyncio.create_task(follow())
        try:
            while True:
                yield await merged.get()
        finally:
            following.cancel()
            for task in watching.values():
                task.cancel()
            await asyncio.wait([following, *watching.values()])

    async def _chosen(
        self, members: Members[S], missing: Callable[[], Failure], choose_one: Callable[[], Member[S] | None]
    ) -> Member[S]:
        loop = asyncio.get_running_loop()
        until = loop.time() + PLACE_S
        while True:
            number = members.changed.number
            if (chosen := choose_one()) is not None:
                return chosen
            if loop.time() >= until:
                raise RolloutFailed(missing())
            await members.changed.wait(number, until - loop.time())

    def _node(self, spec: RolloutSpec, avoid: Avoid) -> Member[NodeServices] | None:
        ready = self._node_loads.with_room(self._nodes.ready(), spec.sandbox.memory_bytes)
        content = next((key for node in ready if (key := node.services.environments.content(spec))), "")
        holding = self._node_loads.holding(ready, content) if content else ()
        name = choose(self._node_loads.of(ready), spec.environment_key, avoid.nodes, holding)
        return next((node for node in ready if node.name == name), None)

    def _has_room_elsewhere(self, node: str, spec: RolloutSpec) -> bool:
        others = [other for other in self._nodes.ready() if other.name != node]
        return bool(self._node_loads.not_full(others, spec.sandbox.memory_bytes))

    def _gate(self, spec: RolloutSpec, avoid: Avoid) -> Member[GateServices] | None:
        if spec.gate_terms.HasField("run_budgets"):
            chosen = pinned(self._gates, spec.gate_terms.run_id)
            if chosen is None or chosen.peer.state is not State.LOST:
                return chosen
            raise RolloutFailed(_run_gate_lost(chosen.name))
        ready: Collection[Member[GateServices]] = self._gates.ready()
        for inference in inferences_of(spec.gate_terms):
            ready = self._gate_loads.reaching(ready, inference)
        ready = [gate for gate in ready if gate.name not in avoid.gates] or ready
        loads = self._gate_loads.of(ready)
        return min(ready, key=lambda gate: (loads[gate.name], gate.name), default=None)


def inferences_of(terms: rollout_gate_service_pb2.OpenRolloutRequest) -> Sequence[str]:
    """The gate's names for the inference services or pools that a rollout uses, each once."""
    sources = [terms.source, *(model.source for model in terms.models if model.HasField("source"))]
    used = (
        source.inference.name or DEFAULT_INFERENCE
        for source in sources
        if source.WhichOneof("source") in (None, "inference")
    )
    return tuple(dict.fromkeys(used))


def pinned(gates: Members[GateServices], run_id: str) -> Member[GateServices] | None:
    """The one gate that counts the budgets of a run: each rollout of the run is there. None = there is no gate."""
    names = [gate.name for gate in gates.all()]
    return gates.get(ranking(names, f"run {run_id}")[0]) if names else None


def node_lost(name: str) -> Failure:
    """The failure of attempts at a sandbox service that is lost."""
    message = f"the sandbox service {name} does not answer any more"
    return Failure(Cause.INFRASTRUCTURE, "NODE_LOST", message, True, Phase.QUEUED, component=Component.SANDBOX)


def gate_lost(name: str) -> Failure:
    """The failure of attempts at a gate that is lost."""
    message = f"gate {name} does not answer any more"
    return Failure(Cause.INFRASTRUCTURE, "GATE_LOST", message, True, Phase.QUEUED, component=Component.GATE)


def _node_missing() -> Failure:
    message = f"no sandbox service takes new work for {PLACE_S:g} s: none answers, or all are draining"
    return Failure(Cause.INFRASTRUCTURE, "NODE_MISSING", message, True, Phase.QUEUED, component=Component.SANDBOX)


def _gate_missing() -> Failure:
    message = f"no gate takes new work for {PLACE_S:g} s: none answers, or all are draining"
    return Failure(Cause.INFRASTRUCTURE, "GATE_MISSING", message, True, Phase.QUEUED, component=Component.GATE)


def _run_gate_lost(name: str) -> Failure:
    message = f"gate {name} counts this run's budgets and does not answer: repeat it when that gate is back"
    return Failure(Cause.INFRASTRUCTURE, "RUN_GATE_LOST", message, True, Phase.QUEUED, component=Component.GATE)


async def tried(peer: Peer, work: Callable[[], Awaitable[object]]) -> PenstockError | PeerLost | None:
    """Do something at a peer; return its error. A lost peer is not asked."""
    if peer.is_lost:
        return PeerLost(f"{peer.name} does not answer: what it has is released later")
    try:
        await work()
    except PenstockError as error:
        return error
    return None
