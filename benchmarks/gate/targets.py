"""What is loaded: the gate, an HTTP server that returns a constant, and the gateways of others.

Each is one process; whoever answers its calls, a trainer or an engine, is another, and the load comes from this one.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from benchmarks import processes, world
from benchmarks.gate import words
from benchmarks.gate.conversations import Reply
from benchmarks.gate.doors import AT_ONCE, Door
from benchmarks.gate.programs import Program, running
from penstock.client.transport.rpc import Service
from penstock.interception.v1 import interception_pb2, rollout_gate_service_pb2_grpc
from penstock.interception.v1 import rollout_gate_service_pb2 as pb
from penstock.local.stack import LocalStack, UpstreamEndpoint
from penstock.trajectory.v1 import trajectory_pb2

PEERS_PYTHON: Final = Path("runs/gate-peers/bin/python")
_HERE: Final = Path(__file__).parent


class Target(ABC):
    """Something with rollouts that agents call."""

    def __init__(self, title: str, pid: int, answers: Program) -> None:
        self.title = title
        self.pid = pid
        self.answers = answers
        """Who answers: a trainer or an engine."""
        self.returns_tokens = True
        """Whether its answers tell how many tokens a conversation has."""
        self.tells_continued = False
        """Whether who answers sees which prompts go on from what was sampled."""
        self.streams_early = False
        """Whether a stream begins before its answer."""

    @abstractmethod
    async def open(self, count: int) -> list[Door]:
        """That many new rollouts, with a door to each that is not connected yet."""

    @abstractmethod
    async def close(self, doors: Sequence[Door]) -> None:
        """The end of these rollouts."""

    def cpu_s(self) -> float:
        """CPU seconds so far."""
        return processes.cpu_s(self.pid)

    def resident_bytes(self) -> int:
        """Its memory."""
        return processes.resident_bytes(self.pid)


class Constant(Target):
    """The engine itself: it opens nothing and closes nothing."""

    def __init__(self, engine: Program) -> None:
        super().__init__("constant", engine.pid, engine)

    async def open(self, count: int) -> list[Door]:
        """Only doors."""
        return [Door(f"127.0.0.1:{self.answers.ready['port']}", "/v1/chat/completions", "none") for _ in range(count)]

    async def close(self, doors: Sequence[Door]) -> None:
        """Nothing."""


class Penstock(Target):
    """The interception service: as a gate with a trainer, or as a relay to an engine."""

    def __init__(self, title: str, stack: LocalStack, answers: Program, *, relay: bool) -> None:
        pids = {world.pid_name(pid): pid for pid in processes.children(os.getpid())}
        super().__init__(title, pids["interception"], answers)
        self._service = Service("interception", stack.endpoints)
        self._stub = rollout_gate_service_pb2_grpc.RolloutGateServiceStub(self._service.channel)
        self._relay = relay
        self.returns_tokens = self.tells_continued = not relay
        self.streams_early = True

    async def open(self, count: int) -> list[Door]:
        """As the driver opens them."""
        doors: list[Door] = []
        for start in range(0, count, AT_ONCE):
            doors += await asyncio.gather(*(self._open() for _ in range(min(AT_ONCE, count - start))))
        return doors

    async def close(self, doors: Sequence[Door]) -> None:
        """As the driver closes them."""
        for start in range(0, len(doors), AT_ONCE):
            await asyncio.gather(*(self._close(door.rollout_id) for door in doors[start : start + AT_ONCE]))

    async def end(self) -> None:
        """Closes the channel."""
        await self._service.close()

    async def _open(self) -> Door:
        rollout_id = f"bench-{secrets.token_hex(8)}"
        request = pb.OpenRolloutRequest(
            request_id=rollout_id,
            rollout_id=rollout_id,
            mode=interception_pb2.MODE_INTERCEPTION_GATE,
            dialects=[trajectory_pb2.DIALECT_CHAT_COMPLETIONS],
        )
        if self._relay:
            request.mode = interception_pb2.MODE_TRANSPARENT_PROXY
            request.source.upstream.name = "bench"
        else:
            request.source.tokenizer.name = "bench"
        answer = await self._service.call(self._stub.OpenRollout, request)
        path = f"{answer.endpoints[0].base_path}/chat/completions"
        return Door(answer.ingress_address, path, answer.token, rollout_id)

    async def _close(self, rollout_id: str) -> None:
        await self._service.call(self._stub.CloseRollout, pb.CloseRolloutRequest(rollout_id=rollout_id, reason="BENCH"))


class Peer(Target):
    """A gateway of others, a program of its own interpreter."""

    def __init__(self, title: str, program: Program, engine: Program, *, returns_tokens: bool) -> None:
        super().__init__(title, program.pid, engine)
        self.returns_tokens = returns_tokens
        self._program = program

    async def open(self, count: int) -> list[Door]:
        """By its own call for a new rollout."""
        opened = await self._program.tell("open", count=count)
        address = f"127.0.0.1:{self._program.ready['port']}"
        return [Door(address, "/v1/chat/completions", secret[0], "\n".join(secret)) for secret in opened["secrets"]]

    async def close(self, doors: Sequence[Door]) -> None:
        """By its own call for a rollout's end."""
        await self._program.tell("close", secrets=[door.rollout_id.split("\n") for door in doors])


