"""A sandbox's endpoints, inside: listeners on loopback whose connections are streams of the link.

Purpose: the service, which opened the link, connects each of them to the upstream of its port and to nothing else. A
sandbox on a machine that cannot reach the service still reaches its endpoints.

Invariants: bytes and half-closes are passed on unchanged; a slow reader slows its writer; closing an endpoint cuts
its connections; a reset on one side shows as a reset, never as an end of stream; a program's end of stream is sent
only after the credit for what it has received.
"""

from __future__ import annotations

import errno
import socket
import struct
from typing import Callable, Dict, Optional

from penstock_sandbox.guest import frames
from penstock_sandbox.guest.common import loopback
from penstock_sandbox.guest.loop import Loop, Sink, Source
from penstock_sandbox.guest.processes import Streams

_CONNECTIONS = 256
# States of TCP: established, and closed by the peer alone.
_STANDING = (1, 8)


class Endpoints:
    """Listens on each port that is open."""

    def __init__(
        self, loop: Loop, send_frame: Callable[[int, int, bytes], None], room: Callable[[], bool], streams: Streams
    ) -> None:
        self._loop = loop
        self._send_frame = send_frame
        self._room = room
        self._streams = streams
        self._listeners: Dict[int, socket.socket] = {}
        self._connections: Dict[int, _Connection] = {}
        self._last = 0

    def open(self, port: int) -> None:
        """Listens on a port of loopback. Raises OSError when it is in use."""
        listener = loopback.listen(port)
        listener.setblocking(False)
        self._listeners[port] = listener
        self._loop.watch(listener.fileno(), lambda: self._accept(port), None)

    def close(self, port: Optional[int] = None) -> None:
        """Stops listening on a port, or on all, and cuts every connection to it."""
        for one in [port] if port in self._listeners else list(self._listeners) if port is None else []:
            listener = self._listeners.pop(one)
            self._loop.forget(listener.fileno())
            listener.close()
        for connection in list(self._connections.values()):
            if port in (None, connection.port):
                connection.cut()

    def cut(self, stream: int) -> bool:
        """Handles a reset by the service; returns False for a stream that is not a connection's."""
        connection = self._connections.get(stream)
        if connection is None:
            return False
        connection.cut()
        return True

    def _accept(self, port: int) -> None:
        try:
            sock, _ = self._listeners[port].accept()
        except OSError:
            return
        if sum(connection.port == port for connection in self._connections.values()) >= _CONNECTIONS:
            sock.close()
            return
        self._last = (self._last + 1) % frames.FROM_ATTENDANT
        stream = frames.FROM_ATTENDANT | self._last
        self._send_frame(frames.OPEN, stream, frames.pack_message({"port": port}))
        self._connections[stream] = _Connection(
            self._loop, self._send_frame, self._room, self._streams, sock, stream, port, self
        )

    def forget(self, stream: int) -> None:
        """Drops a connection that has ended."""
        self._connections.pop(stream, None)


class _Connection:
    def __init__(
        self,
        loop: Loop,
        send_frame: Callable[[int, int, bytes], None],
        room: Callable[[], bool],
        streams: Streams,
        sock: socket.socket,
        stream: int,
        port: int,
        endpoint: Endpoints,
    ) -> None:
        self.port = port
        self._loop = loop
        self._send_frame = send_frame
        self._streams = streams
        self._sock = sock
        self._stream = stream
        self._endpoint = endpoint
        self._open = True
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        self._sink = Sink(loop, send_frame, sock.fileno(), stream, frames.ENDPOINT_WINDOW, self._sink_ended)
        self._source = Source(
            loop, self._send_frame_of_program, room, sock.fileno(), stream, frames.ENDPOINT_WINDOW, self._source_ended
        )
        streams.sinks[stream] = self._sink
        streams.sources[stream] = self._source

    def _send_frame_of_program(self, kind: int, stream: int, payload: bytes) -> None:
        if kind == frames.END:
            # The service must know whether the program received everything before its end of stream.
            try:
                self._sink.credit_each_byte(self._check)
            except OSError as error:
                kind, payload = frames.RESET, frames.pack_message({"errno": error.errno})
                self._source.broken = True
        self._send_frame(kind, stream, payload)

    def _check(self) -> None:
        """Raises OSError when the program answered the written data with a reset."""
        if self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] not in _STANDING:
            raise OSError(errno.ECONNRESET, "the program did not read all of it")

    def _sink_ended(self, broken: bool) -> None:
        self._streams.sinks.pop(self._stream, None)
        if broken:
            # The error was reported already.
            self._abort()
            return
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the peer is gone: reading shows it
        self._settle()

    def _source_ended(self) -> None:
        self._streams.sources.pop(self._stream, None)
        if self._source.broken:
            # The service has the end and sends nothing more on it: nothing else would end the stream.
            self._abort()
        else:
            self._settle()

    def _settle(self) -> None:
        if self._open and not self._sink.open and not self._source.open:
            self._close()

    def cut(self) -> None:
        """Ends it so that its peer in the sandbox sees a failure."""
        if self._open:
            self._abort()

    def _abort(self) -> None:
        if not self._open:
            return
        self._open = False
        self._sink.stop()
        self._source.stop()
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._open = True
        self._close()

    def _close(self) -> None:
        self._open = False
        self._streams.sinks.pop(self._stream, None)
        self._streams.sources.pop(self._stream, None)
        self._loop.forget(self._sock.fileno())
        self._sock.close()
        self._endpoint.forget(self._stream)
