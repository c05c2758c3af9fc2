"""What an attendant says in control frames, checked: it runs where an agent does, so it is not trusted."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

_Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class Greeting(_Message):
    """What only the attendant can know about its sandbox; ``instance`` tells one attendant from its successor."""

    version: int
    instance: str = Field(min_length=1, max_length=64)
    attachment: str = Field(min_length=1, max_length=64)
    python: str = Field(max_length=64)
    user_switch: bool
    """Whether the workload is another user than the attendant, which it then can neither signal nor trace."""
    pty: bool
    home: str = ""
    workdir: str = ""


class Hello(_Message):
    """The attendant's answer in an attachment: how far it heard."""

    attachment: str
    heard: _Count


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
    """What came out of an archive."""

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
    """Why a request was not done: the kernel's number, and what was being done."""

    errno: int
    what: str
    failed: bool = False
    """The program could not be executed, which is an outcome and not a failure of the request."""