@dataclass(frozen=True, slots=True)
class Setting:
    """What all targets share."""

    place: Path
    tokenizer: Path
    replies: dict[str, Reply]

    @classmethod
    def at(cls, place: Path) -> Self:
        """With a tokenizer made there, and replies of 64 and of 2,048 tokens."""
        tokenizer = words.write_tokenizer(place / "tokenizer")
        return cls(place, place / "tokenizer", {"short": Reply.of(tokenizer, 64), "long": Reply.of(tokenizer, 2048)})

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[Program]:
        """An engine behind HTTP."""
        replies = {name: {"text": reply.text, "ids": reply.ids} for name, reply in self.replies.items()}
        async with running("the engine", [sys.executable, "-m", "benchmarks.gate.engine"], replies=replies) as engine:
            yield engine

    @asynccontextmanager
    async def constant(self) -> AsyncIterator[Target]:
        """An HTTP server that returns a constant."""
        async with self.engine() as engine:
            yield Constant(engine)

    @asynccontextmanager
    async def gate(self) -> AsyncIterator[Target]:
        """The gate, answered by a trainer on its stream."""
        async with self.stack({}) as stack:
            ids = {name: reply.ids for name, reply in self.replies.items()}
            address, token = stack.address("interception"), stack.trainer_token
            argv = [sys.executable, "-m", "benchmarks.gate.trainer"]
            async with running("the trainer", argv, address=address, token=token, replies=ids) as trainer:
                target = Penstock("gate", stack, trainer, relay=False)
                yield target
                await target.end()

    @asynccontextmanager
    async def relay(self) -> AsyncIterator[Target]:
        """The same service, which asks an engine behind HTTP itself."""
        async with self.engine() as engine:
            upstream = UpstreamEndpoint(f"http://127.0.0.1:{engine.ready['port']}/v1")
            async with self.stack({"bench": upstream}) as stack:
                target = Penstock("Penstock, relay", stack, engine, relay=True)
                yield target
                await target.end()

    @asynccontextmanager
    async def peer(self, title: str, program: str, kind: str) -> AsyncIterator[Target]:
        """A gateway of others; `program` is a file here."""
        async with self.engine() as engine:
            argv = [PEERS_PYTHON.absolute(), _HERE / program]
            given = {"engine": engine.ready["port"], "tokenizer": str(self.tokenizer), "kind": kind}
            async with running(title, argv, **given) as gateway:
                yield Peer(title, gateway, engine, returns_tokens=kind != "relay")

    @asynccontextmanager
    async def stack(self, upstreams: dict[str, UpstreamEndpoint]) -> AsyncIterator[LocalStack]:
        """The services, with the tokenizer and these endpoints."""
        world.raise_open_files()
        state = self.place / f"state-{secrets.token_hex(4)}"
        async with LocalStack(upstreams=upstreams, tokenizers={"bench": self.tokenizer}, state_dir=state) as stack:
            yield stack
