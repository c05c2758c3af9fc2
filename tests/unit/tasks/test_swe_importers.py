"""SWE-bench and its relatives: what a record becomes, what is refused, and the graders run for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support import foreign_tasks

from penstock.client import InvalidArgument, Task
from penstock.client.tasks.spec import SandboxChoice
from penstock.tasks.importers import Choices, import_tasks
from penstock.tasks.importers import records as reading

PYTEST = f"env PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 {sys.executable} -m pytest"
PLAIN = "--- a/tests/test_a.py\n+++ b/tests/test_a.py\n@@ -1 +1 @@\n-a\n+b\n"
GIT = "diff --git a/tests/test_b.py b/tests/test_b.py\n" + PLAIN.replace("test_a", "test_b")
QUOTED = (
    'diff --git "a/tests/test_\\303\\244.py" "b/tests/test_\\303\\244.py"\n'
    '--- "a/tests/test_\\303\\244.py"\n+++ "b/tests/test_\\303\\244.py"\n@@ -1 +1 @@\n-a\n+b\n'
)


def imported(form: str, record: dict[str, Any], place: Path, choices: Choices | None = None) -> tuple[Task, list[str]]:
    """The task of one record, and its notes."""
    place.mkdir(exist_ok=True)
    (place / "records.json").write_text(json.dumps(record))
    (found,) = import_tasks(form, place / "records.json", place / "tasks", choices)
    assert found.folder is not None, found.problem
    return Task.load(found.folder), list(found.notes)


def refusal(form: str, record: dict[str, Any], place: Path, choices: Choices | None = None) -> str:
    """Why a record is refused; nothing is left of it."""
    (place / "records.json").write_text(json.dumps(record))
    (found,) = import_tasks(form, place / "records.json", place / "tasks", choices)
    assert found.folder is None and list((place / "tasks").iterdir()) == []
    return found.problem


def grading_of(task: Task) -> dict[str, Any]:
    """What the grader of a task is given."""
    assert task.verifier is not None
    found: dict[str, Any] = json.loads(next(f.content for f in task.verifier.files if f.path.endswith("task.json")))
    return found


def reward_of(task: Task, box: Path, *, solved: bool) -> dict[str, Any]:
    """Sets a task up in a repository that stands for its image's, works on it, and grades it as a verifier would."""
    assert task.verifier is not None and task.solution is not None
    for file in task.files:
        Path(file.path).write_bytes(file.content)
    for command in task.setup:
        argv = list(command.argv) or ["sh", "-c", command.shell or ""]
        env = {**os.environ, "HOME": str(box.parent), **command.env}
        subprocess.run(argv, cwd=command.cwd or None, env=env, check=True, capture_output=True)
    if solved:
        for file in task.solution.files:
            Path(file.path).write_bytes(file.content)
        for command in task.solution.commands:
            subprocess.run(list(command.argv), cwd=command.cwd, check=True)
    place = box.parent / "grade"
    place.mkdir(exist_ok=True)
    for file in task.verifier.files:
        target = place / Path(file.path).name if file.path.startswith("/tmp/penstock-grade/") else Path(file.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.content)
    # A test lists what is left in the repository.
    env = {**os.environ, "PENSTOCK_REWARD_FILE": str(place / "reward"), "PYTHONDONTWRITEBYTECODE": "1"}
    argv = [sys.executable, str(place / "swe_grade.py"), str(place / "task.json")]
    subprocess.run(argv, cwd=box, env=env, check=True, capture_output=True)
    found: dict[str, Any] = json.loads((place / "reward").read_text())
    return found


def in_its_image(box: Path) -> Choices:
    """Choices for a record whose image has the repository in this directory of the test's."""
    return Choices(user="", workdir=str(box), test_command=PYTEST)


