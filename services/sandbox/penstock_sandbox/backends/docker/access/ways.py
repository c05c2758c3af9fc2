"""Access to a sandbox: this service enters its namespaces, or a container beside it does (or see ``started_inside``).

Purpose: all ways start the same guest agent, which serves the sandbox over one byte stream; they differ in what starts
it and how its socket is reached. The first two need nothing in the sandbox's image.

- Direct: this service is root on the daemon's machine and sees the container's first process. It starts the guest agent
  itself and connects to its socket.
- Sidecar: any daemon. A second container shares the sandbox's process and network namespaces, enters the others, and
  runs the guest agent; a command in it, whose pipes the daemon carries, connects the service with its socket.

Invariants: a guest agent ends with the sandbox's first process, whatever started it; ``Reached.close`` removes all that
the access needed beside the sandbox's container.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock_chassis.errors import Internal, Unavailable
from penstock_sandbox.backends.docker import container
from penstock_sandbox.backends.docker.access import cgroups
from penstock_sandbox.backends.docker.access.forkserver import Forkserver
from penstock_sandbox.backends.docker.cleanup.reaper import SANDBOX, Owner, Reaper
from penstock_sandbox.backends.docker.engine.daemon import Daemon
from penstock_sandbox.backends.docker.engine.errors import Json, Missing, Refused
from penstock_sandbox.backends.docker.images.images import Images
from penstock_sandbox.backends.docker.images.prepared_images import ReadyImage
from penstock_sandbox.backends.guest_client import launch, program
from penstock_sandbox.backends.guest_client.pipe import Opener, Pipe, SandboxGone, unix_socket
from penstock_sandbox.backends.host.cgroups import Group
from penstock_sandbox.backends.images import pause_program
from penstock_sandbox.backends.images.additions import OURS
from penstock_sandbox.domain.model import Resources, Stats
from penstock_sandbox.guest import confinement
from penstock_sandbox.guest.handshake import NO_GUEST

if TYPE_CHECKING:
    from penstock_sandbox.backends.docker.engine.streams import CommandPipes

_LONGEST_SOCKET = 100
_EXECUTED_TRIES = 2000
_EXECUTED_PAUSE_S = 0.005
_LAST_WORDS_S = 1.0
_PROGRAM = f"{OURS}/attendant"
_FILTER = f"{OURS}/filter"
_SOCKET = "/run/attendant/socket"
# Without the environment's and the site's additions: only the standard library is needed, and fast.
_PYTHON = ("python3", "-I", "-S", _PROGRAM)
_ATTACH = ("attach", "--socket", _SOCKET, "--aside")

SIDECAR_SUFFIX = "-sidecar"

ENDED = "the-first-pipe-has-ended"
"""Written by a container's first process when its pipe has ended: the daemon keeps the connection open."""

ROOT_MODE = 0o1777
"""The mode of a writable root directory: as under /tmp, the sandbox's user may add to it and not replace content.
No image keeps it: the daemon's layers leave the root directory out."""


@dataclass(frozen=True, slots=True)
class Started:
    """A running container of a sandbox: its id, and its first process's id on the daemon's machine."""

    sandbox_id: str
    id: str
    pid: int
    image: ReadyImage
    resources: Resources
    writable: bool

    @property
    def user(self) -> str:
        """The workload's ids, as an argument of the guest agent."""
        return f"{self.image.account.uid}:{self.image.account.gid}"


Start = Callable[[], Awaitable[Started]]
"""Starts a container, once."""


class Reached(abc.ABC):
    """Access to one sandbox: ``opener`` opens pipes to its guest agent."""

    opener: Opener
    oom_kills: Callable[[], int] | None = None
    """Counts the kernel's kills for memory, if this service can; else the guest agent does."""
    within_limits = True
    """Whether the guest agent's memory counts in its sandbox's limit, so that an agent may end it by using all."""

    async def error_text(self) -> str:
        """Returns why the access failed, if known."""
        return ""

    async def written(self, *, ended: bool) -> None:
        """Makes all written data visible to the daemon; with ``ended``, also ends all processes there.

        Raises FailedPrecondition (SEAL_FAILED).
        """
        return

    @abc.abstractmethod
    async def stats(self) -> Stats:
        """Returns the workload's usage, as its limits count it."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Removes what the access needed; the sandbox's container is dead or about to be removed."""


