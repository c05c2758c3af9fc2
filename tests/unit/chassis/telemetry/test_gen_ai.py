"""Attributes of model calls, by the conventions that are pinned."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as pinned

from penstock_chassis.telemetry import gen_ai, tracing


def test_the_names_are_those_of_the_pinned_conventions() -> None:
    """A dashboard that knows the conventions finds every attribute, and none has two names."""
    ours = {value for name, value in vars(gen_ai).items() if name.isupper() and str(value).startswith("gen_ai.")}
    theirs = {value for name, value in vars(pinned).items() if name.startswith("GEN_AI_")}
    assert len(ours) == 9 and ours <= theirs
    operations = {item.value for item in pinned.GenAiOperationNameValues}
    assert {gen_ai.CHAT, gen_ai.GENERATE_CONTENT} <= operations


def test_only_what_is_known_is_noted() -> None:
    """An empty model, or a source that counts no cached tokens, is no attribute."""
    span = TracerProvider().get_tracer("t").start_span("model call")
    gen_ai.note_request(span, operation="chat", provider="penstock", model="")
    gen_ai.note_response(span, model="", finish_reason="", input_tokens=3, output_tokens=0)
    noted: Any = span
    assert dict(noted.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "penstock",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 0,
    }
    gen_ai.note_response(span, model="m", finish_reason="stop", input_tokens=3, output_tokens=1, cached_tokens=0)
    assert noted.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert noted.attributes["gen_ai.usage.cache_read.input_tokens"] == 0


def test_nothing_is_noted_where_tracing_is_off() -> None:
    """Services without traces pay a comparison."""
    assert tracing.here() is None
    gen_ai.note_generation_here(provider="numpy", model="m", finish_reason="stop", input_tokens=1, output_tokens=1)
