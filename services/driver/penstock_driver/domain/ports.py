"""What the driver needs of the sandbox service and the gate, as two protocols: `Sandboxes` and `Gate`.

Sandboxes are described by plain data; network policies, the gate's terms and its calls are the services' messages.

The gRPC adapters are in `clients/`; a test may bring others. Every method raises `penstock_chassis.errors` exceptions
and honours cancellation. Times are seconds.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import BinaryIO, Final, Protocol, TypeAlias

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.interception.v1 import rollout_gate_service_pb2
from penstock.sandbox.v1 import sandbox_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock_driver.agents.launch import FileToWrite
from penstock_driver.agents.specs import Dialect, Toolbox


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
    """The end of a process. `code` is set with EXITED, `signal` with SIGNALED; `end_time` is since the epoch, 0 if
    unknown.
    """

    reason: ExitReason
    code: int | None = None
    signal: int | None = None
    message: str = ""
    duration_s: float = 0.0
    cpu_time_s: float = 0.0
    max_rss_bytes: int | None = None
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    pipes_open: bool = False
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    end_time: float = 0.0
    all_killed: bool = False
    """Whether every other process of the sandbox was killed before this was reported."""

    @property
    def ok(self) -> bool:
        """Whether the process exited by itself with code 0."""
        return self.reason is ExitReason.EXITED and self.code == 0


@dataclass(frozen=True, slots=True)
class Command:
    """What to run: `argv`, or `shell`, a text for the sandbox's shell.

    An empty `user` is the sandbox's own; `timeout_s` None means that the command has no limit of its own.
    """

    argv: tuple[str, ...] = ()
    shell: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    secret_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: str = ""
    user: str = ""
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class ResultContent:
    """The first bytes of a file that a small command left, and its whole size."""

    content: bytes
    size_bytes: int


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a small command; the outputs are capped by the caller's limit."""

    exit: Exit
    stdout: bytes
    stderr: bytes
    result_file: ResultContent | None = None
    """None = it was not asked for, or `read_file` reads it or says why not."""


@dataclass(frozen=True, slots=True)
class Output:
    """A piece of a watched process's output."""

    data: bytes
    is_stderr: bool = False


LIMITED: Final = ("cpu", "memory_bytes", "pids", "disk_bytes", "inodes")
"""What a sandbox has limits of, as fields of `SandboxTerms`."""


@dataclass(frozen=True, slots=True)
class SandboxTerms:
    """A rollout's choices for its sandbox; empty and None mean the sandbox service's defaults."""

    backend: str = ""
    image: str = ""
    cpu: float | None = None
    memory_bytes: int | None = None
    pids: int | None = None
    disk_bytes: int | None = None
    inodes: int | None = None
    user: str = ""
    own_kernel: bool = False
    setup_network: sandbox_pb2.NetworkPolicy | None = field(default=None, hash=False)
    """What setup may reach; None for nothing. Messages have no hash."""
    companions: tuple[sandbox_pb2.Companion, ...] = field(default=(), hash=False)


@dataclass(frozen=True, slots=True)
class Packages:
    """Contents of a task's locks: pip's requirements with hashes, a package-lock.json, Debian packages; empty: none."""

    python: str = field(default="", repr=False)
    npm: str = field(default="", repr=False)
    debian: str = field(default="", repr=False)

    def __bool__(self) -> bool:
        return bool(self.python or self.npm or self.debian)


NO_PACKAGES: Final = Packages()


@dataclass(frozen=True, slots=True)
class BackendFacts:
    """What a backend can do on this host now."""

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
    egress_hosts: tuple[str, ...] = ()
    """What allow-lists may name; empty where it has none."""
    limits: frozenset[str] = frozenset()
    """Names of the resources in SandboxTerms that it can limit."""
    companions: bool = False
    debian_packages: bool = False


@dataclass(frozen=True, slots=True)
class PreparedToolbox:
    """An installed toolbox and its mount path in sandboxes."""

    toolbox_id: str
    mount_path: str


