"""R105: an answer is delivered when its reader took all of it; else the same request gets it."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
from typing import Any

import pytest
from tests.integration.interception.test_flow import WIRES
from tests.support.waiting import eventually

from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock.interception.v1 import interception_pb2
from penstock_interception import app
from penstock_interception.ingress import connections

SIZES = {"6 KB": 6 << 10, "300 KB": 300 << 10}
CLOSE_WAIT = 8
HANGS_S = 60.0
"""How long a step may take: a guard against an answer that never comes, no expectation."""


class Peer:
    """A client at the wire, which reads as much as it is told to and then ends its connection as told."""

    def __init__(self, service: Any, rollout: Any, dialect: str, *, stream: bool, headers: str = "") -> None:
        wire = WIRES[dialect]
        path, body = wire.path, dict(wire.body)
        if dialect == "generate_content":
            path = path if stream else path.replace("streamGenerateContent?alt=sse", "generateContent")
        else:
            body["stream"] = stream
        data = json.dumps(body).encode()
        host, _, port = service.ingress.rpartition(":")
        self.address = host, int(port)
        head = f"POST /rollout/{rollout.rollout_id}{path} HTTP/1.1\r\nhost: {service.ingress}\r\n"
        head += f"authorization: Bearer {rollout.token}\r\ncontent-type: application/json\r\n{headers}"
        self.request = f"{head}content-length: {len(data)}\r\n\r\n".encode() + data
        self.end = b"0\r\n\r\n" if stream else b""
        self._whole = not stream
        self.sock = socket.socket()

    async def ask(self) -> None:
        """Connects and sends the request."""
        self.sock.setblocking(False)
        async with asyncio.timeout(HANGS_S):
            await asyncio.get_running_loop().sock_connect(self.sock, self.address)
        await self.repeat()

    async def repeat(self) -> None:
        """Sends the request again on the same connection."""
        async with asyncio.timeout(HANGS_S):
            await asyncio.get_running_loop().sock_sendall(self.sock, self.request)

    async def read(self, count: int = 0) -> bytes:
        """The first `count` bytes of the answer, or all of it."""
        async with asyncio.timeout(HANGS_S):
            return await self._read(count)

    async def _read(self, count: int) -> bytes:
        loop = asyncio.get_running_loop()
        data = b""
        while not (count and len(data) >= count):
            piece = await loop.sock_recv(self.sock, min(65536, count - len(data)) if count else 65536)
            assert piece, "the connection ended before the answer did"
            data += piece
            if not count and self._is_all(data):
                return data
        return data

    def _is_all(self, data: bytes) -> bool:
        if not self._whole:
            return data.endswith(b"0\r\n\r\n")
        head, _, body = data.partition(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        return bool(lengths) and len(body) == int(lengths[0].split(b":")[1])

    def state(self) -> int:
        """Of its connection, as TCP has it."""
        return self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]

    def reset(self) -> None:
        """Ends it as a killed process with an odd socket option does."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


async def answer(trainer: Any, text: str) -> None:
    """The trainer's answer to the next call, which is not there where the request was taken for an earlier one."""
    async with asyncio.timeout(HANGS_S):
        await trainer.answer(text)


async def attempts(service: Any, rollout: Any) -> list[int]:
    """How often each call of the rollout was asked for."""
    answer = await service.intercept.ListCalls(pb.ListCallsRequest(rollout_id=rollout.rollout_id))
    return [call.http_attempts for call in answer.calls]


@pytest.fixture(params=["whole", "stream"])
def stream(request: pytest.FixtureRequest) -> bool:
    """Both ways to be answered."""
    return bool(request.param == "stream")


@pytest.mark.requirement("R34", "R105")
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dialect", WIRES)
async def test_unread_answer_is_given_to_the_repeated_request(
    service: Any, dialect: str, stream: bool, size: int
) -> None:
    """Without any header that says so; all of it was in the kernel's hands when its reader went."""
    rollout, trainer = await service.open(), await service.trainer()
    first = Peer(service, rollout, dialect, stream=stream)
    await first.ask()
    await answer(trainer, "x" * size)
    await first.read(60)
    first.sock.close()
    again = Peer(service, rollout, dialect, stream=stream)
    await again.ask()
    assert len(await again.read()) > size
    assert await attempts(service, rollout) == [2]
    again.sock.close()
    call = service.interceptor.registry.rollout(rollout.rollout_id).calls[0]
    await eventually(lambda: call.answer_sent, "taken")
    third = Peer(service, rollout, dialect, stream=stream)
    await third.ask()
    await answer(trainer, "another")
    await third.read()
    assert await attempts(service, rollout) == [2, 1]


