"""What happens in each phase of a rollout, from the prepared snapshot to the deleted sandbox.

Invariants: an agent starts only after every setup command succeeded (R57, R58); its process tree is dead and its
credential void before the verifier starts (R60); whatever ends the course after a sandbox or a place at the gate
exists, both are released, and a failure of that clean-up is told but never hides the cause (R49); there is one path
here and no branch on an agent's name (R17).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

import structlog

from penstock_chassis.errors import NotFound, PenstockError, ResourceExhausted
from penstock_chassis.tracing import working_for
from penstock_driver import rewards
from penstock_driver.agent_runs import Fetched, fetch_artifacts, run_agent
from penstock_driver.allowance import Allowance
from penstock_driver.endings import (
    describe,
    ended_by_its_agent,
    failure_of,
    fault_of_the_driver,
    is_of_a_sandbox_at_work,
    judge,
)
from penstock_driver.grading import ROOT, Grader
from penstock_driver.launches import Launch, Place, check_host_tools, plan_launch
from penstock_driver.patience import UNAVAILABLE_PATIENCE_S, patiently
from penstock_driver.ports import (
    Exit,
    ExitReason,
    Gate,
    GateClosing,
    GateOpening,
    GateOrder,
    Sandboxes,
    SandboxFacts,
)
from penstock_driver.preparations import Preparations, Prepared, SetupFailed, setup_commands
from penstock_driver.rollouts import (
    CARRY_S,
    ArtifactCollected,
    Cause,
    Failure,
    Happening,
    Outcome,
    Party,
    Phase,
    Progress,
    RolloutFailed,
    RolloutOrder,
    failed,
    with_failure,
)
from penstock_driver.shaping import Shaper
from penstock_driver.workdir import Work

NAMELESS_MODEL: Final = "model"
"""What the agent calls the model when its source gives no name, as a bare tokenizer does."""
CLEAN_UP_S: Final = 60.0
_log = structlog.get_logger("penstock.driver")
T = TypeVar("T")


class Conductor:
    """Conducts one attempt at a rollout; `run()` is called once and always returns an outcome, also when cancelled.

    `record` takes each event as it happens, `enter` each phase; `output` says how much of the agent's is recorded.
    `cancel_failure` is set before the task is cancelled.
    `forks` and `openings` shape what all rollouts ask of the same backend, and of the gate. When `run()` has returned,
    `owes` says that something could not be released.
    """

    def __init__(
        self,
        rollout_id: str,
        group_id: str | None,
        index: int,
        order: RolloutOrder,
        key: str,
        *,
        sandboxes: Sandboxes,
        gate: Gate,
        preparations: Preparations,
        forks: Shaper,
        openings: Shaper,
        attempt: int,
        labels: dict[str, str],
        agent_port: int,
        spool: Path | None,
        max_changes_bytes: int,
        output: Allowance,
        enter: Callable[[Phase], None],
        record: Callable[[Happening], None],
    ) -> None:
        self._id = rollout_id
        self._group_id = group_id
        self._index = index
        self._order = order
        self._key = key
        self._sandboxes = sandboxes
        self._gate = gate
        self._preparations = preparations
        self._forks = forks
        self._openings = openings
        self._number = attempt
        self._labels = labels
        self._agent_port = agent_port
        self._phase = Phase.QUEUED
        self._enter_phase = enter
        self._record = record
        self._output = output
        self._sandbox: SandboxFacts | None = None
        self._forking: asyncio.Task[SandboxFacts] | None = None
        """The one to grade in is being made, or is there and has not taken the place of the agent's yet."""
        self._deleting: asyncio.Task[None] | None = None
        """The agent's sandbox is going, and a fork takes its place."""
        self._gate_asked = False
        self._closing: GateClosing | None = None
        verifier = order.task.verifier
        self._grader = (
            Grader(sandboxes, verifier, spool=spool, max_bytes=max_changes_bytes) if verifier is not None else None
        )
        self._work = Work(order.task, sandboxes, spool=spool, record=record)
        self._artifacts: list[Fetched] | None = None
        self._outcome = Outcome()
        self.fork_kind = 0
        self.owes = False
        self.cancel_failure = Failure(Cause.CANCELLED, "CANCELLED", "the rollout was cancelled", False, Phase.QUEUED)

    async def run(self) -> Outcome:
        """Everything, in order."""
        try:
            await self._course()
        except asyncio.CancelledError:
            self._fail(replace(self.cancel_failure, phase=self._phase))
        except RolloutFailed as error:
            await self._fail_judged(error.failure)
        except PenstockError as error:
            await self._fail_judged(failure_of(error, self._phase, Party.SANDBOX))
        except Exception:  # noqa: BLE001 - a rollout always ends with an outcome
            _log.exception("rollout failed by a fault of the driver", rollout_id=self._id)
            self._fail(fault_of_the_driver(self._phase))
        if self._forking:
            self._forking.cancel()
        await self._clean_up()
        return self._outcome

    async def _course(self) -> None:
        self._enter(Phase.PREPARING)
        if self._number > 1:
            await self._forget_the_last_attempt()
        prepared = await self._prepare()
        opening = await self._open_gate()
        sandbox, prepared = await self._fork(prepared, opening)
        working_for(sandbox_id=sandbox.sandbox_id)
        self._enter(Phase.CONFIGURING)
        if self._grader:
            await self._grader.prepare(sandbox)
        await self._work.keep(sandbox)
        launch = self._plan(sandbox, prepared, opening)
        if launch.files:
            await self._sandboxes.write_files(sandbox.sandbox_id, launch.files)
        self._enter(Phase.RUNNING)
        failure = await self._run_agent(sandbox, launch, prepared)
        if failure:
            await self._fail_judged(failure)
        if failure is None or failure.is_gradable:
            await self._work.tell(sandbox)
        if self._grader and (failure is None or failure.is_gradable):
            self._enter(Phase.VERIFYING)
            await self._verify(self._grader, sandbox, prepared)
        if self._order.agent.spec.artifacts and (failure is None or failure.is_gradable):
            self._enter(Phase.COLLECTING)
            await self._collect(sandbox, prepared)

    # Before the agent -------------------------------------------------------------------------------------------------

    async def _prepare(self, *, again: bool = False) -> Prepared:
        try:
            prepared = await self._preparations.get(
                self._order, self._key, lambda line: self._record(Progress(line)), again=again
            )
        except SetupFailed as error:
            raise self._setup_failure(error) from error
        except TimeoutError:
            message = f"preparing took longer than {self._order.limits.prepare_s:g} s and the setup's limit"
            raise failed(
                Cause.INFRASTRUCTURE, "PREPARE_TIMED_OUT", message, self._phase, retriable=True, part=Party.SANDBOX
            ) from None
        if not again:
            commands = setup_commands(self._order)
            for report in prepared.reports:
                self._record(rewards.finished(Phase.SETTING_UP, report.index, commands[report.index], report.result))
        return prepared

    def _setup_failure(self, error: SetupFailed) -> RolloutFailed:
        if error.check:
            output = (error.check.result.stderr or error.check.result.stdout)[-500:].decode("utf-8", "replace")
            message = f"the agent's check command failed ({describe(error.check.result.exit)}): {output}"
            return failed(Cause.INFRASTRUCTURE, "AGENT_CHECK_FAILED", message, self._phase, part=Party.AGENT)
        self._enter(Phase.SETTING_UP)
        commands = setup_commands(self._order)
        for report in error.reports:
            self._record(rewards.finished(Phase.SETTING_UP, report.index, commands[report.index], report.result))
        ended = describe(error.reports[-1].result.exit) if error.reports else "unknown"
        message = f"setup command {len(error.reports)} of {len(commands)} failed: {ended}"
        return failed(Cause.TASK, "SETUP_FAILED", message, self._phase)

    async def _forget_the_last_attempt(self) -> None:
        """What was captured of it is removed, so that the trajectory is this attempt's and no other's."""
        await self._of_gate(self._openings.run(lambda: self._gate.delete(self._id), self._patience_s))

    async def _open_gate(self) -> GateOpening:
        spec = self._order.agent.spec
        hints = spec.auxiliary_calls
        order = GateOrder(
            rollout_id=self._id,
            request_id=self._id if self._number == 1 else secrets.token_hex(16),
            group_id=self._group_id,
            group_index=self._index if self._group_id else None,
            task_id=self._order.task.task_id,
            terms=self._order.gate_terms,
            dialects=tuple(spec.dialects),
            title_system_prompts=tuple(hints.title_system_prompts),
            compaction_system_prompts=tuple(hints.compaction_system_prompts),
            session_headers=tuple(hints.session_headers),
            volatile_line_patterns=tuple(hints.volatile_line_patterns),
            labels={**self._order.labels, **self._labels},
        )
        self._gate_asked = True
        opening = await self._of_gate(self._openings.run(lambda: self._gate.open(order), self._patience_s))
        try:
            check_host_tools(spec, opening.host_tools)
        except PenstockError as error:
            raise RolloutFailed(failure_of(error, self._phase, Party.OPERATOR)) from error
        return opening

    async def _of_gate(self, work: Awaitable[T]) -> T:
        """What the gate answers; what goes wrong there is its failure."""
        try:
            return await work
        except PenstockError as error:
            raise RolloutFailed(failure_of(error, self._phase, Party.GATE)) from error

    async def _fork(self, prepared: Prepared, opening: GateOpening) -> tuple[SandboxFacts, Prepared]:
        def fork(source: Prepared) -> Callable[[], Awaitable[SandboxFacts]]:
            return lambda: self._sandboxes.fork(
                source.snapshot_id,
                request_id=f"{self._id}/{self._number}/{source.snapshot_id}",
                port=self._agent_port,
                upstream=opening.ingress_address,
                lease_s=self._order.limits.sandbox_s,
                labels=self._labels,
            )

        try:
            sandbox = await self._forks.run(fork(prepared), self._patience_s)
        except NotFound:
            # The sandbox service has dropped the snapshot since we learnt of it.
            prepared = await self._prepare(again=True)
            sandbox = await self._forks.run(fork(prepared), self._patience_s)
        self._sandbox = sandbox
        self.fork_kind = sandbox.fork_kind
        return sandbox, prepared

    def _plan(self, sandbox: SandboxFacts, prepared: Prepared, opening: GateOpening) -> Launch:
        spec, order = self._order.agent.spec, self._order
        dialect = next((item for item in spec.dialects if item in opening.base_paths), None)
        if dialect is None:
            spoken = ", ".join(spec.dialects)
            message = f"agent {spec.name} speaks {spoken}, and the gate offers none of it"
            raise failed(Cause.INFRASTRUCTURE, "DIALECT_MISSING", message, self._phase, part=Party.OPERATOR)
        place = Place(
            home=sandbox.home,
            workdir=sandbox.workdir,
            toolbox=prepared.toolbox.mount_path,
            base_url=f"http://127.0.0.1:{self._agent_port}{opening.base_paths[dialect]}",
            api_key=opening.token,
            model=opening.model_name or NAMELESS_MODEL,
            rollout_id=self._id,
            wall_time_s=order.limits.agent_s,
            tools_url=f"http://127.0.0.1:{self._agent_port}{opening.mcp_path}" if opening.host_tools else "",
        )
        try:
            return plan_launch(spec, order.choice, place, order.task.instruction)
        except PenstockError as error:
            raise RolloutFailed(failure_of(error, self._phase, Party.OPERATOR)) from error

    # The agent --------------------------------------------------------------------------------------------------------

    async def _run_agent(self, sandbox: SandboxFacts, launch: Launch, prepared: Prepared) -> Failure | None:
        """Start and watch the agent; on return it and all that it started are dead and its credential is void."""
        interruptions = self._gate.interruptions

        def ended(end: Exit) -> None:
            if self._grader and self._grader.grading.fresh_fork and end.reason is not ExitReason.SANDBOX_LOST:
                self._begin_to_fork(prepared)

        run = await run_agent(
            self._sandboxes, sandbox.sandbox_id, self._order, launch, self._record, self._output, ended
        )
        self._outcome = replace(self._outcome, agent_exit=run.exit)
        self._record(run.exit)
        # A gate that restarts at this moment has all that the agent did in its journal: it is worth waiting for.
        closing = patiently(lambda: self._gate.close(self._id, "AGENT_EXITED"), full_s=CLEAN_UP_S, absent_s=CLEAN_UP_S)
        self._closing = await self._of_gate(closing)
        return judge(
            run.exit.exit,
            self._closing,
            run.done,
            self._order.agent.spec.success_exit_codes,
            self._phase,
            gate_was_away=self._gate.interruptions != interruptions,
        )

    # After the agent --------------------------------------------------------------------------------------------------

    async def _verify(self, grader: Grader, sandbox: SandboxFacts, prepared: Prepared) -> None:
        try:
            if grader.grading.fresh_fork:
                sandbox = await self._move_to_fresh_fork(grader, sandbox, prepared)
            elif self._order.tells_changes and self._order.sandbox.user not in ROOT:
                await grader.check_system(sandbox)
            async with asyncio.timeout(self._order.limits.verify_s):
                reward = await grader.grade(sandbox, self._record)
        except TimeoutError:
            message = f"the verifier took longer than {self._order.limits.verify_s:g} s"
            raise failed(Cause.VERIFIER, "VERIFIER_TIMED_OUT", message, self._phase) from None
        finally:
            self._outcome = replace(self._outcome, grading=grader.grading)
        self._outcome = replace(self._outcome, reward=reward)

    async def _move_to_fresh_fork(self, grader: Grader, sandbox: SandboxFacts, prepared: Prepared) -> SandboxFacts:
        """Take what is wanted from the agent's sandbox, delete it, and bring the agent's changes to a fresh fork."""
        forking = self._forking or self._begin_to_fork(prepared)
        try:
            async with asyncio.timeout(CARRY_S):
                await grader.take(sandbox)
                self._artifacts = await self._fetch_artifacts(sandbox, prepared)
            # Begun before the fork is waited for: rollouts that hold one place and wait for another would wait for each
            # other. It ends while the verifier runs, and no verifier waits for it.
            self._deleting = asyncio.ensure_future(self._attempt("sandbox", self._sandboxes.delete(sandbox.sandbox_id)))
            self._sandbox = fork = await forking
            await grader.put(fork)
            self._forking = None
        except TimeoutError:
            message = f"taking over the agent's changes took longer than {CARRY_S:g} s"
            raise failed(
                Cause.INFRASTRUCTURE, "CHANGES_TIMED_OUT", message, self._phase, retriable=True, part=Party.SANDBOX
            ) from None
        except NotFound as error:
            message = f"the prepared state is not there any more: {error.message}"
            raise failed(
                Cause.INFRASTRUCTURE, "SNAPSHOT_MISSING", message, self._phase, retriable=True, part=Party.SANDBOX
            ) from error
        return fork

    def _begin_to_fork(self, prepared: Prepared) -> asyncio.Task[SandboxFacts]:
        """Ask for the fork to grade in, which is made while the agent's sandbox is read."""
        work = self._forks.run(
            lambda: self._sandboxes.fork(
                prepared.snapshot_id,
                request_id=f"{self._id}/{self._number}/{prepared.snapshot_id}/grading",
                port=0,
                upstream="",
                lease_s=self._order.limits.sandbox_s,
                labels=self._labels,
            ),
            self._patience_s,
        )
        self._forking = asyncio.ensure_future(work)
        return self._forking

    async def _collect(self, sandbox: SandboxFacts, prepared: Prepared) -> None:
        fetched = self._artifacts
        for item in await self._fetch_artifacts(sandbox, prepared) if fetched is None else fetched:
            if isinstance(item, ArtifactCollected):
                self._record(item)
            else:
                self._fail(replace(item, phase=self._phase))

    async def _fetch_artifacts(self, sandbox: SandboxFacts, prepared: Prepared) -> list[Fetched]:
        spec, toolbox = self._order.agent.spec, prepared.toolbox.mount_path
        return await fetch_artifacts(self._sandboxes, sandbox, spec, toolbox, self._id, self._phase)

    async def _clean_up(self) -> None:
        """Release the sandbox and the place at the gate, whatever happens to the task meanwhile."""
        work = asyncio.ensure_future(self._release())
        while not work.done():
            try:
                await asyncio.shield(work)
            except asyncio.CancelledError:
                if work.cancelled():
                    break

    async def _release(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            if self._sandbox and self._forking is None:
                tasks.create_task(self._attempt("sandbox", self._sandboxes.delete(self._sandbox.sandbox_id)))
            elif self._gate_asked:
                # There may be two, and a fork whose answer never came may have made one: they carry these labels.
                tasks.create_task(self._attempt("sandbox", self._sandboxes.delete_labelled(self._labels)))
            if self._gate_asked and self._closing is None:
                closing = patiently(
                    lambda: self._gate.close(self._id, "ROLLOUT_ENDED"), full_s=CLEAN_UP_S, absent_s=CLEAN_UP_S
                )
                tasks.create_task(self._attempt("gate", closing))
            if self._deleting:
                await self._deleting
        if self._grader:
            self._grader.close()
        self._work.close()

    async def _attempt(self, what: str, work: Awaitable[object]) -> None:
        try:
            async with asyncio.timeout(CLEAN_UP_S):
                await work
        except Exception as error:  # noqa: BLE001 - a clean-up that fails never hides why the rollout ended (R49)
            self.owes = True
            _log.warning("clean-up failed, and is owed", what=what, rollout_id=self._id, error=repr(error))
            self._record(Progress(f"releasing the {what} failed: {error}; it is tried until it succeeds"))

    # ------------------------------------------------------------------------------------------------------------------

    def _patience_s(self, error: PenstockError) -> float:
        """A full service is waited for as long as preparing may take, one that does not answer so that its absence is
        told soon (R51)."""
        return self._order.limits.prepare_s if isinstance(error, ResourceExhausted) else UNAVAILABLE_PATIENCE_S

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._enter_phase(phase)

    async def _fail_judged(self, failure: Failure) -> None:
        """Fail, after a look at who ended the sandbox where that is why."""
        if is_of_a_sandbox_at_work(failure) and self._sandbox and not self._outcome.failure:
            try:
                if await self._sandboxes.ended_inside(self._sandbox.sandbox_id):
                    failure = ended_by_its_agent(failure)
            except asyncio.CancelledError:
                failure = replace(self.cancel_failure, phase=self._phase)
        self._fail(failure)

    def _fail(self, failure: Failure) -> None:
        self._outcome = with_failure(self._outcome, failure)
