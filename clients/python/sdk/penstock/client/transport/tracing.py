"""Tracing of requests to the services: the model call that is being answered, and its trace.

`session.calls()` makes the call that it yields the current one, for the task that receives it and for tasks that it
starts then. Requests to the services made there carry its ids, which are in the services' logs, and its trace, so that
the engine's work for the call is nested under the trainer's. With `opentelemetry-api` installed and a provider
configured by the program, each call that the gate traces is a span of the trainer too. Otherwise nothing is imported,
and without a trace nothing is done.
"""

from contextvars import ContextVar
from importlib import import_module
from typing import Any, Final, Protocol

TRACE_PARENT: Final = "traceparent"


class CallContext(Protocol):
    """The tracing data of the model call that a request is made for."""

    @property
    def call_id(self) -> str: ...
    @property
    def rollout_id(self) -> str: ...
    @property
    def group_id(self) -> str | None: ...
    @property
    def trace_parent(self) -> str: ...
    @property
    def ended(self) -> bool:
        """Whether no answer is needed any more."""


_current: ContextVar[CallContext | None] = ContextVar("penstock_model_call", default=None)


def taken(call: CallContext | None) -> None:
    """Makes `call` the current one of this task."""
    _current.set(call)


def metadata() -> tuple[tuple[str, str], ...]:
    """Returns the metadata of a request made now; empty where no call is being answered."""
    call = _current.get()
    if call is None or call.ended:
        return ()
    found = [
        ("x-request-id", call.call_id),
        ("x-penstock-call-id", call.call_id),
        ("x-penstock-rollout-id", call.rollout_id),
    ]
    if call.group_id:
        found.append(("x-penstock-group-id", call.group_id))
    if parent := call.trace_parent:
        found.append((TRACE_PARENT, parent))
    return tuple(found)


class CallSpan:
    """The trainer's span in a call's trace. `parent` is the trace context for work on it."""

    def __init__(self, parent: str, call_id: str, rollout_id: str, group_id: str | None) -> None:
        self.parent = parent
        self._span: Any = None
        if not parent:
            return
        try:
            trace = import_module("opentelemetry.trace")
            carrier = import_module("opentelemetry.trace.propagation.tracecontext").TraceContextTextMapPropagator()
        except ImportError:
            return
        facts = {"penstock.call_id": call_id, "penstock.rollout_id": rollout_id}
        if group_id:
            facts["penstock.group_id"] = group_id
        span = trace.get_tracer("penstock.client").start_span(
            "train", carrier.extract({TRACE_PARENT: parent}), kind=trace.SpanKind.CONSUMER, attributes=facts
        )
        if span.is_recording():
            self._span = span
            injected: dict[str, str] = {}
            carrier.inject(injected, trace.set_span_in_context(span))
            self.parent = injected.get(TRACE_PARENT, parent)

    def end(self, reason: str) -> None:
        """The call needs no answer any more."""
        span, self._span = self._span, None
        if span is not None:
            span.set_attribute("penstock.end", reason)
            span.end()
