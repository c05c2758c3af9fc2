"""Signed results of `penstock tasks assay`, one line per task: what decides whether a task's rollouts may start.

A line is a JSON object with the task's digest, its verdict and an HMAC-SHA256 of both. All with the key can sign, so
it belongs to those who judge tasks, and to the programs that check. Invariant: a line whose signature does not fit is
never used, and its file is refused as a whole.
"""

import hmac
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

import orjson

from penstock.client.errors import FailedPrecondition, InvalidArgument, Violation
from penstock.client.tasks.task import Task
from penstock.client.transport.atomic_files import writing
from penstock.client.wire.specs import digest

SCHEMA: Final = 2
"""Since 2 its digest is one that clients of all languages make."""
KEY_BYTES: Final = 32
_MAX_BYTES: Final = 64 << 20
_CONTEXT: Final = b"penstock assay line 1\n"
"""In front of what is signed, so that no signature of another purpose fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssayLine:
    """The result of one task.

    `digest` is of everything that the task's rollouts depend on; `failed` has the codes of its defects, `accepted`
    those that are no more than warnings. `backend` and `time` (ISO 8601, UTC) say where and when it was assayed.
    """

    task_id: str
    digest: str
    passed: bool
    failed: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    backend: str = ""
    time: str = ""
    schema: int = SCHEMA

    def signed(self, key: bytes) -> bytes:
        """Returns it as a line of JSON, with its signature."""
        return orjson.dumps({**asdict(self), "signature": self._signature(key)}, option=orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def read(cls, line: bytes, key: bytes) -> Self:
        """Parses a line. Raises ValueError: it is malformed, of a newer version, or not signed with this key."""
        data: Any = orjson.loads(line)
        if not isinstance(data, Mapping) or not isinstance(data.get("signature"), str):
            raise ValueError("it has no signature")
        if data.get("schema") != SCHEMA:
            raise ValueError(f"its schema is {data.get('schema')!r}, not {SCHEMA}")
        given: dict[str, Any] = {item.name: data.get(item.name) for item in fields(cls)}
        if set(data) != {*given, "signature"}:
            raise ValueError("its keys are not those of a line")
        if not isinstance(given["passed"], bool) or not all(
            isinstance(given[name], str) for name in ("task_id", "digest", "backend", "time")
        ):
            raise ValueError("its values have other types")
        for name in ("failed", "accepted"):
            if not isinstance(given[name], list) or not all(isinstance(item, str) for item in given[name]):
                raise ValueError(f"{name} is not a list of codes")
            given[name] = tuple(given[name])
        found = cls(**given)
        if not hmac.compare_digest(found._signature(key).encode(), str(data["signature"]).encode()):
            raise ValueError("it is not signed with this key")
        return found

    def _signature(self, key: bytes) -> str:
        content = orjson.dumps(asdict(self), option=orjson.OPT_SORT_KEYS)
        return hmac.digest(key, _CONTEXT + content, "sha256").hex()


class Assays:
    """The results of many tasks; of two lines with one digest the later one counts."""

    def __init__(self, lines: Iterable[AssayLine], origin: str = "the assays") -> None:
        self._lines = {line.digest: line for line in lines}
        self._ids = {line.task_id for line in self._lines.values()}
        self._origin = origin

    @classmethod
    def load(cls, file: str | Path, key: str | Path | None = None) -> Self:
        """Reads the lines that `penstock tasks assay` wrote.

        Args:
            file: the file of lines, at most 64 MiB.
            key: the file of the key; default: beside `file`, with the suffix `.key`.

        Raises:
            InvalidArgument: `ASSAY_UNREADABLE`: a file cannot be read, or a line is not signed with this key.
        """
        place = Path(file)
        secret = read_key(key_beside(place) if key is None else Path(key))
        return cls(read_lines(place, secret), str(place))

    def require(self, task: Task) -> None:
        """Checks that this very task passed.

        Raises:
            FailedPrecondition: `ASSAY_REQUIRED`; the violation's field is `task`.
        """
        line = self._lines.get(digest(task))
        if line is not None and line.passed:
            return
        if line is not None:
            why = f"did not pass its assay: {', '.join(line.failed)}"
        elif task.task_id in self._ids:
            why = f"has changed since its assay in {self._origin}: run `penstock tasks assay` again"
        else:
            why = f"has no line in {self._origin}: run `penstock tasks assay` first"
        raise FailedPrecondition(
            f"task {task.task_id} {why}",
            reason="ASSAY_REQUIRED",
            violations=(Violation("task", f"{task.task_id} {why}"),),
        )


def read_lines(file: Path, key: bytes) -> list[AssayLine]:
    """Reads a file of lines, at most 64 MiB.

    Raises:
        InvalidArgument: `ASSAY_UNREADABLE`: it cannot be read, or a line is malformed or not signed with this key.
    """
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise _unreadable(file, f"has more than {_MAX_BYTES} bytes")
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise _unreadable(file, (error.strerror or "cannot be read").lower()) from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(AssayLine.read(line, key))
        except ValueError as error:
            raise _unreadable(file, f"line {number}: {error}") from None
    return found


def key_beside(file: Path) -> Path:
    """Returns where the key of a file of lines is, unless it is named."""
    return file.with_suffix(".key")


def read_key(file: Path) -> bytes:
    """Reads a key. Raises InvalidArgument `ASSAY_UNREADABLE`: there is none, or it has fewer than 32 bytes."""
    try:
        with file.open("rb") as stream:
            found = stream.read(4097)
    except OSError as error:
        raise _unreadable(file, f"the key: {(error.strerror or 'cannot be read').lower()}") from None
    if not KEY_BYTES <= len(found) <= 4096:
        raise _unreadable(file, f"the key must have {KEY_BYTES} to 4096 bytes")
    return found


def existing_or_new_key(file: Path) -> bytes:
    """Reads a key, or makes one that only this user can read.

    Raises:
        InvalidArgument: as `read_key`.
        ConfigurationError: `FILE_NOT_WRITTEN`.
    """
    made = secrets.token_bytes(KEY_BYTES)
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return read_key(file)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(made)
    return made


def _unreadable(place: Path, why: str) -> InvalidArgument:
    return InvalidArgument(
        f"{place}: {why}", reason="ASSAY_UNREADABLE", violations=(Violation("require_assay", f"{place}: {why}"),)
    )
