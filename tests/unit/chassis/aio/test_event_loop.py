"""The services' event loop, with gRPC's real socket of events."""

from __future__ import annotations

import asyncio
import socket
from functools import partial

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock_chassis.aio.event_loop import EventLoop
from penstock_chassis.auth import Authenticator
from penstock_chassis.channel import connect
from penstock_chassis.server import Server, Service


class PollerCompletionQueue:
    """Named as gRPC's, and reads as it does: one byte."""

    def __init__(self) -> None:
        self.reader, self.writer = socket.socketpair()
        self.reader.setblocking(False)
        self.handled = 0

    def _handle_events(self, _loop: object) -> None:
        self.handled += 1
        self.reader.recv(1)

    def read(self) -> bytes:
        try:
            return self.reader.recv(1 << 16)
        except BlockingIOError:
            return b""


async def iterations(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.requirement("R126")
@pytest.mark.parametrize("bytes_written", [1, 2, 200])
def test_all_of_grpcs_events_are_handled_in_one_iteration(bytes_written: int) -> None:
    queue = PollerCompletionQueue()

    async def work() -> None:
        asyncio.get_running_loop().add_reader(queue.reader, partial(queue._handle_events, None))
        queue.writer.send(b"1" * bytes_written)
        await iterations(5)
        asyncio.get_running_loop().remove_reader(queue.reader)

    with queue.reader, queue.writer, asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(work())
        assert queue.handled == 1
        assert queue.read() == b""


def test_other_readers_of_the_loop_are_left_as_they_are() -> None:
    reader, writer = socket.socketpair()
    seen: list[bytes] = []

    async def work() -> None:
        asyncio.get_running_loop().add_reader(reader, lambda: seen.append(reader.recv(1)))
        writer.send(b"abc")
        await iterations(10)
        asyncio.get_running_loop().remove_reader(reader)

    with reader, writer, asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(work())
    assert seen == [b"a", b"b", b"c"]


@pytest.mark.requirement("R126")
def test_grpc_reads_its_events_as_the_loop_expects() -> None:
    """Fails with a gRPC that does it another way, with which the loop has no effect."""
    readers: list[str] = []

    class Watched(EventLoop):
        def add_reader(self, fd: object, callback: object, *args: object) -> None:
            readers.append(getattr(getattr(callback, "func", callback), "__qualname__", ""))
            super().add_reader(fd, callback, *args)  # type: ignore[arg-type]

    async def work() -> None:
        server = Server(Service(registrations=()), Authenticator({}, anonymous=True), stop_s=0.0)
        async with server, connect(server.address) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())

    with asyncio.Runner(loop_factory=Watched) as runner:
        runner.run(work())
    assert readers == ["PollerCompletionQueue._handle_events"]
