"""What happens to a conversation on its way through a client: one function for each dialect.

Each turns the messages that a client means into the messages that the service reads after they went over that dialect's
wire. To put a dialect under the suite, add its function to DIALECTS.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from penstock_codec.chat import Message
from penstock_interception.ingress.chat import ChatCompletions
from penstock_interception.ingress.dialect import Ask, Route

Dialect: TypeAlias = Callable[[Sequence[Message]], Sequence[Message]]


def over_chat_completions(messages: Sequence[Message]) -> Sequence[Message]:
    """As an OpenAI SDK writes the conversation into a body, and the ingress reads it."""
    written: list[dict[str, Any]] = []
    for message in messages:
        item: dict[str, Any] = {"role": message.role.value, "content": message.text}
        if message.tool_calls:
            item["content"] = message.text or None
            item["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
                for call in message.tool_calls
            ]
        if message.reasoning:
            item["reasoning_content"] = message.reasoning
        for result in message.tool_results:
            item["tool_call_id"] = result.call_id
        written.append(item)
    body = json.dumps({"model": "m", "messages": written}).encode()
    return ChatCompletions().parse(body, Route(Ask.COMPLETION)).messages


DIALECTS: Final[Mapping[str, Dialect]] = {
    "domain": lambda messages: messages,
    "chat_completions": over_chat_completions,
}
"""The dialects by name; "domain" is none at all."""
