"""Who answers: probes of real servers that come, drain, go and lie."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.support.endpoints.loopback import unused_port
from tests.support.waiting import eventually

from penstock.ops.v1 import operations_service_pb2, operations_service_pb2_grpc
from penstock_chassis.aio.retry import Delays
from penstock_chassis.channel import connect
from penstock_chassis.errors import Unavailable
from penstock_chassis.health import Health
from penstock_chassis.membership import peers as module
from penstock_chassis.membership.members import Member
from penstock_chassis.membership.peers import Host, PeerLost, Peers, State, following, until_lost


class Members:
    """A source that the test changes."""

    def __init__(self, *members: Member) -> None:
        self._queue: asyncio.Queue[dict[str, Member]] = asyncio.Queue()
        self.set(*members)

    def set(self, *members: Member) -> None:
        self._queue.put_nowait({member.name: member for member in members})

    async def read(self) -> AsyncIterator[dict[str, Member]]:
        while True:
            yield await self._queue.get()


class Operations(operations_service_pb2_grpc.OperationsServiceServicer):
    """Says a name."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def GetServerInfo(  # noqa: N802
        self, request: operations_service_pb2.GetServerInfoRequest, context: object
    ) -> operations_service_pb2.GetServerInfoResponse:
        return operations_service_pb2.GetServerInfoResponse(server=operations_service_pb2.ServerInfo(name=self._name))

    async def Drain(  # noqa: N802
        self, request: operations_service_pb2.DrainRequest, context: object
    ) -> operations_service_pb2.DrainResponse:
        return operations_service_pb2.DrainResponse()

    async def Undrain(  # noqa: N802
        self, request: operations_service_pb2.UndrainRequest, context: object
    ) -> operations_service_pb2.UndrainResponse:
        return operations_service_pb2.UndrainResponse()

    async def GetStatus(  # noqa: N802
        self, request: operations_service_pb2.GetStatusRequest, context: object
    ) -> operations_service_pb2.GetStatusResponse:
        return operations_service_pb2.GetStatusResponse()


@asynccontextmanager
async def served(name: str, port: int = 0) -> AsyncIterator[tuple[str, Health]]:
    server, health = grpc.aio.server(), Health()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    operations_service_pb2_grpc.add_OperationsServiceServicer_to_server(Operations(name), server)
    address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    health.serve((), health_pb2.HealthCheckResponse.SERVING)
    await server.start()
    try:
        yield address, health
    finally:
        health.end()
        await server.stop(0)


@pytest.fixture(autouse=True)
def _probes_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROBE_EVERY_S", 0.01)


async def until(peers: Peers, name: str, state: State) -> module.Peer:
    while True:
        number = peers.changed.number
        peer = peers.get(name)
        if peer is not None and peer.state is state:
            return peer
        await peers.changed.wait(number)


async def test_a_peer_serves_drains_is_lost_and_comes_back() -> None:
    async with AsyncExitStack() as stack:
        source = Members()
        peers = await stack.enter_async_context(following("sandbox", source, lambda member: connect(member.address)))
        port = unused_port()
        async with served("n0", port) as (address, health):
            source.set(Member("n0", address))
            peer = await until(peers, "n0", State.SERVING)
            assert peer.own_name == "n0"
            health.stop()
            await until(peers, "n0", State.DRAINING)
            assert not peer.is_lost, "a draining peer answers"
            work = asyncio.ensure_future(until_lost(peer, asyncio.Event().wait()))
        assert await until(peers, "n0", State.LOST) is peer
        # The first look at the host may come before the server has closed its port.
        await eventually(lambda: peer.host is Host.REFUSING, "the host refuses")
        with pytest.raises(PeerLost):
            await work
        async with served("n0", port):
            await until(peers, "n0", State.SERVING)
            assert not peer.is_lost


async def test_a_member_that_is_removed_is_lost_for_ever() -> None:
    async with served("n0") as (address, _):
        source = Members(Member("n0", address))
        async with following("sandbox", source, lambda member: connect(member.address)) as peers:
            peer = await until(peers, "n0", State.SERVING)
            source.set()
            await peer.loss.wait()
            assert not peers.all()


async def test_a_second_member_that_takes_a_name_gets_no_work() -> None:
    async with served("n0") as (first, _), served("n0") as (second, _):
        source = Members(Member("n0", first))
        async with following("sandbox", source, lambda member: connect(member.address)) as peers:
            await until(peers, "n0", State.SERVING)
            source.set(Member("n0", first), Member("n1", second))
            await until(peers, "n1", State.LOST)
            assert [peer.name for peer in peers.all() if peer.state is State.SERVING] == ["n0"]


async def test_work_at_a_peer_that_stays_has_its_result_or_error() -> None:
    async with served("n0") as (address, _):
        source = Members(Member("n0", address))
        async with following("sandbox", source, lambda member: connect(member.address)) as peers:
            peer = await until(peers, "n0", State.SERVING)
            assert await until_lost(peer, asyncio.sleep(0, 5)) == 5

            async def fails() -> None:
                raise RuntimeError("its own")

            with pytest.raises(RuntimeError, match="its own"):
                await until_lost(peer, fails())


