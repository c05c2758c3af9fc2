"""Task files: YAML or JSON written by people, validated strictly, turned into a `Task`.

Unknown keys are refused, with their line and the closest valid key. Files are given inline (`content`) or by `from`, a
file or a directory in the task file's own directory (named_files.py).
"""

import base64
import binascii
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, GetJsonSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema

from penstock.client.errors import InvalidArgument, Violation
from penstock.client.tasks.field_types import (
    FILE_PATH,
    MAX_COMMANDS,
    MAX_COMPONENTS,
    MAX_FILE_BYTES,
    MAX_INSTRUCTION_BYTES,
    MAX_PATHS,
    MAX_USER_INSTRUCTIONS,
    WORKING_DIRECTORY,
    CopiedFrom,
    Directory,
    Environment,
    Instruction,
    Limit,
    NamePattern,
    Pattern,
    Plain,
    Range,
    SeedPath,
    ShellLine,
    UserText,
    instruction_problem,
    is_file_path,
    names_of,
)
from penstock.client.tasks.named_files import Beside, CannotRead, dockerfile_problem
from penstock.client.tasks.rollout_keys import BudgetsTable, RolloutKeys
from penstock.client.tasks.sandbox_keys import ResourcesTable
from penstock.client.tasks.spec import Command, Inference, Judge, SeedFile, Upstream, User
from penstock.client.tasks.strict_model import Place, Strict

TASK_FILES: Final = ("task.yaml", "task.yml", "task.json")
"""Name of the task file in a task's own directory."""
_BITS: Final = 'must be permission bits, octal, "0000" to "0777"'


def _permission_bits(value: Any) -> Any:
    """Reads permission bits as octal: YAML reads 0644 as the number 420 and "0644" as a text."""
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
    return f"has {size} bytes; at most {MAX_FILE_BYTES} are allowed"


class File(Strict):
    path: SeedPath
    content: Annotated[str, AfterValidator(_content)] | None = None
    content_base64: Annotated[str, AfterValidator(_base64)] | None = None
    source: str | None = Field(None, alias="from")
    mode: Annotated[
        int | None,
        BeforeValidator(_permission_bits),
        WithJsonSchema({"type": ["string", "integer", "null"], "description": 'Permission bits, such as "0755".'}),
    ] = None

    @classmethod
    def conflicts(cls, value: Mapping[str, Any], beside: Beside | None) -> Iterator[tuple[Place, str]]:
        if sum(value.get(name) is not None for name in ("content", "content_base64", "from")) != 1:
            yield (), "set exactly one of content, content_base64 and from"
        path, source = value.get("path"), value.get("from")
        directory = False
        if isinstance(source, str) and beside is not None:
            try:
                directory = beside.place(source).is_dir()
                # Checked here, so that all problems of a file are reported at once; read once it is valid.
                for _ in beside.tree(source) if directory else (beside.read(source),):
                    pass
            except CannotRead as error:
                yield ("from",), str(error)
        if directory and value.get("mode") is not None:
            yield ("mode",), "each file of a directory has its own: set the mode of single files only"
        if isinstance(path, str) and not directory and (path.endswith("/") or not is_file_path(path)):
            yield ("path",), FILE_PATH

    def read(self, beside: Beside, where: str) -> list[SeedFile]:
        if self.content is not None:
            return [SeedFile(self.path, self.content.encode(), self.mode)]
        if self.content_base64 is not None:
            return [SeedFile(self.path, base64.b64decode(self.content_base64, validate=True), self.mode)]
        source = self.source or ""
        try:
            if not beside.place(source).is_dir():
                content, mode = beside.read(source)
                return [SeedFile(self.path, content, mode if self.mode is None else self.mode)]
            into = "" if self.path in WORKING_DIRECTORY else f"{self.path.rstrip('/')}/"
            return [SeedFile(into + path, content, mode) for path, content, mode in beside.tree(source)]
        except CannotRead as error:
            raise refused(f"{where}.from", str(error)) from None


class _Command(Strict):
    argv: list[Plain] = Field(default_factory=list)
    shell: ShellLine | None = None
    env: Environment = Field(default_factory=dict)
    cwd: Plain = ""
    timeout: Limit | None = None
    user: str = ""

    @classmethod
    def unfolded(cls, value: Any) -> Any:
        """Expands a short form: a list is an argument vector, a text is a shell line."""
        if isinstance(value, list):
            return {"argv": value}
        return {"shell": value} if isinstance(value, str) else value

    @classmethod
    def conflicts(cls, value: Mapping[str, Any], beside: Beside | None) -> Iterator[tuple[Place, str]]:
        if bool(value.get("argv")) == (value.get("shell") is not None):
            yield (), "set argv (a list) or shell (a text)"

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        vector = {"type": "array", "items": {"type": "string"}, "minItems": 1}
        return {"anyOf": [handler.resolve_ref_schema(handler(schema)), vector, {"type": "string"}]}

    def made(self) -> Command:
        return Command(
            argv=self.argv, shell=self.shell, env=self.env, cwd=self.cwd, timeout=self.timeout, user=self.user
        )


