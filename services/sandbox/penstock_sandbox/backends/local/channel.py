"""The service's end of the channel to a spawner or sandbox helper: requests with numbered replies, and events.

Invariants: everything happens on the event loop's thread and nothing blocks it; when the peer ends, or a message of it
is lost, every request in flight fails with ``ChannelClosed`` and ``on_close`` runs once. Where only the descriptors of
a reply are lost, and nothing else came of the request, that request alone fails. Descriptors received belong to the
caller.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Sequence
from typing import Self

import structlog

from penstock_sandbox.backends.local.spawner import wire
from penstock_sandbox.domain.errno import Refused

Reply = tuple[wire.Message, list[int]]

# Requests that leave nothing behind when the descriptor of the reply is closed. The others make a file or a process.
_UNDONE_BY_CLOSING = ("open_read", "listen")

_log = structlog.get_logger(__name__)


class ChannelClosed(Exception):
    """The process at the other end has ended, or cannot be understood any more."""


class Channel:
    """One end of a SOCK_SEQPACKET socket pair on the running loop."""

    def __init__(
        self, sock: socket.socket, on_event: Callable[[wire.Message], None], on_close: Callable[[], None]
    ) -> None:
        self._sock = sock
        self._sock.setblocking(False)
        self._on_event = on_event
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        self._last = 0
        self._sending = asyncio.Lock()
        self.closed = False
        self.failed = False
        """Whether it is closed because this end could not read a message."""
        self._loop.add_reader(sock, self._readable)

    async def request(self, message: wire.Message, descriptors: Sequence[int] = ()) -> Reply:
        """Sends ``message`` and waits for its reply. Raises Refused or ChannelClosed.

        If the caller is cancelled, the reply is dropped and its descriptors are closed, when it arrives or at once.
        """
        if self.closed:
            raise ChannelClosed
        self._last += 1
        message["seq"] = self._last
        reply: asyncio.Future[Reply] = self._loop.create_future()
        self._replies[self._last] = reply
        try:
            await self._send(message, descriptors)
        except BaseException:
            del self._replies[message["seq"]]
            raise
        try:
            answer, given = await reply
        except asyncio.CancelledError:
            # It may have arrived already, in the turn before.
            if not reply.cancelled() and reply.exception() is None:
                _close(reply.result()[1])
            raise
        except wire.DescriptorsLost as lost:
            if message["op"] in _UNDONE_BY_CLOSING:
                raise Refused(errno.EMFILE, "the service has too many files open") from lost
            self._unreadable(lost)
            raise ChannelClosed from lost
        if "errno" in answer:
            raise Refused(answer["errno"], answer["what"])
        return answer, given

    async def _send(self, message: wire.Message, descriptors: Sequence[int]) -> None:
        async with self._sending:
            while True:
                try:
                    return wire.send(self._sock, message, descriptors)
                except BlockingIOError:
                    await self._writable()
                except (BrokenPipeError, ConnectionResetError) as error:
                    raise ChannelClosed from error

    async def _writable(self) -> None:
        ready = asyncio.Event()
        self._loop.add_writer(self._sock, ready.set)
        try:
            await ready.wait()
        finally:
            self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        try:
            received = wire.receive(self._sock)
        except BlockingIOError:
            return
        except ConnectionResetError:
            received = None
        except wire.DescriptorsLost as lost:
            reply = self._replies.pop(lost.message["seq"])
            if not reply.done():
                reply.set_exception(lost)
            return
        except OSError as error:
            # As a long message, when this process has no descriptor left: nobody knows whose reply it was.
            self._unreadable(error)
            return
        if received is None:
            self.close()
            return
        message, descriptors = received
        seq = message.get("seq")
        if seq is None:
            self._on_event(message)
            return
        reply = self._replies.pop(seq)
        if reply.done():
            _close(descriptors)
        else:
            reply.set_result((message, descriptors))

    def _unreadable(self, error: OSError) -> None:
        _log.error("a message of a helper process could not be read", error=repr(error))
        self.failed = True
        self.close()

    def close(self) -> None:
        """Closes this end; harmless if it is closed already."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock)
        self._sock.close()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(ChannelClosed())
        self._replies.clear()
        self._on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
