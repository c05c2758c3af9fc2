"""What the kernel knows of a connection's end (R105)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.waiting import awaited

from penstock_chassis import sockets

ANSWER = b"an answer"


@contextlib.asynccontextmanager
async def connection() -> AsyncIterator[tuple[asyncio.WriteTransport, socket.socket]]:
    """A server's transport that reads nothing, so that it does not notice the end, and its client."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    accepted.setblocking(False)
    transport, _ = await loop.create_connection(asyncio.Protocol, sock=accepted)
    transport.pause_reading()
    try:
        yield transport, client
    finally:
        client.close()
        transport.abort()


def read_to_the_end(client: socket.socket) -> bytes:
    """Blocks this thread and with it the loop: the server learns nothing meanwhile."""
    found = b""
    while data := client.recv(1 << 10):
        found += data
    return found


def take_error(server: asyncio.WriteTransport) -> int:
    """Returns the kernel's error and uses it up, as a read does; 0 without one."""
    error: int = server.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return error


@pytest.mark.requirement("R105")
async def test_an_answer_counts_as_received_once_both_sides_have_ended() -> None:
    """The loop has not noticed it yet, and the kernel keeps no state of such a connection."""
    async with connection() as (server, client):
        server.write(ANSWER)
        server.write_eof()
        assert read_to_the_end(client) == ANSWER
        client.close()
        awaited(lambda: sockets.ended_whole(server), "the client's end is there")
        assert sockets.gets_all(server)
        assert sockets.stands(server)


@pytest.mark.requirement("R105")
async def test_an_answer_does_not_count_as_received_after_a_reset() -> None:
    """Looking does not use up the error: the second look, and the loop, still see it."""
    async with connection() as (server, client):
        server.write(ANSWER)
        server.write_eof()
        assert client.recv(1, socket.MSG_PEEK | socket.MSG_WAITALL)
        client.close()  # with bytes unread: the kernel resets
        awaited(lambda: not sockets.stands(server), "the reset is there")
        for _ in range(2):
            assert not sockets.gets_all(server)
            assert not sockets.stands(server)
            assert not sockets.ended_whole(server)
        assert take_error(server)


@pytest.mark.requirement("R105")
async def test_a_transport_that_closes_after_a_reset_was_read_has_not_delivered() -> None:
    """The error is gone from the kernel then."""
    async with connection() as (server, client):
        server.write(ANSWER)
        assert client.recv(1, socket.MSG_PEEK | socket.MSG_WAITALL)
        client.close()
        awaited(lambda: bool(take_error(server)), "the reset is there")
        server.close()
        assert not sockets.gets_all(server)


@pytest.mark.requirement("R141")
async def test_a_unix_socket_may_lie_below_a_path_of_any_length(tmp_path: Path) -> None:
    path = tmp_path / ("long" * 40) / "one.sock"
    path.parent.mkdir()

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"here")
        writer.close()

    with sockets.short_path(path) as short:
        server = await asyncio.start_unix_server(answer, short)
    with sockets.short_path(path) as short:
        reader, writer = await asyncio.open_unix_connection(short)
    assert await reader.read() == b"here"
    writer.close()
    server.close()
    with pytest.raises(FileNotFoundError), sockets.short_path(tmp_path / "absent" / "one.sock"):
        pass