@dataclass(frozen=True, slots=True)
class SnapshotSpec:
    """The inputs of a snapshot. Equal specs share one snapshot, in the sandbox service too."""

    terms: SandboxTerms
    toolbox_ids: tuple[str, ...]
    files: tuple[FileToWrite, ...]
    setup: tuple[Command, ...]


@dataclass(frozen=True, slots=True)
class CommandReport:
    """The result of one setup command of a snapshot."""

    index: int
    result: CommandResult


@dataclass(frozen=True, slots=True)
class PreparedSnapshot:
    """A snapshot that can be forked; `fork_kind` is how its sandboxes are copied, a `penstock.sandbox.v1.ForkKind`.

    `key` is the digest of its content, equal at all sandbox services; empty = unknown.
    """

    snapshot_id: str
    fork_kind: int
    key: str = ""


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
    service: str = ""
    """Name of the sandbox service that has it; empty for one of an earlier version."""
    takes_files: bool = False
    """Whether `start` and `run` may have files; not of an earlier version."""


class Sandboxes(Protocol):
    """The sandbox service, as far as the driver uses it."""

    async def backends(self) -> Sequence[BackendFacts]:
        """List the backends. Unavailable (SANDBOX_UNREACHABLE) if the service cannot be reached."""

    async def prepare_toolbox(
        self, name: str, toolbox: Toolbox, backend: str, on_line: Callable[[str], None]
    ) -> PreparedToolbox:
        """Install a toolbox unless it is installed; `on_line` receives each line of the installation."""

    def prepare_snapshot(self, spec: SnapshotSpec) -> AsyncIterator[SnapshotStep]:
        """Yield a report per command, then the snapshot; FailedPrecondition (SETUP_FAILED) after that of a failed
        command.
        """

    async def create(self, terms: SandboxTerms, lease_s: float, labels: Mapping[str, str]) -> SandboxFacts:
        """Create a sandbox without network."""

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
        """Create a sandbox whose only network access is `upstream`, at its own 127.0.0.1:`port`, and what `allowlist`
        names. It has no network at all without both. `repeatable` as in `penstock.sandbox.v1.SandboxSpec`. `joins`: the
        sandbox whose companions it reaches, and whose programs end.
        """

    async def write_files(self, sandbox_id: str, files: Sequence[FileToWrite]) -> None:
        """Write files. Parents are created; all are owned by the sandbox's user."""

    async def put_layer(self, sandbox_id: str, path: str, tar: BinaryIO) -> None:
        """Unpack a tar, from its current position, over the directory `path`.

        Whatever is in the way of a member is removed, links are not followed, and a member `.wh.NAME` removes NAME.
        """

    async def read_tree(self, sandbox_id: str, path: str, sink: BinaryIO, max_bytes: int) -> None:
        """Write a tar of `path` to `sink`. Names are relative to it; a single file or link keeps its own name.

        ResourceExhausted (TREE_TOO_LARGE) when its files exceed `max_bytes`.
        """

    async def diff(self, sandbox_id: str, below: Sequence[str], sink: BinaryIO, max_bytes: int) -> Sequence[str]:
        """Write a tar of the changes at or below the given absolute paths to `sink`; return the deleted paths.

        Changes are relative to the sandbox's base, names in the tar to the root. Pipes, sockets and devices are pipes
        in the tar. Bytes of a deleted path that are not UTF-8 are surrogates, as of `os.fsdecode`. ResourceExhausted
        (TREE_TOO_LARGE) for a tar of more than `max_bytes`; FailedPrecondition (PATH_NOT_TEXT) for a deletion whose
        name the backend cannot give.
        """

    async def kind(self, sandbox_id: str, path: str) -> PathKind | None:
        """The kind of `path` itself, links not followed; None if it does not exist."""

    async def entries(self, sandbox_id: str, path: str, most: int) -> Mapping[str, PathKind]:
        """List a directory by name; links on the way to it are followed. Bytes that are not UTF-8 are surrogates.

        Of more than `most` entries, more than `most` but not all are returned: the agent chooses how many it leaves.
        """

    async def read_file(self, sandbox_id: str, path: str, max_bytes: int) -> tuple[bytes, int]:
        """Return the first `max_bytes` of a regular file and its size; NotFound or FailedPrecondition (NOT_A_FILE)."""

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
        """Start a process and send it its standard input unless that is None; idempotent.

        `output_ends` sets how many bytes of each output's beginning and end are kept; None keeps the first 64 MiB. With
        `kill_all_after`, everything else in the sandbox is killed after its end, if its exit says so (`all_killed`).
        `files` are written before, as by `write_files`, where the sandbox takes them (`SandboxFacts.takes_files`).
        """

    def watch(self, sandbox_id: str, process_id: str) -> AsyncGenerator[Output | Exit, None]:
        """Yield a process's output as it comes, then its exit; a broken stream resumes at the same position."""

    async def kill(self, sandbox_id: str, process_id: str, *, everything: bool = False) -> None:
        """Kill the process and its descendants, or `everything` in the sandbox; all of it is dead on return."""

    async def send_stdin(self, sandbox_id: str, process_id: str, stdin: bytes) -> None:
        """Send a process its standard input and close it; what it has already is not sent again.

        NotFound (PROCESS_UNKNOWN) for a process that was never started.
        """

    async def pause(self, sandbox_id: str, lease_s: float) -> bool:
        """Freeze everything in a sandbox, and let the timeouts of its commands stand still; idempotent.

        Its lease ends `lease_s` from now. False if its backend cannot freeze: then only the timeouts stand still.
        """

    async def resume(self, sandbox_id: str, lease_s: float) -> None:
        """End a pause; idempotent. The lease ends `lease_s` from now."""

    async def rejoin(self, sandbox_id: str, lease_s: float) -> None:
        """Find a sandbox that an earlier process of this driver made, and let its lease end `lease_s` from now.

        NotFound and FailedPrecondition (SANDBOX_UNKNOWN, SANDBOX_LOST, SANDBOX_NOT_READY) if it is gone.
        """

    async def renew(self, sandbox_id: str, lease_s: float) -> None:
        """Let a sandbox's lease end `lease_s` from now. Errors as of `rejoin`.

        A lease that the sandbox's provider does not extend that far stays as it is, here and above.
        """

    async def labelled(self, labels: Mapping[str, str]) -> Sequence[str]:
        """Ids of the sandboxes that have all of the labels."""

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
        """Run a small command to its end; processes that it leaves live until `kill` or the end of the sandbox.

        `kill_all_after` and `files` as in `start`. `result_file` is the path of a file to read after that, and its most
        bytes.
        """

    async def ended_inside(self, sandbox_id: str) -> bool:
        """Whether a sandbox was lost because a process in it ended it, while its host lives on. False if unknown."""

    async def delete(self, sandbox_id: str) -> None:
        """Kill everything in a sandbox and remove it; succeeds for an unknown sandbox."""

    async def delete_labelled(self, labels: Mapping[str, str], *, beside: str = "") -> Sequence[str]:
        """Delete every sandbox that has all of the labels; return their ids.

        `beside`: the id of a sandbox. Only the service that has it, or had it, is asked.
        """


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A rollout to open at the gate, once per `request_id`.

    `terms` has the client's mode, source, budgets and policy, which the driver passes on unchanged; a caller's key in
    it is kept in memory only.
    """

    rollout_id: str
    request_id: str
    group_id: str | None
    group_index: int | None
    task_id: str
    terms: rollout_gate_service_pb2.OpenRolloutRequest = field(repr=False)
    dialects: tuple[Dialect, ...]
    title_system_prompts: tuple[str, ...]
    compaction_system_prompts: tuple[str, ...]
    session_headers: tuple[str, ...]
    volatile_line_patterns: tuple[str, ...]
    labels: Mapping[str, str]
    attempt: int = 1
    branched_from: trajectory_pb2.BranchPoint | None = None


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """The model of a rollout's judge, to be opened at the gate that had the rollout, or of its user, at the gate that
    has it. `driver_id` leases it."""

    rollout_id: str
    request_id: str
    terms: rollout_gate_service_pb2.OpenRolloutRequest = field(repr=False)
    driver_id: str = ""
    task_id: str = ""


@dataclass(frozen=True, slots=True)
class GateOpening:
    """An open rollout: its agent's endpoint and agent key, the offered tools and their endpoint."""

    ingress_address: str
    base_paths: Mapping[Dialect, str]
    token: str = field(repr=False)
    model_name: str
    host_tools: tuple[str, ...] = ()
    mcp_path: str = ""
    home: str = ""
    """The gate's name; empty for one of an earlier version."""


