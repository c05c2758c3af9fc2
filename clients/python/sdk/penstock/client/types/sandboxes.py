"""Values of the sandbox service: sandboxes, files, snapshots, backends. Times are UTC or seconds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from penstock.client.tasks.spec import Companion, Network, Resources
from penstock.client.types.results import Exit


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """The spec of a sandbox or a snapshot; every field is optional.

    Attributes:
        backend: empty = the operator's default.
        image: the backend's name of an image; or `snapshot_id`, of the same backend.
        snapshot_id: the base, instead of an image.
        resources: limits; one that cannot be enforced is refused.
        network: allowed access, in a snapshot's setup too; None = nothing.
        env: of every process in it.
        user: the account that executes; empty = the backend's ordinary user.
        lease: seconds that it lives without `renew`; None = 15 min. A snapshot has none.
        labels: for finding it. A snapshot has none.
        toolbox_ids: of toolboxes to mount (`ps.toolboxes`); programs of earlier ones take precedence.
        own_kernel: refuse it rather than run it on the kernel of the backend's machine (gVisor, virtual machines).
        repeatable: give its programs the same as in any other sandbox of its kind, as far as the backend can
            (`Backend.repeatable`), never refused.
        companions: containers beside it, which are healthy before it is ready. Those of a snapshot are its forks'.
    """

    backend: str = ""
    image: str = ""
    snapshot_id: str = ""
    resources: Resources | None = None
    network: Network | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    lease: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    own_kernel: bool = False
    repeatable: bool = False
    toolbox_ids: Sequence[str] = ()
    companions: Sequence[Companion] = ()


_SHOWN_BYTES = 200


@dataclass(frozen=True, slots=True, repr=False)
class RunResult:
    """The outcome of a small command: its exit and its output."""

    exit: Exit
    stdout: bytes
    stderr: bytes

    @property
    def ok(self) -> bool:
        """Whether it exited by itself with 0."""
        return self.exit.ok

    def __repr__(self) -> str:
        return f"RunResult({self.exit}, stdout={_shown(self.stdout)}, stderr={_shown(self.stderr)})"


def _shown(output: bytes) -> str:
    """Returns the beginning of an output, with the full length if it is cut."""
    more = len(output) - _SHOWN_BYTES
    return repr(output) if more <= 0 else f"{output[:_SHOWN_BYTES]!r} and {more} bytes more"


@dataclass(frozen=True, slots=True)
class FileInfo:
    """Metadata of a file; `kind` is file, directory, symlink or other."""

    name: str
    kind: str
    size_bytes: int
    mode: int
    modify_time: datetime | None
    link_target: str


@dataclass(frozen=True, slots=True)
class Stats:
    """A sandbox's current and peak usage. None = unknown to its backend; `cpu_time` in seconds."""

    memory_bytes: int | None
    memory_peak_bytes: int | None
    pids: int | None
    cpu_time: float | None
    disk_bytes: int | None
    inodes: int | None


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A sandbox as the service reported it. `state` is creating, ready, paused, lost or deleted.

    `lost_reason`: why it is lost, stable UPPER_SNAKE; `ended_inside`: a program in it ended it (False = unknown).
    `expire_time`: the end of its lease.
    """

    sandbox_id: str
    state: str
    backend: str
    labels: Mapping[str, str]
    create_time: datetime | None
    expire_time: datetime | None
    home: str
    workdir: str
    lost_reason: str
    ended_inside: bool
    namespace: str = "default"
    service: str = ""
    """Name of the sandbox service that has it; empty: an older one."""


@dataclass(frozen=True, slots=True)
class SandboxUsage:
    """A sandbox and its usage; `stats` None = it is not ready, or its backend cannot measure."""

    sandbox: Sandbox
    stats: Stats | None


@dataclass(frozen=True, slots=True)
class SandboxesUsage:
    """The newest sandboxes of a watch and their usage; `count` is the number of all that match."""

    sandboxes: tuple[SandboxUsage, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Diff:
    """Files that differ from a sandbox's base.

    `tar` is a POSIX pax archive of those that are new or changed, for `tarfile.open(fileobj=io.BytesIO(diff.tar))`;
    every pipe, socket or device is a pipe in it.
    `deleted_paths` are absolute. Bytes in them that are not UTF-8 are surrogates, as of `os.fsdecode`.
    """

    tar: bytes = field(repr=False)
    deleted_paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An immutable state of a sandbox's files, from which any number of sandboxes can be made.

    Equal content has one snapshot; `key` is its digest, opaque. `fork` is how sandboxes are made from it: replay,
    filesystem, memory or archive. `setup` has the results of the setup's commands if this client saw them run: none
    when the snapshot existed already.
    """

    snapshot_id: str
    key: str
    backend: str
    create_time: datetime | None
    size_bytes: int
    fork: str
    setup: tuple[RunResult, ...] = ()
    namespace: str = "default"
    service: str = ""
    """Name of the sandbox service that has it; empty: an older one."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """How much runs at a sandbox service, how much more it admits, and what it has prepared, of all namespaces.

    `room` is how many more sandboxes it admits now; 0 = full. `cpu_count` 0 = unknown. `snapshot_keys` (of
    `Snapshot.key`) and `toolbox_ids` have at most 4096 each, the newest first.
    """

    sandbox_count: int
    waiting_count: int
    room: int
    free_memory_bytes: int | None
    cpu_count: float
    busy_cpu_count: float
    snapshot_keys: tuple[str, ...]
    toolbox_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Backend:
    """A backend of the sandbox service and its capabilities. `unavailable_reason` names what to install or set.

    `disk_limit`: `none`; `watched`: a sandbox over its limit is ended; `hard`: the kernel enforces the limit.
    `repeatable`: what is the same in each sandbox of a kind: hostname, machine_id, process_ids, clocks.
    """

    name: str
    available: bool
    unavailable_reason: str
    is_default: bool
    capabilities: frozenset[str]
    networks: frozenset[str]
    fork: str
    disk_limit: str
    repeatable: frozenset[str]
    max_sandboxes: int
