"""How long the Python SDK waits for a service that is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from tests.support.endpoints.loopback import unused_port

from penstock.client import PenstockError, Unavailable
from penstock.client.transport.endpoints import Endpoints, ServiceName
from penstock.client.transport.rpc import Backoff, Service
from penstock.ops.v1 import operations_service_pb2 as pb
from penstock.ops.v1 import operations_service_pb2_grpc as pb_grpc

LONG = 20
"""Attempts; more than are made at a service that is not awaited over a restart."""


class Operations(pb_grpc.OperationsServiceServicer):
    async def GetServerInfo(self, request: Any, context: Any) -> pb.GetServerInfoResponse:  # noqa: N802
        return pb.GetServerInfoResponse()


@asynccontextmanager
async def serving(port: int) -> AsyncIterator[int]:
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    pb_grpc.add_OperationsServiceServicer_to_server(Operations(), server)  # type: ignore[abstract]
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


class Attempts:
    """Counts the pauses between attempts, which take no time.."""

    def __init__(self) -> None:
        self.count = 0
        self.is_long = asyncio.Event()

    def next(self, _: PenstockError | None = None) -> float:
        self.count += 1
        if self.count == LONG:
            self.is_long.set()
        return 0.0


@pytest.fixture
async def attempts(monkeypatch: pytest.MonkeyPatch) -> Attempts:
    made = Attempts()
    monkeypatch.setattr(Backoff, "next", lambda _, error=None: made.next(error))
    return made


async def ask(service: Service) -> None:
    stub = pb_grpc.OperationsServiceStub(service.channel)
    await service.call(stub.GetServerInfo, pb.GetServerInfoRequest(), timeout=30.0, repeatable=True)


def client_of(kind: ServiceName, port: int) -> Service:
    address = f"127.0.0.1:{port}"
    return Service(kind, Endpoints(sandbox=address, driver=address, interception=address, inference=address))


async def test_a_call_waits_for_a_driver_that_restarts(attempts: Attempts) -> None:
    async with serving(unused_port()) as port:
        service = client_of("driver", port)
        await ask(service)
    call = asyncio.create_task(ask(service))
    await attempts.is_long.wait()
    async with serving(port):
        await call
    await service.close()


@pytest.mark.parametrize("kind", ["driver", "sandbox", "interception", "inference"])
async def test_a_service_that_never_answered_is_soon_given_up(kind: ServiceName, attempts: Attempts) -> None:
    async with serving(unused_port()) as port:
        pass
    service = client_of(kind, port)
    with pytest.raises(Unavailable, match="Cannot reach"):
        await ask(service)
    assert attempts.count < LONG
    await service.close()


async def test_one_of_several_drivers_is_soon_given_up(attempts: Attempts) -> None:
    """A list of all drivers names the one that is away, and does not wait for it."""
    async with serving(unused_port()) as port:
        service = client_of("driver", port)
        await ask(service)
    with pytest.raises(Unavailable, match="Cannot reach"):
        await ask(service.briefly())
    assert attempts.count < LONG
    await service.close()


@pytest.mark.parametrize("kind", ["sandbox", "interception", "inference"])
async def test_other_services_are_soon_given_up(kind: ServiceName, attempts: Attempts) -> None:
    """Another node or gate can be used instead."""
    async with serving(unused_port()) as port:
        service = client_of(kind, port)
        await ask(service)
    with pytest.raises(Unavailable, match="Cannot reach"):
        await ask(service)
    assert attempts.count < LONG
    await service.close()


@pytest.mark.requirement("R27")
async def test_a_new_client_reaches_a_service_that_is_back_at_its_first_attempt(attempts: Attempts) -> None:
    """However long a client that knew the last one waits until it tries again."""
    async with serving(unused_port()) as port:
        earlier = client_of("sandbox", port)
        await ask(earlier)
    with pytest.raises(Unavailable, match="Cannot reach"):
        await ask(earlier)
    attempts.count = 0
    async with serving(port):
        later = client_of("sandbox", port)
        await ask(later)
    assert attempts.count == 0
    await asyncio.gather(earlier.close(), later.close())
