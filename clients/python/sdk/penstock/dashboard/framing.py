"""The gRPC-Web wire format: length-prefixed frames, the trailers as the last one.

The format is PROTOCOL-WEB.md of the gRPC project; only the binary form without compression is supported. Messages are
not decoded.
"""

import base64
import re
import struct
from collections.abc import Iterable
from typing import Final
from urllib.parse import quote

CONTENT_TYPE: Final = "application/grpc-web+proto"
CONTENT_TYPES: Final = frozenset({CONTENT_TYPE, "application/grpc-web"})
_HEAD: Final = struct.Struct(">BI")
_TRAILERS: Final = 0x80
_TIMEOUT: Final = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNITS_S: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_KEY: Final = re.compile(r"[a-z0-9_.-]+")


class BadFrame(ValueError):
    """The input is not gRPC-Web; the text describes the problem."""


def message_of(body: bytes | bytearray) -> bytes:
    """Returns the one message of a request's body.

    Raises:
        BadFrame: it is not exactly one frame with an uncompressed message.
    """
    if len(body) < _HEAD.size:
        raise BadFrame("a frame must have at least 5 bytes")
    flags, length = _HEAD.unpack_from(body)
    if flags:
        raise BadFrame("compressed messages and trailers are not supported")
    if length != len(body) - _HEAD.size:
        raise BadFrame("expected one frame of the stated length")
    return bytes(memoryview(body)[_HEAD.size :])


def data_frame(message: bytes) -> bytes:
    return _HEAD.pack(0, len(message)) + message


def trailers_frame(code: int, message: str, metadata: Iterable[tuple[str, str | bytes]] = ()) -> bytes:
    """Returns the last frame of an answer: status, text, and the service's trailing metadata (details of errors)."""
    lines = [("grpc-status", str(code)), ("grpc-message", quote(message, safe=" !#$&'()*+,/:;=?@[]"))]
    for key, value in metadata:
        if not _KEY.fullmatch(key) or key in ("grpc-status", "grpc-message"):
            continue
        if isinstance(value, bytes):
            lines.append((key, base64.b64encode(value).rstrip(b"=").decode()))
        elif value.isprintable() and value.isascii():
            lines.append((key, value))
    text = "".join(f"{key}: {value}\r\n" for key, value in lines).encode()
    return _HEAD.pack(_TRAILERS, len(text)) + text


def timeout_of(header: str | None) -> float | None:
    """Returns the seconds of a `grpc-timeout` header; None without one.

    Raises:
        BadFrame: it is malformed.
    """
    if header is None:
        return None
    found = _TIMEOUT.fullmatch(header)
    if found is None:
        raise BadFrame("grpc-timeout must be a number and one of H, M, S, m, u, n")
    return int(found[1]) * _UNITS_S[found[2]]
