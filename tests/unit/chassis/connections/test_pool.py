"""A channel of several connections, to a real server with one queue and with several."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from tests.support.waiting import GUARD_S, eventually

from penstock_chassis.auth import Authenticator, Role
from penstock_chassis.channel import connect, read, typed_errors, upload
from penstock_chassis.connections.pool import PooledChannel
from penstock_chassis.errors import Unavailable
from penstock_chassis.server import Server, Service

ECHO = "/penstock.test.v1.EchoService"
TOKEN = "op-token"
SIZE = 4


@pytest.fixture
def server(registration: Any) -> Server:
    return Server(Service(registrations=[registration]), Authenticator({Role.OPERATOR: TOKEN}), stop_s=0.0)


class Meeting:
    """What a handler does: it says from which connection its call came, and waits until so many calls have come."""

    def __init__(self, calls: int) -> None:
        self.barrier = asyncio.Barrier(calls)
        self.peers: list[str] = []

    async def __call__(self, context: grpc.aio.ServicerContext) -> None:
        self.peers.append(context.peer())
        await self.barrier.wait()


async def test_calls_in_flight_are_spread_evenly_over_the_connections(server: Server, echo: Any) -> None:
    echo.behaviour = meeting = Meeting(3 * SIZE)
    async with server, connect(server.address, TOKEN, connections=SIZE) as channel:
        call: Any = channel.unary_unary(f"{ECHO}/UnaryUnary")
        answers = await asyncio.gather(*(call(b"%d" % n) for n in range(3 * SIZE)))
    assert answers == [b"%d" % n for n in range(3 * SIZE)]
    assert sorted(meeting.peers.count(peer) for peer in set(meeting.peers)) == [3] * SIZE


async def test_one_call_after_the_other_needs_one_connection(server: Server, echo: Any) -> None:
    peers = set()
    echo.behaviour = lambda context: peers.add(context.peer())
    async with server, connect(server.address, TOKEN, connections=SIZE) as channel:
        call: Any = channel.unary_unary(f"{ECHO}/UnaryUnary")
        for _ in range(5):
            await call(b"x")
    assert len(peers) == 1


async def test_a_failed_or_cancelled_call_is_in_flight_no_longer(server: Server, echo: Any) -> None:
    peers: list[str] = []
    began = asyncio.Event()

    async def fail_or_wait(context: grpc.aio.ServicerContext) -> None:
        peers.append(context.peer())
        if len(peers) == 1:
            raise Unavailable("not now", reason="BUSY")
        if len(peers) == 2:
            began.set()
            await asyncio.Event().wait()

    echo.behaviour = fail_or_wait
    async with server, connect(server.address, TOKEN, connections=SIZE) as channel:
        call: Any = channel.unary_unary(f"{ECHO}/UnaryUnary")
        with pytest.raises(Unavailable), typed_errors():
            await call(b"x")
        waiting = asyncio.ensure_future(call(b"x"))
        await began.wait()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await call(b"x")
    assert len(set(peers)) == 1


async def test_streams_go_to_each_connection_in_turn(server: Server, echo: Any) -> None:
    peers: list[str] = []
    echo.behaviour = lambda context: peers.append(context.peer())
    async with server, connect(server.address, TOKEN, connections=SIZE) as channel:
        watch: Any = channel.unary_stream(f"{ECHO}/UnaryStream")
        send: Any = channel.stream_unary(f"{ECHO}/StreamUnary")
        both: Any = channel.stream_stream(f"{ECHO}/StreamStream")
        for _ in range(SIZE):
            assert [answer async for answer in read(watch, b"x")] == [b"x", b"x"]
        assert await upload(send, lambda: iter([b"a", b"b"]), timeout=None) == b"ab"
        assert [answer async for answer in both(iter([b"c"]))] == [b"c"]
    assert len(set(peers[:SIZE])) == SIZE
    assert peers[SIZE:] == peers[:2]


async def test_a_broken_connection_is_left_until_it_is_back(server: Server, registration: Any, echo: Any) -> None:
    """Another server stands for the broken one: it goes, and its connection is refused from then on."""
    other = Server(Service(registrations=[registration]), Authenticator({Role.OPERATOR: TOKEN}), stop_s=0.0)
    async with server:
        async with other:
            targets = iter([other.address, server.address])
            channel: Any = PooledChannel(lambda: grpc.aio.insecure_channel(next(targets)), 2)
            call: Any = channel.unary_unary(f"{ECHO}/UnaryUnary")
            sent = {"metadata": (("authorization", f"Bearer {TOKEN}"),)}
            echo.behaviour = Meeting(2)
            await asyncio.gather(call(b"x", **sent), call(b"x", **sent))
            echo.behaviour = lambda _context: None
        with pytest.raises(grpc.aio.AioRpcError):
            while True:  # its end is noticed with a call at the latest
                await call(b"x", **sent)
        for _ in range(5):
            assert await call(b"y", **sent) == b"y"
            assert [answer async for answer in channel.unary_stream(f"{ECHO}/UnaryStream")(b"z", **sent)]
        await channel.close()


async def test_without_a_server_a_call_fails_at_once_on_each_connection() -> None:
    async with connect("127.0.0.1:1", connections=SIZE) as channel:
        for _ in range(2 * SIZE):
            with pytest.raises(Unavailable) as caught, typed_errors():
                await channel.unary_unary(f"{ECHO}/UnaryUnary")(b"x")  # type: ignore[arg-type]
            assert caught.value.reason == "TRANSPORT_UNAVAILABLE"


async def test_a_closed_channel_opens_no_further_connection(server: Server, echo: Any) -> None:
    opened: list[grpc.aio.Channel] = []

    def connect_one() -> grpc.aio.Channel:
        opened.append(grpc.aio.insecure_channel(server.address))
        return opened[-1]

    echo.behaviour = meeting = Meeting(2)
    async with server:
        channel = PooledChannel(connect_one, SIZE)
        call: Any = channel.unary_unary(f"{ECHO}/UnaryUnary")
        waiting = asyncio.ensure_future(call(b"x", metadata=(("authorization", f"Bearer {TOKEN}"),)))
        await eventually(lambda: meeting.barrier.n_waiting == 1, "the call has come")
        closing = asyncio.ensure_future(channel.close(GUARD_S))
        await asyncio.sleep(0)
        for method in (call, channel.unary_stream(f"{ECHO}/UnaryStream")):
            with pytest.raises((grpc.aio.UsageError, grpc.aio.AioRpcError, asyncio.CancelledError)):
                await method(b"y")
        waiting.cancel()
        await asyncio.gather(waiting, closing, return_exceptions=True)
    assert len(opened) == 1


async def test_closing_ends_the_calls_of_all_connections(server: Server, echo: Any) -> None:
    echo.behaviour = meeting = Meeting(SIZE + 1)
    async with server:
        channel = connect(server.address, TOKEN, connections=SIZE)
        call: Any = channel.unary_unary(f"{ECHO}/UnaryUnary")
        waiting = [asyncio.ensure_future(call(b"x")) for _ in range(SIZE)]
        await eventually(lambda: meeting.barrier.n_waiting == SIZE, "all calls have come")
        await channel.close()
        results = await asyncio.gather(*waiting, return_exceptions=True)
    assert len(set(meeting.peers)) == SIZE
    assert all(isinstance(one, (asyncio.CancelledError, grpc.aio.AioRpcError)) for one in results)
