"""What a task's author may have his file name: what lies in its directory, and nothing else of the user's machine."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.client import InvalidArgument, Task
from penstock.client.tasks.named_files import MAX_FILES, Beside, CannotRead
from penstock.client.tasks.yaml import MAX_NODES, YamlFile
from penstock.tasks.images import image_of
from penstock.tasks.importers import Choices, import_tasks
from penstock.tasks.sets import load_tasks

SECRET = "-----BEGIN PRIVATE KEY-----"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A user's directory with a secret of his, and a stranger's task in it."""
    (tmp_path / "key").write_text(SECRET)
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "id").write_text(SECRET)
    (tmp_path / "keys" / "Dockerfile").write_text("FROM scratch\n")
    (tmp_path / "task").mkdir()
    return tmp_path


def _task(home: Path, **fields: str) -> Path:
    given = {"instruction": "go", **fields}
    if "instruction_file" in fields:
        del given["instruction"]
    (home / "task" / "task.yaml").write_text("".join(f"{name}: {text}\n" for name, text in given.items()))
    return home / "task"


def _link(name: str, to: str) -> Callable[[Path], None]:
    return lambda home: (home / "task" / name).symlink_to(to if to.startswith(".") else home / to)


def _directory_with_link(to: str) -> Callable[[Path], None]:
    def make(home: Path) -> None:
        (home / "task" / "d").mkdir()
        (home / "task" / "d" / "a").write_text("a")
        (home / "task" / "d" / "leak").symlink_to(home / to)

    return make


def _nothing(home: Path) -> None:
    """The name alone leads out."""


OUTSIDE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "an absolute path": ("{home}/key", _nothing),
    "a path upwards": ("../key", _nothing),
    "a path in and out": ("d/../../key", _directory_with_link("key")),
    "an absolute directory": ("{home}/keys", _nothing),
    "a directory upwards": ("../keys", _nothing),
    "a link": ("leak", _link("leak", "key")),
    "a relative link": ("leak", _link("leak", "../key")),
    "a link to a directory": ("leak", _link("leak", "keys")),
    "a file below a link to a directory": ("leak/id", _link("leak", "keys")),
    "a link in a directory": ("d", _directory_with_link("key")),
    "a link to a directory in a directory": ("d", _directory_with_link("keys")),
    "a file of the machine": ("/etc/passwd", _nothing),
    "a device that never ends": ("/dev/zero", _nothing),
}


@pytest.mark.requirement("R147")
@pytest.mark.parametrize("case", OUTSIDE)
@pytest.mark.parametrize("field", ["files", "verifier", "solution", "instruction_file", "build"])
def test_paths_out_of_the_tasks_directory_are_refused(home: Path, case: str, field: str) -> None:
    """Absolute paths, '..', links, links inside of directories, for each field that names a file."""
    source, make = OUTSIDE[case]
    make(home)
    source = source.format(home=home)
    item = f"{{path: a, from: '{source}'}}"
    given = {
        "files": f"[{item}]",
        "verifier": f"{{commands: [x], files: [{item}]}}",
        "solution": f"{{commands: [x], files: [{item}]}}",
    }
    folder = _task(home, **{field: given.get(field, f"'{source}'")})
    with pytest.raises(InvalidArgument) as refused:
        Task.load(folder)
    (violation,) = refused.value.violations
    assert violation.field.split(".")[0] == field
    assert SECRET not in str(refused.value)


@pytest.mark.requirement("R147")
def test_paths_allowed_by_the_user_may_be_named(home: Path) -> None:
    """The user's choice, not the file's."""
    folder = _task(home, files="[{path: a, from: ../key}, {path: b, from: ../keys}]")
    task = Task.load(folder, files_from=[home])
    assert (task.files[0].path, task.files[0].content.decode()) == ("a", SECRET)
    assert {file.path for file in task.files} == {"a", "b/id", "b/Dockerfile"}
    assert load_tasks(home / "task", files_from=[home]).tasks[0].files == task.files
    with pytest.raises(InvalidArgument, match=r"--files-from"):
        Task.load(folder, files_from=[home / "keys"])


def test_links_that_stay_inside_are_followed(home: Path) -> None:
    """A repository has links, to directories too."""
    folder = _task(home, files="[{path: a, from: d}]")
    (folder / "d" / "real").mkdir(parents=True)
    (folder / "d" / "real" / "x.sh").write_text("x")
    (folder / "d" / "real" / "x.sh").chmod(0o755)
    (folder / "d" / "now").symlink_to("real")
    (folder / "d" / "y").symlink_to("real/x.sh")
    files = Task.load(folder).files
    assert [(file.path, file.content, file.mode) for file in files] == [
        (name, b"x", 0o755) for name in ("a/now/x.sh", "a/real/x.sh", "a/y")
    ]