def test_swe_bench_names_its_image_and_restores_tests_without_history(tmp_path: Path) -> None:
    """Issue 12, point 6: tests come from the prepared state, since the commit that has them is gone."""
    task, notes = imported("swe-bench", foreign_tasks.record("abc"), tmp_path)
    assert task.sandbox == SandboxChoice(image="swebench/sweb.eval.x86_64.kiwi_1776_sums-1:latest", user="root")
    assert task.verifier is not None and task.verifier.restore == ["/testbed/tests/test_sums.py"]
    assert (grading_of(task)["runner"], grading_of(task)["changed_files"], notes) == ("pytest", [], [])
    kept, _ = imported("swe-bench", foreign_tasks.record("abc"), tmp_path / "kept", Choices(history=True))
    assert kept.verifier is not None
    assert (list(kept.setup), list(kept.verifier.restore)) == ([], [])
    assert grading_of(kept)["changed_files"] == ["tests/test_sums.py"]


def test_swe_gym_records_have_images_of_their_own(tmp_path: Path) -> None:
    """Issue 12, point 6: the same form, another account of the registry."""
    task, _ = imported("swe-gym", foreign_tasks.record("abc"), tmp_path)
    assert task.sandbox is not None
    assert task.sandbox.image == "xingyaoww/sweb.eval.x86_64.kiwi_s_sums-1:latest"


@pytest.mark.requirement("R63")
@pytest.mark.parametrize(
    ("form", "change", "named"),
    [
        ("swe-bench", {"log_parser": "parse_log_jest"}, "log_parser parse_log_jest"),
        ("swe-bench", {"eval_type": "fail_only"}, "eval_type fail_only"),
        ("swe-bench", {"image_assets": {"test_patch": [{"path": "a.png", "url": "x"}]}}, "image_assets"),
        ("swe-bench", {"language": "go"}, "language go"),
        ("swe-bench", {"repo": "sympy/sympy", "FAIL_TO_PASS": ["a b"]}, "not a test of sympy"),
        ("swe-bench", {"FAIL_TO_PASS": ["../x/test_a.py::test_a"]}, "a test leads out"),
        ("swe-bench", {"FAIL_TO_PASS": ["-p::x"]}, "not the name of a file"),
        ("swe-bench", {"test_patch": "diff --git a/.git/x b/.git/x\n"}, "the test patch leads out"),
        ("swe-bench", {"test_patch": PLAIN}, "test_patch: tests/test_a.py has no 'diff --git' before it"),
        ("swe-bench", {"test_patch": QUOTED}, "test_patch: 'diff --git \"a/t"),
        ("swe-bench", {"test_patch": GIT + PLAIN}, "test_patch: tests/test_a.py has no"),
        ("swe-bench", {"test_patch": GIT.replace("a/", "").replace("b/", "")}, "test_patch: 'diff --git tests"),
        ("swe-bench", {"test_patch": "@@ -1 +1 @@\n-a\n+b\n"}, "test_patch: it names no file"),
        ("swe-rebench", {"test_patch": PLAIN}, "test_patch: tests/test_a.py has no"),
        ("swe-smith", {"patch": PLAIN}, "patch: tests/test_a.py has no"),
        ("swe-rebench", {"language": "c"}, "language c"),
        ("swe-rebench", {"install_config": {"log_parser": "parse_log_jq"}}, "install_config.log_parser parse_log_jq"),
        ("swe-rebench", {"install_config": {"test_cmd": "make test"}}, "does not run pytest"),
        ("swe-rebench", {"install_config": {"test_cmd": "pytest | tee x"}}, "more than one command"),
        ("swe-rebench", {"repo": "kiwi/..", "install_config": {}}, "repo must be OWNER/NAME"),
        ("swe-smith", {"patch": ""}, "no patch"),
        ("swe-smith", {"test_patch": "x"}, "test_patch"),
        ("r2e-gym", {"execution_result_content": ""}, "no execution_result_content"),
        (
            "r2e-gym",
            {"execution_result_content": {"test_file_names": ["../a.py"], "test_file_codes": ["x"]}},
            "not the name of a file",
        ),
        ("r2e-gym", {"expected_output_json": '{"test_a": "MAYBE"}'}, "'MAYBE' is none of"),
        (
            "r2e-gym",
            {
                "parsed_commit_content": {
                    "file_diffs": [{"header": {"file": {"path": "../a.py"}}, "new_file_content": "x"}]
                }
            },
            "parsed_commit_content leads out",
        ),
    ],
)
def test_fields_that_cannot_be_graded_are_refused_by_name(
    tmp_path: Path, form: str, change: dict[str, Any], named: str
) -> None:
    """Issue 12, point 6: a record that would be graded wrongly is no task."""
    made = {
        "swe-bench": foreign_tasks.record("abc"),
        "swe-rebench": foreign_tasks.rebench_record(),
        "swe-smith": foreign_tasks.smith_record(),
        "r2e-gym": foreign_tasks.r2e_record(),
    }[form]
    assert named in refusal(form, {**made, **change}, tmp_path)


