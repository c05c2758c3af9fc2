"""An evaluation's results directory: its configuration, and a line for each attempt that ended.

    DIR/eval.json        the configuration: agent, what answers, tasks with their digests
    DIR/attempts.jsonl   one attempt a line, in the order in which they ended

Invariants: a line is on the disk before the attempt counts; a line torn by a crash is dropped when the directory is
reopened; one process writes to a directory at a time.
"""

import fcntl
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Self

import orjson

from penstock.analysis.prices import Used
from penstock.client.errors import FailedPrecondition, InvalidArgument
from penstock.client.transport.atomic_files import write_whole, writing

SCHEMA: Final = 1
CONFIG_FILE: Final = "eval.json"
ATTEMPTS_FILE: Final = "attempts.jsonl"
_BY_TASK: Final = {"tasks": "task", "task_models": "models of task"}
"""Digests by task, of which more may come."""
_MAY_CHANGE: Final = frozenset({"eval_id", "schema", "attempts", "name", *_BY_TASK})
_ANSWERS: Final = frozenset({"model_dir", "model_files", "engine", "script", "served_model", "policy_version"})
"""What answers. An older version's directory does not have it: then it is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A verifier's or setup's command as the report shows it; the tails are text, bounded."""

    phase: str
    command: str
    end: str
    seconds: float
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One rollout of an evaluation that ended. No `reward` = it was not graded, and counts nowhere.

    `index` from 0 within its task; `again` counts the earlier rollouts for the same index. Times are seconds.
    """

    task_id: str
    index: int
    again: int
    rollout_id: str
    reward: float | None = None
    range: tuple[float, float] = (0.0, 1.0)
    components: Mapping[str, float] = field(default_factory=dict)
    cause: str | None = None
    reason: str | None = None
    message: str = ""
    retriable: bool = False
    agent_exit: str = ""
    seconds: float = 0.0
    agent_seconds: float = 0.0
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    said: str = ""
    ran: Sequence[Ran] = ()
    used: Sequence[Used] = ()
    """Tokens by model, also of an earlier attempt of the driver's at the same rollout; for costs."""

    @property
    def graded(self) -> bool:
        """Whether it counts."""
        return self.reward is not None

    def passed(self, threshold: float) -> bool:
        """Whether its reward is at least `threshold` of the way from the minimum to the maximum reward."""
        low, high = self.range
        # What rounding may lose: of the range, and of bounds that are far from 0.
        rounding = 1e-9 * (high - low) + 1e-15 * max(abs(low), abs(high))
        return self.reward is not None and self.reward >= low + threshold * (high - low) - rounding

    def line(self) -> bytes:
        """Returns it as a line of JSON."""
        return orjson.dumps(asdict(self), option=orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def read(cls, line: bytes) -> Self:
        """Parses a line; raises ValueError, KeyError or TypeError for an invalid one."""
        data = orjson.loads(line)
        known = {item.name for item in fields(cls)}
        data = {name: value for name, value in data.items() if name in known}
        data["range"] = tuple(data["range"])
        data["ran"] = tuple(Ran(**item) for item in data.get("ran", ()))
        data["used"] = tuple(Used(**item) for item in data.get("used", ()))
        return cls(**data)


class Book:
    """A results directory, open for writing.

    Raises:
        FailedPrecondition: `EVAL_IN_USE`, another process writes to it; `EVAL_CHANGED`, it is of another evaluation.
        InvalidArgument: `EVAL_UNREADABLE`.
        ConfigurationError: `FILE_NOT_WRITTEN`, the disk is full or broken; the directory stays unchanged.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.folder = folder
        self._path = folder / ATTEMPTS_FILE
        with writing(self._path):
            folder.mkdir(parents=True, exist_ok=True)
            # Unbuffered: the rest of a failed write must not be written with the next line.
            self._file = self._path.open("ab", buffering=0)
        self._size = 0
        """Length of the valid lines."""
        self._torn = False
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FailedPrecondition(
                    f"another evaluation is writing to {folder}: wait for it, or use another directory",
                    reason="EVAL_IN_USE",
                ) from None
            self.config = self._settled(dict(config))
            self._drop_torn_line()
            self.attempts = list(read_attempts(folder)) if self._size else []
        except BaseException:
            self._file.close()
            raise

    @property
    def eval_id(self) -> str:
        """The evaluation's id: the run id of its rollouts."""
        return str(self.config["eval_id"])

    def add(self, attempt: Attempt) -> None:
        """Appends an attempt; on return it is on the disk.

        Raises:
            ConfigurationError: `FILE_NOT_WRITTEN`. It does not count then, and may be added again.
        """
        line = attempt.line()
        with writing(self._path):
            try:
                self._cut()
                self._torn = True
                left = memoryview(line)
                while left:
                    left = left[self._file.write(left) :]
                os.fsync(self._file.fileno())
            except OSError:
                with suppress(OSError):  # else the next `add` or the next open cuts it off
                    self._cut()
                raise
        self._torn = False
        self._size += len(line)
        self.attempts.append(attempt)

    def close(self) -> None:
        """Releases the directory."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _settled(self, config: dict[str, Any]) -> dict[str, Any]:
        """Returns the configuration to use: the directory's, if it is of the same evaluation."""
        config = {"schema": SCHEMA, "eval_id": f"eval-{secrets.token_hex(6)}", **config}
        # In the form in which it is read from the file.
        config = orjson.loads(orjson.dumps(config))
        if (self.folder / CONFIG_FILE).exists():
            before = read_config(self.folder)
            unknown = _ANSWERS - before.keys()
            changed = [name for name in config.keys() - _MAY_CHANGE - unknown if before.get(name) != config[name]]
            changed += [
                f"{what} {task}"
                for name, what in _BY_TASK.items()
                for task, digest in config.get(name, {}).items()
                if before.get(name, {}).get(task, digest) != digest
            ]
            if changed:
                raise FailedPrecondition(
                    f"{self.folder} has the results of another evaluation: {', '.join(sorted(changed))} changed: "
                    "use another directory",
                    reason="EVAL_CHANGED",
                )
            # A run of fewer attempts or tasks hides none of those before it.
            wanted = max(int(before["attempts"]), config["attempts"])
            by_task = {
                name: {**before.get(name, {}), **config.get(name, {})} for name in _BY_TASK if name in before | config
            }
            config = {**config, **before, **by_task, "attempts": wanted}
        content = orjson.dumps(config, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        write_whole(self.folder / CONFIG_FILE, content)
        return config

    def _drop_torn_line(self) -> None:
        content = self._path.read_bytes()
        self._size = content.rfind(b"\n") + 1
        self._torn = self._size < len(content)
        with writing(self._path):
            self._cut()

    def _cut(self) -> None:
        """Truncates the file after the valid lines."""
        if self._torn:
            self._file.truncate(self._size)
            self._torn = False


def read_config(folder: Path) -> dict[str, Any]:
    """Reads a results directory's configuration. Raises InvalidArgument `EVAL_UNREADABLE`."""
    try:
        config = orjson.loads((folder / CONFIG_FILE).read_bytes())
        if config["schema"] != SCHEMA or not isinstance(config["tasks"], dict):
            raise ValueError(f"schema {config['schema']}")
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            why = f"there is no {CONFIG_FILE} in it" if folder.is_dir() else "there is no such directory"
        else:
            why = f"{CONFIG_FILE} cannot be read: {(error.strerror or 'it is broken').lower()}"
        raise InvalidArgument(f"{folder} has no results of an evaluation: {why}", reason="EVAL_UNREADABLE") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(
            f"{folder} has no results of an evaluation: {CONFIG_FILE}: {error}", reason="EVAL_UNREADABLE"
        ) from None
    return dict(config)


def read_attempts(folder: Path) -> list[Attempt]:
    """Reads the attempts of a results directory. Raises InvalidArgument `EVAL_UNREADABLE`."""
    found: list[Attempt] = []
    number = 0
    try:
        for line in (folder / ATTEMPTS_FILE).read_bytes().splitlines(keepends=True):
            number += 1
            if line.endswith(b"\n"):  # else it is being written
                found.append(Attempt.read(line))
    except FileNotFoundError:
        return []
    except OSError as error:
        why = (error.strerror or "it is broken").lower()
        raise InvalidArgument(f"{folder / ATTEMPTS_FILE} cannot be read: {why}", reason="EVAL_UNREADABLE") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(
            f"{folder / ATTEMPTS_FILE}, line {number}, is not an attempt: {error}", reason="EVAL_UNREADABLE"
        ) from None
    return found
