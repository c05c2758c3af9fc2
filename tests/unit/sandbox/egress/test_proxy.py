"""Connections that take long, are many, or bring much: all end, and others go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock_sandbox.egress import __main__ as process
from penstock_sandbox.egress import proxy
from penstock_sandbox.egress.errors import Refusal
from penstock_sandbox.egress.greeting import Greeting
from penstock_sandbox.egress.proxy import Bodies

LISTED = Greeting("sb", "r", ("a.test",), (), (80, 443), recorded_only=True).encoded()
POST = (
    b"POST http://a.test/r/git-upload-pack HTTP/1.1\r\nHost: a.test\r\n"
    b"Content-Type: application/x-git-upload-pack-request\r\nContent-Length: 9\r\n\r\n"
)

CONNECT = b"CONNECT a.test:443 HTTP/1.1\r\nHost: a.test:443\r\nContent-Length: 5\r\n\r\n"


@asynccontextmanager
async def serving(folder: Path, capsys: pytest.CaptureFixture[str], private: Sequence[str] = ()) -> AsyncIterator[Path]:
    """Yields the socket of a proxy in this process, which may connect to addresses of ``private``."""
    path = folder / "proxy.sock"
    settings = {
        "folder": str(folder / "egress"),
        "socket": str(path),
        "private": [*private],
        "netrc": "",
        "ca": "",
        "tokens": {},
        "store_bytes": 10_000_000,
        "max_object_bytes": 1_000_000,
        "timeout_s": 60,
        "recordings": "",
    }
    stop, listens = asyncio.Event(), asyncio.Event()
    served = asyncio.ensure_future(process.serve(settings, stop, listens))
    async with asyncio.timeout(60):
        await listens.wait()
    assert "BEGIN CERTIFICATE" in json.loads(capsys.readouterr().out)["ca"]
    yield path
    stop.set()
    await served


@pytest.mark.requirement("R141")
@pytest.mark.parametrize(
    "sent",
    [b"", b"GET http://a.te", POST + b"abc", CONNECT],
    ids=["nothing", "head", "body", "body of a CONNECT"],
)
async def test_a_slow_request_is_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(proxy, "_IDLE_S", 0.1)
    monkeypatch.setattr(proxy, "_REQUEST_S", 0.1)
    async with serving(tmp_path, capsys) as path:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(LISTED + sent)
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.close()


@pytest.mark.requirement("R141")
async def test_a_connection_too_many_is_cut_and_those_before_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_MOST_CONVERSATIONS", 1)
    async with serving(tmp_path, capsys) as path:
        first = await asyncio.open_unix_connection(path)
        first[1].write(LISTED + b"GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\n")
        # One that waits for the rest of its head.
        second = await asyncio.open_unix_connection(path)
        async with asyncio.timeout(60):
            assert await second[0].read() == b""
            first[1].write(b"\r\n")
            assert (await first[0].readline()).startswith(b"HTTP/1.1 403 NOT_RECORDED: GET http://a.test/ ")
        for _, writer in (first, second):
            writer.close()


@pytest.mark.requirement("R141")
def test_bodies_in_memory_are_bounded_for_each_sandbox_and_for_all() -> None:
    bodies = Bodies(most_of_one=10, most=15)
    with bodies.of("one") as one, bodies.of("one") as again, bodies.of("two") as two:
        one(6)
        with pytest.raises(Refusal) as caught:
            again(5)
        assert caught.value.reason == "PROXY_BUSY"
        two(9)
        with pytest.raises(Refusal):
            one(1)
    with bodies.of("one") as one:
        one(10)


@pytest.mark.requirement("R141")
async def test_the_longest_list_is_taken_and_a_longer_one_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The connections of a list of many long names were cut."""
    most = tuple(f"{number:063}." * 3 + f"{number:061}" for number in range(1024))
    listed = Greeting("sb", "r", (*most, "a.test"), most[:256], (80,), recorded_only=True).encoded()
    async with serving(tmp_path, capsys) as path:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(listed + b"GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n")
        async with asyncio.timeout(60):
            assert (await reader.readline()).startswith(b"HTTP/1.1 403 NOT_RECORDED: ")
        writer.close()
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"\xff" * 8)
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.close()


@asynccontextmanager
async def answering(head: bytes, body: bytes) -> AsyncIterator[int]:
    """Yields the port of a server that answers each connection with these bytes, and HEAD without the body."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        writer.write(head if asked.startswith(b"HEAD") else head + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def asked(proxy: Path, port: int, method: str, *, recorded_only: bool = False) -> tuple[list[bytes], bytes]:
    """Returns the lines of the proxy's answer before the body, and that."""
    greeting = Greeting("sb", "r", ("127.0.0.1",), (), (port,), recorded_only)
    reader, writer = await asyncio.open_unix_connection(proxy)
    writer.write(greeting.encoded())
    writer.write(f"{method} http://127.0.0.1:{port}/f HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n".encode())
    writer.write(b"Connection: close\r\n\r\n")
    async with asyncio.timeout(60):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return head.split(b"\r\n"), body


@pytest.mark.requirement("R141")
async def test_an_answer_to_head_says_how_long_the_body_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As upstream said it, at first and from the recording; the answer to a GET is one of its own."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 300\r\nConnection: close\r\n\r\n"
    async with answering(head, b"x" * 300) as port, serving(tmp_path, capsys, ["127.0.0.1/32"]) as proxy:
        for recorded_only in (False, True):
            lines, body = await asked(proxy, port, "HEAD", recorded_only=recorded_only)
            assert lines == [b"HTTP/1.1 200 OK", b"Content-Length: 300", b"Connection: close"]
            assert body == b""
        lines, body = await asked(proxy, port, "GET")
        assert lines == [b"HTTP/1.1 200 OK", b"Content-Length: 300", b"Connection: close"]
        assert body == b"x" * 300


@pytest.mark.requirement("R141")
@pytest.mark.parametrize("status", [b"200", b"500"], ids=["recorded", "not recorded"])
async def test_a_head_with_other_letters_passes_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: bytes
) -> None:
    """In whatever encoding: a file's name has accents, and so does a reason phrase."""
    first = b"HTTP/1.1 " + status + b" D\xe9j\xe0 vu"
    names = [b'Content-Disposition: attachment; filename="\xe9t\xe9.txt"', b"X-Name: \xc3\xa9t\xc3\xa9"]
    head = b"\r\n".join([first, *names, b"Content-Length: 3", b"Connection: close", b"", b""])
    async with answering(head, b"abc") as port, serving(tmp_path, capsys, ["127.0.0.1/32"]) as proxy:
        for recorded_only in (False, status == b"200"):
            lines, body = await asked(proxy, port, "GET", recorded_only=recorded_only)
            assert lines[:3] == [first, *names]
            assert body == b"abc"
