"""What operators see of calls: each one counted, traced, and told in the log as it goes its way.

The gate tells of every step here. A call's trace is a span for the whole of it, below the agent's own where the agent
sent a trace context, with one span for each wait in the queue and one for each time that somebody answers; what that
one does is below the latter. Spans end with the call, or when the last connection of its agent is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import structlog

from penstock_chassis import tracing
from penstock_interception import metrics
from penstock_interception.calls import Call, CallState, tokens_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_PROMPT_TOKENS: Final = metrics.TOKENS.labels("prompt")
_COMPLETION_TOKENS: Final = metrics.TOKENS.labels("completion")
# Looked up for each call, and the library's own look-up takes as long as the rest of counting.
_calls: Final = lru_cache(metrics.CALLS.labels)
_answers: Final = lru_cache(metrics.ANSWER.labels)
_log = structlog.get_logger("penstock.calls")


@dataclass(slots=True)
class CallTrace:
    """The spans of a call that is traced. `step` is the one that waits now."""

    whole: Span
    step: Span | None = None


def admitted(call: Call) -> None:
    """A call came in."""
    if not tracing.is_on():
        return
    opening = call.rollout.opening
    whole = tracing.start(
        "model call",
        call.arrival.trace_parent,
        kind="SERVER",
        call_id=call.id,
        rollout_id=opening.rollout_id,
        group_id=opening.group_id or "",
        dialect=call.arrival.dialect.value,
        mode=opening.mode.value,
    )
    if whole is not None:
        call.trace = CallTrace(whole, tracing.start("queue", whole, call_id=call.id))


def moved(call: Call) -> None:
    """A call went between QUEUED, LEASED and DISPATCHED."""
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
    """A call has ended."""
    call_class = "" if call.prompt is None else call.prompt.call_class.value
    _calls(call_class, call.arrival.dialect.value, call.state.value).inc()
    prompt, completion = tokens_of(call)
    if call.state is CallState.DELIVERED:
        _PROMPT_TOKENS.inc(prompt)
        _COMPLETION_TOKENS.inc(completion)
        if call.answerer is not None and call.leased_at is not None and call.ended_at is not None:
            _answers(call.answerer.value).observe(max(0.0, call.ended_at - call.leased_at))
    _tell(call, prompt, completion)
    trace = call.trace
    if trace is not None:
        failure = "" if call.state is CallState.DELIVERED else call.end_reason or call.state.value
        tracing.finish(trace.step, failure)
        trace.step = None
        tracing.note(trace.whole, prompt_tokens=prompt, completion_tokens=completion, state=call.state.value)
        if call.attached <= 0:
            _close(call, trace)


def left(call: Call) -> None:
    """The last connection of the agent is gone: the answer was written, or nobody waits for it."""
    if call.trace is not None and call.state.terminal:
        _close(call, call.trace)


def trace_parent(call: Call) -> str:
    """For whoever answers the call."""
    return "" if call.trace is None else tracing.parent_of(call.trace.step)


def _close(call: Call, trace: CallTrace) -> None:
    call.trace = None
    tracing.finish(trace.whole, "" if call.state is CallState.DELIVERED else call.end_reason or call.state.value)


def _tell(call: Call, prompt: int, completion: int) -> None:
    """One line. What went well is for who looks for it: there are thousands, and a line costs a tenth of a call."""
    write = _log.debug if call.state is CallState.DELIVERED else _log.info
    opening = call.rollout.opening
    write(
        "call",
        call_id=call.id,
        rollout_id=opening.rollout_id,
        group_id=opening.group_id,
        trace_id=None if call.trace is None else tracing.trace_id_of(call.trace.whole),
        state=call.state.value,
        reason=call.end_reason,
        prompt_tokens=prompt,
        completion_tokens=completion,
        leases=call.leases,
        ms=round(((call.ended_at or call.received) - call.received) * 1e3, 1),
    )
