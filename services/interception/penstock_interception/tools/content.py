"""What a tool gave back, as an agent reads it: MCP's content blocks, and structured content beside them."""

from __future__ import annotations

from typing import Any, Final

import orjson

_KEYS: Final = {
    "text": {"type", "text"},
    "image": {"type", "data", "mimeType"},
    "audio": {"type", "data", "mimeType"},
}


def shown(result: bytes) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The blocks of a result, a JSON object, and the structured content that goes with them, None where they say all.

    {"text": TEXT} is that text, {"content": [BLOCK, ...]} are those blocks; anything else is told as JSON.
    """
    value: dict[str, Any] = orjson.loads(result)
    if value.keys() == {"text"} and isinstance(value["text"], str):
        return [text(value["text"])], None
    if value.keys() == {"content"} and isinstance(value["content"], list) and all(map(_is_block, value["content"])):
        return value["content"], None
    return [text(result.decode())], value


def text(words: str) -> dict[str, Any]:
    """A block of text."""
    return {"type": "text", "text": words}


def _is_block(block: Any) -> bool:
    if not isinstance(block, dict) or not all(isinstance(value, str) for value in block.values()):
        return False
    return block.keys() == _KEYS.get(block.get("type", ""))
