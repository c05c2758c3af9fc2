"""Slow, greedy and broken clients of the ingress, over real sockets: each is ended, and no other is kept waiting (R13).

Time spans are those of the tests' settings; what is asserted is that the service itself ends the connection.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock_interception.ingress import connections
from penstock_interception.ingress.connections import ConnectionLimits, Connections


class Client:
    """A socket to the ingress, and what a client does with it by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next answer."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])}
        body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return int(head[0].split(" ")[1]), headers, body

    async def ended(self) -> bytes:
        """Everything until the service ends the connection, by an orderly end or not."""
        gathered = bytearray()
        with suppress(ConnectionError):
            while data := await self.reader.read(1 << 16):
                gathered += data
        return bytes(gathered)


@asynccontextmanager
async def client(address: str, first: bytes = b"", **options: Any) -> AsyncIterator[Client]:
    """Connects to host:port; `first` is there before the service has accepted the connection, and so in time for it."""
    host, _, port = address.rpartition(":")
    if first:
        options["sock"] = socket.create_connection((host, int(port)))
        options["sock"].sendall(first)
    else:
        options |= {"host": host, "port": int(port)}
    reader, writer = await asyncio.open_connection(**options)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def head(rollout: Any, path: str, *headers: str, method: str = "POST", token: str | None = None) -> bytes:
    """A request's head."""
    lines = (
        f"{method} /rollout/{rollout.rollout_id}{path} HTTP/1.1",
        "host: ingress",
        f"authorization: Bearer {rollout.token if token is None else token}",
        "content-type: application/json",
        *headers,
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


HEALTH = b"GET /health HTTP/1.1\r\nhost: ingress\r\n\r\n"


@pytest.mark.requirement("R13")
@pytest.mark.parametrize("said", [b"", b"G", b"GET /health HTTP/1.1\r\nhost: ingress\r\nx-more: "])
async def test_a_client_that_does_not_say_what_it_wants_is_let_go(start: Any, said: bytes) -> None:
    """Neither silence nor half a head keeps a connection."""
    service = await start(header_timeout_s=0.05)
    async with client(service.ingress) as slow:
        slow.send(said)
        assert await slow.ended() == b""


@pytest.mark.requirement("R13")
async def test_each_further_request_has_the_same_time(start: Any) -> None:
    """A connection that was of use before is no excuse for half a head."""
    service = await start(header_timeout_s=0.5)
    async with client(service.ingress, HEALTH) as slow:
        assert (await slow.answer())[0] == 200
        slow.send(b"\r\nGET /health HTTP/1.1\r\n")
        assert await slow.ended() == b""


@pytest.mark.requirement("R31")
async def test_a_call_that_waits_is_not_a_slow_head(start: Any) -> None:
    """A held call lives beyond the deadline of its head; only reading is limited."""
    service = await start(header_timeout_s=0.05)
    rollout = await service.open()
    trainer = await service.trainer()
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "list the files"}]}).encode()
    asked = head(rollout, "/v1/chat/completions", f"content-length: {len(body)}") + body
    async with client(service.ingress, asked) as held, client(service.ingress) as silent:
        assert await silent.ended() == b""  # its time is over, and the head of the other is as old
        await trainer.answer("hello")
        status, _, told = await held.answer()
        assert (status, json.loads(told)["choices"][0]["message"]["content"]) == (200, "hello")


@pytest.mark.requirement("R13", "R33")
@pytest.mark.parametrize(
    ("path", "where"),
    [("/v1/chat/completions", ("error", "code")), ("/v1/messages", ("error", "type")), ("/mcp", ("error", "code"))],
)
async def test_a_body_that_does_not_come_is_a_408_of_the_dialect(start: Any, path: str, where: tuple[str, str]) -> None:
    """The connection is ended after it."""
    service = await start(body_timeout_s=0.05)
    rollout = await service.open()
    async with client(service.ingress) as slow:
        slow.send(head(rollout, path, "content-length: 100") + b'{"model"')
        status, headers, body = await slow.answer()
        assert status == 408
        assert json.loads(body)[where[0]][where[1]]
        assert headers["connection"] == "close"
        assert await slow.ended() == b""


@pytest.mark.requirement("R13")
async def test_a_head_that_grows_and_grows_is_431(start: Any) -> None:
    """In one piece, in many, as one header or as many."""
    service = await start(max_header_bytes=4096)
    many = b"".join(b"x-%d: y\r\n" % number for number in range(600))
    for more in (b"x-large: " + b"y" * 5000, many):
        for step in (len(more), 1000):
            async with client(service.ingress) as greedy:
                greedy.send(b"GET /health HTTP/1.1\r\nhost: ingress\r\n")
                for at in range(0, len(more), step):
                    greedy.send(more[at : at + step])
                    with suppress(ConnectionError):
                        await greedy.writer.drain()
                assert (await greedy.ended()).startswith(b"HTTP/1.1 431 ")
    async with client(service.ingress) as modest:
        modest.send(b"GET /health HTTP/1.1\r\nx-large: " + b"y" * 3000 + b"\r\nhost: ingress\r\n\r\n")
        assert (await modest.answer())[0] == 200


