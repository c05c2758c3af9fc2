"""Runs one rollout: its attempts one after another.

Invariants: a rollout is retried only after failures unrelated to the policy, under the same id, with everything of the
previous attempt released. Anything that an attempt could not release stays pending, whatever the next attempt does.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Final, TypeGuard

import structlog

from penstock_chassis.auth import acting_in
from penstock_chassis.telemetry.tracing import working_for
from penstock_driver import metrics
from penstock_driver.domain.failures import internal_failure
from penstock_driver.domain.rollout import Cause, Component, Failure, Outcome, Phase, RolloutFailed, RolloutSpec
from penstock_driver.placement.placement import Avoid, Placement
from penstock_driver.rollouts.attempt import Attempt
from penstock_driver.rollouts.context import AttemptResult, AttemptSpec, Cancellation, RolloutResult
from penstock_driver.rollouts.recorder import RolloutRecorder

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


class RolloutRunner:
    """Runs one rollout in a task of its own, from `start` to `result`.

    `labels` are those of its resources in other services.
    """

    __slots__ = (
        "_accepted_at",
        "_attempt",
        "_cancellation",
        "_cleanup_pending",
        "_labels",
        "_placement",
        "_task",
        "recorder",
        "spec",
    )

    def __init__(
        self,
        spec: RolloutSpec,
        recorder: RolloutRecorder,
        placement: Placement,
        labels: dict[str, str],
    ) -> None:
        self.spec = spec.at(recorder.record.index)
        self.recorder = recorder
        self._placement = placement
        self._labels = labels
        self._cancellation = Cancellation()
        self._attempt = Cancellation()
        """Of the current attempt, which a loss of its place also ends."""
        self._cleanup_pending = False
        self._accepted_at = time.monotonic()
        self._task: asyncio.Task[Outcome] | None = None

    @property
    def is_started(self) -> bool:
        """Whether it runs, or has run."""
        return self._task is not None

    def start(self) -> None:
        """Begin to run, unless the rollout was cancelled."""
        if self._cancellation.failure is None:
            metrics.QUEUE_SECONDS.observe(time.monotonic() - self._accepted_at)
            self._task = asyncio.ensure_future(self._run())

    def cancel(self, failure: Failure) -> None:
        """End the rollout with this failure; only the first call counts."""
        if self._cancellation.failure is None:
            self._cancellation.failure = failure
            self._end_attempt(failure)

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
            # Cancelled before it was started, or between two attempts: it holds nothing more.
            return RolloutResult(Outcome(failure=self._cancellation.failure or STOPPED), self._cleanup_pending)
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
            pause, avoid, moves = FIRST_PAUSE_S, Avoid(), 0
            while True:
                result = await self._attempted(avoid, is_moved=moves > 0)
                self._cleanup_pending |= result.cleanup_pending
                outcome = result.outcome
                if moves < MOVES and self._cancellation.failure is None and _is_of_a_drain(outcome.failure, avoid):
                    moves += 1
                    self.recorder.move(outcome.failure)
                    await asyncio.sleep(FIRST_PAUSE_S)
                    continue
                is_last = progress.attempt >= self.spec.max_attempts or self._cancellation.failure is not None
                if outcome.failure is None or not outcome.failure.retriable or outcome.reward or is_last:
                    return outcome
                self.recorder.retry(outcome.failure)
                await asyncio.sleep(pause * random.uniform(1.0, 1.25))  # noqa: S311 - jitter
                pause = min(2 * pause, MOST_PAUSE_S)

    async def _attempted(self, avoid: Avoid, *, is_moved: bool) -> AttemptResult:
        """Run one attempt at a place of its own, and add that place to `avoid`."""
        try:
            place = await self._placement.place(self.spec, avoid)
        except RolloutFailed as error:
            return AttemptResult(Outcome(failure=error.failure))
        avoid.nodes.add(place.node)
        avoid.gates.add(place.gate)
        self._attempt, task = Cancellation(), asyncio.current_task()
        assert task is not None
        spec = AttemptSpec(self.recorder.record, self.spec, self.recorder.progress.attempt, self._labels, is_moved)
        with self._placement.occupied(place, self._lose_place):
            result = await Attempt(spec, place.services, self.recorder, self._attempt).run()
        if self._attempt.failure is not self._cancellation.failure:
            while task.cancelling():  # losses end this attempt alone
                task.uncancel()
        return result


def _is_of_a_drain(failure: Failure | None, avoid: Avoid) -> TypeGuard[Failure]:
    """Whether a service refused an attempt before its agent ran because it drains, and there may be others."""
    return (
        failure is not None and failure.reason == "DRAINING" and failure.phase < Phase.RUNNING and "" not in avoid.nodes
    )
