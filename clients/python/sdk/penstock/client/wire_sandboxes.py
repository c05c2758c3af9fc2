"""Sandboxes, their files and snapshots, to and from protos."""

from collections.abc import Mapping

from penstock.client import tasks, wire, wire_results, wire_specs
from penstock.client.sandbox_values import Backend, FileInfo, RunResult, Snapshot
from penstock.sandbox.v1 import file_service_pb2, process_service_pb2, sandbox_pb2
from penstock.sandbox.v1 import sandbox_service_pb2 as pb


def spec(
    backend: str = "",
    image: str = "",
    snapshot_id: str = "",
    resources: tasks.Resources | None = None,
    network: tasks.Network | None = None,
    env: Mapping[str, str] | None = None,
    user: str = "",
    lease: float | None = None,
    labels: Mapping[str, str] | None = None,
    own_kernel: bool = False,
) -> sandbox_pb2.SandboxSpec:
    """What a sandbox shall be; empty and None stay unset."""
    message = sandbox_pb2.SandboxSpec(
        backend=backend,
        resources=wire_specs.resources(resources),
        network=wire_specs.network(network),
        env=env or {},
        user=user,
        lease=wire.duration(lease),
        labels=labels or {},
        own_kernel=own_kernel,
    )
    if snapshot_id:
        message.base.snapshot_id = snapshot_id
    elif image:
        message.base.image = image
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
        max_sandboxes=message.max_sandboxes,
    )