@pytest.mark.requirement("R145", "R147")
@pytest.mark.parametrize("kind", ["pipe", "socket", "itself", "above", "broken"])
def test_blocking_or_endless_files_are_refused(home: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipes, sockets and links to themselves, named or met in a directory."""
    folder = _task(home, files="[{path: a, from: d}]")
    (folder / "d").mkdir()
    strange = folder / "d" / "strange"
    if kind == "pipe":
        os.mkfifo(strange)
    elif kind == "socket":
        monkeypatch.chdir(folder / "d")  # such a name has at most 108 bytes
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("strange")
    else:
        strange.symlink_to({"itself": "strange", "above": "../d", "broken": "nothing"}[kind])
    for source in ("d", "d/strange"):
        _task(home, files=f"[{{path: a, from: {source}}}]")
        if (kind, source) == ("above", "d/strange"):
            continue  # by this name it is a directory like any other, met again below itself
        with pytest.raises(InvalidArgument) as refused:
            Task.load(folder)
        assert refused.value.violations[0].field == "files.0.from"


@pytest.mark.requirement("R145")
def test_sizes_and_numbers_of_files_are_bounded(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with a hole of a terabyte is refused before it is read, and so is a directory of too many."""
    folder = _task(home, files="[{path: a, from: hole}]", build="context")
    (folder / "context").mkdir()
    (folder / "context" / "Dockerfile").write_text("FROM scratch\n")
    with (folder / "hole").open("wb") as hole:
        hole.truncate(1 << 40)
    with pytest.raises(InvalidArgument, match="at most 16777216 are allowed"):
        Task.load(folder)
    monkeypatch.setattr("penstock.client.tasks.named_files.MAX_FILES", 3)
    for name in "abcd":
        (folder / "context" / name).write_text(name)
    assert MAX_FILES > 3
    with pytest.raises(CannotRead, match="more than 3 files"):
        list(Beside(folder).tree("context"))
    monkeypatch.setattr("penstock.client.tasks.named_files.MAX_BYTES", 2)
    monkeypatch.setattr("penstock.client.tasks.named_files.MAX_FILES", 100)
    with pytest.raises(CannotRead, match="more than 2 bytes"):
        list(Beside(folder).tree("context"))


def test_the_name_of_an_image_is_what_it_was(home: Path) -> None:
    """A build that is there already is not made again because its files are read otherwise."""
    folder = _task(home, build=".")
    (folder / "Dockerfile").write_text("FROM scratch\n")
    (folder / "Dockerfile").chmod(0o644)
    (folder / "task.yaml").chmod(0o644)
    (folder / "link").symlink_to("Dockerfile")
    assert image_of(Task.load(folder)) == "penstock-task/task:caa5e1a97e37a0e1"


def test_a_repository_can_be_put_into_the_working_directory(home: Path) -> None:
    """The files of the directory lie in the working directory itself; a file cannot be put there."""
    folder = _task(home, files="[{path: ., from: repo}]")
    (folder / "repo" / ".git").mkdir(parents=True)
    (folder / "repo" / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (folder / "repo" / "a.py").write_text("a")
    assert [file.path for file in Task.load(folder).files] == [".git/HEAD", "a.py"]
    for item in (
        "{path: ., content: x}",
        "{path: ., from: repo/a.py}",
        "{path: ./, content: x}",
        "{path: /, from: repo}",
    ):
        with pytest.raises(InvalidArgument, match="must be the path of a file"):
            Task.load(_task(home, files=f"[{item}]"))
    with pytest.raises(InvalidArgument, match="outside of the task's directory"):
        Task.load(_task(home, files="[{path: ., from: ..}]"))


@pytest.mark.requirement("R147")
def test_a_link_among_a_sets_files_does_not_lead_out(home: Path) -> None:
    """A set's entry is a file of the set; a pipe is none."""
    tasks = home / "task"
    (tasks / "a.yaml").write_text("instruction: go\n")
    assert len(load_tasks(tasks)) == 1
    (home / "theirs.yaml").write_text("instruction: go\n")
    (tasks / "b.yaml").symlink_to(home / "theirs.yaml")
    with pytest.raises(InvalidArgument, match="outside of the task's directory"):
        load_tasks(tasks)
    assert len(load_tasks(tasks, files_from=[home])) == 2
    (tasks / "b.yaml").unlink()
    os.mkfifo(tasks / "c.yaml")
    with pytest.raises(InvalidArgument, match="not a regular file"):
        load_tasks(tasks)


BOMBS = {
    "a number in base 60": b"a: 1" + b":1" * 200_000,
    "a number in base 60 by its tag": b"a: !!int 1" + b":1" * 200_000,
    "a fraction in base 60": b"a: !!float 1" + b":1" * 5_000 + b".5",
    "values": b"[" + b"1," * 5_000_000 + b"]",
    "anchors": b"[" + b"&a 1," * 1_000_000 + b"]",
    "brackets": b"[" * 500_000,
    "keys": b"? " * 100_000,
    "a date after the last": b"a: !!timestamp 9999-12-31T23:59:59-23:59",
    "no truth value": b"a: !!bool maybe",
    "no number": b"a: !!int ''",
    "no date": b"a: !!timestamp soon",
    "a merge bomb": b"a0: &a0 {x: 1}\n" + b"".join(
        b"a%d: &a%d {<<: [%s]}\n" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 9)
    ),
}  # fmt: skip


@pytest.mark.requirement("R145")
@pytest.mark.parametrize("name", BOMBS)
def test_a_yaml_file_takes_bounded_steps_or_is_refused_by_name(home: Path, name: str) -> None:
    """And what no constructor takes is no traceback. A refusal names the file; a number in base 60 is text."""
    file = home / "bomb.yaml"
    file.write_bytes(BOMBS[name])
    if name in ("a number in base 60", "a date after the last"):
        content = YamlFile(file).content
        assert isinstance(content, dict) and (name != "a number in base 60" or content["a"].startswith("1:1:1"))
        return
    with pytest.raises(InvalidArgument) as refused:
        YamlFile(file)
    assert refused.value.reason == "TASK_FILE" and refused.value.violations[0].field == str(file)
    assert MAX_NODES == 200_000


@pytest.mark.requirement("R145")
def test_imported_terminal_bench_task_is_read_within_task_file_bounds(home: Path) -> None:
    """One task of a source is refused, with the reason, and the others are imported."""
    for folder, text in (("bomb", BOMBS["a merge bomb"]), ("fine", b"instruction: go\n")):
        (home / "source" / folder).mkdir(parents=True)
        (home / "source" / folder / "task.yaml").write_bytes(text)
        (home / "source" / folder / "run-tests.sh").write_text("true\n")
        (home / "source" / folder / "Dockerfile").write_text("FROM scratch\n")
    bomb, fine = import_tasks("terminal-bench", home / "source", home / "made", Choices())
    assert bomb.folder is None and "more than 200000 values" in bomb.problem
    assert fine.folder is not None


@pytest.mark.requirement("R147")
@pytest.mark.parametrize(
    "repo", ["{home}/private/clone", "../private/clone", "a/../../private", "./clone", "clone", "o/link", "/"]
)
def test_a_record_does_not_lead_out_of_the_directory_of_clones(home: Path, repo: str) -> None:
    """OWNER/NAME of letters, digits, '.', '_' and '-', resolved and compared."""
    (home / "private" / "clone" / ".git").mkdir(parents=True)
    (home / "clones" / "o").mkdir(parents=True)
    (home / "clones" / "o" / "link").symlink_to(home / "private" / "clone")
    record = {
        "instance_id": "x", "problem_statement": "go", "base_commit": "HEAD", "repo": repo.format(home=home),
        "FAIL_TO_PASS": ["a.py::test_a"], "PASS_TO_PASS": [],
    }  # fmt: skip
    (home / "records.jsonl").write_text(json.dumps(record))
    (found,) = import_tasks("swe", home / "records.jsonl", home / "made", Choices(repositories=home / "clones"))
    assert found.folder is None and ("OWNER/NAME" in found.problem or "no clone of" in found.problem), found


@pytest.mark.requirement("R145")
def test_a_link_to_a_directory_in_an_imported_task_is_refused(home: Path) -> None:
    """Two links to the directory that they are in would be copied without end."""
    tests = home / "source" / "t" / "tests"
    tests.mkdir(parents=True)
    (tests / "again").symlink_to(".")
    (home / "source" / "t" / "task.yaml").write_text("instruction: go\n")
    (home / "source" / "t" / "run-tests.sh").write_text("true\n")
    (home / "source" / "t" / "Dockerfile").write_text("FROM scratch\n")
    (found,) = import_tasks("terminal-bench", home / "source", home / "made", Choices())
    assert found.folder is None and "link to a directory" in found.problem
