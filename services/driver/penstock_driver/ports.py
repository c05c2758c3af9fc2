"""What the driver needs of the sandbox service and of the gate, in the driver's own words.

Two small protocols and the plain data that crosses them. The adapters that speak gRPC are in `rpc/`; a test may bring
others. Every method raises `penstock_chassis.errors` exceptions and honours cancellation. Times are seconds.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import BinaryIO, Protocol, TypeAlias

from penstock_driver.launches import FileToWrite
from penstock_driver.specs import Dialect, Toolbox


class ExitReason(StrEnum):
    """How a process ended."""

    EXITED = "EXITED"
    SIGNALED = "SIGNALED"
    TIMED_OUT = "TIMED_OUT"
    KILLED = "KILLED"
    OOM = "OOM"
    SANDBOX_LOST = "SANDBOX_LOST"
    START_FAILED = "START_FAILED"


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of a process; `code` with EXITED, `signal` with SIGNALED; `end_time` since the epoch, 0 if unknown."""

    reason: ExitReason
    code: int | None = None
    signal: int | None = None
    message: str = ""
    duration_s: float = 0.0
    cpu_s: float = 0.0
    max_rss_bytes: int | None = None
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    pipes_open: bool = False
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    end_time: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it exited by itself with code 0."""
        return self.reason is ExitReason.EXITED and self.code == 0


@dataclass(frozen=True, slots=True)
class Command:
    """What to run: `argv`, or `shell`, a text for the sandbox's shell. `user` empty is the sandbox's own; `timeout_s`
    None is no limit of its own."""

    argv: tuple[str, ...] = ()
    shell: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    secret_env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""
    user: str = ""
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class CommandResult:
    """A small command's outcome; the outputs are capped by the caller's limit."""

    exit: Exit
    stdout: bytes
    stderr: bytes


@dataclass(frozen=True, slots=True)
class Output:
    """A piece of a watched process's output."""

    data: bytes
    is_stderr: bool = False


@dataclass(frozen=True, slots=True)
class SandboxTerms:
    """What a rollout chooses about its sandbox; empty and None are the sandbox service's defaults."""

    backend: str = ""
    image: str = ""
    cpu: float | None = None
    memory_bytes: int | None = None
    pids: int | None = None
    disk_bytes: int | None = None
    inodes: int | None = None
    user: str = ""
    own_kernel: bool = False
    setup_network: bytes = b""
    """What setup may reach, in the adapter's form; empty for nothing."""


@dataclass(frozen=True, slots=True)
class BackendFacts:
    """What a backend can do here and now."""

    name: str
    available: bool
    unavailable_reason: str
    is_default: bool
    one_endpoint: bool
    forks: bool
    root: bool
    diff: bool
    toolboxes: bool
    stdin: bool
    limits: frozenset[str] = frozenset()
    """Names of the resources in SandboxTerms that it can limit."""


@dataclass(frozen=True, slots=True)
class PreparedToolbox:
    """An installed toolbox and where sandboxes see it."""

    toolbox_id: str
    mount_path: str


@dataclass(frozen=True, slots=True)
class SnapshotOrder:
    """What a snapshot is made of. Equal orders share one snapshot, in the sandbox service too."""

    terms: SandboxTerms
    toolbox_ids: tuple[str, ...]
    files: tuple[FileToWrite, ...]
    setup: tuple[Command, ...]


@dataclass(frozen=True, slots=True)
class CommandReport:
    """One setup command of a snapshot ended."""

    index: int
    result: CommandResult


@dataclass(frozen=True, slots=True)
class PreparedSnapshot:
    """A snapshot that can be forked."""

    snapshot_id: str


class PathKind(StrEnum):
    """What a path names."""

    FILE = "FILE"
    DIRECTORY = "DIRECTORY"
    SYMLINK = "SYMLINK"
    OTHER = "OTHER"


SnapshotStep: TypeAlias = CommandReport | PreparedSnapshot


@dataclass(frozen=True, slots=True)
class SandboxFacts:
    """A sandbox that is ready; paths are absolute, as seen inside."""

    sandbox_id: str
    home: str
    workdir: str
    fork_kind: int = 0


