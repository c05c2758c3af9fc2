"""What the sandbox service tells of sandboxes, files, snapshots and backends. All values; times are UTC or seconds."""

from dataclasses import dataclass, field
from datetime import datetime

from penstock.client.results import Exit

_SHOWN_BYTES = 200


@dataclass(frozen=True, slots=True, repr=False)
class RunResult:
    """The outcome of a small command: how it ended, and what it wrote."""

    exit: Exit
    stdout: bytes
    stderr: bytes

    @property
    def ok(self) -> bool:
        """It ended by itself with 0."""
        return self.exit.ok

    def __repr__(self) -> str:
        return f"RunResult({self.exit}, stdout={_shown(self.stdout)}, stderr={_shown(self.stderr)})"


def _shown(output: bytes) -> str:
    """The beginning of an output, and how much it is where that is not all."""
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
    """What a sandbox uses now, and used at most. None = its backend cannot tell; `cpu_time` in seconds."""

    memory_bytes: int | None
    memory_peak_bytes: int | None
    pids: int | None
    cpu_time: float | None
    disk_bytes: int | None
    inodes: int | None


@dataclass(frozen=True, slots=True)
class Diff:
    """Files that differ from what a sandbox was made from.

    `tar` is a POSIX pax archive of those that are new or changed, for `tarfile.open(fileobj=io.BytesIO(diff.tar))`;
    `deleted_paths` are absolute.
    """

    tar: bytes = field(repr=False)
    deleted_paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A sealed state of a sandbox's files, from which any number of sandboxes can be made.

    Equal content has one snapshot; `key` is its digest, opaque. `fork` says how sandboxes come from it: replay,
    filesystem, memory or archive. `setup` has the results of the setup's commands where this client saw them run: none
    when the snapshot was there already.
    """

    snapshot_id: str
    key: str
    backend: str
    create_time: datetime | None
    size_bytes: int
    fork: str
    setup: tuple[RunResult, ...] = ()


@dataclass(frozen=True, slots=True)
class Backend:
    """A backend of the sandbox service, and what it can do here. `unavailable_reason` says what to install or set.

    `disk_limit`: `none`; `watched`, a sandbox that holds too much is ended; `hard`, the kernel refuses too much.
    """

    name: str
    available: bool
    unavailable_reason: str
    is_default: bool
    capabilities: frozenset[str]
    networks: frozenset[str]
    fork: str
    disk_limit: str
    max_sandboxes: int