@pytest.mark.requirement("R34", "R105")
@pytest.mark.parametrize("dialect", WIRES)
async def test_fully_read_answer_is_not_given_to_the_next_equal_request(
    service: Any, dialect: str, stream: bool
) -> None:
    """Its reader ended the connection, asked on it again, or keeps it: an agent may ask the same twice."""
    rollout, trainer = await service.open(), await service.trainer()
    peers = [Peer(service, rollout, dialect, stream=stream) for _ in range(4)]
    for peer in peers[:3]:
        await peer.ask()
        await answer(trainer, "an answer")
        await peer.read()
        if peer is peers[0]:
            peer.sock.close()
    await peers[2].repeat()
    await answer(trainer, "an answer")
    await peers[2].read()
    peers[2].reset()  # after all was read, but nobody can tell that from here
    await peers[3].ask()
    await peers[3].read()
    assert await attempts(service, rollout) == [1, 1, 1, 2]


@pytest.mark.requirement("R105")
async def test_stalled_reader_has_not_received_the_unsent_rest(service: Any) -> None:
    """The connection is open, and its reader takes nothing: the same request joins."""
    rollout, trainer = await service.open(), await service.trainer()
    first = Peer(service, rollout, "chat", stream=False)
    first.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await first.ask()
    await answer(trainer, "x" * (300 << 10))
    again = Peer(service, rollout, "chat", stream=False)
    await again.ask()
    assert len(await again.read()) > 300 << 10
    assert await attempts(service, rollout) == [2]


@pytest.mark.requirement("R34", "R105")
async def test_connection_that_ends_with_its_answer_announces_it(service: Any, stream: bool) -> None:
    """`Connection: close`: the reader ends it first, by an end when it has read, by a reset when not."""
    rollout, trainer = await service.open(), await service.trainer()
    for expected, reads in (([1], 0), ([1, 1], 60), ([1, 2], 0), ([1, 2, 1], 0)):
        peer = Peer(service, rollout, "chat", stream=stream, headers="connection: close\r\n")
        await peer.ask()
        if expected[-1] == 1:
            await answer(trainer, "x" * 6000)
        await peer.read(reads)
        peer.sock.close()
        assert await attempts(service, rollout) == expected


