"""A driver in a small world: see world.py."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
from tests.unit.driver.world import Directories, HttpGate, bash, say

from penstock.driver.v1 import rollout_pb2
from penstock_chassis.journal import Journal
from penstock_driver.app import MIGRATIONS
from penstock_driver.fleet import Fleet
from penstock_driver.history import History
from penstock_driver.launches import AgentChoice
from penstock_driver.ports import Command, SandboxTerms
from penstock_driver.records import Record, Records, new_id, new_records
from penstock_driver.registry import AgentRegistry
from penstock_driver.rollouts import Limits, RolloutOrder, Task, Verifier
from penstock_driver.rpc.shown import encode_event, encode_outcome


def write_then_stop(messages: list[dict[str, object]]) -> dict[str, object]:
    """The script of an agent that writes `out.txt` and is done."""
    return say("done") if messages[-1]["role"] == "tool" else bash("cat note.txt > out.txt")


@dataclass
class Driver:
    """The domain of one driver, with its world."""

    fleet: Fleet
    records: Records
    history: History
    registry: AgentRegistry
    sandboxes: Directories
    gate: HttpGate
    journal: Journal
    make: Callable[[], Fleet]
    """A fleet as the next driver has it."""

    def order(self, **changes: object) -> RolloutOrder:
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
        base = RolloutOrder(self.registry.get("shell"), AgentChoice(), task, Limits(), SandboxTerms(), b"")
        return replace(base, **changes)  # type: ignore[arg-type]

    async def start(self, order: RolloutOrder, key: str = "k") -> Record:
        """Start one rollout."""
        records = new_records(order, b"", [new_id("r")])
        await self.records.create(new_id("q"), "d", records)
        self.fleet.start(order, key, records)
        return records[0]

    async def run(self, order: RolloutOrder, key: str = "k") -> rollout_pb2.Outcome:
        """Run one rollout to its end."""
        record = await self.start(order, key)
        return await self.outcome(record)

    async def outcome(self, record: Record) -> rollout_pb2.Outcome:
        """The outcome of a rollout, when it has ended."""
        ended = await self.fleet.wait(record.rollout_id, 60)
        assert ended.outcome is not None
        return rollout_pb2.Outcome.FromString(ended.outcome)

    async def events(self, rollout_id: str) -> list[rollout_pb2.RolloutEvent]:
        """All events of a rollout."""
        return [rollout_pb2.RolloutEvent.FromString(payload) for _, payload in await self.history.events(rollout_id, 0)]

    async def is_over(self, rollout_id: str) -> bool:
        """Whether a rollout's end is on disk."""
        return (await self.records.get(rollout_id)).end_time is not None

    async def owes_nothing(self) -> bool:
        """Whether all that rollouts held is released."""
        return not await self.records.owed()


@pytest.fixture
async def gate() -> AsyncIterator[HttpGate]:
    async with HttpGate(write_then_stop) as gate:
        yield gate


@pytest.fixture
async def driver(tmp_path: Path, gate: HttpGate) -> AsyncIterator[Driver]:
    async with await Journal.open(tmp_path / "driver.db", MIGRATIONS) as journal:
        sandboxes = Directories(tmp_path / "boxes")
        records, history = Records(journal), History(journal, encode_event)
        make = partial(
            Fleet,
            records,
            history,
            sandboxes,
            gate,
            instance_id=await records.instance_id("d1"),
            encode_outcome=encode_outcome,
            max_running=8,
            max_queued=100,
            agent_port=gate.port,
        )
        driver = Driver(make(), records, history, await AgentRegistry.open(journal), sandboxes, gate, journal, make)
        yield driver
        await driver.fleet.aclose()
        await history.aclose()
        assert not sandboxes.boxes, "a sandbox was left behind"
