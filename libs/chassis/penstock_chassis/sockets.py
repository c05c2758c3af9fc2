"""Asks the kernel about a socket: whether the peer received everything that was written (R105), and if it is there.

A peer that closes with bytes unread, or receives bytes after it closed, answers with a reset; a peer that read
everything closes with an end of file, which acknowledges what it received. So an end of file with nothing left
unacknowledged shows that all was read; a reset shows that it was not. Linux only, as everything here.

TCP's limits: an acknowledged byte is in the peer's kernel, and only the way the connection ends shows whether the
peer's program read it. A program that shuts down its sending side but neither reads nor exits sends the same end of
file as one that read everything and exited.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path
from typing import Final

CUT_S: Final = 20
"""Seconds after which a connection whose other host does not answer any more ends with an error."""
_UNSENT: Final = 0x894B  # SIOCOUTQNSD
_ESTABLISHED: Final = 1
_FIN_WAIT1: Final = 4
_FIN_WAIT2: Final = 5
_CLOSE: Final = 7
_CLOSE_WAIT: Final = 8
_CLOSING: Final = 11
_WHOLE: Final = frozenset({_ESTABLISHED, _FIN_WAIT1, _FIN_WAIT2, _CLOSE_WAIT, _CLOSING})


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """A name of a Unix socket that fits into the 107 bytes which the kernel takes, however long `path` is.

    It holds inside the block and in this process. OSError if the directory cannot be opened.
    """
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def end_if_cut(transport: asyncio.BaseTransport) -> None:
    """Makes a connection end with an error soon after the other host has vanished, in use or at rest.

    By itself TCP waits for hours at rest, and a quarter of an hour for an acknowledgement. Other kinds of connection
    are left alone.
    """
    sock = _socket(transport)
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, CUT_S // 2))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, CUT_S // 4))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, CUT_S * 1000)


def has_all(transport: asyncio.BaseTransport) -> bool:
    """Whether the peer acknowledged every byte and did not reset."""
    sock = _socket(transport)
    if sock is None or not _is_written(transport) or not _is_whole(transport, sock):
        return False
    return not _queued(sock, termios.TIOCOUTQ)


def ended_whole(transport: asyncio.BaseTransport) -> bool:
    """As `has_all`, for a connection just read to its end of file; this side may have ended before."""
    sock = _socket(transport)
    if sock is None or not _is_written(transport) or _queued(sock, termios.TIOCOUTQ):
        return False
    return _state(sock) in _WHOLE or _ended_in_order(sock)


def gets_all(transport: asyncio.BaseTransport) -> bool:
    """Whether every byte was sent and no reset came: a peer that reads gets them, or got them before it closed."""
    sock = _socket(transport)
    return sock is not None and _is_written(transport) and _is_whole(transport, sock) and not _queued(sock, _UNSENT)


def is_open(transport: asyncio.BaseTransport) -> bool:
    """Whether the connection is open and the peer has not ended its side."""
    sock = _socket(transport)
    return sock is not None and _state(sock) == _ESTABLISHED


def stands(transport: asyncio.BaseTransport) -> bool:
    """Whether no reset came: the connection is open, or the peer ended its side in order."""
    sock = _socket(transport)
    return sock is not None and _is_whole(transport, sock)


def unread(transport: asyncio.BaseTransport) -> int:
    """Bytes received that this process has not read."""
    sock = _socket(transport)
    return 0 if sock is None else _queued(sock, termios.FIONREAD)


def _socket(transport: asyncio.BaseTransport) -> socket.socket | None:
    sock: socket.socket | None = transport.get_extra_info("socket")
    return None if sock is None or sock.fileno() < 0 else sock


def _is_written(transport: asyncio.BaseTransport) -> bool:
    """Whether the transport's buffer is empty: the kernel has everything."""
    return not isinstance(transport, asyncio.WriteTransport) or not transport.get_write_buffer_size()


def _is_whole(transport: asyncio.BaseTransport, sock: socket.socket) -> bool:
    """Whether no reset came. A transport that closes may have read the error of one."""
    return _state(sock) in _WHOLE or (not transport.is_closing() and _ended_in_order(sock))


def _ended_in_order(sock: socket.socket) -> bool:
    """Whether both sides have ended: the kernel has no state left, as after a reset, which leaves an error to read."""
    if _state(sock) != _CLOSE:
        return False
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return not any(event & select.POLLERR for _, event in poll.poll(0))


def _state(sock: socket.socket) -> int:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def _queued(sock: socket.socket, what: int) -> int:
    count: int = struct.unpack("i", ioctl(sock.fileno(), what, b"\0\0\0\0"))[0]
    return count
