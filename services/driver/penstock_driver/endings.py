"""What the end of an agent, or an error of another service, means for its rollout: why it failed, and who caused it.

Invariants: what a service broke is never the agent's failure, so that it is not graded (R43, R74); where both may have
been the cause the agent has the benefit of the doubt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Final

from penstock_chassis.errors import DeadlineExceeded, PenstockError, ResourceExhausted, Unavailable
from penstock_driver.events import AgentEvent
from penstock_driver.ports import Exit, ExitReason, GateClosing
from penstock_driver.rollouts import Cause, Failure, Party, Phase, failed

_OF_THE_SOURCE: Final = ("INFERENCE_", "UPSTREAM_", "TOKENIZER_", "TEMPLATE_", "SOURCE_")
"""How the gate's reasons begin that are about whoever answers the model calls (docs/errors.md)."""

OF_THE_SANDBOX: Final = frozenset({"SANDBOX_LOST", "SANDBOX_NOT_READY", "SANDBOX_UNKNOWN"})
"""Reasons of errors that are about a whole sandbox and not about a file in it."""
_OF_THE_TASK: Final = frozenset({"CAPABILITY_MISSING", "IMAGE_NOT_ALLOWED", "USER_RESERVED"})
"""What a task asks of its sandbox and this backend, or this operator, does not give."""
_OF_THE_POLICY: Final = frozenset({"CONTEXT_EXCEEDED", "CALL_TOO_LARGE"})
"""Why a call got no answer, where the conversation is the cause: who fills it would choose not to be graded."""
_LEFT_BY_AN_AGENT: Final = frozenset(
    {"TREE_TOO_LARGE", "FILE_PERMISSION", "FILE_REPLACED", "PATH_TOO_LONG", "NOT_A_DIRECTORY", "SYMLINK_IN_PATH"}
)


@contextmanager
def of_the_agent() -> Iterator[None]:
    """For work on files in a sandbox in which an agent was: what stands in its way is that agent's own failure, so that
    none can leave its sandbox in a state in which it is tried again instead of graded (R72). RolloutFailed (AGENT)."""
    try:
        yield
    except PenstockError as error:
        if error.reason == "DISK_FULL":
            message = f"the agent left no room for the verifier's files: {error.message}"
            raise failed(Cause.AGENT, "DISK_FULL", message, Phase.VERIFYING) from error
        if error.reason in _LEFT_BY_AN_AGENT:
            message = f"what the agent left cannot be graded: {error.message}"
            raise failed(Cause.AGENT, "GRADING_BLOCKED", message, Phase.VERIFYING) from error
        raise


