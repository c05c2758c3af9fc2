"""Failures: by whom, tried again or not, cancelled in any phase, watched from any event."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import signal
import sqlite3
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import SecretStr
from tests.support.waiting import GUARD_S, eventually, eventually_async
from tests.unit.driver.conftest import Driver
from tests.unit.driver.rollouts.test_attempt import with_task
from tests.unit.driver.world import HttpGate

from penstock.driver.v1 import agent_pb2, rollout_pb2
from penstock.driver.v1 import rollout_service_pb2 as pb
from penstock.interception.v1 import interception_pb2
from penstock.interception.v1 import rollout_gate_service_pb2 as gate_pb
from penstock.interception.v1 import rollout_gate_service_pb2_grpc as gate_grpc
from penstock.sandbox.v1 import file_service_pb2 as file_pb
from penstock.sandbox.v1 import file_service_pb2_grpc as file_grpc
from penstock.sandbox.v1 import sandbox_service_pb2 as sandbox_pb
from penstock.sandbox.v1 import sandbox_service_pb2_grpc as sandbox_grpc
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.aio.retry import Backoff
from penstock_chassis.errors import (
    AlreadyExists,
    FailedPrecondition,
    NotFound,
    PenstockError,
    ResourceExhausted,
    Unavailable,
)
from penstock_chassis.homes import Home
from penstock_chassis.journal import Journal
from penstock_chassis.testing import serve
from penstock_driver.agents.output_events import MAX_DEPTH, MAX_RAW_BYTES, EventKind, EventParser, EventRule
from penstock_driver.agents.specs import Artifact
from penstock_driver.app import MIGRATIONS, build
from penstock_driver.clients import sandboxes
from penstock_driver.clients.gate import GrpcGate
from penstock_driver.clients.sandboxes import GrpcSandboxes
from penstock_driver.domain.failures import (
    check_failure,
    classify_exit,
    failure_of,
    is_of_the_request,
    setup_failure,
)
from penstock_driver.domain.ports import (
    CallEnded,
    CallSpent,
    Command,
    CommandResult,
    Exit,
    ExitReason,
    Gate,
    GateClosing,
)
from penstock_driver.domain.records import GroupPlan, Record, RequestKey, new_id, new_records
from penstock_driver.domain.rollout import (
    COMPONENT_OF,
    Cause,
    Component,
    Failure,
    Limits,
    Outcome,
    Phase,
    RolloutSpec,
    Verifier,
)
from penstock_driver.environments.cleanup import Cleanups
from penstock_driver.environments.forks import ThrottledForks
from penstock_driver.environments.throttle import AdaptiveThrottle
from penstock_driver.grading.grader import Grader
from penstock_driver.grading.restore import Baseline
from penstock_driver.placement.placement import Avoid, Place
from penstock_driver.rollouts import manager, runner
from penstock_driver.rollouts.attempt import Attempt
from penstock_driver.rollouts.branch_room import BranchRoom
from penstock_driver.rollouts.branching import Parents
from penstock_driver.rollouts.context import AttemptResult
from penstock_driver.rollouts.preflight import Preflight
from penstock_driver.rollouts.use_cases import RolloutCreation, RolloutDeletion, RolloutReading, RolloutUseCases
from penstock_driver.rpc.rollout_service import RolloutServicer
from penstock_driver.settings import DriverSettings
from penstock_driver.store import event_log
from penstock_driver.store.annotations import Annotations
from penstock_driver.store.records import Records
from penstock_driver.store.summaries import Summaries
from penstock_driver.trajectories.annotating import Annotator
from penstock_driver.wire.to_proto import decode_event, event_to_proto

LOST = Unavailable("injected", reason="INJECTED")


def told(events: Sequence[rollout_pb2.RolloutEvent], kind: str) -> list[Any]:
    return [getattr(event, kind) for event in events if event.WhichOneof("event") == kind]


def with_artifact(order: RolloutSpec) -> RolloutSpec:
    artifact = Artifact(name="out", path="{{workdir}}/out.txt")
    spec = order.agent.spec.model_copy(update={"artifacts": [artifact]})
    return replace(order, agent=replace(order.agent, spec=spec))


@pytest.mark.requirement("R74")
def test_failures_have_one_cause_and_only_unrelated_ones_are_retried() -> None:
    """The sets are closed: a failure that contradicts itself cannot be made."""
    assert COMPONENT_OF.keys() | {Cause.INFRASTRUCTURE} == set(Cause)
    for cause in COMPONENT_OF:
        assert Failure(cause, "X", "", False, Phase.RUNNING).caused_by is COMPONENT_OF[cause]
        with pytest.raises(ValueError, match="only infrastructure failures"):
            Failure(cause, "X", "", False, Phase.RUNNING, component=Component.GATE)
    for cause in set(Cause) - {Cause.INFRASTRUCTURE, Cause.MODEL}:
        with pytest.raises(ValueError, match="not retriable"):
            Failure(cause, "X", "", True, Phase.RUNNING)
    for component in Component:
        failure = Failure(Cause.INFRASTRUCTURE, "X", "", True, Phase.RUNNING, component=component)
        assert failure.caused_by is component
    with pytest.raises(ValueError, match="only infrastructure failures"):
        Failure(Cause.INFRASTRUCTURE, "X", "", True, Phase.RUNNING)


@pytest.mark.requirement("R62")
@pytest.mark.parametrize(
    ("reason", "component", "caused_by"),
    [
        ("SANDBOX_LIMIT", Component.SANDBOX, Component.SANDBOX),
        ("TRANSPORT_UNAVAILABLE", Component.GATE, Component.GATE),
        ("INFERENCE_UNREACHABLE", Component.GATE, Component.ENGINE),
        ("UPSTREAM_KEY_REFUSED", Component.GATE, Component.ENGINE),
        ("TEMPLATE_UNSUPPORTED", Component.GATE, Component.ENGINE),
    ],
)
def test_service_error_is_blamed_on_that_service_or_its_engine(
    reason: str, component: Component, caused_by: Component
) -> None:
    """The one to look at, not the one who said it."""
    failure = failure_of(Unavailable("no", reason=reason), Phase.PREPARING, component)
    assert (failure.cause, failure.caused_by, failure.retriable) == (Cause.INFRASTRUCTURE, caused_by, True)


@pytest.mark.requirement("R128")
@pytest.mark.parametrize("reason", ["SANDBOX_LOST", "SANDBOX_UNKNOWN"])
def test_a_sandbox_that_is_gone_is_a_loss_that_is_repeated(reason: str) -> None:
    """Also one that somebody deleted, or whose service came back without its disk."""
    failure = failure_of(NotFound("gone", reason=reason), Phase.VERIFYING, Component.SANDBOX)
    assert (failure.cause, failure.caused_by, failure.retriable) == (Cause.INFRASTRUCTURE, Component.SANDBOX, True)


@pytest.mark.parametrize(
    "end",
    [Exit(ExitReason.EXITED, code=0), Exit(ExitReason.EXITED, code=1), Exit(ExitReason.TIMED_OUT, duration_s=1.0)],
)
def test_an_exact_replay_that_diverged_fails_however_its_agent_ends(end: Exit) -> None:
    closing = GateClosing(calls=3, unanswered=1, diverged="Call 1 differs", exhausted_budget="max_calls")
    failure = classify_exit(end, closing, None, [0], Phase.RUNNING)
    assert failure is not None and failure.message.endswith("Call 1 differs")
    assert (failure.reason, failure.component, failure.retriable) == ("REPLAY_DIVERGED", Component.AGENT, False)


@pytest.mark.requirement("R43", "R74")
@pytest.mark.parametrize("end", [Exit(ExitReason.EXITED, code=1), Exit(ExitReason.SIGNALED, signal=11)])
@pytest.mark.parametrize("seen", [True, False])
def test_bad_exit_during_a_gate_outage_is_not_the_agents(end: Exit, seen: bool) -> None:
    """What the agent could not help is not graded, and never a zero. A driver that was away too has not seen it."""
    closing = GateClosing(calls=3, restored=not seen)
    failure = classify_exit(end, closing, None, [0], Phase.RUNNING, gate_was_away=seen)
    assert failure is not None
    assert (failure.reason, failure.caused_by, failure.retriable) == ("GATE_INTERRUPTED", Component.GATE, True)
    assert not failure.is_gradable
    good = Exit(ExitReason.EXITED, code=0)
    assert classify_exit(good, closing, None, [0], Phase.RUNNING, gate_was_away=seen) is None


@pytest.mark.requirement("R59", "R120")
@pytest.mark.parametrize("code", [0, 1])
@pytest.mark.parametrize("closing", [GateClosing(lease_ended=True), GateClosing(is_unknown=True)])
def test_an_attempt_whose_gate_closed_it_or_lost_its_disk_is_never_graded(code: int, closing: GateClosing) -> None:
    """Its agent was refused from then on, and may have ended well all the same."""
    failure = classify_exit(Exit(ExitReason.EXITED, code=code), closing, None, [0], Phase.RUNNING)
    assert failure is not None
    assert (failure.reason, failure.retriable, failure.component) == ("GATE_LOST", True, Component.GATE)


@pytest.mark.requirement("R59", "R72", "R74")
@pytest.mark.parametrize("reason", ["CONTEXT_EXCEEDED", "CALL_TOO_LARGE"])
def test_a_policy_that_fills_its_context_until_its_agent_crashes_is_graded(reason: str) -> None:
    """It cannot choose to be left out; where a service failed too, that comes first."""
    end = Exit(ExitReason.EXITED, code=1)
    closing = GateClosing(calls=3, unanswered=1, last_failure=reason, is_final=True, refused=1)
    failure = classify_exit(end, closing, None, [0], Phase.RUNNING)
    assert failure is not None and failure.is_gradable and not failure.retriable
    assert (failure.reason, failure.caused_by) == ("CONTEXT_EXCEEDED", Component.AGENT)
    assert classify_exit(Exit(ExitReason.EXITED, code=0), closing, None, [0], Phase.RUNNING) is None
    away = classify_exit(end, closing, None, [0], Phase.RUNNING, gate_was_away=True)
    assert away is not None and away.reason == "GATE_INTERRUPTED"
    at_once = classify_exit(end, replace(closing, unanswered=3, refused=3), None, [0], Phase.RUNNING)
    assert at_once is not None and at_once.cause is Cause.MODEL
    lost = classify_exit(
        end, replace(closing, last_failure="UPSTREAM_UNREACHABLE", refused=0, lost=1), None, [0], Phase.RUNNING
    )
    assert lost is not None and not lost.is_gradable


@pytest.mark.requirement("R59", "R72", "R74")
@pytest.mark.parametrize(
    ("failures", "graded"),
    [
        ([("MODEL_NOT_ALLOWED", False)], True),
        ([("UPSTREAM_REFUSED", False), ("TEMPLATE_REFUSED", False)], True),
        ([("FIELD_INVALID", False), ("CONTEXT_EXCEEDED", False)], True),
        ([("MEDIA_MISMATCH", False)], True),
        ([("REQUEST_FAILS", True)], True),
        ([("REQUEST_FAILS", False), ("REQUEST_FAILS", True)], True),
        ([("REQUEST_FAILS", True), ("UPSTREAM_REFUSED", True)], False),
        ([("UPSTREAM_REFUSED", True)], False),
        ([("MODEL_NOT_ALLOWED", False), ("UPSTREAM_UNREACHABLE", True)], False),
        ([("UPSTREAM_UNREACHABLE", True), ("CONTEXT_EXCEEDED", False)], False),
        ([("GPU_ON_FIRE", False)], False),
        ([("UPSTREAM_SAMPLING_UNSUPPORTED", False)], False),
    ],
)
def test_policy_that_crashes_after_an_unanswerable_request_is_graded(
    failures: list[tuple[str, bool]], graded: bool
) -> None:
    """A refusal that it can provoke is its own doing; one that a service had first is the service's."""
    refused = sum(is_of_the_request(*failure) for failure in failures)
    closing = GateClosing(
        calls=9,
        unanswered=len(failures),
        last_failure=failures[-1][0],
        refused=refused,
        lost=len(failures) - refused,
    )
    failure = classify_exit(Exit(ExitReason.SIGNALED, signal=9), closing, None, [0], Phase.RUNNING)
    assert failure is not None
    assert (failure.is_gradable, failure.retriable) == (graded, not graded)
    assert failure.caused_by is (Component.AGENT if graded else Component.ENGINE)


