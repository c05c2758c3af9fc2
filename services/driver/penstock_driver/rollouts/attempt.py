"""Runs one attempt at a rollout: each phase, from the prepared snapshot to the deleted sandbox.

Invariants: an agent starts only after every setup command succeeded (R57, R58). Its process tree is dead and its agent
key revoked before the verifier starts (R60). However a rollout ends, its sandbox and its rollout at the gate are
released; a failed cleanup is reported but never hides the cause (R49). All agents share one code path, with no branch
on an agent's name (R17).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Iterable
from dataclasses import replace
from typing import Final, TypeVar

import structlog

from penstock_chassis.errors import NotFound, PenstockError
from penstock_chassis.telemetry.tracing import working_for
from penstock_driver.agents.launch import Launch, LaunchContext, check_host_tools, plan_launch
from penstock_driver.domain.failures import (
    classify_exit,
    describe,
    ended_by_its_agent,
    failure_of,
    internal_failure,
    is_of_a_sandbox_at_work,
)
from penstock_driver.domain.ports import (
    CommandReport,
    Exit,
    ExitReason,
    GateClosing,
    GateOpening,
    OpenRequest,
    SandboxFacts,
)
from penstock_driver.domain.rollout import (
    CARRY_S,
    ArtifactCollected,
    Cause,
    CommandFinished,
    Component,
    Failure,
    Outcome,
    Phase,
    Progress,
    RolloutFailed,
    failed,
    with_failure,
)
from penstock_driver.environments.prepare import PreparedEnvironment, SetupFailed, setup_of
from penstock_driver.environments.throttle import patiently
from penstock_driver.grading.grader import ROOT, Grader, check_system
from penstock_driver.placement.services import RunnerServices
from penstock_driver.rollouts.agent_process import Fetched, fetch_artifacts, run_agent
from penstock_driver.rollouts.context import AttemptResult, AttemptSpec, Cancellation
from penstock_driver.rollouts.recorder import RolloutRecorder
from penstock_driver.workdir.capture import WorkdirCapture

NAMELESS_MODEL: Final = "model"
"""The model name given to the agent when the source has none, such as a bare tokenizer."""
CLEAN_UP_S: Final = 60.0
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
        self._sandbox: SandboxFacts | None = None
        self._forking: asyncio.Task[SandboxFacts] | None = None
        """The fork to grade in, from its request until it has the agent's changes. There may be two sandboxes then."""
        self._deleting: asyncio.Task[None] | None = None
        """The deletion of the agent's sandbox, which a fork replaces."""
        self._releasing: list[tuple[str, asyncio.Task[None]]] = []
        """The clean-up's requests, with what they release."""
        self._gate_asked = False
        """Whether the gate may have a rollout. No fork is requested before that, so without it there is no sandbox."""
        self._gate_closing: GateClosing | None = None
        verifier, spool = self._spec.task.verifier, services.spool
        self._grader = (
            Grader(self._sandboxes, verifier, spool=spool, max_bytes=services.max_changes_bytes) if verifier else None
        )
        self._work = WorkdirCapture(self._spec.task, self._sandboxes, spool=spool, record=recorder.append)
        self._artifacts: list[Fetched] | None = None
        self._outcome = Outcome()
        self._cleanup_pending = False

    async def run(self) -> AttemptResult:
        """Run all phases in order, then clean up."""
        try:
            await self._run_phases()
        except asyncio.CancelledError:
            self._fail(self._cancellation.at(self._phase))
        except RolloutFailed as error:
            await self._fail_classified(error.failure)
        except PenstockError as error:
            await self._fail_classified(failure_of(error, self._phase, Component.SANDBOX))
        except Exception:  # noqa: BLE001 - a rollout always ends with an outcome
            _log.exception("rollout failed by an internal error of the driver", rollout_id=self._id)
            self._fail(internal_failure(self._phase))
        if self._forking:
            self._forking.cancel()
        await self._clean_up()
        return AttemptResult(self._outcome, self._cleanup_pending)

    async def _run_phases(self) -> None:
        self._recorder.enter(Phase.PREPARING)
        if not self._attempt.is_first:
            await self._delete_last_capture()
        prepared = await self._prepare()
        opening = await self._open_gate()
        self._recorder.locate(gate=opening.home)
        sandbox, prepared = await self._fork_for_agent(prepared, opening)
        working_for(sandbox_id=sandbox.sandbox_id)
        self._recorder.locate(sandbox_service=sandbox.service, sandbox_id=sandbox.sandbox_id)
        self._recorder.enter(Phase.CONFIGURING)
        if self._grader:
            await self._grader.save_baseline(sandbox)
        await self._work.keep(sandbox)
        launch = self._plan(sandbox, prepared, opening)
        if launch.files:
            await self._sandboxes.write_files(sandbox.sandbox_id, launch.files)
        self._recorder.enter(Phase.RUNNING)
        failure = await self._run_agent(sandbox, launch, prepared)
        if failure:
            await self._fail_classified(failure)
        if failure is None or failure.is_gradable:
            await self._work.collect(sandbox)
        if self._grader and (failure is None or failure.is_gradable):
            self._recorder.enter(Phase.VERIFYING)
            await self._verify(self._grader, sandbox, prepared)
        if self._spec.agent.spec.artifacts and (failure is None or failure.is_gradable):
            self._recorder.enter(Phase.COLLECTING)
            await self._collect(sandbox, prepared)

    # Before the agent -------------------------------------------------------------------------------------------------

    async def _prepare(self, *, again: bool = False) -> PreparedEnvironment:
        try:
            prepared = await self._services.environments.get(
                self._spec, lambda line: self._recorder.append(Progress(line)), again=again
            )
        except SetupFailed as error:
            raise self._setup_failure(error) from error
        except TimeoutError:
            message = f"preparing took longer than {self._spec.limits.prepare_s:g} s and the setup's limit"
            raise failed(
                Cause.INFRASTRUCTURE,
                "PREPARE_TIMED_OUT",
                message,
                self._phase,
                retriable=True,
                component=Component.SANDBOX,
            ) from None
        if not again:
            self._record_setup(prepared.reports)
        return prepared

    def _record_setup(self, reports: Iterable[CommandReport]) -> None:
        commands = setup_of(self._spec.task, self._spec.limits)
        for report in reports:
            event = CommandFinished.of(Phase.SETTING_UP, report.index, commands[report.index], report.result)
            self._recorder.append(event)

    def _setup_failure(self, error: SetupFailed) -> RolloutFailed:
        if error.check:
            output = (error.check.result.stderr or error.check.result.stdout)[-500:].decode("utf-8", "replace")
            message = f"the agent's check command failed ({describe(error.check.result.exit)}): {output}"
            return failed(Cause.INFRASTRUCTURE, "AGENT_CHECK_FAILED", message, self._phase, component=Component.AGENT)
        self._recorder.enter(Phase.SETTING_UP)
        self._record_setup(error.reports)
        ended = describe(error.reports[-1].result.exit) if error.reports else "unknown"
        message = f"setup command {len(error.reports)} of {len(self._spec.task.setup)} failed: {ended}"
        return failed(Cause.TASK, "SETUP_FAILED", message, self._phase)

    async def _delete_last_capture(self) -> None:
        """Delete what the gate captured of the last attempt, so the trajectory has only this attempt."""
        await self._of_gate(
            self._services.openings.run(lambda: self._gate.delete(self._id), full_s=self._spec.limits.prepare_s)
        )

    async def _open_gate(self) -> GateOpening:
        agent = self._spec.agent.spec
        hints, record = agent.auxiliary_calls, self._attempt.record
        request = OpenRequest(
            rollout_id=self._id,
            request_id=self._id if self._attempt.is_first else secrets.token_hex(16),
            group_id=record.group_id,
            group_index=record.index if record.group_id else None,
            task_id=self._spec.task.task_id,
            terms=self._spec.gate_terms,
            dialects=tuple(agent.dialects),
            title_system_prompts=tuple(hints.title_system_prompts),
            compaction_system_prompts=tuple(hints.compaction_system_prompts),
            session_headers=tuple(hints.session_headers),
            volatile_line_patterns=tuple(hints.volatile_line_patterns),
            labels={**self._spec.labels, **self._attempt.labels},
        )
        self._gate_asked = True
        opening = await self._of_gate(
            self._services.openings.run(lambda: self._gate.open(request), full_s=self._spec.limits.prepare_s)
        )
        try:
            check_host_tools(agent, opening.host_tools)
        except PenstockError as error:
            raise RolloutFailed(failure_of(error, self._phase, Component.OPERATOR)) from error
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
            sandbox = await self._fork(prepared, upstream=upstream)
        except NotFound:
            # The sandbox service evicted the snapshot meanwhile.
            prepared = await self._prepare(again=True)
            sandbox = await self._fork(prepared, upstream=upstream)
        self._sandbox = sandbox
        self._recorder.fork_kind = prepared.snapshot.fork_kind
        return sandbox, prepared

    async def _fork(self, prepared: PreparedEnvironment, *, upstream: str = "", purpose: str = "") -> SandboxFacts:
        """Fork the prepared state; `purpose` distinguishes the attempt's forks, so that each request is idempotent."""
        snapshot_id = prepared.snapshot.snapshot_id
        return await self._services.forks.fork(
            snapshot_id,
            request_id=f"{self._id}/{self._attempt.number}/{snapshot_id}{purpose}",
            backend=self._spec.sandbox.backend,
            lease_s=self._spec.limits.sandbox_s,
            labels=self._attempt.labels,
            patience_s=self._spec.limits.prepare_s,
            port=self._services.agent_port if upstream else 0,
            upstream=upstream,
        )

    def _plan(self, sandbox: SandboxFacts, prepared: PreparedEnvironment, opening: GateOpening) -> Launch:
        agent, spec = self._spec.agent.spec, self._spec
        dialect = next((item for item in agent.dialects if item in opening.base_paths), None)
        if dialect is None:
            spoken = ", ".join(agent.dialects)
            message = f"agent {agent.name} speaks {spoken}, which the gate does not support"
            raise failed(Cause.INFRASTRUCTURE, "DIALECT_MISSING", message, self._phase, component=Component.OPERATOR)
        place = LaunchContext(
            home=sandbox.home,
            workdir=sandbox.workdir,
            toolbox=prepared.toolbox.mount_path,
            base_url=f"http://127.0.0.1:{self._services.agent_port}{opening.base_paths[dialect]}",
            api_key=opening.token,
            model=opening.model_name or NAMELESS_MODEL,
            rollout_id=self._id,
            wall_time_s=spec.limits.agent_s,
            tools_url=f"http://127.0.0.1:{self._services.agent_port}{opening.mcp_path}" if opening.host_tools else "",
        )
        try:
            return plan_launch(agent, spec.choice, place, spec.task.instruction)
        except PenstockError as error:
            raise RolloutFailed(failure_of(error, self._phase, Component.OPERATOR)) from error

    # The agent --------------------------------------------------------------------------------------------------------

    async def _run_agent(self, sandbox: SandboxFacts, launch: Launch, prepared: PreparedEnvironment) -> Failure | None:
        """Start and watch the agent. On return all its processes are dead and its agent key is revoked."""
        interruptions = self._gate.interruptions

        def ended(end: Exit) -> None:
            if self._grader and self._grader.grading.fresh_fork and end.reason is not ExitReason.SANDBOX_LOST:
                self._begin_to_fork(prepared)

        run = await run_agent(
            self._sandboxes, sandbox.sandbox_id, self._spec, launch, self._recorder.append, self._recorder.output, ended
        )
        self._outcome = replace(self._outcome, agent_exit=run.exit)
        self._recorder.append(run.exit)
        # Retry: a gate that restarts at this moment still has all of the agent's calls in its journal.
        closing = patiently(lambda: self._gate.close(self._id, "AGENT_EXITED"), full_s=CLEAN_UP_S, absent_s=CLEAN_UP_S)
        self._gate_closing = await self._of_gate(closing)
        return classify_exit(
            run.exit.exit,
            self._gate_closing,
            run.done,
            self._spec.agent.spec.success_exit_codes,
            self._phase,
            gate_was_away=self._gate.interruptions != interruptions,
        )

    # After the agent --------------------------------------------------------------------------------------------------

    async def _verify(self, grader: Grader, sandbox: SandboxFacts, prepared: PreparedEnvironment) -> None:
        try:
            if grader.grading.fresh_fork:
                sandbox = await self._move_to_fresh_fork(grader, sandbox, prepared)
            elif self._spec.reports_changes and self._spec.sandbox.user not in ROOT:
                await check_system(self._sandboxes, sandbox, self._services.spool)
            async with asyncio.timeout(self._spec.limits.verify_s):
                reward = await grader.grade(sandbox, self._recorder.append)
        except TimeoutError:
            message = f"the verifier took longer than {self._spec.limits.verify_s:g} s"
            raise failed(Cause.VERIFIER, "VERIFIER_TIMED_OUT", message, self._phase) from None
        finally:
            self._outcome = replace(self._outcome, grading=grader.grading)
        self._outcome = replace(self._outcome, reward=reward)

    async def _move_to_fresh_fork(
        self, grader: Grader, sandbox: SandboxFacts, prepared: PreparedEnvironment
    ) -> SandboxFacts:
        """Read the results from the agent's sandbox, delete it, and apply the agent's changes to a fresh fork."""
        forking = self._forking or self._begin_to_fork(prepared)
        try:
            async with asyncio.timeout(CARRY_S):
                await grader.take(sandbox)
                self._artifacts = await self._fetch_artifacts(sandbox, prepared)
            # Start the deletion before waiting for the fork: rollouts that hold one slot while waiting for another
            # would deadlock. It runs while the verifier runs; no verifier waits for it.
            self._deleting = asyncio.ensure_future(
                self._try_release("sandbox", self._sandboxes.delete(sandbox.sandbox_id))
            )
            self._releasing.append(("sandbox", self._deleting))
            self._sandbox = fork = await forking
            await grader.put(fork)
            self._forking = None
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

    def _begin_to_fork(self, prepared: PreparedEnvironment) -> asyncio.Task[SandboxFacts]:
        """Request the grading fork; it is created while the agent's sandbox is read."""
        self._forking = asyncio.ensure_future(self._fork(prepared, purpose="/grading"))
        return self._forking

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
        work = asyncio.ensure_future(self._release())
        while not work.done():
            try:
                await asyncio.shield(work)
            except asyncio.CancelledError:
                if work.cancelled():
                    break
                self._abandon_lost()

    def _abandon_lost(self) -> None:
        """Stop waiting for what a lost place still has: it is released when that is back, or gone."""
        is_lost = {"sandbox": self._services.is_node_lost(), "gate": self._services.is_gate_lost()}
        for what, task in self._releasing:
            if is_lost[what] and not task.done():
                task.cancel()
                self._cleanup_pending = True

    async def _release(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            if self._services.is_node_lost():
                self._cleanup_pending |= self._gate_asked
            elif self._sandbox and self._forking is None:
                deletion = self._try_release("sandbox", self._sandboxes.delete(self._sandbox.sandbox_id))
                self._releasing.append(("sandbox", tasks.create_task(deletion)))
            elif self._gate_asked:
                # There may be two, and a fork whose response was lost may have created one: all carry these labels.
                deletion = self._try_release("sandbox", self._sandboxes.delete_labelled(self._attempt.labels))
                self._releasing.append(("sandbox", tasks.create_task(deletion)))
            if self._services.is_gate_lost():
                self._cleanup_pending |= self._gate_asked
            elif self._gate_asked and self._gate_closing is None:
                closing = patiently(
                    lambda: self._gate.close(self._id, "ROLLOUT_ENDED"), full_s=CLEAN_UP_S, absent_s=CLEAN_UP_S
                )
                self._releasing.append(("gate", tasks.create_task(self._try_release("gate", closing))))
            if self._deleting and self._services.is_node_lost():
                self._deleting.cancel()
            elif self._deleting:
                await asyncio.wait([self._deleting])
        if self._grader:
            self._grader.close()
        self._work.close()

    async def _try_release(self, what: str, work: Awaitable[object]) -> None:
        try:
            async with asyncio.timeout(CLEAN_UP_S):
                await work
        except Exception as error:  # noqa: BLE001 - a failed cleanup never hides why the rollout ended (R49)
            self._cleanup_pending = True
            _log.warning("clean-up failed and is pending", what=what, rollout_id=self._id, error=repr(error))
            self._recorder.append(Progress(f"releasing the {what} failed: {error}; it is retried until it succeeds"))

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def _phase(self) -> Phase:
        return self._recorder.progress.phase

    async def _fail_classified(self, failure: Failure) -> None:
        """Fail, after checking who ended the sandbox if that is the cause."""
        if is_of_a_sandbox_at_work(failure) and self._sandbox and not self._outcome.failure:
            try:
                if await self._sandboxes.ended_inside(self._sandbox.sandbox_id):
                    failure = ended_by_its_agent(failure)
            except asyncio.CancelledError:
                failure = self._cancellation.at(self._phase)
        self._fail(failure)

    def _fail(self, failure: Failure) -> None:
        self._outcome = with_failure(self._outcome, failure)
