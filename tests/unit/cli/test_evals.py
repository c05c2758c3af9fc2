"""`penstock eval` where no service is needed: what is compared, and what tells evaluations apart."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from tests.unit.evaluation.test_attempts import CONFIG, attempt
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.evaluation import Book


def evaluation(folder: Path, tasks: dict[str, str], reward: float) -> Path:
    """A results directory with an attempt at each task; `tasks` are their digests."""
    with Book(folder, {**CONFIG, "attempts": 1, "tasks": tasks}) as book:
        for name in tasks:
            book.add(attempt(name, 0, reward))
    return folder


@pytest.mark.requirement("R74")
def test_a_comparison_names_tasks_that_changed_and_fails_where_none_is_left(tmp_path: Path) -> None:
    """In text and in JSON: a task that was made easier shows no better agent."""
    first = evaluation(tmp_path / "first", {"a": "1", "b": "1"}, 0.0)
    second = evaluation(tmp_path / "second", {"a": "1", "b": "2"}, 1.0)
    third = evaluation(tmp_path / "third", {"a": "3", "b": "3"}, 1.0)
    run = CliRunner().invoke

    found = run(app, ["eval", "diff", str(first), str(second)])
    assert found.exit_code == 0 and "changed, not compared: b" in found.output and "over 1 task" in found.output
    found = run(app, ["eval", "diff", str(first), str(second), "--json"])
    facts = orjson.loads(found.stdout)
    assert ([task["task_id"] for task in facts["tasks"]], facts["changed"]) == (["a"], ["b"])

    for options in ([], ["--json"]):
        found = run(app, ["eval", "diff", str(first), str(third), *options])
        assert found.exit_code == 1
        assert "nothing is compared: no task was graded in both and is the same in both" in found.stderr
