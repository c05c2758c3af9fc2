"""Error answers for agents. Internal reasons are not included (R8).

Each status is chosen for how SDKs react: the OpenAI SDKs and ai-sdk retry 408, 409, 429 and 5xx, so a permanent refusal
has none of those.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock_chassis.errors import PenstockError
from penstock_codec import CodecError
from penstock_interception.domain.calls import CallState
from penstock_interception.domain.state import Call
from penstock_interception.ingress.dialects.base import BadRequest, Problem
from penstock_interception.ingress.encodings import EncodingRefused

UNAUTHORISED = Problem(401, "invalid_api_key", "The API key is not valid for this address.")
UNKNOWN_ROUTE = Problem(404, "unknown_url", "There is no such route.")
SCOPE_MISSING = Problem(403, "scope_missing", "The API key does not allow this.")
TOO_LARGE = Problem(413, "request_too_large", "The request body is too large.")
TOO_SLOW = Problem(408, "request_timeout", "The request body was not received in time.", retry=True)
BROKEN_BODY = Problem(400, "invalid_body", "The request body does not match its headers.")
TOO_MANY_CONNECTIONS = Problem(
    429, "too_many_connections", "This rollout has too many connections.", retry=True, retry_after_s=1.0
)
INTERNAL = Problem(500, "internal_error", "The service failed.", retry=True)

_OWN_CONVERSATION = frozenset(
    {
        "TEMPLATE_REFUSED",
        "TEMPLATE_WITHOUT_TOOLS",
        "IMAGE_INVALID",
        "IMAGE_LIMIT",
        "IMAGE_REMOTE",
        "IMAGE_UNSUPPORTED",
        "TEXT_NOT_UNICODE",
        "MESSAGES_EMPTY",
    }
)


def of_provider_tools(names: Sequence[str]) -> Problem:
    """A request for provider tools, where the operator refuses them."""
    text = f"Hosted tools are not supported: {', '.join(name[:64] for name in names[:8])}. Switch them off."
    return Problem(400, "provider_tool_refused", text, "tools")


def of_model(name: str, known: Sequence[str]) -> Problem:
    """A request for a model that the rollout does not have."""
    text = f"There is no model {name[:64]!r} here. There are: {', '.join(name[:64] for name in known[:8])}."
    return Problem(404, "model_not_found", text, "model")


def of_encoding(error: EncodingRefused) -> Problem:
    """A body with an unsupported compression."""
    return Problem(415, "unsupported_encoding", str(error))


def of_bad_request(error: BadRequest) -> Problem:
    """A body that breaks the dialect's rules."""
    return Problem(400, error.code or "invalid_value", error.message, error.param)


def of_conversation(error: CodecError) -> Problem:
    """A conversation that the model's template cannot render."""
    return Problem(400, error.reason.lower(), str(error), "messages")


def of_refusal(error: PenstockError) -> Problem:
    """A call that was not admitted."""
    if error.reason == "BUDGET_EXHAUSTED":
        return _used_up("run" if error.metadata.get("budget", "").startswith("run.") else "rollout")
    if error.reason == "RATE_LIMIT":
        return Problem(429, "too_many_requests", error.message, retry=True, retry_after_s=error.retry_after_s)
    if error.reason == "CALL_LIMIT":
        return Problem(429, "too_many_calls", error.message, retry=True, retry_after_s=error.retry_after_s)
    if error.reason == "ROLLOUT_CLOSED":
        return UNAUTHORISED  # as its key is from now on
    if error.reason == "TOKENIZER_ABSENT":
        return UNKNOWN_ROUTE  # agents that count tokens then estimate
    if error.reason == "DRAINING":
        return Problem(503, "unavailable", error.message, retry=True, retry_after_s=error.retry_after_s)
    return INTERNAL


def of_ended(call: Call) -> Problem | None:
    """Returns why an ended call has no answer; None if it has one."""
    if call.state is CallState.DELIVERED:
        return None
    if call.state is CallState.EXPIRED:
        return Problem(504, "timeout", "The model did not answer in time.")
    if call.state is CallState.CANCELLED:
        return (
            UNAUTHORISED if call.end_reason == "ROLLOUT_CLOSED" else Problem(503, "cancelled", "Cancelled.", retry=True)
        )
    failure = call.failure
    if failure is None:
        return INTERNAL
    if failure.reason == "BUDGET_EXHAUSTED" and call.answerer is None and not failure.retriable:
        # The gate's own: what a trainer or a source fails may have a reason of the same name.
        return _used_up("run")
    if failure.reason == "CONTEXT_EXCEEDED":
        return Problem(400, "context_length_exceeded", failure.message, "messages")
    if failure.reason in _OWN_CONVERSATION:
        return Problem(400, failure.reason.lower(), failure.message, "messages")
    if failure.retriable:
        return Problem(503, "model_unavailable", "The model could not answer.", retry=True)
    return Problem(400, "model_refused", "The model cannot answer this request.")


def _used_up(whose: str) -> Problem:
    # Not 429, its usual status: SDKs would retry.
    return Problem(403, "budget_exhausted", f"The budget of this {whose} is used up.")
