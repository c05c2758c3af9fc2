"""The data types of the sandbox service: specs from callers and the views returned to them.

Invariants: every class is frozen; times are seconds (a wall-clock ``..._at`` counts from the epoch); sizes are bytes;
None means "not given" or "not known", never zero. There is no behaviour here.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from penstock_chassis.auth import DEFAULT_NAMESPACE

SNAPSHOT_LABEL: Final = "penstock/snapshot"
"""Owner of the sandboxes in which snapshots are made: the service's own, never shown to callers."""
LEAST_MEMORY_BYTES: Final = 4 * 1024 * 1024
LEAST_PIDS: Final = 8
LEAST_DISK_BYTES: Final = 1024 * 1024
LEAST_INODES: Final = 64
"""A sandbox with less than this does not start."""


class State(enum.Enum):
    """A sandbox's lifecycle state; LOST and DELETED are terminal."""

    CREATING = "creating"
    READY = "ready"
    PAUSED = "paused"
    LOST = "lost"
    DELETED = "deleted"

    @property
    def terminal(self) -> bool:
        """Whether no other state can follow."""
        return self in (State.LOST, State.DELETED)


class NetworkKind(enum.Enum):
    """Network access of a sandbox, from narrowest to widest."""

    NONE = 0
    ONE_ENDPOINT = 1
    ALLOWLIST = 2
    OPEN = 3


DEFAULT_PORTS: Final = (80, 443)
"""The ports of an allow-list that names none."""
DEFAULT_PROXY_PORT: Final = 3128


@dataclass(frozen=True, slots=True)
class NetworkPolicy:
    """Network access; ``ONE_ENDPOINT`` and ``ALLOWLIST`` each use their own fields beside ``kind``.

    ``local_port`` is that of the endpoint, or of an allow-list's proxy.
    """

    kind: NetworkKind = NetworkKind.NONE
    local_port: int = 0
    upstream: str = ""
    hosts: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    denied_hosts: tuple[str, ...] = ()
    one_endpoint: NetworkPolicy | None = None
    """An endpoint beside an allow-list's proxy."""
    recording: str = ""
    recorded_only: bool = False
    upstream_ca: str = field(default="", compare=False)
    """PEM file that verifies a ``tls:`` upstream (empty: the system's roots). Set by the operator, not by callers."""
    proxy: str = field(default="", compare=False)
    """Unix socket of the proxy of an allow-list. Set by the service, as is ``proxy_greeting``, which it sends first."""
    proxy_greeting: bytes = field(default=b"", compare=False, repr=False)

    @property
    def endpoints(self) -> tuple[NetworkPolicy, ...]:
        """What is served inside, each at its ``local_port``."""
        match self.kind:
            case NetworkKind.ONE_ENDPOINT:
                return (self,)
            case NetworkKind.ALLOWLIST:
                return (self,) if self.one_endpoint is None else (self, self.one_endpoint)
            case _:
                return ()


@dataclass(frozen=True, slots=True)
class Resources:
    """Limits of all processes of a sandbox together: cores, bytes, processes, bytes, files. None = the default."""

    cpu: float | None = None
    memory_bytes: int | None = None
    pids: int | None = None
    disk_bytes: int | None = None
    inodes: int | None = None


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """How a companion shows that it is ready; no ``argv``: it is ready once it is started."""

    argv: tuple[str, ...] = ()
    interval_s: float = 30.0
    timeout_s: float = 30.0
    retries: int = 3
    start_period_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Companion:
    """A container beside a sandbox, in its network. Empty, and no ``health_check``: the image's own."""

    name: str
    image: str
    aliases: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    workdir: str = ""
    health_check: HealthCheck | None = None
    resources: Resources = Resources()
    after: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The host names at which it is reached."""
        return (self.name, *self.aliases)


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """Everything that a sandbox's creator chooses. At most one of ``image`` and ``snapshot_id`` is set."""

    backend: str = ""
    image: str = ""
    snapshot_id: str = ""
    resources: Resources = Resources()
    network: NetworkPolicy = NetworkPolicy()
    env: Mapping[str, str] = field(default_factory=dict)
    toolbox_ids: tuple[str, ...] = ()
    user: str = ""
    lease_s: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    own_kernel: bool = False
    repeatable: bool = False
    companions: tuple[Companion, ...] = ()
    joins: str = ""
    """Id of the sandbox whose network, and with it whose companions, it joins; empty for none."""
    to_be_sealed: bool = field(default=False, compare=False)
    """Whether it will become a snapshot: it has no companions, and some backends must record the state of its files."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A sandbox as shown to callers. ``home`` and ``workdir`` are paths inside."""

    id: str
    state: State
    spec: SandboxSpec
    created_at: float
    expires_at: float
    home: str = ""
    workdir: str = ""
    lost_reason: str = ""
    ended_inside: bool = False
    """Whether the sandbox's own workload caused the loss; False if unknown."""
    namespace: str = DEFAULT_NAMESPACE


