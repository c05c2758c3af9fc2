"""R105: a program's end goes on to its upstream once what came for it is at its socket; else a reset does."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from tests.support.endpoints.loopback import unused_port

from penstock_sandbox.backends.guest_client import endpoint as attended
from penstock_sandbox.backends.guest_client.stream import Stream
from penstock_sandbox.backends.host import relay
from penstock_sandbox.backends.local import endpoint as local
from penstock_sandbox.domain.model import NetworkKind, NetworkPolicy
from penstock_sandbox.guest import endpoint as attendant
from penstock_sandbox.guest import frames
from penstock_sandbox.guest.loop import Loop as AttendantLoop
from penstock_sandbox.guest.processes import Streams as AttendantStreams

HANGS_S = 60.0


@dataclass
class Line:
    """A program's socket, and the upstream's of the same connection."""

    program: socket.socket
    upstream: socket.socket

    async def end(self) -> str:
        """How the connection ends for the upstream; what is said before is passed over."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(HANGS_S):
            try:
                while await loop.sock_recv(self.upstream, 65536):
                    pass
            except ConnectionResetError:
                return "reset"
        return "end"

    async def arrives(self, count: int) -> bytes:
        """So many bytes at the program."""
        loop, data = asyncio.get_running_loop(), b""
        async with asyncio.timeout(HANGS_S):
            while len(data) < count:
                data += await loop.sock_recv(self.program, count - len(data))
        return data


class Link:
    """An attendant's endpoint and a service's, in this process; what one says the other hears in the next round."""

    def __init__(self, policy: NetworkPolicy) -> None:
        self.soon = asyncio.get_running_loop().call_soon
        self.service = attended.Endpoint("sandbox", policy)
        self.loop = AttendantLoop()
        self.streams = AttendantStreams()
        self.attendant = attendant.Endpoints(self.loop, self._said_by_attendant, lambda: True, self.streams)
        self.opened: dict[int, Stream] = {}

    def send_frame(self, kind: int, stream: int, payload: bytes) -> None:
        """Of the service, to the attendant."""
        self.soon(self._hear, kind, stream, payload)

    async def room(self) -> None:
        """There is always."""

    def forget(self, number: int) -> None:
        """A stream is over."""
        self.opened.pop(number, None)

    def _hear(self, kind: int, stream: int, payload: bytes) -> None:
        match kind:
            case frames.DATA if stream in self.streams.sinks:
                self.streams.sinks[stream].data(payload)
            case frames.END if stream in self.streams.sinks:
                self.streams.sinks[stream].end()
            case frames.CREDIT if stream in self.streams.sources:
                self.streams.sources[stream].credit(frames.parse_amount(payload))
            case frames.RESET:
                self.attendant.cut(stream)

    def _said_by_attendant(self, kind: int, stream: int, payload: bytes) -> None:
        if kind == frames.OPEN:
            self.opened[stream] = Stream(self, stream, frames.ENDPOINT_WINDOW, frames.ENDPOINT_WINDOW)
            self.service.accept(self.opened[stream])
        elif stream in self.opened:
            self.opened[stream].receive(frames.Frame(kind, stream, 1, payload))


@asynccontextmanager
async def local_relay(policy: NetworkPolicy) -> AsyncIterator[None]:
    """The local backend's."""
    endpoint = local.Endpoint("sandbox", socket.create_server(("127.0.0.1", policy.local_port)), policy)
    endpoint.open()
    try:
        yield
    finally:
        await endpoint.aclose()


@asynccontextmanager
async def guest_relay(policy: NetworkPolicy) -> AsyncIterator[None]:
    """Of all backends that an attendant serves."""
    link = Link(policy)
    link.attendant.open(policy.local_port)
    selector = link.loop._selector.fileno()
    asyncio.get_running_loop().add_reader(selector, link.loop.run_once)
    try:
        yield
    finally:
        await link.service.aclose()
        asyncio.get_running_loop().remove_reader(selector)
        link.attendant.close()


@pytest.fixture(params=[local_relay, guest_relay], ids=["local", "guest"])
async def line(request: pytest.FixtureRequest) -> AsyncIterator[Line]:
    """A connection through a relay."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as upstream, socket.socket() as program:
        upstream.setblocking(False)
        program.setblocking(False)
        host, port = upstream.getsockname()
        policy = NetworkPolicy(NetworkKind.ONE_ENDPOINT, unused_port(), f"{host}:{port}")
        async with request.param(policy):
            await loop.sock_connect(program, ("127.0.0.1", policy.local_port))
            accepted, _ = await loop.sock_accept(upstream)
            with accepted:
                made = Line(program, accepted)
                await loop.sock_sendall(program, b"ask")
                assert await loop.sock_recv(accepted, 3) == b"ask"
                yield made


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Relays that wait for the bytes on their way however slow the machine is."""
    monkeypatch.setattr(relay, "ARRIVAL_S", HANGS_S)


@pytest.mark.parametrize("size", [1, 6000, 60_000])
async def test_program_that_ended_during_an_answer_is_a_reset(line: Line, size: int) -> None:
    """It had read all that was there, so its own kernel says that it ended in order."""
    line.upstream.send(b"x" * size)  # both before the relay runs again
    line.program.close()
    assert await line.end() == "reset"


@pytest.mark.usefixtures("patient")
async def test_a_program_that_read_its_answer_ends_in_order(line: Line) -> None:
    """And so does one that was never answered."""
    line.upstream.send(b"x" * 6000)
    await line.arrives(6000)
    line.program.close()
    assert await line.end() == "end"


@pytest.mark.usefixtures("patient")
async def test_a_program_that_only_sends_no_more_is_answered(line: Line) -> None:
    """Half-closed before its answer came, and between its parts."""
    line.upstream.send(b"x" * 60_000)
    line.program.shutdown(socket.SHUT_WR)
    assert await line.end() == "end"
    line.upstream.send(b"y" * 60_000)
    assert await line.arrives(120_000) == b"x" * 60_000 + b"y" * 60_000
