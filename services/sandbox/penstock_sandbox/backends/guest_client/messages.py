"""The guest agent's control messages, validated: it runs beside an untrusted workload, so it is not trusted."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

_Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class Greeting(_Message):
    """What only the guest agent knows of its sandbox; ``instance`` distinguishes it from a successor."""

    version: int
    instance: str = Field(min_length=1, max_length=64)
    attachment: str = Field(min_length=1, max_length=64)
    python: str = Field(max_length=64)
    user_switch: bool
    """Whether the workload has another user than the guest agent, which it then can neither signal nor trace."""
    pty: bool
    home: str = ""
    workdir: str = ""


class Hello(_Message):
    """The guest agent's reply when a pipe attaches: the last frame that it received."""

    attachment: str
    received: _Count


class Opened(_Message):
    """A program's connection to an endpoint."""

    port: int


class Described(_Message):
    """A file."""

    kind: Literal["file", "directory", "symlink", "other"]
    size: _Count
    mode: Annotated[int, Field(ge=0, le=0o7777)]
    mtime_ns: int
    target: str = ""


class Entry(Described):
    """A file in a directory."""

    name: str


class Entries(_Message):
    """A page of a directory, and the name after which there are more."""

    entries: list[Entry]
    last: str


class Unpacked(_Message):
    """The result of unpacking an archive."""

    entries: _Count
    bytes: _Count


class Exited(_Message):
    """The end of a process."""

    event: Literal["exit"]
    process: int
    code: Annotated[int, Field(ge=0, le=255)] | None
    signal: Annotated[int, Field(ge=1, le=64)] | None
    cpu_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None
    peak_bytes: _Count | None
    oom: bool


class Refusal(_Message):
    """Why a request was refused: the kernel's errno, and the operation."""

    errno: int
    what: str
    failed: bool = False
    """Whether the program could not be executed, which is an outcome and not a failure of the request."""
