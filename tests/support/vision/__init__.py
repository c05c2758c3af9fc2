"""A tiny vision model's tokenizer, with a template that shows images, and images for it."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from PIL import Image

from penstock_codec import tiny_tokenizer
from penstock_codec.images import ImageRule
from penstock_codec.tokenizer_files import TokenizerFiles

_PNG: Final = b"\x89PNG\r\n\x1a\n"
START, PLACEHOLDER, END, VIDEO = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"
CONTROLS = (*tiny_tokenizer.CONTROL_TOKENS, START, PLACEHOLDER, END, VIDEO)
PLACEHOLDER_ID = CONTROLS.index(PLACEHOLDER)
PATCH, MERGE = 14, 2
SIDE = PATCH * MERGE
"""Pixels of a token's square."""
RULE = ImageRule(PLACEHOLDER_ID, 0, PATCH, MERGE, SIDE * SIDE, 64 * SIDE * SIDE)

_SHOWN = """
{%- macro shown(content) -%}
    {%- if content is string -%}{{- content -}}{%- else -%}
        {%- for part in content -%}
            {{- "<|vision_start|><|image_pad|><|vision_end|>" if part.type == "image" else part.text -}}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
"""


def chat_template() -> str:
    """Our ChatML template, with images in the messages of users and tools."""
    text = tiny_tokenizer.chat_template()
    for place in ('"\\n<tool_response>\\n" + message.content', 'message.role + "\\n" + message.content'):
        assert place in text
        text = text.replace(place, place.replace("message.content", "shown(message.content)"))
    return _SHOWN + text


def tokenizer_files(texts: Iterable[str] = (), rule: ImageRule | None = RULE) -> TokenizerFiles:
    """The files of the model."""
    family = tiny_tokenizer.Family(chat_template(), controls=CONTROLS)
    return replace(family.build(texts), images=rule)


def png(columns: int, rows: int, shade: int = 0) -> bytes:
    """An image of `columns` by `rows` tokens, grey."""
    width, height = columns * SIDE, rows * SIDE
    return _PNG + _header(width, height) + _chunk(b"IDAT", _lines(width, height, shade)) + _chunk(b"IEND", b"")


def png_with(chunks: bytes) -> bytes:
    """An image of one token, with these chunks before its data."""
    return _PNG + _header(SIDE, SIDE) + chunks + _chunk(b"IDAT", _lines(SIDE, SIDE, 0)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _header(width: int, height: int) -> bytes:
    return _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))


def _lines(width: int, height: int, shade: int) -> bytes:
    return zlib.compress((b"\0" + bytes([shade]) * width) * height)


def _gif_outside() -> bytes:
    held = io.BytesIO()
    Image.new("P", (90, 90)).save(held, "GIF")
    data = held.getvalue()
    return data[:6] + struct.pack("<HH", SIDE, SIDE) + data[10:]


CONTRADICTORY: Final[Mapping[str, bytes]] = {
    "PNG": png_with(_header(90, 90)),
    "GIF": _gif_outside(),
}
"""Images of one token by their headers, which Pillow decodes to 90 x 90 pixels."""


def data_url(data: bytes, media_type: str = "image/png") -> str:
    """The image as agents send it."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
