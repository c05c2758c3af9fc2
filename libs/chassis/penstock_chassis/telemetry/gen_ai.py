"""Attributes of spans by OpenTelemetry's conventions for generative AI: what dashboards of model calls read.

Names, models, counts and reasons; never a prompt, an answer, or a tool's arguments. The names are those of the pinned
`opentelemetry-semantic-conventions` (a test compares them), which services need not install.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock_chassis.telemetry import tracing

if TYPE_CHECKING:
    from opentelemetry.trace import Span

CHAT: Final = "chat"
GENERATE_CONTENT: Final = "generate_content"

OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
CONVERSATION: Final = "gen_ai.conversation.id"
REQUEST_MODEL: Final = "gen_ai.request.model"
RESPONSE_MODEL: Final = "gen_ai.response.model"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"


def note_request(span: Span | None, *, operation: str, provider: str, model: str, conversation: str = "") -> None:
    """Adds what is known before the answer; empty texts are left out."""
    if span is None or not span.is_recording():
        return
    found = {OPERATION: operation, PROVIDER: provider, REQUEST_MODEL: model, CONVERSATION: conversation}
    span.set_attributes({name: value for name, value in found.items() if value})


def note_response(
    span: Span | None,
    *,
    model: str,
    finish_reason: str,
    input_tokens: int,
    output_tokens: int,
    cached_tokens: int | None = None,
) -> None:
    """Adds what the answer says; an empty text, and None, are left out."""
    if span is None or not span.is_recording():
        return
    if model:
        span.set_attribute(RESPONSE_MODEL, model)
    if finish_reason:
        span.set_attribute(FINISH_REASONS, [finish_reason])
    if cached_tokens is not None:
        span.set_attribute(CACHED_TOKENS, cached_tokens)
    span.set_attributes({INPUT_TOKENS: input_tokens, OUTPUT_TOKENS: output_tokens})


def note_generation_here(
    *,
    provider: str,
    model: str,
    finish_reason: str,
    input_tokens: int,
    output_tokens: int,
    cached_tokens: int | None = None,
) -> None:
    """Adds a whole generation to the span of the RPC being served."""
    span = tracing.here()
    note_request(span, operation=CHAT, provider=provider, model=model)
    note_response(
        span,
        model=model,
        finish_reason=finish_reason,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=cached_tokens,
    )