DISK_EXHAUSTED: Final = "DISK_EXHAUSTED"
"""The sandbox's files exceeded its disk limit."""

POD_OUT_OF_MEMORY: Final = "POD_OUT_OF_MEMORY"
"""Loss reason of a pod that the kernel ended because its programs used up its memory."""
ENDED_INSIDE: Final = frozenset(
    {
        DISK_EXHAUSTED,
        POD_OUT_OF_MEMORY,
        "PROCESS_ENDED",
        "DOOR_CLOSED",
        "ATTENDANT_KILLED",
        "ATTENDANT_MISBEHAVED",
        "JOB_FAILED",
        "TREE_SURVIVED",
    }
)
"""Loss reasons caused by the sandbox's own workload: its runtime ended while the rest of the service's went on (R93).
Backends give one of these only if they know it."""


class DiskLimit(enum.Enum):
    """How a backend enforces disk limits (the contract defines the values)."""

    NONE = 1
    WATCHED = 2
    HARD = 3


class RepeatablePart(enum.Enum):
    """What programs see that is the same in each sandbox of a kind (the contract defines the values)."""

    HOSTNAME = 1
    MACHINE_ID = 2
    PROCESS_IDS = 3
    CLOCKS = 4


class ForkKind(enum.Enum):
    """How a backend copies a sandbox."""

    NONE = 1
    REPLAY = 2
    FILESYSTEM = 3
    MEMORY = 4
    ARCHIVE = 5


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do, as probed on this machine; the default is nothing."""

    networks: frozenset[NetworkKind] = frozenset()
    fork: ForkKind = ForkKind.NONE
    pty: bool = False
    stdin_stream: bool = False
    limit_cpu: bool = False
    limit_memory: bool = False
    limit_pids: bool = False
    disk_limit: DiskLimit = DiskLimit.NONE
    limit_inodes: bool = False
    root: bool = False
    pause: bool = False
    diff: bool = False
    toolboxes: bool = False
    kill_tree: bool = False
    live_fork: bool = False
    open_egress: bool = False
    own_kernel: bool = False
    system_read_only: bool = False
    repeatable: frozenset[RepeatablePart] = frozenset()
    companions: bool = False
    debian_packages: bool = False

    @property
    def limit_disk(self) -> bool:
        """Whether a spec may set a disk limit in bytes."""
        return self.disk_limit is not DiskLimit.NONE


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """A backend as ListBackends returns it; ``unavailable_reason`` states what to install or set."""

    name: str
    available: bool
    unavailable_reason: str
    capabilities: Capabilities
    is_default: bool
    max_sandboxes: int
    default_lease_s: float
    max_lease_s: float
    default_resources: Resources
    max_lifetime_s: float | None = None
    max_sandboxes_per_owner: int | None = None
    max_resources: Resources = Resources()
    egress_hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """What to run: exactly one of ``argv`` and ``shell`` (a command line for the sandbox's shell)."""

    argv: tuple[str, ...] = ()
    shell: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    secret_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: str = ""
    user: str = ""
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class PtySize:
    """A terminal's dimensions in characters."""

    rows: int
    columns: int


DEFAULT_OUTPUT_LIMIT = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to start; the caller chooses ``id``, unique in the sandbox. ``output_limit`` is per stream."""

    id: str
    command: Command
    stdin: bool = False
    pty: PtySize | None = None
    output_limit: int = DEFAULT_OUTPUT_LIMIT
    kill_all_after: bool = False
    """Whether every other process of the sandbox is killed after its end, before its exit is reported."""


class ExitReason(enum.Enum):
    """How a process ended (the contract, penstock.sandbox.v1.ExitReason, defines the values)."""

    EXITED = 1
    SIGNALED = 2
    TIMED_OUT = 3
    KILLED = 4
    OOM = 5
    SANDBOX_LOST = 6
    START_FAILED = 7


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of a process. ``code`` or ``signal`` is set if the process was seen to end."""

    reason: ExitReason
    ended_at: float
    duration_s: float
    code: int | None = None
    signal: int | None = None
    message: str = ""
    cpu_s: float | None = None
    peak_bytes: int | None = None
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    pipes_open: bool = False
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    ended_inside: bool = False
    all_killed: bool = False
    """Every other process of the sandbox was killed before this was reported."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process as shown to callers; ``exit`` is None while it runs."""

    spec: ProcessSpec
    started_at: float
    exit: Exit | None
    stdin_offset: int = 0
    stdin_closed: bool = True


class Stream(enum.IntEnum):
    """An output stream of a process. An IntEnum, because each chunk of output looks it up."""

    STDOUT = 1
    STDERR = 2


@dataclass(frozen=True, slots=True)
class Chunk:
    """Output bytes, starting at byte ``offset`` of the stream."""

    stream: Stream
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Gap:
    """Discarded output: bytes [start, end) of the stream."""

    stream: Stream
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The process is alive and wrote nothing."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a small command; output over its limit is reduced to its first and last halves."""

    exit: Exit
    stdout: bytes
    stderr: bytes


class FileKind(enum.Enum):
    """File type of a path."""

    FILE = 1
    DIRECTORY = 2
    SYMLINK = 3
    OTHER = 4


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file's metadata; ``mode`` holds the permission bits."""

    name: str
    kind: FileKind
    size: int
    mode: int
    modified_at: float
    target: str = ""


@dataclass(frozen=True, slots=True)
class SeedFile:
    """A file that is written before setup, or before a process starts."""

    path: str
    content: bytes
    mode: int = 0o644


@dataclass(frozen=True, slots=True)
class SnapshotSpec:
    """How to build a snapshot: a sandbox, files, then commands in order."""

    sandbox: SandboxSpec
    files: tuple[SeedFile, ...] = ()
    setup: tuple[Command, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A sealed, immutable state of a sandbox's files. ``key`` is the content hash of its spec."""

    id: str
    key: str
    backend: str
    created_at: float
    size: int
    fork: ForkKind
    namespace: str = DEFAULT_NAMESPACE


class RuntimeKind(enum.Enum):
    """A language runtime that a toolbox's programs need."""

    PYTHON = "python"
    NODE = "node"


@dataclass(frozen=True, slots=True)
class Runtime:
    """A runtime, its minimum version and the first excluded version, for example "20.0"; empty = any."""

    kind: RuntimeKind
    min_version: str = ""
    below_version: str = ""


@dataclass(frozen=True, slots=True)
class ToolboxFile:
    """A file of a toolbox at a path relative to it; ``mode`` None = 0644, under bin/ 0755."""

    path: str
    content: bytes
    mode: int | None = None


@dataclass(frozen=True, slots=True)
class PythonTarget:
    """The Python of sandboxes: its minor version and the newest platform of wheels that it takes."""

    version: str
    platform: str


@dataclass(frozen=True, slots=True)
class ToolboxSpec:
    """The content of a toolbox."""

    name: str
    runtimes: tuple[Runtime, ...] = ()
    npm_packages: tuple[str, ...] = ()
    files: tuple[ToolboxFile, ...] = ()
    path_directories: tuple[str, ...] = ()
    python_packages: tuple[str, ...] = ()
    npm_lock: str = ""
    python_target: PythonTarget | None = None
    debian_lock: str = ""


@dataclass(frozen=True, slots=True)
class Toolbox:
    """An installed toolbox; ``mount_path`` is its path in sandboxes, ``namespace`` one that prepared it."""

    id: str
    name: str
    mount_path: str
    size: int
    created_at: float
    namespace: str = DEFAULT_NAMESPACE


@dataclass(frozen=True, slots=True)
class Stats:
    """Resource usage of a sandbox; None where the backend cannot measure it."""

    memory_bytes: int | None = None
    memory_peak_bytes: int | None = None
    pids: int | None = None
    cpu_s: float | None = None
    disk_bytes: int | None = None
    inodes: int | None = None
