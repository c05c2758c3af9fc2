"""Classifies failures: why a rollout failed, and which component caused it, given an agent's exit or another service's
error.

Invariants: a failure of a service is never blamed on the agent, so it is not graded (R43, R74). Where either may be the
cause, the agent gets the benefit of the doubt.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Final

from penstock_chassis.errors import DeadlineExceeded, PenstockError, ResourceExhausted, Unavailable
from penstock_driver.agents.output_events import AgentEvent
from penstock_driver.domain.ports import CommandResult, Exit, ExitReason, GateClosing
from penstock_driver.domain.rollout import Cause, Component, Failure, Phase, failed

_OF_THE_SOURCE: Final = ("INFERENCE_", "UPSTREAM_", "TOKENIZER_", "TEMPLATE_", "SOURCE_")
"""Prefixes of the gate's reasons that concern the source of the model's answers (docs/errors.md)."""

OF_THE_SANDBOX: Final = frozenset({"SANDBOX_LOST", "SANDBOX_NOT_READY", "SANDBOX_UNKNOWN"})
"""Reasons of errors that concern a whole sandbox, not a file in it."""
_LINE_CHARS: Final = 200
"""Of a command's output in a failure's message."""
_GONE: Final = frozenset({"SANDBOX_LOST", "SANDBOX_UNKNOWN"})
"""No agent causes the second: somebody deleted the sandbox, its lease is over, or its host lost its disk."""
_OF_THE_TASK: Final = frozenset(
    {"CAPABILITY_MISSING", "COMPANION_FAILED", "HOST_NOT_ALLOWED", "IMAGE_NOT_ALLOWED", "USER_RESERVED"}
)
"""A task's demands on its sandbox that this backend or this operator does not meet, or a companion that fails."""
_OF_THE_POLICY: Final = frozenset({"CONTEXT_EXCEEDED", "CALL_TOO_LARGE", "SESSION_MESSAGE_LIMIT"})
"""Reasons why a call failed that the conversation causes: a policy could fill it to avoid being graded."""
_OF_THE_REQUEST: Final = frozenset(
    {
        "FIELD_INVALID",
        "IMAGE_INVALID",
        "IMAGE_LIMIT",
        "IMAGE_REMOTE",
        "IMAGE_UNSUPPORTED",
        "MEDIA_MISMATCH",
        "MESSAGES_EMPTY",
        "MODEL_NOT_ALLOWED",
        "REQUEST_FAILS",
        "TEMPLATE_REFUSED",
        "TEMPLATE_WITHOUT_TOOLS",
        "TEXT_NOT_UNICODE",
        "TOOL_INVALID",
        "UPSTREAM_ANSWER_TOO_LARGE",
        "UPSTREAM_REFUSED",
    }
)
"""Reasons why a call failed for good because of its own request. A policy can send one on purpose, then crash."""
_AT_ANY_TIME: Final = _OF_THE_POLICY | {"REQUEST_FAILS"}
"""Those that are the request's even where a retry may help. An upstream's refusal may be either."""
_LEFT_BY_AN_AGENT: Final = frozenset(
    {
        "FILE_PERMISSION",
        "FILE_REPLACED",
        "NOT_A_DIRECTORY",
        "NOT_A_FILE",
        "PATH_NOT_TEXT",
        "PATH_TOO_LONG",
        "SYMLINK_IN_PATH",
        "TAR_MEMBER_REFUSED",
        "TREE_TOO_LARGE",
    }
)
_AGAINST_A_FURTHER_START: Final = _LEFT_BY_AN_AGENT | {"DISK_FULL", "FILE_NOT_FOUND"}
"""In the same sandbox, the first start went well."""


def is_of_the_request(reason: str, retriable: bool) -> bool:
    """Whether a call failed because of its own request, not because the model source could not answer.

    `reason` and `retriable` are the gate's.
    """
    return reason in _AT_ANY_TIME or (reason in _OF_THE_REQUEST and not retriable)


@contextmanager
def of_the_agent() -> Iterator[None]:
    """Blame the agent for errors in work on files of its sandbox, so that no agent can leave its sandbox in a state
    that is retried instead of graded (R72). RolloutFailed (AGENT).
    """
    try:
        yield
    except PenstockError as error:
        if error.reason == "DISK_FULL":
            message = f"the agent's files leave no room for the verifier's files: {error.message}"
            raise failed(Cause.AGENT, "DISK_FULL", message, Phase.VERIFYING) from error
        if error.reason in _LEFT_BY_AN_AGENT:
            message = f"the agent's files cannot be graded: {error.message}"
            raise failed(Cause.AGENT, "GRADING_BLOCKED", message, Phase.VERIFYING) from error
        raise


