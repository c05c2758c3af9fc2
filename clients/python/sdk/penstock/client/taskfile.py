"""Task files: YAML or JSON that a person writes, checked strictly, turned into a `Task`.

Unknown keys are refused, with their line and the key that was probably meant. Files are given inline (`content`) or by
`from`, a file or a directory beside the task file.
"""

import base64
import binascii
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, GetJsonSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema

from penstock.client.errors import InvalidArgument, Violation
from penstock.client.strict import Place, Strict
from penstock.client.taskrules import (
    FILE_PATH,
    MAX_COMMANDS,
    MAX_COMPONENTS,
    MAX_FILE_BYTES,
    MAX_PATHS,
    Directory,
    Environment,
    FilePath,
    Instruction,
    Limit,
    Pattern,
    Plain,
    Range,
    ShellLine,
    instruction_problem,
)
from penstock.client.tasks import Command, RewardFrom, SandboxChoice, SeedFile, Solution, Task, Verifier
from penstock.client.taskterms import Terms
from penstock.client.yamlfile import YamlFile

TASK_FILES: Final = ("task.yaml", "task.yml", "task.json")
"""What the task file of a task's own directory is called."""
_BITS: Final = 'must be permission bits, octal, "0000" to "0777"'


def _permission_bits(value: Any) -> Any:
    """YAML reads 0644 as the number 420 and "0644" as a text; both are meant as octal."""
    if isinstance(value, str):
        try:
            value = int(value.removeprefix("0o"), 8)
        except ValueError:
            raise ValueError(_BITS) from None
    if isinstance(value, int) and not 0 <= value <= 0o777:
        raise ValueError(_BITS)
    return value


def _base64(value: str) -> str:
    try:
        decoded = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("must be base64") from None
    if len(decoded) > MAX_FILE_BYTES:
        raise ValueError(_too_large(len(decoded)))
    return value


def _content(value: str) -> str:
    if (size := len(value.encode())) > MAX_FILE_BYTES:
        raise ValueError(_too_large(size))
    return value


def _too_large(size: int) -> str:
    return f"has {size} bytes, at most {MAX_FILE_BYTES} are taken"


class _File(Strict):
    path: FilePath
    content: Annotated[str, AfterValidator(_content)] | None = None
    content_base64: Annotated[str, AfterValidator(_base64)] | None = None
    source: str | None = Field(None, alias="from")
    mode: Annotated[
        int | None,
        BeforeValidator(_permission_bits),
        WithJsonSchema({"type": ["string", "integer", "null"], "description": 'Permission bits, such as "0755".'}),
    ] = None

    @classmethod
    def conflicts(cls, value: Mapping[str, Any], base: Path | None) -> Iterator[tuple[Place, str]]:
        if sum(value.get(name) is not None for name in ("content", "content_base64", "from")) != 1:
            yield (), "give exactly one of content, content_base64 and from"
        path, source = value.get("path"), value.get("from")
        directory = False
        if isinstance(source, str) and base is not None:
            directory = "\0" not in source and (base / source).is_dir()
            if problem := _unreadable(base / source):
                yield ("from",), problem
        if isinstance(path, str) and path.endswith("/") and not directory:
            yield ("path",), FILE_PATH

    def read(self, base: Path, where: str) -> list[SeedFile]:
        if self.content is not None:
            return [SeedFile(self.path, self.content.encode(), self.mode)]
        if self.content_base64 is not None:
            return [SeedFile(self.path, base64.b64decode(self.content_base64, validate=True), self.mode)]
        source = base / (self.source or "")
        try:
            if not source.is_dir():
                return [SeedFile(self.path, source.read_bytes(), self.mode or _mode(source))]
            return [
                SeedFile(f"{self.path.rstrip('/')}/{file.relative_to(source)}", file.read_bytes(), _mode(file))
                for file in sorted(source.rglob("*"))
                if file.is_file()
            ]
        except OSError as error:
            raise _refused(f"{where}.from", f"{source}: {error.strerror}") from None


