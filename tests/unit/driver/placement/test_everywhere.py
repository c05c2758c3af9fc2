"""All gates and all sandbox services as one, while some are away or not known yet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from tests.unit.driver.known_peers import Known
from tests.unit.driver.world import Directories

from penstock.trajectory.v1 import trajectory_pb2
from penstock.values import ids
from penstock_chassis.errors import NotFound, PenstockError, Unavailable
from penstock_chassis.membership.peers import Host, PeerLost, Peers
from penstock_driver.placement import everywhere
from penstock_driver.placement.everywhere import AllGates, AllSandboxes
from penstock_driver.placement.fleet import (
    NODE_PATIENCE,
    GateServices,
    Members,
    NodeServices,
    gate_lost,
    gate_patience,
    node_lost,
)


@dataclass
class Keeper:
    """A gate that has the captures of some rollouts."""

    kept: set[str] = field(default_factory=set)
    stored_there: list[str] = field(default_factory=list)

    async def capture(self, rollout_id: str, **_: Any) -> AsyncIterator[trajectory_pb2.Trajectory]:
        if rollout_id not in self.kept:
            raise NotFound("none", reason="ROLLOUT_UNKNOWN")
        yield trajectory_pb2.Trajectory(rollout_id=rollout_id)

    async def stored(self, rollout_id: str, gates: Sequence[str]) -> None:
        self.stored_there.append(rollout_id)


@dataclass
class Gates:
    """Any number of gates."""

    known: Known
    gates: dict[str, Keeper]
    captures: AllGates

    async def read(self, rollout_id: str, gate: str) -> list[str]:
        capture = self.captures.capture(rollout_id, gate=gate, include_bodies=False, include_top=False)
        return [fragment.rollout_id async for fragment in capture]

    async def refusal(self, rollout_id: str, gate: str) -> PenstockError:
        with pytest.raises(PenstockError) as caught:
            await self.read(rollout_id, gate)
        return caught.value


@asynccontextmanager
async def opened(*names: str) -> AsyncIterator[Gates]:
    known = Known()
    known.add(*names)
    gates = {name: Keeper() for name in names}
    members = Members[GateServices](
        cast(Peers, known),
        lambda peer: GateServices(cast(Any, gates.setdefault(peer.name, Keeper()))),
        gate_lost,
        gate_patience(0.0),
    )
    work = asyncio.create_task(members.follow())
    try:
        yield Gates(known, gates, AllGates(members))
    finally:
        work.cancel()
        await asyncio.wait([work])


@pytest.mark.requirement("R124")
async def test_a_gate_that_has_not_said_its_name_yet_may_have_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that starts while a gate's host is down knows no name of it, and must not take its captures for gone."""
    monkeypatch.setattr(everywhere, "RETURN_S", 0.0)
    async with opened("g0") as world:
        world.known.add_unnamed("g1")
        refused = await world.refusal("r1", "g1")
        assert (type(refused), refused.reason) == (Unavailable, "GATE_LOST")
        with pytest.raises(Unavailable, match="g1") as unreported:
            await world.captures.stored("r1", ["g0", "g1"])
        assert unreported.value.reason == "GATE_LOST"
        assert world.gates["g0"].stored_there == ["r1"], "the one that answers knows it"
        world.known.add("g1")
        world.gates["g1"].kept.add("r1")
        assert await world.read("r1", "g1") == ["r1"]
        await world.captures.stored("r1", ["g1"])
        assert world.gates["g1"].stored_there == ["r1"]


@pytest.mark.requirement("R124")
async def test_a_gate_that_is_no_member_is_waited_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod that is replaced leaves the list, and is there again under its name; one that was removed is gone."""
    async with opened("g0", "g1") as world:
        assert (await world.refusal("r1", "g1")).reason == "ROLLOUT_UNKNOWN", "it is there"
        world.known.remove("g1")
        refused = await world.refusal("r1", "g1")
        assert (type(refused), refused.reason) == (Unavailable, "GATE_LOST"), "the removal was not even noticed yet"
        await asyncio.sleep(0)
        refused = await world.refusal("r1", "g1")
        assert (type(refused), refused.reason) == (Unavailable, "GATE_LOST")
        with pytest.raises(Unavailable, match="g1"):
            await world.captures.stored("r1", ["g1"])
        never = await world.refusal("r1", "g2")
        assert never.reason == "GATE_LOST", "a driver that has just started"
        monkeypatch.setattr(everywhere, "RETURN_S", 0.0)
        refused = await world.refusal("r1", "g1")
        assert (type(refused), refused.reason, refused.metadata["gate"]) == (NotFound, "GATE_GONE", "g1")
        with pytest.raises(NotFound) as unreported:
            await world.captures.stored("r1", ["g0", "g1"])
        assert (unreported.value.reason, unreported.value.metadata["gate"]) == ("GATE_GONE", "g1")


@pytest.mark.requirement("R124")
async def test_only_the_gate_itself_says_that_it_has_no_capture() -> None:
    async with opened("g0") as world:
        refused = await world.refusal("r1", "g0")
        assert (type(refused), refused.reason) == (NotFound, "ROLLOUT_UNKNOWN")
        refused = await world.refusal("r1", "")
        assert (type(refused), refused.reason) == (NotFound, "ROLLOUT_UNKNOWN"), "it reached no gate"
        world.known.remove("g0")
        refused = await world.refusal("r1", "")
        assert (type(refused), refused.reason) == (Unavailable, "GATE_LOST"), "nobody was asked"


@pytest.mark.requirement("R70")
async def test_sandboxes_beside_a_known_one_are_deleted_while_another_service_is_lost(tmp_path: Path) -> None:
    known, boxes = Known(), {name: Directories(tmp_path / name) for name in ("n0", "n1")}
    known.add("n0", "n1")
    nodes: Members[NodeServices] = Members(
        cast(Peers, known), lambda peer: NodeServices.of(boxes[peer.name], peer), node_lost, NODE_PATIENCE
    )
    sandboxes = AllSandboxes(nodes)
    beside = {name: ids.make("sb", name, "0" * 32) for name in ("n0", "n1", "n2")}
    for there in boxes.values():
        there._new({"terminal": "t"})
    known.lose("n1", Host.SILENT)
    with pytest.raises(PeerLost):
        await sandboxes.delete_labelled({"terminal": "t"}, beside=beside["n1"])
    assert boxes["n0"].boxes, "not asked"
    assert len(await sandboxes.delete_labelled({"terminal": "t"}, beside=beside["n0"])) == 1
    assert not boxes["n0"].boxes and boxes["n1"].boxes
    assert not await sandboxes.delete_labelled({"terminal": "t"}, beside=beside["n2"]), "it went with its service"
    with pytest.raises(PeerLost):
        await sandboxes.delete_labelled({"terminal": "t"}, beside="of an earlier version")
    boxes["n3"] = Directories(tmp_path / "n3")
    known.add_unnamed("n3")
    with pytest.raises(PeerLost, match="n3"):  # which may be n2
        await sandboxes.delete_labelled({"terminal": "t"}, beside=beside["n2"])
