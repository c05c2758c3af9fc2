"""Rollouts that an earlier process of the driver began: what is taken up, what is not, and what is recorded once."""

from __future__ import annotations

from asyncio import Event, ensure_future
from time import time
from typing import Any

import pytest
from tests.unit.driver.conftest import SECRET, Driver, accepted, wire_spec

from penstock.driver.v1 import rollout_pb2
from penstock.sandbox.v1 import sandbox_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock_driver.agents.output_events import AgentEvent, EventKind, EventParser
from penstock_driver.domain.pauses import Pause
from penstock_driver.domain.ports import Exit, ExitReason, PreparedSnapshot, PreparedToolbox, SandboxFacts
from penstock_driver.domain.records import (
    GroupPlan,
    GroupRecord,
    Record,
    RequestKey,
    RolloutEnd,
    new_id,
    new_records,
)
from penstock_driver.domain.rollout import (
    AgentExit,
    ArtifactCollected,
    CallFinished,
    Cause,
    Component,
    Failure,
    Outcome,
    Phase,
    Progress,
    Reward,
    RolloutEvent,
    RolloutFailed,
)
from penstock_driver.domain.unended import AttemptPlace, Stage, Unended
from penstock_driver.placement.placement import Place
from penstock_driver.rollouts.event_limits import Allowance, EventLimits, OutputEvents
from penstock_driver.rollouts.groups import COMPLETE
from penstock_driver.rollouts.recorder import RolloutRecorder
from penstock_driver.rollouts.recovery.history import History
from penstock_driver.rollouts.recovery.sealed_specs import NotAdoptable, SealedSpecs
from penstock_driver.store.seal import Seal
from penstock_driver.wire.specs import effective_spec


@pytest.mark.requirement("R8", "R127")
async def test_sealed_spec_is_the_whole_spec_and_shows_no_secret(driver: Driver) -> None:
    """The next process finds it in the journal, branches find it after the end, and it goes with the rollout."""
    spec, record = accepted(driver)
    specs = driver.opened.parts.specs
    sealed = await specs.sealed(spec, record)
    assert SECRET.encode() not in sealed
    await driver.records.create(RequestKey(new_id("q"), "d"), [record], sealed=sealed)
    (unended,) = await driver.records.unended()
    opened = specs.opened(Unended(unended.record, await driver.records.sealed_spec(unended.record)))
    assert (opened.task, opened.sandbox, opened.limits, opened.gate_terms) == (
        spec.task,
        spec.sandbox,
        spec.limits,
        spec.gate_terms,
    )
    assert (opened.environment_key, opened.reports_changes) == (spec.environment_key, spec.reports_changes)
    driver.manager.start(spec, [record])
    await driver.manager.cancel(record.rollout_id, "")
    assert await driver.records.sealed_spec(record) == sealed
    await driver.manager.delete(record.rollout_id)
    assert await driver.records.sealed_spec(record) is None


@pytest.mark.requirement("R127")
async def test_rollouts_without_a_readable_spec_end_by_a_reason_of_their_own(driver: Driver) -> None:
    """Of an earlier version, of another key, and of an agent that is not known any more."""
    spec, record = accepted(driver)
    specs = driver.opened.parts.specs
    other = SealedSpecs(Seal([bytes(32)]), driver.registry)
    sealed = await specs.sealed(spec, record)
    for reader, data, reason in (
        (specs, None, "DRIVER_RESTARTED"),
        (other, sealed, "SPEC_UNREADABLE"),
        (specs, sealed[:-1], "SPEC_UNREADABLE"),
    ):
        with pytest.raises(NotAdoptable) as refused:
            reader.opened(Unended(record, sealed=data))
        assert (refused.value.failure.reason, refused.value.failure.retriable) == (reason, True)


@pytest.mark.requirement("R127")
async def test_an_earlier_version_of_a_built_in_agent_is_kept(driver: Driver) -> None:
    """A driver that comes with another one goes on with the rollouts of the last."""
    agent = driver.registry.get("default", "shell")
    await driver.registry.keep(agent)
    await driver.registry.keep(agent)
    await driver.journal.execute("UPDATE agent_specs SET sha256 = 'earlier'")
    later = await type(driver.registry).open(driver.journal)
    assert later.get("default", "shell", "earlier").spec == agent.spec
    assert later.get("default", "shell").sha256 == agent.sha256
    assert [known.spec.name for known in later.agents("default")].count("shell") == 1


