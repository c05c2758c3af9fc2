"""What a request to a service is part of: the model call that is being answered, and its trace.

`session.calls()` makes the call that it hands out the current one, for the task that takes it and for those that this
one starts then. Requests to the services made there carry its ids, which are in the services' logs, and its trace, so
that what the engine does for the call stands below what the trainer does for it. With `opentelemetry-api` installed and
a provider set up by the program, each call that the gate traces is a span of the trainer too; nothing is imported
otherwise, and without a trace nothing of it is done.
"""

from contextvars import ContextVar
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from penstock.client.calls import ModelCall

TRACE_PARENT: Final = "traceparent"

_current: ContextVar["ModelCall | None"] = ContextVar("penstock_model_call", default=None)


def taken(call: "ModelCall | None") -> None:
    """From now on this task works for `call`."""
    _current.set(call)


def metadata() -> tuple[tuple[str, str], ...]:
    """Of a request made now; empty where no call is being answered."""
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
    """The trainer's part of a call's trace. `parent` is the trace context for whoever works for it."""

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
            told: dict[str, str] = {}
            carrier.inject(told, trace.set_span_in_context(span))
            self.parent = told.get(TRACE_PARENT, parent)

    def end(self, reason: str) -> None:
        """The call needs no answer any more."""
        span, self._span = self._span, None
        if span is not None:
            span.set_attribute("penstock.end", reason)
            span.end()