@pytest.mark.requirement("R63")
def test_every_form_of_a_file_in_gits_patches_is_known(tmp_path: Path) -> None:
    """Lines of a hunk that look like headers, names with spaces, files that come, go, move or change their mode."""
    box = tmp_path / "box"
    content = {name: f"{name}\nvalue\n" * 9 for name in ("gone.py", "moved.py", "mode.py", "a b.py", "text.py")}
    foreign_tasks.write(box, content)
    commands = """
        git init -q . && git add -A && git -c user.name=a -c user.email=a@b commit -qm a
        printf '%s\n' '++ b/x' '-- a/x' >text.py; git rm -q gone.py; git mv moved.py new.py; chmod +x mode.py
        echo more >>'a b.py'; touch empty.py; printf 'a\\0b' >data.bin; echo 1 >added.py
        git add -A; git diff --cached --binary
    """
    done = subprocess.run(["sh", "-ec", commands], cwd=box, check=True, capture_output=True, text=True)
    task, _ = imported(
        "swe-bench", foreign_tasks.record("abc", test_patch=done.stdout), tmp_path, Choices(history=True)
    )
    grading = grading_of(task)
    assert grading["changed_files"] == ["a b.py", "gone.py", "mode.py", "moved.py", "text.py"]
    assert sorted(grading["new_files"]) == ["added.py", "data.bin", "empty.py", "new.py"]


@pytest.mark.requirement("R76")
@pytest.mark.parametrize("repo", ["django/django", "sympy/sympy"])
def test_a_command_for_pytest_is_not_for_other_runners(tmp_path: Path, repo: str) -> None:
    """Their reports come from their own runner: with another command, there is none."""
    record = foreign_tasks.record("abc", repo=repo, FAIL_TO_PASS=["test_add"], PASS_TO_PASS=[])
    task, notes = imported("swe-bench", record, tmp_path, Choices(test_command=PYTEST))
    runner = repo.partition("/")[0]
    assert f"{runner}_report.py" in grading_of(task)["test_command"]
    assert PYTEST not in grading_of(task)["test_command"]
    assert notes == [f"its tests are run by {runner}'s own runner: --test-command, which is pytest's, is not used"]


def test_a_record_without_its_image_is_refused_where_the_image_is_the_task(tmp_path: Path) -> None:
    """SWE-smith's and R2E-Gym's tasks are made of their image."""
    choices = Choices(image=False, repositories=tmp_path)
    for form, record in (("swe-smith", foreign_tasks.smith_record()), ("r2e-gym", foreign_tasks.r2e_record())):
        assert "made from its image" in refusal(form, record, tmp_path, choices)


def test_r2e_gym_needs_root_to_remove_what_its_image_shows(tmp_path: Path) -> None:
    """Its tests lie in directories of root's; left there, they would be the agent's to read."""
    assert "only root can remove" in refusal("r2e-gym", foreign_tasks.r2e_record(), tmp_path, Choices(user="agent"))