def _unreadable(source: Path) -> str:
    """Why what a file's `from` names cannot be put into a sandbox, or nothing."""
    try:
        for file in filter(Path.is_file, source.rglob("*")) if source.is_dir() else [source]:
            with file.open("rb"):
                size = file.stat().st_size
            if size > MAX_FILE_BYTES:
                return f"{file} {_too_large(size)}"
    except OSError as error:
        return f"{source}: {error.strerror}"
    except ValueError:
        return "must be a path"
    return ""


class _Command(Strict):
    argv: list[Plain] = Field(default_factory=list)
    shell: ShellLine | None = None
    env: Environment = Field(default_factory=dict)
    cwd: Plain = ""
    timeout: Limit | None = None
    user: str = ""

    @classmethod
    def unfolded(cls, value: Any) -> Any:
        """A list is an argument vector, a text is a shell line."""
        if isinstance(value, list):
            return {"argv": value}
        return {"shell": value} if isinstance(value, str) else value

    @classmethod
    def conflicts(cls, value: Mapping[str, Any], base: Path | None) -> Iterator[tuple[Place, str]]:
        if bool(value.get("argv")) == (value.get("shell") is not None):
            yield (), "give argv (a list) or shell (a text)"

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        vector = {"type": "array", "items": {"type": "string"}, "minItems": 1}
        return {"anyOf": [handler.resolve_ref_schema(handler(schema)), vector, {"type": "string"}]}

    def made(self) -> Command:
        return Command(
            argv=self.argv, shell=self.shell, env=self.env, cwd=self.cwd, timeout=self.timeout, user=self.user
        )


_Commands = Annotated[list[_Command], Field(max_length=MAX_COMMANDS)]


class _Verifier(Strict):
    commands: _Commands = Field(min_length=1)
    files: list[_File] = Field(default_factory=list)
    reward: Literal["file", "passed_share"] = "passed_share"
    range: Range | None = None
    command_timeout: Limit | None = None
    fresh_fork: bool = False
    restore: list[Pattern] = Field(default_factory=list, max_length=MAX_PATHS)
    changes_below: list[Directory] = Field(default_factory=list, max_length=MAX_PATHS)
    component_ranges: dict[str, Range] = Field(default_factory=dict, max_length=MAX_COMPONENTS)

    @classmethod
    def conflicts(cls, value: Mapping[str, Any], base: Path | None) -> Iterator[tuple[Place, str]]:
        if value.get("changes_below") and value.get("fresh_fork") is not True:
            yield ("changes_below",), "is of use with fresh_fork: true only"
        if value.get("component_ranges") and value.get("reward") != "file":
            yield ("component_ranges",), "is of use with reward: file only"


class _Solution(Strict):
    commands: _Commands = Field(min_length=1)
    files: list[_File] = Field(default_factory=list)


class TaskFile(Terms):
    """A task file's content."""

    task_id: str | None = Field(
        None, pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,127}$", description="Default: the name of the file or directory."
    )
    instruction: Instruction | None = Field(None, description="What the agent is told, byte for byte.")
    instruction_file: str | None = Field(None, description="The same from a file beside this one.")
    files: list[_File] = Field(default_factory=list, description="Put into the working directory before setup.")
    setup: _Commands = Field(default_factory=list, description="Run once, before the agent.")
    verifier: _Verifier | None = Field(None, description="How the reward is made, once the agent is dead.")
    solution: _Solution | None = Field(None, description="A way to do the task; agents never have it.")
    build: str | None = Field(None, description="Directory with the Dockerfile of the image.")

    @classmethod
    def conflicts(cls, value: Mapping[str, Any], base: Path | None) -> Iterator[tuple[Place, str]]:
        """Further, the instruction and the files that others are named by."""
        yield from super().conflicts(value, base)
        if (value.get("instruction") is None) == (value.get("instruction_file") is None):
            yield (), "give instruction or instruction_file"
        sandbox, build = value.get("sandbox"), value.get("build")
        if build is not None and (value.get("image") or (isinstance(sandbox, Mapping) and sandbox.get("image"))):
            yield ("build",), "give image or build"
        if base is None:
            return
        if isinstance(named := value.get("instruction_file"), str):
            text = _text(base / named)
            if problem := f"{base / named} cannot be read" if text is None else instruction_problem(text):
                yield ("instruction_file",), problem
        if isinstance(build, str) and ("\0" in build or not (base / build / "Dockerfile").is_file()):
            yield ("build",), f"{base / build} has no Dockerfile"


