"""Values of processes in sandboxes. Times are UTC."""

from dataclasses import dataclass, field
from datetime import datetime

from penstock.client.types.results import Exit


@dataclass(frozen=True, slots=True)
class Process:
    """A process as the sandbox service reported it.

    Attributes:
        process_id: chosen by the client, unique in its sandbox.
        command: for people: a shell text, or the arguments joined.
        exit: None while it runs.
        pty: whether it has a terminal.
        stdin_offset: bytes of its standard input that were accepted so far.
        stdin_closed: whether its input is closed.
    """

    process_id: str
    command: str
    start_time: datetime | None
    exit: Exit | None
    pty: bool
    stdin_offset: int
    stdin_closed: bool


@dataclass(frozen=True, slots=True)
class Output:
    """A piece of a process's output: at most 256 KiB of `stream` (stdout or stderr) from byte `offset` on."""

    stream: str
    offset: int
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class OutputGap:
    """Discarded output: bytes [start, end) of `stream` (stdout or stderr)."""

    stream: str
    start: int
    end: int
