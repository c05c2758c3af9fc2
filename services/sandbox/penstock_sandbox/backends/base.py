"""What a backend must be able to do: make sandboxes, and in each start processes, move files and end it.

Purpose: the domain (leases, idempotency, output, timeouts, exits) is the same for all backends and lives above this
interface; a backend does only what differs. Backends are found through the entry point group
``penstock.sandbox.backends`` (name -> callable(SandboxSettings) -> Backend).

Invariants
- A spec that asks for what ``capabilities`` lacks never reaches ``create``: ``refuse_unsupported`` stopped it.
- A failed or cancelled ``create`` leaves nothing behind; ``destroy`` is idempotent and finishes even when cancelled.
- Errors that callers can act on are ``penstock_chassis.errors``; anything else is a defect.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock_chassis.errors import FailedPrecondition
from penstock_sandbox.backends.diffs import DEFAULT_BYTES
from penstock_sandbox.model import (
    Capabilities,
    FileInfo,
    ForkKind,
    NetworkKind,
    NetworkPolicy,
    PtySize,
    SandboxSpec,
    Stats,
    Stream,
)

ENTRY_POINTS = "penstock.sandbox.backends"


@dataclass(frozen=True, slots=True)
class RawExit:
    """How a process ended, as the backend saw it: ``code`` or ``signal``; ``oom`` when the kernel killed for memory."""

    code: int | None
    signal: int | None
    oom: bool = False
    cpu_s: float | None = None
    peak_bytes: int | None = None


class ProcessSink(Protocol):
    """Where a backend delivers what a process does. All calls come on the event loop, ``exited`` at most once."""

    def output(self, stream: Stream, data: bytes) -> None:
        """The process wrote."""

    def closed(self, stream: Stream) -> None:
        """Nothing more will come on this stream."""

    def exited(self, exit: RawExit) -> None:  # noqa: A002
        """The process has ended; its streams may still be open."""

    def lost(self, reason: str = "") -> None:
        """The sandbox is gone, for ``reason`` where it is lost; nothing more will come."""


class ProcessHandle(abc.ABC):
    """A running process."""

    @abc.abstractmethod
    async def write_stdin(self, data: bytes) -> None:
        """Write all of ``data``, waiting while the pipe is full. Raises BrokenPipeError when nobody reads any more."""

    @abc.abstractmethod
    async def close_stdin(self) -> None:
        """Close standard input."""

    @abc.abstractmethod
    async def resize(self, size: PtySize) -> None:
        """Change the terminal's dimensions."""

    @abc.abstractmethod
    async def signal(self, number: int) -> None:
        """Send a signal to the process's group; harmless once it has ended."""

    @abc.abstractmethod
    async def kill(self) -> None:
        """Kill the process and all of its descendants, daemons included; returns when all of them are dead."""

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Forget the process and stop reading its output. It must have ended."""


class SandboxHandle(abc.ABC):
    """A live sandbox of a backend."""

    home: str
    workdir: str
    user: str
    default_env: Mapping[str, str]

    @abc.abstractmethod
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
        """Start a process. Raises StartFailed when the program cannot be executed.

        ``to_end`` says that the caller waits for the end and not for the start: a backend may tell both at once where
        the end is near.
        """

    @abc.abstractmethod
    def open_read(self, path: str, *, follow_symlink: bool) -> AbstractAsyncContextManager[tuple[FileInfo, FileReader]]:
        """Open a regular file."""

    @abc.abstractmethod
    def open_write(self, path: str, mode: int) -> AbstractAsyncContextManager[FileWriter]:
        """Open a fresh file that replaces ``path`` on ``commit`` and vanishes otherwise; parents are created."""

    @abc.abstractmethod
    def read_tree(self, path: str, max_bytes: int) -> AsyncGenerator[bytes, None]:
        """The tree at ``path`` as a tar stream."""

    @abc.abstractmethod
    async def write_tree(self, path: str, archive: int, *, layer: bool = False) -> tuple[int, int]:
        """Unpack the tar in the file ``archive`` (a seekable descriptor) at ``path``; answers entries and bytes.

        ``layer``: it is put over what is there, as WriteTreeStart.layer says.
        """

    @abc.abstractmethod
    async def stat(self, path: str) -> FileInfo:
        """Describe a path; a link is not followed."""

    @abc.abstractmethod
    async def entries(self, path: str, after: str, limit: int) -> tuple[list[FileInfo], str]:
        """Entries of a directory by name from after ``after``, ``limit`` at most, and the name after which there are
        more, empty where there are none."""

    @abc.abstractmethod
    async def make_directory(self, path: str, mode: int) -> None:
        """Make a directory and its parents; one that exists is fine."""

    @abc.abstractmethod
    async def remove(self, path: str, *, recursive: bool) -> None:
        """Remove a file, link or directory; one that does not exist is fine."""

    @abc.abstractmethod
    async def set_network(self, policy: NetworkPolicy) -> None:
        """Apply a policy that is narrower than the present one, and cut what it forbids."""

    @abc.abstractmethod
    async def stats(self) -> Stats:
        """What the sandbox uses."""

    @abc.abstractmethod
    def diff(
        self, below: Sequence[str] = (), max_bytes: int = DEFAULT_BYTES
    ) -> AsyncGenerator[bytes | list[str], None]:
        """What differs from the base: tar chunks, then once the list of deleted absolute paths.

        ``below``: only what is at or below these absolute paths; one whose parent was deleted is told as deleted. A tar
        of more than ``max_bytes`` is refused before what is too much is read: ResourceExhausted (TREE_TOO_LARGE), as
        are more entries than ``diffs.MAX_ENTRIES``. Raises FailedPrecondition (FILE_REPLACED, SANDBOX_LOST) for what is
        changed meanwhile. Who stops listening ends the work.
        """

    async def kill_everything(self) -> bool:
        """Kill every process in the sandbox, whoever started it; True once none is left but its first one.

        Default: False, nothing is done: its caller kills the tree of each process that was ever started instead. Raises
        Internal (KILL_FAILED).
        """
        return False

    @abc.abstractmethod
    async def destroy(self) -> None:
        """Kill every process and remove everything.

        Idempotent, and called again after a failure until it returns. Works while paused.
        """

    async def pause(self) -> None:
        """Freeze every process; returns when all stand still. Where ``capabilities.pause`` is declared.

        While paused, ``ProcessHandle.kill`` and ``destroy`` still work; nothing else is asked for. Raises
        FailedPrecondition (CAPABILITY_MISSING), Unavailable (PAUSE_FAILED): then nothing is frozen.
        """
        raise FailedPrecondition(
            "this backend cannot pause", reason="CAPABILITY_MISSING", metadata={"capabilities": "pause"}
        )

    async def resume(self) -> None:
        """Thaw what ``pause`` froze. Raises as ``pause`` does."""
        raise FailedPrecondition(
            "this backend cannot pause", reason="CAPABILITY_MISSING", metadata={"capabilities": "pause"}
        )

    async def renewed(self, until: float) -> None:  # noqa: B027 - most have nothing to do
        """The lease now ends at ``until`` (seconds since the epoch), later or earlier than before.

        For a backend whose sandboxes have a deadline at their provider. Called before the caller is told: an error
        leaves the lease as it was. Default: nothing.
        """


class FileReader(abc.ABC):
    """An open file of a sandbox."""

    @abc.abstractmethod
    async def read(self, offset: int, length: int) -> bytes:
        """At most ``length`` bytes from ``offset``; empty at the end."""


class FileWriter(abc.ABC):
    """A file of a sandbox that is being written."""

    @abc.abstractmethod
    async def write(self, data: bytes) -> None:
        """Append."""

    @abc.abstractmethod
    async def commit(self) -> None:
        """Put the file in place."""


class StartFailed(Exception):
    """A program that cannot be executed; the message says why."""


@dataclass(frozen=True, slots=True)
class MountedToolbox:
    """A toolbox as a sandbox gets it: host directory, mount path, PATH directories, and runtimes to mount with it."""

    name: str
    source: Path
    mount_path: str
    path: tuple[str, ...]
    runtimes: Mapping[str, Path]


@dataclass(frozen=True, slots=True)
class SealedLayer:
    """The files of a snapshot as the backend stored them; ``owner`` and ``below`` are the backend's own."""

    id: str
    size: int


