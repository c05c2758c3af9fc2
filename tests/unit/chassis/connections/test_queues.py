"""A server with several queues of calls: all that holds for one holds for all of them together."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.support.endpoints.loopback import unused_port
from tests.support.loads import floods
from tests.support.services.processes import descriptors
from tests.support.waiting import eventually

from penstock_chassis import limits
from penstock_chassis.auth import Authenticator, Role
from penstock_chassis.channel import connect
from penstock_chassis.errors import FailedPrecondition, NotFound
from penstock_chassis.health import Draining
from penstock_chassis.limits import Limits
from penstock_chassis.server import Server, Service
from penstock_chassis.tls import ClientTls, ServerTls

ECHO = "/penstock.test.v1.EchoService/UnaryUnary"
TOKEN = "op-token"
QUEUES = 3
CONNECTIONS = 12
"""All go to one of three queues once in 200 000 runs."""
PATIENCE_S = 20.0


def queued(registration: Any, queues: int = QUEUES, **more: Any) -> Server:
    return Server(
        Service(registrations=[registration], draining=more.pop("draining", Draining())),
        Authenticator({Role.OPERATOR: TOKEN}),
        call_queues=queues,
        stop_s=0.0,
        **more,
    )


def listeners(port: int) -> int:
    """Sockets of this process that listen at the port."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    sockets = {f"socket:[{inode}]" for inode in inodes}
    return sum(str(path) in sockets for path in descriptors())


async def connected(stack: AsyncExitStack, server: Server, tls: ClientTls | None = None) -> Sequence[grpc.aio.Channel]:
    """Channels with a connection each."""
    channels = []
    for _ in range(CONNECTIONS):
        pooled: Any = await stack.enter_async_context(connect(server.address, TOKEN, tls, connections=2))
        channels.append(pooled)
    return channels


@pytest.mark.requirement("R126")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_each_queue_listens_and_a_call_on_any_connection_is_served(registration: Any, host: str) -> None:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(queued(registration, host=host))
        port = int(server.address.rpartition(":")[2])
        assert listeners(port) >= QUEUES
        for channel in await connected(stack, server):
            assert await channel.unary_unary(ECHO)(b"x") == b"x"  # type: ignore[arg-type]


async def test_over_tls_each_queue_has_the_certificate(registration: Any, tmp_path: Path) -> None:
    ca = trustme.CA()
    issued = ca.issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    async with AsyncExitStack() as stack:
        tls = ServerTls(tmp_path / "cert.pem", tmp_path / "key.pem")
        server = await stack.enter_async_context(queued(registration, host="localhost", tls=tls))
        for channel in await connected(stack, server, ClientTls(tmp_path / "ca.pem")):
            assert await channel.unary_unary(ECHO)(b"x") == b"x"  # type: ignore[arg-type]


@pytest.mark.parametrize(("first", "second"), [(QUEUES, QUEUES), (1, QUEUES), (QUEUES, 1)])
async def test_a_second_service_cannot_share_the_port(registration: Any, first: int, second: int) -> None:
    async with queued(registration, first) as server:
        port = int(server.address.rpartition(":")[2])
        with pytest.raises(FailedPrecondition) as caught:
            await queued(registration, second, port=port).__aenter__()
        assert caught.value.reason == "PORT_IN_USE"
        async with connect(server.address, TOKEN) as channel:
            assert await channel.unary_unary(ECHO)(b"x") == b"x"  # type: ignore[arg-type]


async def test_a_foreign_grpc_server_cannot_share_the_port(registration: Any) -> None:
    """It asks for SO_REUSEPORT, as gRPC does by default."""
    async with queued(registration) as server:
        with pytest.raises(RuntimeError):
            grpc.aio.server().add_insecure_port(server.address)


@pytest.mark.parametrize("is_failed", [False, True])
async def test_the_port_is_free_once_the_server_has_ended(registration: Any, is_failed: bool) -> None:
    async def warm_up() -> None:
        if is_failed:
            raise NotFound("no weights", reason="NO_WEIGHTS")

    service = Service(registrations=[registration], warm_up=warm_up)
    port = unused_port()
    first = Server(service, Authenticator({Role.OPERATOR: TOKEN}), port=port, call_queues=QUEUES, stop_s=0.0)
    if is_failed:
        with pytest.raises(NotFound):
            await first.__aenter__()
    else:
        async with first, connect(first.address, TOKEN) as channel:
            assert await channel.unary_unary(ECHO)(b"x") == b"x"  # type: ignore[arg-type]
    assert listeners(port) == 0
    async with queued(registration, port=port) as second, connect(second.address, TOKEN) as channel:
        assert await channel.unary_unary(ECHO)(b"x") == b"x"  # type: ignore[arg-type]