def test_what_a_record_says_beside_its_tests_is_reported(tmp_path: Path) -> None:
    """Issue 12, point 6: nothing is dropped silently."""
    record = foreign_tasks.record("abc", PASS_TO_PASS=["tests/test_sums.py::test_negate", "[100%]"])
    record["patch"] = "diff --git a/fast.pyx b/fast.pyx\n--- a/fast.pyx\n+++ b/fast.pyx\n@@ -1 +1 @@\n-a\n+b\n"
    task, notes = imported("swe-bench", record, tmp_path)
    assert grading_of(task)["pass_to_pass"] == ["tests/test_sums.py::test_negate"]
    assert [note.partition(":")[0] for note in notes] == [
        "PASS_TO_PASS",
        "its solution changes fast.pyx, and nothing is compiled again before the tests",
    ]


def test_swe_rebench_runs_the_command_of_its_record_in_its_directory(tmp_path: Path) -> None:
    """Issue 12, point 6: V2 has the repository in a directory of its name, the first edition in /testbed."""
    task, _ = imported("swe-rebench", foreign_tasks.rebench_record(), tmp_path)
    grading = grading_of(task)
    assert grading["workdir"] == "/sums"
    assert grading["test_command"].endswith(
        "export PYTHONDONTWRITEBYTECODE=1\npytest --no-header -rA --tb=line --color=no"
    )
    first = {key: value for key, value in foreign_tasks.rebench_record().items() if key != "language"}
    assert grading_of(imported("swe-rebench", first, tmp_path / "first")[0])["workdir"] == "/testbed"


