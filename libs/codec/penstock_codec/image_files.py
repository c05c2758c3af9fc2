"""Sizes of image files, from their headers. No image is decoded.

A decoder must find no other size: a file whose header contradicts itself would take more memory than its size says, so
it has none.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

MOST_STEPS: Final = 10_000
"""The most chunks, blocks or markers before an image's own data; a file with more has no size."""

_PNG: Final = b"\x89PNG\r\n\x1a\n"
# JPEG's markers of a frame; the others in this range are tables.
_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ALONE: Final = frozenset({0x01, *range(0xD0, 0xD9)})


@dataclass(frozen=True, slots=True)
class Measured:
    """An image's kind, as an IANA media type, and its size in pixels."""

    media_type: str
    width: int
    height: int


def measure(data: bytes) -> Measured | None:
    """Reads an image file's header; None if it is none that is known, is cut off there, or contradicts itself."""
    size: tuple[int, int] | None = None
    kind = ""
    try:
        if data.startswith(_PNG):
            kind, size = "image/png", _of_png(data)
        elif data.startswith((b"GIF87a", b"GIF89a")):
            kind, size = "image/gif", _of_gif(data)
        elif data.startswith(b"\xff\xd8"):
            kind, size = "image/jpeg", _of_jpeg(data)
        elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            kind, size = "image/webp", _of_webp(data)
    except (struct.error, IndexError):
        return None
    return Measured(kind, *size) if size is not None and min(size) > 0 else None


def _of_png(data: bytes) -> tuple[int, int] | None:
    """The first chunk's size; a decoder would take that of a second such chunk."""
    size: tuple[int, int] | None = None
    at = len(_PNG)
    for _ in range(MOST_STEPS):
        length, kind = struct.unpack_from(">I4s", data, at)
        if (kind == b"IHDR") != (size is None):
            return None
        if kind == b"IHDR":
            size = struct.unpack_from(">II", data, at + 8)
        elif kind == b"IDAT":
            return size
        at += 12 + length
    return None


def _of_gif(data: bytes) -> tuple[int, int] | None:
    """The screen's size; a decoder would enlarge it to a first image that lies outside."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    inside = False  # of an extension, at one of its blocks
    for _ in range(MOST_STEPS):
        if inside:
            inside = data[at] > 0
            at += 1 + data[at]
        elif data[at] == 0x21:
            inside = True
            at += 2
        elif data[at] == 0x2C:
            left, top, columns, rows = struct.unpack_from("<HHHH", data, at + 1)
            return (width, height) if left + columns <= width and top + rows <= height else None
        else:
            return None
    return None


def _of_jpeg(data: bytes) -> tuple[int, int] | None:
    at = 2
    for _ in range(MOST_STEPS):
        if data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker == 0xFF:  # filling
            at += 1
            continue
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
        at += 2 if marker in _ALONE else 2 + struct.unpack_from(">H", data, at + 2)[0]
    return None


def _of_webp(data: bytes) -> tuple[int, int] | None:
    kind = data[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8L" and data[20] == 0x2F:
        bits = struct.unpack_from("<I", data, 21)[0]
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    return None
