"""The health service: what watchers see, and what they cannot hold up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock_chassis.auth import Authenticator, Role
from penstock_chassis.channel import connect, typed_errors
from penstock_chassis.errors import NotFound, ResourceExhausted, Unavailable
from penstock_chassis.health import LOOK_S, MAX_WATCHES, Draining, Health
from penstock_chassis.server import Server, Service
from penstock_chassis.testing import in_virtual_time

STATUS: Any = health_pb2.HealthCheckResponse


def test_a_drain_is_over_when_nothing_has_run_for_a_while() -> None:
    """Work that begins within that time starts it anew."""
    running = 1
    draining = Draining(running=lambda: running, quiet_s=3.0)

    async def work() -> float:
        nonlocal running
        finished = asyncio.ensure_future(draining.finished())
        for after_s, count in ((10.0, 0), (2.0, 1), (10.0, 0)):
            await asyncio.sleep(after_s)
            running = count
        await finished
        return asyncio.get_running_loop().time()

    assert 25.0 <= in_virtual_time(work()) <= 25.0 + 2 * LOOK_S


def test_a_drain_is_undone_until_the_service_stops() -> None:
    taking: list[bool] = []
    draining = Draining(taking.append)
    draining.begin()
    draining.begin()
    draining.undo()
    draining.begin(stopping=True)
    with pytest.raises(Unavailable) as caught:
        draining.undo()
    assert (taking, draining.is_on, caught.value.reason) == ([False, True, False], True, "DRAINING")


@asynccontextmanager
async def connect_to(server: Server) -> AsyncIterator[health_pb2_grpc.HealthStub]:
    """A caller without a token."""
    async with server, connect(server.address) as channel:
        yield health_pb2_grpc.HealthStub(channel)


def asked(service: str = "") -> health_pb2.HealthCheckRequest:
    """A question about one service."""
    return health_pb2.HealthCheckRequest(service=service)


@pytest.mark.requirement("R7")
async def test_watcher_sees_each_change_and_the_end() -> None:
    """A watch of a name that nobody serves starts with SERVICE_UNKNOWN, and goes on."""
    health = Health()
    watch, later = health.Watch(asked(), None), health.Watch(asked("penstock.x"), None)
    assert [(await anext(watch)).status, (await anext(later)).status] == [STATUS.SERVICE_UNKNOWN] * 2
    health.serve(["penstock.x"], STATUS.SERVING)
    assert [(await anext(watch)).status, (await anext(later)).status] == [STATUS.SERVING] * 2
    health.stop()
    assert (await anext(watch)).status == STATUS.NOT_SERVING
    health.end()
    assert [answer.status async for answer in watch] == []


@pytest.mark.requirement("R7")
async def test_one_watcher_that_left_takes_no_news_from_another() -> None:
    """Nor does one that does not read."""
    health = Health()
    health.serve([], STATUS.NOT_SERVING)
    left, stays, unread = (health.Watch(asked(), None) for _ in range(3))
    for watch in (left, stays, unread):
        await anext(watch)
    await left.aclose()  # type: ignore[attr-defined]
    health.serve([], STATUS.SERVING)
    assert (await anext(stays)).status == STATUS.SERVING


@pytest.mark.requirement("R7")
async def test_watches_without_end_are_bounded_in_number() -> None:
    """They need no token. One that left makes room."""
    health = Health()
    watches = [health.Watch(asked(), None) for _ in range(MAX_WATCHES + 1)]
    for watch in watches[:-1]:
        await anext(watch)
    with pytest.raises(ResourceExhausted) as refused:
        await anext(watches[-1])
    assert refused.value.reason == "WATCH_LIMIT"
    await watches[0].aclose()  # type: ignore[attr-defined]
    assert (await anext(health.Watch(asked(), None))).status == STATUS.SERVICE_UNKNOWN


@pytest.mark.requirement("R7")
async def test_stopping_server_does_not_wait_for_watchers() -> None:
    """They need no token: anybody could hold a stop up for as long as calls may drain."""
    server = Server(Service(registrations=()), Authenticator({Role.OPERATOR: "an-operator"}), stop_s=120.0)
    async with asyncio.timeout(60), connect_to(server) as stub:
        watch = aiter(stub.Watch(asked()))
        assert (await anext(watch)).status == STATUS.SERVING
        await server.stop(120.0)
        assert [answer.status async for answer in watch] == [STATUS.NOT_SERVING]


@pytest.mark.requirement("R127")
@pytest.mark.parametrize("is_drained", [False, True])
async def test_a_service_that_leaves_its_work_is_not_drained(*, is_drained: bool) -> None:
    """Callers see it stop all the same, and nobody can undo that. One that was drained before does not leave."""
    taking, seen = list[bool](), list[bool | str]()

    async def leave(_seconds: float) -> None:
        with pytest.raises(Unavailable):
            draining.undo()
        seen.append(draining.is_on)
        async for answer in stub.Watch(asked()):
            seen.append(STATUS.ServingStatus.Name(answer.status))
            return

    draining = Draining(taking.append)
    service = Service(registrations=(), draining=draining, leave=leave)
    server = Server(service, Authenticator({Role.OPERATOR: "an-operator"}), stop_s=0.0)
    async with connect_to(server) as stub:
        server.is_replaced = True
        if is_drained:
            draining.begin()
        await server.stop(0.0)
    assert (taking, seen) == (([False], []) if is_drained else ([], [True, "NOT_SERVING"]))


@pytest.mark.requirement("R7")
async def test_check_of_a_name_that_is_not_served_is_not_found() -> None:
    """As the protocol has it."""
    server = Server(Service(registrations=()), Authenticator({Role.OPERATOR: "an-operator"}), stop_s=0.0)
    async with connect_to(server) as stub:
        with pytest.raises(NotFound) as refused, typed_errors():
            await stub.Check(asked("penstock.none"))
        assert refused.value.reason == "SERVICE_UNKNOWN"
