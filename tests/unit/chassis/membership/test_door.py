"""One port in front of the replicas of a service."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.support.endpoints.loopback import unused_port
from tests.support.waiting import eventually_async

from penstock_chassis.membership.door import Door, main

_LARGE = bytes(range(256)) * 8192


@asynccontextmanager
async def replica(host: str, port: int = 0) -> AsyncIterator[int]:
    """Answers all that a client sends, with its own host before it; yields its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(host.encode() + b" " + await reader.read())
        writer.close()

    async with await asyncio.start_server(serve, host, port) as server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def door(target: str) -> AsyncIterator[int]:
    """The command before `target`; yields its port."""
    port = unused_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, *("-m", "penstock_chassis.membership.door", f"{port}={target}"), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"ready\n"
        yield port
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def asked(port: int, text: bytes) -> bytes:
    """The answer to all of `text`; empty where nobody answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(text)
        writer.write_eof()
        return await reader.read()
    finally:
        writer.close()


async def test_what_goes_through_a_door_arrives_whole_in_both_directions() -> None:
    async with replica("127.0.0.1") as inner, door(f"127.0.0.1:{inner}") as port:
        answers = await asyncio.gather(*(asked(port, _LARGE) for _ in range(8)))
        assert all(answer == b"127.0.0.1 " + _LARGE for answer in answers)


async def test_a_door_to_nobody_closes_and_opens_when_somebody_comes() -> None:
    inner = unused_port()
    async with door(f"127.0.0.1:{inner}") as port:
        assert await asked(port, b"") == b""
        async with replica("127.0.0.1", inner):
            assert await asked(port, b"word") == b"127.0.0.1 word"


async def test_connections_are_spread_over_the_addresses_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """And go to those that are left when one of them is gone."""
    loop = asyncio.get_running_loop()
    resolve = loop.getaddrinfo

    async def resolved(host: str, *args: Any, **options: Any) -> list[Any]:
        names = ("127.0.0.1", "127.0.0.2") if host == "replicas.example" else (host,)
        return [info for name in names for info in await resolve(name, *args, **options)]

    monkeypatch.setattr(loop, "getaddrinfo", resolved)
    async with replica("127.0.0.1", unused_port()) as inner:
        front = Door("replicas.example", inner)
        async with await asyncio.start_server(front.enter, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            assert [await asked(port, b"word") for _ in range(16)] == [b"127.0.0.1 word"] * 16
            seen = set()
            async with replica("127.0.0.2", inner):

                async def both() -> bool:
                    seen.add((await asked(port, b"word")).split()[0])
                    return len(seen) == 2

                await eventually_async(both, "both replicas answer")


@pytest.mark.parametrize("given", ["", "7701", "7701=sandbox", "x=sandbox:7701", "7701=:7701"])
def test_a_door_that_is_not_port_and_target_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([given])
    assert caught.value.code == 2
    assert "PORT=HOST:PORT" in capsys.readouterr().err
