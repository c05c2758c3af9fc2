"""Text only: sends a conversation to an endpoint's `/chat/completions` and reads the returned message.

Only fields of that API are passed on; other sampling options are refused by name before.
"""

from __future__ import annotations

import time
from typing import Any

from penstock_codec.openai_chat import read_finish_reason, read_message, read_usage, write_messages, write_tool
from penstock_inference.domain.generation import Timings
from penstock_inference.engines.openai.answers import broken
from penstock_inference.engines.openai.wire import Endpoint
from penstock_inference.engines.optional_features import ChatAnswer, ChatRequest

CHAT_FIELDS = ("max_tokens", "temperature", "top_p", "stop", "seed", "presence_penalty", "frequency_penalty")


def chat_body(request: ChatRequest, model: str) -> dict[str, Any]:
    """The request body. Template options have the field name that servers with templates use."""
    s = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "messages": write_messages(request.messages),
        "temperature": s.temperature,
        "top_p": s.top_p,
    }
    if request.limited:
        body["max_tokens"] = s.max_tokens
    if s.stop:
        body["stop"] = list(s.stop)
    if s.seed is not None:
        body["seed"] = s.seed
    for name in ("presence_penalty", "frequency_penalty"):
        if value := getattr(s, name):
            body[name] = value
    if request.tools:
        body["tools"] = [write_tool(tool) for tool in request.tools]
    if request.template_options:
        body["chat_template_kwargs"] = dict(request.template_options)
    return body


async def ask(endpoint: Endpoint, body: dict[str, Any], queued_at: float, session_id: str = "") -> ChatAnswer:
    """Send it and return the answer. Raises PenstockError."""
    began = time.monotonic()
    answer = await endpoint.post("/chat/completions", body, session_id)
    try:
        choice = answer["choices"][0]
        return ChatAnswer(
            message=read_message(choice["message"]),
            finish_reason=read_finish_reason(choice.get("finish_reason")),
            usage=read_usage(answer.get("usage")),
            timings=Timings(began - queued_at, 0.0, time.monotonic() - began),
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError):
        raise broken("it is not a chat completion") from None
