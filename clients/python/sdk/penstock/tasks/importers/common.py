"""Shared by the importers: their choices, their outcomes, and writing a task directory."""

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import yaml

from penstock.client.errors import InvalidArgument
from penstock.client.tasks.file import identifier
from penstock.client.tasks.named_files import CannotRead, regular
from penstock.client.tasks.task import load_task
from penstock.client.tasks.yaml import YamlFile, text_node
from penstock.client.transport.atomic_files import writing

MAX_CONTEXT_FILES: Final = 200_000
MAX_CONTEXT_BYTES: Final = 8 << 30
"""Of a directory of a source, such as the build context of an image."""
MAX_CONFIG_BYTES: Final = 1 << 20
GRADER_FOLDER: Final = "/tmp/penstock-grade"  # noqa: S108 - in the sandbox; cleared before the grader is put there
_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}")
_FETCHES: Final = re.compile(
    r"\b(?:apt-get|apk|curl|wget|uvx?|npm|npx|pip3?)\b(?:\s+-\S+)*\s+(?:install|add|update|https?:|pip)|\buvx\b|astral\.sh"
)


class Refused(Exception):
    """This task cannot be imported; the text gives the reason."""


@dataclass(frozen=True, slots=True)
class Imported:
    """The outcome for one task: its directory, or why there is none; `notes` are for people."""

    name: str
    folder: Path | None
    problem: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """How tasks are imported.

    `image` False makes tasks for backends without images: files that their Dockerfile copies become seed files.
    `resources` False omits limits of CPU, memory and disk. `user` executes agent and verifier; None = root where there
    is an image, as these formats expect. `reward` is binary (all of the tests) or fraction (their share). `env`
    resolves `${NAME}`. `only` are names or patterns (`django__*`) of the tasks to import; none = all. `dataset` is the
    one of a registry, NAME or NAME@VERSION. For records: `image_template` names an image where a record does not,
    `workdir` is the repository's directory in it ("" = the format's), `test_command` runs pytest, `history` keeps the
    commits that an image has. `repositories` has clones of the repositories of records and registries.
    """

    image: bool = True
    resources: bool = True
    user: str | None = None
    reward: str = "binary"
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    only: Sequence[str] = ()
    dataset: str = ""
    image_template: str = ""
    workdir: str = ""
    test_command: str = ""
    history: bool = False
    repositories: Path | None = None

    def selects(self, name: str) -> bool:
        """Returns whether a task of this name is to be imported."""
        return not self.only or any(fnmatchcase(name, pattern) for pattern in self.only)


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
"""Errors of reading malformed input; they fail that task and no other."""


