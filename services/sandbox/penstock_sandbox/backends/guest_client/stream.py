"""Streams of a link: bytes in order, in both directions, with windows, ends and resets.

Invariants
- Outgoing bytes never exceed the peer's window, and incoming bytes may not exceed ours.
- Reading returns credit, in few large amounts; a stream with a ``receiver`` reads at once.
- After a reset, a loss or ``reset()`` both directions fail at once; nothing waits for a stream that is over.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable
from typing import Protocol

from penstock_sandbox.guest import frames
from penstock_sandbox.guest.frames import Malformed


class LinkLost(Exception):
    """The sandbox is gone, or cannot be reached any more; ``reason`` is UPPER_SNAKE."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class StreamReset(Exception):
    """The peer reset the stream, with the kernel's ``errno`` if there is one."""

    def __init__(self, number: int) -> None:
        super().__init__(f"the stream was broken off ({errno.errorcode.get(number, number)})")
        self.errno = number


class FrameSender(Protocol):
    """What a stream needs of its link."""

    def send_frame(self, kind: int, stream: int, payload: bytes) -> None:
        """Sends a frame."""

    async def room(self) -> None:
        """Waits while too many bytes are unacknowledged."""

    def forget(self, number: int) -> None:
        """Drops a stream that is over."""


class Stream:
    """One stream. ``receiver`` may be set before data arrives: it gets each piece, and b"" at the end."""

    def __init__(self, link: FrameSender, number: int, window: int, credit: int) -> None:
        self.number = number
        self.receiver: Callable[[bytes], None] | None = None
        self._link = link
        self._window = window
        self._credit = self._full_credit = credit
        self._pieces: deque[bytes] = deque()
        self._unread = 0
        self._taken = 0
        self._end_received = False
        self._end_sent = False
        self._failure: Exception | None = None
        self._changed = asyncio.Event()

    # Receiving ---------------------------------------------------------------------------------------------------

    def receive(self, frame: frames.Frame) -> None:
        """Handles a frame of this stream. Raises Malformed for a protocol violation."""
        match frame.kind:
            case frames.DATA:
                self._data(frame.payload)
            case frames.END:
                self._end_received = True
                if self.receiver is not None:
                    self.receiver(b"")
                self._settle()
            case frames.RESET:
                number = frames.parse_message(frame.payload).get("errno") if frame.payload else None
                self.fail(StreamReset(number if isinstance(number, int) else errno.ECONNRESET))
                self._link.forget(self.number)
            case frames.CREDIT:
                self._credit += frames.parse_amount(frame.payload)
        self._changed.set()

    def _data(self, data: bytes) -> None:
        if not data:
            # It would read as the end, and takes nothing of the window, so that any number could wait for a reader.
            raise Malformed(f"stream {self.number} has a piece of no bytes")
        if self._end_received or self._unread + len(data) > self._window:
            raise Malformed(f"stream {self.number} is {len(data)} bytes over its window or its end")
        if self.receiver is not None:
            self.receiver(data)
            self._take(len(data))
        else:
            self._pieces.append(data)
            self._unread += len(data)

    def _take(self, amount: int) -> None:
        self._taken += amount
        if self._taken >= self._window // 4 and not self._end_received and self._failure is None:
            self._link.send_frame(frames.CREDIT, self.number, frames.pack_amount(self._taken))
            self._taken = 0

    async def read(self) -> bytes:
        """Returns the next piece; empty at the end. Raises StreamReset or LinkLost."""
        while not self._pieces:
            if self._failure is not None:
                raise self._failure
            if self._end_received:
                return b""
            await self._change()
        data = self._pieces.popleft()
        self._unread -= len(data)
        self._take(len(data))
        return data

    # Sending -----------------------------------------------------------------------------------------------------

    async def write(self, data: bytes) -> None:
        """Sends all of ``data``, waiting for the window. Raises StreamReset or LinkLost."""
        view = memoryview(data)
        while view:
            await self._link.room()
            while self._credit <= 0 and self._failure is None:
                await self._change()
            if self._failure is not None:
                raise self._failure
            piece = view[: min(frames.PIECE, self._credit)]
            self._credit -= len(piece)
            self._link.send_frame(frames.DATA, self.number, bytes(piece))
            view = view[len(piece) :]

    def has_arrived(self) -> bool:
        """Whether the peer has returned credit for all sent bytes. Raises StreamReset or LinkLost."""
        if self._failure is not None:
            raise self._failure
        return self._credit >= self._full_credit

    def end(self) -> None:
        """Ends the outgoing direction; harmless if it has ended or the stream is over."""
        if not self._end_sent and self._failure is None:
            self._end_sent = True
            self._link.send_frame(frames.END, self.number, b"")
            self._settle()

    def reset(self) -> None:
        """Resets both directions; harmless if the stream is over."""
        if self._failure is None and not (self._end_received and self._end_sent):
            self.fail(StreamReset(errno.ECANCELED))
            self._link.send_frame(frames.RESET, self.number, b"")
            self._link.forget(self.number)

    def fail(self, failure: Exception) -> None:
        """Ends the stream: every waiter fails with ``failure``."""
        if self._failure is None:
            self._failure = failure
            self._changed.set()

    def close(self) -> None:
        """Forgets a stream whose operation has ended on both sides."""
        self.fail(StreamReset(errno.EPIPE))
        self._link.forget(self.number)

    def _settle(self) -> None:
        if self._end_received and self._end_sent:
            self._link.forget(self.number)

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
