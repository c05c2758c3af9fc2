"""Sets of tasks: a directory in which each task is a file or a folder of its own, or one file that lists tasks.

A directory's `taskset.yaml` may name the set, select its entries, and give defaults that a task may override: mappings
are merged key by key, everything else is replaced.

Invariants: all problems of all tasks are found at once, each with file, line and field; two tasks never have one id.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, WithJsonSchema

from penstock.client.errors import InvalidArgument, Violation
from penstock.client.tasks.file import TaskFile, identifier, task_file_of
from penstock.client.tasks.named_files import Beside, CannotRead
from penstock.client.tasks.rollout_keys import RolloutKeys
from penstock.client.tasks.strict_model import Strict
from penstock.client.tasks.task import Task, build_task
from penstock.client.tasks.yaml import YamlFile

SET_FILES: Final = ("taskset.yaml", "taskset.yml", "taskset.json")
_SUFFIXES: Final = (".yaml", ".yml", ".json")


class Defaults(RolloutKeys):
    """What every task of a set has, unless it says otherwise."""


class TaskSetFile(Strict):
    """A task set file's content."""

    name: str | None = Field(None, description="Default: the name of the file or directory.")
    description: str = Field("", description="For people.")
    defaults: Annotated[
        dict[str, Any], BeforeValidator(lambda value: value or {}), WithJsonSchema({"type": "object"})
    ] = Field(default_factory=dict)
    tasks: list[str] | None = Field(
        None, min_length=1, description="Files and directories beside this one, or patterns; default: all."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSet:
    """The tasks of a set, ordered by id."""

    name: str
    tasks: tuple[Task, ...]

    def __len__(self) -> int:
        return len(self.tasks)


def load_tasks(path: str | Path, *, files_from: Sequence[str | Path] = ()) -> TaskSet:
    """Loads the tasks of a directory or of a task set file, or the one of a task file; `files_from` as in `Task.load`.

    Raises:
        InvalidArgument: `TASK_FILE`; `violations` name the file, line and field of every problem of every task.
    """
    given = Path(path)
    found: list[Task] = []
    places: dict[str, Path] = {}
    wrong: list[Violation] = []
    name, defaults, files = _entries(given)
    directory = Beside(given if given.is_dir() else given.parent, tuple(map(Path, files_from)))
    for file in files:
        try:
            if file != given:
                _check_inside(directory, file)
            source = YamlFile(file, map(Path, files_from))
            content = _merged(defaults, source.content) if isinstance(source.content, Mapping) else None
            task = build_task(source, content)
        except InvalidArgument as error:
            violations = [Violation(f"{file}: {item.field}", item.description) for item in error.violations]
            of_file = violations[0].field == f"{file}: {file}"
            wrong += [Violation(str(file), violations[0].description)] if of_file else violations
            continue
        if task.task_id in places:
            wrong.append(Violation(f"{file}: task_id", f"{task.task_id} is also the id of {places[task.task_id]}"))
        places[task.task_id] = file
        found.append(task)
    if not files:
        wrong.append(Violation(str(given), "has no task: no *.yaml or *.json file, no directory with a task.yaml"))
    if wrong:
        count = f"{len(wrong)} problem{'s' if len(wrong) > 1 else ''}"
        raise InvalidArgument(f"{given}: {count}", reason="TASK_FILE", violations=tuple(wrong))
    return TaskSet(name=name, tasks=tuple(sorted(found, key=lambda task: task.task_id)))


def schemas() -> dict[str, dict[str, Any]]:
    """Returns the JSON schemas of a task file and of a task set file, for editors."""
    task, tasks = TaskFile.model_json_schema(by_alias=True), TaskSetFile.model_json_schema(by_alias=True)
    defaults = Defaults.model_json_schema(by_alias=True)
    tasks["$defs"] = defaults.pop("$defs", {}) | {"Defaults": defaults}
    tasks["properties"]["defaults"] = {"$ref": "#/$defs/Defaults"}
    for schema, title in ((task, "Penstock task"), (tasks, "Penstock task set")):
        schema |= {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
    return {"task": task, "taskset": tasks}


def _entries(path: Path) -> tuple[str, Mapping[str, Any], list[Path]]:
    """Returns a set's name, its defaults, and its task files."""
    if path.is_dir() and task_file_of(path) is None:
        listing = next((path / name for name in SET_FILES if (path / name).is_file()), None)
        name = path.absolute().name
    elif path.is_file() and path.name in SET_FILES:
        listing, path, name = path, path.parent, path.absolute().parent.name
    else:
        return identifier(path.absolute().stem), {}, [(task_file_of(path) if path.is_dir() else None) or path]
    if listing is None:
        return identifier(name), {}, sorted(_all(path))
    source = YamlFile(listing)
    file = source.validated(TaskSetFile, "task set")
    _check_defaults(source, file.defaults)
    files = list(_listed(source, file.tasks)) if file.tasks is not None else sorted(_all(path))
    return identifier(file.name or name), file.defaults, files


def _check_defaults(source: YamlFile, defaults: Mapping[str, Any]) -> None:
    sandbox = defaults.get("sandbox")
    if isinstance(sandbox, Mapping) and "packages" in sandbox:
        # Their files are beside the task file that names them, as all files of a task.
        raise source.refused("defaults.sandbox.packages", "must be in the file of each task, with its locks beside it")
    try:
        source.validated(Defaults, "task set", defaults)
    except InvalidArgument as error:
        violations = [
            source.violation(
                ("defaults", *item.field.split(".")), item.description.partition(": ")[2] or item.description
            )
            for item in error.violations
        ]
        raise InvalidArgument(error.message, reason="TASK_FILE", violations=tuple(violations)) from None


def _all(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            if (own := task_file_of(entry)) is not None:
                yield own
        elif entry.suffix in _SUFFIXES and entry.name not in SET_FILES:
            yield entry


def _listed(source: YamlFile, patterns: list[str]) -> Iterator[Path]:
    seen: set[Path] = set()
    for index, pattern in enumerate(patterns):
        if Path(pattern).is_absolute() or ".." in Path(pattern).parts:
            raise _refused(source, index, "leads out of the directory")
        found = sorted(source.path.parent.glob(pattern))
        if not found:
            raise _refused(source, index, f"{pattern}: no file matches")
        for entry in found:
            file = task_file_of(entry) if entry.is_dir() else entry
            if file is None:
                raise _refused(source, index, f"{entry} has no task.yaml")
            if file not in seen and file.name not in SET_FILES:
                seen.add(file)
                yield file


def _refused(source: YamlFile, index: int, description: str) -> InvalidArgument:
    violation = source.violation(("tasks", index), description)
    return InvalidArgument(f"{source.path} is not a task set", reason="TASK_FILE", violations=(violation,))


def _check_inside(directory: Beside, file: Path) -> None:
    """Checks that a set's file is in its directory: a link may lead anywhere."""
    try:
        directory.place(str(file.absolute()))
    except CannotRead as error:
        violation = Violation(str(file), str(error))
        raise InvalidArgument(f"{file}: {error}", reason="TASK_FILE", violations=(violation,)) from None


def _merged(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(defaults)
    for key, value in own.items():
        under = merged.get(key)
        merged[key] = _merged(under, value) if isinstance(under, Mapping) and isinstance(value, Mapping) else value
    return merged