@pytest.mark.requirement("R33")
async def test_a_body_that_nobody_read_is_no_head(start: Any) -> None:
    """What is left of a refused request is passed over, however long, and the next one is served."""
    service = await start(max_header_bytes=4096)
    rollout = await service.open()
    async with client(service.ingress) as refused:
        refused.send(head(rollout, "/v1/chat/completions", "content-length: 60000", token="wrong") + b"x" * 20)
        assert (await refused.answer())[0] == 401
        refused.send(b"x" * (60000 - 20) + HEALTH)
        assert (await refused.answer())[0] == 200


@pytest.mark.requirement("R13")
@pytest.mark.parametrize("more", ["content-length: 1000", "transfer-encoding: chunked"])
async def test_the_rest_of_a_refused_body_is_awaited_for_a_bounded_time(start: Any, more: str) -> None:
    """Whoever was refused and neither sends nor goes is let go."""
    service = await start(body_timeout_s=0.05)
    rollout = await service.open()
    async with client(service.ingress) as refused:
        refused.send(head(rollout, "/v1/chat/completions", more, token="wrong"))
        assert (await refused.answer())[0] == 401
        assert await refused.ended() == b""


@pytest.mark.requirement("R13")
@pytest.mark.parametrize("refusal", ["401", "431"])
async def test_rest_of_a_refused_body_is_skipped_up_to_a_bound(
    start: Any, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    """Whoever was refused and sends on and on is cut off by its bytes, long before its time is over."""
    monkeypatch.setattr(connections, "PASSED_OVER_BYTES", 1 << 20)
    service = await start(max_header_bytes=4096, header_timeout_s=3600.0, body_timeout_s=3600.0)
    rollout = await service.open()
    async with client(service.ingress) as refused:
        much = ("x-large: " + "y" * 5000,) if refusal == "431" else ()
        refused.send(head(rollout, "/v1/chat/completions", *much, "transfer-encoding: chunked", token="wrong"))
        assert str((await refused.answer())[0]) == refusal
        piece = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
        with pytest.raises(ConnectionError):
            while True:
                refused.send(piece)
                await refused.writer.drain()


@pytest.mark.requirement("R13")
async def test_the_rest_of_a_refused_body_is_not_decompressed(start: Any) -> None:
    """A megabyte of gzip may be a gigabyte: it is dropped unread, and the connection goes on with the next request."""
    service = await start()
    rollout = await service.open()
    bomb = gzip.compress(bytes(1 << 20))
    async with client(service.ingress) as refused:
        coded = "content-encoding: gzip"
        refused.send(head(rollout, "/v1/chat/completions", f"content-length: {len(bomb)}", coded, token="wrong"))
        assert (await refused.answer())[0] == 401
        refused.send(bomb + HEALTH)
        assert (await refused.answer())[0] == 200


@pytest.mark.requirement("R8", "R33")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/mcp"])
@pytest.mark.parametrize(
    ("header", "body"),
    [
        ("transfer-encoding: chunked", b"zz\r\n{}\r\n0\r\n\r\n"),
        (
            "content-encoding: gzip\r\ncontent-length: 12",
            b"not gzip....",
        ),
        ("content-encoding: deflate\r\ncontent-length: 12", b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"),
    ],
)
async def test_a_body_that_is_not_what_its_head_says_is_a_400(
    service: Any, path: str, header: str, body: bytes
) -> None:
    """Never a 500, and nothing of the inside."""
    rollout = await service.open()
    async with client(service.ingress) as broken:
        broken.send(head(rollout, path, header) + body)
        status, _, told = await broken.answer()
        assert status == 400
        assert b"Traceback" not in told


@pytest.mark.requirement("R4")
async def test_a_rollout_has_so_many_connections_and_another_rollout_its_own(start: Any) -> None:
    """An agent that opens connections starves itself at most."""
    service = await start(max_rollout_connections=2)
    greedy, other = await service.open(), await service.open()
    async with client(service.ingress) as first, client(service.ingress) as second:
        for one in (first, second, first):
            one.send(head(greedy, "/v1/models", method="GET"))
            assert (await one.answer())[0] == 200
        async with client(service.ingress) as third:
            third.send(head(greedy, "/v1/models", method="GET"))
            status, headers, body = await third.answer()
            assert (status, json.loads(body)["error"]["code"]) == (429, "too_many_connections")
            assert headers["x-should-retry"] == "true"
            assert await third.ended() == b""
        async with client(service.ingress) as theirs:
            theirs.send(head(other, "/v1/models", method="GET"))
            assert (await theirs.answer())[0] == 200
        second.writer.close()
        while True:  # until the service has seen it
            async with client(service.ingress) as next_one:
                next_one.send(head(greedy, "/v1/models", method="GET"))
                if (await next_one.answer())[0] == 200:
                    break


@pytest.mark.requirement("R4")
@pytest.mark.parametrize("limit", ["max_peer_connections", "max_connections"])
async def test_full_listener_drops_connections_without_a_credential_first(start: Any, limit: str) -> None:
    """Waiting connections of strangers keep nobody out; those of rollouts stay."""
    service = await start(**{limit: 2})
    rollout = await service.open()
    async with client(service.ingress) as mine, client(service.ingress) as stranger:
        mine.send(head(rollout, "/v1/models", method="GET"))
        assert (await mine.answer())[0] == 200
        stranger.send(HEALTH)
        assert (await stranger.answer())[0] == 200
        async with client(service.ingress) as later:
            later.send(head(rollout, "/v1/models", method="GET"))
            assert (await later.answer())[0] == 200
            assert await stranger.ended() == b""
            async with client(service.ingress) as too_late:
                assert await too_late.ended() == b""
            mine.send(HEALTH)
            assert (await mine.answer())[0] == 200


@pytest.mark.requirement("R13", "R23")
async def test_client_that_does_not_read_is_cut_off_and_its_handler_ends() -> None:
    """What is written to it waits in memory for the write deadline and no longer."""
    over = asyncio.Event()

    async def large(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(bytes(1 << 20))
        finally:
            over.set()

    ours = Connections(ConnectionLimits(write_s=0.05))
    app = web.Application()
    app.router.add_get("/", ours.tracked(large))
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    assert runner.server is not None
    listener = await asyncio.get_running_loop().create_server(ours.factory(runner.server), "127.0.0.1", 0)
    try:
        deaf = socket.create_connection(listener.sockets[0].getsockname())
        deaf.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await over.wait()
        deaf.close()
        assert len(ours) == 0
    finally:
        listener.close()
        await runner.cleanup()
        ours.close()


@pytest.mark.requirement("R8", "R33")
async def test_no_bytes_make_the_ingress_fail_or_hang(start: Any) -> None:
    """Any bytes as requests: an answer below 500 or the connection's end, and the service lives on."""
    service = await start(header_timeout_s=0.3, body_timeout_s=0.3)
    rollout = await service.open()
    loop = asyncio.get_running_loop()
    paths = [
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/responses",
        "/v1beta/models/m:countTokens",
        "/mcp",
        "/v1/models",
    ]
    line = st.one_of(
        st.binary(max_size=40),
        st.builds(
            lambda method, path, end: f"{method} /rollout/{rollout.rollout_id}{path} HTTP/{end}".encode(),
            st.sampled_from(["GET", "POST", "DELETE", "HEAD", "OPTIONS", "TRACE", "CONNECT", "get", "PÖST"]),
            st.one_of(st.sampled_from(paths), st.text(max_size=12)),
            st.sampled_from(["1.1", "1.0", "2.0", "9", ""]),
        ),
    )
    header = st.one_of(
        st.binary(max_size=30),
        st.sampled_from(
            [
                f"authorization: Bearer {rollout.token}".encode(),
                b"content-length: 2",
                b"content-length: -1",
                b"content-length: 99999999999999999999",
                b"transfer-encoding: chunked",
                b"transfer-encoding: gzip, chunked",
                b"content-encoding: gzip",
                b"content-encoding: br",
                b"content-encoding: zstd",
                b"content-type: application/json",
                b"content-type: application/json; charset=utf-7",
                b"content-type: ;;;",
                b"expect: 100-continue",
                b"expect: nothing",
                b"connection: upgrade\r\nupgrade: websocket",
                b"connection: close",
                b"host: x",
                b"accept: text/event-stream",
                b"idempotency-key: " + b"k" * 300,
                b"x-stainless-retry-count: \xd9\xa1",
                b"x-stainless-retry-count: 99999999999999999999999",
                b"mcp-session-id: \xff",
                b"origin: http://[",
            ]
        ),
    )
    body = st.one_of(
        st.binary(max_size=60),
        st.sampled_from([b"{}", b"2\r\n{}\r\n0\r\n\r\n", b"[]", b'{"jsonrpc":"2.0","id":1,"method":"ping"}']),
    )

    async def exchange(data: bytes) -> bytes:
        async with client(service.ingress) as fuzzer:
            fuzzer.send(data)
            fuzzer.writer.write_eof()
            return await fuzzer.ended()

    seen: list[bytes] = []

    def one(first: bytes, headers: list[bytes], rest: bytes, end: bytes) -> None:
        seen.append(end.join([first, f"authorization: Bearer {rollout.token}".encode(), *headers, b"", rest]))

    collect = settings(max_examples=150, database=None, suppress_health_check=list(HealthCheck), deadline=None)(
        given(line, st.lists(header, max_size=5), body, st.sampled_from([b"\r\n", b"\r\n", b"\n"]))(one)
    )
    await loop.run_in_executor(None, collect)
    for data in seen:
        told = await exchange(data)
        assert not told.startswith(b"HTTP/1.1 5") and b"\r\nHTTP/1.1 5" not in told, data
        assert b"Traceback" not in told
    async with client(service.ingress, head(rollout, "/v1/models", method="GET")) as after:
        assert (await after.answer())[0] == 200
    assert service.interceptor.registry.open_calls() == []