def _text(file: Path) -> str | None:
    """A file's content; None where it cannot be read as text."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def load_task(path: Path) -> Task:
    """Reads a task file, or the one of a task's directory.

    Raises:
        InvalidArgument: `TASK_FILE`; `violations` name the fields and lines.
    """
    if path.is_dir():
        path = task_file_of(path) or path / TASK_FILES[0]
    return build_task(YamlFile(path))


def task_file_of(folder: Path) -> Path | None:
    """The task file of a task's own directory; None = it is none."""
    return next((folder / name for name in TASK_FILES if (folder / name).is_file()), None)


def build_task(source: YamlFile, content: Any = None) -> Task:
    """The task of a file; `content`, made from the file's, stands for it.

    Raises:
        InvalidArgument: `TASK_FILE`; as `load_task`.
    """
    file = source.validated(TaskFile, "task", content)
    path, base = source.path, source.path.parent
    instruction = file.instruction
    if instruction is None and (instruction := _text(base / (file.instruction_file or ""))) is None:
        raise _refused("instruction_file", f"{base / (file.instruction_file or '')} cannot be read")
    build = None if file.build is None else base / file.build
    verifier = solution = None
    if file.verifier is not None:
        given = file.verifier
        verifier = Verifier(
            commands=[item.made() for item in given.commands],
            files=_files(given.files, base, "verifier.files"),
            reward=RewardFrom(given.reward),
            range=None if given.range is None else (given.range[0], given.range[1]),
            command_timeout=given.command_timeout,
            fresh_fork=given.fresh_fork,
            restore=given.restore,
            changes_below=given.changes_below,
            component_ranges={name: (low, high) for name, (low, high) in given.component_ranges.items()},
        )
    if file.solution is not None:
        commands = [item.made() for item in file.solution.commands]
        solution = Solution(commands=commands, files=_files(file.solution.files, base, "solution.files"))
    return Task(
        task_id=file.task_id or identifier(_name(path)),
        instruction=instruction,
        files=_files(file.files, base, "files"),
        setup=[item.made() for item in file.setup],
        verifier=verifier,
        env=file.env,
        metadata=file.metadata,
        sandbox=_sandbox(file),
        limits=None if file.limits is None else file.limits.made(),
        budgets=None if file.budgets is None else file.budgets.made(),
        labels=file.labels,
        solution=solution,
        build=build,
        keep_diff=file.keep_diff,
        keep_files=file.keep_files,
    )


def _sandbox(file: TaskFile) -> SandboxChoice | None:
    if file.sandbox is not None:
        return file.sandbox.made(file.image)
    return SandboxChoice(image=file.image) if file.image else None


def _files(files: list[_File], base: Path, where: str) -> list[SeedFile]:
    return [item for index, file in enumerate(files) for item in file.read(base, f"{where}.{index}")]


def _name(path: Path) -> str:
    """What a file's task is called: `greet/task.yaml` is greet, as `greet.yaml` is."""
    own = path.absolute().parent.name if path.name in TASK_FILES else ""
    return own or path.stem


def identifier(name: str) -> str:
    """A name as a task's identifier."""
    kept = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "_.-") else "-" for letter in name)
    return kept.lstrip("_.-")[:128] or "task"


def _mode(file: Path) -> int:
    return file.stat().st_mode & 0o777


def _refused(field: str, description: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: {description}", reason="TASK_FILE", violations=(Violation(field, description),))
