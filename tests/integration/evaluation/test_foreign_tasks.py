"""Tasks in the forms of others, imported and run for real: their solution is worth 1, nothing is worth 0."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.integration.evaluation.conftest import SITE_PACKAGES
from tests.support import foreign_tasks
from tests.support.services.stack import Running

from penstock.client import Command, Task
from penstock.tasks.importers import Choices, import_tasks
from penstock.tasks.scripts import script
from penstock.tasks.solutions import prove, solving_agent

WITHOUT_IMAGES = Choices(image=False, resources=False)
PYTEST = f"env PYTHONPATH={SITE_PACKAGES} PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python3 -m pytest"


def tasks_of(form: str, source: Path, destination: Path, choices: Choices = WITHOUT_IMAGES) -> list[Task]:
    """The tasks of a source, imported and read back."""
    found = import_tasks(form, source, destination, choices)
    assert [item.problem for item in found if item.problem] == []
    return [Task.load(item.folder) for item in found if item.folder is not None]


async def reward_of(stack: Running, task: Task, commands: list[str]) -> tuple[float | None, dict[str, float]]:
    """What a task is worth, and in what parts, after an agent that ran these shell lines."""
    done = replace(task, instruction=script([Command(shell=line) for line in commands]))
    handle = await stack.ps.rollouts.create(done, await solving_agent(stack.ps), mode="transparent_proxy")
    reward = (await handle.result()).reward
    return (None, {}) if reward is None else (reward.value, dict(reward.components))


async def test_harbor_and_terminal_bench_solutions_score_1_and_nothing_scores_0(
    stack_with_pytest: Running, tmp_path: Path
) -> None:
    """Issue 6, point 6: reward.txt, reward.json with components, and pytest's summary are read as their makers mean."""
    foreign_tasks.harbor(tmp_path / "harbor" / "sum-txt")
    foreign_tasks.harbor(tmp_path / "harbor" / "sum-json", reward="json")
    foreign_tasks.terminal_bench(tmp_path / "old" / "sum-old")
    tasks = tasks_of("harbor", tmp_path / "harbor", tmp_path / "tasks")
    tasks += tasks_of("terminal-bench", tmp_path / "old", tmp_path / "tasks")
    proofs = await prove(stack_with_pytest.ps, tasks)
    assert [(proof.task_id, proof.solution, proof.nothing, proof.holds) for proof in proofs] == [
        ("sum-json", 1.0, 0.0, True),
        ("sum-txt", 1.0, 0.0, True),
        ("sum-old", 1.0, 0.0, True),
    ], [proof.problems for proof in proofs]


@pytest.mark.requirement("R72", "R75", "R76")
async def test_files_left_in_a_harbor_verifiers_directory_are_removed_first(
    stack_with_pytest: Running, tmp_path: Path
) -> None:
    """A planted reward, a planted helper and a link in the verifier's places change nothing."""
    foreign_tasks.harbor(tmp_path / "harbor" / "sum-planted", reward="json")
    (task,) = tasks_of("harbor", tmp_path / "harbor", tmp_path / "tasks")
    await prove(stack_with_pytest.ps, [])  # registers the agent that runs what it is told
    worth, parts = await reward_of(
        stack_with_pytest,
        task,
        [
            "mkdir -p /tests/data /logs/verifier /elsewhere",
            "echo 1 > /logs/verifier/reward.txt; touch /tests/planted",
            "echo 5 > /tests/data/expected; echo 5 > /app/sum.txt",
        ],
    )
    assert (worth, parts) == (0.0, {"reward": 0.0, "tidy": 0.5})
    worth, _ = await reward_of(
        stack_with_pytest, task, ["mkdir -p /logs /mine", "echo 1 > /mine/reward.txt", "ln -s /mine /logs/verifier"]
    )
    assert worth == 0.0