class Folder:
    """A task's directory while it is written; it appears under its name once complete."""

    def __init__(self, destination: Path, name: str) -> None:
        self.name = identifier(name)
        self._final = destination / self.name
        if self._final.exists():
            raise InvalidArgument(
                f"{self._final} exists: remove it, or import into another directory", reason="TASK_IMPORT"
            )
        self.path = destination / f".{self.name}.partial"
        if self.path.exists():
            shutil.rmtree(self.path)
        self.path.mkdir()
        self.content: dict[str, Any] = {"task_id": self.name}
        self.notes: list[str] = []

    def copy(self, source: Path, name: str) -> str:
        """Copies a file or directory of the source to a name of ours; links that lead out of it are refused."""
        if source.is_symlink():
            raise Refused(f"{source} is a link")
        files, size = 0, 0
        for path in source.rglob("*") if source.is_dir() else (source,):
            files, size = files + 1, size + path.lstat().st_size
            if files > MAX_CONTEXT_FILES or size > MAX_CONTEXT_BYTES:
                raise Refused(f"{source} has more than {MAX_CONTEXT_FILES} files or {MAX_CONTEXT_BYTES} bytes")
            if path.is_symlink() and not path.resolve().is_relative_to(source.resolve()):
                raise Refused(f"{path} is a link that leads out of the task")
            if path.is_symlink() and path.is_dir():
                raise Refused(f"{path} is a link to a directory")
            if not (path.is_dir() or path.is_file()):
                raise Refused(f"{path} is not a regular file")
        if source.is_dir():
            shutil.copytree(source, self.path / name)
        else:
            shutil.copy(source, self.path / name)
        return name

    def write(self, name: str, content: str | bytes, mode: int = 0o644) -> str:
        """Writes a file of ours."""
        file = self.path / name
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.encode() if isinstance(content, str) else content)
            file.chmod(mode)
        return name

    def program(self, name: str) -> str:
        """Copies a program that is part of the client: the grader of a format."""
        content = resources.files("penstock.tasks.importers").joinpath("programs", name).read_bytes()
        return self.write(name, content, 0o755)

    def filled(self, fill: Callable[[], None]) -> Imported:
        """Puts the directory in place once `fill` has filled it; none if that fails."""
        try:
            fill()
            text = yaml.dump(self.content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
        except _MALFORMED as error:
            shutil.rmtree(self.path, ignore_errors=True)
            expected = isinstance(error, Refused | OSError)
            form = f"it has an unexpected form: {type(error).__name__}: {error}"
            return Imported(self.name, None, problem=str(error) if expected else form)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        try:
            return self._done(text)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def _done(self, content: str) -> Imported:
        file = self.path / self.write("task.yaml", content)
        try:
            # Under its name, a task that cannot be loaded would make its whole directory unusable.
            load_task(file)
        except InvalidArgument as error:
            shutil.rmtree(self.path, ignore_errors=True)
            return Imported(self.name, None, problem=self._in_words(error))
        with writing(self._final):
            self.path.rename(self._final)
        return Imported(self.name, self._final, notes=tuple(self.notes))

    def _in_words(self, error: InvalidArgument) -> str:
        """Returns why the task cannot be loaded, with files by their names in its directory, which will be gone."""
        found = "; ".join(f"{item.field}: {item.description}" for item in error.violations) or error.message
        for folder in (self.path.resolve(), self.path):
            found = found.replace(f"{folder}/", "")
        return found


def directories(source: Path, marker: str) -> Iterator[Path]:
    """Yields task directories: the source itself, or those directly in it, or in its `tasks`."""
    if (source / marker).is_file():
        yield source
        return
    for parent in (source, source / "tasks"):
        found = sorted(path for path in parent.glob("*") if (path / marker).is_file()) if parent.is_dir() else []
        if found:
            yield from found
            return


def substituted(values: Mapping[str, Any], env: Mapping[str, str], where: str) -> dict[str, str]:
    """Returns their environment variables with `${NAME}` and `${NAME:-default}` resolved from `env` only."""
    found = {}
    for name, value in values.items():

        def answer(match: re.Match[str]) -> str:
            given = env.get(match[1], match[2])
            if given is None:
                raise Refused(f"{where} needs the variable {match[1]}: set it with --env {match[1]}=VALUE")
            return given

        found[name] = _VARIABLE.sub(answer, str(value))
    return found


def manifest(folder: Path) -> str:
    """Returns the files of a directory, one relative name per line."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    if any("\n" in name for name in names):
        raise Refused("a file's name has a line break")
    return "".join(f"{name}\n" for name in names)


def solution_place(content: Mapping[str, Any], usual: str) -> str:
    """Returns the directory of a task's solution: the agent writes it, and in an image only root can write to `/`."""
    has_image = content.get("image") or content.get("build")
    is_root = content.get("sandbox", {}).get("user") in ("root", "0")
    return f"/tmp{usual}" if has_image and not is_root else usual  # noqa: S108 - of the sandbox


def fetches(*scripts: Path) -> list[str]:
    """Returns a note for each script that seems to install something: a verifier has no network."""
    return [
        f"{script.name} seems to install something from the network, which a verifier lacks: use an image that has "
        "it installed"
        for script in scripts
        if script.is_file() and _FETCHES.search(script.read_text(encoding="utf-8", errors="replace"))
    ]


def text_of(file: Path, most: int = MAX_CONFIG_BYTES) -> str:
    """Returns a text of the source. Raises Refused if it is no regular file, is too large, or is not UTF-8."""
    try:
        if file.is_symlink():
            raise Refused(f"{file} is a link")
        return regular(file, most)[0].decode("utf-8")
    except CannotRead as error:
        raise Refused(str(error)) from None
    except UnicodeDecodeError:
        raise Refused(f"{file} is not text in UTF-8") from None


def yaml_of(file: Path) -> Any:
    """Returns a file's content, read within the limits of task files."""
    try:
        return YamlFile(file).content
    except InvalidArgument as error:
        raise Refused(str(error)) from None


def plain(values: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Refuses unknown keys, which could change the task's meaning."""
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise Refused(f"{where}: {', '.join(unknown)}: not supported")


class _Dumper(yaml.SafeDumper):
    """Dumps multi-line texts as blocks, without anchors and aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        """Never uses aliases."""
        return True


_Dumper.add_representer(str, text_node)