@pytest.mark.requirement("R59", "R74")
def test_agent_that_ends_well_after_an_unanswered_call_gave_up() -> None:
    """Some end with 0 when the model is gone; what they left is not graded."""
    end = Exit(ExitReason.EXITED, code=0)
    gave_up = GateClosing(calls=3, unanswered=1, last_failure="UPSTREAM_UNREACHABLE", gave_up=True, lost=1)
    failure = classify_exit(end, gave_up, None, [0], Phase.RUNNING)
    assert failure is not None
    assert (failure.reason, failure.caused_by, failure.retriable) == ("MODEL_CALL_FAILED", Component.ENGINE, True)
    assert classify_exit(end, replace(gave_up, gave_up=False), None, [0], Phase.RUNNING) is None, (
        "it asked again, and went on"
    )
    own = replace(gave_up, last_failure="REQUEST_FAILS", refused=1, lost=0)
    assert classify_exit(end, own, None, [0], Phase.RUNNING) is None, "its own request failed"


@pytest.mark.requirement("R72", "R74", "R93")
@pytest.mark.parametrize("end", [Exit(ExitReason.EXITED, code=1), Exit(ExitReason.SIGNALED, signal=9)])
@pytest.mark.parametrize("gave_up", [True, False])
def test_loss_that_an_answer_followed_excuses_no_crash(end: Exit, gave_up: bool) -> None:
    """The calls of a flood expire while others of it are answered; one that failed before the agent went on is over."""
    closing = GateClosing(calls=60, unanswered=40, last_failure="UPSTREAM_UNREACHABLE", gave_up=gave_up)
    failure = classify_exit(end, closing, None, [0], Phase.RUNNING)
    assert failure is not None and failure.is_gradable and not failure.retriable
    assert (failure.reason, failure.caused_by) == ("AGENT_CRASHED", Component.AGENT)


@pytest.mark.requirement("R43", "R74")
def test_honest_agent_whose_source_is_down_is_not_graded() -> None:
    """From the start, or after answers; a refusal of its own among them changes nothing."""
    end = Exit(ExitReason.EXITED, code=1)
    for closing in (
        GateClosing(calls=3, unanswered=3, last_failure="UPSTREAM_UNREACHABLE"),
        GateClosing(calls=1, unanswered=1, last_failure="REQUEST_FAILS", refused=1),
        GateClosing(calls=9, unanswered=4, last_failure="REQUEST_FAILS", refused=3, lost=1),
    ):
        failure = classify_exit(end, closing, None, [0], Phase.RUNNING)
        assert failure is not None and not failure.is_gradable
        assert (failure.reason, failure.caused_by) == ("MODEL_CALL_FAILED", Component.ENGINE)


