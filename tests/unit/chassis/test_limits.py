"""What one without a token may take of a server, on a real one."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.support.loads import floods

from penstock_chassis import interceptor, limits
from penstock_chassis.auth import Authenticator, Role
from penstock_chassis.channel import connect
from penstock_chassis.limits import Limits
from penstock_chassis.server import Server, Service
from penstock_chassis.tls import ServerTls

ECHO = "/penstock.test.v1.EchoService/UnaryUnary"


def server(registration: Any, tls: ServerTls | None = None, **bounds: int) -> Server:
    return Server(
        Service(registrations=[registration]),
        Authenticator({Role.OPERATOR: "op-token"}),
        host="localhost" if tls else "127.0.0.1",
        tls=tls,
        stop_s=0,
        limits=Limits(**bounds),
    )


def answered(opened: socket.socket, stream: int) -> bool:
    """Waits for headers on the stream; False when the server hangs up first."""
    file = opened.makefile("rb")
    while head := file.read(9):
        file.read(int.from_bytes(head[:3], "big"))
        if head[3] == floods.HEADERS and int.from_bytes(head[5:], "big") == stream:
            return True
    return False


def hung_up(opened: socket.socket) -> bool:
    """Waits until the server closes; whatever it says before is dropped."""
    try:
        while opened.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


async def alive(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())


@pytest.mark.requirement("R5", "R148")
async def test_caller_without_a_token_is_refused_before_its_request_arrives(registration: Any) -> None:
    """A call that is announced and never made holds nothing of the server."""
    async with server(registration) as served:
        with await asyncio.to_thread(floods.unfinished, served.address, 1, ECHO) as opened:
            assert await asyncio.to_thread(answered, opened, 1)


@pytest.mark.requirement("R7", "R148")
async def test_a_health_check_whose_request_never_comes_is_ended(
    registration: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one method without a token waits for its request for a bounded time."""
    monkeypatch.setattr(interceptor, "OPEN_REQUEST_S", 0.01)
    async with server(registration) as served:
        with await asyncio.to_thread(floods.unfinished, served.address, 1) as opened:
            assert await asyncio.to_thread(answered, opened, 1)


@pytest.mark.requirement("R148")
async def test_a_client_with_more_calls_than_a_connection_may_have_opens_another(registration: Any, echo: Any) -> None:
    """The bound on one connection's calls is none on a client's."""
    arrived, calls = asyncio.Barrier(40), 40

    async def meet(_context: object) -> None:
        await arrived.wait()

    echo.behaviour = meet
    async with server(registration, streams=10) as served, connect(served.address, "op-token") as channel:
        async with asyncio.timeout(60):
            untyped: Any = channel
            answers: list[bytes] = await asyncio.gather(*(untyped.unary_unary(ECHO)(b"x") for _ in range(calls)))
    assert answers == [b"x"] * calls


@pytest.mark.requirement("R148")
async def test_a_connection_too_many_is_closed_and_the_others_are_served(registration: Any) -> None:
    """Connections are bounded, and so what they take of the files that a service may open."""
    async with server(registration, connections=2) as served, connect(served.address, "op-token") as channel:
        assert await channel.unary_unary(ECHO)(b"x") == b"x"  # type: ignore[arg-type]
        with await asyncio.to_thread(floods.unfinished, served.address, 0):
            host, _, port = served.address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=floods.PATIENCE_S) as third:
                assert await asyncio.to_thread(hung_up, third)
            assert await channel.unary_unary(ECHO)(b"x") == b"x"  # type: ignore[arg-type]


@pytest.mark.requirement("R148")
@pytest.mark.parametrize("is_tls", [False, True])
async def test_silent_connection_is_closed(
    registration: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_tls: bool
) -> None:
    """Neither half a TLS handshake nor a connection without HTTP/2's settings is kept."""
    monkeypatch.setattr(limits, "HANDSHAKE_S", 1)
    tls = None
    if is_tls:
        issued = trustme.CA().issue_cert("localhost")
        issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
        issued.private_key_pem.write_to_path(tmp_path / "key.pem")
        tls = ServerTls(tmp_path / "cert.pem", tmp_path / "key.pem")
    async with server(registration, tls) as served:
        host, _, port = served.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=floods.PATIENCE_S) as opened:
            assert await asyncio.to_thread(hung_up, opened)


@pytest.mark.requirement("R148")
async def test_a_connection_that_makes_no_calls_is_closed(registration: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle connections go, and a client that was idle calls again without noticing."""
    monkeypatch.setattr(limits, "IDLE_S", 1)
    async with server(registration) as served, connect(served.address, "op-token") as channel:
        assert await channel.unary_unary(ECHO)(b"x") == b"x"  # type: ignore[arg-type]
        with await asyncio.to_thread(floods.unfinished, served.address, 0) as opened:
            assert await asyncio.to_thread(hung_up, opened)
        assert await channel.unary_unary(ECHO)(b"y") == b"y"  # type: ignore[arg-type]


@pytest.mark.requirement("R148")
async def test_metadata_past_the_bound_is_refused_and_the_service_lives(registration: Any) -> None:
    """40 requests with 800 KB of metadata each; then one that says what became of 20 KB."""
    async with server(registration) as served:
        await asyncio.to_thread(floods.big_metadata, served.address, 800_000, 40)
        async with grpc.aio.insecure_channel(served.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), metadata=(("x-flood", "v" * 20_000),)
                )
        await alive(served.address)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
