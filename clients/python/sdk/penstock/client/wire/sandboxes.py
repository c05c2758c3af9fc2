"""Converts sandboxes, their files and snapshots to and from protos."""

from typing import Final

from penstock.client.types import processes, toolboxes
from penstock.client.types.sandboxes import (
    Backend,
    FileInfo,
    NodeStatus,
    RunResult,
    Sandbox,
    SandboxesUsage,
    SandboxSpec,
    Snapshot,
    Stats,
)
from penstock.client.wire import chat, results, specs
from penstock.sandbox.v1 import file_service_pb2, process_service_pb2, sandbox_pb2, toolbox_service_pb2
from penstock.sandbox.v1 import sandbox_service_pb2 as pb
from penstock.values import reader, writer


def _base(value: SandboxSpec) -> sandbox_pb2.Base | None:
    if value.snapshot_id:
        return sandbox_pb2.Base(snapshot_id=value.snapshot_id)
    return sandbox_pb2.Base(image=value.image) if value.image else None


spec: Final = writer(
    SandboxSpec,
    sandbox_pb2.SandboxSpec,
    left_out=("image", "snapshot_id"),
    by={"base": _base, "network": lambda value: specs.network(value.network)},
)
"""Converts a sandbox's spec; empty and None stay unset."""


run_result: Final = reader(RunResult, process_service_pb2.RunResult, left_out=("result_file",))
"""Converts the outcome of a command."""

snapshot: Final = reader(Snapshot, pb.Snapshot, renamed={"fork": "fork_kind"}, left_out=("setup",))
"""Converts a snapshot, without the results of its setup."""

node_status: Final = reader(NodeStatus, pb.GetNodeStatusResponse)
"""Converts a sandbox service's load."""

file_info: Final = reader(FileInfo, file_service_pb2.FileInfo, left_out=("raw_name",))
"""Converts metadata of a file."""

stats: Final = reader(Stats, pb.GetStatsResponse)
"""Converts a sandbox's usage."""

sandbox: Final = reader(
    Sandbox,
    sandbox_pb2.Sandbox,
    renamed={"backend": "spec.backend", "labels": "spec.labels"},
    left_out=("takes_files",),  # for drivers
)
"""Converts a sandbox's state."""

usage: Final = reader(SandboxesUsage, pb.WatchSandboxesResponse)
"""Converts the usage of sandboxes."""

process: Final = reader(
    processes.Process,
    process_service_pb2.Process,
    by={"command": lambda message: results.command_line(message.command)},
)
"""Converts a process."""

writer(
    toolboxes.Runtime,
    toolbox_service_pb2.Runtime,
    by={"kind": lambda value: chat.number(toolbox_service_pb2.RuntimeKind, value.kind, "RUNTIME_KIND_")},
)

toolbox_spec: Final = writer(toolboxes.ToolboxSpec, toolbox_service_pb2.ToolboxSpec)
"""Converts the content of a toolbox."""

toolbox: Final = reader(toolboxes.Toolbox, toolbox_service_pb2.Toolbox)
"""Converts an installed toolbox."""

backend: Final = reader(
    Backend,
    sandbox_pb2.Backend,
    renamed={
        "networks": "capabilities.networks",
        "fork": "capabilities.fork",
        "disk_limit": "capabilities.disk_limit",
        "repeatable": "capabilities.repeatable",
    },
    left_out=(
        *("default_lease", "max_lease", "default_resources", "max_lifetime", "max_sandboxes_per_owner"),
        *("max_resources", "egress_hosts"),
    ),
    by={
        "capabilities": lambda message: frozenset(
            field.name for field, value in message.capabilities.ListFields() if value is True
        )
    },
)
"""Converts a backend and its capabilities."""
