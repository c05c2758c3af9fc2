"""How terminal episodes end where no verifier has the word: failures and errors, each by its cause (R78)."""

from __future__ import annotations

from penstock_chassis.errors import NotFound, PenstockError, Unavailable
from penstock_chassis.journal import refusal
from penstock_driver.endings import failure_of
from penstock_driver.rollouts import Cause, Failure, Outcome, Party, Phase, RolloutFailed
from penstock_driver.terminals.episodes import EpisodeCourse


def failure_of_step(error: BaseException, course: EpisodeCourse) -> Failure:
    """Why a step, and with it its episode, failed."""
    if isinstance(error, RolloutFailed):
        return error.failure
    phase = Phase.VERIFYING if course.answered else Phase.RUNNING
    if isinstance(error, NotFound) and error.reason == "SANDBOX_UNKNOWN":
        return Failure(Cause.INFRASTRUCTURE, "SANDBOX_LOST", "the sandbox is gone", True, phase, part=Party.SANDBOX)
    if isinstance(error, PenstockError):
        return failure_of(error, phase, Party.SANDBOX)
    return stopped(phase)


def fault(course: EpisodeCourse, error: BaseException) -> Outcome:
    """The end of an episode by a fault of the driver, or because its disk refused to record a step."""
    phase = Phase.VERIFYING if course.answered else Phase.RUNNING
    if refused := refusal(error):
        message = f"a step could not be recorded: {refused.message}"
        return Outcome(failure=Failure(Cause.INFRASTRUCTURE, "JOURNAL_FAILED", message, True, phase, part=Party.DRIVER))
    message = "a fault of the driver; its log has the details"
    return Outcome(failure=Failure(Cause.INFRASTRUCTURE, "INTERNAL", message, False, phase, part=Party.DRIVER))


def unreleased(what: str) -> Unavailable:
    """The error of what waits for the sandbox of an episode that is over."""
    message = f"{what}, and its sandbox could not be deleted yet: the driver goes on trying"
    return Unavailable(message, reason="TERMINAL_UNRELEASED", retry_after_s=1.0)


def draining() -> Unavailable:
    """The error of what a driver that stops takes no more."""
    return Unavailable("the driver is stopping", reason="DRAINING", retry_after_s=5.0)


def stopped(phase: Phase) -> Failure:
    """The failure of an episode that its driver ends when it stops."""
    return Failure(Cause.INFRASTRUCTURE, "DRIVER_STOPPED", "the driver was stopped", True, phase, part=Party.OPERATOR)


def ended_from_outside(cause: Cause, reason: str, message: str) -> Outcome:
    """The end of an episode that no step of its ended."""
    return Outcome(failure=Failure(cause, reason, message, False, Phase.RUNNING))