class Sandboxes(Protocol):
    """The sandbox service, as far as the driver uses it."""

    async def backends(self) -> Sequence[BackendFacts]:
        """What there is. Unavailable (SANDBOX_UNREACHABLE) if the service cannot be reached."""

    async def prepare_toolbox(
        self, name: str, toolbox: Toolbox, backend: str, tell: Callable[[str], None]
    ) -> PreparedToolbox:
        """Install a toolbox, or find it installed; `tell` gets each line of the installation."""

    def prepare_snapshot(self, order: SnapshotOrder) -> AsyncIterator[SnapshotStep]:
        """Yield a report per command, then the snapshot; FailedPrecondition (SETUP_FAILED) after a failed one's."""

    async def create(self, terms: SandboxTerms, lease_s: float, labels: Mapping[str, str]) -> SandboxFacts:
        """Make a sandbox without network."""

    async def fork(
        self, snapshot_id: str, *, request_id: str, port: int, upstream: str, lease_s: float, labels: Mapping[str, str]
    ) -> SandboxFacts:
        """Make a sandbox that can reach `upstream`, at its own 127.0.0.1:`port`, and nothing else; nothing at all when
        `upstream` is empty."""

    async def write_files(self, sandbox_id: str, files: Sequence[FileToWrite]) -> None:
        """Write files; parents are created, everything belongs to the sandbox's user."""

    async def put_layer(self, sandbox_id: str, path: str, tar: BinaryIO) -> None:
        """Unpack a tar, from where the file stands, over the directory `path`: what stands in the way of a member is
        removed, links not followed, and a member `.wh.NAME` removes NAME."""

    async def read_tree(self, sandbox_id: str, path: str, sink: BinaryIO, max_bytes: int) -> None:
        """Write a tar of `path` to `sink`, names relative to it; of one file or link its own name.
        ResourceExhausted (TREE_TOO_LARGE) when its files have more than `max_bytes`."""

    async def diff(self, sandbox_id: str, below: Sequence[str], sink: BinaryIO, max_bytes: int) -> Sequence[str]:
        """Write a tar of what differs from the sandbox's base at or below some absolute paths to `sink`, names relative
        to the root, and return the paths that the base has and the sandbox has not. ResourceExhausted (TREE_TOO_LARGE)
        for a tar of more than `max_bytes`."""

    async def kind(self, sandbox_id: str, path: str) -> PathKind | None:
        """What `path` itself is; None for what does not exist."""

    async def entries(self, sandbox_id: str, path: str, most: int) -> Mapping[str, PathKind]:
        """What is in a directory, by name; links on the way to it are followed. Of more than `most` some are told, and
        more than `most`: how many an agent leaves is its choice."""

    async def read_file(self, sandbox_id: str, path: str, max_bytes: int) -> tuple[bytes, int]:
        """The first `max_bytes` of a regular file, and its size; NotFound or FailedPrecondition (NOT_A_FILE)."""

    async def start(
        self,
        sandbox_id: str,
        process_id: str,
        command: Command,
        stdin: bytes | None,
        *,
        output_ends: tuple[int, int] | None = None,
    ) -> None:
        """Start a process, and give it its standard input when that is not None; the same once more changes nothing.

        `output_ends` are the bytes of each output's beginning and end that are kept; None keeps the first 64 MiB.
        """

    def watch(self, sandbox_id: str, process_id: str) -> AsyncIterator[Output | Exit]:
        """Yield a process's output as it comes and then its exit; a broken stream is resumed where it broke."""

    async def kill(self, sandbox_id: str, process_id: str, *, everything: bool = False) -> None:
        """Kill the process and its descendants, or `everything` in the sandbox; when this returns all of it is dead."""

    async def run(self, sandbox_id: str, process_id: str, command: Command, output_limit: int) -> CommandResult:
        """Run a small command to its end; what it left behind lives until `kill`, or the sandbox's end."""

    async def ended_inside(self, sandbox_id: str) -> bool:
        """Whether a sandbox is lost because something that ran in it ended it, while what serves it lives on. False
        where nobody can tell."""

    async def delete(self, sandbox_id: str) -> None:
        """Kill everything in a sandbox and remove it; unknown is a success."""

    async def delete_labelled(self, labels: Mapping[str, str]) -> Sequence[str]:
        """Delete every sandbox with all of the labels and return their ids."""


@dataclass(frozen=True, slots=True)
class GateOrder:
    """A rollout to open at the gate, once for each `request_id`.

    `terms` is what the adapter made of the client's request: the driver's domain passes mode, source, budgets and
    policy on as they are, and keeps a caller's key in memory only.
    """

    rollout_id: str
    request_id: str
    group_id: str | None
    group_index: int | None
    task_id: str
    terms: bytes = field(repr=False)
    dialects: tuple[Dialect, ...]
    title_system_prompts: tuple[str, ...]
    compaction_system_prompts: tuple[str, ...]
    session_headers: tuple[str, ...]
    volatile_line_patterns: tuple[str, ...]
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class GateOpening:
    """A rollout that is open: where its agent calls and with what, the tools that it is offered and where they are."""

    ingress_address: str
    base_paths: Mapping[Dialect, str]
    token: str = field(repr=False)
    model_name: str
    host_tools: tuple[str, ...] = ()
    mcp_path: str = ""


@dataclass(frozen=True, slots=True)
class GateClosing:
    """What became of a rollout's calls; `exhausted_budget` names the budget that was used up, empty for none.

    `last_failure` is why the call that failed last did, and `is_final` whether asking again would not help.
    `gave_up` says that the last call to end got no answer for a reason that may pass.
    """

    exhausted_budget: str = ""
    calls: int = 0
    unanswered: int = 0
    last_failure: str = ""
    is_final: bool = False
    gave_up: bool = False


@dataclass(frozen=True, slots=True)
class CallSpent:
    """What a call came to: tokens, and the policy versions that sampled them (None where none was told)."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    oldest_version: int | None = None
    newest_version: int | None = None


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A model call of a rollout came to its end; `call` is the gate's own account of it, without tokens."""

    rollout_id: str
    call: bytes = field(repr=False)
    spent: CallSpent = field(default_factory=CallSpent)


class Gate(Protocol):
    """The interception service, as far as the driver uses it."""

    @property
    def interruptions(self) -> int:
        """How often it was found to be away so far, or to have lost its connections, by whatever means."""

    async def check(
        self, terms: bytes, *, rollout_id: str, group_id: str | None, labels: Mapping[str, str]
    ) -> Sequence[str]:
        """See that a rollout with these terms has a model (R27), and return the names of the tools that it would be
        offered. Unavailable (INTERCEPTION_UNREACHABLE, and the gate's INFERENCE_UNREACHABLE and UPSTREAM_UNREACHABLE);
        FailedPrecondition for a source that cannot be used."""

    async def open(self, order: GateOrder) -> GateOpening:
        """Open a rollout; from now on its agent may call."""

    async def close(self, rollout_id: str, reason: str) -> GateClosing:
        """Void the rollout's credential and cancel its open calls; idempotent, unknown is a success."""

    async def delete(self, rollout_id: str) -> None:
        """Remove the rollout and its capture; idempotent."""

    def calls(self, labels: Mapping[str, str]) -> AsyncIterator[CallEnded]:
        """Yield the calls of all rollouts with the labels as they end, from now on and without end."""
