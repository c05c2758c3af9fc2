"""Between protos and the domain's classes, in both directions; nothing is decided here.

Invariants: a field that is unset becomes None where unset and zero differ; an unknown enum value or a missing oneof is
an InvalidArgument that names the field.
"""

from __future__ import annotations

from penstock.sandbox.v1 import file_service_pb2, process_service_pb2, sandbox_pb2, sandbox_service_pb2
from penstock_chassis import times
from penstock_chassis.errors import InvalidArgument, Violation
from penstock_sandbox.model import (
    BackendInfo,
    Capabilities,
    Command,
    DiskLimit,
    Exit,
    ExitReason,
    FileInfo,
    FileKind,
    ForkKind,
    NetworkKind,
    NetworkPolicy,
    Process,
    Resources,
    RunResult,
    Sandbox,
    SandboxSpec,
    SeedFile,
    Snapshot,
    SnapshotSpec,
    State,
)

PAGE_DEFAULT = 100
PAGE_MOST = 1000


def refuse(field: str, description: str) -> InvalidArgument:
    """An error about one field of a request."""
    return InvalidArgument(
        f"{field}: {description}", reason="INVALID_REQUEST", violations=[Violation(field, description)]
    )


def page_size(asked: int) -> int:
    """The page size in force."""
    if asked < 0:
        raise refuse("page_size", "is negative")
    return min(asked, PAGE_MOST) or PAGE_DEFAULT


# Sandboxes -----------------------------------------------------------------------------------------------------------


def network_from(policy: sandbox_pb2.NetworkPolicy, field: str) -> NetworkPolicy:
    """A network policy; unset = none."""
    match policy.WhichOneof("policy"):
        case "one_endpoint":
            one = policy.one_endpoint
            return NetworkPolicy(NetworkKind.ONE_ENDPOINT, one.local_port, one.upstream)
        case "allowlist":
            return NetworkPolicy(
                NetworkKind.ALLOWLIST, hosts=tuple(policy.allowlist.hosts), ports=tuple(policy.allowlist.ports)
            )
        case "open":
            return NetworkPolicy(NetworkKind.OPEN)
        case "none" | None:
            return NetworkPolicy()
    raise refuse(field, "unknown policy")


def network_to(policy: NetworkPolicy) -> sandbox_pb2.NetworkPolicy:
    """A network policy as a proto."""
    match policy.kind:
        case NetworkKind.NONE:
            return sandbox_pb2.NetworkPolicy(none=sandbox_pb2.NoNetwork())
        case NetworkKind.ONE_ENDPOINT:
            return sandbox_pb2.NetworkPolicy(
                one_endpoint=sandbox_pb2.OneEndpoint(local_port=policy.local_port, upstream=policy.upstream)
            )
        case NetworkKind.ALLOWLIST:
            return sandbox_pb2.NetworkPolicy(allowlist=sandbox_pb2.Allowlist(hosts=policy.hosts, ports=policy.ports))
        case NetworkKind.OPEN:
            return sandbox_pb2.NetworkPolicy(open=sandbox_pb2.OpenNetwork())


def resources_from(limits: sandbox_pb2.Resources) -> Resources:
    """Limits; None where unset."""
    return Resources(
        cpu=limits.cpu if limits.HasField("cpu") else None,
        memory_bytes=limits.memory_bytes if limits.HasField("memory_bytes") else None,
        pids=limits.pids if limits.HasField("pids") else None,
        disk_bytes=limits.disk_bytes if limits.HasField("disk_bytes") else None,
        inodes=limits.inodes if limits.HasField("inodes") else None,
    )


def resources_to(limits: Resources) -> sandbox_pb2.Resources:
    """Limits as a proto."""
    return sandbox_pb2.Resources(
        cpu=limits.cpu,
        memory_bytes=limits.memory_bytes,
        pids=limits.pids,
        disk_bytes=limits.disk_bytes,
        inodes=limits.inodes,
    )


def spec_from(spec: sandbox_pb2.SandboxSpec) -> SandboxSpec:
    """A sandbox's spec."""
    return SandboxSpec(
        backend=spec.backend,
        image=spec.base.image,
        snapshot_id=spec.base.snapshot_id,
        resources=resources_from(spec.resources),
        network=network_from(spec.network, "spec.network"),
        env=dict(spec.env),
        toolbox_ids=tuple(spec.toolbox_ids),
        user=spec.user,
        lease_s=times.seconds(spec.lease) if spec.HasField("lease") else None,
        labels=dict(spec.labels),
        own_kernel=spec.own_kernel,
    )


