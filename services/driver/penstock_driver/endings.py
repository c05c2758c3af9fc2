"""What the end of an agent, or an error of another service, means for its rollout."""

from __future__ import annotations

from collections.abc import Collection

from penstock_chassis.errors import DeadlineExceeded, PenstockError, ResourceExhausted, Unavailable
from penstock_driver.events import AgentEvent
from penstock_driver.ports import Exit, ExitReason, GateClosing
from penstock_driver.rollouts import Cause, Failure, Phase


def judge(
    end: Exit, closing: GateClosing, done: AgentEvent | None, success_codes: Collection[int], phase: Phase
) -> Failure | None:
    """What the agent's end means: None for a success (R59).

    An exhausted budget explains whatever the agent made of it, so it comes first; an answer that never came explains
    a bad exit; an agent that itself says that it failed did, whatever its code.
    """
    if end.reason is ExitReason.SANDBOX_LOST:
        return Failure(Cause.INFRASTRUCTURE, "SANDBOX_LOST", end.message or "the sandbox was lost", True, phase)
    if end.reason is ExitReason.START_FAILED:
        message = f"the agent could not be started: {end.message}"
        return Failure(Cause.INFRASTRUCTURE, "AGENT_START_FAILED", message, False, phase)
    if end.reason is ExitReason.KILLED:
        return Failure(Cause.INFRASTRUCTURE, "AGENT_KILLED", "somebody killed the agent", True, phase)
    if closing.exhausted_budget:
        return Failure(Cause.BUDGET, "BUDGET_EXHAUSTED", f"used up: {closing.exhausted_budget}", False, phase)
    if end.reason is ExitReason.TIMED_OUT:
        return Failure(Cause.TIMEOUT, "AGENT_TIMED_OUT", f"after {end.duration_s:.1f} s", False, phase)
    said_failed = done is not None and done.data.get("failed") is True
    if end.reason is ExitReason.EXITED and end.code in success_codes and not said_failed:
        return None
    if closing.unanswered:
        why = f" (the last: {closing.last_failure})" if closing.last_failure else ""
        message = f"{closing.unanswered} of {closing.calls} model calls got no answer{why}, and the agent gave up"
        return Failure(Cause.MODEL, "MODEL_CALL_FAILED", message, not closing.is_final, phase)
    if said_failed:
        return Failure(Cause.AGENT, "AGENT_REPORTED_FAILURE", f"reason: {done.data.get('reason')}", False, phase)  # type: ignore[union-attr]
    if end.reason is ExitReason.OOM:
        return Failure(Cause.AGENT, "AGENT_OUT_OF_MEMORY", "the kernel killed the agent for memory", False, phase)
    return Failure(Cause.AGENT, "AGENT_CRASHED", f"the agent ended badly: {describe(end)}", False, phase)


def failure_of(error: PenstockError, phase: Phase) -> Failure:
    """An error of another service as a failure: infrastructure, retriable if the error itself is of passing kind.

    An installer's error says by itself where no retry helps, such as a package that does not exist.
    """
    if error.reason == "BUDGET_EXHAUSTED":  # the gate opens no rollout in a run that is used up
        return Failure(Cause.BUDGET, "BUDGET_EXHAUSTED", error.message, False, phase)
    passing = isinstance(error, Unavailable | ResourceExhausted | DeadlineExceeded) or error.reason == "SANDBOX_LOST"
    retriable = passing and error.metadata.get("permanent") != "true"
    return Failure(Cause.INFRASTRUCTURE, error.reason, error.message, retriable, phase)


def describe(end: Exit) -> str:
    """How a process ended, in a few words."""
    if end.reason is ExitReason.EXITED:
        return f"exit code {end.code}"
    if end.reason is ExitReason.SIGNALED:
        return f"signal {end.signal}"
    return f"{end.reason.value.lower().replace('_', ' ')}{': ' if end.message else ''}{end.message}"