_Commands = Annotated[list[_Command], Field(max_length=MAX_COMMANDS)]


class CopiedPathTable(Strict):
    path: CopiedFrom
    exclude: list[NamePattern] = Field(default_factory=list, max_length=MAX_PATHS)

    @classmethod
    def unfolded(cls, value: Any) -> Any:
        """Expands the short form, a path."""
        return {"path": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler.resolve_ref_schema(handler(schema)), {"type": "string"}]}


class ModelTable(Strict):
    """A model of the operator's that is asked beside the agent's, and limits of its calls."""

    inference: Plain = Field("", description="An inference service's name; without it and upstream, the default one.")
    upstream: Plain = Field("", description="The name of an endpoint in the operator's settings.")
    model: Plain = Field("", description="The model to ask of the upstream.")
    budgets: BudgetsTable | None = None

    @classmethod
    def conflicts(cls, value: Mapping[str, Any], beside: Beside | None) -> Iterator[tuple[Place, str]]:
        if value.get("inference") and value.get("upstream"):
            yield ("upstream",), "set inference or upstream"
        if value.get("model") and not value.get("upstream"):
            yield ("model",), "is of an upstream, which is not set"

    @property
    def source(self) -> Inference | Upstream:
        return Upstream(name=self.upstream, model=self.model) if self.upstream else Inference(self.inference)


class JudgeTable(ModelTable):
    """`verifier.judge`."""

    def made(self) -> Judge:
        return Judge(source=self.source, budgets=None if self.budgets is None else self.budgets.made())


class UserTable(ModelTable):
    """`user`, or a file of its own."""

    instructions: list[UserText] = Field(
        default_factory=list, max_length=MAX_USER_INSTRUCTIONS, description="A script's, sent in order."
    )
    prompt: UserText | None = Field(None, description="Makes a model the user: who it is, and what it wants.")
    max_instructions: Annotated[int, Field(ge=1, le=MAX_USER_INSTRUCTIONS)] | None = Field(
        None, description="The most further instructions; default: the whole script, and 8 of a model."
    )
    max_tokens: Annotated[int, Field(ge=1, le=16384)] | None = Field(
        None, description="The most tokens of one of the model's answers; default 1024."
    )
    temperature: Annotated[float, Field(ge=0, le=2, strict=False, allow_inf_nan=False)] | None = None
    timeout: Annotated[float, Field(gt=0, le=3600, strict=False)] | None = Field(
        None, description="Seconds for one of the model's answers; default 300."
    )

    @classmethod
    def conflicts(cls, value: Mapping[str, Any], beside: Beside | None) -> Iterator[tuple[Place, str]]:
        yield from super().conflicts(value, beside)
        if bool(value.get("instructions")) == (value.get("prompt") is not None):
            yield (), "set instructions or prompt"
        for name in ("inference", "upstream", "model", "budgets", "max_tokens", "temperature", "timeout"):
            if value.get("instructions") and value.get(name) is not None:
                yield (name,), "is of a model: set prompt"

    def made(self) -> User:
        return User(
            instructions=self.instructions,
            prompt=self.prompt or "",
            source=self.source,
            budgets=None if self.budgets is None else self.budgets.made(),
            max_instructions=self.max_instructions,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            timeout=self.timeout,
        )


class VerifierFile(Strict):
    """What a task file has below `verifier`, or a file of its own has."""

    commands: _Commands = Field(min_length=1)
    files: list[File] = Field(default_factory=list)
    reward: Literal["file", "passed_share"] = "passed_share"
    range: Range | None = None
    command_timeout: Limit | None = None
    fresh_fork: bool | None = None
    restore: list[Pattern] = Field(default_factory=list, max_length=MAX_PATHS)
    changes_below: list[Directory] = Field(default_factory=list, max_length=MAX_PATHS)
    component_ranges: dict[str, Range] = Field(default_factory=dict, max_length=MAX_COMPONENTS)
    image: Plain = Field("", description="The image in which it is graded, in a sandbox with the agent's changes.")
    resources: ResourcesTable | None = Field(None, description="Of the sandbox in which it is graded.")
    copies: list[CopiedPathTable] = Field(
        default_factory=list, max_length=MAX_PATHS, description="Paths that it gets whole from the agent's sandbox."
    )
    collect: _Commands = Field(
        default_factory=list, description="Run in the agent's sandbox before anything is read from it."
    )
    user: str = Field("", description="The user of the sandbox of its image.")
    build: str | None = Field(None, description="Directory with the Dockerfile of its image.")
    judge: JudgeTable | None = Field(None, description="A model that the last command may ask.")

    @classmethod
    def conflicts(cls, value: Mapping[str, Any], beside: Beside | None) -> Iterator[tuple[Place, str]]:
        if value.get("changes_below") and value.get("fresh_fork") is False:
            yield ("changes_below",), "needs a fresh fork, but fresh_fork is false"
        for name in ("image", "build", "resources", "copies", "collect", "judge"):
            if (value.get(name) or value.get(name) == {}) and value.get("fresh_fork") is False:
                yield (name,), "needs a fresh fork, but fresh_fork is false"
        if value.get("image") and value.get("build"):
            yield ("build",), "set image or build"
        if value.get("user") and not (value.get("image") or value.get("build")):
            yield ("user",), "needs an image of the verifier's own"
        if isinstance(build := value.get("build"), str) and (problem := dockerfile_problem(beside, build)):
            yield ("build",), problem
        given = value.get("copies")
        copies = given if isinstance(given, list) else ()
        paths = [copied.get("path") if isinstance(copied, Mapping) else copied for copied in copies]
        for index, path in enumerate(paths):
            if isinstance(path, str) and (other := _around(path, paths[:index])):
                yield ("copies", index), f"is, contains or is in {other}, which is copied already"
        if value.get("component_ranges") and value.get("reward") != "file":
            yield ("component_ranges",), "needs reward: file"


