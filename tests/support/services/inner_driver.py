"""The driver in one process, over its real journal and behind its real servicers: for tests of one write, or of all.

Sandboxes and gate stand at the driver's ports and keep what they hold in memory, so that a whole rollout takes a few
milliseconds; what they do is nobody's promise. A command prints its own text, `false` fails, and `sleep` runs until
somebody kills it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.interception.v1 import rollout_gate_service_pb2
from penstock.sandbox.v1 import sandbox_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis import rpc_status
from penstock_chassis.auth import acts_in
from penstock_chassis.errors import FailedPrecondition, NotFound, PenstockError
from penstock_chassis.journal import Journal
from penstock_driver.agents.launch import FileToWrite
from penstock_driver.agents.specs import Dialect, Toolbox
from penstock_driver.domain.ports import (
    BackendFacts,
    CallEnded,
    Command,
    CommandReport,
    CommandResult,
    Exit,
    ExitReason,
    GateClosing,
    GateOpening,
    ModelRequest,
    OpenRequest,
    Output,
    PathKind,
    PreparedSnapshot,
    PreparedToolbox,
    SandboxFacts,
    SandboxTerms,
    SnapshotSpec,
    SnapshotStep,
)
from penstock_driver.rollouts.manager import RolloutManager
from penstock_driver.rpc.agent_service import AgentServicer
from penstock_driver.rpc.rollout_service import RolloutServicer
from penstock_driver.rpc.terminal_service import TerminalServicer
from penstock_driver.store.records import Records
from penstock_driver.terminals.manager import TerminalManager
from penstock_driver.testing import open_driver

T = TypeVar("T")


@dataclass
class Box:
    """A sandbox: whose it is, its files and its processes."""

    labels: Mapping[str, str]
    files: dict[str, bytes] = field(default_factory=dict)
    processes: dict[str, tuple[str, asyncio.Event]] = field(default_factory=dict)


class Boxes:
    """`ports.Sandboxes` in memory. `fail` maps a method's name to what its next calls raise; the calls of the methods
    in `holds` wait for `release`."""

    def __init__(self, boxes: Mapping[str, Box] | None = None) -> None:
        self.boxes: dict[str, Box] = dict(boxes or {})
        self.holds: set[str] = set()
        self.fail: dict[str, list[PenstockError]] = {}
        self.started = asyncio.Event()
        """Something runs that ends only when it is killed."""
        self._released = asyncio.Event()
        self._made = count(len(self.boxes) + 1)

    async def _called(self, name: str) -> None:
        if name in self.holds:
            self.started.set()
            await self._released.wait()
        if self.fail.get(name):
            raise self.fail[name].pop(0)

    def release(self) -> None:
        """Nothing is held any more."""
        self.holds.clear()
        self._released.set()
        self._released = asyncio.Event()

    async def backends(self) -> Sequence[BackendFacts]:
        return [BackendFacts("local", True, "", True, True, True, False, False, True, True)]

    async def prepare_toolbox(
        self, name: str, toolbox: Toolbox, backend: str, tell: Callable[[str], None]
    ) -> PreparedToolbox:
        return PreparedToolbox("t", "/opt/t")

    async def prepare_snapshot(self, spec: SnapshotSpec) -> AsyncIterator[SnapshotStep]:
        for index, command in enumerate(spec.setup):
            yield CommandReport(index, CommandResult(_end(command), b"", b""))
        yield PreparedSnapshot("n", sandbox_pb2.FORK_KIND_FILESYSTEM)

    async def create(self, terms: SandboxTerms, lease_s: float, labels: Mapping[str, str]) -> SandboxFacts:
        sandbox_id = f"s{next(self._made)}"
        self.boxes[sandbox_id] = Box(labels)
        return SandboxFacts(sandbox_id, "/home/x", "/work")

    async def fork(
        self,
        snapshot_id: str,
        *,
        request_id: str,
        port: int,
        upstream: str,
        lease_s: float,
        labels: Mapping[str, str],
        repeatable: bool = False,
        allowlist: sandbox_pb2.Allowlist | None = None,
        joins: str = "",
    ) -> SandboxFacts:
        await self._called("fork")
        return await self.create(SandboxTerms(), lease_s, labels)

    async def write_files(self, sandbox_id: str, files: Sequence[FileToWrite]) -> None:
        await self._called("write_files")
        self.boxes[sandbox_id].files.update((file.path, file.content) for file in files)

    async def put_layer(self, sandbox_id: str, path: str, tar: BinaryIO) -> None:
        await self._called("put_layer")

    async def read_tree(self, sandbox_id: str, path: str, sink: BinaryIO, max_bytes: int) -> None:
        raise AssertionError("nothing here restores")

    async def diff(self, sandbox_id: str, below: Sequence[str], sink: BinaryIO, max_bytes: int) -> Sequence[str]:
        raise FailedPrecondition("boxes have no diff", reason="CAPABILITY_MISSING")

    async def kind(self, sandbox_id: str, path: str) -> PathKind | None:
        raise AssertionError("nothing here restores")

    async def entries(self, sandbox_id: str, path: str, most: int) -> Mapping[str, PathKind]:
        raise AssertionError("nothing here restores")

    async def read_file(self, sandbox_id: str, path: str, max_bytes: int) -> tuple[bytes, int]:
        content = self.boxes[sandbox_id].files.get(path)
        if content is None:
            raise NotFound("no such file", reason="FILE_NOT_FOUND")
        return content[:max_bytes], len(content)

    async def start(
        self,
        sandbox_id: str,
        process_id: str,
        command: Command,
        stdin: bytes | None,
        *,
        output_ends: tuple[int, int] | None = None,
        kill_all_after: bool = False,
        files: Sequence[FileToWrite] = (),
    ) -> None:
        text = (stdin or b"").decode()
        self.boxes[sandbox_id].processes.setdefault(process_id, (text, asyncio.Event()))
        if text.startswith("sleep"):
            self.started.set()

    async def watch(self, sandbox_id: str, process_id: str) -> AsyncGenerator[Output | Exit, None]:
        text, killed = self.boxes[sandbox_id].processes[process_id]
        yield Output(text.encode())
        if text.startswith("sleep"):
            await killed.wait()
        reason = ExitReason.KILLED if killed.is_set() else ExitReason.EXITED
        yield Exit(reason, code=0 if reason is ExitReason.EXITED else None)

    async def send_stdin(self, sandbox_id: str, process_id: str, stdin: bytes) -> None:
        raise NotImplementedError  # of drivers that are restarted

    async def pause(self, sandbox_id: str, lease_s: float) -> bool:
        raise NotImplementedError  # of drivers whose rollouts are paused

    async def resume(self, sandbox_id: str, lease_s: float) -> None:
        raise NotImplementedError  # of drivers whose rollouts are paused

    async def rejoin(self, sandbox_id: str, lease_s: float) -> None:
        """A driver's restart finds that all sandboxes have ended."""
        raise NotFound("its host was restarted", reason="SANDBOX_LOST")

    async def renew(self, sandbox_id: str, lease_s: float) -> None:
        raise NotFound("its host was restarted", reason="SANDBOX_LOST")

    async def labelled(self, labels: Mapping[str, str]) -> Sequence[str]:
        return [key for key, box in self.boxes.items() if labels.items() <= box.labels.items()]

    async def kill(self, sandbox_id: str, process_id: str, *, everything: bool = False) -> None:
        processes = self.boxes[sandbox_id].processes
        for name in list(processes) if everything else [process_id]:
            if name in processes:
                processes[name][1].set()

    async def run(
        self,
        sandbox_id: str,
        process_id: str,
        command: Command,
        output_limit: int,
        *,
        kill_all_after: bool = False,
        result_file: tuple[str, int] | None = None,
        files: Sequence[FileToWrite] = (),
    ) -> CommandResult:
        await self._called("run")
        return CommandResult(_end(command), command.shell.encode(), b"")

    async def ended_inside(self, sandbox_id: str) -> bool:
        return False

    async def delete(self, sandbox_id: str) -> None:
        await self._called("delete")
        self._forget(sandbox_id)

    async def delete_labelled(self, labels: Mapping[str, str], *, beside: str = "") -> Sequence[str]:
        await self._called("delete_labelled")
        found = [key for key, box in self.boxes.items() if labels.items() <= box.labels.items()]
        for sandbox_id in found:
            self._forget(sandbox_id)
        return found

    def _forget(self, sandbox_id: str) -> None:
        if box := self.boxes.pop(sandbox_id, None):
            for _, killed in box.processes.values():
                killed.set()


