"""The course of a rollout, with the real shell agent: every phase, every way out, nothing left behind."""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.support.waiting import GUARD_S, eventually_async
from tests.unit.driver.conftest import Driver
from tests.unit.driver.world import bash, say

from penstock.driver.v1 import rollout_pb2
from penstock.interception.v1 import interception_pb2
from penstock.sandbox.v1 import sandbox_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PenstockError,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from penstock_driver.agents.launch import FileToWrite
from penstock_driver.agents.specs import Artifact, Toolbox
from penstock_driver.domain.ports import BackendFacts, CallEnded, Command, GateClosing, Packages, SandboxTerms
from penstock_driver.domain.rollout import Cause, Component, CopiedPath, Failure, Limits, Phase, Verifier
from penstock_driver.environments.prepare import Environments, for_verifier
from penstock_driver.grading import grader
from penstock_driver.placement.placement import OnePlace
from penstock_driver.rollouts.preflight import check_backend
from penstock_driver.wire.specs import effective_spec, rollout_spec
from penstock_driver.wire.to_proto import rollout_to_proto


def failure(outcome: rollout_pb2.Outcome) -> tuple[str, str]:
    assert outcome.HasField("failure"), outcome
    return rollout_pb2.FailureCause.Name(outcome.failure.cause).removeprefix("FAILURE_CAUSE_"), outcome.failure.reason


def with_task(driver: Driver, **changes: Any) -> Any:
    spec = driver.spec()
    return replace(spec, task=replace(spec.task, **changes))


@pytest.mark.requirement("R57", "R59", "R71", "R79")
async def test_a_rollout_of_the_shell_agent_is_rewarded_by_its_verifier(driver: Driver) -> None:
    """Phases in order, setup and verifier reported with real exits, agent events in between."""
    record = await driver.start(driver.spec())
    outcome = await driver.outcome(record)
    assert not outcome.HasField("failure")
    assert (outcome.reward.value, outcome.agent_exit.exit.code) == (1.0, 0)
    events = await driver.events(record.rollout_id)
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    told = [
        rollout_pb2.Phase.Name(event.phase_changed.phase).removeprefix("PHASE_")
        if event.HasField("phase_changed")
        else event.WhichOneof("event")
        for event in events
    ]
    assert told == [
        "QUEUED", "PREPARING", "command_finished", "CONFIGURING", "RUNNING", *["agent_event"] * 4, "agent_exited",
        "VERIFYING", "command_finished", "ENDED", "ended",
    ]  # fmt: skip
    assert driver.gate.closed == {record.rollout_id: "AGENT_EXITED"}


@pytest.mark.requirement("R57")
async def test_a_rollout_tells_how_its_sandbox_was_copied_from_the_prepared_state(driver: Driver) -> None:
    """As soon as it is forked, and on disk from the next phase on: a later driver reads it there."""
    driver.gate.hold = asyncio.Event()
    record = await driver.start(driver.spec())
    await driver.gate.called.wait()
    live = await driver.manager.get(record.rollout_id)
    await driver.history.flush()
    kept = await driver.records.get(record.rollout_id)
    driver.gate.hold.set()
    await driver.outcome(record)
    ended = await driver.records.get(record.rollout_id)
    assert [item.fork_kind for item in (live, kept, ended)] == [sandbox_pb2.FORK_KIND_FILESYSTEM] * 3
    assert rollout_to_proto(ended).fork_kind == sandbox_pb2.FORK_KIND_FILESYSTEM


@pytest.mark.requirement("R60", "R72")
async def test_the_agent_is_dead_and_its_credential_void_before_the_verifier_starts(driver: Driver) -> None:
    """The order of the calls to the other services."""
    await driver.run(driver.spec())
    calls = driver.sandboxes.calls
    assert calls.index("watch") < calls.index("kill") < len(calls) - 1 - calls[::-1].index("run")


@pytest.mark.requirement("R57")
async def test_rollouts_of_one_content_share_one_preparation(driver: Driver) -> None:
    """Eight at once install once, set up once and fork eight times; another key prepares again."""
    records = [await driver.start(driver.spec()) for _ in range(8)]
    outcomes = [await driver.outcome(record) for record in records]
    assert [outcome.reward.value for outcome in outcomes] == [1.0] * 8
    calls = driver.sandboxes.calls
    assert [calls.count(name) for name in ("prepare_toolbox", "prepare_snapshot", "fork")] == [1, 1, 8]
    await driver.run(driver.spec(), key="another")
    assert calls.count("prepare_snapshot") == 2


@pytest.mark.requirement("R69")
async def test_tools_offered_meanwhile_end_rollouts_of_incapable_agents(
    driver: Driver,
) -> None:
    """After the creating call's own check, and before there is a sandbox; the place at the gate is given back."""
    driver.gate.host_tools = ("lookup",)
    record = await driver.start(driver.spec())
    outcome = await driver.outcome(record)
    assert failure(outcome) == ("INFRASTRUCTURE", "AGENT_WITHOUT_MCP")
    assert "lookup" in outcome.failure.message
    assert "fork" not in driver.sandboxes.calls
    assert driver.gate.closed == {record.rollout_id: "ROLLOUT_ENDED"}


@pytest.mark.requirement("R88")
async def test_exhausted_run_ends_further_rollouts_before_a_sandbox(driver: Driver) -> None:
    """Nothing is tried again, and the cause is the budget, not the infrastructure."""
    used_up = ResourceExhausted("The run's budget max_calls is used up.", reason="BUDGET_EXHAUSTED")
    driver.gate.fail["open"] = [used_up, used_up]
    record = await driver.start(driver.spec())
    outcome = await driver.outcome(record)
    assert failure(outcome) == ("BUDGET", "BUDGET_EXHAUSTED")
    assert not outcome.failure.retriable
    assert "fork" not in driver.sandboxes.calls
    assert driver.gate.fail["open"] == [used_up]


@pytest.mark.requirement("R58")
async def test_a_failed_setup_ends_the_rollout_before_agent_verifier_and_reward(driver: Driver) -> None:
    """And says which command, with its exit code and output."""
    setup = (Command(shell="true"), Command(shell="echo why >&2; exit 7"), Command(shell="true"))
    record = await driver.start(with_task(driver, setup=setup))
    outcome = await driver.outcome(record)
    assert failure(outcome) == ("TASK", "SETUP_FAILED")
    assert outcome.failure.message == "setup command 2 of 3 failed: exit code 7: why"
    assert not outcome.HasField("reward")
    events = await driver.events(record.rollout_id)
    finished = [event.command_finished for event in events if event.HasField("command_finished")]
    assert [(item.index, item.exit.code, item.stderr_tail) for item in finished] == [(0, 0, b""), (1, 7, b"why\n")]
    assert not driver.gate.opened
    assert "start" not in driver.sandboxes.calls


