"""Runs one attempt at a rollout: each phase, from the prepared snapshot to the deleted sandbox.

Invariants: an agent starts only after every setup command succeeded (R57, R58). Its process tree is dead and its agent
key revoked before the verifier starts (R60). However a rollout ends, its sandbox and its rollout at the gate are
released; a failed cleanup is reported but never hides the cause (R49). All agents share one code path, with no branch
on an agent's name (R17). Before a step that cannot be undone, what it follows from is on disk: the next process of this
driver goes on there (`ContinuedAttempt`, decision 054).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import structlog

from penstock_chassis.errors import (
    NotFound,
    PenstockError,
)
from penstock_chassis.telemetry.tracing import working_for
from penstock_driver.agents.launch import Launch, check_host_tools
from penstock_driver.domain.failures import (
    classify_exit,
    end_of_a_refused_start,
    ended_by_its_agent,
    failure_of,
    internal_failure,
    is_of_a_sandbox_at_work,
)
from penstock_driver.domain.ports import (
    CallEnded,
    Exit,
    ExitReason,
    GateClosing,
    GateOpening,
    ModelRequest,
    SandboxFacts,
)
from penstock_driver.domain.rollout import (
    CARRY_S,
    AgentExit,
    ArtifactCollected,
    Cause,
    Component,
    Failure,
    Outcome,
    Phase,
    Progress,
    RolloutFailed,
    Verifier,
    failed,
    with_failure,
)
from penstock_driver.domain.unended import AttemptPlace, Stage
from penstock_driver.environments.cleanup import DRIVER_LABEL
from penstock_driver.environments.prepare import PreparedEnvironment
from penstock_driver.environments.throttle import patiently
from penstock_driver.grading.carried import CarriedWork, Fetched
from penstock_driver.grading.grader import ROOT, Grader, check_system
from penstock_driver.grading.judge import Judge
from penstock_driver.placement.services import RunnerServices
from penstock_driver.rollouts.agent_process import (
    AgentRun,
    brings_files,
    fetch_artifacts,
    plan_agent,
    start_agent,
    watch_agent,
)
from penstock_driver.rollouts.attempt_environments import AttemptEnvironments
from penstock_driver.rollouts.attempt_resources import CLEAN_UP_S, GRADING, AttemptResources
from penstock_driver.rollouts.context import AttemptResult, AttemptSpec, Cancellation
from penstock_driver.rollouts.conversation.conversation import Conversation
from penstock_driver.rollouts.end_state_capture import EndStateCapture
from penstock_driver.rollouts.held_agent import HeldAgent
from penstock_driver.rollouts.recorder import RolloutRecorder
from penstock_driver.rollouts.recovery.attempt_recording import AttemptRecording
from penstock_driver.rollouts.workdir.capture import WorkdirCapture
from penstock_driver.trajectories.turn_rewards import with_call_ids

_log = structlog.get_logger("penstock.driver")
T = TypeVar("T")


class Attempt:
    """Runs one attempt at a rollout. `run()` is called once and always returns a result, also when cancelled."""

    def __init__(
        self, attempt: AttemptSpec, services: RunnerServices, recorder: RolloutRecorder, cancellation: Cancellation
    ) -> None:
        self._id = attempt.record.rollout_id
        self._attempt = attempt
        self._spec = attempt.rollout
        self._services = services
        self._sandboxes = services.sandboxes
        self._gate = services.gate
        self._recorder = recorder
        self._cancellation = cancellation
        self._resources = AttemptResources(attempt, services, recorder)
        self._environments = AttemptEnvironments(attempt.rollout, services, recorder)
        self._gate_closing: GateClosing | None = None
        verifier, spool = self._spec.task.verifier, services.spool
        self._asked = self._judge_of(verifier) if verifier else None
        """The verifier's judge."""
        self._grader = self._grader_of(verifier, self._spec.verifier_sha256) if verifier else None
        self._end_states = EndStateCapture(attempt, recorder)
        # What is kept is read as if for a fresh fork, where the verifier itself does not need that.
        is_read = self._grader is not None and self._grader.grading.fresh_fork
        self._end_state_grader = (
            self._grader_of(replace(verifier or Verifier(()), fresh_fork=True))
            if self._spec.keep_end_state and self._end_states.is_on and not is_read
            else None
        )
        self._work = WorkdirCapture(self._spec.task, self._sandboxes, spool=spool, record=recorder.append)
        self._artifacts: Sequence[Fetched] | None = None
        self._recording = AttemptRecording(attempt, services, recorder)
        self._carried = CarriedWork(services.carried, self._id) if services.carried else None
        self._outcome = Outcome()
        self._conversation = Conversation(attempt, services.gate, recorder)
        self._gate_request = attempt.taken_up.place.gate_request if attempt.taken_up else attempt.new_gate_request()
        self._opening: GateOpening | None = None

    async def run(self) -> AttemptResult:
        """Run all phases in order, then clean up."""
        try:
            await self._run_judged()
        except asyncio.CancelledError:
            if self._cancellation.is_left:
                try:
                    await self._resources.leave()
                finally:
                    self._close_files()
                raise
            self._fail(self._cancellation.at(self._phase))
        if self._resources.forking:
            self._resources.forking.cancel()
        await self._clean_up()
        return AttemptResult(self._outcome, self._resources.cleanup_pending)

    async def _run_judged(self) -> None:
        try:
            await self._run_phases()
        except RolloutFailed as error:
            await self._fail_classified(error.failure)
        except PenstockError as error:
            await self._fail_classified(failure_of(error, self._phase, Component.SANDBOX))
        except Exception:  # noqa: BLE001 - a rollout always ends with an outcome
            _log.exception("rollout failed by an internal error of the driver", rollout_id=self._id)
            self._fail(internal_failure(self._phase))

    async def _run_phases(self) -> None:
        self._recorder.enter(Phase.PREPARING)
        if not self._attempt.is_first:
            await self._recording.find()
            await self._delete_last_capture()
        prepared = await self._environments.for_agent()
        await self._environments.for_verifier(prepared)
        opening = await self._open_gate()
        await self._recording.load()
        self._recorder.locate(gate=opening.home)
        sandbox, prepared = await self._fork_for_agent(prepared, opening)
        working_for(sandbox_id=sandbox.sandbox_id)
        self._recorder.locate(sandbox_service=sandbox.service, sandbox_id=sandbox.sandbox_id)
        self._recorder.enter(Phase.CONFIGURING)
        if self._grader:
            await self._grader.save_baseline(sandbox, prepared.plain)
        if self._end_state_grader:
            await self._end_state_grader.save_baseline(sandbox, prepared.plain)
        await self._work.keep(sandbox)
        launch = await self._planned(sandbox, prepared, opening)
        async with self._attempt.pausing.holding(self._held(sandbox)):
            await self._attempt.pausing.start(partial(self._start_agent, sandbox, prepared, launch))
            failure = await self._run_agent(sandbox, prepared, self._spec.limits.agent_s)
        if await self._is_judged(failure):
            await self._judge(sandbox, prepared)

    def _held(self, sandbox: SandboxFacts) -> HeldAgent:
        return HeldAgent(self._sandboxes, self._gate, sandbox.sandbox_id, self._id, self._spec.limits.sandbox_s)

    async def _planned(self, sandbox: SandboxFacts, prepared: PreparedEnvironment, opening: GateOpening) -> Launch:
        """Plan the agent's launch, and write its files unless they come with its start."""
        toolbox, port, talk = prepared.toolbox.mount_path, self._services.agent_port, self._conversation
        launch = plan_agent(self._spec, self._id, port, sandbox, toolbox, opening, self._phase, talk)
        if launch.files and not brings_files(sandbox, launch):
            await self._sandboxes.write_files(sandbox.sandbox_id, launch.files)
        return launch

    async def _start_agent(self, sandbox: SandboxFacts, prepared: PreparedEnvironment, launch: Launch) -> None:
        deadline = time.time() + self._spec.limits.agent_s
        names = (self._attempt.node, self._attempt.gate)
        state, paused_s = (prepared.snapshot, prepared.toolbox), self._recorder.paused_s
        place = AttemptPlace(*names, sandbox, *state, deadline, self._gate_request, paused_s)
        self._recorder.enter(Phase.RUNNING, place=place)
        await self._recorder.secure()  # what an agent samples is not sampled again by the next process
        self._conversation.begin()
        await start_agent(self._sandboxes, sandbox, self._spec, launch, self._conversation)

    async def _start_again(self, sandbox: SandboxFacts, prepared: PreparedEnvironment) -> AgentRun | None:
        """Start the agent, which has ended, with its user's further instruction; return its end if the state of its
        files prevents that.
        """

        async def start() -> None:
            launch = await self._planned(sandbox, prepared, self._opening or await self._open_gate())
            await start_agent(self._sandboxes, sandbox, self._spec, launch, self._conversation)

        try:
            await self._attempt.pausing.start(start)
        except PenstockError as error:
            end = end_of_a_refused_start(error)
            if end is None:
                raise
            return self._ended(AgentRun(AgentExit(end, b""), None, ""))
        return None

    def _ended(self, run: AgentRun) -> AgentRun:
        self._outcome = replace(self._outcome, agent_exit=run.exit)
        self._recorder.append(run.exit)
        return run

    async def _is_judged(self, failure: Failure | None) -> bool:
        """Record the agent's failure, and return whether its work is judged: unless that says nothing of the policy."""
        if failure:
            await self._fail_classified(failure)
        return failure is None or failure.is_gradable

    async def _judge(self, sandbox: SandboxFacts, prepared: PreparedEnvironment) -> None:
        """Grade and collect after the agent's end."""
        await self._work.collect(sandbox)
        if self._end_state_grader:
            await self._end_states.take(self._end_state_grader, sandbox)
        if self._grader:
            self._recorder.enter(Phase.VERIFYING, so_far=self._outcome)
            await self._verify(self._grader, sandbox, prepared)
        await self._collect_in_turn(sandbox, prepared)

    async def _collect_in_turn(self, sandbox: SandboxFacts, prepared: PreparedEnvironment) -> None:
        if self._spec.agent.spec.artifacts:
            self._recorder.enter(Phase.COLLECTING, so_far=self._outcome)
            await self._collect(sandbox, prepared)

    # Before the agent -------------------------------------------------------------------------------------------------

    async def _delete_last_capture(self) -> None:
        """Delete what the gate captured of the last attempt, so the trajectory has only this attempt."""
        await self._of_gate(
            self._services.openings.run(lambda: self._gate.delete(self._id), full_s=self._spec.limits.prepare_s)
        )

    async def _open_gate(self) -> GateOpening:
        request = self._attempt.open_request(self._gate_request)
        self._resources.gate_asked = True
        opening = await self._of_gate(
            self._services.openings.run(lambda: self._gate.open(request), full_s=self._spec.limits.prepare_s)
        )
        try:
            check_host_tools(self._spec.agent.spec, opening.host_tools)
        except PenstockError as error:
            raise RolloutFailed(failure_of(error, self._phase, Component.OPERATOR)) from error
        self._opening = opening
        return opening

    async def _of_gate(self, work: Awaitable[T]) -> T:
        """Return the gate's result; raise its errors as failures of the gate."""
        try:
            return await work
        except PenstockError as error:
            raise RolloutFailed(failure_of(error, self._phase, Component.GATE)) from error

    async def _fork_for_agent(
        self, prepared: PreparedEnvironment, opening: GateOpening
    ) -> tuple[SandboxFacts, PreparedEnvironment]:
        upstream = opening.ingress_address
        try:
            sandbox = await self._resources.fork(prepared, upstream=upstream)
        except NotFound:
            # The sandbox service evicted the snapshot meanwhile.
            prepared = await self._environments.for_agent(again=True)
            sandbox = await self._resources.fork(prepared, upstream=upstream)
        self._resources.sandbox = sandbox
        self._recorder.fork_kind = prepared.snapshot.fork_kind
        return sandbox, prepared

    # The agent --------------------------------------------------------------------------------------------------------

    async def _run_agent(self, sandbox: SandboxFacts, prepared: PreparedEnvironment, limit_s: float) -> Failure | None:
        """Watch the agent to its end. On return all its processes are dead and its agent key is revoked."""
        interruptions = self._gate.interruptions

        def ended(end: Exit) -> None:
            # The gate opens no judge before the rollout is closed there.
            is_early = self._asked is not None or end.reason is ExitReason.SANDBOX_LOST
            is_early = is_early or bool(self._spec.sandbox.companions)  # their sandbox is read before it is joined
            is_early = is_early or self._conversation.has_user  # it may go on
            if self._grader and self._grader.grading.fresh_fork and not is_early:
                self._begin_to_fork(prepared)

        while True:
            watching = watch_agent(
                self._sandboxes,
                sandbox.sandbox_id,
                self._spec,
                self._recorder.append,
                self._recorder.output,
                ended,
                process_id=self._conversation.process_id,
                limit_s=limit_s,
                held_s=self._attempt.pausing.held_s,
                recorded=self._recorder.agent_events,
            )
            run = self._ended(await watching)
            classified = partial(self._classified, run, interruptions, self._gate.answered)
            if not await self._conversation.goes_on(run.said, classified):
                break
            if refused := await self._start_again(sandbox, prepared):
                run = refused
                break
            limit_s = self._conversation.left_s
        return await self._classified(run, interruptions, self._close_gate) or self._conversation.failure

    async def _close_gate(self, rollout_id: str) -> GateClosing:
        self._gate_closing = await self._gate.close(rollout_id, "AGENT_EXITED")
        return self._gate_closing

    async def _classified(
        self, run: AgentRun, interruptions: int, asked: Callable[[str], Awaitable[GateClosing]]
    ) -> Failure | None:
        """Classify an end of the agent by what the gate says of its calls when it is `asked`."""
        # Retry: a gate that restarts at this moment still has all of the agent's calls in its journal.
        closing = await self._of_gate(patiently(lambda: asked(self._id), full_s=CLEAN_UP_S, absent_s=CLEAN_UP_S))
        return classify_exit(
            run.exit.exit,
            closing,
            run.done,
            self._spec.agent.spec.success_exit_codes,
            self._phase,
            gate_was_away=self._gate.interruptions != interruptions,
            is_further=self._conversation.is_further,
        )

    # After the agent --------------------------------------------------------------------------------------------------

    async def _verify(self, grader: Grader, sandbox: SandboxFacts | None, prepared: PreparedEnvironment) -> None:
        """Grade. `sandbox` is None if the agent's work was taken from it already."""
        try:
            if sandbox is None or grader.grading.fresh_fork:
                sandbox = await self._move_to_fresh_fork(grader, sandbox, prepared)
            else:
                if self._spec.reports_changes and self._spec.sandbox.user not in ROOT:
                    await check_system(self._sandboxes, sandbox, self._services.spool)
                await self._recorder.reach(Stage.GRADING)
            async with asyncio.timeout(self._spec.limits.verify_s):
                access = self._asked.access if self._asked else None
                reward = await grader.grade(sandbox, self._recorder.append, access)
            if reward.turns:
                reward = with_call_ids(reward, [ended.call for ended in await self._ended_calls()])
        except (RolloutFailed, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                message = f"the verifier took longer than {self._spec.limits.verify_s:g} s"
                failure = failed(Cause.VERIFIER, "VERIFIER_TIMED_OUT", message, self._phase).failure
            else:
                failure = error.failure
            raise RolloutFailed(await self._asked.explained(failure) if self._asked else failure) from error
        finally:
            self._outcome = replace(self._outcome, grading=grader.grading)
        self._outcome = replace(self._outcome, reward=reward)

    async def _ended_calls(self) -> Sequence[CallEnded]:
        """What the gate knows of the calls of this attempt that have ended."""
        return await self._of_gate(
            patiently(lambda: self._gate.ended_calls(self._id), full_s=CLEAN_UP_S, absent_s=CLEAN_UP_S)
        )

    async def _move_to_fresh_fork(
        self, grader: Grader, sandbox: SandboxFacts | None, prepared: PreparedEnvironment
    ) -> SandboxFacts:
        """Read the results from the agent's sandbox, delete it, and apply the agent's changes to a fresh fork.

        With companions it is kept, empty of programs, since the fork joins its network.
        """
        companions = sandbox is not None and bool(self._spec.sandbox.companions)
        forking = self._resources.forking or (None if companions else self._begin_to_fork(prepared))
        try:
            if sandbox is not None:
                await grader.collect(
                    sandbox, self._spec.limits.verify_s, lambda text: self._recorder.append(Progress(text))
                )
                async with asyncio.timeout(CARRY_S):
                    await grader.take(sandbox)
                    self._artifacts = await self._fetch_artifacts(sandbox, prepared)
                    if not companions:
                        await self._carry(grader, self._artifacts)
            if sandbox is not None and companions:
                forking = self._begin_to_fork(prepared, joins=sandbox.sandbox_id)
            elif sandbox is not None:
                # Start the deletion before waiting for the fork: rollouts that hold one slot while waiting for another
                # would deadlock. It runs while the verifier runs; no verifier waits for it.
                self._resources.begin_to_delete(sandbox)
            await self._end_states.keep(grader)
            assert forking is not None
            self._resources.sandbox = fork = await forking
            await grader.put(fork)
            self._resources.forking = None
            if companions:
                await self._recorder.reach(Stage.GRADING)
        except TimeoutError:
            message = f"copying the agent's changes took longer than {CARRY_S:g} s"
            raise failed(
                Cause.INFRASTRUCTURE,
                "CHANGES_TIMED_OUT",
                message,
                self._phase,
                retriable=True,
                component=Component.SANDBOX,
            ) from None
        except NotFound as error:
            message = f"the prepared state no longer exists: {error.message}"
            raise failed(
                Cause.INFRASTRUCTURE,
                "SNAPSHOT_MISSING",
                message,
                self._phase,
                retriable=True,
                component=Component.SANDBOX,
            ) from error
        return fork

    async def _carry(self, grader: Grader, artifacts: Sequence[Fetched]) -> None:
        """Keep the agent's work for the next process, before its sandbox is deleted."""
        if self._carried is None:
            return
        work, size = grader.taken(artifacts)
        try:
            await self._carried.write(work, size)
        except OSError as error:
            # As a full journal: grading goes on, and a restart meanwhile would lose the attempt.
            self._recorder.append(Progress(f"the agent's work is not kept until it is graded: {error.strerror}"))
            return
        await self._recorder.reach(Stage.CARRIED)

    def _grader_of(self, verifier: Verifier, sha256: str = "") -> Grader:
        services = self._services
        return Grader(
            self._sandboxes,
            verifier,
            spool=services.spool,
            max_bytes=services.max_changes_bytes,
            verifier_sha256=sha256,
        )

    def _judge_of(self, verifier: Verifier) -> Judge | None:
        if verifier.judge is None:
            return None
        request = ModelRequest(
            rollout_id=self._id,
            request_id=f"{self._id}/judge/{self._attempt.number}",
            terms=verifier.judge,
            driver_id=self._attempt.labels.get(DRIVER_LABEL, ""),
            task_id=self._spec.task.task_id,
        )
        return Judge(self._gate, request, self._services.agent_port)

    def _begin_to_fork(self, prepared: PreparedEnvironment, *, joins: str = "") -> asyncio.Task[SandboxFacts]:
        """Request the grading fork; it is created while the agent's sandbox is read, unless it `joins` that."""

        insisting = partial(self._services.openings.run, full_s=self._spec.limits.prepare_s)

        async def fork() -> SandboxFacts:
            state = await self._environments.for_verifier(prepared)
            upstream = await self._asked.open(insisting) if self._asked else ""
            try:
                return await self._resources.fork(state, purpose=GRADING, upstream=upstream, joins=joins)
            except NotFound:
                if state is prepared:
                    raise
                # No sandbox stood on the verifier's state while the agent ran: the sandbox service may have evicted it.
                again = await self._environments.for_verifier(prepared, again=True)
                return await self._resources.fork(again, purpose=GRADING, upstream=upstream)

        self._resources.forking = asyncio.ensure_future(fork())
        return self._resources.forking

    async def _collect(self, sandbox: SandboxFacts, prepared: PreparedEnvironment) -> None:
        fetched = self._artifacts
        for item in await self._fetch_artifacts(sandbox, prepared) if fetched is None else fetched:
            if isinstance(item, ArtifactCollected):
                self._recorder.append(item)
            else:
                self._fail(replace(item, phase=self._phase))

    async def _fetch_artifacts(self, sandbox: SandboxFacts, prepared: PreparedEnvironment) -> list[Fetched]:
        agent, toolbox = self._spec.agent.spec, prepared.toolbox.mount_path
        return await fetch_artifacts(self._sandboxes, sandbox, agent, toolbox, self._id, self._phase)

    async def _clean_up(self) -> None:
        """Release the sandbox and the rollout at the gate, even if this task is cancelled meanwhile."""
        work = asyncio.ensure_future(self._settle())
        while not work.done():
            try:
                await asyncio.shield(work)
            except asyncio.CancelledError:
                if work.cancelled():
                    break
                if self._cancellation.is_left:
                    work.cancel()
                    await asyncio.wait([work])
                    raise
                self._resources.abandon_lost()

    def _close_files(self) -> None:
        for grader in (self._grader, self._end_state_grader):
            if grader:
                grader.close()
        self._work.close()

    async def _settle(self) -> None:
        if self._phase >= Phase.RUNNING:
            # Without its sandbox the next process could not find out how the attempt ended, and would sample again.
            try:
                await self._recorder.reach(Stage.DECIDED, self._outcome)
            finally:
                await self._release()
            await self._recording.hand_on(self._outcome.failure)
        else:
            await self._release()

    async def _release(self) -> None:
        is_closed = self._gate_closing is not None and not (self._asked and self._asked.may_be_open)
        await self._resources.release(gate_is_closed=is_closed)
        self._close_files()
        if self._carried:
            await self._carried.remove()

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def _phase(self) -> Phase:
        return self._recorder.progress.phase

    async def _fail_classified(self, failure: Failure) -> None:
        """Fail, after checking who ended the sandbox if that is the cause."""
        sandbox = self._resources.sandbox
        if is_of_a_sandbox_at_work(failure) and sandbox and not self._outcome.failure:
            try:
                if await self._sandboxes.ended_inside(sandbox.sandbox_id):
                    failure = ended_by_its_agent(failure)
            except asyncio.CancelledError:
                if self._cancellation.is_left:
                    raise
                failure = self._cancellation.at(self._phase)
        self._fail(failure)

    def _fail(self, failure: Failure) -> None:
        self._outcome = with_failure(self._outcome, failure)
