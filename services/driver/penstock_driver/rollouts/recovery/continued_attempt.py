"""Runs an attempt that an earlier process of this driver began, from the phase that is recorded (decision 054).

Invariants: the agent notices nothing, and nothing is sampled or counted twice. Work that may have been done twice with
another result is not done again: the attempt is lost instead, and says so.
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

from penstock_chassis.errors import AlreadyExists, FailedPrecondition, NotFound, PenstockError
from penstock_chassis.telemetry.tracing import working_for
from penstock_driver.domain.failures import OF_THE_SANDBOX
from penstock_driver.domain.ports import SandboxFacts
from penstock_driver.domain.rollout import (
    DIFF_S,
    CallFinished,
    Cause,
    Component,
    Failure,
    Outcome,
    Phase,
    Progress,
    RolloutFailed,
)
from penstock_driver.domain.unended import AttemptPlace, Stage
from penstock_driver.environments.prepare import PreparedEnvironment
from penstock_driver.environments.throttle import patiently
from penstock_driver.rollouts.agent_process import AgentRun, rejoin_agent
from penstock_driver.rollouts.attempt import Attempt
from penstock_driver.rollouts.attempt_resources import CLEAN_UP_S
from penstock_driver.rollouts.context import TakenUp


class ContinuedAttempt(Attempt):
    """See Attempt. Its spec says where to go on."""

    async def _run_phases(self) -> None:
        """Go on in the phase that is recorded."""
        taken_up = self._attempt.taken_up
        assert taken_up is not None
        place = taken_up.place
        prepared = PreparedEnvironment(place.toolbox, place.snapshot, ())
        self._outcome = taken_up.so_far
        self._recorder.append(Progress("the driver was restarted, and goes on with the rollout"))
        working_for(sandbox_id=place.sandbox.sandbox_id)
        if taken_up.stage is Stage.CARRIED:
            self._take_carried()
        else:
            self._resources.sandbox = place.sandbox
            await self._rejoin(place.sandbox)
        await self._delete_others("" if taken_up.stage is Stage.CARRIED else place.sandbox.sandbox_id)
        if self._phase is Phase.RUNNING:
            await self._go_on_running(place, prepared)
        elif self._phase is Phase.VERIFYING:
            await self._go_on_verifying(taken_up, prepared)
        else:
            await self._collect(place.sandbox, prepared)

    async def _go_on_running(self, place: AttemptPlace, prepared: PreparedEnvironment) -> None:
        sandbox, limits = place.sandbox, self._spec.limits
        if not await self._of_gate(patiently(lambda: self._gate.has(self._id), absent_s=CLEAN_UP_S)):
            message = "the gate closed the rollout while no driver ran, or has lost it: see the gate's driver_lease_s"
            raise RolloutFailed(
                Failure(Cause.INFRASTRUCTURE, "GATE_LOST", message, True, self._phase, component=Component.GATE)
            )
        try:
            async with self._attempt.pausing.holding(self._held(sandbox)):
                self._conversation.begin(place)
                refused: AgentRun | None = None
                if self._conversation.is_further and not self._conversation.is_over:
                    with suppress(AlreadyExists):  # it was started before the driver died
                        refused = await self._start_again(sandbox, prepared)
                if refused is None:
                    async with self._attempt.pausing.undisturbed():
                        await rejoin_agent(self._sandboxes, sandbox.sandbox_id, self._spec, self._conversation)
                await self._record_missed_calls()
                if refused is None:
                    # The sandbox service ends the agent in time, by a clock that does not jump.
                    failure = await self._run_agent(sandbox, prepared, limits.agent_s)
                else:
                    failure = await self._classified(refused, self._gate.interruptions, self._close_gate)
        except (NotFound, FailedPrecondition) as error:
            if error.reason in OF_THE_SANDBOX:
                raise _sandbox_lost(error, self._phase) from error
            if error.reason != "PROCESS_UNKNOWN":
                raise
            await self._begin_again()
        else:
            if await self._is_judged(failure):
                await self._restore_baselines(prepared, before=True)
                await self._judge(sandbox, prepared)

    async def _begin_again(self) -> None:
        """Begin the attempt again, whose agent was never started."""
        self._resources.sandbox, self._outcome = None, Outcome()
        self._recorder.begin_again("the attempt begins again: the driver was restarted before it had started the agent")
        await self._recorder.secure()  # the process after this one would look for the sandbox
        await self._sandboxes.delete_labelled(self._attempt.labels)
        self._attempt = replace(self._attempt, is_moved=True, taken_up=None)
        self._gate_request = self._attempt.new_gate_request()
        await super()._run_phases()

    async def _go_on_verifying(self, taken_up: TakenUp, prepared: PreparedEnvironment) -> None:
        sandbox = taken_up.place.sandbox
        if taken_up.stage is Stage.GRADING:
            message = (
                "the driver was restarted while a verifier ran in the agent's own sandbox or beside its companions"
            )
            raise RolloutFailed(
                Failure(
                    Cause.INFRASTRUCTURE, "GRADING_INTERRUPTED", message, True, self._phase, component=Component.DRIVER
                )
            )
        assert self._grader is not None
        await self._restore_baselines(prepared, before=False)
        await self._verify(self._grader, None if taken_up.stage is Stage.CARRIED else sandbox, prepared)
        await self._collect_in_turn(sandbox, prepared)

    async def _run_agent(self, sandbox: SandboxFacts, prepared: PreparedEnvironment, limit_s: float) -> Failure | None:
        failure = await super()._run_agent(sandbox, prepared, limit_s)
        await self._record_missed_calls()
        return failure

    async def _rejoin(self, sandbox: SandboxFacts) -> None:
        """Find the agent's sandbox, and let its lease cover the whole attempt from now on."""
        try:
            await patiently(
                lambda: self._sandboxes.rejoin(sandbox.sandbox_id, self._spec.limits.sandbox_s), absent_s=CLEAN_UP_S
            )
        except (NotFound, FailedPrecondition) as error:
            if error.reason not in OF_THE_SANDBOX:
                raise
            raise _sandbox_lost(error, self._phase) from error

    async def _delete_others(self, kept: str) -> None:
        """Delete the rollout's sandboxes but the one with this id: another fork would wait for their slots."""
        there = await patiently(lambda: self._sandboxes.labelled(self._attempt.labels), absent_s=CLEAN_UP_S)
        for sandbox_id in there:
            if sandbox_id != kept:
                await self._sandboxes.delete(sandbox_id)

    async def _restore_baselines(self, prepared: PreparedEnvironment, *, before: bool) -> None:
        """Save again what was saved from the sandbox before its agent started, of a fork of the same state.

        `before`: also what the working directory's record needs. Called after the agent's end: in a full service the
        fork may take long, and nobody would watch the agent meanwhile. A record alone costs no attempt.
        """
        grader = self._grader if self._grader is not None and self._grader.needs_baseline else None
        needs_before = before and self._work.needs_before
        if grader is None and not needs_before:
            return
        # Attempts that hold all slots wait for each other: the first one to time out makes room for the others.
        share = random.uniform(0.5, 1.0)  # noqa: S311 - jitter
        patience_s = DIFF_S if grader is None else share * self._spec.limits.prepare_s
        try:
            fork = await self._resources.fork(prepared, purpose="/baseline", patience_s=patience_s)
            try:
                if grader is not None:
                    await grader.save_baseline(fork, prepared.plain)
                if needs_before:
                    await self._work.keep(fork)
            finally:
                await self._resources.try_release("sandbox", self._sandboxes.delete(fork.sandbox_id))
        except PenstockError as error:
            if grader is not None:
                raise
            self._work.give_up(error.message)

    async def _record_missed_calls(self) -> None:
        """Record the calls that ended while no driver watched."""
        for ended in await self._ended_calls():
            self._recorder.append_call(CallFinished(ended.call, ended.spent))

    def _take_carried(self) -> None:
        """Read the agent's work from its file. RolloutFailed (WORK_LOST)."""
        try:
            if self._carried is None:
                raise FileNotFoundError
            work = self._carried.read()
        except (OSError, ValueError) as error:
            message = f"the agent's work, which was to be graded, is not on this driver's disk any more: {error!r}"
            raise RolloutFailed(
                Failure(Cause.INFRASTRUCTURE, "WORK_LOST", message, True, self._phase, component=Component.DRIVER)
            ) from error
        self._artifacts = work.artifacts
        if self._grader:
            self._grader.give(work)


def _sandbox_lost(error: PenstockError, phase: Phase) -> RolloutFailed:
    message = f"the sandbox ended while no driver watched it: {error.message}"
    return RolloutFailed(
        Failure(Cause.INFRASTRUCTURE, "SANDBOX_LOST", message, True, phase, component=Component.SANDBOX)
    )
