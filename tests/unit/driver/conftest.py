"""A driver in a small world: see world.py."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.unit.driver.world import Directories, HttpGate, bash, say

from penstock.driver.v1 import rollout_pb2
from penstock.interception.v1 import interception_pb2, rollout_gate_service_pb2
from penstock_chassis.journal import Journal
from penstock_driver.agents.launch import AgentChoice
from penstock_driver.agents.registry import AgentRegistry
from penstock_driver.domain.ports import Command, SandboxTerms
from penstock_driver.domain.records import GroupPlan, GroupRecord, Record, RequestKey, new_id, new_records
from penstock_driver.domain.rollout import Limits, RolloutSpec, Task, Verifier
from penstock_driver.rollouts.manager import RolloutManager
from penstock_driver.rollouts.preflight import check_backend
from penstock_driver.store.event_log import EventLog
from penstock_driver.store.records import Records
from penstock_driver.testing import OpenDriver, open_driver
from penstock_driver.wire.specs import effective_spec, rollout_spec

SECRET = "sk-secret '$(leak)"


def write_then_stop(messages: list[dict[str, object]]) -> dict[str, object]:
    """The script of an agent that writes `out.txt` and is done."""
    return say("done") if messages[-1]["role"] == "tool" else bash("cat note.txt > out.txt")


def empty_terms() -> rollout_gate_service_pb2.OpenRolloutRequest:
    """What a client that chooses nothing asks of the gate."""
    return rollout_gate_service_pb2.OpenRolloutRequest()


@dataclass
class Driver:
    """One driver, with its world."""

    opened: OpenDriver
    manager: RolloutManager
    records: Records
    history: EventLog
    registry: AgentRegistry
    sandboxes: Directories
    gate: HttpGate
    journal: Journal

    def make(self) -> RolloutManager:
        """A manager as the next driver has it."""
        return self.opened.next_manager()

    def spec(self, **changes: object) -> RolloutSpec:
        """A small task for the shell agent: copy note.txt to out.txt; reward by file."""
        task = Task(
            task_id="t1",
            instruction="copy note.txt to out.txt",
            setup=(Command(shell="printf word > note.txt"),),
            verifier=Verifier(
                commands=(Command(shell="cmp note.txt out.txt && r=1 || r=0.25; echo $r > $PENSTOCK_REWARD_FILE"),),
                reward_by_file=True,
            ),
        )
        base = RolloutSpec(
            agent=self.registry.get("default", "shell"),
            choice=AgentChoice(),
            task=task,
            limits=Limits(),
            sandbox=SandboxTerms(),
            gate_terms=empty_terms(),
            request=rollout_pb2.RolloutSpec(),
            environment_key="k",
        )
        return replace(base, **changes)  # type: ignore[arg-type]

    async def start(self, spec: RolloutSpec, key: str = "k") -> Record:
        """Start one rollout."""
        records = new_records(spec, spec.request, [new_id("r")])
        await self.records.create(RequestKey(new_id("q"), "d"), records)
        self.manager.start(replace(spec, environment_key=key), records)
        return records[0]

    async def recorded(self, count: int) -> list[Record]:
        """Rollouts of one spec each, recorded as a client's requests record them: with their sealed specs."""
        made = [accepted(self) for _ in range(count)]
        for spec, record in made:
            sealed = await self.opened.parts.specs.sealed(spec, record)
            await self.records.create(RequestKey(new_id("q"), "d"), [record], sealed=sealed)
        return [record for _, record in made]

    async def start_recorded(self, count: int) -> list[Record]:
        """Start such rollouts, which may wait."""
        records = await self.recorded(count)
        for record in records:
            self.manager.start(accepted(self)[0], [record])
        return records

    async def start_group(self, spec: RolloutSpec, plan: GroupPlan) -> GroupRecord:
        """Start the rollouts of a group."""
        ids = tuple(new_id("r") for _ in range(plan.size + plan.spares))
        group = GroupRecord(new_id("g"), None, spec.request, plan, 0.0, ids)
        records = new_records(spec, spec.request, ids, group.group_id)
        await self.records.create(RequestKey(new_id("q"), "d"), records, group)
        self.manager.start(spec, records, group)
        return group

    async def run(self, spec: RolloutSpec, key: str = "k") -> rollout_pb2.Outcome:
        """Run one rollout to its end."""
        record = await self.start(spec, key)
        return await self.outcome(record)

    async def outcome(self, record: Record) -> rollout_pb2.Outcome:
        """The outcome of a rollout, when it has ended."""
        ended = await self.manager.wait(record.rollout_id, 60)
        assert ended.outcome is not None
        return ended.outcome

    async def events(self, rollout_id: str) -> list[rollout_pb2.RolloutEvent]:
        """All events of a rollout."""
        return await self.history.events(rollout_id, 0)

    async def is_over(self, rollout_id: str) -> bool:
        """Whether a rollout's end is on disk."""
        return (await self.records.get(rollout_id)).end_time is not None

    async def owes_nothing(self) -> bool:
        """Whether all that rollouts held is released."""
        return not await self.records.pending_cleanups()


def wire_spec() -> rollout_pb2.RolloutSpec:
    """A rollout as a client asks for it, with a secret and with a file."""
    wire = rollout_pb2.RolloutSpec(mode=interception_pb2.MODE_INTERCEPTION_GATE)
    wire.source.tokenizer.name = "tiny"
    wire.agent.name = "shell"
    wire.task.instruction = "copy"
    wire.task.files.add(path="note.txt", content=b"kiwi")
    wire.task.verifier.passed_share.SetInParent()
    wire.task.verifier.commands.add(shell="cmp note.txt out.txt").secret_env["KEY"] = SECRET
    return wire


def accepted(driver: Driver, wire: rollout_pb2.RolloutSpec | None = None) -> tuple[RolloutSpec, Record]:
    """The spec after all checks, and its record."""
    backend = replace(driver.sandboxes.facts, diff=False)
    spec = check_backend(rollout_spec(wire or wire_spec(), driver.registry, "default"), [backend])
    return spec, new_records(spec, effective_spec(spec), [new_id("r")])[0]


@pytest.fixture
async def gate() -> AsyncIterator[HttpGate]:
    async with HttpGate(write_then_stop) as gate:
        yield gate


@pytest.fixture
async def driver(tmp_path: Path, gate: HttpGate) -> AsyncIterator[Driver]:
    sandboxes = Directories(tmp_path / "boxes")
    async with open_driver(tmp_path, sandboxes, gate, agent_port=gate.port, max_running=8, max_queued=100) as opened:
        parts = opened.parts
        driver = Driver(
            opened, parts.manager, parts.records, parts.event_log, parts.agents, sandboxes, gate, opened.journal
        )
        yield driver
        await driver.manager.aclose()
    assert not sandboxes.boxes, "a sandbox was left behind"