def _around(path: str, others: Iterable[Any]) -> str:
    """Returns the first of other paths that is the same, contains this one or is in it, or an empty string."""
    parts = names_of(path)
    for other in others:
        known = names_of(other) if isinstance(other, str) else []
        common = min(len(parts), len(known))
        if common and parts[:common] == known[:common]:
            return str(other)
    return ""


class _Solution(Strict):
    commands: _Commands = Field(min_length=1)
    files: list[File] = Field(default_factory=list)


class TaskFile(RolloutKeys):
    """A task file's content."""

    task_id: str | None = Field(
        None, pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,127}$", description="Default: the name of the file or directory."
    )
    instruction: Instruction | None = Field(None, description="The agent's instruction, byte for byte.")
    instruction_file: str | None = Field(None, description="The instruction, from a file beside this one.")
    files: list[File] = Field(default_factory=list, description="Written to the working directory before setup.")
    setup: _Commands = Field(default_factory=list, description="Run once, before the agent.")
    verifier: VerifierFile | None = Field(None, description="How the reward is computed, once the agent is dead.")
    solution: _Solution | None = Field(None, description="A solution of the task; agents never get it.")
    build: str | None = Field(None, description="Directory with the Dockerfile of the image.")
    user: UserTable | None = Field(None, description="Sends the agent further instructions, once it has ended.")

    @classmethod
    def conflicts(cls, value: Mapping[str, Any], beside: Beside | None) -> Iterator[tuple[Place, str]]:
        """Also checks the instruction and the named files."""
        yield from super().conflicts(value, beside)
        if (value.get("instruction") is None) == (value.get("instruction_file") is None):
            yield (), "set instruction or instruction_file"
        sandbox, build = value.get("sandbox"), value.get("build")
        if build is not None and (value.get("image") or (isinstance(sandbox, Mapping) and sandbox.get("image"))):
            yield ("build",), "set image or build"
        if isinstance(sandbox, Mapping) and sandbox.get("companions"):
            yield from _beside_companions(value)
        if beside is None:
            return
        if isinstance(named := value.get("instruction_file"), str):
            try:
                problem = instruction_problem(read_text(beside, named))
            except CannotRead as error:
                problem = str(error)
            if problem:
                yield ("instruction_file",), problem
        if isinstance(build, str) and (problem := dockerfile_problem(beside, build)):
            yield ("build",), problem


def _beside_companions(value: Mapping[str, Any]) -> Iterator[tuple[Place, str]]:
    """Yields what a task with companions cannot have: it is graded where they are, in the network that they share."""
    if value.get("keep_end_state"):
        yield ("keep_end_state",), "would not have what the agent did to sandbox.companions"
    if value["sandbox"].get("verifier_network"):
        yield ("sandbox", "verifier_network"), "sandbox.companions would share it"
    verifier = value.get("verifier")
    for name in ("image", "build", "resources", "judge"):
        if isinstance(verifier, Mapping) and (verifier.get(name) or verifier.get(name) == {}):
            problem = "a verifier has the agent's own sandbox.companions"
            yield ("verifier", name), "sandbox.companions would share its network" if name == "judge" else problem


def task_file_of(folder: Path) -> Path | None:
    """Returns the task file of a task's own directory; None = it has none."""
    return next((folder / name for name in TASK_FILES if (folder / name).is_file()), None)


def identifier(name: str) -> str:
    """Returns a name as a task's identifier."""
    kept = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "_.-") else "-" for letter in name)
    return kept.lstrip("_.-")[:128] or "task"


def read_text(beside: Beside, name: str) -> str:
    """Returns a file's text.

    Raises:
        CannotRead: also if it is not text.
    """
    try:
        return beside.read(name, MAX_INSTRUCTION_BYTES)[0].decode("utf-8")
    except UnicodeDecodeError:
        raise CannotRead(f"{name} is not text in UTF-8") from None


def refused(field: str, description: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: {description}", reason="TASK_FILE", violations=(Violation(field, description),))
