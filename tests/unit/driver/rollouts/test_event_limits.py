"""Agents that say and call more than anybody reads: what is kept of it is bounded, and what is left out is told."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf.json_format import MessageToDict
from tests.unit.driver.conftest import Driver

from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.journal import Journal
from penstock_driver.agents.output_events import AgentEvent, EventKind, EventParser, EventRule
from penstock_driver.app import MIGRATIONS
from penstock_driver.domain.ports import CallEnded, CallSpent
from penstock_driver.domain.records import Filter
from penstock_driver.domain.rollout import CallFinished, RolloutEvent, RolloutSpec
from penstock_driver.rollouts import event_limits
from penstock_driver.rollouts.event_limits import (
    PIECE_BYTES,
    TAIL_BYTES,
    TAIL_EVENTS,
    Allowance,
    EventLimits,
    OutputEvents,
)
from penstock_driver.store.event_log import PAGE, EventLog
from penstock_driver.store.summaries import Summaries

MOST = EventLimits(events=100, size_bytes=1 << 20)
OVERHEAD_EVENTS = 30
"""Phases, commands, the exit and the outcome of a rollout, and what says how much was dropped."""

FLOODS = {
    "lines": ("import sys\nfor _ in range(64):\n sys.stdout.write('y\\n' * (1 << 17))", 64 << 17),
    "events": (
        'import sys\nfor _ in range(1000):\n sys.stdout.write(\'{"type":"say","text":"x"}\\n\' * 1000)',
        1_000_000,
    ),
    "large events": (
        'import sys\nfor _ in range(200):\n sys.stdout.write(\'{"type":"say","text":"\' + \'x\' * 100_000 + \'"}\\n\')',
        200,
    ),
    "lines that make no event": ("import sys\nfor _ in range(64):\n sys.stdout.write('\\n' * (1 << 17))", 64 << 17),
}
RULES = [
    EventRule(when="type == 'say'", kind=EventKind.ASSISTANT, fields={"text": "text"}),
    EventRule(when="type == 'end'", kind=EventKind.DONE, fields={"failed": "failed"}),
]


def printing(driver: Driver, program: str) -> RolloutSpec:
    """A rollout whose agent is this program."""
    order = driver.spec()
    spec = order.agent.spec
    said = spec.events.model_copy(update={"rules": RULES})
    spec = spec.model_copy(update={"argv": ["python3", "-c", program], "events": said})
    return replace(order, agent=replace(order.agent, spec=spec), task=replace(order.task, verifier=None))


async def bounded(driver: Driver) -> None:
    """From here on the driver keeps MOST of each rollout."""
    await driver.manager.aclose()
    driver.manager = driver.opened.next_manager(MOST)


@pytest.mark.requirement("R96")
@pytest.mark.parametrize("flood", FLOODS)
async def test_flood_of_output_leaves_bounded_rows_and_one_event_of_losses(driver: Driver, flood: str) -> None:
    """Eight million lines, a million events, events of 100 kB, and lines that make none; the end is kept."""
    program, lines = FLOODS[flood]
    await bounded(driver)
    last = '\nprint(\'{"type":"end","failed":true}\')'
    record = await driver.start(printing(driver, program + last))
    outcome = await driver.outcome(record)
    assert outcome.failure.reason == "AGENT_REPORTED_FAILURE", "its last line counts"
    (row,) = await driver.journal.query("SELECT COUNT(*), SUM(LENGTH(payload)) FROM events", ())
    assert row[0] <= MOST.events + TAIL_EVENTS + OVERHEAD_EVENTS
    # The event by which an allowance is used up may be larger than what is left.
    assert row[1] <= MOST.size_bytes + 3 * TAIL_BYTES + 200_000
    events = await driver.events(record.rollout_id)
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    told = [event.agent_event for event in events if event.HasField("agent_event")]
    (at,) = [index for index, event in enumerate(told) if "dropped_lines" in event.data]
    dropped = MessageToDict(told[at].data)
    read = at if flood != "lines that make no event" else 10 * MOST.events
    assert dropped["dropped_lines"] == lines + 1 - read and dropped["dropped_bytes"] > 0
    assert dropped["last_events"] == len(told) - at - 1
    assert told[-1].data["failed"] is True


@pytest.mark.requirement("R96")
async def test_calls_beyond_the_allowance_are_counted_and_have_no_event(driver: Driver) -> None:
    """Ten thousand calls of one rollout; its row has the sums of all."""
    await bounded(driver)
    driver.gate.hold = hold = asyncio.Event()
    record = await driver.start(driver.spec())
    await driver.gate.called.wait()
    driver.manager.watch_calls()
    for number in range(10_000):
        call = trajectory_pb2.Call(call_id=f"c{number}", rollout_id=record.rollout_id)
        driver.gate.call_ends.put_nowait(CallEnded(record.rollout_id, call, CallSpent(2, 3)))
    signal = driver.history.signal(record.rollout_id)
    while not driver.gate.call_ends.empty():
        await signal.wait(signal.number)
    hold.set()
    await driver.outcome(record)
    events = await driver.events(record.rollout_id)
    assert sum(event.HasField("call_finished") for event in events) == MOST.events
    (row,) = await Summaries(driver.journal).newest(Filter(), 0, 10)
    assert (row.calls, row.prompt_tokens, row.completion_tokens) == (10_000, 20_000, 30_000)
    said = [event.progress.message for event in events if event.HasField("progress")]
    assert "9900 further model calls were counted and have no event" in said


@pytest.mark.requirement("R71", "R96")
@pytest.mark.parametrize("size", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("most", [1, 3, 4])
def test_every_line_is_reported_or_counted_however_output_is_split(size: int, most: int) -> None:
    """Also the line within which the allowance ends, and nothing is said to be dropped where nothing is."""
    output = b"".join(b'{"type":"say","text":"%d"}\n' % number for number in range(4))
    allowance, told = Allowance(EventLimits(events=most)), list[RolloutEvent]()

    def record(event: RolloutEvent) -> None:
        told.append(event)
        allowance.took(1)

    events = OutputEvents(allowance, record, lambda: EventParser(RULES))
    for at in range(0, len(output), size):
        events.feed(output[at : at + size])
    events.finish()
    texts = [event.data.get("text") for event in told if isinstance(event, AgentEvent) and event.raw_line]
    assert texts == ["0", "1", "2", "3"], "what is dropped is short here, so its end is all of it"
    said = [event.data for event in told if isinstance(event, AgentEvent) and not event.raw_line]
    left = output.split(b"\n", most)[most]
    assert said == ([{"dropped_lines": 4 - most, "dropped_bytes": len(left), "last_events": 4 - most}] if left else [])


@pytest.mark.requirement("R96")
async def test_verbose_agent_does_not_delay_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each turn of reading, here a piece, whoever waits goes on."""
    monkeypatch.setattr(event_limits, "_TURN_S", 0.0)
    told: list[RolloutEvent] = []
    seen: set[int] = set()
    output = OutputEvents(Allowance(EventLimits()), told.append, lambda: EventParser([]))
    taking = asyncio.ensure_future(output.take(b"some words\n" * 1000))
    while not taking.done():
        seen.add(len(told))
        await asyncio.sleep(0)
    assert len(told) == 1000
    assert len(seen) >= 1000 * 11 // PIECE_BYTES


@pytest.mark.requirement("R96")
@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
async def test_events_are_written_in_their_order_however_many_come_at_once(tmp_path: Path, count: int) -> None:
    """Many rows to a statement, and what stands between two of them stays between."""
    async with await Journal.open(tmp_path / "driver.db", MIGRATIONS) as journal:
        history = EventLog(journal)
        happened = AgentEvent(EventKind.OTHER, {}, b"")
        for number in range(1, count + 1):
            history.append("r", "g", number, happened, is_summary=False)
        history.append("s", "g", 1, CallFinished(trajectory_pb2.Call()), is_summary=False)
        history.append("r", "g", count + 1, happened, is_summary=False)
        await history.aclose()
        rows = [row for after in range(0, count, PAGE) for row in await history.events("r", after)]
        assert [(row.rollout_id, row.sequence) for row in rows] == [("r", number) for number in range(1, count + 2)]
        together = await history.group_events("g", 0, summary=False)
        assert [event.rollout_id for _, event in together] == ["r"] * count + ["s", "r"]