@pytest.mark.requirement("R6")
async def test_a_drain_shows_on_every_connection_and_is_undone_there(registration: Any) -> None:
    draining = Draining()
    statuses = health_pb2.HealthCheckResponse

    async def all_say(channels: Sequence[grpc.aio.Channel], status: int) -> None:
        for channel in channels:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == status

    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(queued(registration, draining=draining))
        channels = await connected(stack, server)
        await all_say(channels, statuses.SERVING)
        draining.begin()
        await all_say(channels, statuses.NOT_SERVING)
        draining.undo()
        await all_say(channels, statuses.SERVING)


async def test_a_stop_lets_the_calls_of_all_queues_end(registration: Any, echo: Any) -> None:
    """And refuses connections from its beginning."""
    met = asyncio.Barrier(CONNECTIONS + 1)
    go = asyncio.Event()

    async def wait(_context: object) -> None:
        await met.wait()
        await go.wait()

    echo.behaviour = wait
    async with AsyncExitStack() as stack:
        server = queued(registration)
        await server.__aenter__()
        calls: list[asyncio.Future[bytes]] = [
            asyncio.ensure_future(channel.unary_unary(ECHO)(b"x"))  # type: ignore[arg-type]
            for channel in await connected(stack, server)
        ]
        await met.wait()
        stopping = asyncio.ensure_future(server.stop(PATIENCE_S))
        port = int(server.address.rpartition(":")[2])
        await eventually(lambda: not listeners(port), "no queue listens")
        assert not stopping.done()
        go.set()
        assert await asyncio.gather(*calls) == [b"x"] * CONNECTIONS
        await stopping


async def test_a_stop_without_time_ends_the_calls_of_all_queues(registration: Any, echo: Any) -> None:
    met = asyncio.Barrier(CONNECTIONS + 1)

    async def wait(_context: object) -> None:
        await met.wait()
        await asyncio.Event().wait()

    echo.behaviour = wait
    async with AsyncExitStack() as stack:
        server = queued(registration)
        await server.__aenter__()
        calls: list[asyncio.Future[bytes]] = [
            asyncio.ensure_future(channel.unary_unary(ECHO)(b"x"))  # type: ignore[arg-type]
            for channel in await connected(stack, server)
        ]
        await met.wait()
        await server.stop(0.0)
        ends = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(end, grpc.aio.AioRpcError) for end in ends)


@pytest.mark.requirement("R148")
async def test_the_limit_of_connections_is_of_all_queues_together(
    registration: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections past a queue's share are closed; the others stand, as many as the limit once all shares are full."""
    monkeypatch.setattr(limits, "MIN_SHARE", 4)
    with ExitStack() as stack:
        async with queued(registration, limits=Limits(connections=4 * QUEUES)) as server:
            opened = await asyncio.to_thread(lambda: [stands(stack, server.address) for _ in range(80)])
    assert sum(opened) == 4 * QUEUES


def stands(stack: ExitStack, address: str) -> bool:
    """Opens a connection that makes no call; says if the server keeps it."""
    host, _, port = address.rpartition(":")
    opened = stack.enter_context(socket.create_connection((host, int(port)), timeout=floods.PATIENCE_S))
    try:
        opened.sendall(floods.PREFACE + floods.frame(floods.SETTINGS, 0, 0))
        return bool(opened.recv(1))
    except ConnectionResetError:
        return False


def test_limits_are_shared_and_too_small_ones_are_not_cut_up() -> None:
    whole = Limits(connections=4 * limits.MIN_SHARE)
    assert [whole.queues(wanted) for wanted in (1, 4, 16)] == [1, 4, 4]
    assert Limits(connections=8).queues(4) == 1
    options = dict(whole.options(4))
    assert options["grpc.max_allowed_incoming_connections"] == limits.MIN_SHARE
    assert options["grpc.server.max_pending_requests"] == limits.MAX_PENDING // 4
    assert options["grpc.max_concurrent_streams"] == whole.streams


async def test_reflection_names_the_services_on_every_connection(registration: Any) -> None:
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(queued(registration))
        for channel in await connected(stack, server):
            answers: Any = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask]))
            names = [one.name async for answer in answers for one in answer.list_services_response.service]
            assert "penstock.test.v1.EchoService" in names
