"""Attempts on several sandbox services and gates, and what happens when one of them is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.driver.conftest import write_then_stop
from tests.unit.driver.known_peers import Known
from tests.unit.driver.world import Directories, HttpGate

from penstock.interception.v1 import rollout_gate_service_pb2
from penstock_chassis.aio.broadcast import Signal
from penstock_chassis.errors import Unsupported
from penstock_chassis.membership.peers import Host, Peers, State
from penstock_driver.app import runner_services
from penstock_driver.domain.ports import Load, SandboxTerms
from penstock_driver.domain.rollout import Failure, RolloutFailed
from penstock_driver.placement import fleet as module
from penstock_driver.placement.everywhere import AllGates
from penstock_driver.placement.fleet import (
    NODE_PATIENCE,
    FleetPlacement,
    GateServices,
    Members,
    NodeServices,
    gate_lost,
    node_lost,
)
from penstock_driver.placement.placement import Avoid
from penstock_driver.settings import DriverSettings


@dataclass
class World:
    """Two sandbox services, two gates, and the placement over them."""

    nodes: Known
    gates: Known
    placement: FleetPlacement
    sandboxes: dict[str, Directories]
    work: asyncio.Task[None]
    said: dict[str, Load] = field(default_factory=dict)
    """What each sandbox service and gate says of its load; those that are not here are older."""
    asked: Signal = field(default_factory=Signal)
    losses: list[Failure] = field(default_factory=list)

    async def read(self, **said: Load) -> None:
        """Returns when all members have been asked again after they say this."""
        self.said.update(said)
        number = self.asked.number
        while self.asked.number < number + 2 * (len(self.nodes.peers) + len(self.gates.peers)):
            await self.asked.wait(self.asked.number)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with opened(tmp_path) as made:
        yield made


@asynccontextmanager
async def opened(folder: Path, patience_s: float = 60.0, silence_s: float = 0.0) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        nodes, gates = Known(), Known()
        nodes.add("n0", "n1")
        gates.add("g0", "g1")
        sandboxes = {name: Directories(folder / name) for name in nodes.peers}
        listening = {name: await stack.enter_async_context(HttpGate(write_then_stop)) for name in gates.peers}
        settings = DriverSettings(anonymous=True, state_dir=folder)
        said: dict[str, Load] = {}
        asked = Signal()

        async def ask(name: str) -> Load:
            asked.notify()
            if name not in said:
                raise Unsupported("older", reason="UNIMPLEMENTED")
            return said[name]

        gates_found: Members[GateServices] = Members(
            cast(Peers, gates),
            lambda peer: GateServices(listening[peer.name], lambda: peer.is_lost, ask_load=lambda _: ask(peer.name)),
            gate_lost,
            {Host.SILENT: silence_s, Host.REFUSING: patience_s, Host.ACCEPTING: patience_s},
        )
        placement = FleetPlacement(
            Members(
                cast(Peers, nodes),
                lambda peer: NodeServices.of(sandboxes[peer.name], peer, lambda _: ask(peer.name)),
                node_lost,
                NODE_PATIENCE,
            ),
            gates_found,
            lambda node, gate: runner_services(node, gate, AllGates(gates_found), settings),
        )
        work = asyncio.create_task(placement.follow())
        try:
            yield World(nodes, gates, placement, sandboxes, work, said, asked)
        finally:
            work.cancel()
            await asyncio.wait([work])


def spec(key: str = "k", memory_bytes: int | None = None, **budgets: int) -> Any:
    """What placement reads of a rollout."""

    @dataclass
    class Spec:
        environment_key: str
        gate_terms: rollout_gate_service_pb2.OpenRolloutRequest
        agent: Any
        sandbox: SandboxTerms

    terms = rollout_gate_service_pb2.OpenRolloutRequest(run_id="run")
    if budgets:
        terms.run_budgets.max_calls = 5
    return Spec(key, terms, SimpleNamespace(sha256="a"), SandboxTerms(memory_bytes=memory_bytes))


async def lost_once(world: World, known: Known, name: str, host: Host) -> Failure:
    """The failure of an attempt at a place, when one of its services is lost."""
    place = await world.placement.place(spec(), Avoid())
    reported: asyncio.Queue[Failure] = asyncio.Queue()
    assert name in (place.node, place.gate)
    with world.placement.occupied(place, reported.put_nowait):
        known.lose(name, host)
        failure = await reported.get()
        known.changed.notify()
        await asyncio.sleep(0)
        assert reported.empty(), "reported once"
        return failure


async def test_an_attempt_ends_when_its_sandbox_service_is_lost(world: World) -> None:
    place = await world.placement.place(spec(), Avoid())
    failure = await lost_once(world, world.nodes, place.node, Host.REFUSING)
    assert (failure.reason, failure.retriable) == ("NODE_LOST", True)
    assert place.services.is_node_lost()
    again = await world.placement.place(spec(), Avoid({place.node}, {place.gate}))
    assert again.node != place.node
    assert again.gate != place.gate


async def test_a_sandbox_service_that_is_only_slow_keeps_its_attempts_and_gets_no_new_one(world: World) -> None:
    place = await world.placement.place(spec(), Avoid())
    losses: list[Failure] = []
    with world.placement.occupied(place, losses.append):
        world.nodes.lose(place.node, Host.ACCEPTING)
        await asyncio.sleep(0)
        assert (await world.placement.place(spec(), Avoid())).node != place.node
        world.nodes.find(place.node)
        await asyncio.sleep(0)
        assert not losses
        world.nodes.lose(place.node, Host.ACCEPTING)
        world.nodes.lose(place.node, Host.REFUSING)
        await asyncio.sleep(0)
        assert [failure.reason for failure in losses] == ["NODE_LOST"], "its process is gone"


async def test_an_attempt_ends_when_its_gates_host_is_silent(world: World) -> None:
    place = await world.placement.place(spec(), Avoid())
    failure = await lost_once(world, world.gates, place.gate, Host.SILENT)
    assert (failure.reason, failure.retriable) == ("GATE_LOST", True)


async def test_a_gate_that_restarts_in_time_ends_no_attempt(tmp_path: Path) -> None:
    async with opened(tmp_path, patience_s=3600.0) as world:
        place = await world.placement.place(spec(), Avoid())
        losses: list[Failure] = []
        with world.placement.occupied(place, losses.append):
            world.gates.lose(place.gate, Host.REFUSING)
            await asyncio.sleep(0)
            world.gates.find(place.gate)
            await asyncio.sleep(0)
        assert not losses


async def test_a_gate_that_stays_away_ends_its_attempts(tmp_path: Path) -> None:
    async with opened(tmp_path, patience_s=0.0) as world:
        place = await world.placement.place(spec(), Avoid())
        assert (await lost_once(world, world.gates, place.gate, Host.REFUSING)).reason == "GATE_LOST"


async def test_a_silent_gate_that_returns_in_time_ends_no_attempt(tmp_path: Path) -> None:
    async with opened(tmp_path, patience_s=0.0, silence_s=3600.0) as world:
        place = await world.placement.place(spec(), Avoid())
        losses: list[Failure] = []
        with world.placement.occupied(place, losses.append):
            world.gates.lose(place.gate, Host.SILENT)
            await asyncio.sleep(0)
            world.gates.find(place.gate)
            await asyncio.sleep(0)
        assert not losses


async def test_a_host_that_answers_without_its_gate_ends_the_patience_with_silence(tmp_path: Path) -> None:
    async with opened(tmp_path, patience_s=0.0, silence_s=3600.0) as world:
        place = await world.placement.place(spec(), Avoid())
        reported: asyncio.Queue[Failure] = asyncio.Queue()
        with world.placement.occupied(place, reported.put_nowait):
            world.gates.lose(place.gate, Host.SILENT)
            await asyncio.sleep(0)
            assert reported.empty()
            world.gates.lose(place.gate, Host.REFUSING)
            assert (await reported.get()).reason == "GATE_LOST"


async def test_broken_probes_end_the_work_of_placement(world: World) -> None:
    world.gates.broken.set()
    with pytest.raises(ExceptionGroup):
        await asyncio.shield(world.work)


async def test_a_removed_member_ends_its_attempts(world: World) -> None:
    place = await world.placement.place(spec(), Avoid())
    reported: asyncio.Queue[Failure] = asyncio.Queue()
    with world.placement.occupied(place, reported.put_nowait):
        removed = world.nodes.peers.pop(place.node)
        removed.loss.set()
        world.nodes.changed.notify()
        assert (await reported.get()).reason == "NODE_LOST"


async def test_a_draining_member_gets_no_new_attempt(world: World) -> None:
    world.nodes.peers["n0"].state = State.DRAINING
    places = [await world.placement.place(spec(str(number)), Avoid()) for number in range(8)]
    assert {place.node for place in places} == {"n1"}


async def test_equal_states_meet_and_others_spread(world: World) -> None:
    places = [await world.placement.place(spec(str(number)), Avoid()) for number in range(32)]
    assert {place.node for place in places} == {"n0", "n1"}
    assert len({(await world.placement.place(spec("one"), Avoid())).node for _ in range(4)}) == 1


@pytest.mark.parametrize(("kind", "reason"), [("nodes", "NODE_MISSING"), ("gates", "GATE_MISSING")])
async def test_without_a_place_an_attempt_fails(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: str, reason: str
) -> None:
    known: Known = getattr(world, kind)
    for name in list(known.peers):
        known.lose(name)
    monkeypatch.setattr(module, "PLACE_S", 0.0)
    with pytest.raises(RolloutFailed) as caught:
        await world.placement.place(spec(), Avoid())
    assert (caught.value.failure.reason, caught.value.failure.retriable) == (reason, True)


async def test_an_attempt_waits_for_a_place(world: World) -> None:
    for name in ("n0", "n1"):
        world.nodes.lose(name)
    waiting = asyncio.ensure_future(world.placement.place(spec(), Avoid()))
    await asyncio.sleep(0)
    assert not waiting.done()
    world.nodes.find("n1")
    assert (await waiting).node == "n1"


async def test_a_run_with_budgets_has_one_gate(world: World) -> None:
    places = [await world.placement.place(spec(str(number), max_calls=5), Avoid()) for number in range(6)]
    (gate,) = {place.gate for place in places}
    world.gates.lose(gate)
    with pytest.raises(RolloutFailed) as caught:
        await world.placement.place(spec(max_calls=5), Avoid())
    assert caught.value.failure.reason == "RUN_GATE_LOST"
    assert (await world.placement.place(spec(), Avoid())).gate != gate, "others go on"


@pytest.mark.requirement("R117", "R119")
async def test_a_gate_whose_engines_are_away_is_avoided(world: World) -> None:
    """It has the fewest rollouts because they fail there; one that needs other engines may go there, or all if none."""
    away = Load(0, unreachable_inference=frozenset({"default"}))
    await world.read(g0=away, g1=Load(9))
    assert (await world.placement.place(spec(), Avoid())).gate == "g1"
    other = spec()
    other.gate_terms.source.inference.name = "other"
    assert (await world.placement.place(other, Avoid())).gate == "g0"
    outside = spec()
    outside.gate_terms.source.upstream.name = "default"
    assert (await world.placement.place(outside, Avoid())).gate == "g0"
    await world.read(g1=Load(9, unreachable_inference=frozenset({"default"})))
    assert (await world.placement.place(spec(), Avoid())).gate == "g0"


async def test_a_release_fails_while_a_lost_service_may_hold_something(world: World) -> None:
    labels = {"rollout": "r"}
    for sandboxes in world.sandboxes.values():
        sandboxes._new(labels)
    world.nodes.lose("n0")
    with pytest.raises(Exception, match="n0 does not answer"):
        await world.placement.release("r", labels)
    assert not world.sandboxes["n1"].boxes, "what answers is released all the same"
    world.nodes.find("n0")
    await world.placement.release("r", labels)
    assert not world.sandboxes["n0"].boxes


async def test_the_return_of_a_lost_service_is_announced(world: World) -> None:
    """What waits for it is released then."""
    returned: asyncio.Queue[None] = asyncio.Queue()
    world.placement.on_return(lambda: returned.put_nowait(None))
    world.nodes.lose("n0")
    await asyncio.sleep(0)
    assert returned.empty()
    world.nodes.find("n0")
    await returned.get()
    world.gates.lose("g0")
    await asyncio.sleep(0)
    world.gates.find("g0")
    await returned.get()


async def test_what_a_lost_sandbox_service_had_is_over_with_its_leases(world: World) -> None:
    labels = {"rollout": "r"}
    for sandboxes in world.sandboxes.values():
        sandboxes._new(labels)
    world.nodes.lose("n0")
    await world.placement.release("r", labels, sandboxes_over=True)
    assert not world.sandboxes["n1"].boxes, "where one can be asked, it is"
    world.gates.lose("g0")
    with pytest.raises(Exception, match="g0 does not answer"):
        await world.placement.release("r", labels, sandboxes_over=True)