@pytest.mark.requirement("R51")
async def test_a_snapshot_that_the_sandbox_service_dropped_is_made_again(driver: Driver) -> None:
    """A cache of ours is no reason to fail."""
    await driver.run(driver.spec())
    driver.sandboxes.snapshots.clear()
    assert (await driver.run(driver.spec())).reward.value == 1.0
    assert driver.sandboxes.calls.count("prepare_snapshot") == 2


@pytest.mark.requirement("R51")
async def test_a_full_sandbox_service_is_waited_for(driver: Driver) -> None:
    """With the delay that it names."""
    driver.sandboxes.fail["fork"] = [ResourceExhausted("full", reason="SANDBOX_LIMIT", retry_after_s=0.01)] * 3
    assert (await driver.run(driver.spec())).reward.value == 1.0


@pytest.mark.requirement("R59", "R74")
async def test_an_agent_that_crashes_is_a_failure_that_may_still_be_graded(driver: Driver) -> None:
    """Exit code 4 after the file was half right."""
    script: Iterator[dict[str, Any] | int] = iter([bash("true"), 400])
    driver.gate.script = lambda _: next(script)
    outcome = await driver.run(driver.spec())
    assert failure(outcome) == ("AGENT", "AGENT_CRASHED")
    assert outcome.reward.value == 0.25
    assert outcome.agent_exit.exit.code == 4


@pytest.mark.requirement("R37", "R40", "R59", "R61")
async def test_an_agent_out_of_time_is_killed_with_all_that_it_started(driver: Driver) -> None:
    driver.gate.hold = asyncio.Event()
    spec = replace(driver.spec(), limits=Limits(agent_s=0.5))
    outcome = await driver.run(spec)
    assert failure(outcome) == ("TIMEOUT", "AGENT_TIMED_OUT")
    assert outcome.reward.value == 0.25


@pytest.mark.requirement("R88")
async def test_used_up_budget_is_the_cause_whatever_the_agent_did(driver: Driver) -> None:
    driver.gate.closing = GateClosing("max_calls", 5, 0)
    outcome = await driver.run(driver.spec())
    assert failure(outcome) == ("BUDGET", "BUDGET_EXHAUSTED")
    assert outcome.HasField("reward")


@pytest.mark.requirement("R59")
@pytest.mark.parametrize("is_final", [False, True])
async def test_calls_without_an_answer_are_the_models_failure_and_not_the_agents(
    driver: Driver, is_final: bool
) -> None:
    """Not graded, and to be tried again unless the same would happen, as with a prompt beyond the context."""
    driver.gate.script = lambda _: 400
    driver.gate.closing = GateClosing("", 1, 1, "CONTEXT_EXCEEDED", is_final)
    outcome = await driver.run(driver.spec())
    assert failure(outcome) == ("MODEL", "MODEL_CALL_FAILED")
    assert "CONTEXT_EXCEEDED" in outcome.failure.message
    assert outcome.failure.retriable is not is_final
    assert not outcome.HasField("reward")


@pytest.mark.requirement("R43", "R74")
async def test_a_lost_sandbox_is_infrastructure_and_is_not_graded(driver: Driver) -> None:
    driver.gate.hold = asyncio.Event()
    record = await driver.start(driver.spec())
    await driver.gate.called.wait()
    driver.sandboxes.lost.update(driver.sandboxes.boxes)
    driver.gate.hold.set()
    outcome = await driver.outcome(record)
    assert failure(outcome) == ("INFRASTRUCTURE", "SANDBOX_LOST")
    assert not outcome.HasField("reward")


@pytest.mark.requirement("R49")
@pytest.mark.parametrize("first", [None, "NODE_LOST"], ids=["ended by itself", "ended by another loss"])
async def test_a_clean_up_does_not_wait_for_a_gate_that_is_lost_meanwhile(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, first: str | None
) -> None:
    """It waits a minute for one that is not known to be lost. The release stays owed, and what comes next runs."""
    lost, closing = False, asyncio.Event()
    driver.manager._placement = OnePlace(
        replace(driver.manager._placement._place.services, is_gate_lost=lambda: lost)  # type: ignore[attr-defined]
    )

    close_at_once = driver.gate.close

    async def close(rollout_id: str, reason: str) -> GateClosing:
        if not closing.is_set():  # the clean-up after the attempt; the one that is owed has an answer
            closing.set()
            await asyncio.Event().wait()
        return await close_at_once(rollout_id, reason)

    monkeypatch.setattr(driver.gate, "close", close)
    if first:
        driver.sandboxes.holds["fork"] = asyncio.Event()
    else:
        driver.sandboxes.fail["fork"] = [FailedPrecondition("no", reason="SANDBOX_LOST")]
    record = await driver.start(replace(driver.spec(), max_attempts=2))
    runner = driver.manager._live[record.rollout_id]
    if first:
        await driver.sandboxes.holds["fork"].wait()
        del driver.sandboxes.holds["fork"]
        runner._lose_place(lost_place(first))
    await closing.wait()
    lost = True
    runner._lose_place(lost_place("GATE_LOST"))
    outcome = await driver.outcome(record)
    assert not outcome.HasField("failure") and outcome.reward.value == 1.0
    again = [item for item in await driver.events(record.rollout_id) if item.HasField("attempt_failed")]
    assert [item.attempt_failed.failure.reason for item in again] == [first or "SANDBOX_LOST"]
    assert driver.gate.opened[record.rollout_id].attempt == 2
    await eventually_async(driver.owes_nothing, "the gate's release is made up for")


def lost_place(reason: str) -> Failure:
    """Of an attempt whose place was lost."""
    return Failure(Cause.INFRASTRUCTURE, reason, "it is lost", True, Phase.QUEUED, component=Component.GATE)


@pytest.mark.requirement("R93")
@pytest.mark.parametrize("inside", [True, False], ids=["from within", "from outside"])
@pytest.mark.parametrize("step", ["watch", "kill", "read_tree", "run", "read_file"])
async def test_sandbox_ended_by_its_agent_is_the_agents_unretried_failure(
    driver: Driver, step: str, inside: bool
) -> None:
    """While the agent runs, and in whatever is done to grade it; what was not ended from within is tried again."""
    spec = replace(with_task(driver, setup=(), keep_files=True), max_attempts=2)
    await driver.run(spec)
    lost = FailedPrecondition("the sandbox is lost", reason="SANDBOX_LOST")
    driver.sandboxes.fail[step] = [lost]
    driver.sandboxes.from_within = inside
    record = await driver.start(spec)
    outcome = await driver.outcome(record)
    again = [item for item in await driver.events(record.rollout_id) if item.HasField("attempt_failed")]
    if inside:
        assert failure(outcome) == ("AGENT", "SANDBOX_ENDED_INSIDE")
        assert not outcome.failure.retriable
        assert not outcome.HasField("reward")
        assert not again
    else:
        assert [item.attempt_failed.failure.reason for item in again] == ["SANDBOX_LOST"]
        assert not outcome.HasField("failure")