def _end(command: Command) -> Exit:
    return Exit(ExitReason.EXITED, code=int(command.shell == "false"))


class Places:
    """`ports.Gate` in memory."""

    interruptions = 0

    def __init__(self) -> None:
        self.open_ones: set[str] = set()
        self.captured: set[str] = set()
        self.deleted_in: dict[str, str | None] = {}
        """By rollout: the namespace in which it was deleted."""
        self.ended: asyncio.Queue[CallEnded] = asyncio.Queue()

    async def check(
        self,
        terms: rollout_gate_service_pb2.OpenRolloutRequest,
        *,
        rollout_id: str,
        group_id: str | None,
        labels: Mapping[str, str],
    ) -> Sequence[str]:
        return ()

    async def open(self, spec: OpenRequest) -> GateOpening:
        self.open_ones.add(spec.rollout_id)
        self.captured.add(spec.rollout_id)
        return GateOpening("127.0.0.1:1", {Dialect.CHAT_COMPLETIONS: "/v1"}, "sk", "tiny")

    async def open_judge(self, opening: ModelRequest) -> GateOpening | None:
        raise NotImplementedError  # of verifiers with a judge

    async def answered(self, rollout_id: str) -> GateClosing:
        raise NotImplementedError  # of verifiers with a judge

    async def open_user(self, opening: ModelRequest) -> GateOpening | None:
        raise NotImplementedError  # of rollouts with a user

    async def ask_user(self, rollout_id: str, body: bytes, timeout_s: float) -> str:
        raise NotImplementedError  # of rollouts with a user

    async def close(self, rollout_id: str, reason: str) -> GateClosing:
        self.open_ones.discard(rollout_id)
        return GateClosing(calls=1)

    async def delete(self, rollout_id: str) -> None:
        self.open_ones.discard(rollout_id)
        self.captured.discard(rollout_id)
        self.deleted_in[rollout_id] = acts_in()

    async def stored(self, rollout_id: str, gates: Sequence[str]) -> None:
        raise NotImplementedError  # of drivers that export

    async def load_recording(self, part: rollout_gate_service_pb2.LoadRecordingRequest) -> int:
        raise NotImplementedError  # these rollouts are captured by nobody

    async def hold_calls(self, rollout_id: str, *, held: bool) -> None:
        raise NotImplementedError  # of drivers whose rollouts are paused

    async def has(self, rollout_id: str) -> bool:
        raise NotImplementedError  # of drivers that are restarted

    async def ended_calls(self, rollout_id: str) -> Sequence[CallEnded]:
        raise NotImplementedError  # of drivers that are restarted

    async def calls(self, labels: Mapping[str, str]) -> AsyncIterator[CallEnded]:
        while True:
            yield await self.ended.get()

    async def media(self, rollout_id: str, call_id: str, *, gate: str) -> Sequence[chat_pb2.Media]:
        return ()

    async def tensors(self, rollout_id: str, call_id: str, *, gate: str) -> Sequence[completion_pb2.TokenTensor]:
        return ()

    async def tool_results(self, rollout_id: str, *, gate: str) -> AsyncIterator[trajectory_pb2.HostToolCall]:
        if rollout_id not in self.captured:
            raise NotFound("no such rollout", reason="ROLLOUT_UNKNOWN")
        results: list[trajectory_pb2.HostToolCall] = []
        for call in results:
            yield call

    async def capture(
        self, rollout_id: str, *, gate: str = "", include_bodies: bool, include_top: bool
    ) -> AsyncIterator[trajectory_pb2.Trajectory]:
        if rollout_id not in self.captured:
            raise NotFound("no such rollout", reason="ROLLOUT_UNKNOWN")
        yield trajectory_pb2.Trajectory(rollout_id=rollout_id)


