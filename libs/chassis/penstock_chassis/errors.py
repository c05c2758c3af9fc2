"""Domain errors, in terms a caller can act on.

Every error that a service means a caller to see is a `PenstockError`. It has a stable `reason` (the name a client
programs against), a message for people, and, where they help, field violations and a retry delay. This module does not
know gRPC: `penstock_chassis.rpc_status` has the one table from these classes to status codes.

A message and its metadata travel to the caller: they contain no credential, no path of the server and no text of an
internal exception (R8).
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

_REASON = re.compile(r"[A-Z][A-Z0-9_]{0,62}")


@dataclass(frozen=True, slots=True)
class Violation:
    """One invalid field of a request.

    `field` is the path of the field from the root of the request, such as `task.verify[2].argv`; `description` states
    what is wrong and what is valid, without repeating a value that may be a secret.
    """

    field: str
    description: str


class PenstockError(Exception):
    """Base of all errors that callers may see; raise one of the subclasses.

    Args:
        message: one or two sentences for a person, with advice where possible.
        reason: stable name in UPPER_SNAKE, at most 63 characters; a `ValueError` otherwise.
        metadata: small facts for programs, such as the id of the resource.
        violations: the invalid fields of the request.
        retry_after_s: seconds to wait before a retry, finite and not negative; None when a retry is not advised.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        metadata: Mapping[str, str] | None = None,
        violations: Iterable[Violation] = (),
        retry_after_s: float | None = None,
    ) -> None:
        if not _REASON.fullmatch(reason):
            raise ValueError(f"reason must be UPPER_SNAKE and at most 63 characters: {reason!r}")
        if retry_after_s is not None and not (math.isfinite(retry_after_s) and retry_after_s >= 0):
            raise ValueError(f"retry_after_s must be finite and not negative: {retry_after_s!r}")
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.metadata: Mapping[str, str] = MappingProxyType(dict(metadata or {}))
        self.violations: tuple[Violation, ...] = tuple(violations)
        self.retry_after_s = retry_after_s

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.message!r}, reason={self.reason!r})"


class InvalidArgument(PenstockError):
    """The request is invalid whatever the state; `violations` name the fields."""


class Unauthenticated(PenstockError):
    """The caller sent no credential, or an unknown one."""


class PermissionDenied(PenstockError):
    """The caller is authenticated but may not do this."""


class NotFound(PenstockError):
    """The resource does not exist or belongs to another caller: the two look the same (R5)."""


class AlreadyExists(PenstockError):
    """The id is in use by a resource with other content."""


class FailedPrecondition(PenstockError):
    """The resource's state does not allow this; repeating the call alone will not help."""


class Aborted(PenstockError):
    """A concurrent change came first; read again and retry the whole transaction."""


class Cancelled(PenstockError):
    """The work was cancelled on request."""


class ResourceExhausted(PenstockError):
    """A limit is reached; `retry_after_s` is set where a later retry can help."""


class Unavailable(PenstockError):
    """The service, or one it depends on, cannot answer now; the same call may be retried."""


class DeadlineExceeded(PenstockError):
    """The call's deadline has passed."""


class Unsupported(PenstockError):
    """This server or backend does not support the request; nothing was started."""


class DataLoss(PenstockError):
    """Stored or received data is damaged and cannot be recovered."""


class Internal(PenstockError):
    """A fault of the server; the details are in its log under the incident id, never in the message."""