@pytest.mark.requirement("R93")
async def test_exit_with_its_sandbox_is_judged_by_the_sandboxs_end(driver: Driver) -> None:
    driver.gate.hold = asyncio.Event()
    record = await driver.start(replace(driver.spec(), max_attempts=3))
    await driver.gate.called.wait()
    driver.sandboxes.lost.update(driver.sandboxes.boxes)
    driver.sandboxes.from_within = True
    driver.gate.hold.set()
    assert failure(await driver.outcome(record)) == ("AGENT", "SANDBOX_ENDED_INSIDE")
    assert driver.sandboxes.calls.count("fork") == 1


@pytest.mark.requirement("R93")
@pytest.mark.parametrize("step", ["prepare_snapshot", "write_files"])
async def test_a_sandbox_that_ends_before_there_is_an_agent_is_tried_again(driver: Driver, step: str) -> None:
    """Nobody but the task's own setup was in it."""
    spec = replace(with_task(driver, setup=()), max_attempts=2)
    driver.sandboxes.fail[step] = [Unavailable("the sandbox is lost", reason="SANDBOX_LOST")]
    outcome = await driver.run(spec)
    assert (outcome.HasField("failure"), outcome.reward.value) == (False, 0.25)
    assert "ended_inside" not in driver.sandboxes.calls


@pytest.mark.requirement("R49")
@pytest.mark.parametrize(
    "step", ["prepare_toolbox", "prepare_snapshot", "write_files", "start", "watch", "kill", "run"]
)
async def test_failure_after_a_sandbox_exists_releases_everything(driver: Driver, step: str) -> None:
    """At every call to the sandbox service; the fixture asserts that no sandbox is left."""
    spec = with_task(driver, setup=())
    error = Unavailable("injected", reason="INJECTED")
    await driver.run(spec)
    driver.sandboxes.fail[step] = [error]
    record = await driver.start(spec, key="fresh" if step.startswith("prepare") else "k")
    if step == "prepare_toolbox":
        assert not (await driver.outcome(record)).HasField("failure"), "the toolbox was there already"
        return
    outcome = await driver.outcome(record)
    assert failure(outcome) == ("INFRASTRUCTURE", "INJECTED")
    assert outcome.failure.retriable
    assert driver.gate.closed.keys() >= driver.gate.opened.keys()


@pytest.mark.requirement("R56")
@pytest.mark.parametrize(("permanent", "retriable"), [("true", False), ("false", True)])
async def test_an_installation_that_no_retry_helps_is_a_failure_for_good(
    driver: Driver, permanent: str, retriable: bool
) -> None:
    """A package that does not exist is not tried again and again."""
    error = Unavailable("no", reason="INSTALL_FAILED", metadata={"permanent": permanent})
    driver.sandboxes.fail["prepare_toolbox"] = [error]
    outcome = await driver.outcome(await driver.start(driver.spec()))
    assert failure(outcome) == ("INFRASTRUCTURE", "INSTALL_FAILED")
    assert outcome.failure.retriable is retriable


@pytest.mark.requirement("R56")
async def test_the_lines_of_an_installation_that_fails_are_events_of_the_rollout(driver: Driver) -> None:
    driver.sandboxes.installation = ["attempt 1", "npm install failed"]
    driver.sandboxes.fail["prepare_toolbox"] = [Unavailable("no", reason="INSTALL_FAILED")]
    record = await driver.start(driver.spec())
    assert failure(await driver.outcome(record)) == ("INFRASTRUCTURE", "INSTALL_FAILED")
    told = [item.progress.message for item in await driver.events(record.rollout_id) if item.HasField("progress")]
    assert told == driver.sandboxes.installation


@pytest.mark.requirement("R56", "R57")
async def test_waiters_for_an_installation_all_get_its_lines(driver: Driver) -> None:
    driver.sandboxes.installation = ["attempt 1", "added 3 packages"]
    environments, told = Environments(driver.sandboxes), (list[str](), list[str]())
    await asyncio.gather(*(environments.get(driver.spec(), lines.append) for lines in told))
    assert list(told) == [driver.sandboxes.installation] * 2


@pytest.mark.requirement("R56")
async def test_agents_that_install_nothing_share_a_tasks_snapshot(driver: Driver) -> None:
    """The sandbox service makes equal specs once; another agent's own toolbox makes another spec."""
    shell = driver.spec().agent
    bare = shell.spec.model_copy(update={"toolbox": Toolbox(), "check_argv": []})
    agents = [replace(shell, spec=bare.model_copy(update={"name": name}), sha256=name) for name in ("one", "other")]
    environments = Environments(driver.sandboxes)
    for agent in (*agents, shell):
        await environments.get(driver.spec(agent=agent), lambda _: None)
    one, other, own = driver.sandboxes.wanted
    assert one == other != own


@pytest.mark.requirement("R49", "R50")
async def test_a_clean_up_that_fails_does_not_hide_the_cause(driver: Driver) -> None:
    """The outcome names the first cause, an event tells of the rest, and the next driver makes up for it."""
    await driver.run(driver.spec())
    away = driver.sandboxes.fail["delete_labelled"] = [Unavailable("third", reason="THIRD")] * 100
    driver.sandboxes.fail["start"] = [FailedPrecondition("first", reason="FIRST")]
    driver.sandboxes.fail["delete"] = [Unavailable("second", reason="SECOND")]
    record = await driver.start(driver.spec())
    assert failure(await driver.outcome(record)) == ("INFRASTRUCTURE", "FIRST")
    told = [event.progress.message for event in await driver.events(record.rollout_id) if event.HasField("progress")]
    assert len(told) == 1
    assert "second" in told[0]
    assert driver.sandboxes.boxes
    assert await driver.records.pending_cleanups() == [record.rollout_id]
    await driver.manager.aclose()
    away.clear()
    driver.manager = driver.make()
    await driver.manager.recover()
    await eventually_async(driver.owes_nothing, "what was owed is released")
    assert not driver.sandboxes.boxes


@pytest.mark.requirement("R70")
async def test_cancelling_ends_a_rollout_from_anywhere_and_twice_is_once(driver: Driver) -> None:
    """While the agent waits for an answer; when cancel returns the sandbox is gone."""
    driver.gate.hold = asyncio.Event()
    record = await driver.start(driver.spec())
    await driver.gate.called.wait()
    first, second = await asyncio.gather(
        driver.manager.cancel(record.rollout_id, "enough"), driver.manager.cancel(record.rollout_id, "again")
    )
    assert not driver.sandboxes.boxes
    assert first.outcome == second.outcome
    outcome = await driver.outcome(record)
    assert failure(outcome) == ("CANCELLED", "CANCELLED")
    assert rollout_pb2.Phase.Name(outcome.failure.phase) == "PHASE_RUNNING"
    assert "enough" in outcome.failure.message
    again = await driver.manager.cancel(record.rollout_id, "too late")
    assert again.outcome == first.outcome


