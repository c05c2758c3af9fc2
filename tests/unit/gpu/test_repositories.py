"""The recipe's tasks: a fault that the hidden tests find, and code that they accept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from examples.gpu import repositories, tiny

from penstock.client import Task
from penstock.tasks.sets import load_tasks

MODULES = (*repositories.TRAINED, *repositories.HELD_OUT)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Task]:
    """All tasks by id, read as everybody reads them."""
    folder = tmp_path_factory.mktemp("tasks")
    ids = repositories.write(folder, MODULES)
    found = {task.task_id: task for task in load_tasks(folder).tasks}
    assert sorted(ids) == sorted(found)
    return found


def accepted(task: Task, folder: Path, source: str | None = None) -> bool:
    """Whether the verifier of a task accepts its repository, or one with another source, as a sandbox would run it."""
    assert task.verifier is not None
    folder.mkdir()
    for file in (*task.files, *task.verifier.files):
        place = folder / file.path
        place.parent.mkdir(parents=True, exist_ok=True)
        is_source = source is not None and file.path.startswith("src/")
        place.write_bytes(source.encode() if is_source and source is not None else file.content)
    (command,) = task.verifier.commands
    argv = [sys.executable, *command.argv[1:]]
    return subprocess.run(argv, cwd=folder, check=False, stderr=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_hidden_tests_find_the_fault_and_accept_the_code_without_it(
    written: Mapping[str, Task], tmp_path: Path, module: repositories.Module
) -> None:
    """Each module has at least one task."""
    task = written[f"{module.name}-1"]
    assert not accepted(task, tmp_path / "broken")
    assert accepted(task, tmp_path / "right", module.source)


def test_code_that_ends_the_verifier_s_process_is_refused(written: Mapping[str, Task], tmp_path: Path) -> None:
    """The agent's code runs where the expected values are not."""
    for number, source in enumerate(("import os\nos._exit(0)\n", "import sys\nprint('[]')\nsys.exit(0)\n")):
        assert not accepted(written["money-1"], tmp_path / str(number), source)


def test_every_fault_differs_and_the_tasks_are_the_same_each_time(written: Mapping[str, Task], tmp_path: Path) -> None:
    """TRL tells tasks apart by their instructions."""
    instructions = [task.instruction for task in written.values()]
    assert len(set(instructions)) == len(instructions) >= 30
    repositories.write(tmp_path / "again", MODULES)
    again = {task.task_id: task.instruction for task in load_tasks(tmp_path / "again").tasks}
    assert again == {name: task.instruction for name, task in written.items()}


def test_faults_are_found_without_a_loop_that_never_ends() -> None:
    """Each fault changes one place: the code with it is other code, and gives something for every case."""
    for module in MODULES:
        for _, broken in repositories.faults(module.source):
            assert broken != module.source and len(repositories.results(module, broken)) == len(module.expressions)


def test_the_tiny_model_s_command_mends_every_task_of_the_dry_run(tmp_path: Path) -> None:
    """Else nothing could be learned there."""
    settings = tiny.write(tmp_path / "made")
    for part in ("train", "test"):
        tasks = load_tasks(settings["tasks"] / part).tasks
        assert len(tasks) == 2
        for task in tasks:
            folder = tmp_path / task.task_id
            assert not accepted(task, folder)
            subprocess.run(tiny.COMMAND, shell=True, cwd=folder, check=True, env=dict(os.environ))
            source = (folder / "src" / f"{task.task_id.rpartition('-')[0]}.py").read_text()
            assert accepted(task, tmp_path / f"{task.task_id}-mended", source)
