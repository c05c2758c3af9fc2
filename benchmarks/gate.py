"""The gate without agents or sandboxes: what a small call costs, and what a held one keeps.

The same load goes to an HTTP server that returns a constant: 64 keep-alive connections of a bare HTTP client, whose
own cost is small and the same for both.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

import numpy as np
import orjson

from benchmarks import processes, world
from benchmarks.report import Row, Section, percentile
from benchmarks.rollouts import http_server
from penstock.client import Completion, InterceptSession, ModelCall
from penstock.client.rpc import Service
from penstock.interception.v1 import interception_pb2, rollout_gate_service_pb2_grpc
from penstock.interception.v1 import rollout_gate_service_pb2 as pb
from penstock.trajectory.v1 import trajectory_pb2
from penstock_codec import tiny

CONNECTIONS: Final = 64
ROLLOUTS: Final = 640
CALLS_EACH: Final = 3
HELD: Final = 2000
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


async def measure(place: Path) -> list[Section]:
    """CPU per call of the gate and of the constant, and memory of held calls."""
    conversations = [_conversation(str(number)) for number in range(ROLLOUTS)]
    async with http_server("--constant") as (port, pid):
        doors = [Door(f"127.0.0.1:{port}", "/v1/chat/completions", "none") for _ in conversations]
        await _talk(doors[:CONNECTIONS], conversations[:CONNECTIONS])
        floor_from = processes.cpu(pid).own
        times, elapsed = await _talk(doors, conversations)
        floor = 1e3 * (processes.cpu(pid).own - floor_from) / len(times)
        floor_rate = len(times) / elapsed
    async with world.scripted(place) as running:
        async with Gate(running) as gate, running.ps.intercept(credits=1024) as session:
            answering = asyncio.create_task(_answer(session))
            doors = await gate.open(ROLLOUTS + CONNECTIONS)
            await _talk(doors[ROLLOUTS:], conversations[:CONNECTIONS])
            before = running.cpu_s()
            times, elapsed = await _talk(doors[:ROLLOUTS], conversations)
            after = running.cpu_s()
            session.finish()
            await answering
        rate = len(times) / elapsed
        cost, trainer = (1e3 * (after[name] - before[name]) / len(times) for name in ("interception", "client"))
        rows = [
            Row("HTTP server, a constant: CPU per call", floor, "ms", f"{floor_rate:,.0f} calls/s"),
            Row("gate: CPU per call", cost, "ms", f"{rate:,.0f} calls/s; {cost / floor:.1f} times the constant"),
            Row("gate: latency p50", 1e3 * percentile(times, 0.5), "ms", f"{CONNECTIONS} connections"),
            Row("gate: latency p99", 1e3 * percentile(times, 0.99), "ms"),
            Row("trainer and load together: CPU per call", trainer, "ms"),
        ]
        rows += await _held(running, streaming=False)
        rows += await _held(running, streaming=True)
    return [Section(f"Gate: {ROLLOUTS} rollouts of {CALLS_EACH} small calls, answered by a trainer", rows)]


async def _held(running: world.World, *, streaming: bool) -> list[Row]:
    """Memory of calls that wait: everything that came with each, its rollout and its connection included."""
    pid = running.pids["interception"]
    async with Gate(running) as gate:
        doors = await gate.open(HELD)
        before = processes.resident_bytes(pid)
        body = {**_conversation("held")[0], "stream": streaming}
        calls = [asyncio.create_task(door.hold(body)) for door in doors]
        async with asyncio.timeout(120):
            while await gate.waiting() < HELD:  # noqa: ASYNC110 - another process takes them in
                await asyncio.sleep(0.5)
        await asyncio.sleep(2)  # streams have had their status by now
        kept = (processes.resident_bytes(pid) - before) / HELD
        idle_from = processes.cpu(pid).own
        await asyncio.sleep(5)
        idle = (processes.cpu(pid).own - idle_from) / 5
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        for door in doors:
            door.close()
    kind = "streaming" if streaming else "not streaming"
    return [
        Row(f"held, {kind}: memory per call", kept / 1024, "KiB", f"{HELD} calls, each of a rollout of its own"),
        Row(f"held, {kind}: CPU while all wait", 100 * idle, "% of core", "of one core, keep-alives included"),
    ]


async def _talk(
    doors: Sequence[Door], conversations: Sequence[Sequence[dict[str, object]]]
) -> tuple[list[float], float]:
    """Every conversation through its own door, CONNECTIONS at once: the time of each call, and of all."""
    left = iter(list(zip(doors, conversations, strict=True)))
    times: list[float] = []

    async def worker() -> None:
        for door, conversation in left:
            for body in conversation:
                began = time.perf_counter()
                await door.post(body)
                times.append(time.perf_counter() - began)
            door.close()

    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(CONNECTIONS)))
    return times, time.perf_counter() - began


async def _answer(session: InterceptSession) -> None:
    """A trainer that needs no time to think."""
    ids = np.array([*tiny.bytewise(world.REPLIES[0]), tiny.SPECIAL_TOKENS.index(tiny.TURN_END)], dtype=np.int32)
    logprobs = np.full(len(ids), -0.5, dtype=np.float32)

    async def answer(call: ModelCall) -> None:
        await call.deliver(Completion.of_tokens(ids, logprobs, policy_version=0))

    async with asyncio.TaskGroup() as tasks:
        async for call in session.calls():
            tasks.create_task(answer(call))


def _conversation(name: str) -> list[dict[str, object]]:
    """The bodies of an agent that gets the same answer each time, and repeats it as clients do."""
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "You are a shell agent."},
        {"role": "user", "content": f"Copy the word in note.txt to out.txt (task {name})"},
    ]
    bodies = []
    for index in range(CALLS_EACH):
        bodies.append({"model": "policy", "messages": list(messages), "tools": [_TOOL], "temperature": 1.0})
        function = {"name": "bash", "arguments": '{"command": "cat note.txt"}'}
        call = {"id": f"call_{index}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call_{index}", "content": f"{world.NOTE}\n"})
    return bodies


class Door:
    """One keep-alive connection to a chat completions endpoint, opened by its first call."""

    def __init__(self, address: str, path: str, token: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._head = (
            f"POST {path} HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {token}\r\n"
            "Content-Type: application/json\r\n"
        )
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, body: dict[str, object]) -> bytes:
        """One call; RuntimeError when it is not answered with 200."""
        reader = await self._send(body)
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        answer = await reader.readexactly(length)
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{head.splitlines()[0]!r}: {answer[:500]!r}")
        return answer

    async def hold(self, body: dict[str, object]) -> None:
        """One call whose answer is never looked at; returns when the other side hangs up."""
        reader = await self._send(body)
        while await reader.read(65_536):
            pass

    async def _send(self, body: dict[str, object]) -> asyncio.StreamReader:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        content = orjson.dumps(body)
        writer.write(f"{self._head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        return reader

    def close(self) -> None:
        """Closes the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class Gate:
    """Opens rollouts as the driver does, and closes them at its end."""

    def __init__(self, running: world.World) -> None:
        self._service = Service("interception", running.stack.endpoints)
        self._stub = rollout_gate_service_pb2_grpc.RolloutGateServiceStub(self._service.channel)
        self._ids: list[str] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for start in range(0, len(self._ids), 64):
            await asyncio.gather(*(self._close(rollout_id) for rollout_id in self._ids[start : start + 64]))
        await self._service.close()

    async def open(self, count: int) -> list[Door]:
        """Rollouts in gate mode, with a door to each."""
        doors: list[Door] = []
        for start in range(0, count, 64):
            doors += await asyncio.gather(*(self._open() for _ in range(min(64, count - start))))
        return doors

    async def waiting(self) -> int:
        """Calls that wait for a trainer."""
        request, count = pb.ListRolloutsRequest(open_only=True, page_size=1000), 0
        while True:
            answer = await self._service.call(self._stub.ListRollouts, request)
            count += sum(rollout.totals.open for rollout in answer.rollouts)
            if not answer.next_page_token:
                return count
            request.page_token = answer.next_page_token

    async def _open(self) -> Door:
        rollout_id = f"bench-{secrets.token_hex(8)}"
        request = pb.OpenRolloutRequest(
            request_id=rollout_id,
            rollout_id=rollout_id,
            mode=interception_pb2.MODE_INTERCEPTION_GATE,
            dialects=[trajectory_pb2.DIALECT_CHAT_COMPLETIONS],
        )
        request.source.inference.SetInParent()
        answer = await self._service.call(self._stub.OpenRollout, request)
        self._ids.append(rollout_id)
        return Door(answer.ingress_address, f"{answer.endpoints[0].base_path}/chat/completions", answer.token)

    async def _close(self, rollout_id: str) -> None:
        await self._service.call(self._stub.CloseRollout, pb.CloseRolloutRequest(rollout_id=rollout_id, reason="BENCH"))
