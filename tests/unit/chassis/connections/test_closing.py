"""Calls on a channel that closes under them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from penstock_chassis.auth import Authenticator, Role
from penstock_chassis.channel import connect, read, streaming, typed_errors, upload
from penstock_chassis.errors import Unavailable
from penstock_chassis.server import Server, Service

ECHO = "/penstock.test.v1.EchoService"
TOKEN = "op-token"


async def unary(channel: Any) -> None:
    await channel.unary_unary(f"{ECHO}/UnaryUnary")(b"x")


async def messages(channel: Any) -> None:
    async for _ in read(channel.unary_stream(f"{ECHO}/UnaryStream"), b"x"):
        pass


async def one_message_after_the_other(channel: Any) -> None:
    with streaming(channel.unary_stream(f"{ECHO}/UnaryStream")(b"x")) as call:
        while True:
            await call.read()


async def sent(channel: Any) -> None:
    await upload(channel.stream_unary(f"{ECHO}/StreamUnary"), lambda: iter([b"x"]), timeout=None)


async def both_ways(channel: Any) -> None:
    with streaming(channel.stream_stream(f"{ECHO}/StreamStream")()) as call:
        await call.write(b"x")
        await call.done_writing()
        async for _ in call:
            pass


KINDS = [unary, messages, one_message_after_the_other, sent, both_ways]


@pytest.fixture
def server(registration: Any) -> Server:
    return Server(Service(registrations=[registration]), Authenticator({Role.OPERATOR: TOKEN}), stop_s=0.0)


@pytest.fixture
def entered(echo: Any) -> asyncio.Event:
    """Calls are set to wait in their handler without end; set when one does."""
    event = asyncio.Event()

    async def wait() -> None:
        event.set()
        await asyncio.get_running_loop().create_future()

    echo.behaviour = lambda _context: wait()
    return event


@pytest.mark.requirement("R117", "R119")
@pytest.mark.parametrize("connections", [1, 8])
@pytest.mark.parametrize("work", KINDS)
async def test_a_call_whose_channel_closes_fails_as_if_the_peer_were_gone(
    work: Callable[[Any], Coroutine[Any, Any, None]], connections: int, server: Server, entered: asyncio.Event
) -> None:
    """Its task is not cancelled: a task group would not notice that it ended."""
    async with server:
        channel = connect(server.address, TOKEN, connections=connections)
        task = asyncio.ensure_future(work(channel))
        await entered.wait()
        await channel.close()
        with pytest.raises(Unavailable) as caught, typed_errors():
            await task
    assert caught.value.reason == "TRANSPORT_UNAVAILABLE"


@pytest.mark.requirement("R117", "R119")
@pytest.mark.parametrize("work", KINDS)
async def test_a_call_on_a_closed_channel_is_the_same_error(
    work: Callable[[Any], Coroutine[Any, Any, None]], server: Server
) -> None:
    async with server:
        channel = connect(server.address, TOKEN)
        await channel.close()
        with pytest.raises(Unavailable) as caught, typed_errors():
            await work(channel)
    assert caught.value.reason == "TRANSPORT_UNAVAILABLE"


@pytest.mark.parametrize("work", KINDS)
async def test_a_task_that_is_cancelled_as_its_channel_closes_is_cancelled(
    work: Callable[[Any], Coroutine[Any, Any, None]], server: Server, entered: asyncio.Event
) -> None:
    async with server:
        channel = connect(server.address, TOKEN)
        task = asyncio.ensure_future(work(channel))
        await entered.wait()
        task.cancel()
        await channel.close()
        await asyncio.wait([task])
    assert task.cancelled()


async def test_a_task_that_cleans_up_after_its_cancellation_sees_the_error_too(
    server: Server, entered: asyncio.Event
) -> None:
    started = asyncio.Event()

    async def cleans_up(channel: Any) -> None:
        started.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            await unary(channel)

    async with server:
        channel = connect(server.address, TOKEN)
        task = asyncio.ensure_future(cleans_up(channel))
        await started.wait()
        task.cancel()
        await entered.wait()
        await channel.close()
        with pytest.raises(Unavailable), typed_errors():
            await task


@pytest.mark.requirement("R117")
@pytest.mark.parametrize("is_async", [True, False])
async def test_an_upload_whose_source_fails_raises_the_sources_error(is_async: bool, server: Server) -> None:
    """grpc.aio cancels such a call, so that its task ended as if it had been cancelled."""

    async def later() -> AsyncIterator[bytes]:
        yield b"x"
        raise FileNotFoundError("gone")

    def now() -> Any:
        yield b"x"
        raise FileNotFoundError("gone")

    async with server, connect(server.address, TOKEN) as channel:
        method: Any = channel.stream_unary(f"{ECHO}/StreamUnary")
        with pytest.raises(FileNotFoundError, match="gone"):
            await upload(method, later if is_async else now, timeout=None)
