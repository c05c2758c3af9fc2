"""The errors of the domain: what went wrong, in terms a caller can act on.

Every error that a service means a caller to see is a `PenstockError`. It carries a stable `reason` (the name a client
programs against), a message for people, and, where they help, field violations and a delay to wait before a retry.
This module knows nothing of gRPC: `penstock_chassis.rpc_status` holds the one table from these classes to status codes.

A message and its metadata travel to the caller: they hold no credential, no path of the server and no text of an
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
    """One field of a request that does not hold.

    `field` is the path of the field from the root of the request, such as `task.verify[2].argv`; `description` says
    what is wrong and what would be right, without repeating a value that may be a secret.
    """

    field: str
    description: str


class PenstockError(Exception):
    """Base of all errors that callers may see; raise one of the subclasses.

    Args:
        message: one or two sentences for a person; says what to do where that is known.
        reason: stable name in UPPER_SNAKE, at most 63 characters; a `ValueError` otherwise.
        metadata: small facts that a program may read, such as the id of the thing that is meant.
        violations: the fields of the request that do not hold.
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
    """The request is wrong whatever the state; `violations` name the fields."""


class Unauthenticated(PenstockError):
    """The caller gave no credential, or one that nothing knows."""


class PermissionDenied(PenstockError):
    """The caller is known and may not do this."""


class NotFound(PenstockError):
    """The thing does not exist, or is not the caller's: the two look the same (R5)."""


class AlreadyExists(PenstockError):
    """The id is taken by something with other content."""


class FailedPrecondition(PenstockError):
    """The thing is in a state in which this cannot be done; repeating the call alone will not help."""


class Aborted(PenstockError):
    """A concurrent change came first; read again and retry the whole transaction."""


class Cancelled(PenstockError):
    """Somebody asked for the work to stop."""


class ResourceExhausted(PenstockError):
    """A limit in force is reached; `retry_after_s` says when to try again where that can help."""


class Unavailable(PenstockError):
    """The service, or one it needs, cannot answer now; the call may be repeated as it is."""


class DeadlineExceeded(PenstockError):
    """The time allowed for the call is over."""


class Unsupported(PenstockError):
    """This server or backend cannot do it at all; nothing was started."""


class DataLoss(PenstockError):
    """Stored or received data is damaged and cannot be recovered."""


class Internal(PenstockError):
    """A fault of the server; its details are in the server's log under the incident id, never in the message."""