def end_of_a_refused_start(error: PenstockError) -> Exit | None:
    """How an agent has ended whose further start fails for `error`, if the state of its files is the cause."""
    if error.reason not in _AGAINST_A_FURTHER_START:
        return None
    return Exit(ExitReason.START_FAILED, message=f"{error.reason}: {error.message}")


def classify_exit(
    end: Exit,
    closing: GateClosing,
    done: AgentEvent | None,
    success_codes: Collection[int],
    phase: Phase,
    *,
    gate_was_away: bool = False,
    is_further: bool = False,
) -> Failure | None:
    """Classify the agent's exit: None for a success (R59). `is_further`: it was started before, in the same sandbox.

    The order of the causes matters. What happened after the gate had closed the rollout, or lost it, is not the
    policy's doing. Neither is an exact replay that fails, whatever the agent does then. An exhausted budget comes
    before the rest: it explains any behaviour of the agent. Lost calls, or a gate that was unreachable while the agent
    ran, explain a bad exit. An agent that reports its own failure failed, whatever its exit code. An agent whose last
    call was lost is incomplete, even with a success code. A call that failed because of its own request, or since which
    the source has answered the agent, excuses nothing: a policy could send one to avoid being graded (decision 032).
    Neither does a further start that fails: what the first one needed, the agent itself has removed since.
    """
    if closing.lease_ended:
        message = "the gate closed the rollout: this driver was away for longer than the gate's driver_lease_s"
        return Failure(Cause.INFRASTRUCTURE, "GATE_LOST", message, True, phase, component=Component.GATE)
    if closing.is_unknown:
        message = "the gate does not know the rollout any more: it lost its disk, or somebody deleted it there"
        return Failure(Cause.INFRASTRUCTURE, "GATE_LOST", message, True, phase, component=Component.GATE)
    if end.reason is ExitReason.SANDBOX_LOST:
        message = end.message or "the sandbox was lost"
        return Failure(Cause.INFRASTRUCTURE, "SANDBOX_LOST", message, True, phase, component=Component.SANDBOX)
    if end.reason is ExitReason.START_FAILED and not is_further:
        message = f"the agent could not be started: {end.message}"
        return Failure(Cause.INFRASTRUCTURE, "AGENT_START_FAILED", message, False, phase, component=Component.AGENT)
    if end.reason is ExitReason.KILLED:
        message = "the agent was killed from outside"
        return Failure(Cause.INFRASTRUCTURE, "AGENT_KILLED", message, True, phase, component=Component.OPERATOR)
    if closing.diverged:
        message = f"the replay was to be exact, and the agent asked something else: {closing.diverged}"
        return Failure(Cause.INFRASTRUCTURE, "REPLAY_DIVERGED", message, False, phase, component=Component.AGENT)
    if closing.exhausted_budget:
        return Failure(Cause.BUDGET, "BUDGET_EXHAUSTED", f"used up: {closing.exhausted_budget}", False, phase)
    if end.reason is ExitReason.TIMED_OUT:
        return Failure(Cause.TIMEOUT, "AGENT_TIMED_OUT", f"after {end.duration_s:.1f} s", False, phase)
    if end.reason is ExitReason.START_FAILED:
        message = f"the agent left its sandbox so that it could not be started again: {end.message}"
        return Failure(Cause.AGENT, "AGENT_RESTART_FAILED", message, False, phase)
    reported_failed = done is not None and done.data.get("failed") is True
    ended_well = end.reason is ExitReason.EXITED and end.code in success_codes and not reported_failed
    # If no call was ever answered, the policy has produced nothing: whatever failed is not its doing.
    is_silent = closing.unanswered >= closing.calls > 0
    if ended_well and not (closing.gave_up and (closing.lost or is_silent)):
        return None
    if closing.lost or is_silent:
        why = f" (the last: {closing.last_failure})" if closing.last_failure else ""
        message = f"{closing.unanswered} of {closing.calls} model calls were not answered{why}, and the agent stopped"
        return Failure(Cause.MODEL, "MODEL_CALL_FAILED", message, not closing.is_final, phase)
    # The gate itself knows of an outage that this driver, which may have been away too, has not seen.
    if gate_was_away or closing.restored:
        message = f"the gate was unreachable for a while, and the agent failed: {describe(end)}"
        return Failure(Cause.INFRASTRUCTURE, "GATE_INTERRUPTED", message, True, phase, component=Component.GATE)
    if closing.refused and closing.last_failure in _OF_THE_POLICY:
        message = f"the conversation became too long ({closing.last_failure}), and the agent failed: {describe(end)}"
        return Failure(Cause.AGENT, "CONTEXT_EXCEEDED", message, False, phase)
    if reported_failed:
        return Failure(Cause.AGENT, "AGENT_REPORTED_FAILURE", f"reason: {done.data.get('reason')}", False, phase)  # type: ignore[union-attr]
    if end.reason is ExitReason.OOM:
        return Failure(
            Cause.AGENT,
            "AGENT_OUT_OF_MEMORY",
            "the kernel killed the agent because it exceeded its memory limit",
            False,
            phase,
        )
    asked = f"; {closing.refused} of its model calls were refused as invalid" if closing.refused else ""
    return Failure(Cause.AGENT, "AGENT_CRASHED", f"the agent failed: {describe(end)}{asked}", False, phase)


