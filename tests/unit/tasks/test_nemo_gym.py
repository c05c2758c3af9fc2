"""NeMo-Gym's records: what can be graded without their server is imported, and what cannot is refused by its fields."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support import foreign_tasks

from penstock.client import Task
from penstock.tasks.importers import import_tasks

ADDS = "print(sum(map(int, open(0).read().split())))\n"


def imported(record: dict[str, Any], place: Path) -> tuple[Task | None, str]:
    """The task of one record, or why it is refused."""
    (place / "records.jsonl").write_text(json.dumps(record))
    (found,) = import_tasks("nemo-gym", place / "records.jsonl", place / "tasks")
    return (None, found.problem) if found.folder is None else (Task.load(found.folder), "")


def reward_of(task: Task, box: Path, files: dict[str, str]) -> dict[str, Any]:
    """What a verifier's commands make of these files of an agent."""
    assert task.verifier is not None
    foreign_tasks.write(box, files)
    grade = box.parent / "grade"
    grade.mkdir(exist_ok=True)
    for file in task.verifier.files:
        (grade / Path(file.path).name).write_bytes(file.content)
    for command in task.verifier.commands:
        argv = [item.replace("/tmp/penstock-grade", str(grade)) for item in command.argv]
        argv = ["600" if item == "10.0" else item for item in argv]  # a busy machine is no program that takes too long
        env = {**os.environ, "PENSTOCK_REWARD_FILE": str(grade / "reward")}
        subprocess.run([sys.executable, *argv[1:]], cwd=box, env=env, check=True, capture_output=True)
    found: dict[str, Any] = json.loads((grade / "reward").read_text())
    return found


@pytest.mark.requirement("R76")
@pytest.mark.parametrize(
    ("program", "reward", "passed"),
    [
        (ADDS, 1.0, 1.0),
        ("print(3)\n", 0.0, 0.5),
        (f"{ADDS}raise SystemExit(1)\n", 0.0, 0.0),
        ("while True: print(' 3' * 10000)\n", 0.0, 0.0),
    ],
)
def test_programs_are_run_on_each_input_and_their_outputs_compared(
    tmp_path: Path, program: str, reward: float, passed: float
) -> None:
    """Issue 12, point 6: a run that fails, or prints without end, has no result."""
    task, problem = imported(foreign_tasks.nemo_record(), tmp_path)
    assert task is not None, problem
    assert task.instruction.startswith("Print the sum of the numbers.\n\n") and "answer.py" in task.instruction
    assert reward_of(task, tmp_path / "box", {"answer.py": program}) == {
        "reward": reward,
        "components": {"passed": passed},
    }


@pytest.mark.requirement("R72", "R75")
def test_a_program_that_is_graded_finds_no_expected_output(tmp_path: Path) -> None:
    """The files of the verifier have inputs only, and the judge is none of them."""
    unit_tests = {"inputs": ["1\n"], "outputs": ["the secret"]}
    task, _ = imported(foreign_tasks.nemo_record(verifier_metadata={"unit_tests": unit_tests}), tmp_path)
    assert task is not None and task.verifier is not None
    assert not [file.path for file in task.verifier.files if b"secret" in file.content or b"digest" in file.content]
    assert not [command for command in task.verifier.commands if "secret" in " ".join(command.argv)]


CHOICE = {"options": [{"A": "one"}, {"B": "two"}], "expected_answer": "B", "grading_mode": "strict_single_letter_boxed"}
TEXT = {"extraction_mode": "boxed", "expected_answer": "Pacific  Ocean"}


@pytest.mark.parametrize(
    ("fields", "answer", "reward"),
    [
        (CHOICE, "B\n", 1.0),
        (CHOICE, "it is \\boxed{\\text{b}}", 1.0),
        (CHOICE, "(B)", 1.0),
        (CHOICE, "B: two", 1.0),
        (CHOICE, "A or B", 0.0),
        (CHOICE, "", 0.0),
        (TEXT, "pacific ocean\n", 1.0),
        ({**TEXT, "case_sensitive": True}, "pacific ocean", 0.0),
        ({**TEXT, "case_sensitive": True}, "\\boxed{Pacific Ocean}", 1.0),
        (TEXT, "the Pacific Ocean", 0.0),
    ],
)
def test_an_answer_is_read_from_its_file(tmp_path: Path, fields: dict[str, Any], answer: str, reward: float) -> None:
    """Issue 12, point 6: a letter, or a text, with or without a box."""
    record = {"responses_create_params": {"input": "Which?"}, **fields}
    task, problem = imported(record, tmp_path)
    assert task is not None, problem
    assert reward_of(task, tmp_path / "box", {"answer.txt": answer})["reward"] == reward


@pytest.mark.parametrize("nested", [False, True])
def test_a_software_engineering_record_is_that_of_its_own_format(tmp_path: Path, nested: bool) -> None:
    """Issue 12, point 6: at the top, or as JSON in the request's metadata."""
    instance = foreign_tasks.record("abc")
    metadata = {"instance_id": "kiwi__sums-1", "dataset_name": "SWE-Gym/SWE-Gym", "instance_dict": json.dumps(instance)}
    record = (
        {"responses_create_params": {"input": [], "metadata": metadata}}
        if nested
        else {**instance, "responses_create_params": {"input": []}, "subset": "verified"}
    )
    task, problem = imported(record, tmp_path)
    assert task is not None and task.sandbox is not None, problem
    assert task.task_id == "kiwi__sums-1"
    assert task.sandbox.image.startswith("xingyaoww/" if nested else "swebench/")
    assert task.metadata["collection"] == "nemo-gym"


@pytest.mark.requirement("R63")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"verifier_metadata": {"rubric": []}}, "only its resources server can grade it (hash_id, verifier_metadata)"),
        ({"verifier_metadata": {"unit_tests": {"inputs": ["1"], "outputs": []}}}, "not lists of one length"),
        ({"verifier_metadata": {"unit_tests": {"inputs": ["1"], "outputs": ["1"], "fn_name": "f"}}}, "fn_name"),
        ({"verifier_metadata": {"unit_tests": {"inputs": ["1"] * 2000, "outputs": ["1"] * 2000}}}, "2000 tests"),
        ({"responses_create_params": {"input": "x", "tools": [{}]}}, "1 tools of a resources server"),
        ({"responses_create_params": {"input": [{"role": "assistant", "content": "x"}]}}, "a message of assistant"),
        ({"responses_create_params": {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}}, "only text"),
        ({"responses_create_params": {"input": []}}, "input is empty"),
        ({"responses_create_params": None}, "no responses_create_params"),
        ({"instance_id": "terminal_bench::sum"}, "only names a task of Harbor"),
        ({"verifier_metadata": None, **CHOICE, "template_metadata": {"output_regex": ["x"]}}, "template_metadata"),
        ({"verifier_metadata": None, **CHOICE, "expected_answer": "C"}, "none of the letters"),
    ],
)
def test_what_needs_a_resources_server_is_refused_by_its_fields(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    """Issue 12, point 6: no record becomes a task that is graded otherwise than its maker does."""
    task, problem = imported({**foreign_tasks.nemo_record(), **change}, tmp_path)
    assert task is None
    assert named in problem
