"""What operators see of rollouts: each one counted, and told in the log as it goes its way."""

from __future__ import annotations

import structlog

from penstock_driver import metrics
from penstock_driver.records import Record
from penstock_driver.rollouts import Course, Failure, Outcome, Phase

_log = structlog.get_logger("penstock.driver")


def enter(course: Course, phase: Phase) -> float:
    """Enters a phase, and counts how long the one before took; returns that."""
    before = course.phase
    took = course.enter(phase)
    metrics.PHASE_SECONDS.labels(before.name.lower()).observe(took)
    return took


def attempt_failed(record: Record, attempt: int, failure: Failure) -> None:
    """The rollout is begun anew."""
    metrics.ATTEMPTS_FAILED.labels(failure.caused_by.value.lower()).inc()
    _log.info("attempt failed", rollout_id=record.rollout_id, attempt=attempt, reason=failure.reason)


def ended(record: Record, outcome: Outcome) -> None:
    """A rollout has its outcome."""
    failure = outcome.failure
    end, caused_by = ("completed", "") if failure is None else (failure.cause.value, failure.caused_by.value)
    metrics.ENDED.labels(end.lower(), caused_by.lower()).inc()
    _log.info(
        "rollout ended",
        rollout_id=record.rollout_id,
        group_id=record.group_id,
        end=end.lower(),
        reason=None if failure is None else failure.reason,
        reward=None if outcome.reward is None else outcome.reward.value,
    )
