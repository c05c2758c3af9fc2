"""The services' rules for tasks, as types of the task file's fields: a file is refused if its rollout would be.

The driver has the same rules, for tasks that never were a file: a test keeps the two in step.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field

MAX_INSTRUCTION_BYTES: Final = 1 << 20
MAX_FILE_BYTES: Final = 16 << 20
MAX_COMMANDS: Final = 1000
MAX_PATHS: Final = 256
MAX_COMPONENTS: Final = 256
MAX_SERVERS: Final = 64
MAX_USER_INSTRUCTIONS: Final = 64
MAX_USER_TEXT_BYTES: Final = 64 << 10
MAX_LIMIT_S: Final = 7 * 86_400
_MAX_PERIOD_S: Final = 86_400
_MAX_SECONDS: Final = 100 * 366 * 86_400
FILE_PATH: Final = "must be the path of a file, without '..'"
GATES_SERVER: Final = "penstock"
"""Name of the MCP server by which agents reach the trainer's own tools."""
WORKING_DIRECTORY: Final = (".", "./")
_IN_MEMORY: Final = frozenset({"dev", "proc", "sys", "tmp"})
_RESERVED_LABEL: Final = "penstock_"
_JSON_DEPTH: Final = 24


def _check(holds: Callable[[str], object], otherwise: str) -> AfterValidator:
    def checked(value: str) -> str:
        if not holds(value):
            raise ValueError(otherwise)
        return value

    return AfterValidator(checked)


def names_of(path: str) -> list[str]:
    """Returns the names in a path."""
    return [name for name in path.split("/") if name not in ("", ".")]


def is_file_path(path: str) -> bool:
    """Whether a file may be put there; a directory's may end with a slash, which is checked elsewhere."""
    return bool(names_of(path)) and "\0" not in path and ".." not in path.split("/")


def _directory(path: str) -> str:
    if not is_file_path(path):
        raise ValueError("must be a directory that is not the root, without '..'")
    if path.startswith("/") and (top := names_of(path)[0]) in _IN_MEMORY:
        raise ValueError(f"/{top} is memory, and what is there is in no fork: name a directory elsewhere")
    return path


def _copied_from(path: str) -> str:
    if not is_file_path(path) or not path.startswith("/") or path.startswith("//"):
        raise ValueError("must be an absolute path that is not the root, without '..'")
    if (top := names_of(path)[0]) in _IN_MEMORY - {"tmp"}:
        raise ValueError(f"/{top} is memory, and what is there is in no fork: name a path elsewhere")
    return path


def is_seed_path(path: str) -> bool:
    """As `is_file_path`; or the working directory itself, for a directory's content."""
    return path in WORKING_DIRECTORY or is_file_path(path)


def instruction_problem(text: str) -> str:
    """Returns why a rollout would refuse the instruction, or an empty string."""
    if not text.strip():
        return "is empty: describe what the agent shall do"
    size = len(text.encode())
    return f"has {size} bytes; at most {MAX_INSTRUCTION_BYTES} are allowed" if size > MAX_INSTRUCTION_BYTES else ""


def _instruction(text: str) -> str:
    if problem := instruction_problem(text):
        raise ValueError(problem)
    return text


def _user_text(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise ValueError("must not be empty, nor have NUL in it")
    if len(text.encode()) > MAX_USER_TEXT_BYTES:
        raise ValueError(f"must have at most {MAX_USER_TEXT_BYTES} bytes")
    return text


def _pattern(pattern: str) -> str:
    names = names_of(pattern)
    if not names or "\0" in pattern or ".." in names:
        raise ValueError("must be a path or a pattern of paths, without '..'")
    if any("**" in name and name != "**" for name in names):
        raise ValueError("'**' must stand alone between slashes")
    if set(names) <= {"**", "~"}:
        raise ValueError("would restore everything, the agent's work too")
    return pattern


def _range(values: list[float]) -> list[float]:
    if len(values) == 2 and not values[0] < values[1]:
        raise ValueError("must be the lowest and the highest, the lowest first")
    return values


Instruction = Annotated[str, AfterValidator(_instruction)]
UserText = Annotated[str, AfterValidator(_user_text)]
SeedPath = Annotated[str, _check(is_seed_path, FILE_PATH)]
Plain = Annotated[str, _check(lambda text: "\0" not in text, "must not have NUL in it")]
ShellLine = Annotated[str, _check(lambda text: text.strip() and "\0" not in text, "must not be empty, nor have NUL")]
Pattern = Annotated[str, AfterValidator(_pattern)]
Directory = Annotated[str, AfterValidator(_directory)]
CopiedFrom = Annotated[str, AfterValidator(_copied_from)]
NamePattern = Annotated[
    str, _check(lambda text: text and "/" not in text and "\0" not in text, "must be a pattern of names, without '/'")
]
Variable = Annotated[
    str,
    _check(re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}").fullmatch, "must be the name of an environment variable"),
]
Environment = dict[Variable, Plain]
Address = Annotated[
    str, _check(re.compile(r"(https?://\S+)?").fullmatch, "must be an address that begins with http:// or https://")
]
ServerName = Annotated[
    str,
    _check(
        re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}").fullmatch,
        "must be letters, digits, '-' and '_', at most 64, and begin with a letter or digit",
    ),
    _check(lambda name: name != GATES_SERVER, f"must not be {GATES_SERVER}, the gate's own server"),
]
LabelKey = Annotated[
    str,
    _check(
        re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}").fullmatch,
        "must have a name of letters, digits and . _ / -, at most 63",
    ),
    _check(
        lambda name: not name.startswith(_RESERVED_LABEL),
        f"must not begin with {_RESERVED_LABEL}, which is reserved",
    ),
]
LabelValue = Annotated[
    str,
    _check(re.compile(r"[A-Za-z0-9._/-]{0,128}").fullmatch, "must be letters, digits and . _ / -, at most 128"),
]
Number = Annotated[float, Field(strict=False, allow_inf_nan=False)]
Range = Annotated[list[Number], Field(min_length=2, max_length=2), AfterValidator(_range)]
Seconds = Annotated[float, Field(gt=0, le=_MAX_SECONDS, strict=False, allow_inf_nan=False)]
Limit = Annotated[float, Field(gt=0, le=MAX_LIMIT_S, strict=False, allow_inf_nan=False)]
Period = Annotated[float, Field(gt=0, le=_MAX_PERIOD_S, strict=False, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, lt=1 << 31)]
LargeCount = Annotated[int, Field(ge=1, lt=1 << 63)]


def not_json(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yields the values that JSON cannot represent, by their place."""
    if len(place) > _JSON_DEPTH:
        yield place, f"must not be nested deeper than {_JSON_DEPTH}"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(key, str):
                yield from not_json(item, (*place, key))
            else:
                yield place, f"must have text as keys, but has {key!r}: put it in quotes"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from not_json(item, (*place, index))
    elif isinstance(value, float) and not isfinite(value):
        yield place, "must be a finite number"
    elif not isinstance(value, str | int | float | None):
        yield place, f"must be text, a number, true, false, a list or a mapping: put {value} in quotes"