@pytest.mark.requirement("R49", "R74")
@pytest.mark.parametrize("step", ["prepare_snapshot", "fork", "write_files", "start", "watch", "kill", "run"])
async def test_infrastructure_failure_in_any_phase_is_retried_in_a_new_sandbox(driver: Driver, step: str) -> None:
    """The second attempt is rewarded; what the first one did is told and nothing of it is left."""
    error = FailedPrecondition("injected", reason="SANDBOX_LOST") if step == "fork" else LOST
    # The first files are those of the snapshot.
    driver.sandboxes.fail[step] = [None, error] if step == "write_files" else [error]
    order = with_task(driver, setup=()) if step == "run" else driver.spec()
    record = await driver.start(replace(order, max_attempts=2))
    outcome = await driver.outcome(record)
    assert not outcome.HasField("failure"), outcome
    assert outcome.reward.value in (1.0, 0.25)
    events = await driver.events(record.rollout_id)
    [first] = told(events, "attempt_failed")
    assert (first.attempt, first.failure.reason) == (1, error.reason)
    assert first.failure.caused_by == rollout_pb2.PARTY_SANDBOX
    assert (await driver.manager.get(record.rollout_id)).attempts == 2
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    phases = [rollout_pb2.Phase.Name(item.phase) for item in told(events, "phase_changed")]
    assert phases.count("PHASE_PREPARING") == 2 and phases.count("PHASE_ENDED") == 1
    assert all(item.HasField("previous_duration") for item in told(events, "phase_changed")[1:])
    assert driver.gate.deleted == [record.rollout_id], "what was captured of the first attempt is gone"


@pytest.mark.parametrize(("refusals", "ends"), [(2, "a reward"), (20, "DRAINING")])
async def test_an_attempt_that_a_draining_service_refuses_begins_elsewhere_uncounted(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, refusals: int, ends: str
) -> None:
    """So a drain costs no attempt; where every place drains, the rollout still ends."""
    monkeypatch.setattr(runner, "FIRST_PAUSE_S", 0.0)
    placement = driver.manager._placement
    one = placement.place

    async def place(spec: RolloutSpec, avoid: Avoid) -> Place:
        chosen = await one(spec, avoid)
        forks = ThrottledForks(driver.sandboxes, waits_out_drains=False)
        return replace(chosen, services=replace(chosen.services, forks=forks), node=f"n{len(avoid.nodes)}", gate="g0")

    monkeypatch.setattr(placement, "place", place)
    driver.sandboxes.fail["fork"] = [Unavailable("it drains", reason="DRAINING", retry_after_s=1.0)] * refusals
    record = await driver.start(driver.spec())
    outcome = await driver.outcome(record)
    assert (outcome.failure.reason or "a reward") == ends
    assert (await driver.manager.get(record.rollout_id)).attempts == 1
    assert not told(await driver.events(record.rollout_id), "attempt_failed")
    assert driver.sandboxes.calls.count("fork") <= runner.MOVES + 1


@pytest.mark.requirement("R51", "R119")
@pytest.mark.parametrize("call", ["fork", "create", "prepare_snapshot"])
@pytest.mark.parametrize("has_room", [True, False])
async def test_a_full_sandbox_service_is_waited_for_only_while_no_other_has_room(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, call: str, has_room: bool
) -> None:
    """What a driver knows of a service's room may be two seconds old."""
    monkeypatch.setattr(runner, "FIRST_PAUSE_S", 0.0)
    placement = driver.manager._placement
    one = placement.place
    avoided: list[set[str]] = []

    async def place(spec: RolloutSpec, avoid: Avoid) -> Place:
        avoided.append(set(avoid.nodes))
        chosen = await one(spec, avoid)
        services = replace(chosen.services, forks=ThrottledForks(driver.sandboxes), has_room_elsewhere=lambda: has_room)
        return replace(chosen, services=services, node=f"n{len(avoided)}", gate="g0")

    monkeypatch.setattr(placement, "place", place)
    driver.sandboxes.fail[call] = [ResourceExhausted("full", reason="SANDBOX_LIMIT", retry_after_s=0.001)]
    record = await driver.start(replace(driver.spec(), max_attempts=1))
    assert (await driver.outcome(record)).HasField("reward")
    assert avoided == ([set(), {"n1"}] if has_room else [set()])
    assert (await driver.manager.get(record.rollout_id)).attempts == 1