@pytest.mark.requirement("R76")
def test_a_swe_smith_task_is_broken_in_one_commit_and_solved_by_the_reverse(tmp_path: Path) -> None:
    """Neither a difference nor an earlier or later commit shows the agent what was broken."""
    box = tmp_path / "box"
    foreign_tasks.repository(box)
    (box / "ignored.txt").write_text("stays")
    task, notes = imported("swe-smith", foreign_tasks.smith_record(), tmp_path / "made", in_its_image(box))
    assert notes == ["PASS_TO_PASS: 1 tests are in other files than FAIL_TO_PASS; as in SWE-smith, they are not run"]
    assert reward_of(task, box, solved=False)["reward"] == 0.0
    listed = subprocess.run(
        "git log --all --oneline | wc -l; git status --porcelain; git stash list; git remote; ls; "
        "git cat-file --batch-all-objects --batch-check | grep -c commit",
        shell=True, cwd=box, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    assert listed == ["1", "??", "ignored.txt", "ignored.txt", "pyproject.toml", "sums.py", "tests", "1"]
    assert task.verifier is not None and task.verifier.restore == [f"{box}/tests/test_sums.py"]

    again = tmp_path / "again" / "box"
    foreign_tasks.repository(again)
    solved, _ = imported("swe-smith", foreign_tasks.smith_record(), tmp_path / "other", in_its_image(again))
    assert reward_of(solved, again, solved=True)["reward"] == 1.0


def test_swe_smith_names_an_image_of_a_registry(tmp_path: Path) -> None:
    """Older records have the name that their maker's daemon had for it."""
    record = foreign_tasks.smith_record(image_name="swesmith.x86_64.kiwi__sums.0badc0de")
    task, _ = imported("swe-smith", record, tmp_path)
    assert task.sandbox is not None
    assert task.sandbox.image == "jyangballin/swesmith.x86_64.kiwi_1776_sums.0badc0de:latest"


@pytest.mark.requirement("R76")
@pytest.mark.parametrize("solved", [True, False])
def test_r2e_gym_compares_what_each_test_comes_to_and_hides_tests(tmp_path: Path, solved: bool) -> None:
    """A test that is expected to fail has to fail; tests that the image brings are not there for the agent."""
    box = tmp_path / "box"
    foreign_tasks.repository(box, at_base=True)
    foreign_tasks.write(box, {"r2e_tests/test_old.py": "answer = 1\n", "run_tests.sh": "true\n", ".venv/bin/x": ""})
    task, _ = imported("r2e-gym", foreign_tasks.r2e_record(), tmp_path / "made", replace(in_its_image(box), user=None))
    assert task.instruction == "add(1, 2) gives -1.\n"
    assert [file.path for file in task.files] == []
    removed = next(list(command.argv) for command in task.setup if command.argv[:2] == ("rm", "-rf"))
    assert {"/r2e_tests", "/root/r2e_tests", "/run_tests.sh", "r2e_tests", "parsed_commit.json"} < set(removed)
    # What is outside of the repository would be this machine's.
    setup = [
        replace(command, argv=[item for item in command.argv if not item.startswith(("/r", "/root"))])
        if command.argv[:2] == ("rm", "-rf")
        else command
        for command in task.setup
    ]
    found = reward_of(replace(task, setup=setup), box, solved=solved)
    assert found["reward"] == float(solved)
    assert found["components"]["as_expected"] == (1.0 if solved else 0.5)
    assert not (box / "run_tests.sh").exists() and not (box / "r2e_tests" / "test_old.py").exists()


RUNTESTS = """
import sys, unittest

class AddTests(unittest.TestCase):
    def test_add(self):
        import sums
        self.assertEqual(sums.add(1, 2), 3)

    def test_described(self):
        \"\"\"Negative numbers are negated.\"\"\"
        import sums
        self.assertEqual(sums.negate(-1), 1)

    def test_parts(self):
        import sums
        for value in (1, 2):
            with self.subTest(value=value):
                self.assertEqual(sums.add(value, 0), value)
                self.assertEqual(sums.add(0, value), value)

    @unittest.skip("not here")
    def test_skipped(self): ...

assert sys.argv[1:4] == ["--verbosity", "2", "--settings=test_sqlite"], sys.argv
suite = unittest.TestLoader().loadTestsFromTestCase(AddTests)
sys.exit(not unittest.TextTestRunner(verbosity=2).run(suite).wasSuccessful())
"""


@pytest.mark.requirement("R76")
@pytest.mark.parametrize("solved", [True, False])
def test_django_tests_are_reported_by_name_and_by_docstring(tmp_path: Path, solved: bool) -> None:
    """Issue 12, point 6: the names are those of SWE-bench; a subtest that fails fails its test."""
    box = tmp_path / "box"
    foreign_tasks.repository(box, at_base=True)
    hidden = foreign_tasks.TEST_PATCH
    record = foreign_tasks.record(
        "HEAD",
        repo="django/django",
        FAIL_TO_PASS=["test_add (__main__.AddTests)", "test_parts (__main__.AddTests)"],
        PASS_TO_PASS=["Negative numbers are negated.", "test_skipped (__main__.AddTests)"],
        test_patch=hidden,
    )
    foreign_tasks.write(box, {"tests/runtests.py": RUNTESTS})
    task, _ = imported("swe-bench", record, tmp_path / "made", replace(in_its_image(box), test_command=""))
    grading = grading_of(task)
    assert (grading["runner"], grading["test_files"]) == ("django", ["test_sums"])
    found = with_python(task, box, solved=solved)
    assert found == {
        "reward": float(solved),
        "components": {"fail_to_pass": float(solved), "pass_to_pass": 1.0, "resolved": float(solved)},
    }


SYMPY = """
import inspect, runpy

class PyTestReporter:
    def entering_test(self, function): ...
    def test_pass(self, char="."): ...
    def test_fail(self, exc_info): ...
    def test_exception(self, exc_info): ...
    def test_skip(self, v=None): ...
    def test_xfail(self): ...
    def test_xpass(self, v): ...

def test(*paths, subprocess=True, verbose=False):
    assert not subprocess and verbose
    reporter, good = PyTestReporter(), True
    for path in paths:
        for name, function in runpy.run_path(path).items():
            if name.startswith("test_") and inspect.isfunction(function):
                reporter.entering_test(function)
                try:
                    function()
                    reporter.test_pass()
                except AssertionError as error:
                    reporter.test_fail(error)
                    good = False
    return good
"""


@pytest.mark.requirement("R76")
@pytest.mark.parametrize("solved", [True, False])
def test_sympy_tests_are_reported_by_its_own_runner(tmp_path: Path, solved: bool) -> None:
    """Issue 12, point 6: SymPy's images have no pytest."""
    box = tmp_path / "box"
    foreign_tasks.repository(box, at_base=True)
    foreign_tasks.write(
        box, {"sympy/__init__.py": "", "sympy/testing/__init__.py": "", "sympy/testing/runtests.py": SYMPY}
    )
    tests = foreign_tasks.patch(
        "tests/test_sums.py",
        "from sums import add, negate\n\n\ndef test_add():\n    assert add(1, 2) == 3\n\n\n"
        "def test_negate():\n    assert negate(2) == -2\n",
    )
    record = foreign_tasks.record(
        "HEAD", repo="sympy/sympy", FAIL_TO_PASS=["test_add"], PASS_TO_PASS=["test_negate"], test_patch=tests
    )
    task, _ = imported("swe-bench", record, tmp_path / "made", replace(in_its_image(box), test_command=""))
    assert with_python(task, box, solved=solved)["components"] == {
        "fail_to_pass": float(solved),
        "pass_to_pass": 1.0,
        "resolved": float(solved),
    }


def with_python(task: Task, box: Path, *, solved: bool) -> dict[str, Any]:
    """As `reward_of`, in an image whose `python` is this one."""
    programs = box.parent / "bin"
    programs.mkdir()
    (programs / "python").symlink_to(sys.executable)
    path = os.environ["PATH"]
    os.environ["PATH"] = f"{programs}:{path}"
    os.environ["PYTHONPATH"] = str(box)
    try:
        return reward_of(task, box, solved=solved)
    finally:
        os.environ["PATH"] = path
        del os.environ["PYTHONPATH"]


def test_a_directory_of_shards_is_imported_and_tasks_are_chosen_by_pattern(tmp_path: Path) -> None:
    """Issue 12, point 6: a data set as it is downloaded, and a part of it."""
    shards = tmp_path / "data"
    shards.mkdir()
    for number in (1, 2):
        lines = [json.dumps(foreign_tasks.record("abc", instance_id=f"kiwi__sums-{number}{n}")) for n in range(2)]
        (shards / f"{number}.jsonl").write_text("\n".join(lines))
    (shards / "README.md").write_text("not a shard")
    found = import_tasks("swe-bench", shards, tmp_path / "out", Choices(only=["*-10", "kiwi__sums-21"]))
    assert [item.name for item in found] == ["kiwi__sums-10", "kiwi__sums-21"]


@pytest.mark.requirement("R145")
def test_records_beyond_a_bound_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines, lists and numbers of records that would fill the importer's memory."""
    line = json.dumps(foreign_tasks.record("abc"))
    for name, bound, content, named in (
        ("MAX_LINE_BYTES", 100, line, "a line of more than 100 bytes"),
        ("MAX_JSON_BYTES", 100, f"[\n{line}\n]", "a JSON file may have 100"),
        ("MAX_RECORDS", 1, f"{line}\n{line.replace('kiwi__', 'other__')}", "more than 1 records"),
    ):
        monkeypatch.setattr(reading, name, bound)
        source = tmp_path / ("r.json" if content.startswith("[") else "r.jsonl")
        source.write_text(content)
        with pytest.raises(InvalidArgument, match=named):
            import_tasks("swe-bench", source, tmp_path / name)
        monkeypatch.undo()


@pytest.mark.requirement("R147")
def test_a_pipe_is_no_file_of_records(tmp_path: Path) -> None:
    """It would block the importer."""
    os.mkfifo(tmp_path / "r.jsonl")
    with pytest.raises(InvalidArgument, match="not a regular file"):
        import_tasks("swe-bench", tmp_path / "r.jsonl", tmp_path / "out")
