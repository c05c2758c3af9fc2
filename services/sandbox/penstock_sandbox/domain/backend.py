"""The backend interface: create sandboxes; in each of them start processes, move files, and end it.

Purpose: the domain (leases, idempotency, output, timeouts, exits) is shared by all backends and lives above this
interface; a backend implements only what differs. Backends are found through the entry point group
``penstock.sandbox.backends`` (name -> callable(SandboxSettings) -> Backend).

Invariants
- ``refuse_unsupported`` refuses a spec that ``capabilities`` does not cover, before ``create`` is called.
- A failed or cancelled ``create`` leaves nothing behind; ``destroy`` is idempotent and completes even if cancelled.
- Errors that callers can act on are ``penstock_chassis.errors``; anything else is a defect.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from penstock_chassis.errors import FailedPrecondition
from penstock_sandbox.domain.diffs import DEFAULT_BYTES
from penstock_sandbox.domain.model import (
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

MAX_ARCHIVE_BYTES: Final = 8 * 1024 * 1024 * 1024
"""Maximum size of an archive, and of the files in it."""
MAX_ARCHIVE_ENTRIES: Final = 500_000
"""Maximum entries of an archive that is unpacked in a sandbox."""


@dataclass(frozen=True, slots=True)
class RawExit:
    """How a process ended, as seen by the backend: ``code`` or ``signal``; ``oom`` if the kernel killed for memory."""

    code: int | None
    signal: int | None
    oom: bool = False
    cpu_s: float | None = None
    peak_bytes: int | None = None


class ProcessSink(Protocol):
    """Receives a process's events from the backend. All calls are on the event loop, ``exited`` at most once."""

    def output(self, stream: Stream, data: bytes) -> None:
        """The process has written ``data``."""

    def closed(self, stream: Stream) -> None:
        """The stream has ended."""

    def exited(self, exit: RawExit) -> None:  # noqa: A002
        """The process has ended; its streams may still be open."""

    def lost(self, reason: str = "") -> None:
        """The sandbox is gone, for ``reason`` if it is lost; no further calls follow."""