def call(call_id: str) -> CallFinished:
    return CallFinished(trajectory_pb2.Call(call_id=call_id))


EXIT = AgentExit(Exit(ExitReason.EXITED, code=0), b"")


@pytest.mark.requirement("R127", "R96")
async def test_the_next_process_records_each_event_once(driver: Driver) -> None:
    """Phases and limits go on; what began with the next attempt is new."""
    _, record = accepted(driver)
    await driver.records.create(RequestKey(new_id("q"), "d"), [record])
    first = RolloutRecorder(record, driver.history, EventLimits())
    artifact, line = ArtifactCollected("log", b"x", 1), AgentEvent(EventKind.OTHER, {}, b"line")
    for phase in (Phase.PREPARING, Phase.CONFIGURING, Phase.RUNNING):
        first.enter(phase)
    for event in (line, call("c1"), line, EXIT, artifact):
        first.append(event)
    await driver.history.flush()
    (unended,) = await driver.records.unended()
    history = await History.read(driver.history, unended.record, EventLimits())
    assert len(history.agent_events) == 2
    next_one = RolloutRecorder(unended.record, driver.history, EventLimits(), history)
    assert next_one.progress.phase is Phase.RUNNING
    assert set(next_one.progress.seconds) == {Phase.QUEUED, Phase.PREPARING, Phase.CONFIGURING}
    before = next_one.current(unended.record).last_sequence
    for event in (EXIT, artifact):
        next_one.append(event)
    next_one.append_call(call("c1"))
    assert next_one.current(unended.record).last_sequence == before
    for _ in range(2):  # by the gate's stream, and by its list
        next_one.append_call(call("c2"))
    next_one.begin_again("again")
    next_one.enter(Phase.PREPARING)
    next_one.append(artifact)
    await driver.history.flush()
    events = await driver.events(record.rollout_id)
    kinds = [event.WhichOneof("event") for event in events]
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert (kinds.count("call_finished"), kinds.count("artifact"), kinds.count("agent_exited")) == (2, 2, 1)


@pytest.mark.requirement("R127", "R96")
@pytest.mark.parametrize("recorded", range(8))
def test_output_read_again_gives_the_events_that_are_missing(recorded: int) -> None:
    """However many are recorded, and where the allowance ends in the middle."""
    output = b"".join(b"line %d\n" % number for number in range(40))

    def read(allowance: Allowance, known: list[int]) -> list[RolloutEvent]:
        told: list[RolloutEvent] = []

        def record(event: RolloutEvent) -> None:
            told.append(event)
            allowance.took(10)

        events = OutputEvents(allowance, record, lambda: EventParser([]), known)
        events.feed(output)
        events.finish()
        return told

    limits = EventLimits(events=5)
    whole: list[Any] = read(Allowance(limits), [])
    assert whole[recorded:] == read(Allowance(limits), [10] * recorded)
    assert not isinstance(whole[0], Progress)


@pytest.mark.requirement("R70", "R127")
@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (GroupPlan(2, spares=1, quorum=2), "GROUP_COMPLETE"),
        (GroupPlan(3, quorum=2, grace_s=0.0), "STRAGGLER"),
    ],
    ids=["spare", "straggler"],
)
async def test_a_group_that_goes_on_counts_the_results_it_has(driver: Driver, plan: GroupPlan, reason: str) -> None:
    """Two of three had ended with a reward when the last process was killed, which had not cancelled the third."""
    spec, _ = accepted(driver)
    ids = tuple(new_id("r") for _ in range(3))
    group = GroupRecord(new_id("g"), None, spec.request, plan, 0.0, ids)
    records = new_records(spec, effective_spec(spec), ids, group.group_id)
    sealed = await driver.opened.parts.specs.sealed(spec, records[0])
    await driver.records.create(RequestKey(new_id("q"), "d"), records, group, sealed=sealed)
    for rollout_id in ids[:2]:
        driver.history.end(rollout_id, group.group_id, RolloutEnd(rollout_pb2.Outcome(), {}, 0, is_result=True))
    await driver.history.flush()
    driver.gate.hold = Event()
    assert await driver.manager.recover() == 1
    assert (await driver.outcome(records[2])).failure.reason == reason
    for record in records:
        assert await driver.records.sealed_spec(record) == sealed
        await driver.manager.delete(record.rollout_id)
    assert await driver.records.sealed_spec(records[0]) is None


