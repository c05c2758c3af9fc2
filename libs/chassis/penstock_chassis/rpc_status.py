"""The one table between domain errors and gRPC statuses, in both directions.

A status carries `google.rpc` details: always `ErrorInfo{reason, domain: "penstock", metadata}`, `BadRequest` for field
violations, `RetryInfo` for a delay. Journal disk errors become UNAVAILABLE; any other exception that is not a
`PenstockError` becomes INTERNAL with a generic text and an incident id under which the log has the details (R8).

Details travel in trailing metadata, which peers bound at 8 KiB: longer texts are shortened, never the code or the
reason.
"""

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from penstock_chassis import errors
from penstock_chassis.errors import PenstockError, Violation
from penstock_chassis.journal import journal

DOMAIN: Final = "penstock"
"""The `domain` of each of our ErrorInfos."""

DETAILS_KEY: Final = "grpc-status-details-bin"
"""Trailing metadata key of a serialised `google.rpc.Status` (the gRPC convention for rich errors)."""

INCIDENT: Final = "incident_id"
"""Metadata key of an INTERNAL error's incident id: search the server's log for it."""

CODES: Final[Mapping[type[PenstockError], grpc.StatusCode]] = MappingProxyType(
    {
        errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
        errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
        errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
        errors.NotFound: grpc.StatusCode.NOT_FOUND,
        errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
        errors.FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
        errors.Aborted: grpc.StatusCode.ABORTED,
        errors.Cancelled: grpc.StatusCode.CANCELLED,
        errors.ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
        errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
        errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
        errors.Unsupported: grpc.StatusCode.UNIMPLEMENTED,
        errors.DataLoss: grpc.StatusCode.DATA_LOSS,
        errors.Internal: grpc.StatusCode.INTERNAL,
    }
)

_CLASSES: Final[Mapping[grpc.StatusCode, type[PenstockError]]] = MappingProxyType(
    {code: kind for kind, code in CODES.items()}
    | {grpc.StatusCode.OUT_OF_RANGE: errors.InvalidArgument, grpc.StatusCode.UNKNOWN: errors.Internal}
)

_STREAM_REFUSED: Final = "RST_STREAM with error code 7"
"""gRPC's text (seen in 1.85) for HTTP/2's REFUSED_STREAM."""

_SEND_FAILED: Final = "Internal error from Core"
"""grpc.aio's text (seen in 1.85) for a stream that the peer ended while a request was being sent."""

_MAX_MESSAGE = 1024
_MAX_TEXT = 256
_MAX_METADATA = 16
_MAX_DETAILS = 5 * 1024
"""Bytes of serialised details: with base64 (4/3) and the other trailers it stays under 8 KiB."""


@dataclass(frozen=True, slots=True)
class RpcStatus:
    """The end of a failed RPC: `details` is a serialised `google.rpc.Status`."""

    code: grpc.StatusCode
    message: str
    details: bytes

    @property
    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        """The trailer that carries the details."""
        return ((DETAILS_KEY, self.details),)


def expected(error: BaseException) -> PenstockError | None:
    """Returns the error that a caller may see, or None when the exception is a fault of ours.

    Journal disk errors are returned as such, so that the caller retries. A task group wraps its tasks' exceptions: a
    group of nothing but `PenstockError`s counts as its first.
    """
    if isinstance(error, PenstockError):
        return error
    if isinstance(error, BaseExceptionGroup):
        found = [expected(item) for item in error.exceptions]
        if all(item is not None for item in found):
            return found[0]
    return journal.refusal(error)


def unexpected() -> errors.Internal:
    """Returns the error that a caller sees for a fault of ours; log the exception under `metadata[INCIDENT]`."""
    incident = secrets.token_hex(16)
    return errors.Internal(
        f"Internal error. The server's log has the details under incident {incident}.",
        reason="INTERNAL",
        metadata={INCIDENT: incident},
    )


