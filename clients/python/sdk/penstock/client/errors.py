"""The client's one family of exceptions, and the one table from gRPC statuses to them.

Every error that the client raises on purpose is a `PenstockError`. `reason` is the stable UPPER_SNAKE name for programs
to compare (the services' `ErrorInfo.reason`); the text is for people, with advice where possible.
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
    """One invalid field of a request: its path from the root of the request, and what is wrong with it."""

    field: str
    description: str


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns a group's first error: groups are for programs, a person wants one line."""
    first = group.exceptions[0]
    return first_of(first) if isinstance(first, BaseExceptionGroup) else first


class PenstockError(Exception):
    """Base of all errors of the client.

    Attributes:
        message: what happened, for people.
        reason: stable name in UPPER_SNAKE; `TRANSPORT_<CODE>` when the transport failed and no service answered.
        metadata: small facts that the service added.
        violations: the invalid fields.
        retry_after: seconds after which a retry may help; None when unknown.
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
        fields = "; ".join(
            f"{item.field}: {item.description}"
            for item in self.violations
            if f"{item.field} {item.description}" not in self.message
        )
        return f"{self.message} ({fields})" if fields and fields not in self.message else self.message

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.message!r}, reason={self.reason!r})"


class InvalidArgument(PenstockError):
    """The request is invalid whatever the state; `violations` name the fields."""


class Unauthenticated(PenstockError):
    """No token was sent, or an unknown one."""


class PermissionDenied(PenstockError):
    """The token's role may not do this."""


class NotFound(PenstockError):
    """The resource does not exist."""


class AlreadyExists(PenstockError):
    """The id is in use by a resource with other content."""


class FailedPrecondition(PenstockError):
    """The resource's state does not allow this; repeating the call alone will not help."""


class Aborted(PenstockError):
    """A concurrent change came first."""


class Cancelled(PenstockError):
    """The service reports that the call was cancelled. A call dropped without a status is `Unavailable`."""


class ResourceExhausted(PenstockError):
    """A limit is reached; `retry_after` is set where a later retry can help."""


class Unavailable(PenstockError):
    """The service cannot be reached or cannot answer now."""


class DeadlineExceeded(PenstockError):
    """The call's deadline has passed."""


class Unsupported(PenstockError):
    """The service or its backend does not support it."""


class DataLoss(PenstockError):
    """Data arrived damaged."""


class Internal(PenstockError):
    """A fault of the service; its log has the details."""


class ConfigurationError(PenstockError):
    """The client itself is misconfigured: an address, a token, a file."""


class EnginesFailed(PenstockError):
    """Some of several engines did not do what all were asked. Repeat it: those that have it already do nothing.

    Attributes:
        failures: the errors, by the engine's name.
        in_force: the policy version of the base weights that each engine has now; None = it does not answer.
    """

    def __init__(
        self, failures: Mapping[str, PenstockError], in_force: Mapping[str, int | None], *, reason: str
    ) -> None:
        self.failures: Mapping[str, PenstockError] = MappingProxyType(dict(failures))
        self.in_force: Mapping[str, int | None] = MappingProxyType(dict(in_force))
        failed = "; ".join(f"{name}: {error.reason}: {error.message}" for name, error in self.failures.items())
        have = ", ".join(f"{name} {'?' if has is None else has}" for name, has in self.in_force.items())
        super().__init__(
            f"{len(self.failures)} of {len(self.in_force)} engines failed ({failed}). Policy versions in force: {have}",
            reason=reason,
        )


class SessionClosed(PenstockError):
    """A harness session was closed during a wait."""


class RolloutFailed(PenstockError):
    """A harness session's rollout failed through no fault of its policy: leave it out of baselines. See `reason`."""


class SessionLost(PenstockError):
    """An Intercept session ended and could not be resumed."""


class ResultRejected(PenstockError):
    """The gate rejected a result; the subclass gives the cause."""

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
    """The completion breaks a rule; see `violations`."""

    retryable = True


class StalePolicy(ResultRejected):
    """The completion was sampled by weights that the rollout does not accept."""

    retryable = True


def wrong_type(argument: str, expected: str, given: object) -> InvalidArgument:
    """Returns the error for an argument of the wrong type, before anything is sent."""
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


def is_broken(error: PenstockError) -> bool:
    """Whether a broken stream can be resumed: the service went away, or the stream was not read."""
    return isinstance(error, Unavailable) or error.reason == "READER_TOO_SLOW"


def from_rpc_error(error: grpc.aio.AioRpcError, peer: str) -> PenstockError:
    """Returns the exception for a failed call.

    Args:
        error: what grpc raised.
        peer: the called service, for people: `the driver at 127.0.0.1:7702`.
    """
    code = error.code()
    if code is grpc.StatusCode.INTERNAL and error.details() == _SEND_FAILED:
        # grpc.aio lost the service's status; the next attempt will get it.
        return Unavailable(f"{peer} ended the stream during a write.", reason="STREAM_BROKEN")
    reason = f"TRANSPORT_{code.name}"
    message = error.details() or f"The call to {peer} failed with {code.name}."
    metadata: dict[str, str] = {}
    violations: tuple[Violation, ...] = ()
    retry_after: float | None = None
    for detail in _status(error).details:
        info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        with suppress(DecodeError):  # the rest of the status is still useful without this detail
            if detail.Is(info.DESCRIPTOR) and detail.Unpack(info):
                reason, metadata = info.reason, dict(info.metadata)
            elif detail.Is(bad.DESCRIPTOR) and detail.Unpack(bad):
                violations = tuple(Violation(item.field, item.description) for item in bad.field_violations)
            elif detail.Is(retry.DESCRIPTOR) and detail.Unpack(retry):
                retry_after = max(0.0, retry.retry_delay.ToNanoseconds() / 1e9)
    if reason == "TRANSPORT_UNAVAILABLE":
        message = f"Cannot reach {peer}. Is it running? `penstock up` starts all services. ({message})"
    elif reason == "TRANSPORT_CANCELLED":
        # Cancelling here ends as asyncio.CancelledError. So it was the server's core, which drops calls under overload.
        code = grpc.StatusCode.UNAVAILABLE
        message = (
            f"{peer[:1].upper()}{peer[1:]} dropped the call before it was answered: it is overloaded or shutting down."
            f" Try again; if it continues, check which programs connect to it. ({message})"
        )
    elif reason == "TRANSPORT_UNIMPLEMENTED":
        message = f"This is not implemented by {peer}: {message}"
    kind = _CLASSES.get(code, Internal)
    return kind(message, reason=reason, metadata=metadata, violations=violations, retry_after=retry_after)


def of_code(code: int, message: str, *, reason: str, violations: tuple[Violation, ...] = ()) -> PenstockError:
    """Returns the exception for a failure that a message carries: one item's of many, by its google.rpc.Code."""
    kind = next((kind for status, kind in _CLASSES.items() if status.value[0] == code), Internal)
    return kind(message, reason=reason, violations=violations)


def _status(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                break
    return status_pb2.Status()