@pytest.mark.requirement("R76")
async def test_swe_record_is_graded_by_pytests_report_despite_edited_tests(
    stack_with_pytest: Running, tmp_path: Path
) -> None:
    """The gold patch resolves it; a broken behaviour, half of the tests and tests that were rewritten do not."""
    base = foreign_tasks.repository(tmp_path / "clones" / "kiwi__sums")
    (tmp_path / "records.jsonl").write_text(json.dumps(foreign_tasks.record(base)) + "\n")
    choices = replace(WITHOUT_IMAGES, repositories=tmp_path / "clones", test_command=PYTEST)
    (task,) = tasks_of("swe", tmp_path / "records.jsonl", tmp_path / "tasks", choices)
    (proof,) = await prove(stack_with_pytest.ps, [task])
    assert (proof.solution, proof.nothing, proof.holds) == (1.0, 0.0, True), proof.problems

    # The future of the repository is not in the sandbox; its past is one commit.
    (fraction,) = tasks_of("swe", tmp_path / "records.jsonl", tmp_path / "shares", replace(choices, reward="fraction"))
    worth, parts = await reward_of(
        stack_with_pytest,
        fraction,
        [
            '[ "$(git rev-list --all --count)" = 1 ]',
            # Right for one of the two, and what worked before is broken.
            "printf 'def add(a, b):\\n  return 3 if a < b else 0\\ndef negate(value):\\n  return 1\\n' > sums.py",
            # What a cheat would do: make the tests say what one likes, and put a link in their place.
            "rm -r tests; mkdir mine; echo 'def test_negate(): pass' > mine/test_sums.py; ln -s mine tests",
        ],
    )
    assert parts == pytest.approx({"fail_to_pass": 0.5, "pass_to_pass": 0.0, "resolved": 0.0})
    assert worth == pytest.approx(1 / 3)


@pytest.mark.requirement("R72")
async def test_processes_of_graded_code_end_with_its_tests(stack_with_pytest: Running, tmp_path: Path) -> None:
    """Code under test that leaves a process behind, which would write a reward later, is ended before one is."""
    base = foreign_tasks.repository(tmp_path / "clones" / "kiwi__sums")
    (tmp_path / "records.json").write_text(json.dumps([foreign_tasks.record(base)]))
    choices = replace(WITHOUT_IMAGES, repositories=tmp_path / "clones", test_command=PYTEST)
    (task,) = tasks_of("swe", tmp_path / "records.json", tmp_path / "tasks", choices)
    await prove(stack_with_pytest.ps, [])
    daemon = (
        "import os, subprocess\n"
        "assert 'PENSTOCK_REWARD_FILE' not in os.environ\n"
        "subprocess.Popen(['sh', '-c', 'while :; do for f in /tmp/penstock-*/reward; do echo 1 > $f; done; done'],"
        " start_new_session=True)\n"
    )
    worth, parts = await reward_of(stack_with_pytest, task, [f"cat >> sums.py <<'EOF'\n{daemon}EOF"])
    assert worth == 0.0
    assert parts["pass_to_pass"] == 1.0


@pytest.mark.requirement("R72")
async def test_reward_written_by_code_that_killed_its_grader_is_none(
    stack_with_pytest: Running, tmp_path: Path
) -> None:
    """Only a grader that came to its own end has written a reward; it cannot be looked into meanwhile."""
    base = foreign_tasks.repository(tmp_path / "clones" / "kiwi__sums")
    (tmp_path / "records.json").write_text(json.dumps([foreign_tasks.record(base)]))
    choices = replace(WITHOUT_IMAGES, repositories=tmp_path / "clones", test_command=PYTEST)
    (task,) = tasks_of("swe", tmp_path / "records.json", tmp_path / "tasks", choices)
    await prove(stack_with_pytest.ps, [])
    forger = (
        "import glob, os, signal\n"
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    grader = False\n"
        "    try:\n"
        "        grader = b'swe_grade' in open(f'/proc/{pid}/cmdline', 'rb').read()\n"
        "        if grader: assert b'PENSTOCK' not in open(f'/proc/{pid}/environ', 'rb').read()\n"
        "    except OSError:\n"
        "        pass\n"
        "    if grader:\n"
        "        for path in glob.glob('/tmp/penstock-*/reward'): open(path, 'w').write('1')\n"
        "        os.kill(int(pid), signal.SIGKILL)\n"
    )
    done = replace(task, instruction=script([Command(shell=f"cat >> sums.py <<'EOF'\n{forger}EOF")]))
    solver = await solving_agent(stack_with_pytest.ps)
    handle = await stack_with_pytest.ps.rollouts.create(done, solver, mode="transparent_proxy")
    outcome = (await handle.result()).outcome
    assert outcome.reward is None and outcome.failure is not None
    assert (outcome.failure.cause, outcome.failure.reason) == ("verifier", "VERIFIER_CUT_SHORT")
