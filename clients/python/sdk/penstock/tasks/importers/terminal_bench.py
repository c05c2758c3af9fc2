"""Terminal-Bench's first task format: task.yaml, Dockerfile, run-tests.sh, tests/, solution.sh or solution.yaml.

Kept: run-tests.sh and tests/ are in /tests, whose path is in TEST_DIR; a task passes if pytest's summary of the output
(`-rA`) has tests and none that failed. Harbor's format has its own importer.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from penstock.tasks.importers import compose
from penstock.tasks.importers.common import (
    GRADER_FOLDER,
    Choices,
    Folder,
    Imported,
    Refused,
    directories,
    fetches,
    manifest,
    solution_place,
    yaml_of,
)
from penstock.tasks.importers.companion_grading import put_grading
from penstock.tasks.importers.dockerfile import put_environment

_TEST_SECONDS: Final = 60.0
_AGENT_SECONDS: Final = 360.0
_OF_THE_FORM: Final = frozenset(
    {"task.yaml", "Dockerfile", compose.NAME, "run-tests.sh", "tests", "solution.sh", "solution.yaml"}
)


def import_all(source: Path, destination: Path, choices: Choices) -> Iterator[Imported]:
    """Imports the chosen task directories of a source."""
    for path in directories(source, "task.yaml"):
        if choices.selects(path.name):
            folder = Folder(destination, path.name)
            yield folder.filled(partial(_fill, folder, path, choices))


def _fill(folder: Folder, source: Path, choices: Choices) -> None:
    config = yaml_of(source / "task.yaml")
    if not isinstance(config, dict) or not isinstance(config.get("instruction"), str):
        raise Refused("task.yaml has no instruction")
    parser = config.get("parser_name", "pytest")
    if parser != "pytest":
        raise Refused(f"parser_name {parser}: only pytest's summaries are supported")
    if config.get("run_tests_in_same_shell"):
        raise Refused("run_tests_in_same_shell: the agent's shell is dead when the tests run")
    if not (source / "run-tests.sh").is_file():
        raise Refused("it has no run-tests.sh")
    folder.content["instruction"] = config["instruction"]
    workdir = _put_environment(folder, source, choices)
    if (file := source / compose.NAME).exists():
        compose.put_companions(folder, file, "client", choices)
    test_seconds = float(config.get("max_test_timeout_sec", _TEST_SECONDS))
    folder.content["limits"] = {
        "agent": float(config.get("max_agent_timeout_sec", _AGENT_SECONDS)),
        "verify": test_seconds + 30.0,
    }
    tests = folder.path / "tests"
    if (source / "tests").is_dir():
        folder.copy(source / "tests", "tests")
    else:
        tests.mkdir()
    folder.copy(source / "run-tests.sh", "tests/run-tests.sh")
    (tests / "run-tests.sh").chmod(0o755)
    command: dict[str, Any] = {
        "argv": ["sh", f"{GRADER_FOLDER}/terminal_bench.sh", choices.reward],
        "env": {**folder.content.get("env", {}), "TEST_DIR": "/tests"},
        "timeout": test_seconds,
    }
    if workdir:
        command["cwd"] = workdir
    folder.content["verifier"] = {
        "files": [
            {"path": f"{GRADER_FOLDER}/terminal_bench.sh", "from": folder.program("terminal_bench.sh")},
            {"path": f"{GRADER_FOLDER}/manifest", "from": folder.write("manifest", manifest(tests))},
            {"path": "/tests", "from": "tests"},
        ],
        "commands": [command],
        "reward": "file",
    }
    put_grading(folder, source / "Dockerfile", tests)
    _put_solution(folder, source, workdir)
    kept = ("difficulty", "category", "tags", "author_name", "author_email")
    folder.content["metadata"] = {"format": "terminal-bench", **{key: config[key] for key in kept if key in config}}
    folder.notes += fetches(source / "run-tests.sh", source / "solution.sh")


def _put_environment(folder: Folder, source: Path, choices: Choices) -> str:
    """Copies the build context without the tests and the solution beside it: neither may get into the image."""
    if not (source / "Dockerfile").is_file():
        raise Refused("it has no Dockerfile")
    context = folder.path / ".context"
    context.mkdir()
    for path in source.iterdir():
        if path.name == "Dockerfile" or path.name not in _OF_THE_FORM:
            folder.copy(path, f".context/{path.name}")
    try:
        return put_environment(folder, context, "", choices)
    finally:
        _remove(context)


def _remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()
    folder.rmdir()


def _put_solution(folder: Folder, source: Path, workdir: str) -> None:
    path = f"{solution_place(folder.content, '/oracle')}/solution.sh"
    command: dict[str, Any] = {"argv": ["bash", path]} | ({"cwd": workdir} if workdir else {})
    if (source / "solution.sh").is_file():
        folder.copy(source / "solution.sh", "solution.sh")
    elif (source / "solution.yaml").is_file():
        steps = yaml_of(source / "solution.yaml") or []
        if not all(isinstance(step, dict) and step.get("append_enter", True) for step in steps):
            folder.notes.append("solution.yaml presses keys in a terminal, which is not supported; it was left out")
            return
        folder.write("solution.sh", "".join(f"{step['command']}\n" for step in steps))
    else:
        return
    folder.content["solution"] = {
        "files": [{"path": path, "from": "solution.sh"}],
        "commands": [command],
    }
