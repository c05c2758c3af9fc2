"""A small service with a method of each arity, registered as generated code does it; messages are raw bytes."""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import pytest
import structlog

from penstock_chassis import rpc_status
from penstock_chassis.server import Registration
from penstock_chassis.telemetry import bound

ECHO = "penstock.test.v1.EchoService"


class Echo:
    """Each method does what `behaviour` says, then answers with what it was sent."""

    def __init__(self) -> None:
        self.behaviour: Callable[[grpc.aio.ServicerContext], Any] = lambda _context: None
        self.closed = 0

    async def act(self, context: grpc.aio.ServicerContext) -> None:
        result = self.behaviour(context)
        if result is not None:
            await result

    async def unary_unary(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await self.act(context)
        return request

    async def unary_stream(self, request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        try:
            yield request
            await self.act(context)
            yield request
        finally:
            self.closed += 1

    async def written_stream(self, request: bytes, context: grpc.aio.ServicerContext) -> None:
        await context.write(request)
        await self.act(context)
        await context.write(request)

    async def stream_unary(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> bytes:
        await self.act(context)
        return b"".join([request async for request in requests])

    async def stream_stream(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request
        await self.act(context)


def register_echo(servicer: Echo, server: Any) -> None:
    """What a generated `add_EchoServiceServicer_to_server` would do."""
    handlers: dict[str, grpc.RpcMethodHandler] = {
        "UnaryUnary": grpc.unary_unary_rpc_method_handler(servicer.unary_unary),
        "UnaryStream": grpc.unary_stream_rpc_method_handler(servicer.unary_stream),
        "WrittenStream": grpc.unary_stream_rpc_method_handler(servicer.written_stream),
        "StreamUnary": grpc.stream_unary_rpc_method_handler(servicer.stream_unary),
        "StreamStream": grpc.stream_stream_rpc_method_handler(servicer.stream_stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(ECHO, handlers),))
    server.add_registered_method_handlers(ECHO, handlers)


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def registration(echo: Echo) -> Registration:
    return echo, register_echo


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    """What is logged during the test, as dictionaries."""
    with structlog.testing.capture_logs(processors=[bound.merge]) as captured:
        yield captured


@pytest.fixture(params=["UnaryUnary", "UnaryStream", "WrittenStream", "StreamUnary", "StreamStream"])
def invoke(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Calls one of the five methods on a channel with b"x" and returns all that came back.

    Asks again where grpc.aio lost the status of a stream that ended while it was written to, as a client would.
    """
    name: str = request.param

    async def call(channel: Any, **options: Any) -> list[bytes]:
        while True:
            try:
                return await once(channel, **options)
            except grpc.aio.AioRpcError as error:
                if rpc_status.from_rpc_error(error).reason != "STREAM_BROKEN":
                    raise

    async def once(channel: Any, **options: Any) -> list[bytes]:
        path = f"/{ECHO}/{name}"
        rpc = {
            "UnaryUnary": lambda: channel.unary_unary(path)(b"x", **options),
            "UnaryStream": lambda: channel.unary_stream(path)(b"x", **options),
            "WrittenStream": lambda: channel.unary_stream(path)(b"x", **options),
            "StreamUnary": lambda: channel.stream_unary(path)(iter([b"x"]), **options),
            "StreamStream": lambda: channel.stream_stream(path)(iter([b"x"]), **options),
        }[name]()
        try:
            return [item async for item in rpc] if hasattr(rpc, "__aiter__") else [await rpc]
        finally:
            if name != "UnaryUnary":  # a coroutine, which has ended
                rpc.cancel()

    return call
