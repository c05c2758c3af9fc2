"""Correlates work across services: its ids on every log line, and its trace.

Ids (`rollout_id`, `group_id`, `call_id`, `sandbox_id`) are bound with `working_for`; `channel` sends the bound ids with
each RPC, and the called service's interceptor binds them there. So one id finds a piece of work in every service's log.

Traces are OpenTelemetry's, sent by OTLP where `otlp_endpoint` is set, and need the extra `otel`. Work is traced if it
arrived with a sampled trace context, or if a service begins a trace with `start`. Spans carry ids, states and counts,
never text of an agent or a model. Where tracing is off nothing of it is imported, and the check costs one comparison.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import urlsplit

import structlog

from penstock_chassis.errors import FailedPrecondition, InvalidArgument
from penstock_chassis.telemetry import bound
from penstock_chassis.tls import read_pem

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

TRACE_PARENT: Final = "traceparent"
"""W3C Trace Context's header, in HTTP and in gRPC metadata."""

IDS: Final = ("rollout_id", "group_id", "call_id", "sandbox_id")
"""The ids that work may be bound to."""

Facts: TypeAlias = str | int | float | bool

_HEADERS: Final = {f"x-penstock-{name.replace('_', '-')}": name for name in IDS}
_HEADER_OF: Final = {name: header for header, name in _HEADERS.items()}
_ID: Final = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_PARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")
_EXPORT_S: Final = 5.0

_log = structlog.get_logger(__name__)
_nothing: Final = nullcontext()
_tracer: Tracer | None = None


def working_for(**ids: str | None) -> None:
    """Binds these ids to this task and the tasks it starts; None unbinds."""
    bound.bind(**{name: value or None for name, value in ids.items()})


def handed_on(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the metadata of a call to another service: the ids of `facts`, and the current span."""
    metadata = [
        (header, str(facts[name]))
        for name, header in _HEADER_OF.items()
        if name in facts and _ID.fullmatch(facts[name])
    ]
    if parent := parent_of(here()):
        metadata.append((TRACE_PARENT, parent))
    return metadata


def taken_up(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Binds the ids that a caller sent, and its trace's; returns the trace context, or an empty string."""
    parent = ""
    found: dict[str, str] = {}
    for key, value in metadata:
        if key == TRACE_PARENT and (parts := _PARENT.fullmatch(str(value))):
            parent, found["trace_id"] = str(value), parts[1]
        elif (name := _HEADERS.get(key)) is not None and _ID.fullmatch(str(value)):
            found[name] = str(value)
    if found:
        bound.bind(**found)
    return parent


# Spans ---------------------------------------------------------------------------------------------------------------


def is_on() -> bool:
    """Whether spans go anywhere."""
    return _tracer is not None


def start(name: str, parent: str | Span | None = None, *, kind: str = "INTERNAL", **facts: Facts) -> Span | None:
    """Starts a span, to be ended with `finish`; None where tracing is off.

    Args:
        name: low-cardinality; ids belong into `facts`.
        parent: a span, or a trace context received from a caller; None begins a trace.
        kind: of OpenTelemetry's SpanKind.
        facts: ids, states, counts: they become attributes `penstock.<name>`.
    """
    if _tracer is None:
        return None
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    above = Context()
    if isinstance(parent, str):
        if parent:
            above = TraceContextTextMapPropagator().extract({TRACE_PARENT: parent}, above)
    elif parent is not None:
        above = trace.set_span_in_context(parent, above)
    span = _tracer.start_span(name, above, trace.SpanKind[kind])
    note(span, **facts)
    return span


def note(span: Span | None, **facts: Facts) -> None:
    if span is not None and span.is_recording():
        span.set_attributes({f"penstock.{name}": value for name, value in facts.items() if value != ""})


def here() -> Span | None:
    """Returns the span of the RPC being served; None where tracing is off."""
    if _tracer is None:
        return None
    from opentelemetry.trace import get_current_span

    return get_current_span()


def note_here(**facts: Facts) -> None:
    """Adds facts to the span of the RPC being served."""
    note(here(), **facts)


def finish(span: Span | None, failure: str = "", **facts: Facts) -> None:
    """Ends a span; `failure` is the stable reason why it failed."""
    if span is None:
        return
    note(span, **facts)
    if failure:
        from opentelemetry.trace import StatusCode

        span.set_status(StatusCode.ERROR, failure)
    span.end()


def parent_of(span: Span | None) -> str:
    """Returns the trace context for work that continues a span; empty where that is not traced."""
    context = span.get_span_context() if span is not None else None
    if context is None or not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def trace_id_of(span: Span | None) -> str | None:
    """Returns a span's trace id, as logs have it."""
    context = span.get_span_context() if span is not None else None
    return f"{context.trace_id:032x}" if context is not None and context.is_valid else None


def using(span: Span | None) -> AbstractContextManager[object]:
    """Makes this span the parent of calls to other services inside."""
    if span is None:
        return _nothing
    from opentelemetry.trace import use_span

    return use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False)


