"""A real OpenTelemetry collector, as far as traces go: OTLP over gRPC in, spans by name out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as rpc


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    """One span as it came over the wire; ids in hexadecimal, `parent_id` empty for a trace's first."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    facts: dict[str, Any]
    failed: bool


@dataclass
class Collector(rpc.TraceServiceServicer):
    """Keeps what it is sent."""

    address: str = ""
    spans: list[CollectedSpan] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    _news: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.metadata.append(dict(context.invocation_metadata()))
        for resource in request.resource_spans:
            service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
            for scope in resource.scope_spans:
                self.spans += [_read(service, span) for span in scope.spans]
        async with self._news:
            self._news.notify_all()
        return pb.ExportTraceServiceResponse()

    async def until(self, enough: Callable[[list[CollectedSpan]], bool]) -> list[CollectedSpan]:
        """The spans as soon as they are enough."""
        async with self._news:
            await self._news.wait_for(lambda: enough(self.spans))
        return self.spans


def _read(service: str, span: Any) -> CollectedSpan:
    facts = {item.key: _value(item.value) for item in span.attributes}
    return CollectedSpan(
        service, span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), facts,
        span.status.code == 2,
    )  # fmt: skip


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind or "")


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """A collector that listens on loopback."""
    server = grpc.aio.server()
    collector = Collector()
    rpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    collector.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(None)