@dataclass(frozen=True, slots=True)
class GateClosing:
    """What became of a rollout's calls; `exhausted_budget` names the exhausted budget, empty for none.

    `last_failure` is the reason of the most recent failed call, and `is_final` whether a retry of it would be useless.
    `gave_up` means that the last call to end failed for a transient reason. Of the `unanswered` calls, `refused` counts
    those that failed because of their own request, and `lost` the others that came after the rollout's last answer.
    `lease_ended` means that the gate had closed the rollout before, because it could not reach this driver.
    `diverged` says which call differed from what was recorded, where an exact replay failed for that; empty = none.
    `is_unknown` means that the gate has no such rollout: it has lost what it had of it, with its disk.
    `restored` means that the gate was away while it had the rollout: it was started again.
    """

    exhausted_budget: str = ""
    calls: int = 0
    unanswered: int = 0
    last_failure: str = ""
    is_final: bool = False
    gave_up: bool = False
    refused: int = 0
    lost: int = 0
    lease_ended: bool = False
    diverged: str = ""
    is_unknown: bool = False
    restored: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """What a sandbox service or a gate says of its load.

    Attributes:
        count: the sandboxes, or the open rollouts, that it has of all drivers.
        room: how many more it admits; None = no limit is known.
        free_memory_bytes: on its machine; None = unknown.
        snapshot_keys: the contents of the snapshots that it has.
        creation_s: how long it takes to make a sandbox, by this driver's clock; None = unknown.
        unreachable_inference: of a gate: the inference services and pools, by name, that do not answer it.
    """

    count: int
    room: int | None = None
    free_memory_bytes: int | None = None
    snapshot_keys: frozenset[str] = frozenset()
    creation_s: float | None = None
    unreachable_inference: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class CallSpent:
    """The cost of a call: tokens, and the policy versions that sampled them (None if not reported).

    `logprob_sum` is over those sampled tokens that have a logprob, in nats; `logprob_count` is their number.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    oldest_version: int | None = None
    newest_version: int | None = None
    logprob_sum: float = 0.0
    logprob_count: int = 0


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A model call of a rollout ended; `call` is the gate's own record of it, without tokens."""

    rollout_id: str
    call: trajectory_pb2.Call = field(repr=False)
    spent: CallSpent = field(default_factory=CallSpent)