@pytest.mark.requirement("R105")
async def test_reader_until_connection_end_waits_for_nothing(
    service: Any, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As HTTP/1.0 does: the service ends its side with the answer, and its reader's end says that it was read."""
    monkeypatch.setattr(connections, "LINGER_S", 1e6)
    rollout, trainer = await service.open(), await service.trainer()
    peer = Peer(service, rollout, "chat", stream=stream, headers="connection: close\r\n")
    await peer.ask()
    await answer(trainer, "x" * 6000)
    async with asyncio.timeout(HANGS_S):
        while await asyncio.get_running_loop().sock_recv(peer.sock, 65536):
            pass
    peer.sock.close()
    call = service.interceptor.registry.rollout(rollout.rollout_id).calls[0]
    await eventually(lambda: call.answer_sent, "taken")


@pytest.mark.requirement("R34", "R105")
async def test_unread_answer_at_a_connections_end_is_not_delivered(
    service: Any, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peer's kernel has all of it, and its peer neither read nor ended anything: nothing shows that it
    was read."""
    monkeypatch.setattr(connections, "LINGER_S", 0.01)
    rollout, trainer = await service.open(), await service.trainer()
    peer = Peer(service, rollout, "chat", stream=stream, headers="connection: close\r\n")
    await peer.ask()
    await answer(trainer, "x" * 6000)
    call = service.interceptor.registry.rollout(rollout.rollout_id).calls[0]
    await eventually(lambda: call.state.terminal and not call.attached, "the service has ended it")
    assert not call.answer_sent
    again = Peer(service, rollout, "chat", stream=stream)
    await again.ask()
    assert len(await again.read()) > 6000
    assert await attempts(service, rollout) == [2]


@pytest.mark.requirement("R34", "R105")
async def test_an_idle_connection_that_the_service_ends_shows_nothing(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that was not read before is not read by that."""
    monkeypatch.setattr(app, "IDLE_S", 0.01)
    service = await start()
    rollout, trainer = await service.open(), await service.trainer()
    peer = Peer(service, rollout, "chat", stream=False)
    await peer.ask()
    await answer(trainer, "x" * 6000)
    await eventually(lambda: peer.state() == CLOSE_WAIT, "the service has ended it")
    call = service.interceptor.registry.rollout(rollout.rollout_id).calls[0]
    assert not call.answer_sent


@pytest.mark.requirement("R34", "R105")
@pytest.mark.parametrize("reads", [True, False])
async def test_idle_connection_is_read_before_it_is_ended(
    service: Any, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    """This end says that no more comes; how the other one ends then shows whether it had read."""
    monkeypatch.setattr(connections, "LISTEN_S", connections.IDLE_S)
    rollout, trainer = await service.open(), await service.trainer()
    peer, again = (Peer(service, rollout, "chat", stream=False) for _ in range(2))
    await peer.ask()
    await answer(trainer, "x" * 6000)
    await eventually(lambda: peer.state() == CLOSE_WAIT, "this end is ended")
    if reads:
        await peer.read()
    peer.sock.close()
    call = service.interceptor.registry.rollout(rollout.rollout_id).calls[0]
    if reads:
        await eventually(lambda: call.answer_sent, "taken")
    else:
        await again.ask()
        assert len(await again.read()) > 6000
        assert await attempts(service, rollout) == [2]


@pytest.mark.requirement("R105")
async def test_half_closed_client_without_an_answer_has_received_nothing(service: Any) -> None:
    """An end that came before the answer says nothing of the answer."""
    rollout, trainer = await service.open(), await service.trainer()
    peer = Peer(service, rollout, "chat", stream=False)
    await peer.ask()
    call_seen = asyncio.create_task(trainer.call())
    await call_seen
    peer.sock.shutdown(socket.SHUT_WR)
    call = service.interceptor.registry.rollout(rollout.rollout_id).calls[0]
    await eventually(lambda: not call.attached, "the service has seen it")
    await trainer.deliver(trainer.result(call_seen.result(), "an answer"))
    assert not call.answer_sent
    again = Peer(service, rollout, "chat", stream=False)
    await again.ask()
    assert b"an answer" in await again.read()


@pytest.mark.requirement("R34", "R105")
async def test_equal_request_is_a_new_call_while_an_answer_is_being_sent(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is accepted, and not yet written to its connection, which stands."""
    rollout, trainer = await service.open(), await service.trainer()
    monkeypatch.setitem(WIRES["chat"].body, "logprobs", True)
    elsewhere, reached, goes_on = service.interceptor.in_thread, asyncio.Event(), asyncio.Event()

    async def held(work: Any) -> Any:
        if service.interceptor.registry.rollout(rollout.rollout_id).calls[0].state.terminal:
            reached.set()
            await goes_on.wait()
        return await elsewhere(work)

    monkeypatch.setattr(service.interceptor, "in_thread", held)
    first, second = (Peer(service, rollout, "chat", stream=False) for _ in range(2))
    await first.ask()
    await answer(trainer, "x" * (6 << 10))  # with so many logprobs it is written in a thread
    await reached.wait()
    await second.ask()
    await answer(trainer, "another")
    assert b"another" in await second.read()
    goes_on.set()
    assert b"x" * (6 << 10) in await first.read()
    assert await attempts(service, rollout) == [1, 1]


@pytest.mark.requirement("R34", "R35")
async def test_call_budget_holds_for_concurrent_equal_requests(service: Any) -> None:
    """Each request that is answered is a call of its own, and no more are answered than may be."""
    most = 30
    rollout = await service.open(budgets=interception_pb2.Budgets(max_calls=most))
    trainer = await service.trainer()
    answering = asyncio.create_task(_answer_all(trainer))
    found: list[bytes] = []

    async def ask(times: int) -> None:
        for _ in range(times):
            peer = Peer(service, rollout, "chat", stream=False, headers="connection: close\r\n")
            await peer.ask()
            found.append(await peer.read())
            peer.sock.close()

    await asyncio.gather(*(ask(10) for _ in range(8)))
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)
    answers = [data for data in found if data.startswith(b"HTTP/1.1 200")]
    assert len(answers) == len({re.findall(rb'"id": ?"([^"]+)"', data)[0] for data in answers}) == most
    assert all(data.startswith(b"HTTP/1.1 403") for data in found if data not in answers)
    assert await attempts(service, rollout) == [1] * most


async def _answer_all(trainer: Any) -> None:
    while True:
        await trainer.answer("an answer")
