"""Runs one rollout: its attempts one after another.

Invariants: a rollout is retried only after failures unrelated to the policy, under the same id, with everything of the
previous attempt released. Anything that an attempt could not release stays pending, whatever the next attempt does. An
attempt that an earlier process of this driver began goes on, and counts once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, TypeGuard

import structlog

from penstock_chassis.aio.retry import Backoff, Delays
from penstock_chassis.auth import acting_in
from penstock_chassis.telemetry.tracing import working_for
from penstock_driver import metrics
from penstock_driver.domain.failures import internal_failure
from penstock_driver.domain.records import Record, seed_of
from penstock_driver.domain.rollout import (
    Cause,
    Component,
    Failure,
    Outcome,
    Phase,
    RolloutFailed,
    RolloutSpec,
    with_failure,
)
from penstock_driver.domain.unended import AttemptPlace, Stage, Unended
from penstock_driver.environments.throttle import FULL, TAKES_NO_MORE, never
from penstock_driver.grading.carried import CarriedWork
from penstock_driver.placement.placement import Avoid, Place, Placement
from penstock_driver.rollouts.attempt import Attempt
from penstock_driver.rollouts.context import AttemptResult, AttemptSpec, Cancellation, RolloutResult, TakenUp
from penstock_driver.rollouts.pausing import Pausing
from penstock_driver.rollouts.recorder import RolloutRecorder
from penstock_driver.rollouts.recovery.continued_attempt import ContinuedAttempt
from penstock_driver.store.end_states import EndStates
from penstock_driver.wire.outcomes import outcome_from_proto

FIRST_PAUSE_S: Final = 0.5
MOST_PAUSE_S: Final = 30.0
MOVES: Final = 5
"""How often an attempt begins again elsewhere because its place drains. The driver knows within a second or two."""
STOPPED: Final = Failure(
    Cause.INFRASTRUCTURE,
    "DRIVER_STOPPED",
    "the driver was stopped",
    True,
    Phase.QUEUED,
    component=Component.OPERATOR,
)
_log = structlog.get_logger("penstock.driver")


@dataclass(frozen=True, slots=True)
class Left:
    """What an earlier process left of a rollout. `release` frees what it has in other services; False if it cannot."""

    unended: Unended
    release: Callable[[str], Awaitable[bool]]

    @property
    def is_untouched(self) -> bool:
        """Whether nothing of it can be in other services."""
        record = self.unended.record
        return record.phase is Phase.QUEUED and record.attempts == 1 and not (record.home and record.home.gate)


class RolloutRunner:
    """Runs one rollout in a task of its own, from `start` to `result`.

    `labels` are those of its resources in other services. `left` is of one that an earlier process began.
    `is_verified`: whether its task has a verifier.
    """

    __slots__ = (
        "_accepted_at",
        "_attempt",
        "_cancellation",
        "_cleanup_pending",
        "_end_states",
        "_has_room_elsewhere",
        "_labels",
        "_left",
        "_placement",
        "_read_spec",
        "_spec",
        "_task",
        "is_verified",
        "pausing",
        "recorder",
    )

    def __init__(
        self,
        spec: RolloutSpec,
        recorder: RolloutRecorder,
        placement: Placement,
        labels: dict[str, str],
        left: Left | None = None,
        *,
        pausing: Pausing,
        end_states: EndStates | None = None,
    ) -> None:
        self._end_states = end_states
        self.pausing = pausing
        self.recorder = recorder
        self.is_verified = spec.task.verifier is not None
        self._spec: RolloutSpec | None = self._own(spec)
        self._read_spec: Callable[[Record], Awaitable[RolloutSpec]] | None = None
        self._placement = placement
        self._has_room_elsewhere: Callable[[], bool] = never
        """Whether another sandbox service than the last attempt's has room."""
        self._labels = labels
        self._cancellation = Cancellation()
        self._attempt = self._cancellation
        """Of the current attempt, which a loss of its place also ends; before the first one, the rollout's own."""
        self._cleanup_pending = left is not None and left.unended.owed
        self._left = left
        self._accepted_at = time.monotonic()
        self._task: asyncio.Task[Outcome] | None = None

    @property
    def spec(self) -> RolloutSpec:
        """The rollout's spec, which one that waits may have put away."""
        assert self._spec is not None
        return self._spec

    def _own(self, spec: RolloutSpec) -> RolloutSpec:
        branch, index = self.recorder.record.branched_from, self.recorder.record.index
        return spec.at(index) if branch is None else spec.of_branch(seed_of(branch), index)

    def put_away(self, read: Callable[[Record], Awaitable[RolloutSpec]]) -> None:
        """Keep no spec until the rollout begins, and `read` it then. `read` raises RolloutFailed if it cannot."""
        self._spec, self._read_spec = None, read

    @property
    def is_started(self) -> bool:
        """Whether it runs, or has run."""
        return self._task is not None

    def start(self) -> None:
        """Begin to run, unless the rollout was cancelled."""
        if self._cancellation.failure is None:
            if self._left is None:
                metrics.QUEUE_SECONDS.observe(time.monotonic() - self._accepted_at)
            self._attempt = Cancellation(is_left=self._cancellation.is_left)
            self._task = asyncio.ensure_future(self._run())

    def cancel(self, failure: Failure) -> None:
        """End the rollout with this failure; only the first call counts."""
        if self._cancellation.failure is None:
            self._cancellation.failure = failure
            self._end_attempt(failure)

    @property
    def is_left(self) -> bool:
        """Whether it has stopped without an end, for the next process of this driver."""
        return self._cancellation.is_left and (self._task is None or self._task.cancelled())

    def leave(self, *, at_once: bool = False) -> None:
        """Stop without an end, for the next process of this driver. What that could not go on with ends first, unless
        `at_once`: a verifier in the agent's own sandbox, and a cancellation.
        """
        self._cancellation.is_left = True
        if not at_once and (self._cancellation.failure is not None or self.recorder.is_better_awaited):
            return
        self._attempt.is_left = True
        self.pausing.leave()
        if self._task is not None:
            self._task.cancel()

    def _end_attempt(self, failure: Failure) -> None:
        if self._attempt.failure is None:
            self._lose_place(failure)

    def _lose_place(self, failure: Failure) -> None:
        """End the attempt. The clean-up of one that ends already stops waiting for what is lost."""
        if self._attempt.failure is None:
            self._attempt.failure = failure
        if self._task is not None:
            self._task.cancel()

    async def result(self) -> RolloutResult:
        """Wait for the end, and return how the rollout ended."""
        if self._task is not None:
            await asyncio.wait([self._task])
        if self._task is None or self._task.cancelled():
            # Cancelled before it was started, or between two attempts: it holds only what an earlier process left.
            outcome = None if self._left is None or self.is_left else await self._let_go(self._left)
            outcome = outcome or Outcome(failure=self._cancellation.failure or STOPPED)
            return RolloutResult(outcome, self._cleanup_pending)
        if error := self._task.exception():
            _log.error("a rollout's runner failed", rollout_id=self.recorder.record.rollout_id, exc_info=error)
            # Its progress is unknown: assume that it holds something.
            return RolloutResult(Outcome(failure=internal_failure(self.recorder.progress.phase)), cleanup_pending=True)
        return RolloutResult(self._task.result(), self._cleanup_pending)

    async def _run(self) -> Outcome:
        # Added to every log line of this task and of the services that it calls.
        record, progress = self.recorder.record, self.recorder.progress
        working_for(request_id=record.rollout_id, rollout_id=record.rollout_id, group_id=record.group_id)
        with acting_in(record.namespace):
            if self._read_spec is not None:
                try:
                    self._spec = self._own(await self._read_spec(record))
                except RolloutFailed as error:
                    return await self._unread(error.failure)
            backoff = Backoff(Delays(FIRST_PAUSE_S, MOST_PAUSE_S, jitter=(1.0, 1.25)))
            avoid, moves, is_moved = Avoid(), 0, False
            while True:
                left = self._left
                if left is not None and left.unended.place is not None:
                    result = await self._taken_up(left, avoid)
                else:
                    if left is not None:
                        is_moved = not left.is_untouched
                        await self._begin_again(left)
                    self._left = None
                    await self.pausing.passed()
                    result = await self._attempted(avoid, is_moved=is_moved or moves > 0)
                is_moved = False
                if result.cleanup_pending:
                    self._cleanup_pending = True
                    self.recorder.owe()
                outcome = result.outcome
                is_last = progress.attempt >= self.spec.max_attempts or self._cancellation.failure is not None
                is_over = _is_over(outcome) or is_last
                if self._cancellation.is_left and not is_over:
                    raise asyncio.CancelledError  # the next process makes the next attempt
                if (
                    moves < MOVES
                    and self._cancellation.failure is None
                    and _may_move(outcome.failure, avoid, self._has_room_elsewhere)
                ):
                    moves += 1
                    self.recorder.begin_again(f"the attempt begins again at another place: {outcome.failure.message}")
                    await asyncio.sleep(FIRST_PAUSE_S)
                    continue
                if outcome.failure is None or is_over:
                    return outcome
                self.recorder.retry(outcome.failure)
                await backoff.wait()

    async def _unread(self, failure: Failure) -> Outcome:
        """The end of a rollout whose spec cannot be read."""
        outcome = None if self._left is None else await self._let_go(self._left)
        return outcome or Outcome(failure=failure)

    async def _let_go(self, left: Left) -> Outcome | None:
        """Release what an earlier process left, for nobody goes on with it; return how it had ended, if it had."""
        unended, self._left = left.unended, None
        if unended.place is not None:
            await self._remove_carried(unended.place)
        if not left.is_untouched and not await left.release(self.recorder.record.rollout_id):
            self._cleanup_pending = True
        if unended.stage is not Stage.DECIDED or unended.so_far is None:
            return None
        so_far = outcome_from_proto(unended.so_far)
        return so_far if _is_over(so_far) else None

    async def _begin_again(self, left: Left) -> None:
        """Release what an attempt had whose agent was not started."""
        if left.is_untouched:
            return
        if not await left.release(self.recorder.record.rollout_id):
            self._cleanup_pending = True
            self.recorder.owe()
        if self.recorder.progress.phase is not Phase.QUEUED:
            self.recorder.begin_again("the attempt begins again: the driver was restarted before its agent ran")

    async def _taken_up(self, left: Left, avoid: Avoid) -> AttemptResult:
        """Go on with an attempt whose agent was started, or was about to be.

        `_left` is kept until the attempt has it, or it is released: a cancellation before that releases it.
        """
        unended, phase = left.unended, self.recorder.progress.phase
        assert unended.place is not None
        so_far = Outcome() if unended.so_far is None else outcome_from_proto(unended.so_far)
        if unended.stage is Stage.DECIDED:
            await self._remove_carried(unended.place)
            return AttemptResult(so_far, not await self._released(left))
        self.recorder.continue_at(unended.place, unended.stage, unended.so_far)
        try:
            place = self._placement.at(unended.place.node, unended.place.gate)
        except RolloutFailed as error:
            outcome = with_failure(so_far, replace(error.failure, phase=phase))
            return AttemptResult(outcome, not await self._released(left))
        self._left = None
        return await self._run_attempt(place, avoid, taken_up=TakenUp(unended.place, unended.stage, so_far))

    async def _released(self, left: Left) -> bool:
        """Release what an attempt left with which nobody goes on; return whether nothing of it is left."""
        is_released = await left.release(self.recorder.record.rollout_id)
        self._left = None
        self.pausing.attempt_over()
        return is_released

    async def _remove_carried(self, at: AttemptPlace) -> None:
        """Remove what an attempt left that had ended, but for its recording."""
        with suppress(RolloutFailed):  # the place is lost, and the driver's next start removes it
            if (carried := self._placement.at(at.node, at.gate).services.carried) is not None:
                await CarriedWork(carried, self.recorder.record.rollout_id).remove()

    async def _attempted(self, avoid: Avoid, *, is_moved: bool) -> AttemptResult:
        """Run one attempt at a place of its own."""
        try:
            place = await self._placement.place(self.spec, avoid)
        except RolloutFailed as error:
            return AttemptResult(Outcome(failure=error.failure))
        return await self._run_attempt(place, avoid, is_moved=is_moved)

    async def _run_attempt(
        self, place: Place, avoid: Avoid, *, is_moved: bool = False, taken_up: TakenUp | None = None
    ) -> AttemptResult:
        """Run one attempt, and add its place to `avoid`."""
        avoid.nodes.add(place.node)
        avoid.gates.add(place.gate)
        self._has_room_elsewhere = place.services.has_room_elsewhere
        self._attempt, task = Cancellation(is_left=self._attempt.is_left), asyncio.current_task()
        assert task is not None
        spec = AttemptSpec(
            self.recorder.record,
            self.spec,
            self.recorder.progress.attempt,
            self._labels,
            is_moved,
            place.node,
            place.gate,
            taken_up,
            pausing=self.pausing,
            end_states=self._end_states,
        )
        with self._placement.occupied(place, self._lose_place):
            kind = Attempt if taken_up is None else ContinuedAttempt
            result = await kind(spec, place.services, self.recorder, self._attempt).run()
        self.pausing.attempt_over()
        if self._attempt.failure is not self._cancellation.failure:
            while task.cancelling():  # losses end this attempt alone
                task.uncancel()
        # The loss is over with its attempt: a cancellation before the next one ends the task.
        self._attempt = Cancellation(self._cancellation.failure, self._attempt.is_left)
        return result


def _is_over(outcome: Outcome) -> bool:
    """Whether no other attempt may follow one that ended so."""
    return outcome.failure is None or not outcome.failure.retriable or bool(outcome.reward)


def _may_move(failure: Failure | None, avoid: Avoid, has_room_elsewhere: Callable[[], bool]) -> TypeGuard[Failure]:
    """Whether a service refused an attempt before its agent ran because it drains or is full, and another one may take
    it.
    """
    return (
        failure is not None
        and (failure.reason in TAKES_NO_MORE or (failure.reason in FULL and has_room_elsewhere()))
        and failure.phase < Phase.RUNNING
        and "" not in avoid.nodes
    )