class Backend(abc.ABC):
    """A place where sandboxes are made."""

    name: str
    capabilities: Capabilities = Capabilities()
    unavailable_reason: str = "not opened yet"
    creates_at_once: int = 16
    """Most ``create`` calls in progress at once; more wait (R51)."""
    layers_outlive: bool = False
    """Whether sealed layers are there after this service's end; then ``adopt_layers`` is implemented."""
    host_programs: bool = True
    """Whether its sandboxes see this machine's own programs, so that a toolbox's runtime among those need not come."""

    @property
    def available(self) -> bool:
        """Whether sandboxes can be made here and now."""
        return not self.unavailable_reason

    @abc.abstractmethod
    async def open(self) -> None:
        """Probe the machine, remove what an earlier instance left behind, and be ready; sets ``capabilities``.

        A backend that cannot work here sets ``unavailable_reason`` instead of raising.
        """

    @abc.abstractmethod
    async def aclose(self) -> None:
        """End every sandbox and release everything; layers that outlive the service stay unless they were removed."""

    @abc.abstractmethod
    async def create(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        toolboxes: Sequence[MountedToolbox],
        on_lost: Callable[[str], None],
    ) -> SandboxHandle:
        """Make a sandbox. ``on_lost`` is called once with a reason when it ends without ``destroy``."""

    @abc.abstractmethod
    async def seal(self, handle: SandboxHandle, layer_id: str) -> SealedLayer:
        """End the sandbox and keep its files as an immutable layer."""

    async def seal_live(self, handle: SandboxHandle, layer_id: str) -> SealedLayer:
        """Keep a live sandbox's files, as they are at one moment, as an immutable layer; the sandbox lives on.

        Where ``capabilities.live_fork`` is declared. ``pause`` or ``resume`` are not called meanwhile; a sandbox that
        was paused stays so. Raises FailedPrecondition (CAPABILITY_MISSING).
        """
        raise FailedPrecondition(
            f"the {self.name} backend forks snapshots, not live sandboxes: prepare a snapshot first",
            reason="CAPABILITY_MISSING",
            metadata={"backend": self.name, "capabilities": "live_fork"},
        )

    async def discard(self, sandbox_id: str) -> None:  # noqa: B027 - most have nothing to do
        """Remove what a ``create`` that failed could not remove itself; called again until it returns.

        Default: nothing, for a ``create`` that always cleans up after itself.
        """

    async def reconcile(self, known: Sequence[str]) -> None:  # noqa: B027 - some have nothing to do
        """Remove what earlier instances of this service left: the sandboxes ``known``, which the journal names, and
        whatever else only carries this service's label.

        Called once after ``open``, with ``known`` possibly empty, and again with a growing delay while it raises (raise
        when the provider cannot be asked: "not found" must have been answered by it). Sandboxes of this instance, which
        may be there or in the making by then, and their layers, are spared. Default: nothing, for a backend whose
        ``open`` has done it.
        """

    async def adopt_layers(self, known: Sequence[str]) -> frozenset[str]:
        """Take over those layers of earlier instances of this service that the journal names and that are still there.

        Answers which; every other one that carries this service's label is removed sooner or later, those of
        this instance spared. Called once after ``open``, with ``known`` possibly empty, and again with a growing delay
        while it raises, except for FailedPrecondition: nothing can be said in this run, and the journal keeps its rows.
        Until it has returned no layer of an earlier instance may be removed. Where ``layers_outlive`` is set.
        """
        raise NotImplementedError

    @abc.abstractmethod
    async def has_layer(self, layer_id: str) -> bool:
        """Whether a sealed layer is there and whole."""

    @abc.abstractmethod
    async def remove_layer(self, layer_id: str) -> None:
        """Remove a sealed layer once no sandbox stands on it; idempotent."""

    def refuse_unsupported(self, spec: SandboxSpec) -> None:
        """Raise FailedPrecondition for what this backend cannot do: before any work, never a silent downgrade."""
        if not self.available:
            raise FailedPrecondition(
                f"the {self.name} backend cannot make sandboxes here: {self.unavailable_reason}",
                reason="BACKEND_UNAVAILABLE",
                metadata={"backend": self.name},
            )
        can = self.capabilities
        limits = spec.resources
        missing = [
            name
            for name, wanted, able in (
                ("limit_cpu", limits.cpu is not None, can.limit_cpu),
                ("limit_memory", limits.memory_bytes is not None, can.limit_memory),
                ("limit_pids", limits.pids is not None, can.limit_pids),
                ("limit_disk", limits.disk_bytes is not None, can.limit_disk),
                ("limit_inodes", limits.inodes is not None, can.limit_inodes),
                ("root", spec.user == "root", can.root),
                ("toolboxes", bool(spec.toolbox_ids), can.toolboxes),
                ("own_kernel", spec.own_kernel, can.own_kernel),
                ("fork", bool(spec.snapshot_id), can.fork is not ForkKind.NONE),
                (f"network {spec.network.kind.name}", True, self.allows(spec.network.kind)),
            )
            if wanted and not able
        ]
        if missing:
            raise FailedPrecondition(
                f"the {self.name} backend cannot do this here: {', '.join(missing)}",
                reason="CAPABILITY_MISSING",
                metadata={"backend": self.name, "capabilities": ",".join(missing)},
            )

    def allows(self, kind: NetworkKind) -> bool:
        """Whether a kind of network policy is offered."""
        return kind in self.capabilities.networks