def served(method: str, parent: str) -> AbstractContextManager[object]:
    """Wraps the handler of an RPC whose caller sent a trace context."""
    return _nothing if _tracer is None or not parent else _served(method, parent)


@contextmanager
def _served(method: str, parent: str) -> Iterator[None]:
    facts = bound.facts()
    ids = {name: str(facts[name]) for name in IDS if name in facts}
    span = start(method, parent, kind="SERVER", **ids)
    try:
        with using(span):
            yield
    except BaseException as error:
        finish(span, getattr(error, "reason", type(error).__name__))
        raise
    finish(span)


# Export ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def exporting(
    service: str, endpoint: str, *, ratio: float = 1.0, token: str | None = None, ca: Path | None = None
) -> AsyncIterator[None]:
    """Exports this process's spans to `endpoint` by OTLP over gRPC while open; an empty endpoint traces nothing.

    Args:
        service: the service's short name.
        endpoint: `http://host:4317`, or `https://` for TLS.
        ratio: share of the traces begun here that are kept; for others the sender decided.
        token: sent to this endpoint as bearer token.
        ca: PEM file that verifies the certificate of an `https://` endpoint; None = the system's CAs.

    Raises:
        FailedPrecondition: `OTEL_MISSING`.
        InvalidArgument: `TOKEN_IN_CLEAR`; `TLS_FILE` when `ca` cannot be read.
    """
    global _tracer
    if not endpoint:
        yield
        return
    provider = _provider(service, endpoint, ratio, token, ca)
    _tracer = provider.get_tracer("penstock")
    try:
        yield
    finally:
        _tracer = None
        # Sends the remaining spans; it waits for the network, so not on the loop.
        await asyncio.to_thread(provider.shutdown)


def _provider(service: str, endpoint: str, ratio: float, token: str | None, ca: Path | None) -> TracerProvider:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ImportError:
        raise FailedPrecondition(
            "otlp_endpoint is set, but packages for traces are not installed: pip install 'penstock-chassis[otel]'",
            reason="OTEL_MISSING",
        ) from None
    import grpc

    where = urlsplit(endpoint)
    if token is not None and where.scheme != "https" and where.hostname not in ("127.0.0.1", "::1", "localhost"):
        raise InvalidArgument(
            f"otlp_token must not be sent in cleartext to {where.hostname}: use https, or a collector on this machine.",
            reason="TOKEN_IN_CLEAR",
        )
    _listen_to_sdk()
    exporter = OTLPSpanExporter(
        endpoint=endpoint,
        insecure=where.scheme != "https",
        credentials=grpc.ssl_channel_credentials(read_pem("otlp_ca", ca)) if ca is not None else None,
        headers=() if token is None else (("authorization", f"Bearer {token}"),),
        timeout=_EXPORT_S,
    )
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(ratio)),
        resource=Resource.create({"service.name": f"penstock-{service}"}),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class _ToOurLog(logging.Handler):
    """Forwards the SDK's messages (a collector that does not answer) to our log."""

    def emit(self, record: logging.LogRecord) -> None:
        _log.warning("traces", detail=record.getMessage()[:500])


def _listen_to_sdk() -> None:
    logger = logging.getLogger("opentelemetry")
    if not any(isinstance(handler, _ToOurLog) for handler in logger.handlers):
        logger.addHandler(_ToOurLog(logging.WARNING))
        logger.propagate = False
