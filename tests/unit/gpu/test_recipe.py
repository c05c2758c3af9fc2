"""The recipe's command line, its plan and its table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from examples.gpu import __main__ as recipe
from examples.gpu import table
from examples.gpu.phases import evaluated
from examples.gpu.plan import Plan

from penstock.evaluation import Attempt, Book, Summary, summarise


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Of a dry run."""
    return recipe.parsed(["--dry-run", "--out", str(tmp_path / "out"), "--steps", "3"])[0]


def test_a_dry_run_s_plan_can_run_and_is_read_as_it_was_written(plan: Plan) -> None:
    """By the trainer's process."""
    assert plan.faults() == [] and plan.steps == 3 and plan.tiny
    assert Plan.read(plan.write()) == plan


def test_every_wrong_value_is_named(plan: Plan, tmp_path: Path) -> None:
    """Before anything starts."""
    wrong = replace(
        plan, model=tmp_path, tasks=tmp_path, unseen=plan.agents, group_size=1, trainer="other", context_tokens=10
    )
    named = [fault.partition(":")[0] for fault in wrong.faults()]
    assert named == [
        *(
            "MODEL",
            "--tasks",
            "--tasks",
            "--unseen",
            "--trainer",
            "--group-size",
            "--prompt-tokens and --response-tokens",
        )
    ]


def test_results_of_another_run_are_not_continued(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    """More attempts are no other run."""
    plan.write()
    again = ["--dry-run", "--out", str(plan.out), "--steps", "3"]
    assert recipe.parsed([*again, "--attempts", "9"])[0].attempts == 9
    with pytest.raises(SystemExit):
        recipe.parsed([*again, "--steps", "4"])
    assert "other values of steps" in capsys.readouterr().err


def test_what_a_machine_without_a_gpu_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one sentence, and nothing is written."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit):
        recipe.parsed([str(tmp_path), "--out", str(tmp_path / "out")])
    assert "lacks an NVIDIA GPU" in capsys.readouterr().err and not (tmp_path / "out").exists()


def summary(passed: dict[str, int], attempts: int = 2) -> Summary:
    """Of tasks, with how many of their attempts passed."""
    made = [
        Attempt(task_id=task, index=index, again=0, rollout_id=f"{task}{index}", reward=float(index < count))
        for task, count in passed.items()
        for index in range(attempts)
    ]
    return summarise(made, passed, attempts)


def test_the_table_has_each_agent_before_and_after() -> None:
    """With the number of attempts, and whether it was trained with."""
    before = {"pi": summary({"one": 0, "two": 1}), "codex": summary({"one": 0, "two": 0})}
    found = table.rows(before, {"pi": summary({"one": 2, "two": 2})}, ["pi"])
    lines = table.markdown(found, ["A note."]).splitlines()
    assert (
        lines[2].startswith("| pi | yes | 0.25 (")
        and "1/4 | 1.00 (" in lines[2]
        and "4/4 | +0.75 | 0.500 |" in lines[2]
    )
    assert lines[3].startswith("| codex | no | 0.00 (") and lines[3].endswith("| not run |  |  |")
    assert lines[-1] == "A note."


def test_an_evaluation_that_is_whole_is_read_and_not_run_again(plan: Plan) -> None:
    """One attempt that is missing, or that was not graded, and the engine is needed."""
    folder, tasks = plan.out / "before", ("clock-1", "names-1")
    assert evaluated(plan, folder) is None
    ids = [(task, index) for task in tasks for index in range(plan.attempts)]
    for agent in (*plan.agents, *plan.unseen):
        with Book(folder / agent, {"attempts": plan.attempts, "tasks": dict.fromkeys(tasks, "")}) as book:
            for task, index in ids[1:]:
                book.add(Attempt(task_id=task, index=index, again=0, rollout_id=f"{task}{index}", reward=1.0))
            task, index = ids[0]
            book.add(Attempt(task_id=task, index=index, again=0, rollout_id="a", cause="infrastructure"))
            assert evaluated(plan, folder) is None
            book.add(Attempt(task_id=task, index=index, again=1, rollout_id="b", reward=0.0))
    found = evaluated(plan, folder)
    assert found is not None and [*found] == [*plan.agents, *plan.unseen]
    assert all([score.passed for score in one.tasks] == [plan.attempts - 1, plan.attempts] for one in found.values())
    assert evaluated(replace(plan, attempts=plan.attempts + 1), folder) is None
