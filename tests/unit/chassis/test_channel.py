"""Channels between services, in clear on loopback and over TLS."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from tests.support.endpoints.loopback import unused_port
from tests.support.waiting import GUARD_S

from penstock_chassis.auth import Authenticator, Role
from penstock_chassis.channel import OPTIONS, _Unary, connect, error_from_rpc, read, streaming, typed_errors, upload
from penstock_chassis.connections.closing import Closing
from penstock_chassis.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from penstock_chassis.limits import MIN_PING_S
from penstock_chassis.server import Server, Service
from penstock_chassis.testing import in_virtual_time, serve
from penstock_chassis.tls import ClientTls, ServerTls

ECHO = "/penstock.test.v1.EchoService/UnaryUnary"
TOKENS = {Role.OPERATOR: "op-token"}


@pytest.fixture
def issue(tmp_path: Path) -> Callable[[trustme.CA, str], ClientTls]:
    """Writes a certificate of a CA for a name; returns where its files are."""

    def write(ca: trustme.CA, name: str) -> ClientTls:
        leaf = ca.issue_cert(name)
        files = ClientTls(tmp_path / f"{name}-ca.pem", tmp_path / f"{name}.pem", tmp_path / f"{name}.key")
        assert files.ca and files.cert and files.key
        ca.cert_pem.write_to_path(str(files.ca))
        files.cert.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        leaf.private_key_pem.write_to_path(str(files.key))
        return files

    return write


@pytest.mark.requirement("R9", "R11")
@pytest.mark.parametrize("target", ["192.0.2.1:7701", "example.org:7701", "dns:///127.0.0.1:1", "unix:/x", "7701", ""])
def test_a_token_is_never_sent_in_clear_beyond_loopback(target: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        connect(target, "op-token")
    assert caught.value.reason == "TOKEN_IN_CLEAR"


@pytest.mark.parametrize("target", ["127.0.0.1:7701", "localhost:7701", "[::1]:7701", "127.8.9.1:1"])
async def test_loopback_may_have_it_in_clear(target: str) -> None:
    await connect(target, "op-token").close()


@pytest.mark.requirement("R27")
async def test_a_server_that_is_not_there_is_a_typed_error_at_once() -> None:
    async with connect("127.0.0.1:1", "t") as channel:
        with pytest.raises(Unavailable) as caught, typed_errors():
            await channel.unary_unary(ECHO)(b"x")  # type: ignore[arg-type]
    assert caught.value.reason == "TRANSPORT_UNAVAILABLE"
    assert isinstance(caught.value.__cause__, grpc.aio.AioRpcError)


async def test_the_error_of_the_other_service_comes_back_as_itself(registration: Any, echo: Any) -> None:
    def fail(_context: object) -> None:
        raise NotFound("no such rollout", reason="ROLLOUT_UNKNOWN")

    echo.behaviour = fail
    async with serve(registration) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(ECHO)(b"x")  # type: ignore[arg-type]
    assert repr(error_from_rpc(caught.value)) == "NotFound('no such rollout', reason='ROLLOUT_UNKNOWN')"


async def test_a_message_of_many_megabytes_passes_both_ways(registration: Any) -> None:
    async with serve(registration) as (_, channel):
        body = b"\x01" * (32 * 1024 * 1024)
        assert await channel.unary_unary(ECHO)(body) == body  # type: ignore[arg-type]


async def test_over_tls_the_token_travels_as_call_credentials(registration: Any, issue: Any) -> None:
    files = issue(trustme.CA(), "localhost")
    server = Server(
        Service(registrations=[registration]),
        Authenticator(TOKENS),
        host="localhost",
        tls=ServerTls(files.cert, files.key),
    )
    async with server, connect(server.address, "op-token", ClientTls(files.ca)) as channel:
        assert await channel.unary_unary(ECHO)(b"x") == b"x"  # type: ignore[arg-type]


async def test_a_server_with_a_client_ca_takes_only_its_certificates(registration: Any, issue: Any) -> None:
    """Mutual TLS: no certificate and one of another CA fail in the handshake; the token is needed all the same."""
    ca = trustme.CA()
    files, client = issue(ca, "localhost"), issue(ca, "driver")
    foreign = issue(trustme.CA(), "stranger")
    server = Server(
        Service(registrations=[registration]),
        Authenticator(TOKENS),
        host="localhost",
        tls=ServerTls(files.cert, files.key, files.ca),
        stop_s=0,
    )
    async with server:
        for tls in (ClientTls(files.ca), ClientTls(files.ca, foreign.cert, foreign.key)):
            async with connect(server.address, "op-token", tls) as channel:
                with pytest.raises(Unavailable), typed_errors():
                    await channel.unary_unary(ECHO)(b"x")  # type: ignore[arg-type]
        good = ClientTls(files.ca, client.cert, client.key)
        async with connect(server.address, "op-token", good) as channel:
            assert await channel.unary_unary(ECHO)(b"x") == b"x"  # type: ignore[arg-type]
        async with connect(server.address, None, good) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(ECHO)(b"x")  # type: ignore[arg-type]
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_missing_certificate_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as caught:
        connect("example.org:1", "t", ClientTls(tmp_path / "absent.pem"))
    assert caught.value.reason == "TLS_FILE"
    assert "absent.pem" in caught.value.message


async def test_two_servers_cannot_share_a_port(registration: Any) -> None:
    authenticator = Authenticator(TOKENS)
    async with Server(Service(registrations=[registration]), authenticator) as first:
        port = int(first.address.rpartition(":")[2])
        with pytest.raises(FailedPrecondition) as caught:
            async with Server(Service(registrations=[registration]), authenticator, port=port):
                pass
    assert caught.value.reason == "PORT_IN_USE"


@pytest.mark.requirement("R27", "R93")
async def test_a_new_channel_reaches_a_server_that_is_back_at_once(registration: Any) -> None:
    """However long channels that knew the last one wait until they try again."""
    authenticator = Authenticator({}, anonymous=True)
    port = unused_port()
    async with Server(Service(registrations=[registration]), authenticator, port=port, stop_s=0.0) as server:
        address = server.address
        earlier = connect(address)
        await earlier.unary_unary(ECHO)(b"x")  # type: ignore[arg-type]
    async with earlier:
        for _ in range(8):
            with pytest.raises(grpc.aio.AioRpcError):
                await earlier.unary_unary(ECHO)(b"x")  # type: ignore[arg-type]
        async with (
            Server(Service(registrations=[registration]), authenticator, port=port, stop_s=0.0),
            connect(address) as channel,
        ):
            await channel.unary_unary(ECHO)(b"x")  # type: ignore[arg-type]


async def test_a_role_table_that_names_no_method_is_refused(registration: Any) -> None:
    """A misspelt line would leave a method closed, or open another, without anybody noticing."""
    service = Service(registrations=[registration], roles={"penstock.test.v1.EchoService/Unray": [Role.TRAINER]})
    with pytest.raises(ValueError, match="Unray"):
        async with Server(service, Authenticator(TOKENS)):
            pass


async def test_a_warm_up_that_fails_takes_the_server_down(registration: Any) -> None:
    async def warm_up() -> None:
        raise NotFound("no weights", reason="NO_WEIGHTS")

    server = Server(Service(registrations=[registration], warm_up=warm_up), Authenticator(TOKENS))
    with pytest.raises(NotFound):
        async with server:
            pass
    async with connect(server.address, "op-token") as channel:
        with pytest.raises(Unavailable), typed_errors():
            await channel.unary_unary(ECHO)(b"x")  # type: ignore[arg-type]


@pytest.mark.requirement("R23")
@pytest.mark.parametrize("round_", range(20))
async def test_a_cancelled_task_never_leaves_its_stream_open(round_: int, registration: Any, echo: Any) -> None:
    """Disconnected calls leave nothing behind; repeated, since grpc.aio alone misses some cancellations."""
    entered, released = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        entered.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            released.set()

    async with serve(registration) as (_, channel):
        echo.behaviour = lambda _context: wait()
        rpc: Any = channel.unary_stream("/penstock.test.v1.EchoService/WrittenStream")

        async def watch() -> None:
            with streaming(rpc(b"x")) as events:
                async for _ in events:
                    pass

        task = asyncio.ensure_future(watch())
        await entered.wait()
        task.cancel()
        await asyncio.wait([task])
        await released.wait()


async def test_a_stream_that_fails_raises_the_typed_error(registration: Any, echo: Any) -> None:
    def fail(_context: object) -> None:
        raise NotFound("gone", reason="SANDBOX_GONE")

    echo.behaviour = fail
    async with serve(registration) as (_, channel):
        rpc: Any = channel.unary_stream("/penstock.test.v1.EchoService/UnaryStream")
        with pytest.raises(NotFound), streaming(rpc(b"x")) as events:
            async for _ in events:
                pass


@pytest.mark.requirement("R44")
async def test_upload_refused_while_sent_gets_the_reason_each_time() -> None:
    """Grpc.aio forgets, now and then, what a stream was refused with that it was still writing to."""

    async def refuse(requests: AsyncIterator[bytes], context: Any) -> bytes:
        await anext(aiter(requests))
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such place")
        raise AssertionError("abort raises")

    async def frames() -> AsyncIterator[bytes]:
        for size in range(50):
            yield bytes(size)

    server = grpc.aio.server()
    handler: Any = grpc.stream_unary_rpc_method_handler(refuse)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"Put": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            method: Any = channel.stream_unary("/t.T/Put")
            for _ in range(300):
                with pytest.raises(NotFound), typed_errors():
                    await upload(method, frames, timeout=GUARD_S)
    finally:
        await server.stop(None)


@pytest.mark.requirement("R4", "R44")
@pytest.mark.parametrize(("losses", "expected"), [(0, NotFound), (2, NotFound), (3, Unavailable)])
async def test_an_upload_is_sent_again_twice_where_its_answer_was_forgotten(losses: int, expected: type) -> None:
    """The peer's own word counts, and no word is not asked for without end."""
    sent: list[list[bytes]] = []

    async def method(requests: Iterator[bytes], timeout: float | None) -> bytes:
        sent.append(list(requests))
        lost = len(sent) <= losses
        code, details = (
            (grpc.StatusCode.INTERNAL, "Internal error from Core") if lost else (grpc.StatusCode.NOT_FOUND, "")
        )
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)

    with pytest.raises(expected), typed_errors():
        await upload(method, lambda: iter([b"a", b"b"]), timeout=60)
    assert sent == [[b"a", b"b"]] * min(losses + 1, 3)


