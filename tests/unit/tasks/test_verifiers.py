"""Verifiers for ended rollouts: of a file of their own, of a task file, of several tasks."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.tasks.test_sets import write

from penstock.client import InvalidArgument, RewardFrom, SeedFile, Verifier
from penstock.tasks.sets import load_tasks
from penstock.tasks.verifiers import load_verifiers

pytestmark = pytest.mark.requirement("R140")
ALONE = """
reward: file
range: [0, 2]
files: [{path: check.sh, from: check.sh}]
commands: ['bash check.sh']
restore: [tests]
"""


def test_a_verifier_in_a_file_of_its_own_is_that_of_a_task_file(tmp_path: Path) -> None:
    """With the files that it names, beside it."""
    task = "instruction: Do it.\nverifier:\n" + "".join(f"  {line}\n" for line in ALONE.strip().splitlines())
    write(tmp_path, {"v2.yaml": ALONE, "task.yaml": task, "check.sh": "exit 0\n"})
    found = load_verifiers(tmp_path / "v2.yaml")
    assert isinstance(found, Verifier)
    assert found == load_verifiers(tmp_path / "task.yaml") == load_tasks(tmp_path / "task.yaml").tasks[0].verifier
    assert (found.reward, found.range, list(found.restore)) == (RewardFrom.FILE, (0.0, 2.0), ["tests"])
    assert [(file.path, file.content) for file in found.files] == [("check.sh", b"exit 0\n")]
    assert isinstance(found.files[0], SeedFile)


def test_several_tasks_have_their_verifiers_by_their_ids(tmp_path: Path) -> None:
    write(tmp_path, {f"{name}.yaml": f"instruction: x\nverifier: {{commands: [{name}]}}\n" for name in ("ant", "bee")})
    found = load_verifiers(tmp_path)
    assert not isinstance(found, Verifier)
    assert {name: [command.shell for command in one.commands] for name, one in found.items()} == {
        "ant": ["ant"],
        "bee": ["bee"],
    }


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"v.yaml": "commands: ['true']\nrewrad: file\n"}, ["rewrad"]),
        ({"v.yaml": "commands: []\n"}, ["commands"]),
        ({"v.yaml": "commands: ['true']\nfiles: [{path: a, from: ../b}]\n"}, ["files.0.from"]),
        ({"v.yaml": "instruction: x\n"}, ["v: verifier"]),
    ],
    ids=["key", "nothing", "outside", "task without one"],
)
def test_what_is_wrong_with_a_verifier_names_its_field(tmp_path: Path, files: dict[str, str], named: list[str]) -> None:
    write(tmp_path, files)
    with pytest.raises(InvalidArgument) as refused:
        load_verifiers(tmp_path / "v.yaml")
    assert [one.field for one in refused.value.violations] == named


def test_files_of_another_directory_must_be_allowed(tmp_path: Path) -> None:
    write(tmp_path, {"v/v.yaml": "commands: ['true']\nfiles: [{path: a, from: ../shared/b}]\n", "shared/b": "b"})
    with pytest.raises(InvalidArgument):
        load_verifiers(tmp_path / "v" / "v.yaml")
    found = load_verifiers(tmp_path / "v" / "v.yaml", files_from=[tmp_path / "shared"])
    assert isinstance(found, Verifier) and found.files[0].content == b"b"
