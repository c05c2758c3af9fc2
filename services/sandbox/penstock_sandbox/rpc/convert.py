"""Converts between protos and the domain's classes; makes no decisions.

Invariants: a field that is unset becomes None where unset and zero differ; an unknown enum value or a missing oneof is
an InvalidArgument that names the field.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock.sandbox.v1 import file_service_pb2, process_service_pb2, sandbox_pb2, sandbox_service_pb2
from penstock.values import reader, writer
from penstock_chassis.validation import foreign_page_token, invalid_field, page_size
from penstock_sandbox.domain.model import (
    DEFAULT_PROXY_PORT,
    BackendInfo,
    Capabilities,
    Command,
    Exit,
    FileInfo,
    NetworkKind,
    NetworkPolicy,
    Process,
    RunResult,
    Sandbox,
    SandboxSpec,
    SeedFile,
    Snapshot,
    SnapshotSpec,
)

Item = TypeVar("Item")

# Sandboxes -----------------------------------------------------------------------------------------------------------


def network_from(policy: sandbox_pb2.NetworkPolicy, field: str) -> NetworkPolicy:
    """A network policy; unset = none."""
    match policy.WhichOneof("policy"):
        case "one_endpoint":
            return _endpoint_from(policy.one_endpoint)
        case "allowlist":
            listed = policy.allowlist
            return NetworkPolicy(
                NetworkKind.ALLOWLIST,
                local_port=listed.proxy_port or DEFAULT_PROXY_PORT,
                hosts=tuple(listed.hosts),
                ports=tuple(listed.ports),
                denied_hosts=tuple(listed.denied_hosts),
                one_endpoint=_endpoint_from(listed.one_endpoint) if listed.HasField("one_endpoint") else None,
                recording=listed.recording,
                recorded_only=listed.recorded_only,
            )
        case "open":
            return NetworkPolicy(NetworkKind.OPEN)
        case "none" | None:
            return NetworkPolicy()
    raise invalid_field(field, "unknown policy")


def _endpoint_from(one: sandbox_pb2.OneEndpoint) -> NetworkPolicy:
    return NetworkPolicy(NetworkKind.ONE_ENDPOINT, one.local_port, one.upstream)


def network_to(policy: NetworkPolicy) -> sandbox_pb2.NetworkPolicy:
    """A network policy as a proto."""
    match policy.kind:
        case NetworkKind.NONE:
            return sandbox_pb2.NetworkPolicy(none=sandbox_pb2.NoNetwork())
        case NetworkKind.ONE_ENDPOINT:
            return sandbox_pb2.NetworkPolicy(one_endpoint=_endpoint_to(policy))
        case NetworkKind.ALLOWLIST:
            one = policy.one_endpoint
            return sandbox_pb2.NetworkPolicy(
                allowlist=sandbox_pb2.Allowlist(
                    hosts=policy.hosts,
                    ports=policy.ports,
                    denied_hosts=policy.denied_hosts,
                    proxy_port=policy.local_port,
                    one_endpoint=None if one is None else _endpoint_to(one),
                    recording=policy.recording,
                    recorded_only=policy.recorded_only,
                )
            )
        case NetworkKind.OPEN:
            return sandbox_pb2.NetworkPolicy(open=sandbox_pb2.OpenNetwork())


def _endpoint_to(policy: NetworkPolicy) -> sandbox_pb2.OneEndpoint:
    return sandbox_pb2.OneEndpoint(local_port=policy.local_port, upstream=policy.upstream)


_FILES_MOST = 1024 * 1024

spec_from = reader(
    SandboxSpec,
    sandbox_pb2.SandboxSpec,
    renamed={"image": "base.image", "snapshot_id": "base.snapshot_id"},
    left_out=("to_be_sealed", "joins"),
    by={"network": lambda spec: network_from(spec.network, "spec.network")},
)
spec_to = writer(
    SandboxSpec,
    sandbox_pb2.SandboxSpec,
    renamed={"image": "base.image", "snapshot_id": "base.snapshot_id"},
    left_out=("to_be_sealed", "joins"),
    by={"network": lambda spec: network_to(spec.network)},
)
"""A sandbox's spec."""

sandbox_to = writer(
    Sandbox,
    sandbox_pb2.Sandbox,
    renamed={"id": "sandbox_id", "created_at": "create_time", "expires_at": "expire_time"},
    left_out=("service", "takes_files"),
)
"""A sandbox as a proto."""

writer(
    Capabilities,
    sandbox_pb2.Capabilities,
    by={
        "networks": lambda can: [
            sandbox_pb2.NetworkKind.Value(f"NETWORK_KIND_{kind.name}")
            for kind in sorted(can.networks, key=lambda kind: kind.value)
        ],
        "limit_disk": lambda can: can.limit_disk,
        "repeatable": lambda can: [
            sandbox_pb2.RepeatablePart.Value(f"REPEATABLE_PART_{part.name}")
            for part in sorted(can.repeatable, key=lambda part: part.value)
        ],
    },
)
backend_to = writer(BackendInfo, sandbox_pb2.Backend)
"""A backend and its capabilities as a proto."""