class ProcessHandle(abc.ABC):
    """A running process."""

    @abc.abstractmethod
    async def write_stdin(self, data: bytes) -> None:
        """Writes all of ``data``, waiting while the pipe is full. Raises BrokenPipeError without a reader."""

    @abc.abstractmethod
    async def close_stdin(self) -> None:
        """Closes standard input."""

    @abc.abstractmethod
    async def resize(self, size: PtySize) -> None:
        """Changes the terminal's dimensions."""

    @abc.abstractmethod
    async def signal(self, number: int) -> None:
        """Sends a signal to the process's group; harmless if it has ended."""

    @abc.abstractmethod
    async def kill(self) -> None:
        """Kills the process and all of its descendants, daemons included; returns when all of them are dead."""

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Forgets the process, which must have ended, and stops reading its output."""


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
        """Starts a process. Raises StartFailed when the program cannot be executed.

        ``to_end``: the caller waits for the end and not for the start, so a backend may report both together if the end
        is near.
        """

    @abc.abstractmethod
    def open_read(self, path: str, *, follow_symlink: bool) -> AbstractAsyncContextManager[tuple[FileInfo, FileReader]]:
        """Opens a regular file."""

    @abc.abstractmethod
    def open_write(self, path: str, mode: int) -> AbstractAsyncContextManager[FileWriter]:
        """Opens a fresh file that replaces ``path`` on ``commit`` and vanishes otherwise; creates parents."""

    @abc.abstractmethod
    def read_tree(self, path: str, max_bytes: int) -> AsyncGenerator[bytes, None]:
        """Yields the tree at ``path`` as a tar stream."""

    @abc.abstractmethod
    async def write_tree(self, path: str, archive: int, *, layer: bool = False) -> tuple[int, int]:
        """Unpacks the tar in the file ``archive`` (a seekable descriptor) at ``path``; returns entries and bytes.

        ``layer``: it is applied over existing files, as WriteTreeStart.layer defines.
        """

    @abc.abstractmethod
    async def stat(self, path: str) -> FileInfo:
        """Describes a path; does not follow a link."""

    @abc.abstractmethod
    async def entries(self, path: str, after: str, limit: int) -> tuple[list[FileInfo], str]:
        """Returns at most ``limit`` entries of a directory by name, after ``after``, and the name after which there are
        more, empty if there are none."""

    @abc.abstractmethod
    async def make_directory(self, path: str, mode: int) -> None:
        """Creates a directory and its parents; succeeds if it exists."""

    @abc.abstractmethod
    async def remove(self, path: str, *, recursive: bool) -> None:
        """Removes a file, link or directory; succeeds if it does not exist."""

    @abc.abstractmethod
    async def set_network(self, policy: NetworkPolicy) -> None:
        """Applies a policy that is narrower than the present one, and cuts what it forbids."""

    @abc.abstractmethod
    async def stats(self) -> Stats:
        """Returns the sandbox's resource usage."""

    @abc.abstractmethod
    def diff(
        self, below: Sequence[str] = (), max_bytes: int = DEFAULT_BYTES
    ) -> AsyncGenerator[bytes | list[str], None]:
        """Yields the difference from the base: tar chunks, then once the list of deleted absolute paths.

        ``below``: only paths at or below these absolute ones; one whose parent was deleted is listed as deleted. Raises
        ResourceExhausted (TREE_TOO_LARGE) before it reads beyond ``max_bytes`` of tar, or for more entries than
        ``diffs.MAX_ENTRIES``; FailedPrecondition (FILE_REPLACED, SANDBOX_LOST) for concurrent changes. Closing the
        generator ends the work.
        """

    async def kill_everything(self) -> bool:
        """Kills every process in the sandbox, whatever started it; returns True once none is left but its first one.

        Default: returns False and does nothing; the caller then kills the tree of each process that it still knows, so
        what an older one left running may survive. Raises Internal (KILL_FAILED).
        """
        return False

    @abc.abstractmethod
    async def destroy(self) -> None:
        """Kills every process and removes everything.

        Idempotent, and repeated after a failure until it returns. Works while paused.
        """

    async def pause(self) -> None:
        """Freezes every process; returns when all are frozen. Requires ``capabilities.pause``.

        While paused, only ``ProcessHandle.kill`` and ``destroy`` are called, and work. Raises FailedPrecondition
        (CAPABILITY_MISSING), Unavailable (PAUSE_FAILED): then nothing is frozen.
        """
        raise FailedPrecondition(
            "this backend cannot pause", reason="CAPABILITY_MISSING", metadata={"capabilities": "pause"}
        )

    async def resume(self) -> None:
        """Thaws the processes. Raises as ``pause`` does."""
        raise FailedPrecondition(
            "this backend cannot pause", reason="CAPABILITY_MISSING", metadata={"capabilities": "pause"}
        )

    async def renewed(self, until: float) -> None:  # noqa: B027 - most have nothing to do
        """The lease now ends at ``until`` (seconds since the epoch), later or earlier than before.

        For a backend whose provider has a deadline for each sandbox. Called before the caller gets its response: an
        error leaves the lease unchanged. Raises FailedPrecondition (LEASE_REFUSED): the provider does not keep the
        sandbox for so long. Default: does nothing.
        """


class FileReader(abc.ABC):
    """An open file of a sandbox."""

    @abc.abstractmethod
    async def read(self, offset: int, length: int) -> bytes:
        """Returns at most ``length`` bytes from ``offset``; empty at the end."""


class FileWriter(abc.ABC):
    """A file of a sandbox being written."""

    @abc.abstractmethod
    async def write(self, data: bytes) -> None:
        """Appends bytes."""

    @abc.abstractmethod
    async def commit(self) -> None:
        """Puts the file in place."""


class StartFailed(Exception):
    """The program cannot be executed; the message states why."""


@dataclass(frozen=True, slots=True)
class MountedToolbox:
    """A toolbox for a sandbox: host directory, mount path, PATH directories, and runtimes to mount with it.

    `python_path` and `node_path` are directories in which every Python and Node.js of the sandbox looks for packages.
    `root_layer` is a host directory whose usr, etc and var the sandbox has under its root; it needs `debian_packages`.
    """

    name: str
    source: Path
    mount_path: str
    path: tuple[str, ...]
    runtimes: Mapping[str, Path]
    python_path: tuple[str, ...] = ()
    node_path: tuple[str, ...] = ()
    root_layer: Path | None = None


@dataclass(frozen=True, slots=True)
class SealedLayer:
    """The stored files of a snapshot: their id, and their size in bytes."""

    id: str
    size: int