class Reach(abc.ABC):
    """One way of access."""

    name: str
    own_kernel = False
    """Whether it is only for containers with a kernel of their own."""
    python: Sequence[str] = ()
    """The argv that starts a Python program in a sandbox, if this way provides one."""

    @abc.abstractmethod
    async def open(self) -> None:
        """Prepares it. Raises PenstockError if this way is impossible."""

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Releases what ``open`` acquired."""

    def furnish(self, settings: Json, host: Json, image: ReadyImage, resources: Resources, *, writable: bool) -> None:
        """Changes the container's settings so that the sandbox can be reached this way."""
        return

    @abc.abstractmethod
    async def reach(self, name: str, start: Start) -> Reached:
        """Starts a created container, and a guest agent for it. Raises PenstockError; then no guest agent is left."""


# Direct --------------------------------------------------------------------------------------------------------------


class Direct(Reach):
    """This service enters containers itself."""

    name = "direct"

    def __init__(self, state_dir: Path) -> None:
        self._wanted = state_dir / "attendants"
        self._folder = self._wanted
        self._forkserver = Forkserver(self._wanted)
        self._filters: dict[str, Path] = {}

    async def open(self) -> None:
        if os.geteuid() != 0:
            raise Unavailable("only root can enter containers", reason="DOCKER_UNREACHABLE")
        shutil.rmtree(self._wanted, ignore_errors=True)
        # The path of a socket must be short.
        if len(str(self._wanted)) > _LONGEST_SOCKET - 48:
            self._folder = Path(tempfile.mkdtemp(prefix="penstock-"))
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._forkserver = Forkserver(await asyncio.to_thread(launch.write_program, self._folder))

    async def aclose(self) -> None:
        await self._forkserver.aclose()
        await asyncio.to_thread(shutil.rmtree, self._folder, True)

    async def reach(self, name: str, start: Start) -> Reached:
        started = await start()
        folder = self._folder / started.sandbox_id
        try:
            group, joins = await asyncio.to_thread(cgroups.of_container, started.pid, started.id)
            await _holds(started.pid)
            if started.writable:
                Path(f"/proc/{started.pid}/root/.").chmod(ROOT_MODE)
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise Unavailable(f"the container cannot be entered: {error}", reason="CREATE_FAILED") from error
        try:
            socket = folder / "socket"
            arguments = ["--socket", str(socket), "--enter", str(started.pid), "--user", started.user]
            arguments += ["--seccomp", str(self._filter(started.image.architecture))]
            for join in joins:
                arguments += ["--cgroup", join]
            await self._forkserver.serve(arguments)
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, folder, True)
            raise
        return _Entered(folder, unix_socket(str(socket)), group)

    def _filter(self, architecture: str) -> Path:
        path = self._filters.get(architecture)
        if path is None:
            path = self._folder / f"filter-{architecture}"
            path.write_bytes(confinement.program(architecture))
            self._filters[architecture] = path
        return path


class _Entered(Reached):
    within_limits = False

    def __init__(self, folder: Path, opener: Opener, group: Group) -> None:
        self._folder = folder
        self._group = group
        self.opener = opener
        self.oom_kills = group.oom_kills

    async def stats(self) -> Stats:
        return await asyncio.to_thread(self._group.stats)

    async def close(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self._folder, True)


async def _holds(pid: int) -> None:
    """Waits until a process runs the first program of every container. Raises OSError if it does not in time.

    The daemon responds when it lets the process go on, a moment before that executes the program.
    """
    for _ in range(_EXECUTED_TRIES):
        if str(Path(f"/proc/{pid}/exe").readlink()) == pause_program.PATH:
            return
        await asyncio.sleep(_EXECUTED_PAUSE_S)
    raise ProcessLookupError(
        f"process {pid} is not the container's first one: its runtime keeps its processes elsewhere"
    )


# Sidecar -------------------------------------------------------------------------------------------------------------


class Sidecar(Reach):
    """A container beside each sandbox, through the daemon alone."""

    name = "sidecar"

    def __init__(self, daemon: Daemon, images: Images, owner: Owner, reaper: Reaper, image: str) -> None:
        self._daemon = daemon
        self._images = images
        self._owner = owner
        self._reaper = reaper
        self._base = image
        self._image = ""

    async def open(self) -> None:
        def files(architecture: str) -> dict[str, bytes]:
            return {_PROGRAM: program.text().encode(), _FILTER: confinement.program(architecture)}

        self._image = await self._images.equipped(self._base, files)

    async def aclose(self) -> None:
        return

    async def reach(self, name: str, start: Start) -> Reached:
        started = await start()
        name += SIDECAR_SUFFIX
        serve = ["serve", "--socket", _SOCKET, "--enter", "1", "--expect", pause_program.PATH, "--user", started.user]
        serve += ["--seccomp", _FILTER, *(["--root-mode", f"{ROOT_MODE:o}"] if started.writable else [])]
        # The first process carries the link's first pipe, which saves a command and a second Python; it prints a marker
        # at the end, since the daemon keeps these pipes open as long as it lives, and keeps the container alive. By
        # then it is not root, and nobody inside reaches it. No text of a caller's or of an image's is in here.
        argv = [*_PYTHON, *serve, "--and", *_ATTACH, "--last", ENDED, "--then", pause_program.PATH]
        labels = {**self._owner.labels("sidecar"), SANDBOX: started.sandbox_id}
        settings, host = container.sidecar(self._image, labels, started.id, argv, started.resources)
        reached = _Beside(self._daemon, self._reaper, name)
        try:
            await self._daemon.create(name, settings, host)
            await reached.attach()
            await self._daemon.start(name)
        except Refused as error:
            await asyncio.shield(asyncio.ensure_future(reached.close()))
            raise Internal(f"the sidecar could not be started: {error.what}", reason="CREATE_FAILED") from error
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(reached.close()))
            raise
        return reached