async def left_group(driver: Driver, size: int, content: bytes = b"kiwi") -> list[Record]:
    """A group of which nothing has begun yet, as an earlier process recorded it."""
    wire = wire_spec()
    wire.task.files[0].content = content
    spec, _ = accepted(driver, wire)
    ids = tuple(new_id("r") for _ in range(size))
    group = GroupRecord(new_id("g"), None, spec.request, GroupPlan(size, quorum=size), 0.0, ids)
    records = new_records(spec, effective_spec(spec), ids, group.group_id)
    sealed = await driver.opened.parts.specs.sealed(spec, records[0])
    await driver.records.create(RequestKey(new_id("q"), "d"), records, group, sealed=sealed)
    return records


@pytest.mark.requirement("R127")
async def test_a_group_that_goes_on_has_one_copy_of_its_spec(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rollouts it has: it is read and opened once, and those that wait have it too."""
    records = [*await left_group(driver, 32, bytes(1 << 20)), *await left_group(driver, 32, bytes(1 << 20))]
    (alone,) = await driver.recorded(1)
    specs, read = driver.opened.parts.specs, list[str]()
    opened, sealed_spec = specs.opened, driver.records.sealed_spec

    def counted(unended: Unended) -> Any:
        read.append(unended.record.group_id or unended.record.rollout_id)
        return opened(unended)

    async def read_sealed(record: Record) -> bytes | None:
        read.append(f"sealed {record.group_id or record.rollout_id}")
        return await sealed_spec(record)

    monkeypatch.setattr(type(specs), "opened", lambda _, unended: counted(unended))
    monkeypatch.setattr(driver.records, "sealed_spec", read_sealed)
    driver.gate.hold = Event()
    assert await driver.manager.recover() == 65
    groups = {record.group_id: "" for record in records}
    assert sorted(read) == sorted(
        [*groups, alone.rollout_id, *(f"sealed {one}" for one in (*groups, alone.rollout_id))]  # type: ignore[type-var]
    )
    live = driver.manager._live
    assert len({id(live[record.rollout_id].spec.task) for record in records}) == 2
    assert live[alone.rollout_id]._spec is None
    driver.gate.hold.set()
    await driver.manager._cancel_all([record.rollout_id for record in (*records, alone)], COMPLETE)


@pytest.mark.requirement("R127")
async def test_rollouts_whose_group_is_gone_go_on(driver: Driver) -> None:
    """A deletion of an earlier version left them: without this the driver could never start again."""
    records = await left_group(driver, 2)
    await driver.journal.execute("DELETE FROM groups")
    assert await driver.manager.recover() == 2
    for record in records:
        outcome = await driver.outcome(record)
        assert not outcome.HasField("failure"), outcome.failure


@pytest.mark.requirement("R127")
async def test_a_rollout_whose_row_cannot_be_read_is_not_taken_up(driver: Driver) -> None:
    """A newer version wrote it."""
    (record,) = await driver.recorded(1)
    await driver.journal.execute("UPDATE rollouts SET stage = 'OF_LATER'")
    assert await driver.manager.recover() == 1
    assert (await driver.outcome(record)).failure.reason == "DRIVER_RESTARTED"


@pytest.mark.requirement("R124", "R127")
@pytest.mark.parametrize(("attempts", "reported"), [(1, ("g0", "g1")), (2, ())])
async def test_the_gate_of_an_attempt_that_begins_again_is_informed_that_the_rollout_is_stored(
    driver: Driver, attempts: int, reported: tuple[str, ...]
) -> None:
    """It kept the rollout for good. After several attempts of an earlier process, all gates are informed."""
    _, record = accepted(driver)
    await driver.records.create(RequestKey(new_id("q"), "d"), [record])
    first = RolloutRecorder(record, driver.history, EventLimits())
    first.enter(Phase.PREPARING)
    first.locate(gate="g0")
    if attempts > 1:
        first.retry(Failure(Cause.INFRASTRUCTURE, "NODE_LOST", "n0 is lost", True, Phase.PREPARING, Component.SANDBOX))
    await driver.history.flush()
    (unended,) = await driver.records.unended()
    history = await History.read(driver.history, unended.record, EventLimits())
    next_one = RolloutRecorder(unended.record, driver.history, EventLimits(), history)
    next_one.begin_again("again")
    next_one.locate(gate="g1")
    assert next_one.gates_to_report() == reported


@pytest.mark.requirement("R128")
async def test_an_attempt_whose_agent_was_started_may_have_been_answered(driver: Driver) -> None:
    """Also where its driver saw no call, as while it was cut off from the gate: the next attempt waits for it."""
    _, record = accepted(driver)
    await driver.records.create(RequestKey(new_id("q"), "d"), [record])
    recorder = RolloutRecorder(record, driver.history, EventLimits())
    lost = Failure(Cause.INFRASTRUCTURE, "NODE_LOST", "n0 is lost", True, Phase.RUNNING, Component.SANDBOX)
    recorder.enter(Phase.PREPARING)
    recorder.retry(lost)
    before = recorder.may_have_calls
    toolbox, snapshot = PreparedToolbox("t", "/t"), PreparedSnapshot("n", sandbox_pb2.FORK_KIND_FILESYSTEM)
    place = AttemptPlace("n0", "g0", SandboxFacts("s", "/home/agent", "/workspace"), snapshot, toolbox, 0.0)
    recorder.enter(Phase.RUNNING, place=place)
    recorder.retry(lost)
    assert (before, recorder.may_have_calls, recorder.has_calls) == (False, True, False)


@pytest.mark.requirement("R127")
async def test_a_rollout_that_waited_or_was_prepared_begins_again(driver: Driver) -> None:
    """It costs no attempt, and its events go on."""
    spec, record = accepted(driver)
    sealed = await driver.opened.parts.specs.sealed(spec, record)
    await driver.records.create(RequestKey(new_id("q"), "d"), [record], sealed=sealed)
    recorder = RolloutRecorder(record, driver.history, EventLimits())
    recorder.enter(Phase.PREPARING)
    await driver.history.flush()
    driver.sandboxes._new({"penstock_driver": driver.opened.parts.instance_id, "penstock_rollout": record.rollout_id})
    assert await driver.manager.recover() == 1
    outcome = await driver.outcome(record)
    ended = await driver.manager.get(record.rollout_id)
    assert not outcome.HasField("failure"), outcome.failure
    assert ended.attempts == 1
    events = await driver.events(record.rollout_id)
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))


async def left_running(driver: Driver, max_attempts: int = 1) -> tuple[Record, RolloutRecorder]:
    """A rollout whose agent an earlier process started in a sandbox, and what records it."""
    wire = wire_spec()
    wire.max_attempts = max_attempts
    spec, record = accepted(driver, wire)
    sealed = await driver.opened.parts.specs.sealed(spec, record)
    await driver.records.create(RequestKey(new_id("q"), "d"), [record], sealed=sealed)
    labels = {"penstock_driver": driver.opened.parts.instance_id, "penstock_rollout": record.rollout_id}
    sandbox_id, _ = driver.sandboxes._new(labels)
    toolbox, snapshot = PreparedToolbox("t", "/t"), PreparedSnapshot("n", sandbox_pb2.FORK_KIND_FILESYSTEM)
    place = AttemptPlace("", "", SandboxFacts(sandbox_id, "/home/agent", "/workspace"), snapshot, toolbox, 0.0)
    recorder = RolloutRecorder(record, driver.history, EventLimits())
    recorder.enter(Phase.RUNNING, place=place)
    return record, recorder


@pytest.mark.requirement("R127", "R131")
async def test_a_pause_ends_when_it_is_resumed_though_its_attempt_had_failed(driver: Driver) -> None:
    """The next attempt begins then; nothing is left to be let go."""
    record, recorder = await left_running(driver, max_attempts=2)
    recorder.begin_pause(Pause("why", time(), time() + 3600.0))
    lost = Failure(Cause.INFRASTRUCTURE, "NODE_LOST", "n0 is lost", True, Phase.RUNNING, Component.SANDBOX)
    await recorder.reach(Stage.DECIDED, Outcome(failure=lost))
    assert await driver.manager.recover() == 1
    assert (await driver.manager.resume(record.rollout_id, 30.0)).pause is None
    outcome = await driver.outcome(record)
    assert not outcome.HasField("failure"), outcome.failure
    assert (await driver.manager.get(record.rollout_id)).attempts == 2


@pytest.mark.requirement("R50", "R127")
@pytest.mark.parametrize("is_decided", [False, True], ids=["running", "decided"])
async def test_a_rollout_that_is_cancelled_before_it_is_taken_up_leaves_nothing(
    driver: Driver, *, is_decided: bool
) -> None:
    """As a group does that has its results. What an earlier process had decided stays."""
    record, recorder = await left_running(driver)
    if is_decided:
        await recorder.reach(Stage.DECIDED, Outcome(reward=Reward(1.0, 0.0, 1.0)))
    await recorder.secure()
    assert await driver.manager.recover() == 1
    driver.manager._live[record.rollout_id].cancel(COMPLETE)
    outcome = await driver.outcome(record)
    assert not driver.sandboxes.boxes
    assert (outcome.failure.reason, outcome.reward.value) == (("", 1.0) if is_decided else ("GROUP_COMPLETE", 0.0))


@pytest.mark.requirement("R49", "R127")
async def test_a_reward_is_kept_whose_place_has_left_the_list(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its artifacts are lost with the place; the policy is not sampled again."""
    record, recorder = await left_running(driver, max_attempts=2)
    recorder.enter(Phase.COLLECTING, so_far=Outcome(reward=Reward(1.0, 0.0, 1.0)))
    await recorder.secure()

    def gone(_node: str, _gate: str) -> Place:
        raise RolloutFailed(Failure(Cause.INFRASTRUCTURE, "NODE_LOST", "", True, Phase.QUEUED, Component.SANDBOX))

    monkeypatch.setattr(driver.manager._placement, "at", gone)
    assert await driver.manager.recover() == 1
    outcome = await driver.outcome(record)
    assert outcome.HasField("reward") and outcome.reward.value == 1.0
    assert (outcome.failure.reason, outcome.failure.phase) == ("NODE_LOST", rollout_pb2.PHASE_COLLECTING)
    assert (await driver.manager.get(record.rollout_id)).attempts == 1


async def left_before_its_agent(driver: Driver) -> Record:
    """A rollout whose first process is gone, which had recorded where the agent runs and had not started it."""
    spec, record = accepted(driver)
    sealed = await driver.opened.parts.specs.sealed(spec, record)
    await driver.records.create(RequestKey(new_id("q"), "d"), [record], sealed=sealed)
    driver.sandboxes.holds = {"start": Event()}
    driver.manager.start(spec, [record])
    await driver.sandboxes.holds["start"].wait()
    await driver.manager.leave(60)
    driver.sandboxes.holds = {}
    return record


async def goes_on_to_its_end(driver: Driver, record: Record) -> None:
    driver.manager = driver.make()
    assert await driver.manager.recover() == 1
    outcome = await driver.outcome(record)
    assert not outcome.HasField("failure"), outcome.failure
    assert (await driver.manager.get(record.rollout_id)).attempts == 1


@pytest.mark.requirement("R127")
async def test_an_attempt_begins_again_on_disk_before_its_sandbox_goes(driver: Driver) -> None:
    """A process that is killed while it deletes the sandbox would else leave the next one to look for it."""
    record = await left_before_its_agent(driver)
    driver.sandboxes.holds = {"delete_labelled": Event()}
    driver.manager = driver.make()
    assert await driver.manager.recover() == 1
    await driver.sandboxes.holds["delete_labelled"].wait()
    (unended,) = await driver.records.unended()
    driver.sandboxes.holds = {}
    await driver.manager.leave(60)
    assert unended.place is None
    await goes_on_to_its_end(driver, record)


@pytest.mark.requirement("R127")
async def test_a_driver_that_stops_deletes_after_the_disk_knows(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is slow as an attempt begins again, and its driver is stopped meanwhile."""
    record = await left_before_its_agent(driver)
    submit, flush = driver.journal.submit, driver.history.flush
    reached, asked, go = Event(), Event(), Event()

    async def slow(statements: Any, **how: Any) -> None:
        if any(sql.startswith("UPDATE rollouts SET phase") and given[0] == Phase.QUEUED for sql, given in statements):
            reached.set()
            await go.wait()
        await submit(statements, **how)

    async def flushed() -> None:
        if reached.is_set():
            asked.set()
        await flush()

    monkeypatch.setattr(driver.journal, "submit", slow)
    monkeypatch.setattr(driver.history, "flush", flushed)
    driver.manager = driver.make()
    assert await driver.manager.recover() == 1
    await reached.wait()
    driver.sandboxes.calls.clear()
    leaving = ensure_future(driver.manager.leave(60))
    await asked.wait()
    before = list(driver.sandboxes.calls)
    go.set()
    await leaving
    assert "delete" not in before
    assert "delete" in driver.sandboxes.calls
    await goes_on_to_its_end(driver, record)
