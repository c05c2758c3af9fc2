"""Runs one attempt at a rollout: each phase, from the prepared snapshot to the deleted sandbox.

Invariants: an agent starts only after every setup command succeeded (R57, R58). Its process tree is dead and its agent
key revoked before the verifier starts (R60). However a rollout ends, its sandbox and its rollout at the gate are
released; a failed cleanup is reported but never hides the cause (R49). All agents share one code path, with no branch
on an agent's name (R17). Before a step that cannot be undone, what it follows from is on disk: the next process of this
driver goes on there (`ContinuedAttempt`, decision 054).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from sqlite3 import Error as SqliteError
from typing import Final, TypeVar

import structlog

from penstock.sandbox.v1 import sandbox_pb2
from penstock_chassis.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    PenstockError,
    ResourceExhausted,
    Unsupported,
)
from penstock_chassis.telemetry.tracing import working_for
from penstock_driver.agents.launch import Launch, LaunchContext, check_host_tools, plan_launch
from penstock_driver.domain.failures import (
    check_failure,
    classify_exit,
    describe,
    ended_by_its_agent,
    failure_of,
    internal_failure,
    is_of_a_sandbox_at_work,
)
from penstock_driver.domain.ports import (
    CallEnded,
    CommandReport,
    Exit,
    ExitReason,
    GateClosing,
    GateOpening,
    JudgeRequest,
    OpenRequest,
    SandboxFacts,
)
from penstock_driver.domain.records import recording_of
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
    Replay,
    RolloutFailed,
    RolloutSpec,
    Verifier,
    failed,
    with_failure,
)
from penstock_driver.domain.unended import AttemptPlace, Stage
from penstock_driver.environments.cleanup import DRIVER_LABEL
from penstock_driver.environments.prepare import PreparedEnvironment, SetupFailed, for_verifier, setup_of
from penstock_driver.environments.throttle import never, patiently
from penstock_driver.grading.carried import CarriedWork, Fetched
from penstock_driver.grading.grader import ROOT, Grader, check_system
from penstock_driver.grading.judge import NAMELESS_MODEL, Judge
from penstock_driver.placement.services import RunnerServices
from penstock_driver.rollouts.agent_process import brings_files, fetch_artifacts, start_agent, watch_agent
from penstock_driver.rollouts.context import AttemptResult, AttemptSpec, Cancellation
from penstock_driver.rollouts.held_agent import HeldAgent
from penstock_driver.rollouts.recorder import RolloutRecorder
from penstock_driver.rollouts.recovery.replayed_answers import RecordingFile
from penstock_driver.rollouts.workdir.capture import WorkdirCapture
from penstock_driver.trajectories.turn_rewards import with_call_ids

CLEAN_UP_S: Final = 60.0
LEAVE_S: Final = 5.0
"""Limit on what a stopping driver still asks of the sandbox service."""
HAND_ON_S: Final = 15.0
"""Limit on writing down what a failed attempt was answered."""
KEEP_S: Final = 30.0
"""Limit on packing an end state."""
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
        self._gate_asked = attempt.taken_up is not None
        """Whether the gate may have a rollout. No fork is requested before that, so without it there is no sandbox."""
        self._gate_closing: GateClosing | None = None
        verifier, spool = self._spec.task.verifier, services.spool
        self._asked = self._judge_of(verifier) if verifier else None
        """The verifier's judge."""
        self._grader = self._grader_of(verifier, self._spec.verifier_sha256) if verifier else None
        # What is kept is read as if for a fresh fork, where the verifier itself does not need that.
        is_read = self._grader is not None and self._grader.grading.fresh_fork
        self._end_state_grader = (
            self._grader_of(replace(verifier or Verifier(()), fresh_fork=True))
            if self._spec.keep_end_state and self._keeps and not is_read
            else None
        )
        self._work = WorkdirCapture(self._spec.task, self._sandboxes, spool=spool, record=recorder.append)
        self._artifacts: Sequence[Fetched] | None = None
        self._recording = (
            RecordingFile(services.recordings, self._id)
            if services.recordings
            and (attempt.record.branched_from or (self._spec.max_attempts > 1 and self._spec.replay is not Replay.OFF))
            else None
        )
        self._carried = CarriedWork(services.carried, self._id) if services.carried else None
        self._life = secrets.token_hex(4) if attempt.is_moved or attempt.taken_up else ""
        """Keeps this process's requests for forks apart from those of an attempt that began before."""
        self._outcome = Outcome()
        self._cleanup_pending = False

    async def run(self) -> AttemptResult:
        """Run all phases in order, then clean up."""
        try:
            await self._run_judged()
        except asyncio.CancelledError:
            if self._cancellation.is_left:
                await self._leave()
                raise
            self._fail(self._cancellation.at(self._phase))
        if self._forking:
            self._forking.cancel()
        await self._clean_up()
        return AttemptResult(self._outcome, self._cleanup_pending)

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
            await self._find_recording()
            await self._delete_last_capture()
        prepared = await self._prepare()
        await self._prepared_for_verifier(prepared)
        opening = await self._open_gate()
        await self._load_recording()
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
        launch = self._plan(sandbox, prepared, opening)
        if launch.files and not brings_files(sandbox, launch):
            await self._sandboxes.write_files(sandbox.sandbox_id, launch.files)
        async with self._attempt.pausing.holding(self._held(sandbox)):
            await self._attempt.pausing.start(partial(self._start_agent, sandbox, prepared, launch))
            failure = await self._run_agent(sandbox, prepared, self._spec.limits.agent_s)
        await self._judge(failure, sandbox, prepared)

    def _held(self, sandbox: SandboxFacts) -> HeldAgent:
        return HeldAgent(self._sandboxes, self._gate, sandbox.sandbox_id, self._id, self._spec.limits.sandbox_s)

    async def _start_agent(self, sandbox: SandboxFacts, prepared: PreparedEnvironment, launch: Launch) -> None:
        deadline = time.time() + self._spec.limits.agent_s
        names = (self._attempt.node, self._attempt.gate)
        place = AttemptPlace(*names, sandbox, prepared.snapshot, prepared.toolbox, deadline)
        self._recorder.enter(Phase.RUNNING, place=place)
        await self._recorder.secure()  # what an agent samples is not sampled again by the next process
        await start_agent(self._sandboxes, sandbox, self._spec, launch)

    async def _judge(self, failure: Failure | None, sandbox: SandboxFacts, prepared: PreparedEnvironment) -> None:
        """Grade and collect after the agent's end, unless its failure says nothing of the policy."""
        if failure:
            await self._fail_classified(failure)
        if failure is not None and not failure.is_gradable:
            return
        await self._work.collect(sandbox)
        if self._end_state_grader:
            await self._take_end_state(self._end_state_grader, sandbox)
        if self._grader:
            self._recorder.enter(Phase.VERIFYING, so_far=self._outcome)
            await self._verify(self._grader, sandbox, prepared)
        await self._collect_in_turn(sandbox, prepared)

    async def _collect_in_turn(self, sandbox: SandboxFacts, prepared: PreparedEnvironment) -> None:
        if self._spec.agent.spec.artifacts:
            self._recorder.enter(Phase.COLLECTING, so_far=self._outcome)
            await self._collect(sandbox, prepared)

    # Before the agent -------------------------------------------------------------------------------------------------

    async def _prepare(self, *, again: bool = False) -> PreparedEnvironment:
        prepared = await self._prepared(self._spec, again=again)
        if not again:
            self._record_setup(prepared.reports)
        return prepared

    async def _prepared_for_verifier(self, prepared: PreparedEnvironment) -> PreparedEnvironment:
        """The state to grade in: the agent's, unless the verifier has another sandbox."""
        spec = for_verifier(self._spec)
        return prepared if spec is self._spec else await self._prepared(spec)

    async def _prepared(self, spec: RolloutSpec, *, again: bool = False) -> PreparedEnvironment:
        try:
            return await self._services.environments.get(
                spec, lambda line: self._recorder.append(Progress(line)), again=again
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

    def _record_setup(self, reports: Iterable[CommandReport]) -> None:
        commands = setup_of(self._spec.task, self._spec.limits)
        for report in reports:
            event = CommandFinished.of(Phase.SETTING_UP, report.index, commands[report.index], report.result)
            self._recorder.append(event)

    def _setup_failure(self, error: SetupFailed) -> RolloutFailed:
        if error.check:
            return RolloutFailed(check_failure(error.check.result, self._phase))
        if self._phase < Phase.SETTING_UP:  # else the verifier's state had to be made again
            self._recorder.enter(Phase.SETTING_UP)
            self._record_setup(error.reports)
        ended = describe(error.reports[-1].result.exit) if error.reports else "unknown"
        message = f"setup command {len(error.reports)} of {len(self._spec.task.setup)} failed: {ended}"
        return failed(Cause.TASK, "SETUP_FAILED", message, self._phase)

    async def _find_recording(self) -> None:
        """Write the last attempt's answers to a file, if it did not do so itself at its end.

        A gate that is away is waited for, as its disk has them. It never fails: the attempt then samples everything
        again.
        """
        recording, last = self._recording, self._attempt.number - 1
        if recording is None or await recording.attempt() == last:
            return
        waits_s = self._services.recording_wait_s if self._recorder.may_have_calls else 0.0
        try:
            async with asyncio.timeout(self._spec.limits.prepare_s):
                await patiently(partial(self._keep_recording, recording, last), full_s=waits_s, absent_s=waits_s)
        except NotFound as error:
            if self._recorder.has_calls:
                self._not_found(f"{error.reason}: its gate lost its disk, is no member any more, or never had it")
        except (PenstockError, TimeoutError, OSError) as error:
            why = getattr(error, "message", "") or getattr(error, "strerror", "") or "it took too long"
            self._not_found(f"{error.reason}: {why}" if isinstance(error, PenstockError) else why)

    def _not_found(self, why: str) -> None:
        self._recorder.append(Progress(f"the last attempt's answers cannot be read, to be replayed: {why}"))

    async def _keep_recording(self, recording: RecordingFile, attempt: int) -> None:
        """Write an attempt's answers to a file. NotFound: its gate does not know it. PenstockError, OSError."""
        captures = self._services.captures
        if captures is None:
            return
        gates, home = self._recorder.gates, self._attempt.record.home
        gate = gates[-1] if gates else home.gate if home else ""
        captured = captures.capture(self._id, gate=gate, include_bodies=False, include_top=True)
        results = partial(captures.tool_results, self._id, gate=gate)
        async with self._services.loadings:  # a part is in memory, and a lost host loses many attempts at once
            await recording.write(captured, attempt, exact=self._spec.replay is Replay.EXACT, results=results)

    async def _hand_on(self) -> None:
        """Keep what this attempt was answered for the next one, while its gate is there; else that one looks for it."""
        failure, recording = self._outcome.failure, self._recording
        is_last = self._attempt.number >= self._spec.max_attempts or failure is None or not failure.retriable
        if recording is None or is_last or self._services.is_gate_lost() or not self._recorder.has_calls:
            return
        try:
            async with asyncio.timeout(HAND_ON_S):
                await self._keep_recording(recording, self._attempt.number)
        except (PenstockError, TimeoutError, OSError) as error:
            _log.warning("the next attempt looks for the recording", rollout_id=self._id, error=repr(error))

    async def _load_recording(self) -> None:
        """Give the gate the last attempt's answers, before the agent starts."""
        recording = self._recording
        if recording is None or not (recording.is_there or self._attempt.record.branched_from):
            return
        count = 0
        try:
            async with self._services.loadings:
                whole = await recording.count()  # a damaged file is not loaded in part
            offset: int | None = 0
            while offset is not None:
                load = partial(self._load_part, recording, offset, count)
                count, offset = await patiently(load, full_s=CLEAN_UP_S, absent_s=CLEAN_UP_S)
        except Unsupported as error:
            self._not_loaded("nothing is replayed: the gate is older than LoadRecording", error)
            return
        except (InvalidArgument, ResourceExhausted, DeadlineExceeded, OSError, ValueError) as error:
            self._not_loaded(f"the recording cannot be loaded, {count} calls of it are replayed: {error}", error)
            return
        except PenstockError as error:
            raise RolloutFailed(failure_of(error, self._phase, Component.GATE)) from error
        if self._attempt.record.branched_from is not None and count < whole:
            self._not_loaded("the gate is older than branches: it leaves out the branch point", None)
        branch = self._attempt.record.branched_from
        if branch is not None and not branch.answer_given and not await recording.attempt():
            count -= 1  # the branch point, which is sampled
        self._recorder.replays(count)
        if count:
            self._recorder.append(Progress(f"{count} recorded calls are replayed as far as the agent asks the same"))

    async def _load_part(self, recording: RecordingFile, offset: int, count: int) -> tuple[int, int | None]:
        """Load the part at an offset; return how many calls the gate has, `count` before, and the next part's offset.

        The part is in memory while few others are: a group of branches begins at once, and each has parts of its own.
        """
        async with self._services.loadings:
            found = await asyncio.to_thread(recording.part, offset)
            if found is None:
                return count, None
            return await self._gate.load_recording(found[0]), found[1]

    def _not_loaded(self, message: str, error: Exception | None) -> None:
        """Go on without a recording, except as a branch: that is none without what its parent was answered."""
        if self._attempt.record.branched_from is None:
            self._recorder.append(Progress(message))
            return
        raise failed(
            Cause.INFRASTRUCTURE, "RECORDING_NOT_LOADED", message, self._phase, component=Component.DRIVER
        ) from error

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
            attempt=self._attempt.number,
            branched_from=record.branched_from,
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

    async def _fork(
        self, prepared: PreparedEnvironment, *, upstream: str = "", purpose: str = "", joins: str = ""
    ) -> SandboxFacts:
        """Fork the prepared state; `purpose` distinguishes the attempt's forks, so that each request is idempotent."""
        snapshot_id = prepared.snapshot.snapshot_id
        return await self._services.forks.fork(
            snapshot_id,
            request_id=f"{self._id}/{self._attempt.number}/{snapshot_id}{purpose}{self._life and '/'}{self._life}",
            backend=self._spec.sandbox.backend,
            lease_s=self._spec.limits.sandbox_s,
            labels=self._attempt.labels,
            patience_s=self._spec.limits.prepare_s,
            port=self._services.agent_port if upstream else 0,
            upstream=upstream,
            repeatable=self._spec.repeatable and not purpose,
            allowlist=self._allowlist(purpose),
            joins=joins,
            has_room_elsewhere=never if purpose else self._services.has_room_elsewhere,
        )

    def _allowlist(self, purpose: str) -> sandbox_pb2.Allowlist | None:
        """What a fork may reach. The verifier's recording is another one: no agent asks first for what it will get."""
        given = self._spec.verifier_network if purpose else self._spec.agent_network
        if given is None:
            return None
        listed = sandbox_pb2.Allowlist()
        listed.CopyFrom(given)
        listed.recording = given.recording or f"{recording_of(self._attempt.record)}{purpose}"
        return listed

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

    async def _run_agent(self, sandbox: SandboxFacts, prepared: PreparedEnvironment, limit_s: float) -> Failure | None:
        """Watch the agent to its end. On return all its processes are dead and its agent key is revoked."""
        interruptions = self._gate.interruptions

        def ended(end: Exit) -> None:
            # The gate opens no judge before the rollout is closed there.
            is_early = self._asked is not None or end.reason is ExitReason.SANDBOX_LOST
            is_early = is_early or bool(self._spec.sandbox.companions)  # their sandbox is read before it is joined
            if self._grader and self._grader.grading.fresh_fork and not is_early:
                self._begin_to_fork(prepared)

        run = await watch_agent(
            self._sandboxes,
            sandbox.sandbox_id,
            self._spec,
            self._recorder.append,
            self._recorder.output,
            ended,
            limit_s=limit_s,
            held_s=self._attempt.pausing.held_s,
            recorded=self._recorder.agent_events,
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
        except RolloutFailed as error:
            if self._asked is None:
                raise
            raise RolloutFailed(await self._asked.explained(error.failure)) from error
        except TimeoutError:
            message = f"the verifier took longer than {self._spec.limits.verify_s:g} s"
            raise failed(Cause.VERIFIER, "VERIFIER_TIMED_OUT", message, self._phase) from None
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
        forking = self._forking or (None if companions else self._begin_to_fork(prepared))
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
                self._deleting = asyncio.ensure_future(
                    self._try_release("sandbox", self._sandboxes.delete(sandbox.sandbox_id))
                )
                self._releasing.append(("sandbox", self._deleting))
            await self._keep_end_state(grader)
            assert forking is not None
            self._sandbox = fork = await forking
            await grader.put(fork)
            self._forking = None
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

    async def _take_end_state(self, grader: Grader, sandbox: SandboxFacts) -> None:
        """Read and keep the agent's changes where the verifier does not need them. It never fails a rollout, but for
        what becomes of its sandbox.
        """
        try:
            await grader.take(sandbox)
        except RolloutFailed as error:
            self._recorder.append(Progress(f"the end state is not kept: {error.failure.message}"))
            return
        except OSError as error:
            self._recorder.append(Progress(f"the end state is not kept: {error}"))
            return
        await self._keep_end_state(grader)

    async def _keep_end_state(self, grader: Grader) -> None:
        """Keep what was taken of the agent's work, for later verifiers."""
        states = self._attempt.end_states
        if states is None or not self._keeps:
            return
        record = self._attempt.record
        try:
            async with asyncio.timeout(KEEP_S):
                changes, layer = grader.end_state()
                kept = await states.keep(record.rollout_id, record.namespace, self._attempt.number, changes, layer)
            if not kept:
                self._recorder.append(Progress("the end state is not kept: it alone exceeds kept_end_state_bytes"))
        except TimeoutError:  # an agent chooses how much there is to pack: no other rollout's grade waits longer for it
            self._recorder.append(Progress(f"the end state is not kept: it could not be packed in {KEEP_S:g} s"))
        except (OSError, SqliteError) as error:
            self._recorder.append(Progress(f"the end state is not kept: {error}"))

    @property
    def _keeps(self) -> bool:
        """Whether the end state is kept."""
        states = self._attempt.end_states
        # What the agent did to companions is in no end state.
        wanted = self._spec.keep_end_state is not False and not self._spec.sandbox.companions
        return states is not None and states.is_on and wanted

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
        request = JudgeRequest(
            judge_of=self._id,
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
            state = await self._prepared_for_verifier(prepared)
            upstream = await self._asked.open(insisting) if self._asked else ""
            try:
                return await self._fork(state, purpose="/grading", upstream=upstream, joins=joins)
            except NotFound:
                if state is prepared:
                    raise
                # No sandbox stood on the verifier's state while the agent ran: the sandbox service may have evicted it.
                again = await self._prepared(for_verifier(self._spec), again=True)
                return await self._fork(again, purpose="/grading", upstream=upstream)

        self._forking = asyncio.ensure_future(fork())
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
                self._abandon_lost()

    async def _leave(self) -> None:
        """Leave the attempt to the next process. Its sandbox is kept for that, and no other one."""
        for task in (self._forking, self._deleting):
            if task is not None:
                task.cancel()
        needed = self._recorder.needed_sandbox
        lease_s = min(self._services.leave_s, self._spec.limits.sandbox_s)
        try:
            async with asyncio.timeout(LEAVE_S):
                # Killed before the disk knows that a sandbox is needed no more, the next process would look for it.
                is_safe = self._gate_asked and await self._recorder.secure()
                for sandbox_id in await self._sandboxes.labelled(self._attempt.labels) if is_safe else ():
                    if sandbox_id == needed:
                        await self._sandboxes.renew(sandbox_id, lease_s)
                    else:
                        await self._sandboxes.delete(sandbox_id)
        except (PenstockError, TimeoutError) as error:
            _log.warning("sandboxes are left with their whole lease", rollout_id=self._id, error=repr(error))
        finally:
            self._close_files()

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
            await self._hand_on()
        else:
            await self._release()

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
            elif self._sandbox and self._forking is None and not self._life and not self._spec.sandbox.companions:
                deletion = self._try_release("sandbox", self._sandboxes.delete(self._sandbox.sandbox_id))
                self._releasing.append(("sandbox", tasks.create_task(deletion)))
            elif self._gate_asked:
                # There may be two, and a fork whose response was lost, or that an earlier process asked for, may have
                # created one: all carry these labels.
                deletion = self._try_release("sandbox", self._sandboxes.delete_labelled(self._attempt.labels))
                self._releasing.append(("sandbox", tasks.create_task(deletion)))
            if self._services.is_gate_lost():
                self._cleanup_pending |= self._gate_asked
            elif self._gate_asked and (self._gate_closing is None or (self._asked and self._asked.is_open)):
                # With the rollout, its judge is closed: not before its end is on disk, since a next process asks again.
                closing = patiently(
                    lambda: self._gate.close(self._id, "ROLLOUT_ENDED"), full_s=CLEAN_UP_S, absent_s=CLEAN_UP_S
                )
                self._releasing.append(("gate", tasks.create_task(self._try_release("gate", closing))))
            if self._deleting and self._services.is_node_lost():
                self._deleting.cancel()
            elif self._deleting:
                await asyncio.wait([self._deleting])
        self._close_files()
        if self._carried:
            await self._carried.remove()

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
                if self._cancellation.is_left:
                    raise
                failure = self._cancellation.at(self._phase)
        self._fail(failure)

    def _fail(self, failure: Failure) -> None:
        self._outcome = with_failure(self._outcome, failure)
