"""Attendants for tests: beside a real local sandbox or within one, and pipes to them that break when a test says so."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from penstock_sandbox.backends.guest_client import launch
from penstock_sandbox.backends.guest_client.pipe import Opener, Pipe, unix_socket
from penstock_sandbox.backends.guest_client.sandbox import BackendHooks, GuestSandbox, ProcessDefaults
from penstock_sandbox.backends.local.backend import LocalBackend
from penstock_sandbox.backends.local.sandbox import LocalSandbox
from penstock_sandbox.domain import paths
from penstock_sandbox.domain.backend import ProcessHandle, ProcessSink, RawExit
from penstock_sandbox.domain.model import SandboxSpec, Stream


class Heard(ProcessSink):
    """What a process did."""

    def __init__(self) -> None:
        self.outputs = {Stream.STDOUT: bytearray(), Stream.STDERR: bytearray()}
        self.exit: RawExit | None = None
        self.was_lost = False
        self.changed = asyncio.Event()
        self._closed: set[Stream] = set()

    @property
    def out(self) -> bytes:
        return bytes(self.outputs[Stream.STDOUT])

    def output(self, stream: Stream, data: bytes) -> None:
        self.outputs[stream] += data
        self.changed.set()

    def closed(self, stream: Stream) -> None:
        self._closed.add(stream)
        self.changed.set()

    def exited(self, exit: RawExit) -> None:  # noqa: A002
        assert self.exit is None, "one exit"
        self.exit = exit
        self.changed.set()

    def lost(self, reason: str = "") -> None:
        assert not self.was_lost, "lost once"
        self.was_lost = True
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something to have happened."""
        async with asyncio.timeout(60):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def end(self) -> RawExit:
        """Wait for the exit and the end of the output."""
        await self.until(lambda: self.was_lost or (self.exit is not None and Stream.STDOUT in self._closed))
        assert self.exit is not None, "the sandbox was lost"
        return self.exit


class Cuts:
    """Wraps an opener: each pipe breaks after so many bytes, in either direction; the last amount holds for ever after.

    ``cut`` breaks the present pipe now.
    """

    def __init__(self, opener: Opener, amounts: Sequence[int | None]) -> None:
        self._opener = opener
        self._amounts = list(amounts)
        self.pipes: list[_Cut] = []

    async def __call__(self) -> Pipe:
        amount = self._amounts.pop(0) if len(self._amounts) > 1 else self._amounts[0]
        pipe = _Cut(await self._opener(), amount)
        self.pipes.append(pipe)
        return pipe

    async def cut(self) -> None:
        """Break the present pipe."""
        await self.pipes[-1].aclose()


class _Cut:
    def __init__(self, pipe: Pipe, room: int | None) -> None:
        self._pipe = pipe
        self._room = room

    async def send(self, data: bytes) -> None:
        if self._room is not None:
            part = data[: self._room]
            self._room -= len(part)
            await self._pipe.send(part)
            if len(part) < len(data):
                await self._pipe.aclose()
                raise ConnectionResetError("cut")
        else:
            await self._pipe.send(data)

    async def received(self) -> AsyncIterator[bytes]:
        async for data in self._pipe.received():
            if self._room is None:
                yield data
                continue
            part = data[: self._room]
            self._room -= len(part)
            yield part
            if len(part) < len(data):
                await self._pipe.aclose()
                return

    async def aclose(self) -> None:
        await self._pipe.aclose()


class TwoWays:
    """A pipe of two halves: every delivery is a ``put`` that ends, and ``attach --output-only`` brings what comes."""

    def __init__(self, command: Sequence[str], hearing: subprocess.Popen[bytes], reader: asyncio.StreamReader) -> None:
        self._command = command
        self._hearing = hearing
        self._reader = reader
        self.puts = 0

    @classmethod
    async def open(cls, command: Sequence[str]) -> TwoWays:
        """Begin to hear; ``command`` is the program and the socket's option, without a verb."""
        kept, given = os.pipe()
        program, *options = command
        hearing = subprocess.Popen(
            [sys.executable, "-I", "-S", program, "attach", *options, "--armour", "--output-only"],
            stdin=subprocess.DEVNULL,
            stdout=given,
        )
        os.close(given)
        reader = asyncio.StreamReader(limit=1 << 20)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(kept, "rb")
        )
        return cls(command, hearing, reader)

    async def send(self, data: bytes) -> None:
        self.puts += 1
        program, _, address = self._command
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-I", "-S", program, "deliver", address],
            input=data,
            check=False,
        )
        if done.returncode != 0:
            raise ConnectionResetError(f"put ended with {done.returncode}")

    async def received(self) -> AsyncIterator[bytes]:
        while data := await self._reader.read(1 << 16):
            yield data

    async def aclose(self) -> None:
        self._hearing.kill()
        await asyncio.to_thread(self._hearing.wait)


@dataclass
class Attended:
    """A sandbox under test, and what became of it."""

    sandbox: GuestSandbox
    backing: LocalSandbox
    socket: Path
    lost: list[str] = field(default_factory=list)

    async def start(self, *argv: str, **options: object) -> tuple[ProcessHandle, Heard]:
        """Start a process."""
        heard = Heard()
        given = {"stdin": False, "pty": None, **options}
        handle = await self.sandbox.start(
            argv,
            self.sandbox.default_env,
            self.sandbox.workdir,
            heard,
            **given,  # type: ignore[arg-type]
        )
        return handle, heard

    async def out(self, shell: str) -> str:
        """The output of a shell text that must succeed."""
        handle, heard = await self.start("/bin/bash", "-c", shell)
        ended = await heard.end()
        await handle.aclose()
        assert ended.code == 0, (ended, heard.outputs)
        return heard.out.decode().strip()


@asynccontextmanager
async def beside(
    local: LocalBackend,
    folder: Path,
    wrap: Callable[[Opener, Path], Opener] = lambda opener, _: opener,
    **options: float,
) -> AsyncIterator[Attended]:
    """A local sandbox that an attendant entered, spoken to over what ``wrap`` makes of its socket's opener."""
    name = f"at-{os.urandom(6).hex()}"
    backing = await local.create(name, SandboxSpec(), (), lambda _: None)
    assert isinstance(backing, LocalSandbox)
    socket = folder / name / "socket"
    program = launch.write_program(folder)
    try:
        await launch.serve(
            program,
            socket,
            enter=backing.first_pid,
            user=(paths.USER_ID, paths.USER_ID) if os.geteuid() == 0 else None,
        )
        lost: list[str] = []
        sandbox = GuestSandbox(
            name,
            wrap(unix_socket(str(socket)), socket),
            ProcessDefaults(backing.home, backing.workdir, backing.user, backing.default_env),
            BackendHooks(lost.append, backing.destroy),
            **options,
        )
        made = Attended(sandbox, backing, socket, lost)
        try:
            yield made
        finally:
            await sandbox.destroy()
    finally:
        await backing.destroy()