def check_failure(result: CommandResult, phase: Phase) -> Failure:
    """The failure of an agent's check command.

    Like an agent that is killed from outside, one that SIGKILL ended says nothing of the agent: another attempt may go
    well.
    """
    end = result.exit
    if end.reason is ExitReason.KILLED or end.signal == signal.SIGKILL:
        message = f"the agent's check command was killed from outside ({describe(end)})"
        return Failure(Cause.INFRASTRUCTURE, "AGENT_KILLED", message, True, phase, component=Component.OPERATOR)
    output = (result.stderr or result.stdout)[-500:].decode("utf-8", "replace")
    message = f"the agent's check command failed ({describe(end)}): {output}"
    return Failure(Cause.INFRASTRUCTURE, "AGENT_CHECK_FAILED", message, False, phase, component=Component.AGENT)


def failure_of(error: PenstockError, phase: Phase, component: Component) -> Failure:
    """Turn an error of `component` into a failure: of infrastructure, and retriable if the error itself is transient.

    An exhausted budget is a BUDGET failure; a demand of the task that is not met here is a TASK failure.

    Errors of the gate about the model source are blamed on the source. An installer's error states itself whether a
    retry can help: a package that does not exist stays missing.
    """
    if error.reason == "BUDGET_EXHAUSTED":  # the gate opens no rollout in a run whose budget is exhausted
        return Failure(Cause.BUDGET, "BUDGET_EXHAUSTED", error.message, False, phase)
    if error.reason in _OF_THE_TASK:
        return Failure(Cause.TASK, error.reason, error.message, False, phase)
    passing = isinstance(error, Unavailable | ResourceExhausted | DeadlineExceeded) or error.reason in _GONE
    retriable = passing and error.metadata.get("permanent") != "true"
    if component is Component.GATE and error.reason.startswith(_OF_THE_SOURCE):
        component = Component.ENGINE
    return Failure(Cause.INFRASTRUCTURE, error.reason, error.message, retriable, phase, component)


def ended_by_its_agent(failure: Failure) -> Failure:
    """The failure of a sandbox that was ended from inside: blamed on its agent, never retried (R93)."""
    message = f"the agent, or a process that it started, ended the sandbox: {failure.message}"
    return Failure(Cause.AGENT, "SANDBOX_ENDED_INSIDE", message, False, failure.phase)


def is_of_a_sandbox_at_work(failure: Failure) -> bool:
    """Whether a failure may result from what an agent did to its sandbox."""
    return failure.component is Component.SANDBOX and failure.phase >= Phase.RUNNING


def internal_failure(phase: Phase) -> Failure:
    """The failure of a rollout ended by an internal error of the driver."""
    message = "an internal error of the driver; its log has the details"
    return Failure(Cause.INFRASTRUCTURE, "INTERNAL", message, False, phase, component=Component.DRIVER)


def setup_failure(result: CommandResult, index: int, count: int) -> str:
    """Describe how the setup command `index` of `count` failed, with the last line that it wrote."""
    written = (result.stderr or result.stdout).decode("utf-8", "replace").split("\n")
    last = next((line.strip() for line in reversed(written) if line.strip()), "")
    shown = "".join(character for character in last if character.isprintable())[:_LINE_CHARS]
    return f"setup command {index + 1} of {count} failed: {describe(result.exit)}{': ' if shown else ''}{shown}"


def describe(end: Exit) -> str:
    """Describe in a few words how a process ended."""
    if end.reason is ExitReason.EXITED:
        return f"exit code {end.code}"
    if end.reason is ExitReason.SIGNALED:
        return f"signal {end.signal}"
    return f"{end.reason.value.lower().replace('_', ' ')}{': ' if end.message else ''}{end.message}"
