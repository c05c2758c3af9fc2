"""Terminal episodes on several sandbox services, one of which is lost."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from tests.unit.driver.known_peers import Known
from tests.unit.driver.world import Box, Directories, HttpGate, say

from penstock.driver.v1 import terminal_service_pb2
from penstock.sandbox.v1 import sandbox_pb2
from penstock.values import ids
from penstock_chassis.errors import Unavailable
from penstock_chassis.membership.peers import Host, Peers
from penstock_driver.domain.ports import Command, PreparedSnapshot, SandboxFacts, SandboxTerms, SnapshotSpec
from penstock_driver.domain.records import RequestKey
from penstock_driver.domain.rollout import Limits, Task, Verifier
from penstock_driver.domain.terminal_episode import Answer, Step, TerminalSpec
from penstock_driver.placement.everywhere import AllSandboxes
from penstock_driver.placement.fleet import NODE_PATIENCE, Members, NodeServices, node_lost
from penstock_driver.terminals.manager import TerminalManager
from penstock_driver.testing import OpenDriver, open_driver


class Named(Directories):
    """Boxes whose ids name their service, as those of a fleet do."""

    def __init__(self, base: Path, name: str) -> None:
        super().__init__(base)
        self.name = name
        self.forks: list[str] = []
        """The snapshots that were forked here."""

    def _new(self, labels: Mapping[str, str]) -> tuple[str, Box]:
        made, box = super()._new(labels)
        sandbox_id = ids.make("sb", self.name, os.urandom(16).hex())
        self.boxes[sandbox_id] = self.boxes.pop(made)
        return sandbox_id, box

    async def prepare_snapshot(self, spec: SnapshotSpec) -> AsyncIterator[Any]:
        async for step in super().prepare_snapshot(spec):
            if isinstance(step, PreparedSnapshot):
                named = ids.make("ss", self.name, os.urandom(16).hex())
                self.snapshots[named] = self.snapshots.pop(step.snapshot_id)
                yield PreparedSnapshot(named, sandbox_pb2.FORK_KIND_FILESYSTEM)
            else:
                yield step

    async def fork(self, snapshot_id: str, **terms: Any) -> SandboxFacts:
        self.forks.append(snapshot_id)
        return await super().fork(snapshot_id, **terms)


@dataclass
class World:
    """Two sandbox services, and the terminals over them."""

    known: Known
    nodes: dict[str, Named]
    opened: OpenDriver

    @property
    def terminals(self) -> TerminalManager:
        return self.opened.parts.terminals

    async def open(self, request_id: str, task: str = "k") -> str:
        """Open an episode of a task."""
        made = Task("t", f"write out.txt of {task}", verifier=Verifier(commands=(Command(shell="test -e out.txt"),)))
        request = terminal_service_pb2.OpenTerminalRequest()
        spec = TerminalSpec(made, SandboxTerms(), Limits(), request, task)
        return (await self.terminals.open(RequestKey(request_id, "d"), spec)).terminal_id

    async def answer(self, terminal_id: str) -> terminal_service_pb2.StepResponse:
        step = Step("answer", Answer("done"), "answer", terminal_service_pb2.StepRequest())
        return await self.terminals.step(terminal_id, step)

    def having(self) -> str:
        """The only service that has a sandbox."""
        (name,) = (name for name, there in self.nodes.items() if there.boxes)
        return name


def other_than(name: str) -> str:
    return "n1" if name == "n0" else "n0"


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with opened_on(tmp_path) as made:
        yield made


@asynccontextmanager
async def opened_on(tmp_path: Path) -> AsyncIterator[World]:
    known = Known()
    known.add("n0", "n1")
    nodes = {name: Named(tmp_path / name, name) for name in known.peers}
    members: Members[NodeServices] = Members(
        cast(Peers, known), lambda peer: NodeServices.of(nodes[peer.name], peer), node_lost, NODE_PATIENCE
    )
    work = asyncio.create_task(members.follow())
    async with (
        HttpGate(lambda _: say("")) as gate,
        open_driver(tmp_path, AllSandboxes(members), gate, max_terminals=9) as opened,
    ):
        world = World(known, nodes, opened)
        try:
            yield world
        finally:
            for name in nodes:
                known.find(name)
            await world.terminals.aclose()
            work.cancel()
            await asyncio.wait([work])
            assert not any(there.boxes for there in nodes.values()), "a sandbox was left behind"


@pytest.mark.requirement("R70")
async def test_an_episode_ends_while_another_sandbox_service_is_lost(world: World) -> None:
    """Its own sandbox is gone: nothing of it can be at the other one."""
    answered, closed = await world.open("q1"), await world.open("q2")
    world.known.lose(other_than(world.having()), Host.SILENT)
    assert (await world.answer(answered)).ended
    await world.terminals.close(answered)
    await world.terminals.close(closed)
    assert not world.terminals.pending_cleanups
    assert not any(there.boxes for there in world.nodes.values())
    assert (await world.terminals.get(answered)).released


@pytest.mark.requirement("R50", "R70")
async def test_an_episode_whose_own_sandbox_service_is_lost_is_owed(world: World) -> None:
    terminal_id = await world.open("q")
    own = world.having()
    world.known.lose(own, Host.SILENT)
    with pytest.raises(Unavailable) as pending:
        await world.terminals.close(terminal_id)
    assert pending.value.reason == "TERMINAL_UNRELEASED"
    assert world.terminals.pending_cleanups == (terminal_id,) and world.nodes[own].boxes
    world.known.find(own)
    await world.terminals.aclose()
    assert not world.nodes[own].boxes


@pytest.mark.requirement("R50", "R70")
async def test_an_ended_episode_of_the_last_driver_is_released_at_its_own_sandbox_service(world: World) -> None:
    terminal_id = await world.open("q")
    own = world.having()
    world.known.lose(own, Host.SILENT)
    with pytest.raises(Unavailable):
        await world.terminals.close(terminal_id)
    await world.terminals.aclose()
    world.known.find(own)
    world.known.lose(other_than(own), Host.SILENT)
    following = world.opened.next_terminals()
    await following.recover()
    await following.aclose()
    assert not following.pending_cleanups and not world.nodes[own].boxes
    assert (await following.get(terminal_id)).released


@pytest.mark.requirement("R117")
async def test_a_state_that_a_lost_sandbox_service_has_is_prepared_at_another_one(world: World) -> None:
    """Its task goes on without that service, and so do the tasks whose states are elsewhere."""
    first = await world.open("q1")
    own = world.having()
    world.known.lose(own, Host.SILENT)
    second = await world.open("q2")
    assert len(world.nodes[other_than(own)].boxes) == 1
    await world.open("q3")
    assert world.nodes[other_than(own)].calls.count("prepare_snapshot") == 1, "once, as it was there"
    assert len(world.nodes[own].forks) == 1, "a lost one is not asked"
    await world.terminals.close(second)
    with pytest.raises(Unavailable):
        await world.terminals.close(first)