@pytest.mark.requirement("R70")
async def test_a_rollout_that_waits_for_a_slot_is_cancelled_without_a_trace(driver: Driver) -> None:
    driver.gate.hold = asyncio.Event()
    running = [await driver.start(driver.spec()) for _ in range(8)]
    waiting = await driver.start(driver.spec())
    await driver.manager.cancel(waiting.rollout_id, "")
    assert failure(await driver.outcome(waiting)) == ("CANCELLED", "CANCELLED")
    assert waiting.rollout_id not in driver.gate.opened
    driver.gate.hold.set()
    for record in running:
        assert (await driver.outcome(record)).reward.value == 1.0


@pytest.mark.requirement("R74")
async def test_a_task_without_a_verifier_is_not_graded(driver: Driver) -> None:
    """Not graded is not zero."""
    outcome = await driver.run(with_task(driver, verifier=None))
    assert not outcome.HasField("failure")
    assert not outcome.HasField("reward")


@pytest.mark.requirement("R10", "R72", "R75")
async def test_the_verifier_sees_its_own_files_and_no_environment_of_the_agent(driver: Driver) -> None:
    """The agent laid links and a reward of its own; the verifier's files replace them all."""
    lay = "mkdir t; ln -s /etc/passwd t/check.sh; ln -s t u; echo 1 > reward; env > env.txt"
    driver.gate.script = lambda messages: say("ok") if messages[-1]["role"] == "tool" else bash(lay)
    script = b'test -z "$TASK_SECRET" && test ! -L u && echo 0.5 > $PENSTOCK_REWARD_FILE'
    check = FileToWrite("t/check.sh", script, 0o644)
    verifier = Verifier(
        commands=(Command(argv=("sh", "t/check.sh")),),
        files=(check, FileToWrite("u/other.txt", b"x", 0o644)),
        reward_by_file=True,
    )
    outcome = await driver.run(with_task(driver, verifier=verifier, env={"TASK_SECRET": "s"}))
    assert outcome.reward.value == 0.5


@pytest.mark.requirement("R73")
async def test_reward_by_passed_share_counts_every_command(driver: Driver) -> None:
    """All run, whatever the others gave; a command out of time has not passed."""
    # Only what hangs has the verifier's limit: on a busy machine the others may take longer.
    quick = [Command(shell=text, timeout_s=GUARD_S) for text in ("true", "false", "true")]
    commands = (*quick[:2], Command(shell="sleep 60"), quick[2])
    verifier = Verifier(commands=commands, range_min=-1.0, range_max=1.0, command_timeout_s=0.3)
    outcome = await driver.run(with_task(driver, verifier=verifier))
    assert outcome.reward.value == 0.0
    assert not outcome.HasField("failure")


@pytest.mark.requirement("R73", "R74")
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("true", "REWARD_ABSENT"),
        ("echo nan > $PENSTOCK_REWARD_FILE", "REWARD_OUT_OF_RANGE"),
        ("echo 1.01 > $PENSTOCK_REWARD_FILE", "REWARD_OUT_OF_RANGE"),
        ("echo good > $PENSTOCK_REWARD_FILE", "REWARD_INVALID"),
        ("rm $PENSTOCK_REWARD_FILE", "REWARD_FILE_ABSENT"),
        ("ln -sf /etc/hostname $PENSTOCK_REWARD_FILE", "REWARD_FILE_ABSENT"),
    ],
)
async def test_a_reward_that_is_none_fails_the_verifier(driver: Driver, text: str, reason: str) -> None:
    """Never clipped, never zero."""
    verifier = Verifier(commands=(Command(shell=text),), reward_by_file=True)
    outcome = await driver.run(with_task(driver, verifier=verifier))
    assert failure(outcome) == ("VERIFIER", reason)
    assert not outcome.HasField("reward")
    driver.sandboxes.kills_after = True
    assert failure(await driver.run(with_task(driver, verifier=verifier))) == ("VERIFIER", reason)


@pytest.mark.requirement("R60", "R73")
@pytest.mark.parametrize(("kills_after", "kills", "reads"), [(True, 0, 0), (False, 3, 2)])
async def test_a_service_kills_and_reads_with_the_command_where_it_can(
    driver: Driver, kills_after: bool, kills: int, reads: int
) -> None:
    """One of an earlier version is asked for each; both give the same reward, handed on from command to command."""
    driver.sandboxes.kills_after = kills_after
    texts = (
        "echo 0.25 > $PENSTOCK_REWARD_FILE; sleep 60 > /dev/null 2>&1 &",
        "grep -qx 0.25 $PENSTOCK_REWARD_FILE && echo 0.75 > $PENSTOCK_REWARD_FILE",
    )
    verifier = Verifier(commands=tuple(Command(shell=text) for text in texts), reward_by_file=True)
    outcome = await driver.run(with_task(driver, verifier=verifier))
    assert outcome.reward.value == 0.75
    calls = driver.sandboxes.calls
    assert (calls.count("kill"), calls.count("read_file")) == (kills, reads)


@pytest.mark.requirement("R60", "R73")
@pytest.mark.parametrize(("takes_files", "written"), [(True, 1), (False, 4)])
async def test_a_service_writes_files_with_the_start_where_it_can(
    driver: Driver, takes_files: bool, written: int
) -> None:
    """One of an earlier version is asked to write the agent's files and each reward file before.

    One call more is the fork's to grade in, of a backend that makes it by the task's files and setup.
    """
    driver.sandboxes.takes_files = takes_files
    texts = ("echo 0.25 > $PENSTOCK_REWARD_FILE", "grep -qx 0.25 $PENSTOCK_REWARD_FILE")
    verifier = Verifier(commands=tuple(Command(shell=text) for text in texts), reward_by_file=True)
    outcome = await driver.run(with_task(driver, verifier=verifier))
    assert outcome.reward.value == 0.25
    calls = driver.sandboxes.calls
    assert calls[calls.index("fork") :].count("write_files") == written


DENIED = PermissionDenied("locked", reason="FILE_PERMISSION")


@pytest.mark.requirement("R72", "R74")
async def test_a_reward_file_that_is_refused_with_its_command_says_why(driver: Driver) -> None:
    driver.sandboxes.takes_files = True
    verifier = Verifier(commands=(Command(shell="echo 1 > $PENSTOCK_REWARD_FILE"),), reward_by_file=True)
    spec = with_task(driver, verifier=verifier)
    assert (await driver.run(spec)).reward.value == 1
    driver.sandboxes.fail |= {"run": [DENIED], "write_files": [DENIED]}
    outcome = await driver.run(spec)  # of what is prepared already
    assert failure(outcome) == ("VERIFIER", "VERIFIER_FILES_REFUSED")


