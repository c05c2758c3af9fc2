"""Browsers that ask and take nothing: what is written for them is held for a bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.dashboard.test_gateway import LIST, TOKEN, WATCH, Backend, World, world

from penstock.dashboard import slow_browsers
from penstock.dashboard.framing import data_frame
from penstock.dashboard.gateway import Bounds

MESSAGE = bytes(1 << 20)
SOON = Bounds(write_s=0.05)


async def deaf(here: World, method: str) -> asyncio.StreamWriter:
    """A browser that asks, and takes little of the answer: 64 KiB, and what the kernel holds."""
    _, writer = await asyncio.open_connection("127.0.0.1", here.http_port, limit=1 << 15)
    body = data_frame(b"")
    head = (
        f"POST /rpc/{method} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/grpc-web+proto\r\n"
        f"authorization: Bearer {TOKEN}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    return writer


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when a browser's connection was ended because it took nothing."""
    ended, real = asyncio.Event(), slow_browsers.taken

    async def taken(*args: Any) -> None:
        try:
            await real(*args)
        except ConnectionResetError:
            ended.set()
            raise

    monkeypatch.setattr(slow_browsers, "taken", taken)
    return ended


@pytest.mark.requirement("R13")
async def test_page_that_stops_reading_a_stream_is_dropped_and_its_call_cancelled(
    tmp_path: Path, cut: asyncio.Event
) -> None:
    """A tab that stands still holds neither a place among the calls nor a service's stream for ever."""
    over = asyncio.Event()

    async def flood(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
        try:
            while True:
                yield MESSAGE
        finally:
            over.set()

    async with world(tmp_path, Backend(stream=flood), bounds=SOON) as here:
        writer = await deaf(here, WATCH)
        await cut.wait()
        await over.wait()
        writer.close()


@pytest.mark.requirement("R13")
async def test_an_answer_that_nobody_takes_is_dropped(tmp_path: Path, cut: asyncio.Event) -> None:
    """One message of many MiB as well: its connection is ended."""

    async def large(_request: bytes, _context: Any) -> bytes:
        return MESSAGE * 32

    async with world(tmp_path, Backend(unary=large), bounds=SOON) as here:
        writer = await deaf(here, LIST)
        await cut.wait()
        writer.close()


@pytest.mark.requirement("R13")
async def test_a_page_that_takes_its_time_gets_all_of_it(tmp_path: Path) -> None:
    """The bound is on standing still, not on being slow: all of it comes, in any number of bounds."""
    count = 20

    async def some(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield MESSAGE

    async with world(tmp_path, Backend(stream=some), bounds=Bounds(write_s=5.0)) as here, here.post(WATCH) as response:
        body = await response.content.read(-1)
    assert len(body) > count * len(MESSAGE)
