"""Harbor's registries: tasks of a clone at the commit that is named, and nothing from anywhere else."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.support import foreign_tasks

from penstock.client import InvalidArgument, Task
from penstock.tasks.importers import Choices, import_tasks
from penstock.tasks.importers import git as clones

URL = "https://github.com/kiwi/sum-tasks.git"


@pytest.fixture
def commit(tmp_path: Path) -> str:
    """A clone with two commits of a task; the first one's id."""
    clone = tmp_path / "clones" / "kiwi__sum-tasks"
    foreign_tasks.harbor(clone / "tasks" / "sum", more='docker_image = "a:1"\n')
    git = ["git", "-C", str(clone), "-c", "user.name=kiwi", "-c", "user.email=kiwi@localhost"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    first = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (clone / "tasks" / "sum" / "instruction.md").write_text("Something else.\n")
    subprocess.run([*git, "commit", "-q", "-a", "-m", "two"], check=True)
    return first


def registry(place: Path, **changes: Any) -> Path:
    """A registry of two data sets; the first has one task."""
    task = {"name": "sum", "git_url": URL, "path": "tasks/sum", **changes}
    sets = [
        {"name": "sums", "version": "2.0", "description": "", "tasks": [task]},
        {"name": "others", "version": "1.0", "description": "", "tasks": []},
    ]
    (place / "registry.json").write_text(json.dumps(sets))
    return place / "registry.json"


def test_a_task_of_a_registry_is_that_of_the_commit_it_names(tmp_path: Path, commit: str) -> None:
    """Issue 12, point 6: what the clone has checked out does not matter."""
    source = registry(tmp_path, git_commit_id=commit)
    choices = Choices(dataset="sums@2.0", repositories=tmp_path / "clones")
    (found,) = import_tasks("harbor", source, tmp_path / "out", choices)
    assert found.folder is not None, found.problem
    task = Task.load(found.folder)
    assert (task.task_id, task.instruction[:13]) == ("sum", "Write the sum")
    assert task.verifier is not None
    assert next(file.mode for file in task.verifier.files if file.path == "/tests/test.sh") == 0o755


@pytest.mark.requirement("R147")
@pytest.mark.parametrize("path", ["tasks/sum", ""])
def test_nothing_that_a_clone_is_configured_to_run_is_run(tmp_path: Path, commit: str, path: str) -> None:
    """Filters of its attributes, and its monitor: a directory of clones may come from somebody else."""
    clone, ran = tmp_path / "clones" / "kiwi__sum-tasks", tmp_path / "ran"
    (clone / "tasks" / "sum" / ".gitattributes").write_text("* filter=run\n")
    for command in (
        ["add", "-A"],
        ["-c", "user.name=k", "-c", "user.email=k@localhost", "commit", "-q", "-m", "three"],
    ):
        subprocess.run(["git", "-C", str(clone), *command], check=True)
    for key in ("filter.run.smudge", "core.fsmonitor", "core.pager", "core.sshCommand"):
        subprocess.run(["git", "-C", str(clone), "config", key, f"touch {ran}; cat"], check=True)
    (tmp_path / "tree").mkdir()
    clones.extract(clone, "HEAD", path, tmp_path / "tree")
    assert (tmp_path / "tree" / ("instruction.md" if path else "tasks/sum/instruction.md")).read_text()
    assert not ran.exists()


def test_a_data_set_of_a_registry_has_to_be_chosen(tmp_path: Path) -> None:
    """The error has their names."""
    with pytest.raises(InvalidArgument, match=r"choose one by --dataset: others@1\.0, sums@2\.0"):
        import_tasks("harbor", registry(tmp_path), tmp_path / "out")


@pytest.mark.requirement("R147")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"path": "../../etc"}, "is not a folder of the repository"),
        ({"path": "/etc"}, "is not a folder of the repository"),
        ({"path": "tasks/absent"}, "tasks/absent"),
        ({"git_url": "file:///etc"}, "no address of a repository"),
        ({"git_url": "https://github.com/kiwi/.."}, "no address of a repository"),
        ({"git_url": "ext::sh -c x"}, "no address of a repository"),
        ({"git_url": "https://github.com/kiwi/absent"}, "git clone https://github.com/kiwi/absent"),
        ({"git_commit_id": "--upload-pack=x"}, "is not a commit's id"),
        ({"git_commit_id": "0" * 40}, "has no commit 0000000000"),
        ({"git_url": None, "path": "clones"}, "task.toml"),
    ],
)
@pytest.mark.usefixtures("commit")
def test_a_registry_leads_to_no_other_place(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    """Neither on this machine nor, since nothing is downloaded, elsewhere."""
    choices = Choices(dataset="sums", repositories=tmp_path / "clones")
    (found,) = import_tasks("harbor", registry(tmp_path, **change), tmp_path / "out", choices)
    assert found.folder is None
    assert named in found.problem


@pytest.mark.requirement("R145")
def test_a_folder_of_a_clone_that_is_too_large_is_refused(
    tmp_path: Path, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any of it is written."""
    monkeypatch.setattr(clones, "MAX_BYTES", 100)
    choices = Choices(dataset="sums", repositories=tmp_path / "clones")
    (found,) = import_tasks("harbor", registry(tmp_path, git_commit_id=commit), tmp_path / "out", choices)
    assert "that is too much" in found.problem


@pytest.mark.requirement("R63")
def test_tasks_that_a_data_set_lists_and_lacks_are_named(tmp_path: Path) -> None:
    """A download that was cut short is not half a benchmark without a word."""
    foreign_tasks.harbor(tmp_path / "set" / "sum", more='docker_image = "a:1"\n')
    names = "".join(f'[[tasks]]\nname = "kiwi/{name}"\ndigest = "sha256:0"\n' for name in ("sum", "product"))
    (tmp_path / "set" / "dataset.toml").write_text(f'[dataset]\nname = "kiwi/sums"\n{names}')
    found = import_tasks("terminal-bench-2", tmp_path / "set", tmp_path / "out")
    assert [(item.name, item.problem.partition(",")[0]) for item in found] == [
        ("sum", ""),
        ("product", "dataset.toml lists it"),
    ]