class GateCheck(Protocol):
    """What a gate says before a rollout is made."""

    async def check(
        self,
        terms: rollout_gate_service_pb2.OpenRolloutRequest,
        *,
        rollout_id: str,
        group_id: str | None,
        labels: Mapping[str, str],
    ) -> Sequence[str]:
        """Check that a rollout with these terms has a model (R27); return the names of the tools it would be offered.

        Unavailable (INTERCEPTION_UNREACHABLE, and the gate's INFERENCE_UNREACHABLE and UPSTREAM_UNREACHABLE);
        FailedPrecondition for a source that cannot be used.
        """


class Gate(GateCheck, Protocol):
    """The interception service, as far as the driver uses it."""

    @property
    def interruptions(self) -> int:
        """How often so far the gate was found unreachable, or to have lost its connections, by whatever means."""

    async def open(self, spec: OpenRequest) -> GateOpening:
        """Open a rollout; from now on its agent may call."""

    async def open_judge(self, opening: ModelRequest) -> GateOpening | None:
        """Let the verifier of a closed rollout ask its judge from now on, once per `request_id`; None if it was opened
        before, and closed since. NotFound: there is no such rollout.
        """

    async def open_user(self, opening: ModelRequest) -> GateOpening | None:
        """Let a model play the user of an open rollout's agent, once per `request_id`; None if it was opened before,
        and closed since. NotFound: there is no such rollout. FailedPrecondition (USER_TOO_LATE): it is closed.
        """

    async def ask_user(self, rollout_id: str, body: bytes, timeout_s: float) -> str:
        """Return what the model writes that plays the user of this rollout's agent; `body` is a request of Chat
        Completions, and an equal one gets the answer of the earlier one.

        Unavailable or DeadlineExceeded: it may be asked again.
        """

    async def answered(self, rollout_id: str) -> GateClosing:
        """What became of a rollout's calls so far."""

    async def close(self, rollout_id: str, reason: str) -> GateClosing:
        """Revoke the rollout's agent key and cancel its open calls; idempotent, succeeds for an unknown rollout."""

    async def delete(self, rollout_id: str) -> None:
        """Remove the rollout and its capture; idempotent."""

    async def load_recording(self, part: rollout_gate_service_pb2.LoadRecordingRequest) -> int:
        """Add recorded calls to an open rollout; return how many it has. Unsupported: the gate is older than this."""

    async def hold_calls(self, rollout_id: str, *, held: bool) -> None:
        """Give out no call of an open rollout until this is called again; idempotent. Its times stand still."""

    async def has(self, rollout_id: str) -> bool:
        """Whether a rollout is there, and was not closed because its lease ended."""

    async def ended_calls(self, rollout_id: str) -> Sequence[CallEnded]:
        """The calls of a rollout that have ended, in order of arrival; none for an unknown rollout."""

    def calls(self, labels: Mapping[str, str]) -> AsyncIterator[CallEnded]:
        """Yield the calls of all rollouts with these labels as they end, from now on, without end."""


