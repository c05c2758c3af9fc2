"""Attempts whose agent ran when their driver was killed: the agent's time, and a sandbox service that is full."""

from __future__ import annotations

import json
from asyncio import Event
from collections.abc import Callable
from pathlib import Path
from time import time
from typing import Any

import pytest
from tests.support.waiting import eventually
from tests.unit.driver.conftest import Driver, accepted, wire_spec
from tests.unit.driver.rollouts.test_users import obeys

from penstock.driver.v1 import rollout_pb2
from penstock_chassis.errors import ResourceExhausted
from penstock_driver.domain.pauses import Pause
from penstock_driver.domain.ports import SandboxFacts
from penstock_driver.domain.records import Record, RequestKey, new_id
from penstock_driver.environments.forks import ThrottledForks

LIMIT_S, RAN_S = 600_000.0, 100_000.0
"""Days, so that what a test takes does not count."""
FULL = ResourceExhausted("full", reason="SANDBOX_LIMIT", metadata={"permanent": "true"})
"""For longer than anyone waits."""


async def started(driver: Driver, wire: rollout_pb2.RolloutSpec) -> Record:
    spec, record = accepted(driver, wire)
    sealed = await driver.opened.parts.specs.sealed(spec, record)
    await driver.records.create(RequestKey(new_id("q"), "d"), [record], sealed=sealed)
    driver.manager.start(spec, [record])
    return record


async def left_before_its_second_instruction(driver: Driver, paused_s: float = 0.0) -> Record:
    """A rollout whose user has decided, and whose agent its driver could not start again. It was paused before."""
    reached = Event()

    def script(messages: list[dict[str, Any]]) -> dict[str, Any]:
        if messages[-1]["role"] == "tool":
            driver.sandboxes.holds = {"start": reached}
        return obeys(messages)

    driver.gate.script = script
    wire = wire_spec()
    wire.limits.agent.FromSeconds(int(LIMIT_S))
    wire.task.instruction = "printf ki > out.txt"
    wire.user.script.instructions.append("printf wi >> out.txt")
    record = await started(driver, wire)
    driver.manager._live[record.rollout_id].recorder.paused_s = paused_s
    await reached.wait()
    await driver.manager.leave(60)
    driver.gate.script, driver.sandboxes.holds = obeys, {}
    return record


async def goes_on(driver: Driver, record: Record, change: Callable[[dict[str, Any]], None], **paused: Any) -> float:
    """How many seconds the agent is given by the next driver, which is resumed; `change` changes the stored place."""
    ((stored,),) = await driver.journal.query("SELECT place FROM rollouts WHERE rollout_id = ?", (record.rollout_id,))
    place = json.loads(stored)
    change(place)
    columns = {"place": json.dumps(place), **paused}
    sets = ", ".join(f"{name} = ?" for name in columns)
    await driver.journal.execute(
        f"UPDATE rollouts SET {sets} WHERE rollout_id = ?",
        (*columns.values(), record.rollout_id),
    )
    given: list[float] = []
    start = driver.sandboxes.start

    async def noted(sandbox_id: str, process_id: str, command: Any, *rest: Any, **more: Any) -> None:
        given.append(command.timeout_s)
        await start(sandbox_id, process_id, command, *rest, **more)

    driver.sandboxes.start = noted  # type: ignore[method-assign]
    driver.manager = driver.make()
    assert await driver.manager.recover() == 1
    assert (await driver.manager.resume(record.rollout_id, 30.0)).pause is None
    outcome = await driver.outcome(record)
    assert not outcome.HasField("failure") and outcome.reward.value == 1.0, outcome
    (seconds,) = given
    return seconds


@pytest.mark.requirement("R131", "R133", "R127")
async def test_a_pause_in_force_across_a_restart_takes_none_of_the_conversations_time(driver: Driver) -> None:
    record = await left_before_its_second_instruction(driver)
    now = time()
    pause = Pause("why", now - 2 * LIMIT_S, now + LIMIT_S)

    def long_ago(place: dict[str, Any]) -> None:
        place["deadline"] = pause.start_time - RAN_S + LIMIT_S

    seconds = await goes_on(driver, record, long_ago, pause=pause.to_json(), pauses=1)
    assert seconds == pytest.approx(LIMIT_S - RAN_S, rel=0.01)


@pytest.mark.requirement("R131", "R133", "R127")
@pytest.mark.parametrize("since_s", [0.0, 50_000.0])
async def test_pauses_before_the_agents_start_give_it_no_time_after_a_restart(driver: Driver, since_s: float) -> None:
    """Such as in the queue. Those since its start do."""
    record = await left_before_its_second_instruction(driver, paused_s=70_000.0)

    def paused_before(place: dict[str, Any]) -> None:
        place["deadline"] = time() - RAN_S - since_s + LIMIT_S

    seconds = await goes_on(driver, record, paused_before, paused_s=70_000.0 + since_s, pauses=2)
    assert seconds == pytest.approx(LIMIT_S - RAN_S, rel=0.01)


