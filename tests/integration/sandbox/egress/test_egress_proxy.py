"""The egress proxy's own process, asked as a sandbox's relay asks it: refusals, attacks, and its end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from tests.support.endpoints.egress_upstream import BIG_BYTES, LOGIN, TOKEN, Indexes, running

from penstock_chassis.errors import FailedPrecondition
from penstock_sandbox.domain.model import NetworkKind, NetworkPolicy, Sandbox, SandboxSpec, State
from penstock_sandbox.egress import service
from penstock_sandbox.egress.service import Egress, EgressOptions

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serving(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Indexes]:
    """The server behind all proxies of this file."""
    async with running(tmp_path_factory.mktemp("indexes")) as started:
        yield started


@pytest.fixture
def indexes(serving: Indexes) -> Indexes:
    """The same, asked nothing yet."""
    serving.asked.clear()
    serving.headers.clear()
    serving.go_on.clear()
    serving.holds.clear()
    return serving


def options(folder: Path, indexes: Indexes) -> EgressOptions:
    login, _, password = LOGIN.partition(":")
    netrc = folder / "netrc"
    netrc.write_text(f"machine localhost login {login} password {password}\n")
    return EgressOptions(
        folder=folder / "egress",
        trust=folder / "trust",
        private=("127.0.0.1/32",),
        netrc=netrc,
        ca=indexes.ca,
        tokens={"127.0.0.1": TOKEN},
        store_bytes=8 * BIG_BYTES,
        max_object_bytes=BIG_BYTES - 1,
        timeout_s=60,
    )


@asynccontextmanager
async def proxy(folder: Path, indexes: Indexes) -> AsyncIterator[Egress]:
    """A proxy that has recorded nothing."""
    started = Egress(options(folder, indexes))
    try:
        await started.open()
        yield started
    finally:
        await started.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def egress(tmp_path_factory: pytest.TempPathFactory, serving: Indexes) -> AsyncIterator[Egress]:
    """One for tests of which no two record the same."""
    async with proxy(tmp_path_factory.mktemp("egress"), serving) as started:
        yield started


async def connect(egress: Egress, indexes: Indexes, sandbox: str = "sb", **fields: object) -> Streams:
    """A connection of a sandbox whose policy lists localhost and some blocks."""
    policy = NetworkPolicy(
        NetworkKind.ALLOWLIST,
        local_port=3128,
        hosts=("localhost", "127.0.0.0/8", "169.254.0.0/16", "10.0.0.0/8", "::/0"),
        denied_hosts=("127.9.0.0/16",),
        ports=(indexes.port, indexes.plain_port, 80),
        recording="group",
    )
    view = Sandbox(sandbox, State.READY, SandboxSpec(), 0, 0)
    given = egress.given(view, replace(policy, **fields))  # type: ignore[arg-type]
    reader, writer = await asyncio.open_unix_connection(given.proxy)
    writer.write(given.proxy_greeting)
    return reader, writer


async def answer(streams: Streams, sent: str) -> str:
    """What the proxy answers until it ends the connection."""
    reader, writer = streams
    writer.write(sent.encode())
    await writer.drain()
    async with asyncio.timeout(60):
        got = await reader.read(-1)
    writer.close()
    return got.decode()


def get(url: str, host: str, *more: str, method: str = "GET") -> str:
    return "\r\n".join((f"{method} {url} HTTP/1.1", f"Host: {host}", *more, "Connection: close", "", ""))


@pytest.mark.requirement("R141")
@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (get("http://example.com/", "example.com"), "HOST_NOT_ALLOWED"),
        (get("http://127.9.1.1/", "127.9.1.1"), "HOST_NOT_ALLOWED"),
        (get("http://localhost:22/", "localhost:22"), "PORT_NOT_ALLOWED"),
        (get("http://localhost/", "localhost", method="DELETE"), "METHOD_NOT_ALLOWED"),
        (get("http://localhost/", "localhost", "Content-Length: 1", method="POST") + "x", "METHOD_NOT_ALLOWED"),
        (get("http://localhost/r/info/refs?service=git-receive-pack", "localhost"), "METHOD_NOT_ALLOWED"),
        (
            get("http://localhost/a/git%2Dreceive-pack/../git-upload-pack", "localhost", method="POST"),
            "METHOD_NOT_ALLOWED",
        ),
        (get("http://127.0.0.2/", "127.0.0.2"), "ADDRESS_NOT_ALLOWED"),
        (get("http://169.254.169.254/latest", "169.254.169.254"), "ADDRESS_NOT_ALLOWED"),
        (get("http://10.0.0.1/", "10.0.0.1"), "ADDRESS_NOT_ALLOWED"),
        (get("http://[::1]/", "[::1]"), "ADDRESS_NOT_ALLOWED"),
        (get("http://[::ffff:a9fe:a9fe]/", "[::ffff:a9fe:a9fe]"), "ADDRESS_NOT_ALLOWED"),
        (get("http://127.1/", "127.1"), "BAD_REQUEST"),
        (get("http://2130706433/", "2130706433"), "BAD_REQUEST"),
        (get("http://localhost/", "example.com"), "BAD_REQUEST"),
        (get("http://localhost/", "localhost", "Host: example.com"), "BAD_REQUEST"),
        (get("http://user@localhost/", "localhost"), "BAD_REQUEST"),
        (get("/", "localhost"), "BAD_REQUEST"),
        (get("ftp://localhost/", "localhost"), "BAD_REQUEST"),
        (get("http://localhost/", "localhost", "Content-Length: 3", "Transfer-Encoding: chunked"), "BAD_REQUEST"),
        (get("http://localhost/", "localhost", "Content-Length: 1", "Content-Length: 2"), "BAD_REQUEST"),
        (get("http://localhost/", "localhost", "Transfer-Encoding: chunked, identity"), "BAD_REQUEST"),
        (get("http://localhost/", "localhost", "Transfer-Encoding : chunked"), "BAD_REQUEST"),
        (get("http://localhost/", "localhost", "Content-Length: 40") + get("http://localhost/x", "b"), "BAD_REQUEST"),
        (get("http://localhost/", "localhost", "X: " + "x" * 200_000), "BAD_REQUEST"),
        (get("http://localhost/" + "x" * 20_000, "localhost"), "BAD_REQUEST"),
        (get("http://localhost/", "localhost", *(f"X{n}: y" for n in range(40_000))), "BAD_REQUEST"),
        (get("http://localhost/a.git/git-receive-pack", "localhost", method="POST"), "METHOD_NOT_ALLOWED"),
        (get("http://0x7f000001/", "0x7f000001"), "BAD_REQUEST"),
        (get("http://localhost./", "localhost."), "BAD_REQUEST"),
        ("CONNECT example.com:443 HTTP/1.1\r\nHost: example.com\r\n\r\n", "HOST_NOT_ALLOWED"),
        ("CONNECT localhost:22 HTTP/1.1\r\nHost: localhost\r\n\r\n", "PORT_NOT_ALLOWED"),
        ("\x16\x03\x01 no HTTP\r\n\r\n", "BAD_REQUEST"),
    ],
)
async def test_what_is_not_allowed_is_refused_by_name(egress: Egress, indexes: Indexes, sent: str, reason: str) -> None:
    got = await answer(await connect(egress, indexes), sent)
    assert f"Penstock-Egress-Error: {reason}\r\n" in got and f"Penstock egress: {reason}: " in got
    assert not indexes.asked and got.count("HTTP/1.1 ") == 1


@pytest.mark.requirement("R141")
async def test_a_refusal_names_the_host_and_nothing_of_the_operator(egress: Egress, indexes: Indexes) -> None:
    """Of a refused CONNECT, clients print the reason phrase alone."""
    sent = "CONNECT example.com:443 HTTP/1.1\r\nHost: example.com\r\n\r\n"
    got = await answer(await connect(egress, indexes), sent)
    assert got.partition("\r\n")[0] == (
        "HTTP/1.1 403 HOST_NOT_ALLOWED: the task's list of hosts does not name example.com"
    )
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        place = f"localhost:{closed.getsockname()[1]}"
        ports = (closed.getsockname()[1],)
        got = await answer(await connect(egress, indexes, ports=ports), get(f"http://{place}/", place))
    assert got.endswith(f"UPSTREAM_UNREACHABLE: {place} cannot be reached\n") and "127.0.0.1" not in got


@pytest.mark.requirement("R141")
async def test_what_follows_a_connect_at_once_is_no_request(egress: Egress, indexes: Indexes) -> None:
    place = f"localhost:{indexes.port}"
    sent = f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n\r\n" + get("http://localhost/count", "localhost")
    got = await answer(await connect(egress, indexes), sent)
    assert "Penstock-Egress-Error: BAD_REQUEST" in got and not indexes.asked


@pytest.mark.requirement("R141")
async def test_sixty_four_siblings_cause_one_request_upstream(egress: Egress, indexes: Indexes) -> None:
    sent = get(f"{indexes.plain_url}/held", f"localhost:{indexes.plain_port}")
    asking = [asyncio.ensure_future(answer(await connect(egress, indexes, f"sb{n}"), sent)) for n in range(64)]
    await indexes.holds.wait()
    asking[0].cancel()  # who asked first may leave
    indexes.go_on.set()
    answers = await asyncio.gather(*asking[1:])
    assert {got.partition("\r\n\r\n")[2] for got in answers} == {"held"} and indexes.asked == {"GET /held": 1}


@pytest.mark.requirement("R141")
async def test_credentials_go_over_tls_alone_and_nothing_of_others_passes(egress: Egress, indexes: Indexes) -> None:
    place = f"localhost:{indexes.plain_port}"
    more = ("Authorization: Basic x", "Cookie: a=b", "X-Mine: 1")
    got = await answer(await connect(egress, indexes), get(f"http://{place}/private/x", place, *more))
    assert got.startswith("HTTP/1.1 401")
    assert not {"Authorization", "Cookie", "X-Mine"} & set(indexes.headers[-1])
    got = await inside_tls(egress, indexes, "/private/x")
    assert got.endswith("for readers") and "session=secret" not in got
    got = await inside_tls(egress, indexes, "/token", at="127.0.0.1")
    assert got.endswith("for its bearer") and TOKEN not in got
    assert "401" in (await inside_tls(egress, indexes, "/token")).partition("\r\n")[0]


@pytest.mark.requirement("R141")
async def test_tls_inside_a_tunnel_is_for_its_host(egress: Egress, indexes: Indexes) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await inside_tls(egress, indexes, "/count", name="example.com")
    got = await inside_tls(egress, indexes, "/count", host="example.com")
    assert "Penstock-Egress-Error: BAD_REQUEST" in got
    assert not indexes.asked


@pytest.mark.requirement("R141")
async def test_failures_are_not_recorded_and_bodies_are_bounded(egress: Egress, indexes: Indexes) -> None:
    place = f"localhost:{indexes.plain_port}"
    for _ in range(2):
        got = await answer(await connect(egress, indexes), get(f"http://{place}/failing", place))
        assert got.startswith("HTTP/1.1 503") and got.endswith("try again")
    assert indexes.asked["GET /failing"] == 2
    got = await answer(await connect(egress, indexes), get(f"http://{place}/big", place))
    assert "Penstock-Egress-Error: RESPONSE_TOO_LARGE" in got
    # A redirect is the client's to follow: its target is a request of its own.
    got = await answer(await connect(egress, indexes), get(f"http://{place}/to?url=http://169.254.169.254/", place))
    assert got.startswith("HTTP/1.1 302") and "Location: http://169.254.169.254/" in got


@pytest.mark.requirement("R141")
async def test_what_upstream_cannot_mean_is_refused(egress: Egress, indexes: Indexes) -> None:
    """Its header would split the sandbox's response, or break this connection."""

    async def upstream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nX: a\rInjected: b\x01\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(upstream, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        place = f"localhost:{port}"
        got = await answer(await connect(egress, indexes, ports=(port,)), get(f"http://{place}/", place))
    assert "Penstock-Egress-Error: UPSTREAM_UNREACHABLE" in got and "Injected" not in got


@pytest.mark.requirement("R141")
async def test_a_killed_proxy_comes_back_with_its_recordings(tmp_path: Path, indexes: Indexes) -> None:
    sent = get(f"{indexes.plain_url}/count", f"localhost:{indexes.plain_port}")
    async with proxy(tmp_path, indexes) as egress:
        first = await answer(await connect(egress, indexes), sent)
        killed, trusted = egress.pid, egress.certificate.read_bytes()
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        async with asyncio.timeout(60):
            await egress.restarted.wait()
        assert egress.pid != killed and egress.certificate.read_bytes() == trusted
        again = await answer(await connect(egress, indexes), sent)
    assert again == first and indexes.asked == {"GET /count": 1}


@pytest.mark.requirement("R141")
async def test_a_missing_extra_is_named(tmp_path: Path, indexes: Indexes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_NEEDED", ("no_such_module",))
    with pytest.raises(FailedPrecondition, match=r"penstock-sandbox\[egress\]") as caught:
        await Egress(options(tmp_path, indexes)).open()
    assert caught.value.reason == "EGRESS_MISSING"


async def inside_tls(
    egress: Egress, indexes: Indexes, path: str, name: str = "", host: str = "", at: str = "localhost"
) -> str:
    """What is answered to a request in a tunnel to `at`, with `name` in TLS and `host` in its header."""
    reader, writer = await connect(egress, indexes)
    place = f"{at}:{indexes.port}"
    writer.write(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n\r\n".encode())
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    context = ssl.create_default_context(cafile=egress.certificate)
    async with asyncio.timeout(60):
        await writer.start_tls(context, server_hostname=name or at)
        return await answer((reader, writer), get(path, host or place))
