"""Errors of tools: what happened, and what to do next."""

from typing import Final

from penstock.client.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PenstockError,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unsupported,
)


class ToolError(PenstockError):
    """A tool cannot answer; `advice` says what to do next."""

    def __init__(self, message: str, *, reason: str, advice: str) -> None:
        super().__init__(message, reason=reason)
        self.advice = advice


_BY_REASON: Final = {
    "STACK_NOT_RUNNING": "ask the user to start the services: `penstock up`, with the same --state-dir",
    "ROLLOUT_UNKNOWN": "call `rollouts` for the ids; a rollout may have been deleted, or be of another namespace",
    "GROUP_UNKNOWN": "call `groups` for the ids",
    "CALL_UNKNOWN": "call `calls` for the calls of the rollout",
    "AGENT_UNKNOWN": "call `agents` for the names",
    "TRAJECTORY_ABSENT": "its gate has forgotten it, or it ended before its first call: `rollout` and `events` have the"
    " rest; exports of the run have its calls",
    "HOME_LOST": "its driver has lost its state: exports of the run may have it",
    "TASK_FILE": "correct the fields that the message names",
    "EVAL_UNREADABLE": "call `reports` for the directories that have results",
}
_BY_CLASS: Final = (
    (Unauthenticated, "ask the user: the token is missing or of earlier services; the message names its origin"),
    (PermissionDenied, "ask the user for a token with this role; do not look for one"),
    (Unavailable, "call `doctor`; if the services do not run, ask the user to start them with `penstock up`"),
    (DeadlineExceeded, "call `doctor`, then repeat the call with a narrower filter"),
    (ResourceExhausted, "wait, then repeat the call"),
    (Unsupported, "the services are older than this command: ask the user to upgrade them"),
    (NotFound, "check the id"),
    (FailedPrecondition, "the state does not allow it now: look at it with `rollout`"),
    (InvalidArgument, "correct the field that the message names"),
)


def advice_for(error: PenstockError) -> str:
    """Returns what an assistant does next after an error."""
    if isinstance(error, ToolError):
        return error.advice
    if error.reason in _BY_REASON:
        return _BY_REASON[error.reason]
    return next((advice for kind, advice in _BY_CLASS if isinstance(error, kind)), "call `doctor`")