def test_a_cut_link_is_seen_within_twenty_seconds_and_no_ping_is_too_early() -> None:
    """A server ends connections whose pings come sooner than it allows, so there is room for a late one before."""
    options = dict(OPTIONS)
    every_ms, wait_ms = (int(str(options[f"grpc.keepalive_{name}_ms"])) for name in ("time", "timeout"))
    assert every_ms >= 1.2 * MIN_PING_S * 1000
    assert every_ms + wait_ms <= 20_000


class Refusing:
    """A method of a server that refuses the streams of the first calls."""

    def __init__(
        self, refusals: int, text: str = "Stream removed (RST_STREAM (Received RST_STREAM with error code 7))"
    ):
        self.refusals = refusals
        self.text = text
        self.timeouts: list[float | None] = []

    async def __call__(self, request: bytes, *, timeout: float | None, metadata: Any) -> bytes:
        self.timeouts.append(timeout)
        if len(self.timeouts) <= self.refusals:
            empty = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, empty, empty, details=self.text)
        return request


def test_a_call_whose_stream_was_refused_is_made_again_within_its_deadline() -> None:
    server = Refusing(3)
    assert in_virtual_time(_Unary(ECHO, server, (), Closing())(b"x", timeout=60.0)) == b"x"
    assert len(server.timeouts) == 4
    assert server.timeouts == sorted(server.timeouts, key=lambda left: -(left or 0.0)) and server.timeouts[0] == 60.0
    hopeless = Refusing(10_000)

    async def ask() -> None:
        with typed_errors():
            await _Unary(ECHO, hopeless, (), Closing())(b"x", timeout=5.0)

    with pytest.raises(Unavailable) as caught:
        in_virtual_time(ask())
    assert caught.value.reason == "STREAM_REFUSED" and 5 <= len(hopeless.timeouts) < 100


async def test_another_break_of_a_stream_is_no_refusal() -> None:
    server = Refusing(1, "Stream removed (RST_STREAM (Received RST_STREAM with error code 8))")
    with pytest.raises(Unavailable), typed_errors():
        await _Unary(ECHO, server, (), Closing())(b"x", timeout=60.0)
    assert len(server.timeouts) == 1


class Stream:
    """A call with two messages, whose stream may be refused."""

    def __init__(self, request: bytes, *, refused: bool) -> None:
        self.request = request
        self.refused = refused

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self.refused:
            await Refusing(1)(self.request, timeout=None, metadata=())
        yield self.request
        yield b"more"

    def cancel(self) -> bool:
        return True


def test_a_stream_that_was_refused_is_read_once_it_is_taken() -> None:
    calls: list[Stream] = []

    def method(request: bytes) -> Stream:
        calls.append(Stream(request, refused=len(calls) < 3))
        return calls[-1]

    async def messages() -> list[bytes]:
        return [message async for message in read(method, b"x")]

    assert in_virtual_time(messages()) == [b"x", b"more"] and len(calls) == 4