def spec_to(spec: SandboxSpec) -> sandbox_pb2.SandboxSpec:
    """A sandbox's spec as a proto."""
    base = sandbox_pb2.Base(snapshot_id=spec.snapshot_id) if spec.snapshot_id else sandbox_pb2.Base(image=spec.image)
    return sandbox_pb2.SandboxSpec(
        backend=spec.backend,
        base=base if spec.snapshot_id or spec.image else None,
        resources=resources_to(spec.resources),
        network=network_to(spec.network),
        env=spec.env,
        toolbox_ids=spec.toolbox_ids,
        user=spec.user,
        lease=times.duration(spec.lease_s) if spec.lease_s is not None else None,
        labels=spec.labels,
        own_kernel=spec.own_kernel,
    )


_STATES = {
    State.CREATING: sandbox_pb2.SANDBOX_STATE_CREATING,
    State.READY: sandbox_pb2.SANDBOX_STATE_READY,
    State.PAUSED: sandbox_pb2.SANDBOX_STATE_PAUSED,
    State.LOST: sandbox_pb2.SANDBOX_STATE_LOST,
    State.DELETED: sandbox_pb2.SANDBOX_STATE_DELETED,
}
_NETWORKS = {
    NetworkKind.NONE: sandbox_pb2.NETWORK_KIND_NONE,
    NetworkKind.ONE_ENDPOINT: sandbox_pb2.NETWORK_KIND_ONE_ENDPOINT,
    NetworkKind.ALLOWLIST: sandbox_pb2.NETWORK_KIND_ALLOWLIST,
    NetworkKind.OPEN: sandbox_pb2.NETWORK_KIND_OPEN,
}
_FORKS = {
    ForkKind.NONE: sandbox_pb2.FORK_KIND_NONE,
    ForkKind.REPLAY: sandbox_pb2.FORK_KIND_REPLAY,
    ForkKind.FILESYSTEM: sandbox_pb2.FORK_KIND_FILESYSTEM,
    ForkKind.MEMORY: sandbox_pb2.FORK_KIND_MEMORY,
    ForkKind.ARCHIVE: sandbox_pb2.FORK_KIND_ARCHIVE,
}
_DISK_LIMITS = {
    DiskLimit.NONE: sandbox_pb2.DISK_LIMIT_NONE,
    DiskLimit.WATCHED: sandbox_pb2.DISK_LIMIT_WATCHED,
    DiskLimit.HARD: sandbox_pb2.DISK_LIMIT_HARD,
}


def sandbox_to(sandbox: Sandbox) -> sandbox_pb2.Sandbox:
    """A sandbox as a proto."""
    return sandbox_pb2.Sandbox(
        sandbox_id=sandbox.id,
        state=_STATES[sandbox.state],
        spec=spec_to(sandbox.spec),
        create_time=times.timestamp(sandbox.created_at),
        expire_time=times.timestamp(sandbox.expires_at),
        home=sandbox.home,
        workdir=sandbox.workdir,
        lost_reason=sandbox.lost_reason,
        ended_inside=sandbox.ended_inside,
    )


def capabilities_to(can: Capabilities) -> sandbox_pb2.Capabilities:
    """Capabilities as a proto."""
    return sandbox_pb2.Capabilities(
        networks=[_NETWORKS[kind] for kind in sorted(can.networks, key=lambda kind: kind.value)],
        fork=_FORKS[can.fork],
        pty=can.pty,
        stdin_stream=can.stdin_stream,
        limit_cpu=can.limit_cpu,
        limit_memory=can.limit_memory,
        limit_pids=can.limit_pids,
        limit_disk=can.limit_disk,
        limit_inodes=can.limit_inodes,
        disk_limit=_DISK_LIMITS[can.disk_limit],
        root=can.root,
        pause=can.pause,
        diff=can.diff,
        toolboxes=can.toolboxes,
        kill_tree=can.kill_tree,
        live_fork=can.live_fork,
        open_egress=can.open_egress,
        own_kernel=can.own_kernel,
        system_read_only=can.system_read_only,
    )


def backend_to(info: BackendInfo) -> sandbox_pb2.Backend:
    """A backend as a proto."""
    return sandbox_pb2.Backend(
        name=info.name,
        available=info.available,
        unavailable_reason=info.unavailable_reason,
        capabilities=capabilities_to(info.capabilities),
        is_default=info.is_default,
        max_sandboxes=info.max_sandboxes,
        default_lease=times.duration(info.default_lease_s),
        max_lease=times.duration(info.max_lease_s),
        default_resources=resources_to(info.default_resources),
        max_lifetime=times.duration(info.max_lifetime_s) if info.max_lifetime_s is not None else None,
        max_sandboxes_per_owner=info.max_sandboxes_per_owner,
        max_resources=resources_to(info.max_resources),
    )


