"""The null backend: sandboxes without a process or a file. Everything in front of them is real.

A command ends at once with 0. An agent runs as a coroutine of the program `agents`, which gets its order over a
socket and reports its end there; so the agents' own cost is in that process. It is registered for a stack alone, by
metadata of a package that `register` writes beside its state.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Final

from penstock_sandbox.domain.backend import (
    Backend,
    FileReader,
    FileWriter,
    MountedToolbox,
    ProcessHandle,
    ProcessSink,
    RawExit,
    SandboxHandle,
    SealedLayer,
)
from penstock_sandbox.domain.diffs import DEFAULT_BYTES
from penstock_sandbox.domain.model import (
    Capabilities,
    FileInfo,
    FileKind,
    ForkKind,
    NetworkKind,
    NetworkPolicy,
    PtySize,
    SandboxSpec,
    Stats,
    Stream,
)
from penstock_sandbox.settings import SandboxSettings

NAME: Final = "null"
SOCKET: Final = "SCALE_AGENTS_SOCKET"
"""The environment variable with the path of the agents' socket."""
_AGENT: Final = "/shell-agent"
_CHECK: Final = "--check"
_BASE_URL: Final = re.compile(rb'"base_url": ?"([^"]+)"')
_KEY: Final = re.compile(rb'"key": ?"([^"]+)"')
_HOST: Final = re.compile(r"//[^/]+")
_DONE: Final = b'{"type": "done", "reason": "no_tool_calls"}\n'


class NullBackend(Backend):
    """All that it has of a sandbox is one object."""

    name = NAME
    unavailable_reason = ""
    creates_at_once = 64
    capabilities = Capabilities(
        networks=frozenset((NetworkKind.NONE, NetworkKind.ONE_ENDPOINT)),
        fork=ForkKind.FILESYSTEM,
        diff=True,
        toolboxes=True,
        kill_tree=True,
        root=True,
    )

    def __init__(self, agents: Path | None) -> None:
        self._agents = agents
        self._layers: set[str] = set()
        self._numbers = count()
        self._running: dict[int, ProcessSink] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        if agents is None:
            self.unavailable_reason = f"no agents: {SOCKET} is not set"

    async def open(self) -> None:
        if self._agents is not None:
            reader, self._writer = await asyncio.open_unix_connection(self._agents)
            self._reading = asyncio.create_task(self._read(reader))

    async def aclose(self) -> None:
        if self._writer is not None and self._reading is not None:
            self._writer.close()
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            number, code = json.loads(line)
            self.ended(number, code)

    def began(self, sink: ProcessSink, base_url: str, key: str) -> int:
        """Starts an agent."""
        assert self._writer is not None
        number = next(self._numbers)
        self._running[number] = sink
        self._writer.write(json.dumps({"number": number, "base_url": base_url, "key": key}).encode() + b"\n")
        return number

    def ended(self, number: int, code: int | None) -> None:
        """The end of an agent: its code, or None when it is killed."""
        sink = self._running.pop(number, None)
        if sink is None:
            return
        if code == 0:
            sink.output(Stream.STDOUT, _DONE)
        end(sink, code)

    def kill(self, number: int) -> None:
        """Ends an agent that runs."""
        if number in self._running:
            assert self._writer is not None
            self._writer.write(json.dumps({"number": number}).encode() + b"\n")
            self.ended(number, None)

    async def create(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        toolboxes: Sequence[MountedToolbox],
        on_lost: Callable[[str], None],
    ) -> SandboxHandle:
        return NullSandbox(self, spec.network.upstream)

    async def seal(self, handle: SandboxHandle, layer_id: str) -> SealedLayer:
        self._layers.add(layer_id)
        return SealedLayer(layer_id, 0)

    async def has_layer(self, layer_id: str) -> bool:
        return layer_id in self._layers

    async def remove_layer(self, layer_id: str) -> None:
        self._layers.discard(layer_id)


def end(sink: ProcessSink, code: int | None) -> None:
    """Tells the end of a process; None = killed."""
    sink.closed(Stream.STDOUT)
    sink.closed(Stream.STDERR)
    sink.exited(RawExit(code, 9 if code is None else None))