def files_from(files: Sequence[process_service_pb2.InitialFile]) -> tuple[SeedFile, ...]:
    """Converts files that are written before a process starts. Raises InvalidArgument (FIELD_INVALID) for too many."""
    if sum(len(file.content) for file in files) > _FILES_MOST:
        raise invalid_field("files", f"must have at most {_FILES_MOST} bytes in all")
    return tuple(map(_seed_from, files))


def _seed_from(file: process_service_pb2.InitialFile | sandbox_service_pb2.SeedFile) -> SeedFile:
    return SeedFile(file.path, file.content, file.mode & 0o777 if file.HasField("mode") else 0o644)


def snapshot_spec_from(spec: sandbox_service_pb2.SnapshotSpec) -> SnapshotSpec:
    """Converts a snapshot's spec."""
    return SnapshotSpec(
        sandbox=spec_from(spec.sandbox),
        files=tuple(map(_seed_from, spec.files)),
        setup=tuple(command_from(command, f"spec.setup[{index}]") for index, command in enumerate(spec.setup)),
    )


snapshot_to = writer(
    Snapshot,
    sandbox_service_pb2.Snapshot,
    renamed={"id": "snapshot_id", "created_at": "create_time", "size": "size_bytes", "fork": "fork_kind"},
    left_out=("service",),
)
"""A snapshot as a proto."""


# Processes -----------------------------------------------------------------------------------------------------------


_command_from = reader(Command, process_service_pb2.Command, renamed={"argv": "argv.args"})


def command_from(command: process_service_pb2.Command, field: str) -> Command:
    """A command."""
    if command.WhichOneof("command") is None:
        raise invalid_field(f"{field}.command", "argv or shell must be set")
    return _command_from(command)


command_to = writer(
    Command,
    process_service_pb2.Command,
    left_out=("secret_env",),
    by={"argv": lambda command: None if command.shell is not None else process_service_pb2.Argv(args=command.argv)},
)
"""A command as a proto, without its secret environment."""

exit_to = writer(
    Exit,
    process_service_pb2.Exit,
    renamed={"cpu_s": "cpu_time", "peak_bytes": "max_rss_bytes", "ended_at": "end_time"},
)
"""An exit as a proto."""

process_to = writer(
    Process,
    process_service_pb2.Process,
    renamed={"started_at": "start_time"},
    left_out=("spec",),
    by={
        "process_id": lambda process: process.spec.id,
        "command": lambda process: command_to(process.spec.command),
        "pty": lambda process: process.spec.pty is not None,
    },
)
"""A process as a proto."""

run_result_to = writer(RunResult, process_service_pb2.RunResult, left_out=("result_file",))
"""A small command's outcome as a proto."""


# Files ---------------------------------------------------------------------------------------------------------------


def is_text(name: str) -> bool:
    """Whether a file name is UTF-8."""
    return text(name) == name


def text(name: str) -> str:
    """A file name as a proto string, which is UTF-8: other bytes are shown as replacement characters."""
    return name.encode(errors="surrogateescape").decode(errors="replace")


def page(
    items: Sequence[Item], key: Callable[[Item], tuple[float, str]], asked: int, token: str
) -> tuple[Sequence[Item], str]:
    """Returns the page of ``items`` (sorted by ``key``, descending) after ``token``, and the next token.

    A token names the last item returned, so that changes between pages lose nothing.
    """
    after = _parse_token(token)
    left = [item for item in items if key(item) < after] if after is not None else items
    shown = left[: page_size(asked)]
    return shown, _format_token(key(shown[-1])) if len(left) > len(shown) else ""


def _format_token(key: tuple[float, str]) -> str:
    return f"{key[0].hex()}~{key[1]}"


def _parse_token(token: str) -> tuple[float, str] | None:
    if not token:
        return None
    number, _, name = token.partition("~")
    try:
        return float.fromhex(number), name
    except ValueError:
        raise foreign_page_token() from None


def token_of(name: str) -> str:
    """Returns the token of a page that begins after a file name, which may be any bytes; empty for an empty name."""
    return os.fsencode(name).hex()


def name_in(token: str) -> str:
    """Returns the name in a token. Raises InvalidArgument."""
    try:
        return os.fsdecode(bytes.fromhex(token))
    except ValueError:
        raise foreign_page_token() from None


file_to = writer(
    FileInfo,
    file_service_pb2.FileInfo,
    renamed={"size": "size_bytes", "modified_at": "modify_time"},
    left_out=("target",),
    by={
        "name": lambda info: text(info.name),
        "link_target": lambda info: text(info.target),
        "raw_name": lambda info: b"" if is_text(info.name) else os.fsencode(info.name),
    },
)
"""A file's metadata as a proto."""
