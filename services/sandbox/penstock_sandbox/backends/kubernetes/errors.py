"""Maps what the cluster answers to a closed set of our errors, with what to do.

Invariants: every exception of a call becomes a ``PenstockError``, ``Gone`` or ``Conflict``. The API server's own
message is passed on only where it says what an operator must change (a quota, a refused object, a missing right);
it is cut, and holds no credential: those are in headers, which are never passed on.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import structlog

from penstock_chassis.errors import FailedPrecondition, PenstockError, ResourceExhausted, Unavailable

_RETRY_AFTER_S: Final = 1.0
_QUOTA_RETRY_S: Final = 10.0
_LONGEST: Final = 300
_QUOTA: Final = "exceeded quota"

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class Gone(Exception):
    """There is no such object (404), or the requested version is too old (410)."""


class Conflict(Exception):
    """An object of this name exists (409)."""


class NotAccepted(FailedPrecondition):
    """The cluster does not accept the credentials (401); nothing was done."""


async def asked(what: str, call: Coroutine[Any, Any, T]) -> T:
    """Returns a call's answer. Raises Gone, Conflict or PenstockError."""
    from kubernetes_asyncio.client.exceptions import ApiException

    try:
        return await call
    except ApiException as error:
        raise translate(what, int(error.status or 0), error.body or error.reason, error.headers) from None
    except (OSError, TimeoutError, asyncio.InvalidStateError, ValueError) as error:
        raise _unanswered(what, error) from None
    except Exception as error:
        # The client passes on what its HTTP library raises.
        if type(error).__module__.partition(".")[0] in ("aiohttp", "aiohttp_retry", "pydantic_core"):
            raise _unanswered(what, error) from None
        raise


def _unanswered(what: str, error: Exception) -> PenstockError:
    _log.info("a call of the cluster failed", call=what, kind=type(error).__name__)
    return Unavailable(
        f"the cluster's API server did not answer ({type(error).__name__})",
        reason="PROVIDER_FAILED",
    )


def translate(what: str, status: int, body: object, headers: Any = None) -> Exception:
    """Returns our error for an answer of the API server."""
    message = _message(body)
    _log.info("a call of the cluster failed", call=what, status=status)
    if status in (404, 410):
        return Gone(what)
    if status == 409:
        return Conflict(what)
    if _QUOTA in message:
        return over_quota(message)
    if status == 401:
        return NotAccepted(
            "the cluster does not accept this service's credentials: correct kubernetes_config, or the pod's account",
            reason="BACKEND_UNAVAILABLE",
            metadata={"backend": "kubernetes"},
        )
    if status == 403:
        return _unavailable(
            f"the cluster does not allow this service to do this: give its account the Role of the guide ({message})"
        )
    if status == 429:
        return ResourceExhausted(
            "the cluster's API server asks for fewer requests",
            reason="PROVIDER_LIMIT",
            retry_after_s=_seconds(headers) or _RETRY_AFTER_S,
        )
    if 400 <= status < 500 and status not in (408, 425):
        return FailedPrecondition(
            f"the cluster refuses the object (status {status}): {message}",
            reason="BACKEND_UNAVAILABLE",
            metadata={"backend": "kubernetes"},
        )
    return Unavailable(
        f"the cluster's API server answered with status {status}",
        reason="PROVIDER_FAILED",
        retry_after_s=_seconds(headers),
    )


def over_quota(message: str) -> PenstockError:
    """Returns the error for a quota of the namespace that is used up."""
    return ResourceExhausted(
        f"the namespace's ResourceQuota is used up: delete sandboxes, or raise the quota ({message[:_LONGEST]})",
        reason="PROVIDER_LIMIT",
        metadata={"limit": "quota"},
        retry_after_s=_QUOTA_RETRY_S,
    )


def is_quota(message: str) -> bool:
    """Whether a controller's message is about a quota."""
    return _QUOTA in message


def _unavailable(message: str) -> PenstockError:
    return FailedPrecondition(message, reason="BACKEND_UNAVAILABLE", metadata={"backend": "kubernetes"})


def _message(body: object) -> str:
    """Returns the message of a Status object, on one line and cut."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else str(body or "")
    try:
        status = json.loads(text)
    except ValueError:
        return ""  # a proxy's page, which may repeat what was sent
    message = status.get("message", "") if isinstance(status, dict) else ""
    return " ".join(str(message).split())[:_LONGEST]


def _seconds(headers: Any) -> float | None:
    value = (headers or {}).get("Retry-After", "")
    return float(value) if str(value).isdigit() else None