def snapshot_spec_from(spec: sandbox_service_pb2.SnapshotSpec) -> SnapshotSpec:
    """What a snapshot is made of."""
    return SnapshotSpec(
        sandbox=spec_from(spec.sandbox),
        files=tuple(
            SeedFile(file.path, file.content, file.mode & 0o777 if file.HasField("mode") else 0o644)
            for file in spec.files
        ),
        setup=tuple(command_from(command, f"spec.setup[{index}]") for index, command in enumerate(spec.setup)),
    )


def snapshot_to(snapshot: Snapshot) -> sandbox_service_pb2.Snapshot:
    """A snapshot as a proto."""
    return sandbox_service_pb2.Snapshot(
        snapshot_id=snapshot.id,
        key=snapshot.key,
        backend=snapshot.backend,
        create_time=times.timestamp(snapshot.created_at),
        size_bytes=snapshot.size,
        fork_kind=_FORKS[snapshot.fork],
    )


# Processes -----------------------------------------------------------------------------------------------------------


def command_from(command: process_service_pb2.Command, field: str) -> Command:
    """A command."""
    kind = command.WhichOneof("command")
    if kind is None:
        raise refuse(f"{field}.command", "argv or shell must be set")
    return Command(
        argv=tuple(command.argv.args),
        shell=command.shell if kind == "shell" else None,
        env=dict(command.env),
        secret_env=dict(command.secret_env),
        cwd=command.cwd,
        user=command.user,
        timeout_s=times.seconds(command.timeout) if command.HasField("timeout") else None,
    )


def command_to(command: Command) -> process_service_pb2.Command:
    """A command as a proto, without its secret environment."""
    answer = process_service_pb2.Command(
        env=command.env,
        cwd=command.cwd,
        user=command.user,
        timeout=times.duration(command.timeout_s) if command.timeout_s is not None else None,
    )
    if command.shell is not None:
        answer.shell = command.shell
    else:
        answer.argv.args.extend(command.argv)
    return answer


_REASONS = {reason: process_service_pb2.ExitReason.Value(f"EXIT_REASON_{reason.name}") for reason in ExitReason}


def exit_to(ended: Exit) -> process_service_pb2.Exit:
    """An exit as a proto."""
    answer = process_service_pb2.Exit(
        reason=_REASONS[ended.reason],
        message=ended.message,
        duration=times.duration(ended.duration_s),
        cpu_time=times.duration(ended.cpu_s) if ended.cpu_s is not None else None,
        max_rss_bytes=ended.peak_bytes,
        stdout_truncated=ended.stdout_truncated,
        stderr_truncated=ended.stderr_truncated,
        pipes_open=ended.pipes_open,
        end_time=times.timestamp(ended.ended_at),
        stdout_bytes=ended.stdout_bytes,
        stderr_bytes=ended.stderr_bytes,
        ended_inside=ended.ended_inside,
    )
    if ended.code is not None:
        answer.code = ended.code
    elif ended.signal is not None:
        answer.signal = ended.signal
    return answer


def process_to(process: Process) -> process_service_pb2.Process:
    """A process as a proto."""
    return process_service_pb2.Process(
        process_id=process.spec.id,
        command=command_to(process.spec.command),
        start_time=times.timestamp(process.started_at),
        exit=exit_to(process.exit) if process.exit is not None else None,
        pty=process.spec.pty is not None,
        stdin_offset=process.stdin_offset,
        stdin_closed=process.stdin_closed,
    )


def run_result_to(result: RunResult) -> process_service_pb2.RunResult:
    """A small command's outcome as a proto."""
    return process_service_pb2.RunResult(exit=exit_to(result.exit), stdout=result.stdout, stderr=result.stderr)


# Files ---------------------------------------------------------------------------------------------------------------

_KINDS = {
    FileKind.FILE: file_service_pb2.FILE_KIND_FILE,
    FileKind.DIRECTORY: file_service_pb2.FILE_KIND_DIRECTORY,
    FileKind.SYMLINK: file_service_pb2.FILE_KIND_SYMLINK,
    FileKind.OTHER: file_service_pb2.FILE_KIND_OTHER,
}


def text(name: str) -> str:
    """A file name as a proto string, which is UTF-8: other bytes are shown as replacement characters."""
    return name.encode(errors="surrogateescape").decode(errors="replace")


def file_to(info: FileInfo) -> file_service_pb2.FileInfo:
    """A file's metadata as a proto."""
    return file_service_pb2.FileInfo(
        name=text(info.name),
        kind=_KINDS[info.kind],
        size_bytes=info.size,
        mode=info.mode,
        modify_time=times.timestamp(info.modified_at),
        link_target=text(info.target),
    )
