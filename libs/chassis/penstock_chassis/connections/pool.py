"""A channel of several connections to one server, over which its calls are spread.

A service takes one call at a time from each of its queues, and a connection belongs to one of them
(docs/decisions/076): a caller with one connection waits for that queue alone.

A call with one answer goes to the connection with the fewest of them in flight, so that a connection whose queue is
long gets fewer. A stream goes to each in turn: it waits for its queue at its beginning only, however long it is open.
A connection is opened when it is first needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import grpc

_BROKEN = grpc.ChannelConnectivity.TRANSIENT_FAILURE


class _Connection:
    __slots__ = ("calls", "channel")

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.calls = 0
        """With one answer, in flight."""

    def is_broken(self) -> bool:
        return self.channel.get_state() is _BROKEN


class PooledChannel(grpc.aio.Channel):
    """A channel over `size` others, which `connect` opens; each must have a connection of its own.

    One whose connection is broken gets no calls while another is not: its calls would fail at once, so that it always
    had the fewest in flight. If all are broken, calls fail as on any channel. Belongs to one event loop.
    """

    def __init__(self, connect: Callable[[], grpc.aio.Channel], size: int) -> None:
        self._connect = connect
        self._size = size
        self._connections = [_Connection(connect())]
        self._turn = -1

    def least(self) -> _Connection:
        """The connection for a call with one answer."""
        best = min(self._connections, key=_in_flight)
        if best.calls and len(self._connections) < self._size:
            return self._opened()
        if best.is_broken():
            whole = [one for one in self._connections if not one.is_broken()]
            return min(whole, key=_in_flight, default=best)
        return best

    def next(self) -> _Connection:
        """The connection for a stream."""
        one = self._following()
        for _ in range(self._size - 1):
            if not one.is_broken():
                break
            one = self._following()
        return one

    def _following(self) -> _Connection:
        self._turn = (self._turn + 1) % self._size
        return self._connections[self._turn] if self._turn < len(self._connections) else self._opened()

    def _opened(self) -> _Connection:
        self._connections.append(_Connection(self._connect()))
        return self._connections[-1]

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _Counted(self, lambda channel: channel.unary_unary(method, *args, **kwargs))

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _InTurn(self, lambda channel: channel.unary_stream(method, *args, **kwargs))

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _InTurn(self, lambda channel: channel.stream_unary(method, *args, **kwargs))

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _InTurn(self, lambda channel: channel.stream_stream(method, *args, **kwargs))

    async def close(self, grace: float | None = None) -> None:
        self._size = len(self._connections)  # a call that comes late opens no other, which nobody would close
        for one in self._connections:
            await one.channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Of the first connection, as the two below."""
        return self._connections[0].channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._connections[0].channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._connections[0].channel.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Method:
    """A method of a stub, on whichever connection a call goes to."""

    __slots__ = ("_made", "_make", "_pool")

    def __init__(self, pool: PooledChannel, make: Callable[[grpc.aio.Channel], Any]) -> None:
        self._pool = pool
        self._make = make
        self._made: dict[_Connection, Any] = {}

    def _on(self, connection: _Connection) -> Any:
        made = self._made.get(connection)
        if made is None:
            made = self._made[connection] = self._make(connection.channel)
        return made


class _Counted(_Method):
    __slots__ = ()

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        connection = self._pool.least()
        connection.calls += 1
        try:
            return await self._on(connection)(*args, **kwargs)
        finally:
            connection.calls -= 1


class _InTurn(_Method):
    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._on(self._pool.next())(*args, **kwargs)


def _in_flight(connection: _Connection) -> int:
    return connection.calls
