"""Task files: YAML or JSON that a person writes, checked strictly, turned into a `Task`.

Unknown keys are refused, with their line and the key that was probably meant. Files are given inline (`content`) or by
`from`, a file or a directory beside the task file.
"""

import base64
import binascii
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, WithJsonSchema, model_validator
from pydantic_core import CoreSchema

from penstock.client.errors import InvalidArgument, Violation
from penstock.client.tasks import Command, RewardFrom, SandboxChoice, SeedFile, Solution, Task, Verifier
from penstock.client.taskterms import Strict, Terms
from penstock.client.yamlfile import YamlFile

TASK_FILES: Final = ("task.yaml", "task.yml", "task.json")
"""What the task file of a task's own directory is called."""


def _permission_bits(value: Any) -> Any:
    """YAML reads 0644 as the number 420 and "0644" as a text; both are meant as octal."""
    if isinstance(value, str):
        try:
            return int(value.removeprefix("0o"), 8)
        except ValueError:
            raise ValueError('permission bits are octal, for example "0644"') from None
    return value


class _File(Strict):
    path: str = Field(min_length=1)
    content: str | None = None
    content_base64: str | None = None
    source: str | None = Field(None, alias="from")
    mode: Annotated[
        int | None,
        BeforeValidator(_permission_bits),
        Field(ge=0, le=0o7777),
        WithJsonSchema({"type": ["string", "integer", "null"], "description": 'Permission bits, such as "0755".'}),
    ] = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(item is not None for item in (self.content, self.content_base64, self.source)) != 1:
            raise ValueError("give exactly one of content, content_base64 and from")
        return self

    def read(self, base: Path, where: str) -> list[SeedFile]:
        if self.content is not None:
            return [SeedFile(self.path, self.content.encode(), self.mode)]
        if self.content_base64 is not None:
            try:
                return [SeedFile(self.path, base64.b64decode(self.content_base64, validate=True), self.mode)]
            except binascii.Error:
                raise _refused(f"{where}.content_base64", "is not base64") from None
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


class _Command(Strict):
    argv: list[str] = Field(default_factory=list)
    shell: str | None = None
    env: dict[str, str] = Field(default_factory=dict)
    cwd: str = ""
    timeout: float | None = Field(None, gt=0, strict=False)
    user: str = ""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        """A list is an argument vector, a text is a shell line."""
        if isinstance(value, list):
            return {"argv": value}
        return {"shell": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if bool(self.argv) == (self.shell is not None):
            raise ValueError("give argv (a list) or shell (a text)")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        vector = {"type": "array", "items": {"type": "string"}, "minItems": 1}
        return {"anyOf": [handler.resolve_ref_schema(handler(schema)), vector, {"type": "string"}]}

    def made(self) -> Command:
        return Command(
            argv=self.argv, shell=self.shell, env=self.env, cwd=self.cwd, timeout=self.timeout, user=self.user
        )


_Range = Annotated[list[float], Field(min_length=2, max_length=2, strict=False)]


class _Verifier(Strict):
    commands: list[_Command] = Field(min_length=1)
    files: list[_File] = Field(default_factory=list)
    reward: Literal["file", "passed_share"] = "passed_share"
    range: _Range | None = None
    command_timeout: float | None = Field(None, gt=0, strict=False)
    fresh_fork: bool = False
    restore: list[str] = Field(default_factory=list)
    changes_below: list[str] = Field(default_factory=list)
    component_ranges: dict[str, _Range] = Field(default_factory=dict)


class _Solution(Strict):
    commands: list[_Command] = Field(min_length=1)
    files: list[_File] = Field(default_factory=list)


class TaskFile(Terms):
    """A task file's content."""

    task_id: str | None = Field(
        None, pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,127}$", description="Default: the name of the file or directory."
    )
    instruction: str | None = Field(None, description="What the agent is told, byte for byte.")
    instruction_file: str | None = Field(None, description="The same from a file beside this one.")
    files: list[_File] = Field(default_factory=list, description="Put into the working directory before setup.")
    setup: list[_Command] = Field(default_factory=list, description="Run once, before the agent.")
    verifier: _Verifier | None = Field(None, description="How the reward is made, once the agent is dead.")
    solution: _Solution | None = Field(None, description="A way to do the task; agents never have it.")
    build: str | None = Field(None, description="Directory with the Dockerfile of the image.")

    @model_validator(mode="after")
    def _one_instruction(self) -> Self:
        if (self.instruction is None) == (self.instruction_file is None):
            raise ValueError("give instruction or instruction_file")
        return self

    @model_validator(mode="after")
    def _image_or_build(self) -> Self:
        if self.build is not None and (self.image or (self.sandbox is not None and self.sandbox.image)):
            raise ValueError("give image or build")
        return self


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
    if instruction is None:
        try:
            instruction = (base / (file.instruction_file or "")).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise _refused("instruction_file", f"{base / (file.instruction_file or '')} cannot be read") from None
    build = None if file.build is None else base / file.build
    if build is not None and not (build / "Dockerfile").is_file():
        raise _refused("build", f"{build} has no Dockerfile")
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