class Piped(Reached):
    """Access by the pipes of a container's first process, then by commands that attach to the guest agent."""

    def __init__(self, daemon: Daemon, name: str, join: Sequence[str]) -> None:
        self._daemon = daemon
        self._name = name
        self._join = join
        self._first: _CommandPipe | None = None
        self._speaks: _CommandPipe | None = None
        self.opener = self._open

    @abc.abstractmethod
    def gone(self) -> SandboxGone:
        """Returns the error for a container that does not exist."""

    async def attach(self) -> None:
        """Attaches to the first process's pipes, before it is started."""
        stack = AsyncExitStack()
        self._first = self._speaks = _CommandPipe(
            await stack.enter_async_context(self._daemon.attached(self._name, ENDED.encode())), stack
        )

    async def _open(self) -> Pipe:
        first, self._first = self._first, None
        if first is not None:
            return first
        stack = AsyncExitStack()
        try:
            execution = await self._daemon.execute(self._name, self._join)
            pipes = await stack.enter_async_context(self._daemon.command(execution))
            return _CommandPipe(pipes, stack, lambda: self._daemon.exit_code(execution))
        except Missing as error:
            raise self.gone() from error
        except Refused as error:
            await stack.aclose()
            if error.status == 409:
                raise self.gone() from error
            raise
        except BaseException:
            await stack.aclose()
            raise

    async def error_text(self) -> str:
        return await self._speaks.error_text() if self._speaks is not None else ""

    async def close(self) -> None:
        if self._first is not None:
            await self._first.aclose()


class _Beside(Piped):
    def __init__(self, daemon: Daemon, reaper: Reaper, name: str) -> None:
        super().__init__(daemon, name, (*_PYTHON, *_ATTACH))
        self._reaper = reaper

    def gone(self) -> SandboxGone:
        return SandboxGone("SIDECAR_ENDED")

    async def stats(self) -> Stats:
        return figures(await self._daemon.stats(self._name))

    async def close(self) -> None:
        await super().close()
        await self._reaper.container(self._name)


class _CommandPipe:
    """A pipe over a command's input and output; closing it ends its connection, and so the command."""

    def __init__(
        self, pipes: CommandPipes, stack: AsyncExitStack, code: Callable[[], Awaitable[int | None]] | None = None
    ) -> None:
        self._pipes = pipes
        self._stack = stack
        self._code = code

    async def send(self, data: bytes) -> None:
        await self._pipes.write(data)

    async def received(self) -> AsyncIterator[bytes]:
        async for data in self._pipes.output():
            yield data
        if self._code is not None and await self._code() == NO_GUEST:
            raise SandboxGone("ATTENDANT_ENDED")
        if self._pipes.errors:
            raise OSError(self._pipes.errors.decode(errors="replace").strip())

    async def error_text(self) -> str:
        """Returns its standard error, once its output has no reader any more."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                async for _ in self._pipes.output():
                    pass
        return self._pipes.errors.decode(errors="replace").strip()

    async def aclose(self) -> None:
        await self._stack.aclose()


def figures(sample: dict[str, object]) -> Stats:
    """Converts the daemon's sample of a container."""
    memory, pids, cpu = (_part(sample, name) for name in ("memory_stats", "pids_stats", "cpu_stats"))
    used = _part(cpu, "cpu_usage").get("total_usage")
    return Stats(
        memory_bytes=_count(memory.get("usage")),
        # Podman gives 0 for what it does not know.
        memory_peak_bytes=_count(memory.get("max_usage")) or None,
        pids=_count(pids.get("current")),
        cpu_s=used / 1e9 if isinstance(used, int) else None,
    )


def _part(whole: dict[str, object], name: str) -> dict[str, object]:
    part = whole.get(name)
    return part if isinstance(part, dict) else {}


def _count(value: object) -> int | None:
    return value if isinstance(value, int) else None