@pytest.mark.requirement("R124")
async def test_an_attempt_that_a_gate_full_of_captures_refuses_begins_elsewhere(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another gate may have room; none of it counts as an attempt."""
    monkeypatch.setattr(runner, "FIRST_PAUSE_S", 0.0)
    placement = driver.manager._placement
    one, gates = placement.place, ["g0", "g1"]
    avoided: list[set[str]] = []

    async def place(spec: RolloutSpec, avoid: Avoid) -> Place:
        avoided.append(set(avoid.gates))
        chosen = await one(spec, avoid)
        openings = AdaptiveThrottle(waits_out_drains=False)
        services = replace(chosen.services, openings=openings)
        return replace(chosen, services=services, node="n0", gate=gates[len(avoided) - 1])

    monkeypatch.setattr(placement, "place", place)
    driver.gate.fail["open"] = [ResourceExhausted("full", reason="CAPTURES_FULL", retry_after_s=5.0)]
    record = await driver.start(driver.spec())
    outcome = await driver.outcome(record)
    assert outcome.HasField("reward") and avoided == [set(), {"g0"}]
    assert (await driver.manager.get(record.rollout_id)).attempts == 1


@pytest.mark.requirement("R62", "R74")
async def test_attempts_end_with_the_last_one_allowed_and_its_failure(driver: Driver) -> None:
    """Three of three, then it is excluded: no reward."""
    driver.sandboxes.fail["start"] = [LOST] * 3
    record = await driver.start(replace(driver.spec(), max_attempts=3))
    outcome = await driver.outcome(record)
    assert (outcome.failure.reason, outcome.failure.retriable) == ("INJECTED", True)
    assert not outcome.HasField("reward")
    events = await driver.events(record.rollout_id)
    assert [item.attempt for item in told(events, "attempt_failed")] == [1, 2]
    assert driver.sandboxes.calls.count("fork") == 3
    assert len(set(driver.gate.requested)) == 3, "each attempt opens a place of its own"


@pytest.mark.requirement("R59", "R74")
@pytest.mark.parametrize(
    ("script", "limits", "cause"),
    [(400, Limits(), "AGENT"), (None, Limits(agent_s=0.3), "TIMEOUT")],
    ids=["crash", "timeout"],
)
async def test_policys_failures_are_never_retried(
    driver: Driver, script: int | None, limits: Limits, cause: str
) -> None:
    """A crash and a timeout are graded as they are."""
    if script is None:
        driver.gate.hold = asyncio.Event()
    else:
        driver.gate.script = lambda _: script
    outcome = await driver.run(replace(driver.spec(), limits=limits, max_attempts=5))
    assert rollout_pb2.FailureCause.Name(outcome.failure.cause) == f"FAILURE_CAUSE_{cause}"
    assert outcome.reward.value == 0.25
    assert driver.sandboxes.calls.count("fork") == 1


@pytest.mark.requirement("R70")
async def test_a_rollout_is_cancelled_between_two_attempts(driver: Driver) -> None:
    """It is not begun again, and the end is the cancellation."""
    driver.sandboxes.fail["start"] = [LOST] * 10
    record = await driver.start(replace(driver.spec(), max_attempts=10))
    signal = driver.history.signal(record.rollout_id)
    seen = signal.number
    while not told(await driver.events(record.rollout_id), "attempt_failed"):
        await signal.wait(seen)
        seen = signal.number
    ended = await driver.manager.cancel(record.rollout_id, "enough")
    outcome = ended.outcome or rollout_pb2.Outcome()
    assert outcome.failure.reason in ("CANCELLED", "INJECTED")
    assert not driver.sandboxes.boxes


@pytest.mark.requirement("R70", "R120")
@pytest.mark.parametrize("waits_for", ["the next attempt", "a place", "the end of its pause"])
async def test_a_rollout_whose_place_was_lost_is_cancelled_before_its_next_attempt(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, waits_for: str
) -> None:
    """Whatever it waits for: no second attempt is made."""
    goes_on, looked, is_between = asyncio.Event(), asyncio.Event(), asyncio.Event()
    placement = driver.manager._placement
    one = placement.place

    async def wait(_backoff: Backoff) -> None:
        is_between.set()
        if waits_for == "the next attempt":
            await goes_on.wait()

    async def place(spec: RolloutSpec, avoid: Avoid) -> Place:
        if avoid.nodes and waits_for == "a place":
            looked.set()
            await goes_on.wait()
        return await one(spec, avoid)

    monkeypatch.setattr(Backoff, "wait", wait)
    monkeypatch.setattr(placement, "place", place)
    reached = driver.sandboxes.holds["fork"] = asyncio.Event()
    record = await driver.start(replace(driver.spec(), max_attempts=2))
    await reached.wait()
    del driver.sandboxes.holds["fork"]
    live = driver.manager._live[record.rollout_id]
    if waits_for == "the end of its pause":
        await driver.manager.pause(record.rollout_id, "", None, 30.0)
    live._lose_place(
        Failure(Cause.INFRASTRUCTURE, "NODE_LOST", "n0 is lost", True, Phase.QUEUED, component=Component.SANDBOX)
    )
    await (looked if waits_for == "a place" else is_between).wait()
    live.cancel(Failure(Cause.CANCELLED, "CANCELLED", "enough", False, Phase.QUEUED))
    goes_on.set()
    live.pausing.end()
    outcome = await driver.outcome(record)
    assert outcome.failure.reason == "CANCELLED", outcome
    assert driver.sandboxes.calls.count("fork") == 1


@pytest.mark.requirement("R49", "R70")
@pytest.mark.parametrize(
    ("held", "phase"),
    [
        ("prepare_toolbox", "PREPARING"),
        ("prepare_snapshot", "PREPARING"),
        ("fork", "PREPARING"),
        ("write_files", "CONFIGURING"),
        ("start", "RUNNING"),
        ("watch", "RUNNING"),
        ("kill", "RUNNING"),
        ("run", "VERIFYING"),
        ("read_file", "COLLECTING"),
    ],
)
async def test_cancel_ends_a_rollout_in_every_phase_with_nothing_left(driver: Driver, held: str, phase: str) -> None:
    """Whatever it waits for; when cancel returns, sandbox and place at the gate are released."""
    order = with_artifact(with_task(driver, setup=()))
    if phase == "COLLECTING":
        order = replace(order, task=replace(order.task, verifier=None))
    if phase != "PREPARING":
        await driver.run(order)  # what is prepared by commands and files is there already
    reached = driver.sandboxes.holds[held] = asyncio.Event()
    record = await driver.start(order)
    await asyncio.wait_for(reached.wait(), 60)
    ended = await driver.manager.cancel(record.rollout_id, "now")
    outcome = ended.outcome or rollout_pb2.Outcome()
    assert (outcome.failure.reason, outcome.failure.caused_by) == ("CANCELLED", rollout_pb2.PARTY_OPERATOR)
    assert rollout_pb2.Phase.Name(outcome.failure.phase) == f"PHASE_{phase}"
    assert not outcome.HasField("reward")
    assert not driver.sandboxes.boxes
    assert driver.gate.opened.keys() == driver.gate.closed.keys()


@pytest.mark.requirement("R62", "R74")
async def test_group_members_lost_to_infrastructure_are_replaced_by_attempts(driver: Driver) -> None:
    """Two of four lose their sandbox, and all four wanted results come."""
    driver.sandboxes.fail["start"] = [None, LOST, None, LOST]
    group = await driver.start_group(replace(driver.spec(), max_attempts=2), GroupPlan(size=4, quorum=4))
    ids = group.rollout_ids
    outcomes = [await driver.outcome(await driver.manager.get(item)) for item in ids]
    assert [outcome.reward.value for outcome in outcomes] == [1.0] * 4
    assert sum([(await driver.manager.get(item)).attempts for item in ids]) == 6


async def _watched(servicer: RolloutServicer, rollout_id: str, stops: Sequence[int]) -> list[int]:
    """The sequence numbers that one sees who leaves after each number of events, and comes back."""
    seen: list[int] = []
    for stop in [*stops, None]:
        after = seen[-1] if seen else 0
        request, count = pb.WatchRolloutRequest(rollout_id=rollout_id, after_sequence=after), 0
        watch = servicer.WatchRollout(request, None)
        async for message in watch:
            if message.HasField("event"):
                seen.append(message.event.sequence)
                count += 1
            if stop is not None and count >= stop:
                break
        await watch.aclose()  # type: ignore[attr-defined]
    return seen


@pytest.mark.requirement("R71")
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(watchers=st.lists(st.lists(st.integers(1, 8), max_size=6), min_size=1, max_size=4))
async def test_broken_watches_resume_and_see_every_event_once_in_order(
    driver: Driver, gate: HttpGate, watchers: list[list[int]]
) -> None:
    """Several watchers of a rollout that runs, is tried again and ends, each leaving where it pleases."""
    driver.sandboxes.fail["start"] = [LOST]
    record: Record = await driver.start(replace(driver.spec(), max_attempts=2))
    servicer = _servicer(driver, gate)
    seen = await asyncio.gather(*(_watched(servicer, record.rollout_id, stops) for stops in watchers))
    every = [event.sequence for event in await driver.events(record.rollout_id)]
    assert every == list(range(1, len(every) + 1))
    assert seen == [every] * len(watchers)


@pytest.mark.requirement("R49", "R50")
async def test_a_release_that_cannot_be_keeps_no_other_waiting() -> None:
    """Neither an error of one rollout's own nor one that nobody thought of."""
    released: asyncio.Queue[str] = asyncio.Queue()

    async def release(rollout_id: str) -> None:
        if rollout_id == "first":
            raise FailedPrecondition("for good", reason="BROKEN")
        if rollout_id == "second":
            raise RuntimeError("unthought of")

    releases = Cleanups(release)
    for rollout_id in ("first", "second", "third"):
        releases.owe(rollout_id, partial(released.put, rollout_id))
    assert await released.get() == "third"
    await releases.aclose()
    assert released.empty()


@pytest.mark.requirement("R49", "R50")
async def test_rollout_with_a_pending_cleanup_keeps_its_id_and_is_not_deleted(driver: Driver) -> None:
    """What it holds is found by its id."""
    servicer = _servicer(driver, driver.gate)
    driver.gate.fail["close"] = [FailedPrecondition("no", reason="BROKEN")] * 100
    record = await driver.start(driver.spec())
    await driver.outcome(record)
    with pytest.raises(Unavailable) as caught:
        await servicer.DeleteRollout(pb.DeleteRolloutRequest(rollout_id=record.rollout_id), None)
    assert (caught.value.reason, caught.value.retry_after_s) == ("RELEASE_OWED", 5.0)
    await driver.records.delete(record.rollout_id)
    with pytest.raises(AlreadyExists):
        await driver.records.create(RequestKey("q2", "d"), [record])
    await driver.records.cleaned_up(record.rollout_id)
    await driver.records.create(RequestKey("q2", "d"), [record])


@pytest.mark.requirement("R49", "R50")
async def test_a_creation_whose_caller_goes_away_is_begun_all_the_same(driver: Driver) -> None:
    """What is remembered starts, and ends; also when the driver is stopped meanwhile."""
    reached, go_on = asyncio.Event(), asyncio.Event()
    records = new_records(driver.spec(), rollout_pb2.RolloutSpec(), [new_id("r")])

    async def begin() -> None:
        await driver.records.create(RequestKey(new_id("q"), "d"), records)
        reached.set()
        await go_on.wait()
        driver.manager.start(driver.spec(), records)

    call = asyncio.ensure_future(driver.manager.see_through(begin()))
    await reached.wait()
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()
    stopping = asyncio.ensure_future(driver.manager.aclose())
    go_on.set()
    await stopping
    assert (await driver.outcome(records[0])).failure.reason == "DRIVER_STOPPED"


async def test_a_driver_that_drains_goes_on_with_what_runs_and_takes_nothing_new(driver: Driver) -> None:
    """A rolling upgrade costs no rollout that ends in time."""
    record = await driver.start(driver.spec())
    driver.manager.draining = True
    with pytest.raises(Unavailable) as caught, driver.manager.room("default", 1):
        pass
    assert caught.value.reason == "DRAINING"
    assert driver.manager.running_count == 1
    assert not (await driver.outcome(record)).HasField("failure")


@pytest.mark.requirement("R49", "R50")
async def test_a_cancelled_create_of_the_service_leaves_a_rollout_that_ends(driver: Driver) -> None:
    """A client's deadline while its rollout is being remembered."""
    remembering, go_on = asyncio.Event(), asyncio.Event()

    class Slow(Records):
        async def create(self, *args: Any, **kwargs: Any) -> None:
            await super().create(*args, **kwargs)
            remembering.set()
            await go_on.wait()

    servicer = _servicer(driver, driver.gate, Slow(driver.journal))
    spec = _order()
    request = pb.CreateRolloutRequest(request_id="r1", rollout_id="r1", spec=spec)
    call = asyncio.ensure_future(servicer.CreateRollout(request, None))
    await asyncio.wait([call, asyncio.ensure_future(remembering.wait())], return_when=asyncio.FIRST_COMPLETED)
    assert not call.done(), call.exception()
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()
    go_on.set()
    await eventually_async(lambda: driver.is_over("r1"), "it has run and ended")


@pytest.mark.requirement("R26")
async def test_concurrent_creates_keep_to_the_limit_of_rollouts(driver: Driver) -> None:
    """All of them asked while there was room, and each was counted when it began: the limit held for none."""
    driver.sandboxes.holds["prepare_toolbox"] = asyncio.Event()
    room = driver.manager._max_live = 3
    servicer = _servicer(driver, driver.gate)
    spec = _order()
    requests = [
        pb.CreateRolloutRequest(request_id=name, rollout_id=name, spec=spec) for name in map("r{}".format, range(6))
    ]
    answers = await asyncio.gather(
        *(servicer.CreateRollout(request, None) for request in requests), return_exceptions=True
    )
    refused = [answer for answer in answers if isinstance(answer, ResourceExhausted)]
    made = [answer.rollout.rollout_id for answer in answers if isinstance(answer, pb.CreateRolloutResponse)]
    assert (len(made), len(refused)) == (room, len(answers) - room)
    assert {error.reason for error in refused} == {"ROLLOUT_LIMIT"}
    await driver.manager.cancel(made[0], "")
    more = pb.CreateRolloutRequest(request_id="r9", rollout_id="r9", spec=spec)
    assert (await servicer.CreateRollout(more, None)).rollout.rollout_id


@pytest.mark.requirement("R26")
@pytest.mark.parametrize(("size", "passes"), [(2, True), (4, False)], ids=["room is taken", "there is none ever"])
async def test_a_group_is_told_to_wait_only_for_room_that_there_may_be(driver: Driver, size: int, passes: bool) -> None:
    """Clients wait, without end, for as long as a refusal has a delay."""
    driver.sandboxes.holds["prepare_toolbox"] = asyncio.Event()
    driver.manager._max_live = 3
    servicer = _servicer(driver, driver.gate)
    await servicer.CreateGroup(pb.CreateGroupRequest(request_id="g1", group_id="g1", spec=_order(), size=2), None)
    with pytest.raises(ResourceExhausted, match="maximum" if passes else "ask for fewer") as refused:
        await servicer.CreateGroup(pb.CreateGroupRequest(request_id="g2", spec=_order(), size=size), None)
    assert refused.value.reason == "ROLLOUT_LIMIT" and (refused.value.retry_after_s is not None) == passes


@pytest.mark.requirement("R49", "R50", "R146")
async def test_full_disk_blocks_nobody_and_is_written_later(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who cancels is let go, and who waits for the end is told when it is on disk, and not before."""
    monkeypatch.setattr(event_log, "RETRY_S", 0.001)
    driver.gate.hold = asyncio.Event()
    record = await driver.start(driver.spec())
    await driver.gate.called.wait()
    journal, full = driver.records._journal, True
    submit = journal.submit

    async def failing(statements: Any, *, size: int | None = None) -> Any:
        if full:
            raise sqlite3.OperationalError("database or disk is full")
        return await submit(statements, size=size)

    monkeypatch.setattr(journal, "submit", failing)
    assert (await driver.manager.cancel(record.rollout_id, "enough")).end_time is None
    assert driver.manager.is_running(record.rollout_id), "its end is nobody's yet"
    assert not driver.sandboxes.boxes
    waiting = asyncio.ensure_future(driver.manager.wait(record.rollout_id, None))
    for _ in range(3):
        with pytest.raises(sqlite3.OperationalError):
            await driver.history.flush()
    assert not waiting.done()
    full = False
    assert (await waiting).end_time is not None
    await eventually_async(lambda: driver.is_over(record.rollout_id), "its end is on disk")
    assert (await driver.outcome(record)).failure.reason == "CANCELLED"


@pytest.mark.requirement("R49")
async def test_broken_journal_fails_its_waiters(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and ever after."""
    journal = driver.records._journal

    async def broken(statements: Any, *, size: int | None = None) -> Any:
        raise sqlite3.IntegrityError("not to be repeated")

    with monkeypatch.context() as patch:
        patch.setattr(journal, "submit", broken)
        other = event_log.EventLog(journal)
        other.set_phase("r", Phase.RUNNING, 1, 0)
        for _ in range(2):
            with pytest.raises(sqlite3.IntegrityError):
                await other.flush()


@pytest.mark.requirement("R49", "R71")
async def test_call_ending_while_the_end_is_written_takes_no_number(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate may tell late of a call that its closing ended; the journal goes on, for all rollouts."""
    driver.manager.watch_calls()
    journal, calls = driver.records._journal, driver.gate.call_ends
    submit = journal.submit

    async def overtaken(statements: Any, *, size: int | None = None) -> Any:
        for sql, values in statements:
            if sql.startswith("UPDATE rollouts SET phase = ?, end_time"):
                call = trajectory_pb2.Call(rollout_id=values[-1])
                calls.put_nowait(CallEnded(values[-1], call, CallSpent(1, 1)))
                calls.put_nowait(CallEnded("of-nobody", call, CallSpent()))
                # The second one is fetched when the first one was heard.
                await eventually(calls.empty, "the call is told")
        return await submit(statements, size=size)

    monkeypatch.setattr(journal, "submit", overtaken)
    for _ in range(2):
        record = await driver.start(driver.spec())
        assert (await driver.outcome(record)).reward.value == 1.0
        await driver.history.flush()
        events = await driver.events(record.rollout_id)
        last = (await driver.manager.get(record.rollout_id)).last_sequence
        assert [event.sequence for event in events] == list(range(1, last + 1))
        assert events[-1].HasField("ended")


@pytest.mark.requirement("R49", "R50")
async def test_a_driver_whose_journal_is_broken_ends(tmp_path: Path) -> None:
    """It takes nothing more of which the end would be on no disk; whoever restarts it ends what ran."""

    class Boxes(sandbox_grpc.SandboxServiceServicer):
        async def DeleteSandboxes(self, request: Any, context: Any) -> Any:  # noqa: N802
            return sandbox_pb.DeleteSandboxesResponse()

    class Gate(gate_grpc.RolloutGateServiceServicer):
        async def CloseRollout(self, request: Any, context: Any) -> Any:  # noqa: N802
            return gate_pb.CloseRolloutResponse()

    async with await Journal.open(tmp_path / "driver.db", MIGRATIONS) as journal:
        await journal.execute(
            "INSERT INTO rollouts (rollout_id, idx, task_id, agent, agent_sha256, labels, spec, create_time, phase,"
            " phase_times) VALUES ('r', 0, 't', 'shell', '', '{}', x'', 1.0, 1, '{}')"
        )
        await journal.execute(
            "CREATE TRIGGER broken BEFORE INSERT ON events BEGIN SELECT RAISE(ABORT, 'not to be repeated'); END"
        )
    async with serve(
        (Boxes(), sandbox_grpc.add_SandboxServiceServicer_to_server),  # type: ignore[abstract]
        (Gate(), gate_grpc.add_RolloutGateServiceServicer_to_server),  # type: ignore[abstract]
    ) as (address, _):
        settings = DriverSettings(
            operator_token=SecretStr("t" * 32),
            state_dir=tmp_path,
            sandbox_address=address,
            interception_address=address,
        )
        with pytest.raises(sqlite3.IntegrityError, match="not to be repeated"):
            async with asyncio.timeout(GUARD_S) as guard, build(settings):
                await asyncio.get_running_loop().create_future()
        assert not guard.expired()


@pytest.mark.requirement("R49", "R50")
async def test_crashed_course_is_the_drivers_fault_and_releases_its_holdings(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is wrong in the driver, a rollout ends."""

    async def broken(attempt: Attempt) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(Attempt, "_release", broken)
    record = await driver.start(driver.spec())
    outcome = await driver.outcome(record)
    assert (outcome.failure.reason, outcome.failure.caused_by) == ("INTERNAL", rollout_pb2.PARTY_DRIVER)
    await eventually_async(driver.owes_nothing, "what it held is released")
    assert not driver.sandboxes.boxes


@pytest.mark.requirement("R49")
async def test_a_spool_without_room_keeps_nothing_from_being_released(driver: Driver) -> None:
    """Closing a file that has not taken what was written to it fails once more."""

    class Full(io.BytesIO):
        def close(self) -> None:
            super().close()
            raise OSError(errno.ENOSPC, "no space")

    verifier = Verifier(commands=(Command(shell="true"),))
    grader = Grader(driver.sandboxes, verifier, spool=None, max_bytes=1)
    grader._layer, grader._kept = Full(), Baseline((), {}, Full())
    grader.close()


@pytest.mark.requirement("R43", "R51")
async def test_a_watch_that_fell_behind_is_begun_anew_and_excuses_nobody() -> None:
    """Only a gate that was away counts as one."""

    class Gate(gate_grpc.RolloutGateServiceServicer):
        watches = 0

        async def WatchCalls(self, request: gate_pb.WatchCallsRequest, context: Any) -> Any:  # noqa: N802
            self.watches += 1
            if self.watches == 1:
                yield gate_pb.WatchCallsResponse(started=gate_pb.WatchCallsResponse.WatchStarted(sequence=7))
                raise FailedPrecondition("The watch fell behind the kept changes.", reason="SEQUENCE_UNKNOWN")
            assert not request.HasField("after_sequence")
            call = trajectory_pb2.Call(rollout_id="r", state=trajectory_pb2.CALL_STATE_DELIVERED)
            yield gate_pb.WatchCallsResponse(changed=gate_pb.WatchCallsResponse.CallChanged(sequence=9, call=call))

    servicer = Gate()  # type: ignore[abstract]  # what else a gate does is not asked for
    async with serve((servicer, gate_grpc.add_RolloutGateServiceServicer_to_server)) as (_, channel):
        there = GrpcGate(channel)
        calls = there.calls({})
        assert (await anext(calls)).rollout_id == "r"
        assert there.interruptions == 0
        await calls.aclose()  # type: ignore[attr-defined]


class _Captures:
    """No capture is read here; where `slow` is given, a deletion waits for it."""

    def __init__(self, slow: asyncio.Event | None = None) -> None:
        self.asked = 0
        self._slow = slow

    def capture(self, rollout_id: str, *, gate: str = "", include_bodies: bool, include_top: bool) -> Any:
        raise NotImplementedError

    def tool_results(self, rollout_id: str, *, gate: str) -> Any:
        raise NotImplementedError

    async def media(self, rollout_id: str, call_id: str, *, gate: str) -> Any:
        raise NotImplementedError

    async def tensors(self, rollout_id: str, call_id: str, *, gate: str) -> Any:
        raise NotImplementedError

    async def delete(self, rollout_id: str) -> None:
        if self._slow is None:
            raise NotImplementedError
        self.asked += 1
        await self._slow.wait()

    async def stored(self, rollout_id: str, gates: Sequence[str]) -> None:
        raise NotImplementedError


@pytest.mark.requirement("R49", "R50")
async def test_pending_cleanup_runs_when_the_service_is_back(driver: Driver) -> None:
    """The gate stays away for a while after a rollout's end; its place there is given back later."""
    errors: list[PenstockError] = [FailedPrecondition("no", reason="BROKEN"), FailedPrecondition("no", reason="BROKEN")]
    driver.gate.fail["close"] = list(errors)
    record = await driver.start(driver.spec())
    outcome = await driver.outcome(record)
    assert (outcome.failure.reason, outcome.failure.caused_by) == ("BROKEN", rollout_pb2.PARTY_GATE)
    await eventually_async(driver.owes_nothing, "the place is given back")
    assert driver.gate.closed == {record.rollout_id: "ROLLOUT_ENDED"}


@pytest.mark.requirement("R50", "R107")
async def test_a_pending_cleanup_acts_at_the_gate_in_its_rollouts_namespace(driver: Driver) -> None:
    """Its id may be another team's there: one whose opening failed, or that was cancelled before, has no place."""
    driver.gate.fail["close"] = [FailedPrecondition("no", reason="BROKEN"), FailedPrecondition("no", reason="BROKEN")]
    record = await driver.start(driver.spec(namespace="team-a"))
    await driver.outcome(record)
    await eventually_async(driver.owes_nothing, "the place is given back")
    assert driver.gate.closed_in == {record.rollout_id: {"team-a"}}


def _servicer(
    driver: Driver, gate: Gate, records: Records | None = None, captures: _Captures | None = None
) -> RolloutServicer:
    """The service over a driver's own parts."""
    preflight, records, captures = Preflight(driver.sandboxes, gate), records or driver.records, captures or _Captures()
    home = Home("driver", "d0")
    specs = driver.opened.parts.specs
    recordings = driver.opened.settings.state_dir / "recordings"
    room = BranchRoom(1 << 30, records, recordings, driver.manager.is_running)
    parents = Parents(records, specs, captures, recordings, room)
    manager, deletion = driver.manager, RolloutDeletion(driver.manager, records, captures)
    creation = RolloutCreation(manager, records, driver.registry, preflight, specs, home, parents, deletion)
    judged = Annotations(driver.journal)
    reading = RolloutReading(manager, records, driver.history, captures, judged)
    service = RolloutUseCases(manager, records, creation, deletion, reading, Annotator(judged, captures))
    return RolloutServicer(service, driver.manager, records, driver.history, Summaries(driver.journal), home)


def _order() -> rollout_pb2.RolloutSpec:
    """A rollout as a client orders it."""
    spec = rollout_pb2.RolloutSpec(mode=interception_pb2.MODE_INTERCEPTION_GATE)
    spec.source.tokenizer.name = "tiny"
    spec.agent.name = "shell"
    spec.task.instruction = "copy"
    return spec


@pytest.mark.requirement("R49", "R50", "R146")
async def test_an_id_is_not_given_again_while_a_deletion_of_it_runs(driver: Driver) -> None:
    """The slower of two deletions would take the new rollout's events and its capture."""
    slow = asyncio.Event()
    servicer = _servicer(driver, driver.gate, captures=(captures := _Captures(slow)))
    create = pb.CreateRolloutRequest(request_id="r1", rollout_id="r1", spec=_order())
    await servicer.CreateRollout(create, None)
    await eventually_async(lambda: driver.is_over("r1"), "it has ended")
    await eventually_async(driver.owes_nothing, "what it held is released")
    delete = pb.DeleteRolloutRequest(rollout_id="r1")
    slower = asyncio.ensure_future(servicer.DeleteRollout(delete, None))
    await eventually(lambda: captures.asked == 1, "the gate is asked to delete the capture")
    await driver.manager.delete("r1")  # as the faster one does
    create.request_id = "again"
    with pytest.raises(AlreadyExists, match="is being deleted"):
        await servicer.CreateRollout(create, None)
    slow.set()
    await slower
    await servicer.CreateRollout(create, None)
    with pytest.raises(FailedPrecondition, match="cancel it first"):
        await servicer.DeleteRollout(delete, None)
    await eventually_async(lambda: driver.is_over("r1"), "the new one has ended")
    assert (await driver.events("r1"))[0].sequence == 1


@pytest.mark.requirement("R49", "R146")
@pytest.mark.parametrize("is_group", [False, True])
async def test_whoever_sees_an_end_finds_its_outcome(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, is_group: bool
) -> None:
    """It is on disk before the driver has taken note of it, and a watcher may read it between the two."""
    written, seen, go_on, flush = asyncio.Event(), asyncio.Event(), asyncio.Event(), driver.history.flush
    group = await driver.start_group(driver.spec(), GroupPlan(1, 0, 1, None))
    (rollout_id,) = group.rollout_ids

    async def slow() -> None:
        await flush()
        if (await driver.records.get(rollout_id)).outcome is not None:
            written.set()
            await go_on.wait()

    monkeypatch.setattr(driver.history, "flush", slow)
    servicer = _servicer(driver, driver.gate)

    async def watch() -> bool:
        await written.wait()
        stream: Any = (
            servicer.WatchGroup(pb.WatchGroupRequest(group_id=group.group_id), None)
            if is_group
            else servicer.WatchRollout(pb.WatchRolloutRequest(rollout_id=rollout_id), None)
        )
        async with aclosing(stream) as answers:
            async for answer in answers:
                if answer.event.phase_changed.phase == rollout_pb2.PHASE_ENDED:
                    seen.set()
                if answer.event.HasField("ended"):
                    shown = await servicer.GetRollout(pb.GetRolloutRequest(rollout_id=rollout_id), None)
                    return bool(shown.rollout.HasField("outcome"))
        return False

    watching = asyncio.ensure_future(watch())
    await seen.wait()
    go_on.set()
    assert await watching


@pytest.mark.requirement("R49", "R146")
async def test_a_rollout_that_is_recorded_and_not_started_is_waited_for_and_cancelled(driver: Driver) -> None:
    """Its record is on disk some turns of the loop before its runner begins."""
    recorded, go_on = asyncio.Event(), asyncio.Event()

    class Slow(Records):
        async def create(self, *args: Any, **kwargs: Any) -> None:
            await super().create(*args, **kwargs)
            recorded.set()
            await go_on.wait()

    servicer = _servicer(driver, driver.gate, Slow(driver.journal))
    creation = asyncio.ensure_future(
        servicer.CreateRollout(pb.CreateRolloutRequest(request_id="r1", rollout_id="r1", spec=_order()), None)
    )
    await recorded.wait()
    waiting = asyncio.ensure_future(driver.manager.wait("r1", GUARD_S))
    cancelling = asyncio.ensure_future(driver.manager.cancel("r1", "no longer wanted"))
    with pytest.raises(FailedPrecondition, match="cancel it first"):
        await servicer.DeleteRollout(pb.DeleteRolloutRequest(rollout_id="r1"), None)
    await driver.history.flush()
    assert not waiting.done() and not cancelling.done()
    go_on.set()
    await asyncio.gather(creation, waiting, cancelling)
    assert (await driver.manager.get("r1")).outcome is not None
    assert "fork" not in driver.sandboxes.calls


@pytest.mark.requirement("R145", "R146")
@pytest.mark.parametrize("ranges", [{}, {"fmt": (0.0, 1.0)}], ids=["undeclared", "declared"])
async def test_a_component_whose_name_is_no_text_is_the_verifiers_failure(
    driver: Driver, ranges: dict[str, tuple[float, float]]
) -> None:
    """Half a surrogate pair, which JSON can write and no outcome hold: the rollout ends all the same."""
    answer = json.dumps({"reward": 1, "components": {"\ud83d": 1}})
    command = Command(shell=f"printf %s '{answer}' > $PENSTOCK_REWARD_FILE")
    verifier = Verifier(commands=(command,), reward_by_file=True, component_ranges=ranges)
    outcome = await driver.run(with_task(driver, verifier=verifier))
    assert (outcome.failure.cause, outcome.failure.reason) == (rollout_pb2.FAILURE_CAUSE_VERIFIER, "REWARD_INVALID")
    assert "ud83d" in outcome.failure.message


@pytest.mark.requirement("R49", "R146")
async def test_unencodable_outcome_ends_its_rollout_as_the_drivers_fault(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is that no message can hold."""

    async def run(attempt: Attempt) -> AttemptResult:
        failure = Failure(Cause.TASK, "X", "half a pair: \ud83d", False, Phase.RUNNING)
        return AttemptResult(Outcome(failure=failure))

    monkeypatch.setattr(Attempt, "run", run)
    record = await driver.start(driver.spec())
    outcome = await driver.outcome(record)
    assert (outcome.failure.reason, outcome.failure.caused_by) == ("INTERNAL", rollout_pb2.PARTY_DRIVER)
    assert (await driver.events(record.rollout_id))[-1].ended == outcome


@pytest.mark.requirement("R71", "R146")
async def test_unencodable_call_does_not_stop_other_events(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a call that is no call, nor a watch that breaks; the numbers of the events stay whole."""
    monkeypatch.setattr(manager, "RETRY_S", 0.001)
    driver.gate.hold = asyncio.Event()
    record = await driver.start(driver.spec())
    await driver.gate.called.wait()
    told_calls, broken = driver.gate.calls, False

    async def breaking(labels: Any) -> Any:
        nonlocal broken
        if not broken:
            broken = True
            raise ValueError("a fault of the watch")
        async for ended in told_calls(labels):
            yield ended

    monkeypatch.setattr(driver.gate, "calls", breaking)
    driver.manager.watch_calls()
    calls: list[Any] = [None, trajectory_pb2.Call(rollout_id=record.rollout_id)]
    for call in calls:
        driver.gate.call_ends.put_nowait(CallEnded(record.rollout_id, call, CallSpent(1, 1)))

    async def is_told() -> bool:
        await driver.history.flush()
        return bool(told(await driver.events(record.rollout_id), "call_finished"))

    await eventually_async(is_told, "the second call is told")
    driver.gate.hold.set()
    assert (await driver.outcome(record)).reward.value == 1.0
    events = await driver.events(record.rollout_id)
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert len(told(events, "call_finished")) == 1


@pytest.mark.requirement("R50", "R146")
async def test_unreadable_journal_does_not_keep_lost_rollouts_from_ending(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ran when the last driver died."""
    monkeypatch.setattr(manager, "RETRY_S", 0.001)
    (record,) = new_records(driver.spec(), rollout_pb2.RolloutSpec(), ["r"])
    await driver.records.create(RequestKey("q", "d"), [record])
    read, refusals = driver.history.last_sequence, [sqlite3.OperationalError("disk I/O error")] * 3

    async def unreadable(rollout_id: str) -> int:
        if refusals:
            raise refusals.pop()
        return await read(rollout_id)

    monkeypatch.setattr(driver.history, "last_sequence", unreadable)
    await driver.manager.recover()
    assert (await driver.outcome(record)).failure.reason == "DRIVER_RESTARTED"


@pytest.mark.requirement("R146")
async def test_waiter_for_an_unendable_lost_rollout_is_released(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands as it did, and the next start takes it up."""
    (record,) = new_records(driver.spec(), rollout_pb2.RolloutSpec(), ["r"])
    await driver.records.create(RequestKey("q", "d"), [record])

    async def broken(rollout_id: str) -> int:
        raise sqlite3.DatabaseError("the file is no database")

    monkeypatch.setattr(driver.history, "last_sequence", broken)
    await driver.manager.recover()
    with pytest.raises(Unavailable) as refused:
        await driver.manager.wait("r", None)
    assert refused.value.reason == "END_NOT_RECORDED"
    assert not driver.manager.is_running("r")
    assert (await driver.manager.get("r")).outcome is None


def nested(levels: int, *, objects: bool) -> Any:
    value: Any = "the innermost"
    for _ in range(levels):
        value = {"a": value} if objects else [value]
    return value


@pytest.mark.requirement("R145")
@pytest.mark.parametrize("objects", [True, False], ids=["objects", "lists"])
@pytest.mark.parametrize("levels", [1, MAX_DEPTH, MAX_DEPTH + 1, 47, 900])
async def test_deeply_nested_output_leaves_events_readable(driver: Driver, levels: int, objects: bool) -> None:
    """By every reader; what is too deep is said to be so, and the raw line has it."""
    line = json.dumps({"type": "call", "arguments": nested(levels, objects=objects)}).encode()
    rule = EventRule(when="type == 'call'", kind=EventKind.TOOL_CALL, fields={"arguments": "arguments"})
    parser = EventParser([rule])
    (event,) = (*parser.feed(line), *parser.finish())
    payload = event_to_proto("r", 1, 0.0, event).SerializeToString()
    shown = pb.WatchGroupResponse.FromString(
        pb.WatchGroupResponse(event=decode_event(payload)).SerializeToString()
    ).event.agent_event
    assert shown.raw_line == line[:MAX_RAW_BYTES]
    assert ("nested in more than" in str(shown.data)) == (levels > MAX_DEPTH)
    assert MessageToDict(shown.data)["arguments"]


@pytest.mark.requirement("R145", "R146")
async def test_too_deeply_nested_event_is_returned_without_its_data(driver: Driver) -> None:
    """As the driver of before wrote it; the events before and after it are told as well."""
    record = await driver.start(driver.spec())
    await driver.outcome(record)
    raw = json.dumps(nested(40, objects=True)).encode()
    deep = rollout_pb2.RolloutEvent(sequence=3, rollout_id=record.rollout_id)
    deep.time.FromSeconds(7)
    deep.agent_event.kind = agent_pb2.AGENT_EVENT_KIND_TOOL_CALL
    deep.agent_event.raw_line = raw
    deep.agent_event.data.update({"arguments": nested(40, objects=True)})
    payload = deep.SerializeToString()
    with pytest.raises(DecodeError):
        rollout_pb2.RolloutEvent.FromString(payload)
    await driver.journal.execute(
        "UPDATE events SET payload = ? WHERE rollout_id = ? AND sequence = 3", (payload, record.rollout_id)
    )
    servicer = _servicer(driver, driver.gate)
    request = pb.WatchRolloutRequest(rollout_id=record.rollout_id)
    events = [answer.event async for answer in servicer.WatchRollout(request, None)]
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    found = events[2]
    assert (found.rollout_id, found.time.seconds) == (record.rollout_id, 7)
    assert (found.agent_event.kind, found.agent_event.raw_line) == (agent_pb2.AGENT_EVENT_KIND_TOOL_CALL, raw)
    assert not found.agent_event.HasField("data")


@pytest.mark.requirement("R93")
@pytest.mark.parametrize(
    ("answers", "inside"),
    [
        ([{"lost_reason": "PROCESS_ENDED", "ended_inside": "true"}], True),
        ([{}, {}, {"lost_reason": "PROCESS_ENDED", "ended_inside": "true"}], True),
        ([{"lost_reason": "SPAWNER_ENDED"}], False),
        ([{"ended_inside": "false"}], False),
        ([{}], False),
        ([NotFound("gone", reason="SANDBOX_UNKNOWN")], False),
        ([Unavailable("away", reason="TRANSPORT_UNAVAILABLE")], False),
        ([None], False),
    ],
)
async def test_sandbox_service_decides_the_cause_of_a_sandboxs_end(
    monkeypatch: pytest.MonkeyPatch, answers: list[Any], inside: bool
) -> None:
    """The mark may come a moment after the loss; without it, and while nobody answers, nothing is held against an
    agent."""
    monkeypatch.setattr(sandboxes, "_UNTIL_JUDGED_S", (0.001,) * 4)
    left = list(answers)

    class Files(file_grpc.FileServiceServicer):
        async def Stat(self, request: file_pb.StatRequest, context: Any) -> Any:  # noqa: N802
            assert (request.sandbox_id, request.path) == ("s", "/")
            answer = left.pop(0) if len(left) > 1 else left[0]
            if answer is None:
                return file_pb.StatResponse()
            if isinstance(answer, PenstockError):
                raise answer
            raise FailedPrecondition("the sandbox is lost", reason="SANDBOX_LOST", metadata=answer)

    servicer = Files()  # type: ignore[abstract]  # what else a service of files does is not asked for
    async with serve((servicer, file_grpc.add_FileServiceServicer_to_server)) as (_, channel):
        assert await GrpcSandboxes(channel).ended_inside("s") is inside


@pytest.mark.requirement("R89", "R96")
async def test_endless_directory_is_read_up_to_the_bound() -> None:
    """How many files an agent leaves is its choice; how many the driver holds is not."""
    asked: list[int] = []

    class Files(file_grpc.FileServiceServicer):
        async def List(self, request: file_pb.ListRequest, context: Any) -> file_pb.ListResponse:  # noqa: N802
            first = int(request.page_token or 0)
            asked.append(first)
            found = [
                file_pb.FileInfo(name=str(number), kind=file_pb.FILE_KIND_FILE)
                for number in range(first, first + request.page_size)
            ]
            token = str(first + request.page_size) if len(asked) < 10 else ""
            return file_pb.ListResponse(entries=found, next_page_token=token)

    servicer = Files()  # type: ignore[abstract]  # what else a service of files does is not asked for
    async with serve((servicer, file_grpc.add_FileServiceServicer_to_server)) as (_, channel):
        found = await GrpcSandboxes(channel).entries("s", "/", 2500)
    assert asked == [0, 1000, 2000]
    assert len(found) == 3000  # more than was asked for, by which the caller knows


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (Exit(ExitReason.KILLED), "AGENT_KILLED"),
        (Exit(ExitReason.SIGNALED, signal=signal.SIGKILL), "AGENT_KILLED"),
        (Exit(ExitReason.SIGNALED, signal=signal.SIGSEGV), "AGENT_CHECK_FAILED"),
        (Exit(ExitReason.EXITED, code=1), "AGENT_CHECK_FAILED"),
        (Exit(ExitReason.OOM), "AGENT_CHECK_FAILED"),
    ],
)
@pytest.mark.requirement("R43")
def test_a_killed_check_command_is_tried_again_and_a_failed_one_is_not(end: Exit, reason: str) -> None:
    failure = check_failure(CommandResult(end, b"", b"no such option"), Phase.PREPARING)
    assert (failure.reason, failure.retriable) == (reason, reason == "AGENT_KILLED")


@pytest.mark.requirement("R58")
@pytest.mark.parametrize(
    ("stdout", "stderr", "ending"),
    [
        (b"", b"", "exit code 3"),
        (b"in vain\n", b"", "exit code 3: in vain"),
        (b"not this", b"first\nE: \x1b[31mlast\x1b[0m\r\n \n", "exit code 3: E: [31mlast[0m"),
        (b"", b"\xff" + b"x" * 300, "exit code 3: \ufffd" + "x" * 199),
    ],
)
def test_a_failed_setup_is_described_by_its_last_line(stdout: bytes, stderr: bytes, ending: str) -> None:
    """One bounded line, without control characters."""
    result = CommandResult(Exit(ExitReason.EXITED, code=3), stdout, stderr)
    assert setup_failure(result, 0, 2) == f"setup command 1 of 2 failed: {ending}"