def judge(
    end: Exit,
    closing: GateClosing,
    done: AgentEvent | None,
    success_codes: Collection[int],
    phase: Phase,
    *,
    gate_was_away: bool = False,
) -> Failure | None:
    """What the agent's end means: None for a success (R59).

    An exhausted budget explains whatever the agent made of it, so it comes first; an answer that never came, and a gate
    that was away while the agent ran, explain a bad exit; an agent that itself says that it failed did, whatever its
    code. One whose last call got no answer has not done what it would have, also where it ends with a success code.
    """
    if end.reason is ExitReason.SANDBOX_LOST:
        message = end.message or "the sandbox was lost"
        return Failure(Cause.INFRASTRUCTURE, "SANDBOX_LOST", message, True, phase, part=Party.SANDBOX)
    if end.reason is ExitReason.START_FAILED:
        message = f"the agent could not be started: {end.message}"
        return Failure(Cause.INFRASTRUCTURE, "AGENT_START_FAILED", message, False, phase, part=Party.AGENT)
    if end.reason is ExitReason.KILLED:
        message = "somebody killed the agent"
        return Failure(Cause.INFRASTRUCTURE, "AGENT_KILLED", message, True, phase, part=Party.OPERATOR)
    if closing.exhausted_budget:
        return Failure(Cause.BUDGET, "BUDGET_EXHAUSTED", f"used up: {closing.exhausted_budget}", False, phase)
    if end.reason is ExitReason.TIMED_OUT:
        return Failure(Cause.TIMEOUT, "AGENT_TIMED_OUT", f"after {end.duration_s:.1f} s", False, phase)
    said_failed = done is not None and done.data.get("failed") is True
    ended_well = end.reason is ExitReason.EXITED and end.code in success_codes and not said_failed
    if ended_well and not closing.gave_up:
        return None
    # Where no call was ever answered the policy has said nothing that could have filled it.
    outgrown = closing.last_failure in _OF_THE_POLICY and closing.unanswered < closing.calls
    if closing.unanswered and not outgrown:
        why = f" (the last: {closing.last_failure})" if closing.last_failure else ""
        message = f"{closing.unanswered} of {closing.calls} model calls got no answer{why}, and the agent gave up"
        return Failure(Cause.MODEL, "MODEL_CALL_FAILED", message, not closing.is_final, phase)
    if gate_was_away:
        message = f"the gate could not be reached for a while, and the agent ended badly: {describe(end)}"
        return Failure(Cause.INFRASTRUCTURE, "GATE_INTERRUPTED", message, True, phase, part=Party.GATE)
    if closing.unanswered:
        message = (
            f"the conversation became too long ({closing.last_failure}), and the agent ended badly: {describe(end)}"
        )
        return Failure(Cause.AGENT, "CONTEXT_EXCEEDED", message, False, phase)
    if said_failed:
        return Failure(Cause.AGENT, "AGENT_REPORTED_FAILURE", f"reason: {done.data.get('reason')}", False, phase)  # type: ignore[union-attr]
    if end.reason is ExitReason.OOM:
        return Failure(Cause.AGENT, "AGENT_OUT_OF_MEMORY", "the kernel killed the agent for memory", False, phase)
    return Failure(Cause.AGENT, "AGENT_CRASHED", f"the agent ended badly: {describe(end)}", False, phase)


def failure_of(error: PenstockError, phase: Phase, part: Party) -> Failure:
    """An error of `part` as a failure: infrastructure, retriable if the error itself is of passing kind.

    What the gate says of the model's source is the source's doing. An installer's error says by itself where no retry
    helps, such as a package that does not exist.
    """
    if error.reason == "BUDGET_EXHAUSTED":  # the gate opens no rollout in a run that is used up
        return Failure(Cause.BUDGET, "BUDGET_EXHAUSTED", error.message, False, phase)
    if error.reason in _OF_THE_TASK:
        return Failure(Cause.TASK, error.reason, error.message, False, phase)
    passing = isinstance(error, Unavailable | ResourceExhausted | DeadlineExceeded) or error.reason == "SANDBOX_LOST"
    retriable = passing and error.metadata.get("permanent") != "true"
    if part is Party.GATE and error.reason.startswith(_OF_THE_SOURCE):
        part = Party.ENGINE
    return Failure(Cause.INFRASTRUCTURE, error.reason, error.message, retriable, phase, part)


def ended_by_its_agent(failure: Failure) -> Failure:
    """The failure of one whose sandbox was ended from within: its agent's own, and never tried again (R93)."""
    message = f"the agent, or what ran of its work, ended the sandbox: {failure.message}"
    return Failure(Cause.AGENT, "SANDBOX_ENDED_INSIDE", message, False, failure.phase)


def is_of_a_sandbox_at_work(failure: Failure) -> bool:
    """Whether a failure may come of what an agent did to its sandbox."""
    return failure.part is Party.SANDBOX and failure.phase >= Phase.RUNNING


def fault_of_the_driver(phase: Phase) -> Failure:
    """What ends a rollout when the driver itself has failed."""
    message = "a fault of the driver; its log has the details"
    return Failure(Cause.INFRASTRUCTURE, "INTERNAL", message, False, phase, part=Party.DRIVER)


def describe(end: Exit) -> str:
    """How a process ended, in a few words."""
    if end.reason is ExitReason.EXITED:
        return f"exit code {end.code}"
    if end.reason is ExitReason.SIGNALED:
        return f"signal {end.signal}"
    return f"{end.reason.value.lower().replace('_', ' ')}{': ' if end.message else ''}{end.message}"
