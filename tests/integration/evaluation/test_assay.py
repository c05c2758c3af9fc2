"""Assays of planted tasks on real services, the command, its reports and signed lines, and the scan of what ran."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from benchmarks.assay.__main__ import PYTEST, measured
from benchmarks.assay.corpus import Maker, Planted
from tests.integration.evaluation.test_eval_cli import STUCK, interrupted_after_a_line, penstock
from tests.support.services.stack import Running

from penstock.assay import Code, Kind, Severity, Terms, assay
from penstock.assay.report import line_of
from penstock.client import Assays, Command, FailedPrecondition, SeedFile, Task, User, Verifier
from penstock.client.tasks.spec import Solution
from penstock.tasks.scaffold import write
from penstock.tasks.scripts import MAX_SCRIPT_BYTES
from penstock.tasks.solutions import prove

GOOD = """
instruction: Write the sum of the numbers in given.txt to sum.txt.
files: [{path: given.txt, content: "12\\n30\\n"}]
verifier: {commands: [[python3, -I, -c, "import sys; sys.exit(open('sum.txt', 'rb').read(99) != b'42\\\\n')"]]}
solution: {commands: ["echo 42 > sum.txt"]}
"""
BAD = """
instruction: Write the sum of the numbers in given.txt to sum.txt.
files: [{path: given.txt, content: "12\\n30\\n"}]
verifier: {commands: ["test -e <b>sum.txt || test -e sum.txt"]}
solution: {commands: ["echo 42 > sum.txt"]}
"""


@pytest.mark.requirement("R138")
async def test_defects_are_found_by_the_trials_that_show_them(stack_with_pytest: Running) -> None:
    """One for each kind of trial after the solution: nothing, search, order, mutants, attacks."""
    maker = Maker(2026, PYTEST)
    classes = {"for_nothing": 0, "in_git": 7, "ordered": 0, "half_tested": 0, "editable": 0}
    tasks = [maker.planted(defect, number) for defect, number in classes.items()]
    terms = Terms(solutions=1, mutants=2, fail_fast=True)
    found, wrong = await measured(stack_with_pytest.ps, tasks, terms, 6)
    assert wrong == []
    assert len(found) == 5


@pytest.mark.requirement("R138")
async def test_a_task_without_a_defect_passes(stack_with_pytest: Running) -> None:
    """And nothing of its trials is left at the driver."""
    task = Maker(2027, PYTEST).clean(4)
    found, wrong = await measured(stack_with_pytest.ps, [task], Terms(solutions=1, mutants=2), 6)
    assert wrong == []
    assert found[0].files and found[0].size_bytes
    assert {trial.kind for trial in found[0].trials} == set(Kind)
    left = stack_with_pytest.ps.rollouts.list(task_id=task.task.task_id)
    assert [rollout async for rollout in left] == []


@pytest.mark.on_demand("some 500 rollouts: the other tests here have a task for each kind of trial")
@pytest.mark.requirement("R138")
async def test_each_class_of_defects_is_found_and_nothing_else(stack_with_pytest: Running, tmp_path: Path) -> None:
    """All classes but the one of chance, all kinds of good tasks, and what `penstock tasks new` writes."""
    maker = Maker(2026, PYTEST)
    tasks = [maker.planted(defect, 5) for defect in Maker.DEFECTS if defect != "flaky"]
    tasks += [maker.clean(number) for number in range(len(Maker.CLEAN))]
    write(tmp_path / "fix-slug")
    tasks.append(Planted(Task.load(tmp_path / "fix-slug"), ""))
    _, wrong = await measured(stack_with_pytest.ps, tasks, Terms(solutions=2, mutants=8, fail_fast=True), 6)
    assert wrong == []


async def test_accepted_defects_are_warnings_and_in_the_result(stack: Running) -> None:
    task = Task(
        task_id="accepted",
        instruction="Write it.",
        verifier=Verifier(commands=[Command(argv=["test", "-s", "it.txt"])]),
        solution=Solution(commands=[Command(shell="echo some text > it.txt")]),
    )
    (found,) = await assay(stack.ps, [task], Terms(solutions=1, accept={Code.REWARD_FORGED}))
    assert found.passed
    assert {finding.severity for finding in found.findings if finding.code is Code.REWARD_FORGED} == {Severity.WARNING}
    assert "REWARD_FORGED" in line_of(found).accepted


@pytest.mark.requirement("R138")
async def test_a_task_whose_change_cannot_be_read_does_not_pass(stack: Running) -> None:
    """The driver keeps no change of so large a directory: what needs it is not tried, and the finding says so."""
    task = Task(
        task_id="large",
        instruction="Write it.",
        setup=[Command(argv=["truncate", "-s", "33M", "large.bin"])],
        verifier=Verifier(commands=[Command(argv=["grep", "-q", "some", "it.txt"])]),
        solution=Solution(commands=[Command(shell="echo some text > it.txt")]),
    )
    (found,) = await assay(stack.ps, [task], Terms(solutions=1))
    assert not found.passed
    (defect,) = found.defects
    assert defect.code is Code.CHANGE_NOT_READ and "more than 32 MiB" in defect.evidence
    (warning,) = [finding for finding in found.findings if finding.code is Code.NOT_MUTATED]
    assert "could not be read" in warning.message
    skipped = {"ends-its-judge", "equal-to-everything", "files-of-any-content"}
    assert all(name in defect.message for name in skipped)
    tried = {trial.name for trial in found.trials if trial.kind is Kind.ATTACK}
    assert len(tried) == 6 and not tried & skipped
    (waived,) = await assay(stack.ps, [task], Terms(solutions=1, attacks=False, accept={Code.CHANGE_NOT_READ}))
    assert waived.passed and "CHANGE_NOT_READ" in line_of(waived).accepted


async def test_tasks_that_cannot_be_assayed_say_what_they_lack(stack: Running) -> None:
    """Also one that the services refuse: the others are assayed all the same."""
    bare = Task(task_id="bare", instruction="x")
    graded = Task(task_id="graded", instruction="x", verifier=Verifier(commands=[Command(argv=["true"])]))
    broken = Task(
        task_id="broken",
        instruction="x",
        files=[SeedFile("../up", b"x")],
        verifier=Verifier(commands=[Command(argv=["true"])]),
        solution=Solution(commands=[Command(argv=["true"])]),
    )
    found = await assay(stack.ps, [bare, graded, broken], Terms(solutions=1, attacks=False))
    codes = [[finding.code for finding in item.defects] for item in found]
    assert codes == [[Code.VERIFIER_MISSING], [Code.SOLUTION_MISSING], [Code.SETUP_FAILS]]


@pytest.mark.requirement("R133", "R138")
async def test_a_task_with_a_user_is_proved_and_assayed(stack: Running) -> None:
    """The agent that runs the solution takes no further instruction, so that it has no user."""
    task = Task(
        task_id="with-a-user",
        instruction="Write it.",
        verifier=Verifier(commands=[Command(argv=["grep", "-q", "some", "it.txt"])]),
        solution=Solution(commands=[Command(shell="echo some text > it.txt")]),
        user=User(instructions=["Write more."]),
    )
    (proof,) = await prove(stack.ps, [task])
    assert proof.holds, proof.problems
    (found,) = await assay(stack.ps, [task], Terms(solutions=1, mutants=0, attacks=False))
    assert found.passed, found.findings


@pytest.mark.requirement("R138")
async def test_a_task_that_is_refused_does_not_end_the_proof_of_others(stack: Running) -> None:
    """What the services say of it is its problem, and the other is proved."""
    good = Task(
        task_id="good",
        instruction="Write it.",
        verifier=Verifier(commands=[Command(argv=["test", "-s", "it.txt"])]),
        solution=Solution(commands=[Command(shell="echo some text > it.txt")]),
    )
    refused = replace(good, task_id="refused", files=[SeedFile("../up", b"x")])
    first, second = await prove(stack.ps, [refused, good])
    assert (first.task_id, first.holds, first.solution, first.nothing) == ("refused", False, None, None)
    assert len(first.problems) == 1 and "spec.task.files[0].path" in first.problems[0]
    assert second.holds, second.problems


@pytest.mark.requirement("R138")
async def test_a_proof_puts_the_solution_where_an_agent_could(stack: Running) -> None:
    """Its files are no part of the prepared state: what agents cannot do proves nothing, and what they can does."""
    out = Verifier(commands=[Command(argv=["grep", "-q", "some", "out/it.txt"])])
    written = Solution(files=[SeedFile("out/it.txt", b"some text\n", 0o640)], commands=[Command(argv=["true"])])
    good = Task(task_id="good", instruction="Write it.", verifier=out, solution=written)
    compiled = replace(good, setup=[Command(shell="mkdir -p out && cat in.txt > out/it.txt || true")])
    tasks = [
        good,
        replace(good, task_id="elsewhere", verifier=replace(out, changes_below=["work"])),
        replace(
            compiled,
            task_id="compiled",
            solution=Solution(files=[SeedFile("in.txt", b"some text\n")], commands=[Command(argv=["true"])]),
        ),
        # Setup would not find the directory as agents have it.
        replace(good, task_id="kept", setup=[Command(shell="test ! -e out")]),
        replace(
            good,
            task_id="large",
            solution=replace(written, files=[*written.files, SeedFile("more", b"x" * MAX_SCRIPT_BYTES)]),
        ),
    ]
    proofs = await prove(stack.ps, tasks)
    assert [(proof.task_id, proof.holds) for proof in proofs] == [
        ("good", True), ("elsewhere", False), ("compiled", False), ("kept", True), ("large", False),
    ], [proof.problems for proof in proofs]  # fmt: skip
    assert proofs[-1].problems == (
        f"its solution has more than {MAX_SCRIPT_BYTES} bytes, which cannot be put in place",
    )


@pytest.mark.requirement("R138")
async def test_the_command_reports_signs_and_its_lines_decide_what_starts(stack: Running, tmp_path: Path) -> None:
    """Table, HTML, JSON and lines; `--require-assay` of both commands, and of the client."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/good.yaml").write_text(GOOD)
    (tmp_path / "tasks/bad.yaml").write_text(BAD)
    code, out, err = await penstock(
        stack, tmp_path, "tasks", "assay", "tasks", "--solutions", "2", "--out", "a/assay.jsonl", "--concurrency", "6"
    )
    assert code == 1, err
    rows = {line.split()[0]: line for line in out.splitlines()[:3]}
    assert "passed" in rows["good"] and "defects" in rows["bad"], out
    assert "1 of 2 tasks passed" in err
    page = (tmp_path / "a/assay.html").read_text()
    assert "REWARD_FORGED" in page and "prefers-color-scheme: dark" in page
    assert "<b>sum.txt" not in page and "http" not in page.replace('http-equiv="Content', "")
    data = orjson.loads((tmp_path / "a/assay.json").read_bytes())
    assert {item["task_id"]: item["passed"] for item in data["assays"]} == {"good": True, "bad": False}

    lines = tmp_path / "a/assay.jsonl"
    assays = Assays.load(lines)
    task = Task.load(tmp_path / "tasks/good.yaml")
    handle = await stack.ps.groups.create(task, "shell", 2, mode="transparent_proxy", require_assay=assays)
    assert len(await handle.results()) == 2
    with pytest.raises(FailedPrecondition, match="did not pass its assay"):
        await stack.ps.groups.create(Task.load(tmp_path / "tasks/bad.yaml"), "shell", 2, require_assay=assays)
    for command in (["rollout", "--task", "tasks/bad.yaml"], ["eval", "tasks"]):
        code, _, err = await penstock(stack, tmp_path, *command, "--agent", "shell", "--require-assay", str(lines))
        assert code == 4 and "did not pass its assay" in err, err
    (tmp_path / "a/assay.key").write_bytes(b"k" * 32)
    code, _, err = await penstock(
        stack, tmp_path, "rollout", "--task", "tasks/good.yaml", "--agent", "shell", "--require-assay", str(lines)
    )
    assert code == 2 and "not signed with this key" in err


