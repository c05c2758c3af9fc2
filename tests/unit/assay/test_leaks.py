"""The search for the answer, run as it runs in a sandbox: in a directory, with a home of its own."""

from __future__ import annotations

import gzip
import io
import os
import py_compile
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.assay import leaks
from penstock.assay.model import Code
from penstock.client import SeedFile, Task, Verifier
from penstock.client.tasks.spec import Command, Solution

SOLVED = "def weigh(values):\n    total = sum(values)\n    return total / len(values) if values else None\n"
BROKEN = "def weigh(values):\n    return values\n"
DIFF = (
    "diff --git a/src/scale.py b/src/scale.py\n--- a/src/scale.py\n+++ b/src/scale.py\n@@ -1,2 +1,3 @@\n"
    " def weigh(values):\n-    return values\n+    total = sum(values)\n"
    "+    return total / len(values) if values else None\n"
)
TASK = Task(
    task_id="scale",
    instruction="Weigh.",
    files=[SeedFile("src/scale.py", BROKEN.encode())],
    verifier=Verifier(
        commands=[Command(argv=["python3", "hidden/test_scale.py"])],
        files=[SeedFile("hidden/test_scale.py", b"import scale\nassert scale.weigh([1, 3]) == 2\n")],
    ),
    solution=Solution(commands=[Command(argv=["true"])], files=[SeedFile("src/scale.py", SOLVED.encode())]),
)


def looked(folder: Path, task: Task = TASK, diff: str = DIFF) -> dict[Code, str]:
    """What the search finds in a directory, with the evidence."""
    return {finding.code: finding.evidence for finding in leaks.findings(reported(folder, task, diff))}


def reported(folder: Path, task: Task = TASK, diff: str = DIFF) -> list[str]:
    """The lines of the search of a directory."""
    home = folder.parent / "home"
    home.mkdir(exist_ok=True)
    # Everything but the directory and the home is other tests' and the machine's own.
    script = leaks.script(task, diff)
    start, _, rest = script.partition("<<'PENSTOCK_END'\n")
    program = rest.removesuffix("\nPENSTOCK_END\n").replace(', "/tmp", "/var/tmp", "/"]', "]")
    done = subprocess.run(
        ["sh", "-c", f"{start}<<'PENSTOCK_END'\n{program}\nPENSTOCK_END\n"],
        cwd=folder,
        env={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(home)},
        capture_output=True,
        text=True,
        check=True,
    )
    reports = [line for line in done.stdout.splitlines() if line.startswith("PENSTOCK ")]
    assert leaks.size(reports) is not None, done.stderr
    return reports


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """The prepared working directory."""
    folder = tmp_path / "work"
    (folder / "src").mkdir(parents=True)
    (folder / "src/scale.py").write_text(BROKEN)
    return folder


def packed(folder: Path) -> None:
    content = SOLVED.encode()
    with tarfile.open(folder / "old.tar.gz", "w:gz") as archive:
        item = tarfile.TarInfo("src/scale.py")
        item.size = len(content)
        archive.addfile(item, io.BytesIO(content))


def zipped(folder: Path) -> None:
    with zipfile.ZipFile(folder / "scale-2.0-py3-none-any.whl", "w") as archive:
        archive.writestr("scale.py", SOLVED)


def placed(path: Path, text: str = SOLVED) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


LEFT: dict[str, Callable[[Path], object]] = {
    "a copy": lambda folder: (folder / "scale.py.bak").write_text(SOLVED),
    "a patch": lambda folder: (folder / "x.patch").write_text(DIFF),
    "a file of the home": lambda folder: placed(folder.parent / "home/x"),
    "a hidden directory": lambda folder: placed(folder / ".a/b", SOLVED.replace("    ", "\t")),
    "an archive": packed,
    "a wheel": zipped,
    "a compressed file": lambda folder: (folder / "x.gz").write_bytes(gzip.compress(SOLVED.encode())),
}