class Backend(abc.ABC):
    """Creates and keeps sandboxes."""

    name: str
    capabilities: Capabilities = Capabilities()
    unavailable_reason: str = "not opened yet"
    creates_at_once: int = 16
    """Maximum number of concurrent ``create`` calls; more wait (R51)."""
    layers_outlive: bool = False
    """Whether sealed layers outlive this service; then ``adopt_layers`` is implemented."""
    host_programs: bool = True
    """Whether its sandboxes see this machine's own programs, so that those runtimes need no mount."""

    @property
    def available(self) -> bool:
        """Whether sandboxes can be created here and now."""
        return not self.unavailable_reason

    @abc.abstractmethod
    async def open(self) -> None:
        """Probes the machine, removes what an earlier instance left behind, and sets ``capabilities``.

        A backend that cannot work here sets ``unavailable_reason`` instead of raising.
        """

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Ends every sandbox and releases everything; layers that outlive the service stay unless they were removed."""

    @abc.abstractmethod
    async def create(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        toolboxes: Sequence[MountedToolbox],
        on_lost: Callable[[str], None],
    ) -> SandboxHandle:
        """Creates a sandbox. ``on_lost`` is called once with a reason when it ends without ``destroy``.

        After a failure or a cancellation ``create`` itself removes what it made, and the caller's ``discard`` only what
        it could not remove.
        """

    def shows_host_programs(self, spec: SandboxSpec) -> bool:
        """Whether a sandbox of this spec sees this machine's own programs. Default: ``host_programs``."""
        return self.host_programs

    async def fetch(self, spec: SandboxSpec) -> None:  # noqa: B027 - most fetch nothing, or in ``create``
        """Gets from elsewhere what ``create`` needs, such as an image; before the create takes one of the places."""

    @abc.abstractmethod
    async def seal(self, handle: SandboxHandle, layer_id: str) -> SealedLayer:
        """Ends the sandbox and keeps its files as an immutable layer."""

    async def seal_live(self, handle: SandboxHandle, layer_id: str) -> SealedLayer:
        """Keeps a live sandbox's files at one moment as an immutable layer; the sandbox lives on.

        Requires ``capabilities.live_fork``. ``pause`` or ``resume`` are not called meanwhile; a paused sandbox stays
        paused. Raises FailedPrecondition (CAPABILITY_MISSING).
        """
        raise FailedPrecondition(
            f"the {self.name} backend forks snapshots, not live sandboxes: prepare a snapshot first",
            reason="CAPABILITY_MISSING",
            metadata={"backend": self.name, "capabilities": "live_fork"},
        )

    async def discard(self, sandbox_id: str) -> None:  # noqa: B027 - most have nothing to do
        """Removes what a failed ``create`` could not remove itself; repeated until it returns.

        Default: does nothing, for a ``create`` that always cleans up after itself.
        """

    async def reconcile(self, known: Sequence[str]) -> None:  # noqa: B027 - some have nothing to do
        """Removes what earlier instances of this service left: the sandboxes ``known``, which the journal names, and
        everything else with this service's label.

        Called once after ``open``, with ``known`` possibly empty, and retried with a growing delay while it raises
        (raise when the provider cannot be reached: only its own "not found" counts). Sandboxes of this instance, which
        may exist or be in creation by then, and their layers, are spared. Default: does nothing, for a backend whose
        ``open`` has done it.
        """

    async def adopt_layers(self, known: Sequence[str]) -> frozenset[str]:
        """Adopts those layers of earlier instances of this service that the journal names and that still exist.

        Returns which; every other layer with this service's label is removed sooner or later, except those of this
        instance. Called once after ``open``, with ``known`` possibly empty, and retried with a growing delay while it
        raises, except for FailedPrecondition: adoption is impossible in this run, and the journal keeps its rows. Until
        it has returned no layer of an earlier instance may be removed. Required if ``layers_outlive`` is set.
        """
        raise NotImplementedError

    @abc.abstractmethod
    async def has_layer(self, layer_id: str) -> bool:
        """Whether a sealed layer exists and is complete."""

    @abc.abstractmethod
    async def remove_layer(self, layer_id: str) -> None:
        """Removes a sealed layer when no sandbox is based on it; idempotent."""

    def refuse_unsupported(self, spec: SandboxSpec) -> None:
        """Raises FailedPrecondition for what this backend cannot do: before any work, never a silent downgrade."""
        if not self.available:
            raise FailedPrecondition(
                f"the {self.name} backend is unavailable: {self.unavailable_reason}",
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
                ("companions", bool(spec.companions), can.companions),
                ("fork", bool(spec.snapshot_id), can.fork is not ForkKind.NONE),
                (f"network {spec.network.kind.name}", True, self.allows(spec.network.kind)),
            )
            if wanted and not able
        ]
        if missing:
            raise FailedPrecondition(
                f"the {self.name} backend does not support: {', '.join(missing)}",
                reason="CAPABILITY_MISSING",
                metadata={"backend": self.name, "capabilities": ",".join(missing)},
            )

    def allows(self, kind: NetworkKind) -> bool:
        """Whether a kind of network policy is offered."""
        return kind in self.capabilities.networks