@pytest.mark.requirement("R138")
async def test_an_interrupted_assay_keeps_the_results_that_it_has(stack: Running, tmp_path: Path) -> None:
    """The line is signed as soon as it is known; the reports have what there is."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "bare.yaml").write_text("instruction: x\n")
    (tmp_path / "tasks" / "stuck.yaml").write_text(f"instruction: x\n{STUCK}")
    given = ("tasks", "assay", "tasks", "--solutions", "1", "--out", "assay.jsonl", "--json")
    code, _, err = await interrupted_after_a_line(stack, tmp_path, *given)
    assert code == 130 and "0 of 1 task passed, 1 not assayed" in err, err
    Assays.load(tmp_path / "assay.jsonl")
    (line,) = (tmp_path / "assay.jsonl").read_bytes().splitlines()
    (reported,) = orjson.loads((tmp_path / "assay.json").read_bytes())["assays"]
    assert orjson.loads(line)["task_id"] == reported["task_id"] == "bare"
    assert "bare" in (tmp_path / "assay.html").read_text()


@pytest.mark.requirement("R138")
async def test_lines_that_the_key_does_not_fit_are_refused_before_the_first_trial(
    stack: Running, tmp_path: Path
) -> None:
    """Beside them new lines would be of no use, so no key is made; what is in the file stays as it is."""
    for name in ("one", "two", "three"):
        (tmp_path / f"{name}.yaml").write_text("instruction: Do it.\n")
    lines, mine = tmp_path / "a.jsonl", ("--key", "mine.key")

    async def assayed(task: str, *more: str) -> tuple[int, str]:
        code, _, err = await penstock(stack, tmp_path, "tasks", "assay", f"{task}.yaml", "--out", "a.jsonl", *more)
        assert "Traceback" not in err, err
        return code, err

    assert (await assayed("one", *mine))[0] == 1
    before = lines.read_bytes().removesuffix(b"\n")
    lines.write_bytes(before)
    code, err = await assayed("two")
    assert code == 2 and "a.key" in err and "--key" in err and "VERIFIER_MISSING" not in err, err
    assert lines.read_bytes() == before and not (tmp_path / "a.key").exists()
    (tmp_path / "other.key").write_bytes(b"k" * 32)
    code, err = await assayed("two", "--key", "other.key")
    assert code == 2 and "line 1: it is not signed with this key" in err and "VERIFIER_MISSING" not in err, err

    code, err = await assayed("two", *mine)
    assert code == 1 and "two: VERIFIER_MISSING" in err, err
    Assays.load(lines, tmp_path / "mine.key")
    assert [orjson.loads(line)["task_id"] for line in lines.read_bytes().splitlines()] == ["one", "two"]
    lines.write_bytes(lines.read_bytes() + b"not JSON\n")
    code, err = await assayed("three", *mine)
    assert code == 2 and "a.jsonl: line 3" in err and "VERIFIER_MISSING" not in err, err


@pytest.mark.requirement("R139")
async def test_what_agents_did_is_scanned_from_services_and_exports(stack: Running, tmp_path: Path) -> None:
    """By run, by rollout and from files, with the same findings."""
    task = Task(task_id="looks", instruction="Do the work.", files=[SeedFile("work.sh", b"git reflog\n")])
    handle = await stack.ps.rollouts.create(task, "shell", mode="transparent_proxy", run_id="scanned")
    await handle.result()
    code, out, _ = await penstock(stack, tmp_path, "export", "t.jsonl", "--table", "turns", "--run-id", "scanned")
    assert code == 0, out
    (tmp_path / "r.yaml").write_text("- {name: runs-work, says: runs the work, severity: high, text: work.sh}\n")
    found = []
    for place in ("t.jsonl", "scanned", handle.rollout_id):
        code, out, err = await penstock(stack, tmp_path, "scan", place, "--json", "--rules", "r.yaml")
        assert code == 1 and "in 1 of 1 rollout" in err, err
        found.append([orjson.loads(line) for line in out.splitlines()])
    assert found[0] == found[1] == found[2]
    assert {(item["rule"], item["rollout_id"], item["task_id"]) for item in found[0]} == {
        ("runs-work", handle.rollout_id, "looks")
    }
    code, out, err = await penstock(stack, tmp_path, "scan", "t.jsonl")
    assert (code, out) == (0, ""), err
    code, _, err = await penstock(stack, tmp_path, "scan", "no-such-run")
    assert code == 1 and "nothing to scan" in err