GATE_GONE: Final = "GATE_GONE"
"""The reason of NotFound where the rollout's gate is no member any more; the metadata has its name (`gate`)."""


class Captures(Protocol):
    """What gates captured of rollouts. `gate` is the name of the rollout's gate; empty = unknown.

    Where there are several gates, all methods that take one raise Unavailable (GATE_LOST) while it does not answer, and
    NotFound (GATE_GONE) once it has been no member for a while: what it had was not asked for then.
    """

    def capture(
        self, rollout_id: str, *, gate: str, include_bodies: bool, include_top: bool
    ) -> AsyncIterator[trajectory_pb2.Trajectory]:
        """Yield the trajectory in fragments; NotFound (ROLLOUT_UNKNOWN)."""

    async def tensors(self, rollout_id: str, call_id: str, *, gate: str) -> Sequence[completion_pb2.TokenTensor]:
        """The tensors of a call's answer, with their data; NotFound (CALL_UNKNOWN)."""

    async def media(self, rollout_id: str, call_id: str, *, gate: str) -> Sequence[chat_pb2.Media]:
        """The images that a call was the first to have, with their data; NotFound (CALL_UNKNOWN)."""

    def tool_results(self, rollout_id: str, *, gate: str) -> AsyncIterator[trajectory_pb2.HostToolCall]:
        """Yield its host tool calls with their results; NotFound (ROLLOUT_UNKNOWN)."""

    async def delete(self, rollout_id: str) -> None:
        """Remove it; idempotent."""

    async def stored(self, rollout_id: str, gates: Sequence[str]) -> None:
        """Say that it is stored, so that it is kept no longer than the gate's retention; idempotent.

        To `gates`, or to all that answer if empty. Unavailable while one of `gates` does not answer.
        """


class GateReader(GateCheck, Captures, Protocol):
    """What is asked of gates beside the attempts there."""


class GateClient(Gate, Captures, Protocol):
    """One interception service, with the captures for readers of trajectories."""