@pytest.mark.requirement("R138")
@pytest.mark.parametrize("how", LEFT)
def test_a_solution_left_in_the_sandbox_is_found(prepared: Path, how: str) -> None:
    LEFT[how](prepared)
    assert Code.ANSWER_IN_VIEW in looked(prepared)


@pytest.mark.requirement("R138")
def test_a_sandbox_without_the_answer_has_no_finding(prepared: Path) -> None:
    """Other code, and text with a few of its words."""
    (prepared / "README").write_text("weigh() is total / len(values)\n")
    assert looked(prepared) == {}


@pytest.mark.requirement("R138")
@pytest.mark.parametrize(
    ("commands", "code"),
    [
        ("git commit -qam b && git branch later && git reset -q --hard HEAD~1", Code.ANSWER_IN_GIT),
        ("git stash -q", Code.ANSWER_IN_GIT),
        ("git add -A && git reset -q --hard", Code.ANSWER_IN_GIT),
        ("git commit -qam b && git reset -q --hard HEAD~1 && git repack -qad", Code.ANSWER_IN_GIT),
        (
            "git commit -qam b && git tag v2 && git reset -q --hard HEAD~1 && git pack-refs --all && git gc -q",
            Code.ANSWER_IN_GIT,
        ),
        ("git commit -qam b && git checkout -q HEAD~1 -- . && git commit -qam c", Code.ANSWER_IN_GIT),
        (
            "git checkout -q -- . && git checkout -qb other && git commit -q --allow-empty -m d && git checkout -q -",
            Code.OTHER_COMMITS,
        ),
    ],
)
def test_a_solution_in_any_object_of_git_is_found(prepared: Path, commands: str, code: Code) -> None:
    """Branches, stashes, packed and loose objects, refs or none, and the history before HEAD."""
    git = "git -c user.name=a -c user.email=a@b"
    begin = f"git init -q . && git add -A && {git} commit -qm a"
    line = f'{begin} && printf %s "$SOLVED" >src/scale.py && {commands}'.replace("git commit", f"{git} commit")
    line = line.replace("git stash", f"{git} stash").replace(f"{git} commit -qm a", f"{git} commit -qm a", 1)
    environment = {**os.environ, "SOLVED": SOLVED, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(["sh", "-ec", line], cwd=prepared, env=environment, check=True, capture_output=True)
    (prepared / "src/scale.py").write_text(BROKEN)
    assert code in looked(prepared)


@pytest.mark.requirement("R138")
@pytest.mark.parametrize("form", ["sha1", "sha256"])
@pytest.mark.parametrize("place", [".", "--bare ../home/kept.git"])
def test_a_solution_in_the_tree_of_head_that_is_not_in_its_file_is_found(prepared: Path, place: str, form: str) -> None:
    """The agent takes it by one checkout."""
    (prepared / "src/scale.py").write_text(SOLVED)
    (prepared / "src/näher.py").write_text(SOLVED)
    line = f"git init -q --object-format={form} . && git add -A && git -c user.name=a -c user.email=a@b commit -qm a"
    if place != ".":
        line += f" && git clone -q --bare . {place.split()[1]} && rm -rf .git"
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(["sh", "-ec", line], cwd=prepared, env=environment, check=True, capture_output=True)
    for name in ("scale", "näher"):
        (prepared / f"src/{name}.py").write_text(BROKEN)
    assert set(looked(prepared)) == {Code.ANSWER_IN_GIT}


@pytest.mark.requirement("R138")
def test_a_file_that_is_as_in_head_is_searched_once(prepared: Path) -> None:
    """It is found as a file, not as an object of git too."""
    (prepared / "src/other.py").write_text(SOLVED)
    line = "git init -q . && git add -A && git -c user.name=a -c user.email=a@b commit -qm a"
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(["sh", "-ec", line], cwd=prepared, env=environment, check=True, capture_output=True)
    assert set(looked(prepared)) == {Code.ANSWER_IN_VIEW}


@pytest.mark.requirement("R138")
def test_harmless_reports_hide_neither_the_answer_nor_the_end(prepared: Path) -> None:
    """Pointers of LFS that are named as archives are; and files of the verifier that are shown."""
    assert TASK.verifier is not None
    for number in range(300):
        (prepared / f"data{number}.zip").write_text("version https://git-lfs.github.com/spec/v1\n")
        (prepared / f"seen{number}.py").write_bytes(TASK.verifier.files[0].content)
    (prepared / "src/old.py").write_text(SOLVED)
    (prepared / "src/same.csv").write_bytes(b"name,total\nada,3\nbob,12\ncy,99\nmore,1\n")
    wanted = SeedFile("expected.csv", (prepared / "src/same.csv").read_bytes())
    task = replace(TASK, verifier=replace(TASK.verifier, files=[*TASK.verifier.files, wanted]))
    reports = reported(prepared, task)
    found = list(leaks.findings(reports))
    assert {finding.code for finding in found} == {Code.VIEW_NOT_READ, Code.VERIFIER_IN_VIEW, Code.ANSWER_IN_VIEW}
    defects = {Path(finding.evidence).name for finding in found if finding.code is Code.ANSWER_IN_VIEW}
    assert defects == {"old.py", "same.csv"}
    assert "the search of the sandbox did not end" not in {finding.message for finding in found}
    assert len(reports) < 500


@pytest.mark.requirement("R138")
def test_a_search_that_did_not_end_is_a_finding_whatever_else_it_saw() -> None:
    """A file that was not read is another matter."""
    reports = ['PENSTOCK {"kind":"unread","where":"/w/a.zip","why":"BadZipFile"}']
    messages = [finding.message for finding in leaks.findings(reports)]
    assert messages == ["/w/a.zip was not searched: BadZipFile", "the search of the sandbox did not end"]


@pytest.mark.requirement("R138")
def test_bytecode_of_another_source_is_found_and_its_own_is_not(prepared: Path) -> None:
    source = prepared / "src/scale.py"
    py_compile.compile(str(source))
    assert looked(prepared) == {}
    source.write_text(SOLVED)
    py_compile.compile(str(source))
    source.write_text(BROKEN)
    assert Code.BYTECODE_DIFFERS in looked(prepared)


def test_data_of_the_verifier_is_an_answer_and_its_code_a_warning(prepared: Path) -> None:
    """Expected outputs give the task away; tests are often shown on purpose."""
    assert TASK.verifier is not None
    (prepared / "seen.py").write_bytes(TASK.verifier.files[0].content)
    assert set(looked(prepared)) == {Code.VERIFIER_IN_VIEW}
    wanted = SeedFile("expected.csv", b"name,total\nada,3\nbob,12\ncy,99\nmore,1\n")
    task = replace(TASK, verifier=replace(TASK.verifier, files=[wanted]))
    (prepared / "seen.py").write_bytes(wanted.content)
    assert set(looked(prepared, task)) == {Code.ANSWER_IN_VIEW}


def test_lines_that_the_task_gives_are_no_leak(prepared: Path) -> None:
    """A file to be sorted has all the lines of the answer."""
    names = [f"name of the row {number}" for number in (7, 3, 9, 1)]
    given = SeedFile("rows.txt", "".join(f"{name}\n" for name in names).encode())
    (prepared / "rows.txt").write_bytes(given.content)
    diff = "diff --git a/out.txt b/out.txt\n--- /dev/null\n+++ b/out.txt\n@@ -0,0 +1,4 @@\n"
    diff += "".join(f"+{name}\n" for name in sorted(names))
    assert looked(prepared, replace(TASK, files=[given]), diff) == {}


def test_a_sandbox_without_python_is_reported_as_not_read(tmp_path: Path) -> None:
    """Nothing known is never nothing found."""
    shell = subprocess.run(["sh", "-c", "command -v sh"], capture_output=True, text=True, check=True).stdout.strip()
    done = subprocess.run(
        [shell, "-c", leaks.script(TASK, DIFF)], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert [finding.code for finding in leaks.findings(done.stdout.splitlines())] == [Code.VIEW_NOT_READ]
    assert [finding.code for finding in leaks.findings([])] == [Code.VIEW_NOT_READ]
