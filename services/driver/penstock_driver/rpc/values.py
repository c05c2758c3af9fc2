"""Small values of the wire and of the domain, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import ListValue, Struct
from pydantic import JsonValue

from penstock.sandbox.v1 import process_service_pb2, sandbox_service_pb2, toolbox_service_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis import times
from penstock_driver.launches import FileToWrite
from penstock_driver.ports import Command, Exit, ExitReason
from penstock_driver.specs import Dialect, RuntimeKind, Toolbox

DIALECTS: Final[Mapping[Dialect, trajectory_pb2.Dialect.ValueType]] = {
    Dialect.CHAT_COMPLETIONS: trajectory_pb2.DIALECT_CHAT_COMPLETIONS,
    Dialect.RESPONSES: trajectory_pb2.DIALECT_RESPONSES,
    Dialect.MESSAGES: trajectory_pb2.DIALECT_MESSAGES,
    Dialect.GENERATE_CONTENT: trajectory_pb2.DIALECT_GENERATE_CONTENT,
}
RUNTIMES: Final = {
    RuntimeKind.PYTHON: toolbox_service_pb2.RUNTIME_KIND_PYTHON,
    RuntimeKind.NODE: toolbox_service_pb2.RUNTIME_KIND_NODE,
}
_REASONS: Final = {process_service_pb2.ExitReason.Value(f"EXIT_REASON_{reason.value}"): reason for reason in ExitReason}
_DEFAULT_MODE: Final = 0o644


def dialect_from_proto(value: trajectory_pb2.Dialect.ValueType) -> Dialect:
    """The dialect; KeyError for one that this version does not know."""
    return next(dialect for dialect, wire in DIALECTS.items() if wire == value)


def struct_to_dict(struct: Struct) -> dict[str, JsonValue]:
    """A Struct as plain JSON values; all its numbers are floats."""
    value: dict[str, JsonValue] = MessageToDict(struct)
    return value


def is_deeper(struct: Struct, levels: int) -> bool:
    """Whether a Struct's objects and lists are nested in more than so many levels, itself counted."""
    pending: list[tuple[Struct | ListValue, int]] = [(struct, 1)]
    while pending:
        holder, level = pending.pop()
        if level > levels:
            return True
        for value in holder.fields.values() if isinstance(holder, Struct) else holder.values:
            if value.HasField("struct_value"):
                pending.append((value.struct_value, level + 1))
            elif value.HasField("list_value"):
                pending.append((value.list_value, level + 1))
    return False


def command_from_proto(command: process_service_pb2.Command) -> Command:
    """A command; neither argv nor shell set gives one with neither."""
    return Command(
        argv=tuple(command.argv.args),
        shell=command.shell,
        env=dict(command.env),
        secret_env=dict(command.secret_env),
        cwd=command.cwd,
        user=command.user,
        timeout_s=times.seconds(command.timeout) if command.HasField("timeout") else None,
    )


def command_to_proto(command: Command, *, with_secrets: bool = True) -> process_service_pb2.Command:
    """A command for the sandbox service or, without the values of its secrets, for whoever reads events."""
    secrets = command.secret_env if with_secrets else dict.fromkeys(command.secret_env, "")
    wire = process_service_pb2.Command(env=command.env, secret_env=secrets, cwd=command.cwd, user=command.user)
    if command.argv:
        wire.argv.args.extend(command.argv)
    else:
        wire.shell = command.shell
    if command.timeout_s is not None:
        wire.timeout.CopyFrom(times.duration(command.timeout_s))
    return wire


def exit_from_proto(wire: process_service_pb2.Exit) -> Exit:
    """The end of a process."""
    return Exit(
        reason=_REASONS.get(wire.reason, ExitReason.SANDBOX_LOST),
        code=wire.code if wire.HasField("code") else None,
        signal=wire.signal if wire.HasField("signal") else None,
        message=wire.message,
        duration_s=times.seconds(wire.duration),
        cpu_s=times.seconds(wire.cpu_time),
        max_rss_bytes=wire.max_rss_bytes if wire.HasField("max_rss_bytes") else None,
        stdout_truncated=wire.stdout_truncated,
        stderr_truncated=wire.stderr_truncated,
        pipes_open=wire.pipes_open,
        stdout_bytes=wire.stdout_bytes,
        stderr_bytes=wire.stderr_bytes,
        end_time=wire.end_time.ToNanoseconds() / 1e9 if wire.HasField("end_time") else 0.0,
    )


def exit_to_proto(end: Exit) -> process_service_pb2.Exit:
    """The end of a process, for whoever reads events."""
    wire = process_service_pb2.Exit(
        reason=process_service_pb2.ExitReason.Value(f"EXIT_REASON_{end.reason.value}"),
        message=end.message,
        duration=times.duration(end.duration_s),
        cpu_time=times.duration(end.cpu_s),
        max_rss_bytes=end.max_rss_bytes,
        stdout_truncated=end.stdout_truncated,
        stderr_truncated=end.stderr_truncated,
        pipes_open=end.pipes_open,
        stdout_bytes=end.stdout_bytes,
        stderr_bytes=end.stderr_bytes,
    )
    if end.code is not None:
        wire.code = end.code
    elif end.signal is not None:
        wire.signal = end.signal
    if end.end_time:
        wire.end_time.CopyFrom(times.timestamp(end.end_time))
    return wire


def seed_from_proto(seed: sandbox_service_pb2.SeedFile) -> FileToWrite:
    """A file to put into a sandbox."""
    return FileToWrite(seed.path, seed.content, seed.mode if seed.HasField("mode") else _DEFAULT_MODE)


def seed_to_proto(file: FileToWrite) -> sandbox_service_pb2.SeedFile:
    """A file to put into a sandbox."""
    return sandbox_service_pb2.SeedFile(path=file.path, content=file.content, mode=file.mode)


def toolbox_to_proto(name: str, toolbox: Toolbox) -> toolbox_service_pb2.ToolboxSpec:
    """What to install."""
    return toolbox_service_pb2.ToolboxSpec(
        name=name,
        runtimes=[
            toolbox_service_pb2.Runtime(
                kind=RUNTIMES[runtime.kind], min_version=runtime.min_version, below_version=runtime.below_version
            )
            for runtime in toolbox.runtimes
        ],
        npm_packages=toolbox.npm_packages,
        files=[
            toolbox_service_pb2.ToolboxFile(path=file.path, content=file.content, mode=file.mode)
            for file in toolbox.files
        ],
        path_directories=toolbox.path_directories,
        python_packages=toolbox.python_packages,
    )
