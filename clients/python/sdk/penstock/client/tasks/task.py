"""A task, and reading it from a file."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.client.tasks.file import (
    TASK_FILES,
    File,
    TaskFile,
    UserTable,
    VerifierFile,
    identifier,
    read_text,
    refused,
    task_file_of,
)
from penstock.client.tasks.named_files import Beside, CannotRead
from penstock.client.tasks.spec import (
    Budgets,
    Command,
    CopiedPath,
    Limits,
    McpServer,
    RewardFrom,
    RolloutModel,
    SandboxChoice,
    SeedFile,
    Solution,
    User,
    Verifier,
)
from penstock.client.tasks.yaml import YamlFile

_EMPTY: Mapping[str, Any] = {}  # no proxy: tasks are pickled for worker processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """An agent's task and its verification.

    `files` and `setup` are prepared once for all rollouts of the task; `metadata` (JSON values) is carried through to
    the trajectory. `sandbox`, `limits`, `budgets` and `labels` are its rollouts' defaults; a rollout's own values take
    precedence, field by field. `build` is the directory of the Dockerfile for its image, `companion_builds` are those
    for images of companions, by their names. `Task.load` reads a file.
    `keep_diff` keeps the agent's changes in its working directory as an artifact `changes.diff`, `keep_files` the small
    files that are there at the end (64 KiB each, one directory deep, 32) as `files/PATH`. `keep_end_state` is its
    rollouts' default of that option. Agents get `mcp_servers` beside those of the rollout's `AgentChoice`; an agent
    that cannot use MCP servers is refused. `models` are its rollouts' default of that option, and `user` sends their
    agent further instructions, unless the rollout names another.
    """

    task_id: str
    instruction: str
    files: Sequence[SeedFile] = ()
    setup: Sequence[Command] = ()
    verifier: Verifier | None = None
    env: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    metadata: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)
    sandbox: SandboxChoice | None = None
    limits: Limits | None = None
    budgets: Budgets | None = None
    labels: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    solution: Solution | None = None
    build: Path | None = None
    companion_builds: Mapping[str, Path] = field(default_factory=lambda: _EMPTY)
    keep_diff: bool = False
    keep_files: bool = False
    keep_end_state: bool | None = None
    mcp_servers: Sequence[McpServer] = ()
    models: Sequence[RolloutModel] = ()
    user: User | None = None

    @staticmethod
    def load(path: str | Path, *, files_from: Sequence[str | Path] = ()) -> "Task":
        """Reads a task from a YAML or JSON file, or from a directory with a `task.yaml`: docs/guides/tasks.md.

        The files that it names must be in its directory, or in one of `files_from`: their content goes to the agent.

        Raises:
            InvalidArgument: it cannot be read or is invalid; `violations` name the fields and lines.
        """
        return load_task(Path(path), map(Path, files_from))


def load_task(path: Path, files_from: Iterable[Path] = ()) -> Task:
    """Reads a task file, or the one of a task's directory; `files_from` as in `Task.load`.

    Raises:
        InvalidArgument: `TASK_FILE`; `violations` name the fields and lines.
    """
    if path.is_dir():
        path = task_file_of(path) or path / TASK_FILES[0]
    return build_task(YamlFile(path, files_from))


def build_task(source: YamlFile, content: Any = None) -> Task:
    """Builds the task of a file; `content`, made from the file's, replaces it.

    Raises:
        InvalidArgument: `TASK_FILE`; as `load_task`.
    """
    file = source.validated(TaskFile, "task", content)
    path, beside = source.path, source.beside
    try:
        instruction = file.instruction or read_text(beside, file.instruction_file or "")
    except CannotRead as error:
        raise refused("instruction_file", str(error)) from None
    build = None if file.build is None else path.parent / file.build
    verifier = None if file.verifier is None else _verifier(file.verifier, beside, "verifier.files")
    if verifier is not None and file.verifier is not None and file.verifier.build is not None:
        verifier = replace(verifier, build=path.parent / file.verifier.build)
    solution = None
    if file.solution is not None:
        commands = [item.made() for item in file.solution.commands]
        solution = Solution(commands=commands, files=_files(file.solution.files, beside, "solution.files"))
    return Task(
        task_id=file.task_id or identifier(_name(path)),
        instruction=instruction,
        files=_files(file.files, beside, "files"),
        setup=[item.made() for item in file.setup],
        verifier=verifier,
        env=file.env,
        metadata=file.metadata,
        sandbox=_sandbox(file, beside),
        limits=None if file.limits is None else file.limits.made(),
        budgets=None if file.budgets is None else file.budgets.made(),
        labels=file.labels,
        solution=solution,
        build=build,
        companion_builds={
            one.name: path.parent / one.build
            for one in (() if file.sandbox is None else file.sandbox.companions)
            if one.build is not None
        },
        keep_diff=file.keep_diff,
        keep_files=file.keep_files,
        keep_end_state=file.keep_end_state,
        mcp_servers=[server.made() for server in file.mcp_servers],
        models=[table.made() for table in file.models],
        user=None if file.user is None else file.user.made(),
    )


def load_user(path: Path) -> User:
    """Reads a user from a file that has what a task file has below `user`.

    Raises:
        InvalidArgument: `TASK_FILE`; as `load_task`.
    """
    return YamlFile(path).validated(UserTable, "user").made()


def build_verifier(source: YamlFile) -> Verifier:
    """Builds the verifier of a file that has what a task file has below `verifier`.

    Raises:
        InvalidArgument: `TASK_FILE`; as `load_task`.
    """
    file = source.validated(VerifierFile, "verifier")
    if file.build is not None:
        raise refused("build", "is for the verifier of a task file: name the image")
    return _verifier(file, source.beside, "files")


def _verifier(file: VerifierFile, beside: Beside, where: str) -> Verifier:
    return Verifier(
        commands=[item.made() for item in file.commands],
        files=_files(file.files, beside, where),
        reward=RewardFrom(file.reward),
        range=None if file.range is None else (file.range[0], file.range[1]),
        command_timeout=file.command_timeout,
        fresh_fork=file.fresh_fork,
        restore=file.restore,
        changes_below=file.changes_below,
        component_ranges={name: (low, high) for name, (low, high) in file.component_ranges.items()},
        image=file.image,
        resources=None if file.resources is None else file.resources.made(),
        copies=[CopiedPath(copied.path, copied.exclude) for copied in file.copies],
        collect=[item.made() for item in file.collect],
        user=file.user,
        judge=None if file.judge is None else file.judge.made(),
    )


def _sandbox(file: TaskFile, beside: Beside) -> SandboxChoice | None:
    if file.sandbox is not None:
        try:
            return file.sandbox.made(file.image, beside)
        except CannotRead as error:
            raise refused("sandbox.packages", str(error)) from None
    return SandboxChoice(image=file.image) if file.image else None


def _files(files: list[File], beside: Beside, where: str) -> list[SeedFile]:
    return [item for index, file in enumerate(files) for item in file.read(beside, f"{where}.{index}")]


def _name(path: Path) -> str:
    """Returns the name of a file's task: greet for both `greet/task.yaml` and `greet.yaml`."""
    own = path.absolute().parent.name if path.name in TASK_FILES else ""
    return own or path.stem