@pytest.mark.requirement("R72", "R74")
@pytest.mark.parametrize(
    ("call", "error", "expected"),
    [
        ("read_file", DENIED, ("VERIFIER", "REWARD_FILE_ABSENT")),
        ("read_file", NotFound("gone", reason="SANDBOX_UNKNOWN"), ("INFRASTRUCTURE", "SANDBOX_UNKNOWN")),
        ("put_layer", DENIED, ("AGENT", "GRADING_BLOCKED")),
        ("put_layer", ResourceExhausted("large", reason="TREE_TOO_LARGE"), ("AGENT", "GRADING_BLOCKED")),
        ("put_layer", ResourceExhausted("full", reason="DISK_FULL"), ("AGENT", "DISK_FULL")),
        ("put_layer", ResourceExhausted("busy", reason="OVERLOADED"), ("INFRASTRUCTURE", "OVERLOADED")),
    ],
)
async def test_agents_leftovers_are_never_taken_for_an_infrastructure_failure(
    driver: Driver, call: str, error: PenstockError, expected: tuple[str, str]
) -> None:
    """Locked, endless, too deep; a sandbox that is gone and a service that is busy are no agent's doing."""
    spec = driver.spec()
    assert spec.task.verifier
    driver.sandboxes.fail[call] = [error]
    verifier = replace(spec.task.verifier, restore=("note.txt",))
    assert failure(await driver.run(with_task(driver, verifier=verifier))) == expected


@pytest.mark.requirement("R72", "R74")
async def test_removed_working_directory_exists_again_for_the_verifier(driver: Driver) -> None:
    """And it is graded for what is in it, once for each command."""
    driver.gate.script = lambda messages: say("ok") if messages[-1]["role"] == "tool" else bash('rm -r "$PWD"')
    verifier = Verifier(commands=(Command(shell="test -e out.txt"), Command(shell="true")))
    record = await driver.start(with_task(driver, verifier=verifier))
    outcome = await driver.outcome(record)
    assert (outcome.HasField("failure"), outcome.reward.value) == (False, 0.5)
    assert [command.exit.code for command in outcome.grading.commands] == [1, 0]


@pytest.mark.requirement("R74")
async def test_a_verifier_that_cannot_be_started_is_the_verifiers_failure(driver: Driver) -> None:
    """An agent can remove its program, and is not run again for it."""
    verifier = Verifier(commands=(Command(argv=("/nowhere/program",)),))
    outcome = await driver.run(with_task(driver, verifier=verifier))
    assert failure(outcome) == ("VERIFIER", "VERIFIER_START_FAILED")
    assert not outcome.failure.retriable


@pytest.mark.requirement("R72", "R74")
async def test_locked_artifact_is_missing_and_the_work_is_graded(driver: Driver) -> None:
    spec = driver.spec()
    agent = spec.agent.spec.model_copy(update={"artifacts": [Artifact(name="out", path="{{home}}/log")]})
    driver.sandboxes.fail["read_file"] = [None, DENIED]  # after the reward
    outcome = await driver.run(replace(spec, agent=replace(spec.agent, spec=agent)))
    assert (outcome.HasField("failure"), outcome.reward.value) == (False, 1.0)