class NullSandbox(SandboxHandle):
    """Knows of its agent what the agent needs to call the gate."""

    home = "/home/agent"
    workdir = "/work"
    user = "agent"
    default_env: Mapping[str, str] = {}

    def __init__(self, backend: NullBackend, upstream: str) -> None:
        self._backend = backend
        self._upstream = upstream
        self._target: tuple[str, str] | None = None
        self._agents: list[NullProcess] = []

    async def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        sink: ProcessSink,
        *,
        stdin: bool,
        pty: PtySize | None,
        to_end: bool = False,
    ) -> ProcessHandle:
        if not any(part.endswith(_AGENT) for part in argv) or _CHECK in argv:
            end(sink, 0)
            return NullProcess(self._backend, -1)
        assert self._target is not None
        process = NullProcess(self._backend, self._backend.began(sink, *self._target))
        self._agents.append(process)
        return process

    async def write_tree(self, path: str, archive: int, *, layer: bool = False) -> tuple[int, int]:
        content = os.pread(archive, 1 << 20, 0)
        self.written(content)
        return 1, len(content)

    def written(self, content: bytes) -> None:
        """Notes where the agent is to call, and its key, if this file has them."""
        if (url := _BASE_URL.search(content)) and (key := _KEY.search(content)):
            # The agent calls the gate itself: there is no relay of a sandbox in between.
            self._target = _HOST.sub(f"//{self._upstream}", url[1].decode()), key[1].decode()

    def open_read(self, path: str, *, follow_symlink: bool) -> AbstractAsyncContextManager[tuple[FileInfo, FileReader]]:
        raise NotImplementedError

    @asynccontextmanager
    async def open_write(self, path: str, mode: int) -> AsyncGenerator[FileWriter, None]:
        yield _Read(self)

    def read_tree(self, path: str, max_bytes: int) -> AsyncGenerator[bytes, None]:
        raise NotImplementedError

    async def stat(self, path: str) -> FileInfo:
        return FileInfo(path, FileKind.DIRECTORY, 0, 0o755, 0.0)

    async def entries(self, path: str, after: str, limit: int) -> tuple[list[FileInfo], str]:
        return [], ""

    async def make_directory(self, path: str, mode: int) -> None:
        pass

    async def remove(self, path: str, *, recursive: bool) -> None:
        pass

    async def set_network(self, policy: NetworkPolicy) -> None:
        pass

    async def stats(self) -> Stats:
        return Stats()

    async def diff(
        self, below: Sequence[str] = (), max_bytes: int = DEFAULT_BYTES
    ) -> AsyncGenerator[bytes | list[str], None]:
        yield bytes(10_240)
        yield []

    async def kill_everything(self) -> bool:
        for agent in self._agents:
            await agent.kill()
        return True

    async def destroy(self) -> None:
        await self.kill_everything()


class NullProcess(ProcessHandle):
    """An agent by its number, or a command that has ended."""

    def __init__(self, backend: NullBackend, number: int) -> None:
        self._backend = backend
        self._number = number

    async def write_stdin(self, data: bytes) -> None:
        pass

    async def close_stdin(self) -> None:
        pass

    async def resize(self, size: PtySize) -> None:
        pass

    async def signal(self, number: int) -> None:
        self._backend.kill(self._number)

    async def kill(self) -> None:
        self._backend.kill(self._number)

    async def aclose(self) -> None:
        pass


class _Read(FileWriter):
    """A file that its sandbox looks at, and does not keep."""

    def __init__(self, sandbox: NullSandbox) -> None:
        self._sandbox = sandbox
        self._content = b""

    async def write(self, data: bytes) -> None:
        self._content += data

    async def commit(self) -> None:
        self._sandbox.written(self._content)


def open_backend(settings: SandboxSettings) -> Backend:
    """The entry point."""
    socket = os.environ.get(SOCKET)
    return NullBackend(Path(socket) if socket else None)


def register(folder: Path) -> None:
    """Write the metadata by which a sandbox service finds this backend if `folder` is on its path."""
    metadata = folder / "penstock_null_backend-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock-null-backend\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        f"[penstock.sandbox.backends]\n{NAME} = benchmarks.scale.null_backend:open_backend\n"
    )
