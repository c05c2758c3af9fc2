"""Connections to the guest agent: at most one is attached, through a Unix socket that only its own user may open.

Purpose: a peer's first line states its role. ``attach`` sends and receives; ``output`` only receives and ``deliver``
only sends, for channels with one direction. A new ``attach`` or ``output`` replaces the one before. No numbered frame
is sent until the peer's HELLO has stated the last frame it received.

Invariants: an error in a connection ends that connection and nothing else; a peer of another user is rejected.
"""

from __future__ import annotations

import binascii
import collections
import os
import socket
import struct
from typing import Callable, Deque, Optional, Set

from penstock_sandbox.guest import frames
from penstock_sandbox.guest.handshake import ATTACH, BAD, DELIVER, OUTPUT, TAKEN
from penstock_sandbox.guest.loop import Loop

_GREETING_LIMIT = 16
_RECEIVE = 256 * 1024
_FRAMES_AT_ONCE = 64
_CREDENTIALS = struct.Struct("3i")


class Link:
    """The guest agent's end of the conversation, over the current connection.

    ``greeting`` is the content of each READY; ``on_frame`` gets every numbered frame once, in order; ``on_session`` is
    called before the first frame of a new service instance; ``on_room`` after a full ledger has room again.
    """

    def __init__(
        self,
        loop: Loop,
        greeting: frames.Message,
        on_frame: Callable[[frames.Frame], None],
        on_session: Callable[[], None],
        on_room: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._greeting = greeting
        self._on_frame = on_frame
        self._on_session = on_session
        self._on_room = on_room
        self._ledger = frames.Ledger()
        self._session = ""
        self._output: Optional[_Connection] = None
        self._peers: Set[_Connection] = set()

    def listen(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._loop.watch(listener.fileno(), lambda: self._accept(listener), None)

    def room(self) -> bool:
        """Whether sources may be read on."""
        return not self._ledger.full

    def send_frame(self, kind: int, stream: int, payload: bytes) -> None:
        """Sends a frame, now or over the next attachment."""
        frame = self._ledger.number_frame(kind, stream, payload)
        if self._output is not None and self._output.greeted:
            self._output.send(frame)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid not in (0, os.getuid()):
            sock.close()
            return
        self._peers.add(_Connection(self._loop, sock, self))

    def introduced(self, connection: _Connection) -> None:
        """Handles a connection whose role is known."""
        if connection.role == DELIVER:
            return
        if self._output is not None:
            self._output.close()
        self._output = connection
        connection.nonce = binascii.hexlify(os.urandom(8)).decode()
        ready = {**self._greeting, "attachment": connection.nonce}
        connection.send(frames.encode(frames.READY, 0, 0, frames.pack_message(ready)))

    def receive(self, frame: frames.Frame) -> None:
        """Handles a frame, from whichever connection."""
        if frame.kind == frames.HELLO:
            self._hello(frames.parse_message(frame.payload))
        elif frame.kind == frames.ACK:
            was_full = self._ledger.full
            self._ledger.acknowledged(frames.parse_number(frame.payload))
            if was_full and not self._ledger.full:
                self._on_room()
        elif frame.kind == frames.READY:
            raise frames.Malformed("only a guest sends READY")
        elif self._ledger.receive(frame):
            self._on_frame(frame)
            acknowledgement = self._ledger.acknowledgement()
            if acknowledgement and self._output is not None and self._output.greeted:
                self._output.send(acknowledgement)

    def _hello(self, hello: frames.Message) -> None:
        output = self._output
        if output is None or hello.get("attachment") != output.nonce or output.greeted:
            return  # for an attachment that was replaced meanwhile
        session, received = str(hello.get("session")), int(hello.get("received", 0))
        if session != self._session:
            self._session = session
            self._ledger = frames.Ledger()
            self._on_session()
        missing = self._ledger.after(received)
        output.greeted = True
        answer = {"attachment": output.nonce, "received": self._ledger.received}
        output.send(frames.encode(frames.HELLO, 0, 0, frames.pack_message(answer)))
        for frame in missing:
            output.send(frame)
        self._on_room()

    def closed(self, connection: _Connection) -> None:
        """Drops a connection that has ended."""
        self._peers.discard(connection)
        if self._output is connection:
            self._output = None


class _Connection:
    def __init__(self, loop: Loop, sock: socket.socket, link: Link) -> None:
        self._loop = loop
        self._sock = sock
        self._link = link
        self._decoder = frames.Decoder()
        self._first_line = b""
        self._outgoing: Deque[bytes] = collections.deque()
        self._open = True
        self.role = b""
        self.nonce = ""
        self.greeted = False
        sock.setblocking(False)
        loop.watch(sock.fileno(), self._readable, None)

    def send(self, data: bytes) -> None:
        """Sends as soon as the peer reads."""
        if self._open:
            self._outgoing.append(data)
            self._flush()

    def _flush(self) -> None:
        try:
            while self._outgoing:
                some = [self._outgoing[index] for index in range(min(len(self._outgoing), _FRAMES_AT_ONCE))]
                sent = self._sock.sendmsg(some)
                while sent:
                    first = self._outgoing.popleft()
                    if len(first) > sent:
                        self._outgoing.appendleft(first[sent:])
                        break
                    sent -= len(first)
        except BlockingIOError:
            self._loop.writing(self._sock.fileno(), self._flush)
        except OSError:
            self.close()
        else:
            self._loop.writing(self._sock.fileno(), None)

    def _readable(self) -> None:
        try:
            data = self._sock.recv(_RECEIVE)
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        try:
            if not data:
                self._ended()
                return
            if not self.role:
                data = self._introduce(data)
            for frame in self._decoder.feed(data):
                self._link.receive(frame)
                if not self._open:
                    return
        except (frames.Malformed, KeyError, TypeError, ValueError):
            # The service reconnects and states what it received; or it is not a service.
            self._answer(BAD)
            self.close()

    def _introduce(self, data: bytes) -> bytes:
        self._first_line += data
        line, newline, rest = self._first_line.partition(b"\n")
        if newline:
            self.role = line + newline
            if self.role not in (ATTACH, OUTPUT, DELIVER):
                raise frames.Malformed("a peer that does not identify itself")
            self._link.introduced(self)
            return rest
        if len(self._first_line) > _GREETING_LIMIT:
            raise frames.Malformed("a peer that does not identify itself")
        return b""

    def _ended(self) -> None:
        self._answer(TAKEN if self._decoder.between else BAD)
        self.close()

    def _answer(self, word: bytes) -> None:
        if self.role == DELIVER:
            try:
                self._sock.send(word)
            except OSError:
                return

    def close(self) -> None:
        if self._open:
            self._open = False
            self._outgoing.clear()
            self._loop.forget(self._sock.fileno())
            self._sock.close()
            self._link.closed(self)
