"""The event loop of a service: uvloop's, on which gRPC's events do not wait for one iteration each.

gRPC's own thread writes a byte to a socket for each event (a call came, a message arrived or was sent), and grpc.aio
reads one byte in an iteration of the loop. It handles all events that are there then; but bytes that nobody read fill
the socket's buffer (278 of them), and from then on that thread hands over one event for each byte that is read: a
process whose iterations take 10 ms has 100 events a second, some 25 calls, of all its servers and clients together.
Here all bytes are read at once (docs/decisions/076).
"""

from __future__ import annotations

import functools
import socket
import struct
import termios
from collections.abc import Callable
from contextlib import suppress
from fcntl import ioctl
from typing import Any, Final

import uvloop

_OF_GRPC: Final = "PollerCompletionQueue._handle_events"
"""What grpc.aio has called when its socket can be read."""


class EventLoop(uvloop.Loop):
    """As the module's text says; for `asyncio.Runner(loop_factory=EventLoop)`."""

    def add_reader(  # type: ignore[override]  # any callback and its arguments
        self, fd: Any, callback: Callable[..., Any], *args: Any
    ) -> None:
        """See `asyncio.loop.add_reader`."""
        if _is_of_grpc(callback) and isinstance(fd, socket.socket):
            super().add_reader(fd, _handle_all, fd, callback)
        else:
            super().add_reader(fd, callback, *args)


def _is_of_grpc(callback: Callable[..., Any]) -> bool:
    called = callback.func if isinstance(callback, functools.partial) else callback
    return getattr(called, "__qualname__", "") == _OF_GRPC


def _handle_all(events: socket.socket, handle: Callable[[], None]) -> None:
    """Leaves the byte that `handle` reads. What is written meanwhile is for the next iteration."""
    unread: int = struct.unpack("i", ioctl(events.fileno(), termios.FIONREAD, b"\0\0\0\0"))[0]
    if unread > 1:
        # A loop of another thread, bound to the same socket, may have read them and handles the events.
        with suppress(BlockingIOError):
            events.recv(unread - 1)
    handle()
