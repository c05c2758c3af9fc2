"""Streams whose callers do not read, on a real server: each holds a bounded amount for a bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from penstock_chassis import interceptor
from penstock_chassis.auth import Authenticator
from penstock_chassis.channel import connect, typed_errors
from penstock_chassis.errors import ResourceExhausted
from penstock_chassis.limits import Limits
from penstock_chassis.server import Server, Service

SERVICE = "penstock.test.v1.FloodService"
PIECE = bytes(64 << 10)
MOST_AHEAD = 64 << 20
"""Bytes that a server may have made for a caller who reads nothing; they are in the kernel and the caller's process."""


class Flood:
    """Sends pieces without end; `ended` when that handler has cleaned up."""

    def __init__(self) -> None:
        self.made = 0
        self.ended = asyncio.Event()

    async def download(self, _request: bytes, _context: object) -> AsyncIterator[bytes]:
        try:
            while True:
                self.made += len(PIECE)
                yield PIECE
        finally:
            self.ended.set()

    async def short(self, _request: bytes, _context: object) -> AsyncIterator[bytes]:
        yield b"first"
        yield b"last"

    def register(self, _servicer: object, server: Any) -> None:
        """As generated code does."""
        handlers: dict[str, Any] = {
            "Download": grpc.unary_stream_rpc_method_handler(self.download),
            "Short": grpc.unary_stream_rpc_method_handler(self.short),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        server.add_registered_method_handlers(SERVICE, handlers)


@pytest.fixture
def flood() -> Flood:
    return Flood()


def server(flood: Flood, reader_s: float) -> Server:
    return Server(
        Service(registrations=[(flood, flood.register)]),
        Authenticator({}, anonymous=True),
        stop_s=0,
        limits=Limits(reader_s=reader_s),
    )


def open_stream(channel: Any, method: str) -> Any:
    return channel.unary_stream(f"/{SERVICE}/{method}")(b"")


@pytest.mark.requirement("R13", "R89")
async def test_a_stream_that_is_not_read_ends_its_handler_within_a_bound(
    flood: Flood, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the handler holds (a file, an archive, a watch) is freed, though the caller reads nothing."""
    monkeypatch.setattr(interceptor, "LAST_WORD_S", 0.05)
    async with server(flood, reader_s=0.05) as served, connect(served.address) as channel:
        call = open_stream(channel, "Download")
        assert await call.read() == PIECE
        await flood.ended.wait()
        assert flood.made < MOST_AHEAD
        call.cancel()


@pytest.mark.requirement("R13", "R26")
async def test_reader_that_returns_after_the_cut_gets_the_reason(flood: Flood, monkeypatch: pytest.MonkeyPatch) -> None:
    """After what was sent comes a typed reason, and the end."""
    monkeypatch.setattr(interceptor, "LAST_WORD_S", 0.05)
    async with server(flood, reader_s=0.05) as served, connect(served.address) as channel:
        call = open_stream(channel, "Download")
        await flood.ended.wait()
        with pytest.raises(ResourceExhausted) as caught, typed_errors():
            async for _ in call:
                pass
        assert caught.value.reason == "READER_TOO_SLOW"


@pytest.mark.requirement("R4", "R13")
async def test_others_are_served_beside_streams_that_nobody_reads(flood: Flood) -> None:
    """Twenty of them on the same connection keep no call of another kind waiting."""
    async with server(flood, reader_s=3600) as served, connect(served.address) as channel:
        calls = [open_stream(channel, "Download") for _ in range(20)]
        for call in calls:
            assert await call.read() == PIECE
        assert [message async for message in open_stream(channel, "Short")] == [b"first", b"last"]
        for call in calls:
            call.cancel()


@pytest.mark.requirement("R26")
async def test_a_watch_of_which_nothing_changes_is_no_slow_reader() -> None:
    """The time runs while a message waits to be taken, not while there is none."""
    loop, bound_s = asyncio.get_running_loop(), 0.01
    written: list[bytes] = []

    class Context:
        """Of a caller who takes each message at once."""

        def invocation_metadata(self) -> tuple[()]:
            return ()

        def code(self) -> None:
            return None

        async def write(self, message: bytes) -> None:
            written.append(message)

    async def watch(_request: bytes, _context: object) -> AsyncIterator[bytes]:
        for message in (b"first", b"last"):
            change = loop.create_future()
            loop.call_later(3 * bound_s, change.set_result, None)
            await change
            yield message

    await interceptor._streaming("Watch", watch, None, bound_s, None, interceptor._checked)(b"", Context())
    assert written == [b"first", b"last"]
