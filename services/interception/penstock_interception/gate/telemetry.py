"""Telemetry of calls: metrics, traces and one log line per call.

The gate reports every step here, and the interceptor the end of the agent's last connection. A call has one span for
its whole life, a child of the agent's span if the agent sent a trace context. Its children are one span per wait in the
queue and one per answer attempt; the answerer's own spans are below the latter. The whole span ends once the call has
ended and its agent's last connection is closed.
"""

from __future__ import annotations

from typing import Final

import structlog

from penstock_chassis.telemetry import gen_ai, tracing
from penstock_interception import cache, metrics
from penstock_interception.domain.calls import CallState, Dialect
from penstock_interception.domain.state import Call, CallTrace
from penstock_interception.domain.totals import tokens_of

_PROMPT_TOKENS: Final = metrics.TOKENS.labels("prompt")
_COMPLETION_TOKENS: Final = metrics.TOKENS.labels("completion")
# Cached: the library's own label lookup takes as long as the rest of the counting.
_calls: Final = cache.LABELS(metrics.CALLS.labels)
_answers: Final = cache.LABELS(metrics.ANSWER.labels)
_log = structlog.get_logger("penstock.calls")


def admitted(call: Call) -> None:
    """Starts the trace of a new call."""
    if not tracing.is_on():
        return
    spec = call.rollout.spec
    whole = tracing.start(
        "model call",
        call.request.trace_parent,
        kind="SERVER",
        call_id=call.id,
        rollout_id=spec.rollout_id,
        group_id=spec.group_id or "",
        dialect=call.request.dialect.value,
        mode=spec.mode.value,
    )
    if whole is not None:
        is_google = call.request.dialect is Dialect.GENERATE_CONTENT
        gen_ai.note_request(
            whole,
            operation=gen_ai.GENERATE_CONTENT if is_google else gen_ai.CHAT,
            provider="penstock",
            model=call.request.model_requested,
            conversation=spec.rollout_id,
        )
        call.trace = CallTrace(whole, tracing.start("queue", whole, call_id=call.id))


def moved(call: Call) -> None:
    """A call moved between QUEUED, LEASED and DISPATCHED."""
    if call.state is not CallState.QUEUED:
        if call.leases == 1 and call.leased_at is not None:
            metrics.QUEUE_WAIT.observe(max(0.0, call.leased_at - call.received))
        else:
            metrics.REDELIVERIES.inc()
    trace = call.trace
    if trace is None:
        return
    tracing.finish(trace.step)
    if call.state is CallState.QUEUED:
        trace.step = tracing.start("queue", trace.whole, call_id=call.id)
    else:
        by = "trainer" if call.state is CallState.LEASED else "source"
        trace.step = tracing.start("answer", trace.whole, kind="CLIENT", call_id=call.id, by=by, attempt=call.leases)


def ended(call: Call) -> None:
    """Counts, logs and traces the end of a call."""
    call_class = "" if call.prompt is None else call.prompt.call_class.value
    _calls(call_class, call.request.dialect.value, call.state.value).inc()
    prompt, completion = tokens_of(call)
    if call.state is CallState.DELIVERED:
        _PROMPT_TOKENS.inc(prompt)
        _COMPLETION_TOKENS.inc(completion)
        if call.answerer is not None and call.leased_at is not None and call.ended_at is not None:
            _answers(call.answerer.value).observe(max(0.0, call.ended_at - call.leased_at))
    _log_ended(call, prompt, completion)
    trace = call.trace
    if trace is not None:
        failure = "" if call.state is CallState.DELIVERED else call.end_reason or call.state.value
        tracing.finish(trace.step, failure)
        trace.step = None
        tracing.note(trace.whole, prompt_tokens=prompt, completion_tokens=completion, state=call.state.value)
        if call.state is CallState.DELIVERED and (done := call.completion) is not None:
            gen_ai.note_response(
                trace.whole,
                model=done.model,
                finish_reason="" if done.finish_reason is None else done.finish_reason.value,
                input_tokens=prompt,
                output_tokens=completion,
                cached_tokens=None if done.usage is None else done.usage.cached_tokens,
            )
        if call.attached <= 0:
            _close(call, trace)


def left(call: Call) -> None:
    """The agent's last connection is closed: the answer was written, or the agent hung up."""
    if call.trace is not None and call.state.terminal:
        _close(call, call.trace)


def trace_parent(call: Call) -> str:
    """The trace context to pass to the call's answerer; "" if the call is not traced."""
    return "" if call.trace is None else tracing.parent_of(call.trace.step)


def _close(call: Call, trace: CallTrace) -> None:
    call.trace = None
    tracing.finish(trace.whole, "" if call.state is CallState.DELIVERED else call.end_reason or call.state.value)


def _log_ended(call: Call, prompt: int, completion: int) -> None:
    """Logs one line. Success is logged at debug level only: a line costs a tenth of a call, and there are thousands."""
    write = _log.debug if call.state is CallState.DELIVERED else _log.info
    spec = call.rollout.spec
    write(
        "call",
        call_id=call.id,
        rollout_id=spec.rollout_id,
        group_id=spec.group_id,
        trace_id=None if call.trace is None else tracing.trace_id_of(call.trace.whole),
        state=call.state.value,
        reason=call.end_reason,
        prompt_tokens=prompt,
        completion_tokens=completion,
        leases=call.leases,
        ms=round(((call.ended_at or call.received) - call.received) * 1e3, 1),
    )