@dataclass
class InnerDriver:
    """A running driver. What its servicers raise is a caller's error, as the interceptor tells it: see `asked`."""

    agents: AgentServicer
    rollouts: RolloutServicer
    terminals: TerminalServicer
    records: Records
    manager: RolloutManager
    episodes: TerminalManager
    journal: Journal
    boxes: Boxes
    places: Places


async def asked(answer: Awaitable[T]) -> T:
    """What an RPC gives, or its error as a caller hears it; AssertionError for one that says nothing to him."""
    try:
        return await answer
    except Exception as error:
        told = rpc_status.expected(error)
        if told is None:
            raise AssertionError(f"INTERNAL: {error!r}") from error
        raise told from error


class Patience:
    """The context of a call with a minute to go."""

    def time_remaining(self) -> float:
        return 60.0


CONTEXT: Any = Patience()


@asynccontextmanager
async def inner_driver(directory: Path, boxes: Boxes, places: Places) -> AsyncIterator[InnerDriver]:
    """A driver on what is in `directory`, put together in the order of `app.build`; it is stopped in order at the end.

    Sandboxes and places outlive it.
    """
    async with AsyncExitStack() as stack:
        # An error while it starts is a caller's too, as one of an RPC.
        opening = open_driver(directory, boxes, places, max_running=8, max_queued=8, max_terminals=8)
        opened = await asked(stack.enter_async_context(opening))
        parts = opened.parts
        stack.push_async_callback(parts.manager.aclose)
        stack.push_async_callback(parts.terminals.aclose)
        await asked(parts.recover())
        yield InnerDriver(
            parts.agent_servicer,
            parts.rollout_servicer,
            parts.terminal_servicer,
            parts.records,
            parts.manager,
            parts.terminals,
            opened.journal,
            boxes,
            places,
        )
