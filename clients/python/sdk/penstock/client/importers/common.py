"""What the importers share: their choices, their outcomes, and how a task directory is written."""

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import yaml

from penstock.client.errors import InvalidArgument
from penstock.client.taskfile import identifier
from penstock.client.yamlfile import YamlFile

GRADER_FOLDER: Final = "/tmp/penstock-grade"  # noqa: S108 - in the sandbox; cleared before the grader is put there
_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}")
_FETCHES: Final = re.compile(
    r"\b(?:apt-get|apk|curl|wget|uvx?|npm|npx|pip3?)\b(?:\s+-\S+)*\s+(?:install|add|update|https?:|pip)|\buvx\b|astral\.sh"
)


class Refused(Exception):
    """This task cannot be carried over; the text says why."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of one task: its directory, or why there is none; `notes` is what a person should know."""

    name: str
    folder: Path | None
    problem: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """How tasks are imported.

    `image` False makes tasks for backends without images: what their Dockerfile copies becomes files. `resources` False
    leaves limits of CPU, memory and disk out. `user` executes agent and verifier; None = root where there is an image,
    as these formats expect. `reward` is binary (all of the tests) or fraction (their share). `env` answers `${NAME}`.
    For records: `image_template` names an image where a record does not, `workdir` is where the repository is,
    `test_command` runs pytest, `repositories` has clones to take repositories from.
    """

    image: bool = True
    resources: bool = True
    user: str | None = None
    reward: str = "binary"
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    image_template: str = ""
    workdir: str = "/testbed"
    test_command: str = ""
    repositories: Path | None = None


_MALFORMED: Final = (
    Refused,
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What reading something of the wrong form ends in; it is the end of that task and of no other."""


class Folder:
    """A task's directory while it is written; it appears under its name when it is whole."""

    def __init__(self, destination: Path, name: str) -> None:
        self.name = identifier(name)
        self._final = destination / self.name
        if self._final.exists():
            raise InvalidArgument(
                f"{self._final} is there already: remove it, or import elsewhere", reason="TASK_IMPORT"
            )
        self.path = destination / f".{self.name}.partial"
        if self.path.exists():
            shutil.rmtree(self.path)
        self.path.mkdir()
        self.content: dict[str, Any] = {"task_id": self.name}
        self.notes: list[str] = []

    def copy(self, source: Path, name: str) -> str:
        """A file or directory of theirs, under a name of ours; links that lead out of it are refused."""
        if source.is_symlink():
            raise Refused(f"{source} is a link")
        for path in source.rglob("*") if source.is_dir() else ():
            if path.is_symlink() and not path.resolve().is_relative_to(source.resolve()):
                raise Refused(f"{path} is a link that leads out of the task")
            if path.is_symlink() and path.is_dir():
                raise Refused(f"{path} is a link to a directory")
            if not (path.is_dir() or path.is_file()):
                raise Refused(f"{path} is no regular file")
        if source.is_dir():
            shutil.copytree(source, self.path / name)
        else:
            shutil.copy(source, self.path / name)
        return name

    def write(self, name: str, content: str | bytes, mode: int = 0o644) -> str:
        """A file of ours."""
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        file.chmod(mode)
        return name

    def program(self, name: str) -> str:
        """A program that comes with the client: the grader of a format."""
        content = resources.files("penstock.client.importers").joinpath("programs", name).read_bytes()
        return self.write(name, content, 0o755)

    def filled(self, fill: Callable[[], None]) -> Imported:
        """Puts the directory in place once `fill` has filled it; none where that cannot be done."""
        try:
            fill()
        except _MALFORMED as error:
            shutil.rmtree(self.path, ignore_errors=True)
            told = isinstance(error, Refused | OSError)
            form = f"it has not the form that it should have: {type(error).__name__}: {error}"
            return Imported(self.name, None, problem=str(error) if told else form)
        return self._done()

    def _done(self) -> Imported:
        text = yaml.dump(self.content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
        self.write("task.yaml", text)
        self.path.rename(self._final)
        return Imported(self.name, self._final, notes=tuple(self.notes))


def directories(source: Path, marker: str) -> Iterator[Path]:
    """Task directories: the source itself, or those directly in it, or in its `tasks`."""
    if (source / marker).is_file():
        yield source
        return
    for parent in (source, source / "tasks"):
        found = sorted(path for path in parent.glob("*") if (path / marker).is_file()) if parent.is_dir() else []
        if found:
            yield from found
            return


def substituted(values: Mapping[str, Any], env: Mapping[str, str], where: str) -> dict[str, str]:
    """Their environment variables with `${NAME}` and `${NAME:-default}` answered, from what was given only."""
    found = {}
    for name, value in values.items():

        def answer(match: re.Match[str]) -> str:
            given = env.get(match[1], match[2])
            if given is None:
                raise Refused(f"{where} wants the variable {match[1]}: give it with --env {match[1]}=VALUE")
            return given

        found[name] = _VARIABLE.sub(answer, str(value))
    return found


def manifest(folder: Path) -> str:
    """The files of a directory, a relative name a line."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    if any("\n" in name for name in names):
        raise Refused("a file's name has a line break")
    return "".join(f"{name}\n" for name in names)


def fetches(*scripts: Path) -> list[str]:
    """A note for each script that seems to install something: a verifier has no network."""
    return [
        f"{script.name} seems to install something from the network, and a verifier has none: use an image that has it"
        for script in scripts
        if script.is_file() and _FETCHES.search(script.read_text(encoding="utf-8", errors="replace"))
    ]


def yaml_of(file: Path) -> Any:
    """A file's content, read within the bounds of task files."""
    try:
        return YamlFile(file).content
    except InvalidArgument as error:
        raise Refused(str(error)) from None


def plain(values: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Refuses keys that would change what the task means, and that nobody here knows."""
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise Refused(f"{where}: {', '.join(unknown)}: not supported")


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as they are, and nothing by reference."""

    def ignore_aliases(self, data: Any) -> bool:
        """Everything is written where it stands."""
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)
