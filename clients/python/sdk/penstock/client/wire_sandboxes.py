"""Sandboxes, their files and snapshots, to and from protos."""

from penstock.client import wire, wire_results, wire_specs
from penstock.client.sandbox_spec import SandboxSpec
from penstock.client.sandbox_values import Backend, FileInfo, RunResult, Snapshot
from penstock.sandbox.v1 import file_service_pb2, process_service_pb2, sandbox_pb2
from penstock.sandbox.v1 import sandbox_service_pb2 as pb


def spec(value: SandboxSpec) -> sandbox_pb2.SandboxSpec:
    """What a sandbox shall be; empty and None stay unset."""
    message = sandbox_pb2.SandboxSpec(
        backend=value.backend,
        resources=wire_specs.resources(value.resources),
        network=wire_specs.network(value.network),
        env=value.env,
        user=value.user,
        lease=wire.duration(value.lease),
        labels=value.labels,
        own_kernel=value.own_kernel,
    )
    if value.snapshot_id:
        message.base.snapshot_id = value.snapshot_id
    elif value.image:
        message.base.image = value.image
    return message


def run_result(message: process_service_pb2.RunResult) -> RunResult:
    """The outcome of a command."""
    return RunResult(wire_results.exit_from(message.exit), message.stdout, message.stderr)


def snapshot(message: pb.Snapshot, setup: tuple[RunResult, ...] = ()) -> Snapshot:
    """A snapshot; `setup` are the results that were seen."""
    return Snapshot(
        snapshot_id=message.snapshot_id,
        key=message.key,
        backend=message.backend,
        create_time=wire.time(message, "create_time"),
        size_bytes=message.size_bytes,
        fork=wire.word(sandbox_pb2.ForkKind, message.fork_kind, "FORK_KIND_"),
        setup=setup,
    )


def file_info(message: file_service_pb2.FileInfo) -> FileInfo:
    """Metadata of a file."""
    return FileInfo(
        message.name,
        wire.word(file_service_pb2.FileKind, message.kind, "FILE_KIND_"),
        message.size_bytes,
        message.mode,
        wire.time(message, "modify_time"),
        message.link_target,
    )


def backend(message: sandbox_pb2.Backend) -> Backend:
    """A backend and what it can do."""
    can = message.capabilities
    return Backend(
        name=message.name,
        available=message.available,
        unavailable_reason=message.unavailable_reason,
        is_default=message.is_default,
        capabilities=frozenset(field.name for field, value in can.ListFields() if value is True),
        networks=frozenset(wire.word(sandbox_pb2.NetworkKind, kind, "NETWORK_KIND_") for kind in can.networks),
        fork=wire.word(sandbox_pb2.ForkKind, can.fork, "FORK_KIND_"),
        disk_limit=wire.word(sandbox_pb2.DiskLimit, can.disk_limit, "DISK_LIMIT_"),
        max_sandboxes=message.max_sandboxes,
    )
