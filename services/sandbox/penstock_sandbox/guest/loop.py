"""The guest agent's event loop, and copying between descriptors and streams of the link.

Purpose: one thread that never blocks, so that it may fork. A Source reads a descriptor while its stream has credit; a
Sink writes a stream's data and returns credit as it is written.

Invariants: a descriptor is closed exactly once, by the part that holds it; callbacks that are removed during a round
are not called in it.
"""

from __future__ import annotations

import errno
import os
import selectors
from typing import Callable, Dict, Optional, Tuple

from penstock_sandbox.guest import frames

_IDLE_S = 0.005

Callback = Callable[[], None]
SendFrame = Callable[[int, int, bytes], None]
"""Sends a frame: kind, stream, payload."""


class Loop:
    """Calls back when descriptors are readable or writable."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._callbacks: Dict[int, Tuple[Optional[Callback], Optional[Callback]]] = {}
        self._when_idle: Optional[Callback] = None

    def watch(self, descriptor: int, readable: Optional[Callback], writable: Optional[Callback]) -> None:
        """Sets both callbacks; None = not waiting for that."""
        before = self._callbacks.get(descriptor)
        events = (selectors.EVENT_READ if readable else 0) | (selectors.EVENT_WRITE if writable else 0)
        if not events:
            self.forget(descriptor)
            return
        self._callbacks[descriptor] = (readable, writable)
        if before is None:
            self._selector.register(descriptor, events)
        elif (bool(before[0]), bool(before[1])) != (bool(readable), bool(writable)):
            self._selector.modify(descriptor, events)

    def reading(self, descriptor: int, readable: Optional[Callback]) -> None:
        """Changes only the callback for readable."""
        self.watch(descriptor, readable, self._callbacks.get(descriptor, (None, None))[1])

    def writing(self, descriptor: int, writable: Optional[Callback]) -> None:
        """Changes only the callback for writable."""
        self.watch(descriptor, self._callbacks.get(descriptor, (None, None))[0], writable)

    def forget(self, descriptor: int) -> None:
        """Removes the callbacks; call it before closing the descriptor."""
        if self._callbacks.pop(descriptor, None) is not None:
            self._selector.unregister(descriptor)

    def when_idle(self, callback: Callback) -> None:
        """Calls this once, when nothing happens for a moment."""
        self._when_idle = callback

    def run_once(self) -> None:
        """Waits for events and handles them."""
        ready = self._selector.select(_IDLE_S if self._when_idle is not None else None)
        if not ready and self._when_idle is not None:
            idle, self._when_idle = self._when_idle, None
            idle()
        for key, events in ready:
            descriptor = key.fd
            if events & selectors.EVENT_READ:
                callback = self._callbacks.get(descriptor, (None, None))[0]
                if callback is not None:
                    callback()
            if events & selectors.EVENT_WRITE:
                callback = self._callbacks.get(descriptor, (None, None))[1]
                if callback is not None:
                    callback()


class Source:
    """Reads a descriptor into a stream, as long as the stream has credit and ``room`` returns true.

    ``on_end`` is called once, after END or RESET was sent or the service reset the stream.
    """

    def __init__(
        self,
        loop: Loop,
        send_frame: SendFrame,
        room: Callable[[], bool],
        descriptor: int,
        stream: int,
        credit: int,
        on_end: Callback,
        on_read: Optional[Callable[[int], None]] = None,
    ) -> None:
        self._loop = loop
        self._send_frame = send_frame
        self._room = room
        self.descriptor = descriptor
        self.stream = stream
        self._credit = credit
        self._on_end = on_end
        self._on_read = on_read
        self.open = True
        # Whether reading failed, as after a connection reset by the peer.
        self.broken = False
        os.set_blocking(descriptor, False)
        self.go_on()

    def go_on(self) -> None:
        """Resumes reading if that is possible now."""
        if self.open:
            able = self._credit > 0 and self._room()
            self._loop.reading(self.descriptor, self._readable if able else None)

    def credit(self, amount: int) -> None:
        """The reader has consumed ``amount`` bytes."""
        self._credit += amount
        self.go_on()

    def _readable(self) -> None:
        if not self._room():
            self.go_on()
            return
        try:
            data = os.read(self.descriptor, min(frames.PIECE, self._credit))
        except BlockingIOError:
            return
        except OSError as error:
            # A terminal whose last user is gone returns EIO where a pipe returns end of file.
            if error.errno != errno.EIO:
                self._send_frame(frames.RESET, self.stream, frames.pack_message({"errno": error.errno}))
                self.broken = True
                self.stop()
                return
            data = b""
        if data:
            self._send_frame(frames.DATA, self.stream, data)
            self._credit -= len(data)
            self.go_on()
            if self._on_read is not None:
                self._on_read(len(data))
        else:
            self._send_frame(frames.END, self.stream, b"")
            self.stop()

    def stop(self) -> None:
        """Stops reading and sending."""
        if self.open:
            self.open = False
            self._loop.reading(self.descriptor, None)
            self._on_end()


class Sink:
    """Writes a stream's data to a descriptor.

    ``on_end`` is called once: with False after all data before the stream's END was written, with True if it broke.
    """

    def __init__(
        self,
        loop: Loop,
        send_frame: SendFrame,
        descriptor: int,
        stream: int,
        window: int,
        on_end: Callable[[bool], None],
    ) -> None:
        self._loop = loop
        self._send_frame = send_frame
        self._descriptor = descriptor
        self.stream = stream
        self._window = window
        self._on_end = on_end
        self._pending = bytearray()
        self._taken = 0
        # In few large amounts: half of the window may be used before the sender gets credit back.
        self._step = window // 4
        self._check: Callable[[], None] = lambda: None
        self._ending = False
        self.open = True
        os.set_blocking(descriptor, False)

    def data(self, data: bytes) -> None:
        """Accepts data. Raises Malformed if it exceeds the window."""
        if not self.open:
            return
        if len(self._pending) + len(data) > self._window:
            raise frames.Malformed("stream %d is %d bytes over its window" % (self.stream, len(data)))
        self._pending += data
        self._flush()

    def end(self) -> None:
        """The stream has ended."""
        self._ending = True
        self._flush()

    def _flush(self) -> None:
        try:
            while self._pending and self.open:
                written = os.write(self._descriptor, self._pending)
                del self._pending[:written]
                self._take(written)
        except BlockingIOError:
            self._loop.writing(self._descriptor, self._flush)
            return
        except OSError as error:
            self._send_frame(frames.RESET, self.stream, frames.pack_message({"errno": error.errno}))
            self.stop()
            return
        if self.open:
            self._loop.writing(self._descriptor, None)
            if self._ending:
                self.open = False
                self._on_end(False)

    def credit_each_byte(self, check: Callable[[], None]) -> None:
        """From now on returns credit at once for each written byte, unless ``check`` raises OSError."""
        self._step = 1
        self._check = check
        self._take(0)

    def _take(self, amount: int) -> None:
        self._taken += amount
        if self._taken >= self._step:
            self._check()
            self._send_frame(frames.CREDIT, self.stream, frames.pack_amount(self._taken))
            self._taken = 0

    def stop(self) -> None:
        """Stops writing; unwritten data is lost."""
        if self.open:
            self.open = False
            self._pending.clear()
            self._loop.writing(self._descriptor, None)
            self._on_end(True)