@pytest.mark.requirement("R49")
async def test_keeping_what_is_to_be_restored_has_an_end(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task's own failure, before the agent."""
    monkeypatch.setattr(grader, "CARRY_S", 0.01)
    driver.sandboxes.holds["kind"] = asyncio.Event()
    verifier = Verifier(commands=(Command(shell="true"),), restore=("note.txt",))
    assert failure(await driver.run(with_task(driver, verifier=verifier))) == ("TASK", "RESTORE_TOO_LARGE")


@pytest.mark.requirement("R72", "R74")
async def test_changes_that_cannot_be_read_in_time_are_the_agents(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many files there are is the agent's choice."""
    monkeypatch.setattr(grader, "TAKE_S", 0.01)
    driver.sandboxes.holds["diff"] = asyncio.Event()
    monkeypatch.setattr(grader, "IN_MEMORY", ())  # where these boxes are
    verifier = Verifier(commands=(Command(shell="true"),), fresh_fork=True)
    assert failure(await driver.run(with_task(driver, verifier=verifier))) == ("AGENT", "CHANGES_TOO_LARGE")


@pytest.mark.requirement("R72", "R74", "R90")
async def test_system_too_large_to_check_in_time_is_the_agents_failure(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend may look through all that the agent changed, and else it would be tried again."""
    monkeypatch.setattr(grader, "TAKE_S", 0.01)
    driver.sandboxes.holds["diff"] = asyncio.Event()
    spec = replace(driver.spec(), reports_changes=True, sandbox=SandboxTerms(user="agent"), max_attempts=2)
    outcome = await driver.run(spec)
    assert failure(outcome) == ("AGENT", "GRADING_BLOCKED")
    assert driver.sandboxes.calls.count("fork") == 1


@pytest.mark.requirement("R67")
async def test_instructions_of_any_size_and_form_reach_the_model_byte_for_byte(driver: Driver) -> None:
    """Half a megabyte of every shell metacharacter."""
    instruction = 'it\'s "$(x)" `y` \\ ; && | > * ? # \t é 漢 ' * 8000
    await driver.run(with_task(driver, instruction=instruction))
    assert driver.gate.requests[0][2]["messages"][1]["content"] == instruction


@pytest.mark.requirement("R62")
async def test_durations_and_cause_are_recorded_on_every_way_out(driver: Driver) -> None:
    driver.gate.fail["open"] = [FailedPrecondition("no", reason="TEMPLATE_UNSUPPORTED")]
    record = await driver.start(driver.spec())
    outcome = await driver.outcome(record)
    ended = await driver.manager.get(record.rollout_id)
    assert failure(outcome) == ("INFRASTRUCTURE", "TEMPLATE_UNSUPPORTED")
    assert not outcome.failure.retriable
    assert ended.end_time is not None
    assert {phase.name for phase in ended.phase_times} == {"QUEUED", "PREPARING"}


@pytest.mark.requirement("R50")
async def test_after_a_restart_what_ran_is_ended_and_released(driver: Driver) -> None:
    """As after a kill -9: the records say that it runs, and its sandbox carries its labels."""
    record = await driver.start(driver.spec())
    await driver.outcome(record)
    await driver.records._journal.execute(
        "UPDATE rollouts SET end_time = NULL, outcome = NULL, phase = 5 WHERE rollout_id = ?", (record.rollout_id,)
    )
    await driver.records._journal.execute("DELETE FROM events WHERE sequence > 5")
    labels = {"penstock_driver": driver.opened.parts.instance_id, "penstock_rollout": record.rollout_id}
    driver.sandboxes._new(labels)
    driver.sandboxes._new({"penstock_driver": "another"})
    driver.sandboxes.fail["delete_labelled"] = [Unavailable("not yet", reason="SANDBOX_UNREACHABLE")]
    assert await driver.manager.recover() == 1
    assert driver.manager.is_running(record.rollout_id)
    outcome = await driver.outcome(record)
    assert [box.labels for box in driver.sandboxes.boxes.values()] == [{"penstock_driver": "another"}]
    assert failure(outcome) == ("INFRASTRUCTURE", "DRIVER_RESTARTED")
    assert outcome.failure.retriable
    events = await driver.events(record.rollout_id)
    assert [event.sequence for event in events] == [1, 2, 3, 4, 5, 6]
    assert events[-1].HasField("ended")
    driver.sandboxes.boxes.clear()


@pytest.mark.requirement("R71")
async def test_model_calls_are_among_a_rollouts_events(driver: Driver) -> None:
    """As the gate reports them; those of a rollout that is not here are left alone."""
    driver.manager.watch_calls()
    driver.gate.hold = asyncio.Event()
    record = await driver.start(driver.spec())
    await driver.gate.called.wait()
    call = trajectory_pb2.Call(call_id="c1", rollout_id=record.rollout_id)
    driver.gate.call_ends.put_nowait(CallEnded("another", trajectory_pb2.Call()))
    driver.gate.call_ends.put_nowait(CallEnded(record.rollout_id, call))
    signal = driver.history.signal(record.rollout_id)
    while not driver.gate.call_ends.empty():
        await signal.wait(signal.number)
    driver.gate.hold.set()
    await driver.outcome(record)
    told = [
        event.call_finished.call for event in await driver.events(record.rollout_id) if event.HasField("call_finished")
    ]
    assert told == [call]


def facts(*, diff: bool) -> BackendFacts:
    return BackendFacts("b", True, "", True, True, True, False, diff, True, True)


@pytest.mark.requirement("R46", "R54", "R55", "R95")
@pytest.mark.parametrize("limit", ["cpu", "memory_bytes", "pids", "disk_bytes", "inodes"])
async def test_unsupported_limit_is_refused_when_the_rollout_is_created(driver: Driver, limit: str) -> None:
    """A declared capability, never a silent downgrade."""
    terms: dict[str, Any] = {limit: 1 << 30}
    spec = replace(driver.spec(), sandbox=replace(driver.spec().sandbox, **terms))
    with pytest.raises(FailedPrecondition, match=limit) as refused:
        check_backend(spec, [facts(diff=True)])
    assert refused.value.reason == "CAPABILITY_MISSING"
    able = replace(facts(diff=True), limits=frozenset({limit}))
    assert check_backend(spec, [able]).sandbox == replace(spec.sandbox, backend=able.name)


@pytest.mark.requirement("R51")
def test_named_default_backend_shares_its_throttle_and_prepared_state(driver: Driver) -> None:
    """Both are kept by the backend's name and the state's key: an empty name is resolved before it is used."""
    wanted = rollout_pb2.RolloutSpec(mode=interception_pb2.MODE_INTERCEPTION_GATE)
    wanted.agent.name, wanted.task.task_id, wanted.task.instruction = "shell", "t", "do it"
    unnamed = check_backend(rollout_spec(wanted, driver.registry, "default"), [facts(diff=True)])
    wanted.sandbox.backend = "b"
    named = check_backend(rollout_spec(wanted, driver.registry, "default"), [facts(diff=True)])
    assert (unnamed.sandbox, unnamed.environment_key) == (named.sandbox, named.environment_key)


@pytest.mark.requirement("R128")
@pytest.mark.parametrize(
    ("replay", "chosen", "expected"),
    [
        (rollout_pb2.REPLAY_UNSPECIFIED, None, True),
        (rollout_pb2.REPLAY_EXACT, None, True),
        (rollout_pb2.REPLAY_OFF, None, False),
        (rollout_pb2.REPLAY_OFF, True, True),
        (rollout_pb2.REPLAY_UNSPECIFIED, False, False),
    ],
)
def test_sandboxes_are_repeatable_unless_nothing_is_replayed(
    driver: Driver, replay: rollout_pb2.Replay.ValueType, chosen: bool | None, expected: bool
) -> None:
    """And which they are changes nothing of the prepared state."""
    wanted = rollout_pb2.RolloutSpec(mode=interception_pb2.MODE_INTERCEPTION_GATE)
    wanted.agent.name, wanted.task.task_id, wanted.task.instruction = "shell", "t", "do it"
    before = rollout_spec(wanted, driver.registry, "default")
    wanted.replay = replay
    if chosen is not None:
        wanted.sandbox.repeatable = chosen
    spec = rollout_spec(wanted, driver.registry, "default")
    assert spec.repeatable is expected
    assert (spec.sandbox, spec.environment_key) == (before.sandbox, before.environment_key)
    assert effective_spec(spec).sandbox.repeatable is expected


@pytest.mark.requirement("R128")
@pytest.mark.parametrize("repeatable", [True, False])
async def test_the_agents_sandbox_is_repeatable_and_no_other(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, repeatable: bool
) -> None:
    """Nothing replays a verifier."""
    monkeypatch.setattr(grader, "IN_MEMORY", ())  # where these boxes are
    spec = with_task(driver, verifier=Verifier(commands=(Command(shell="true"),), fresh_fork=True))
    await driver.run(replace(spec, repeatable=repeatable))
    assert driver.sandboxes.repeatable == [repeatable, False]


LISTED = sandbox_pb2.Allowlist(hosts=["a.test"])


@pytest.mark.requirement("R141")
async def test_agent_and_verifier_have_lists_and_recordings_of_their_own(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an agent asks for first is not what its verifier gets; a name that the task gives stays."""
    monkeypatch.setattr(grader, "IN_MEMORY", ())  # where these boxes are
    spec = with_task(driver, verifier=Verifier(commands=(Command(shell="true"),), fresh_fork=True))
    record = await driver.start(replace(spec, agent_network=LISTED, verifier_network=LISTED))
    await driver.outcome(record)
    given = [listed.recording for listed in driver.sandboxes.allowlists if listed is not None]
    assert given == [f"rollout/{record.rollout_id}", f"rollout/{record.rollout_id}/grading"]
    named = sandbox_pb2.Allowlist(hosts=["a.test"], recording="frozen")
    await driver.run(replace(spec, agent_network=named))
    assert driver.sandboxes.allowlists[2:] == [named, None] and LISTED.recording == ""


@pytest.mark.requirement("R141", "R55")
@pytest.mark.parametrize("phase", ["setup", "agent", "verifier"])
def test_a_list_that_the_backend_lacks_is_refused_before_anything_starts(driver: Driver, phase: str) -> None:
    plain = with_task(driver, verifier=Verifier(commands=(Command(shell="true"),)))

    def listing(listed: sandbox_pb2.Allowlist) -> Any:
        if phase == "setup":
            policy = sandbox_pb2.NetworkPolicy(allowlist=listed)
            return replace(plain, sandbox=replace(plain.sandbox, setup_network=policy))
        return replace(plain, **{f"{phase}_network": listed})

    denying = listing(sandbox_pb2.Allowlist(denied_hosts=["b.test"]))
    with pytest.raises(FailedPrecondition, match="network ALLOWLIST"):
        check_backend(denying, [facts(diff=True)])
    check_backend(denying, [replace(facts(diff=True), egress_hosts=("a.test",))])
    spec = listing(LISTED)
    with pytest.raises(FailedPrecondition, match="network ALLOWLIST") as refused:
        check_backend(spec, [facts(diff=True)])
    assert refused.value.reason == "CAPABILITY_MISSING"
    with pytest.raises(FailedPrecondition, match=r"a\.test; the operator's egress_hosts") as refused:
        check_backend(spec, [replace(facts(diff=True), egress_hosts=("b.test",))])
    assert refused.value.reason == "HOST_NOT_ALLOWED"
    check_backend(spec, [replace(facts(diff=True), egress_hosts=("*.test",))])


@pytest.mark.requirement("R151", "R55")
def test_debian_packages_are_refused_before_anything_starts_where_none_are_installed(driver: Driver) -> None:
    """The message says what to do, to the task's author and to the operator."""
    spec = replace(driver.spec(), packages=Packages(debian="locked"))
    with pytest.raises(FailedPrecondition, match=r"sandbox\.packages\.debian.*image.*debian_mirrors") as refused:
        check_backend(spec, [facts(diff=True)])
    assert refused.value.reason == "CAPABILITY_MISSING"
    check_backend(spec, [replace(facts(diff=True), debian_packages=True)])


@pytest.mark.requirement("R141", "R64")
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"agent_network": sandbox_pb2.Allowlist()}, "agent_network.hosts"),
        ({"agent_network": sandbox_pb2.Allowlist(hosts=["a", "A"])}, "agent_network.hosts[1]"),
        ({"agent_network": sandbox_pb2.Allowlist(hosts=["*"], denied_hosts=["*"])}, "agent_network.denied_hosts[0]"),
        ({"agent_network": sandbox_pb2.Allowlist(denied_hosts=["*.a", "b:1"])}, "agent_network.denied_hosts[1]"),
        ({"agent_network": sandbox_pb2.Allowlist(hosts=["a"], ports=[0])}, "agent_network.ports[0]"),
        (
            {"setup_network": sandbox_pb2.NetworkPolicy(allowlist=sandbox_pb2.Allowlist())},
            "setup_network.allowlist.hosts",
        ),
        (
            {
                "setup_network": sandbox_pb2.NetworkPolicy(
                    allowlist=sandbox_pb2.Allowlist(hosts=["a"], recording="group/g")
                )
            },
            "setup_network.allowlist.recording",
        ),
        (
            {"agent_network": sandbox_pb2.Allowlist(hosts=["a"], one_endpoint=sandbox_pb2.OneEndpoint(local_port=1))},
            "agent_network.one_endpoint",
        ),
        ({"verifier_network": LISTED}, "verifier_network"),
    ],
)
def test_a_wrong_list_is_refused_by_its_field(driver: Driver, fields: dict[str, Any], field: str) -> None:
    wanted = rollout_pb2.RolloutSpec(mode=interception_pb2.MODE_INTERCEPTION_GATE)
    wanted.agent.name, wanted.task.task_id, wanted.task.instruction = "shell", "t", "do it"
    for name, value in fields.items():
        getattr(wanted.sandbox, name).CopyFrom(value)
    with pytest.raises(InvalidArgument) as caught:
        rollout_spec(wanted, driver.registry, "default")
    assert [violation.field for violation in caught.value.violations] == [f"spec.sandbox.{field}"]


