"""The client's one family of exceptions, and the one table from gRPC statuses to them.

Every error that the client raises on purpose is a `PenstockError`. `reason` is the stable UPPER_SNAKE name that a
program may compare (the services' `ErrorInfo.reason`); the text is for people and says what to do where that is known.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Final

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

_DETAILS_KEY: Final = "grpc-status-details-bin"


@dataclass(frozen=True, slots=True)
class Violation:
    """One field of a request that does not hold: its path from the root of the request, and what is wrong with it."""

    field: str
    description: str


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What went wrong first: groups are for programs, a person wants one line."""
    first = group.exceptions[0]
    return first_of(first) if isinstance(first, BaseExceptionGroup) else first


class PenstockError(Exception):
    """Base of all errors of the client.

    Attributes:
        message: what happened, for people.
        reason: stable name in UPPER_SNAKE; `TRANSPORT_<CODE>` when the transport failed and no service spoke.
        metadata: small facts that the service added.
        violations: the fields that do not hold.
        retry_after: seconds after which a retry may help; None when that is not known.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str = "CLIENT",
        metadata: Mapping[str, str] | None = None,
        violations: tuple[Violation, ...] = (),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.metadata: Mapping[str, str] = MappingProxyType(dict(metadata or {}))
        self.violations = violations
        self.retry_after = retry_after

    def __str__(self) -> str:
        fields = "; ".join(f"{item.field}: {item.description}" for item in self.violations)
        return f"{self.message} ({fields})" if fields and fields not in self.message else self.message

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.message!r}, reason={self.reason!r})"


class InvalidArgument(PenstockError):
    """The request is wrong whatever the state; `violations` name the fields."""


class Unauthenticated(PenstockError):
    """No token was sent, or one that the service does not know."""


class PermissionDenied(PenstockError):
    """The token's role may not do this."""


class NotFound(PenstockError):
    """There is no such thing."""


class AlreadyExists(PenstockError):
    """The id is taken by something with other content."""


class FailedPrecondition(PenstockError):
    """Not possible in the present state; repeating the call alone will not help."""


class Aborted(PenstockError):
    """A concurrent change came first."""


class Cancelled(PenstockError):
    """The service says that the call was cancelled. A call that was dropped without a word is `Unavailable`."""


class ResourceExhausted(PenstockError):
    """A limit is reached; `retry_after` says when to try again where that helps."""


class Unavailable(PenstockError):
    """The service cannot be reached or cannot answer now."""


class DeadlineExceeded(PenstockError):
    """The time allowed for the call is over."""


class Unsupported(PenstockError):
    """The service or its backend cannot do it at all."""


class DataLoss(PenstockError):
    """Data arrived damaged."""


class Internal(PenstockError):
    """A fault of the service; its log has the details."""


class ConfigurationError(PenstockError):
    """The client itself is set up wrongly: an address, a token, a file."""


class SessionClosed(PenstockError):
    """A harness session was closed while somebody waited."""


class RolloutFailed(PenstockError):
    """A harness session's rollout failed by no doing of its policy: leave it out of baselines. `reason` says why."""


class SessionLost(PenstockError):
    """An Intercept session ended and could not be taken up again."""


class ResultRejected(PenstockError):
    """The gate did not take a result; the subclass says why."""

    retryable: ClassVar[bool] = False
    """Whether the call is still leased, so that another result may be given."""


class UnknownCall(ResultRejected):
    """The session has no such call."""


class AlreadyDelivered(ResultRejected):
    """Another result came first."""


class CallEnded(ResultRejected):
    """The call was cancelled or expired, or its rollout is closed."""


class NotLeased(ResultRejected):
    """The call is leased to another session now."""


class InvalidCompletion(ResultRejected):
    """The completion breaks a rule, which `violations` names."""

    retryable = True


class StalePolicy(ResultRejected):
    """The completion was sampled by weights that the rollout does not accept."""

    retryable = True


def wrong_type(argument: str, expected: str, given: object) -> InvalidArgument:
    """The refusal of an argument of another type, before anything is sent."""
    what = f"expected {expected}, not {type(given).__name__}"
    return InvalidArgument(f"{argument}: {what}", reason="ARGUMENT_TYPE", violations=(Violation(argument, what),))


_SEND_FAILED: Final = "Internal error from Core"

_CLASSES: Final[Mapping[grpc.StatusCode, type[PenstockError]]] = MappingProxyType(
    {
        grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
        grpc.StatusCode.OUT_OF_RANGE: InvalidArgument,
        grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
        grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
        grpc.StatusCode.NOT_FOUND: NotFound,
        grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
        grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
        grpc.StatusCode.ABORTED: Aborted,
        grpc.StatusCode.CANCELLED: Cancelled,
        grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
        grpc.StatusCode.UNAVAILABLE: Unavailable,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
        grpc.StatusCode.UNIMPLEMENTED: Unsupported,
        grpc.StatusCode.DATA_LOSS: DataLoss,
        grpc.StatusCode.INTERNAL: Internal,
        grpc.StatusCode.UNKNOWN: Internal,
    }
)


def from_rpc_error(error: grpc.aio.AioRpcError, peer: str) -> PenstockError:
    """The exception that a failed call stands for.

    Args:
        error: what grpc raised.
        peer: who was called, for people: `the driver at 127.0.0.1:7702`.
    """
    code = error.code()
    if code is grpc.StatusCode.INTERNAL and error.details() == _SEND_FAILED:
        # grpc.aio has forgotten what the service said; the next attempt hears it.
        return Unavailable(f"{peer} ended the stream while it was written to.", reason="STREAM_BROKEN")
    reason = f"TRANSPORT_{code.name}"
    message = error.details() or f"The call to {peer} failed with {code.name}."
    metadata: dict[str, str] = {}
    violations: tuple[Violation, ...] = ()
    retry_after: float | None = None
    for detail in _status(error).details:
        info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        with suppress(DecodeError):  # what it says without this detail is still worth hearing
            if detail.Is(info.DESCRIPTOR) and detail.Unpack(info):
                reason, metadata = info.reason, dict(info.metadata)
            elif detail.Is(bad.DESCRIPTOR) and detail.Unpack(bad):
                violations = tuple(Violation(item.field, item.description) for item in bad.field_violations)
            elif detail.Is(retry.DESCRIPTOR) and detail.Unpack(retry):
                retry_after = max(0.0, retry.retry_delay.ToNanoseconds() / 1e9)
    if reason == "TRANSPORT_UNAVAILABLE":
        message = f"Cannot reach {peer}. Is it running? `penstock up` starts all services. ({message})"
    elif reason == "TRANSPORT_CANCELLED":
        # Cancelling here ends as asyncio.CancelledError. It was the server's core, which drops calls under a flood.
        code = grpc.StatusCode.UNAVAILABLE
        message = (
            f"{peer[:1].upper()}{peer[1:]} dropped the call before it was answered: it is overloaded or shutting down."
            f" Try again; if it stays so, look at who connects to it. ({message})"
        )
    elif reason == "TRANSPORT_UNIMPLEMENTED":
        message = f"This is not implemented by {peer}: {message}"
    kind = _CLASSES.get(code, Internal)
    return kind(message, reason=reason, metadata=metadata, violations=violations, retry_after=retry_after)


def _status(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                break
    return status_pb2.Status()
