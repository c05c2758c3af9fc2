"""The ends of terminal episodes that the verifier does not decide: failures and errors, by cause (R78)."""

from __future__ import annotations

from penstock_chassis.errors import NotFound, PenstockError, Unavailable
from penstock_chassis.journal import refusal
from penstock_driver.domain.failures import failure_of
from penstock_driver.domain.rollout import Cause, Component, Failure, Outcome, Phase, RolloutFailed
from penstock_driver.domain.terminal_episode import EpisodeProgress


def failure_of_step(error: BaseException, course: EpisodeProgress) -> Failure:
    """The failure of a step, and with it of its episode."""
    if isinstance(error, RolloutFailed):
        return error.failure
    phase = Phase.VERIFYING if course.answered else Phase.RUNNING
    if isinstance(error, NotFound) and error.reason == "SANDBOX_UNKNOWN":
        return Failure(
            Cause.INFRASTRUCTURE, "SANDBOX_LOST", "the sandbox is gone", True, phase, component=Component.SANDBOX
        )
    if isinstance(error, PenstockError):
        return failure_of(error, phase, Component.SANDBOX)
    return stopped(phase)


def fault(course: EpisodeProgress, error: BaseException) -> Outcome:
    """The outcome of an episode that an internal error, or a full disk that refused a step, ended."""
    phase = Phase.VERIFYING if course.answered else Phase.RUNNING
    if refused := refusal(error):
        message = f"a step could not be recorded: {refused.message}"
        return Outcome(
            failure=Failure(Cause.INFRASTRUCTURE, "JOURNAL_FAILED", message, True, phase, component=Component.DRIVER)
        )
    message = "an internal error of the driver; its log has the details"
    return Outcome(failure=Failure(Cause.INFRASTRUCTURE, "INTERNAL", message, False, phase, component=Component.DRIVER))


def unreleased(what: str) -> Unavailable:
    """The error for callers that wait for the sandbox of an ended episode."""
    message = f"{what}, and its sandbox is not deleted yet: the driver keeps retrying"
    return Unavailable(message, reason="TERMINAL_UNRELEASED", retry_after_s=1.0)


def draining() -> Unavailable:
    """The error for new work at a driver that is stopping."""
    return Unavailable("the driver is stopping", reason="DRAINING", retry_after_s=5.0)


def left() -> Unavailable:
    """The error for callers that wait for a step which the driver's next process goes on with."""
    message = "the driver stops, and its next process goes on with the episode: repeat the step there"
    return Unavailable(message, reason="DRIVER_STOPPING", retry_after_s=1.0)


def stopped(phase: Phase) -> Failure:
    """The failure of an episode that its driver ends when it stops."""
    return Failure(
        Cause.INFRASTRUCTURE, "DRIVER_STOPPED", "the driver was stopped", True, phase, component=Component.OPERATOR
    )


def ended_from_outside(cause: Cause, reason: str, message: str) -> Outcome:
    """The outcome of an episode that none of its own steps ended."""
    return Outcome(failure=Failure(cause, reason, message, False, Phase.RUNNING))