@pytest.mark.requirement("R90")
@pytest.mark.parametrize("diff", [True, False])
@pytest.mark.parametrize("asked", [None, True, False])
async def test_a_verifier_works_in_a_fresh_fork_wherever_the_backend_can(
    driver: Driver, asked: bool | None, diff: bool
) -> None:
    """In the agent's sandbox only where that is said, or where there is no other way."""
    spec = with_task(driver, verifier=Verifier(commands=(Command(shell="true"),), fresh_fork=asked))
    if asked and not diff:
        with pytest.raises(FailedPrecondition) as refused:
            check_backend(spec, [facts(diff=diff)])
        assert refused.value.reason == "CAPABILITY_MISSING"
        return
    placed = check_backend(spec, [facts(diff=diff)])
    assert placed.task.verifier is not None
    assert placed.task.verifier.fresh_fork is (diff if asked is None else asked)
    assert placed.reports_changes is diff


@pytest.mark.requirement("R49", "R90")
async def test_a_verifier_waits_for_no_deletion_and_the_rollout_for_each(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's sandbox goes while its fork is graded, and both are gone at the end."""
    delete, run = driver.sandboxes.delete, driver.sandboxes.run
    verified = asyncio.Event()
    spec: list[str] = []

    async def unchanged(sandbox_id: str, below: Any, sink: Any, max_bytes: int) -> list[str]:
        tarfile.open(fileobj=sink, mode="w").close()
        spec.append("read")
        return []

    async def slow_delete(sandbox_id: str) -> None:
        if spec:  # not what setups ran in
            await verified.wait()
            spec.append("deleted")
        await delete(sandbox_id)

    async def told_run(*args: Any, **options: Any) -> Any:
        result = await run(*args, **options)
        if spec:
            spec.append("verified")
            verified.set()
        return result

    verifier = Verifier(commands=(Command(shell="true"),), fresh_fork=True)
    task = with_task(driver, verifier=verifier)
    monkeypatch.setattr(driver.sandboxes, "diff", unchanged)
    monkeypatch.setattr(grader, "IN_MEMORY", ())  # where these boxes are
    monkeypatch.setattr(driver.sandboxes, "delete", slow_delete)
    monkeypatch.setattr(driver.sandboxes, "run", told_run)
    outcome = await driver.run(task)
    assert (outcome.HasField("failure"), outcome.HasField("reward")) == (False, True)
    assert spec == ["read", "verified", "deleted", "deleted"]
    assert not driver.sandboxes.boxes


@pytest.mark.requirement("R76")
@pytest.mark.parametrize(
    ("own", "keeps_the_task"),
    [
        (SandboxTerms(image="judge:1"), False),
        (SandboxTerms(pids=7), True),
        (SandboxTerms(image="judge:1", cpu=2, user="root"), False),
    ],
)
async def test_a_verifier_with_a_sandbox_of_its_own_gets_nothing_of_the_agents(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, own: SandboxTerms, keeps_the_task: bool
) -> None:
    """Made before the agent starts: with an image of its own it has nothing of the task, else the task's setup."""

    async def unchanged(sandbox_id: str, below: Any, sink: Any, max_bytes: int) -> list[str]:
        tarfile.open(fileobj=sink, mode="w").close()
        return []

    monkeypatch.setattr(driver.sandboxes, "diff", unchanged)
    monkeypatch.setattr(grader, "IN_MEMORY", ())  # where these boxes are
    verifier = Verifier(commands=(Command(shell="true"),), fresh_fork=True, sandbox=own)
    files, setup = (FileToWrite("given", b"", 0o644),), (Command(shell="true"),)
    spec = with_task(driver, verifier=verifier, files=files, setup=setup)
    spec = replace(spec, sandbox=replace(spec.sandbox, image="task:1", pids=5, user="worker"))
    outcome = await driver.run(spec)
    assert (outcome.HasField("failure"), outcome.reward.value) == (False, 1.0)
    agents, verifiers = driver.sandboxes.wanted
    assert agents.toolbox_ids and not verifiers.toolbox_ids[:-1] and verifiers.toolbox_ids[-1] == "t-empty"
    assert (bool(verifiers.files), bool(verifiers.setup)) == (keeps_the_task, keeps_the_task)
    assert verifiers.terms == replace(
        spec.sandbox,
        image=own.image or "task:1",
        pids=own.pids or 5,
        cpu=own.cpu,
        user="worker" if keeps_the_task else own.user,
    )
    calls = driver.sandboxes.calls
    assert calls.index("start") > len(calls) - 1 - calls[::-1].index("prepare_snapshot")
    assert not driver.sandboxes.boxes
    # It is made again where the sandbox service has evicted it while the agent ran.
    driver.sandboxes.fail["fork"] = [None, NotFound("no such snapshot", reason="SNAPSHOT_UNKNOWN")]
    made = len(driver.sandboxes.wanted)
    assert (await driver.run(spec)).reward.value == 1.0
    assert driver.sandboxes.wanted[made:] == [verifiers]
    # One state for all tasks that are graded in the image.
    other = for_verifier(replace(spec, environment_key="other"))
    assert (other.environment_key == for_verifier(spec).environment_key) is not keeps_the_task


@pytest.mark.requirement("R76")
def test_a_sandbox_of_the_verifier_needs_a_backend_that_can_make_it(driver: Driver) -> None:
    """A diff, and the limits that it names."""
    spec = with_task(driver, verifier=Verifier(commands=(Command(shell="true"),), sandbox=SandboxTerms(image="judge")))
    with pytest.raises(FailedPrecondition, match="diff"):
        check_backend(spec, [facts(diff=False)])
    assert check_backend(spec, [facts(diff=True)]).task.verifier == replace(spec.task.verifier, fresh_fork=True)
    limited = with_task(driver, verifier=Verifier(commands=(Command(shell="true"),), sandbox=SandboxTerms(inodes=9)))
    with pytest.raises(FailedPrecondition, match="a limit of inodes"):
        check_backend(limited, [facts(diff=True)])


@pytest.mark.requirement("R76")
def test_whole_copies_need_no_diff_and_are_made_in_a_fresh_fork(driver: Driver) -> None:
    """Unless changes are wanted too."""
    verifier = Verifier(commands=(Command(shell="true"),), copies=(CopiedPath("/out"),))
    spec = with_task(driver, verifier=verifier)
    assert check_backend(spec, [facts(diff=False)]).task.verifier == replace(verifier, fresh_fork=True)
    both = with_task(driver, verifier=replace(verifier, changes_below=("a",)))
    with pytest.raises(FailedPrecondition, match="diff"):
        check_backend(both, [facts(diff=False)])


@pytest.mark.requirement("R90")
async def test_directories_to_bring_over_need_a_fresh_fork(driver: Driver) -> None:
    """Nobody who names them is graded in place without a word."""
    verifier = Verifier(commands=(Command(shell="true"),), changes_below=("a",))
    with pytest.raises(FailedPrecondition, match="diff"):
        check_backend(with_task(driver, verifier=verifier), [facts(diff=False)])


@pytest.mark.requirement("R90")
@pytest.mark.parametrize(
    ("changed", "deleted", "user", "blocked"),
    [
        (["etc/ld.so.preload"], [], "", True),
        ([], ["/lib64"], "", True),
        (["etc/hosts", "etc/resolv.conf"], [], "", False),
        ([], [], "", False),
        (["usr/lib/x.so"], [], "root", False),
    ],
)
async def test_in_place_grading_is_refused_on_a_system_that_a_user_changed(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, changed: list[str], deleted: list[str], user: str, blocked: bool
) -> None:
    """Where the backend tells what changed."""

    async def diff(sandbox_id: str, below: Any, sink: Any, max_bytes: int) -> list[str]:
        assert "/lib64" in below
        with tarfile.open(fileobj=sink, mode="w") as archive:
            folder = tarfile.TarInfo("etc")
            folder.type = tarfile.DIRTYPE
            archive.addfile(folder)
            for name in changed:
                archive.addfile(tarfile.TarInfo(name))
        return deleted

    monkeypatch.setattr(driver.sandboxes, "diff", diff)
    spec = replace(driver.spec(), reports_changes=True, sandbox=SandboxTerms(user=user))
    outcome = await driver.run(spec)
    if blocked:
        assert failure(outcome) == ("AGENT", "GRADING_BLOCKED")
        assert not outcome.HasField("reward")
    else:
        assert (outcome.HasField("failure"), outcome.reward.value) == (False, 1.0)


@pytest.mark.requirement("R72", "R99")
async def test_commands_are_dead_and_the_reward_file_is_new_before_the_next(
    driver: Driver,
) -> None:
    """What it wrote is there all the same; what it made of its file is not."""
    commands = (
        Command(
            shell='echo 0.25 > "$PENSTOCK_REWARD_FILE"; chmod 400 "$PENSTOCK_REWARD_FILE"'
            '; sleep 600 > /dev/null 2>&1 & echo $! > pid; echo "$PENSTOCK_REWARD_FILE" > path'
        ),
        Command(
            shell='[ "$(cat path)" != "$PENSTOCK_REWARD_FILE" ] && ! grep -qs "^State:.[RSDT]" /proc/$(cat pid)/status'
            ' && [ "$(cat "$PENSTOCK_REWARD_FILE")" = 0.25 ] && echo 0.5 > "$PENSTOCK_REWARD_FILE"'
        ),
    )
    outcome = await driver.run(with_task(driver, verifier=Verifier(commands=commands, reward_by_file=True)))
    assert (outcome.HasField("failure"), outcome.reward.value) == (False, 0.5)


@pytest.mark.requirement("R72")
async def test_a_reward_file_that_a_command_removed_is_there_for_the_next(driver: Driver) -> None:
    commands = (Command(shell='rm "$PENSTOCK_REWARD_FILE"'), Command(shell='echo 0.5 > "$PENSTOCK_REWARD_FILE"'))
    outcome = await driver.run(with_task(driver, verifier=Verifier(commands=commands, reward_by_file=True)))
    assert outcome.reward.value == 0.5
