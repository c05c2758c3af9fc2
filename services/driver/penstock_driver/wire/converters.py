"""Converts small values between protos and the domain."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct
from pydantic import JsonValue

from penstock.sandbox.v1 import process_service_pb2, sandbox_service_pb2, toolbox_service_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock.values import numbers, reader, writer
from penstock_chassis import times
from penstock_chassis.validation import foreign_page_token
from penstock_driver.agents.launch import FileToWrite
from penstock_driver.agents.specs import Dialect, RuntimeKind, TaskToolbox, Toolbox
from penstock_driver.domain.ports import Command, CommandResult, Exit, ExitReason

DIALECTS: Final = numbers(Dialect, trajectory_pb2.Dialect)
RUNTIMES: Final = numbers(RuntimeKind, toolbox_service_pb2.RuntimeKind)
_REASONS: Final = {process_service_pb2.ExitReason.Value(f"EXIT_REASON_{reason.value}"): reason for reason in ExitReason}
_DEFAULT_MODE: Final = 0o644


def dialect_from_proto(value: trajectory_pb2.Dialect.ValueType) -> Dialect:
    """The dialect; KeyError for one that this version does not know."""
    return next(dialect for dialect, wire in DIALECTS.items() if wire == value)


def struct_to_dict(struct: Struct) -> dict[str, JsonValue]:
    """A Struct as plain JSON values; all its numbers are floats."""
    value: dict[str, JsonValue] = MessageToDict(struct)
    return value


command_from_proto: Final = reader(Command, process_service_pb2.Command, renamed={"argv": "argv.args"})
"""A command; if neither argv nor shell is set, the command has neither."""

_command_to_proto: Final = writer(
    Command,
    process_service_pb2.Command,
    renamed={"argv": "argv.args"},
    by={"shell": lambda command: None if command.argv else command.shell},
)


def command_to_proto(command: Command, *, with_secrets: bool = True) -> process_service_pb2.Command:
    """A command for the sandbox service or, without its secret values, for readers of events."""
    shown = command if with_secrets else replace(command, secret_env=dict.fromkeys(command.secret_env, ""))
    return _command_to_proto(shown)


exit_from_proto: Final = reader(
    Exit,
    process_service_pb2.Exit,
    left_out=("ended_inside",),
    by={"reason": lambda wire: _REASONS.get(wire.reason, ExitReason.SANDBOX_LOST)},
)
"""The end of a process."""

exit_to_proto: Final = writer(
    Exit,
    process_service_pb2.Exit,
    left_out=("ended_inside",),
    by={"end_time": lambda end: times.timestamp(end.end_time) if end.end_time else None},
)
"""The end of a process, for readers of events."""

result_from_proto: Final = reader(CommandResult, process_service_pb2.RunResult)
"""The result of a small command."""

seed_from_proto: Final = reader(
    FileToWrite,
    sandbox_service_pb2.SeedFile,
    by={"mode": lambda seed: seed.mode if seed.HasField("mode") else _DEFAULT_MODE},
)
seed_to_proto: Final = writer(FileToWrite, sandbox_service_pb2.SeedFile)
"""A file to put into a sandbox."""


def toolbox_to_proto(name: str, toolbox: Toolbox) -> toolbox_service_pb2.ToolboxSpec:
    """The toolbox to install."""
    wire = toolbox_service_pb2.ToolboxSpec(
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
    if isinstance(toolbox, TaskToolbox):
        wire.npm_lock = toolbox.npm_lock
        wire.debian_lock = toolbox.debian_lock
        if toolbox.python_target is not None:
            wire.python_target.version = toolbox.python_target.version
            wire.python_target.platform = toolbox.python_target.platform
    return wire


def page_token(token: str) -> int:
    """The position in one of our page tokens; 0 for none."""
    if not token:
        return 0
    if not token.isascii() or not token.isdigit() or len(token) > 18:
        raise foreign_page_token()
    return int(token)
