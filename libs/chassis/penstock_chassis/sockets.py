"""What the kernel knows of a socket: whether all that was written to it arrived at its other end (R105).

An end that closes with bytes unread, or that bytes come to after it closed, answers with a reset; one that read
everything with an end of file, which acknowledges what it got. So an end of file with nothing left to be acknowledged
says that all was read, and a reset that it was not. Linux only, as the rest.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import termios
from fcntl import ioctl
from typing import Final

_UNSENT: Final = 0x894B  # SIOCOUTQNSD
_ESTABLISHED: Final = 1
_CLOSE_WAIT: Final = 8


def has_all(transport: asyncio.BaseTransport) -> bool:
    """Whether the other end acknowledged every byte, and no reset came from it."""
    sock = _socket(transport)
    return sock is not None and _is_written(transport) and _is_whole(sock) and not _queued(sock, termios.TIOCOUTQ)


def gets_all(transport: asyncio.BaseTransport) -> bool:
    """Whether the connection stands and every byte went out: an open end that reads gets them."""
    sock = _socket(transport)
    return sock is not None and _is_written(transport) and _is_whole(sock) and not _queued(sock, _UNSENT)


def is_open(transport: asyncio.BaseTransport) -> bool:
    """Whether the connection stands and its other end has not said that it ends."""
    sock = _socket(transport)
    return sock is not None and _state(sock) == _ESTABLISHED


def stands(transport: asyncio.BaseTransport) -> bool:
    """Whether no reset came: the connection is open, or its other end said in order that it sends no more."""
    sock = _socket(transport)
    return sock is not None and _is_whole(sock)


def unread(transport: asyncio.BaseTransport) -> int:
    """Bytes that came and that this process has not read."""
    sock = _socket(transport)
    return 0 if sock is None else _queued(sock, termios.FIONREAD)


def _socket(transport: asyncio.BaseTransport) -> socket.socket | None:
    sock: socket.socket | None = transport.get_extra_info("socket")
    return None if sock is None or sock.fileno() < 0 else sock


def _is_written(transport: asyncio.BaseTransport) -> bool:
    """Whether the kernel has all of it."""
    return not isinstance(transport, asyncio.WriteTransport) or not transport.get_write_buffer_size()


def _is_whole(sock: socket.socket) -> bool:
    """Whether no reset came: only a connection that stands, or whose other end said that it ends, has these states."""
    return _state(sock) in (_ESTABLISHED, _CLOSE_WAIT)


def _state(sock: socket.socket) -> int:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def _queued(sock: socket.socket, what: int) -> int:
    count: int = struct.unpack("i", ioctl(sock.fileno(), what, b"\0\0\0\0"))[0]
    return count
