"""Maps what E2B's SDK raises to a closed set of our errors.

Invariants: any exception of an SDK call becomes a ``PenstockError``, ``Gone`` or ``Denied``, including invalid JSON,
parse errors and lost connections (the SDK passes them through). No text of the SDK is passed on, since a proxy may
repeat a request's headers in it: messages are our own words and, if there is one, a status (R8).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import structlog

from penstock_chassis.errors import (
    FailedPrecondition,
    ResourceExhausted,
    Unavailable,
)

_RETRY_AFTER_S = 5.0
_LAST_CHANCE_S = 2.0

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class Gone(Exception):
    """The sandbox does not exist any more; retries are useless."""


class Denied(Exception):
    """E2B refuses the request with a client error ``status``, which the caller must interpret."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


async def asked(what: str, call: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[None]] | None = None) -> T:
    """Returns the result of an SDK call. Raises PenstockError, Gone, Denied, or the SDK's CommandExitException.

    The SDK may swallow a cancellation that arrives with its response, and the canceller would wait forever: so the call
    has a task of its own, and the result of one cancelled too late goes to ``undo``. If that is given, the call first
    gets a moment to end by itself: cancelled half way, the SDK leaves unretrieved errors behind.
    """
    from e2b import CommandExitException

    task = asyncio.create_task(call, name=f"e2b-{what}")
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        if undo is not None:
            with suppress(asyncio.CancelledError):
                await asyncio.wait({task}, timeout=_LAST_CHANCE_S)
        task.cancel()
        (late,) = await asyncio.gather(task, return_exceptions=True)
        if undo is not None and not isinstance(late, BaseException):
            await undo(late)
        raise
    try:
        return task.result()
    except CommandExitException:
        raise
    except asyncio.CancelledError:
        # Not cancelled by us: the SDK raises this for a stream that was cut in some ways.
        raise _translate(what, ConnectionError()) from None
    except Exception as error:  # noqa: BLE001 - the SDK raises whatever parsing a proxy's page raises
        raise _translate(what, error) from None


def _translate(what: str, error: Exception) -> Exception:
    from e2b import exceptions as sdk

    kind = type(error).__name__
    status = getattr(error, "status_code", None)
    # Kind and status only: a message may hold a proxy's echo.
    _log.info("e2b call failed", call=what, kind=kind, status=status)
    if isinstance(error, sdk.SandboxNotFoundException | sdk.SandboxNotRunningException):
        return Gone(what)
    if isinstance(error, sdk.AuthenticationException):
        return FailedPrecondition(
            "E2B does not accept this service's API key: set e2b_api_key (or E2B_API_KEY) to a valid one",
            reason="BACKEND_UNAVAILABLE",
            metadata={"backend": "e2b"},
        )
    if isinstance(error, sdk.RateLimitException):
        return ResourceExhausted(
            "E2B's limit of requests or sandboxes is reached", reason="PROVIDER_LIMIT", retry_after_s=_RETRY_AFTER_S
        )
    if isinstance(error, sdk.NotEnoughSpaceException):
        return ResourceExhausted("the sandbox's disk is full", reason="DISK_FULL")
    if isinstance(error, sdk.InvalidArgumentException):
        return Denied(400)
    if isinstance(status, int) and 400 <= status < 500 and status not in (408, 425, 429):
        return Denied(status)
    status_text = f" (status {status})" if isinstance(status, int) else ""
    return Unavailable(
        f"E2B returned an unexpected answer{status_text}", reason="PROVIDER_FAILED", retry_after_s=_RETRY_AFTER_S
    )