async def test_a_probe_that_breaks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without probes no loss would be seen any more, so the whole service has to end."""

    async def breaks(_stub: object) -> State:
        raise RuntimeError("a defect")

    monkeypatch.setattr(module, "_probed", breaks)
    source = Members(Member("n0", "127.0.0.1:1"))
    async with following("sandbox", source, lambda member: connect(member.address)) as peers:
        with pytest.raises(ExceptionGroup) as caught:
            await peers.until_broken()
    assert caught.group_contains(RuntimeError, match="a defect")


async def test_a_list_of_members_that_breaks_is_seen() -> None:
    class Broken:
        async def read(self) -> AsyncIterator[dict[str, Member]]:
            yield {}
            raise RuntimeError("a defect")

    async with following("sandbox", Broken(), lambda member: connect(member.address)) as peers:
        with pytest.raises(ExceptionGroup) as caught:
            await peers.until_broken()
    assert caught.group_contains(RuntimeError, match="a defect")


async def test_a_peer_that_listens_and_does_not_answer_is_known_to_accept() -> None:
    """It may only be slow."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        async with following("sandbox", Members(Member("n0", address)), lambda one: connect(one.address)) as peers:
            assert (await until(peers, "n0", State.LOST)).host is Host.ACCEPTING


async def test_the_host_of_a_lost_peer_is_tried_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0

    async def silent(_address: str) -> Host:
        nonlocal tries
        tries += 1
        return Host.SILENT

    probes = asyncio.Semaphore(0)

    async def probed(_stub: object) -> State:
        probes.release()
        return State.LOST

    monkeypatch.setattr(module, "_found", silent)
    monkeypatch.setattr(module, "_probed", probed)
    monkeypatch.setattr(module, "SILENCE_DELAYS", Delays(3600.0, 3600.0))
    async with following("sandbox", Members(Member("n0", "127.0.0.1:1")), lambda one: connect(one.address)) as peers:
        peer = await until(peers, "n0", State.LOST)
        for _ in range(10):
            await probes.acquire()
    assert peer.host is Host.SILENT
    assert tries == 1


@pytest.mark.requirement("R119")
@pytest.mark.parametrize("host", ["node7..cluster", "n" * 64, "a\0b"])
async def test_a_member_whose_host_is_no_name_is_lost_alone(host: str) -> None:
    """One wrong line of a list ended the probes of all, and with them the service, at each of its starts."""
    async with served("n0") as (address, _):
        source = Members(Member("n7", f"{host}:7701"), Member("n0", address))
        async with following("sandbox", source, lambda member: connect(member.address)) as peers:
            serving = asyncio.ensure_future(until(peers, "n0", State.SERVING))
            lost = asyncio.ensure_future(until(peers, "n7", State.LOST))
            broken = asyncio.ensure_future(peers.until_broken())
            ends: list[asyncio.Future[Any]] = [broken, asyncio.gather(serving, lost)]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            assert not broken.done()
            assert (await lost).host is Host.SILENT
            assert not (await serving).is_lost
            broken.cancel()


@pytest.mark.requirement("R117", "R119")
async def test_a_removed_member_is_known_as_lost_before_its_calls_end() -> None:
    """Whoever follows the members ends what runs there as lost, and may try it elsewhere."""

    entered: asyncio.Queue[None] = asyncio.Queue()

    async def wait(request: bytes, context: object) -> bytes:
        entered.put_nowait(None)
        forever: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        return await forever

    server, health = grpc.aio.server(), Health()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    health.serve((), health_pb2.HealthCheckResponse.SERVING)
    handler: Any = grpc.unary_unary_rpc_method_handler(wait)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"Wait": handler}),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    seen: list[str] = []

    async def follow(peers: Peers) -> None:
        while peers.all():
            await peers.changed.wait(peers.changed.number)
        seen.append("removed")

    async def call(peer: module.Peer) -> None:
        try:
            method: Any = peer.channel.unary_unary("/t.T/Wait")
            await method(b"x")
        finally:
            seen.append(f"ended, lost: {peer.is_lost}")

    source = Members(Member("n0", address))
    try:
        async with following("sandbox", source, lambda one: connect(one.address), must_have_names=False) as peers:
            peer = await until(peers, "n0", State.SERVING)
            following_them = asyncio.ensure_future(follow(peers))
            calls = [asyncio.ensure_future(call(peer)), asyncio.ensure_future(until_lost(peer, call(peer)))]
            for _ in calls:
                await entered.get()
            source.set()
            await asyncio.wait(calls)
            await following_them
    finally:
        health.end()
        await server.stop(None)
    assert seen == ["removed"] + ["ended, lost: True"] * 2
    with pytest.raises(grpc.aio.AioRpcError):
        calls[0].result()
    with pytest.raises(PeerLost):
        calls[1].result()


@pytest.mark.requirement("R117")
async def test_an_error_of_work_at_a_lost_peer_is_its_loss() -> None:
    peer = module.Peer(Member("n0", "127.0.0.1:1"), connect("127.0.0.1:1"))

    async def fails() -> None:
        peer.loss.set()
        raise Unavailable("its connection broke", reason="STREAM_BROKEN")

    with pytest.raises(PeerLost):
        await until_lost(peer, fails())
    await peer.channel.close()