def to_status(error: PenstockError) -> RpcStatus:
    """Returns the status of an error; shortens texts so that the trailers stay under the peers' limit."""
    code = next(CODES[kind] for kind in type(error).__mro__ if kind in CODES)
    message = _shorten(error.message, _MAX_MESSAGE)
    status = status_pb2.Status(code=code.value[0], message=message)
    metadata = list(error.metadata.items())[:_MAX_METADATA]
    info = error_details_pb2.ErrorInfo(
        reason=error.reason,
        domain=DOMAIN,
        metadata={_shorten(key, 64): _shorten(value, _MAX_TEXT) for key, value in metadata},
    )
    if info.ByteSize() + status.ByteSize() > _MAX_DETAILS:
        info.metadata.clear()
    status.details.add().Pack(info)
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(min(int(error.retry_after_s * 1e9), 365 * 86_400 * 10**9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    if error.violations:
        status.details.add().Pack(_bad_request(error, room=_MAX_DETAILS - status.ByteSize()))
    return RpcStatus(code, message, status.SerializeToString())


def was_refused(error: grpc.aio.AioRpcError) -> bool:
    """Whether the server refused the call's stream, and so has not seen its request."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and _STREAM_REFUSED in (error.details() or "")


def broke_while_sending(error: grpc.aio.AioRpcError) -> bool:
    """Whether the peer ended the stream during a send: grpc.aio (seen with 1.85) then loses its status."""
    return error.code() is grpc.StatusCode.INTERNAL and error.details() == _SEND_FAILED


def from_rpc_error(error: grpc.aio.AioRpcError) -> PenstockError:
    """Returns the error of a failed call to another service, as it was raised there.

    A status without our details (from the transport or a proxy) gets the code's name as its reason, with the prefix
    `TRANSPORT_`.

    grpc.aio loses the peer's status when a send fails because the stream has ended; that becomes `STREAM_BROKEN`, and a
    retry gets the real reason. A stream that the service refused, having as many as it takes, becomes `STREAM_REFUSED`.
    """
    code = error.code()
    if broke_while_sending(error):
        return errors.Unavailable("The peer ended the stream during a write.", reason="STREAM_BROKEN")
    if was_refused(error):
        return errors.Unavailable("The service takes no more calls at the moment.", reason="STREAM_REFUSED")
    kind = _CLASSES.get(code, errors.Internal)
    message = error.details() or f"The call failed with {code.name}."
    reason = f"TRANSPORT_{code.name}"
    metadata: dict[str, str] = {}
    violations: list[Violation] = []
    retry_after_s: float | None = None
    for detail in _details(error):
        info, bad, retry = (
            error_details_pb2.ErrorInfo(),
            error_details_pb2.BadRequest(),
            error_details_pb2.RetryInfo(),
        )
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info):
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Is(bad.DESCRIPTOR) and detail.Unpack(bad):
            violations = [Violation(item.field, item.description) for item in bad.field_violations]
        elif detail.Is(retry.DESCRIPTOR) and detail.Unpack(retry):
            retry_after_s = max(0.0, retry.retry_delay.ToNanoseconds() / 1e9)
    try:
        return kind(message, reason=reason, metadata=metadata, violations=violations, retry_after_s=retry_after_s)
    except ValueError:
        # The peer is not ours and its reason has another shape.
        return kind(message, reason=f"TRANSPORT_{code.name}", metadata=metadata, violations=violations)


def _details(error: grpc.aio.AioRpcError) -> Iterable[Any]:
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                details: Iterable[Any] = status_pb2.Status.FromString(value).details
            except DecodeError:
                return ()
            return details
    return ()


def _bad_request(error: PenstockError, room: int) -> error_details_pb2.BadRequest:
    """Returns as many violations as fit into `room` bytes; the last one states how many were left out."""
    bad = error_details_pb2.BadRequest()
    room -= 128  # the envelope and the closing remark
    for number, item in enumerate(error.violations):
        bad.field_violations.add(
            field=_shorten(item.field, _MAX_TEXT), description=_shorten(item.description, _MAX_TEXT)
        )
        if bad.ByteSize() > room:
            del bad.field_violations[-1]
            bad.field_violations.add(field="...", description=f"and {len(error.violations) - number} more")
            break
    return bad


def _shorten(text: str, limit: int) -> str:
    """Cuts a text to at most `limit` bytes of UTF-8; lone surrogates, which have no encoding, become question marks."""
    encoded = text.encode("utf-8", errors="replace")
    if len(encoded) <= limit:
        return encoded.decode("utf-8")
    return encoded[: limit - 3].decode("utf-8", errors="ignore") + "..."