@pytest.mark.requirement("R127")
async def test_a_place_of_an_earlier_version_is_taken_up(driver: Driver) -> None:
    """It does not say how long its rollout had been paused before the agent's start."""
    record = await left_before_its_second_instruction(driver)
    seconds = await goes_on(driver, record, lambda place: place.pop("paused_s"))
    assert seconds == pytest.approx(LIMIT_S, rel=0.01)


async def left_at_work(driver: Driver, wire: rollout_pb2.RolloutSpec) -> tuple[Record, Event]:
    """A rollout whose driver is gone while its agent waits for an answer, until the event is set."""
    driver.gate.hold = Event()
    record = await started(driver, wire)
    await driver.gate.called.wait()
    await driver.manager.leave(60)
    driver.sandboxes.calls.clear()
    driver.manager = driver.make()
    return record, driver.gate.hold


@pytest.mark.requirement("R127", "R26", "R51")
async def test_a_full_sandbox_service_costs_a_taken_up_attempt_its_diff_alone(driver: Driver) -> None:
    """Its own sandbox may hold the slot for which it would wait."""
    wire = wire_spec()
    wire.task.keep_diff = True
    record, answer = await left_at_work(driver, wire)
    driver.sandboxes.fail["fork"] = [FULL]
    answer.set()
    assert await driver.manager.recover() == 1
    outcome = await driver.outcome(record)
    assert not outcome.HasField("failure") and outcome.reward.value == 1.0, outcome
    assert (await driver.manager.get(record.rollout_id)).attempts == 1
    events = await driver.events(record.rollout_id)
    told = [event.progress.message for event in events]
    assert any("is not kept, though the task asks for it" in line and "full" in line for line in told), told
    assert not any(event.HasField("artifact") for event in events)


@pytest.mark.requirement("R127", "R76")
@pytest.mark.parametrize("restores", [False, True], ids=["diff", "restore"])
async def test_a_taken_up_agent_is_watched_before_another_sandbox_is_asked_for(
    driver: Driver, tmp_path: Path, *, restores: bool
) -> None:
    """What was saved before the agent's start is saved again, once the agent has ended."""
    (tmp_path / "tests").write_text("kept")
    wire = wire_spec()
    wire.task.keep_diff = True
    if restores:
        wire.task.verifier.restore.append(str(tmp_path / "tests"))
    record, answer = await left_at_work(driver, wire)
    fork, exits = driver.sandboxes.fork, list[bool]()

    async def forked(snapshot_id: str, **how: Any) -> Any:
        await driver.history.flush()
        exits.append(any(event.HasField("agent_exited") for event in await driver.events(record.rollout_id)))
        return await fork(snapshot_id, **how)

    driver.sandboxes.fork = forked  # type: ignore[method-assign]
    answer.set()
    assert await driver.manager.recover() == 1
    outcome = await driver.outcome(record)
    assert not outcome.HasField("failure") and outcome.reward.value == 1.0, outcome
    assert exits == [True]
    assert outcome.grading.restored == restores
    artifacts = [event.artifact for event in await driver.events(record.rollout_id) if event.HasField("artifact")]
    assert [artifact.name for artifact in artifacts] == ["changes.diff"]
    assert b"+++ b/out.txt" in artifacts[0].content


@pytest.mark.requirement("R127", "R51")
async def test_attempts_that_wait_for_each_others_slots_do_not_all_give_up_at_once(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one makes room for the others, whose agents may all have ended while no driver ran."""
    wire = wire_spec()
    wire.task.verifier.restore.append(str(tmp_path / "none"))
    driver.gate.hold = Event()
    records = [await started(driver, wire) for _ in range(3)]
    await eventually(lambda: len(driver.gate.requests) == len(records), "the agents' calls")
    await driver.manager.leave(60)
    driver.manager, patience, fork = driver.make(), list[float](), ThrottledForks.fork

    async def forked(forks: ThrottledForks, snapshot_id: str, **how: Any) -> SandboxFacts:
        patience.append(how["patience_s"])
        return await fork(forks, snapshot_id, **how)

    monkeypatch.setattr(ThrottledForks, "fork", forked)
    driver.gate.hold.set()
    assert await driver.manager.recover() == len(records)
    for record in records:
        assert not (await driver.outcome(record)).HasField("failure")
    assert len(set(patience)) == len(records)
    assert all(450.0 <= seconds <= 900.0 for seconds in patience)


@pytest.mark.requirement("R127", "R49")
async def test_an_agent_that_failed_before_its_baseline_was_refused_has_failed(driver: Driver, tmp_path: Path) -> None:
    """The first cause stays."""
    wire = wire_spec()
    wire.task.verifier.restore.append(str(tmp_path))
    driver.gate.script = lambda messages: 400
    record, answer = await left_at_work(driver, wire)
    driver.sandboxes.fail["fork"] = [FULL]
    answer.set()
    assert await driver.manager.recover() == 1
    outcome = await driver.outcome(record)
    assert outcome.failure.reason == "AGENT_CRASHED", outcome
