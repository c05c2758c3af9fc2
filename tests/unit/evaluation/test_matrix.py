"""Several agents at the same tasks: the matrix, its table and its picture."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.unit.evaluation.test_attempts import attempt
from tests.unit.evaluation.test_permutation import shown
from tests.unit.evaluation.test_report import HOSTILE

from penstock.cli.views import matrix_table
from penstock.client import ConfigurationError
from penstock.evaluation import Attempt, Summary, summarise
from penstock.evaluation.heat_map import FORMATS, write_heat_map
from penstock.evaluation.matrix import Matrix, matrix
from penstock.evaluation.statistics import estimate, wilson


def summary(passed: dict[str, int], lost: int = 0) -> Summary:
    """Four attempts at each task, so many of which passed; the last `lost` were not graded."""
    made: list[Attempt] = []
    for task, count in passed.items():
        made += [attempt(task, index, float(index < count)) for index in range(4 - lost)]
        made += [
            Attempt(task_id=task, index=index, again=0, rollout_id="r", cause="infrastructure", reason="SANDBOX_LOST")
            for index in range(4 - lost, 4)
        ]
    return summarise(made, list(passed), 4)


@pytest.fixture
def made() -> Matrix:
    """Three agents at two tasks; the third agent's sandboxes were all lost, and it has no task b."""
    return matrix({"codex": summary({"a": 4, "b": 1}), "pi": summary({"a": 0, "b": 2}, lost=1),
                   "aider": summary({"a": 0}, lost=4)})  # fmt: skip


def test_every_agent_has_a_cell_for_every_task(made: Matrix) -> None:
    """With Wilson's interval over what was graded; an agent's total is over its tasks."""
    assert (made.agents, made.tasks) == (("codex", "pi", "aider"), ("a", "b"))
    assert set(made.cells) == {(agent, task) for agent in made.agents for task in made.tasks}
    cell = made.cells["pi", "b"]
    assert (cell.attempts, cell.passed, cell.excluded) == (3, 2, 1)
    assert (cell.rate, (cell.low, cell.high)) == (2 / 3, wilson(2 / 3, 3))
    assert made.totals["codex"] == estimate({"a": (4, 4), "b": (4, 1)}, 1)
    lost, absent = made.cells["aider", "a"], made.cells["aider", "b"]
    assert (lost.rate, lost.excluded, absent.rate, absent.missing) == (None, 4, None, 4)
    assert made.totals["aider"] is None


def test_programs_get_every_cell_in_order(made: Matrix) -> None:
    body = made.as_dict()
    assert [(cell["agent"], cell["task_id"]) for cell in body["cells"]] == [
        (agent, task) for agent in made.agents for task in made.tasks
    ]
    assert body["totals"]["aider"] is None and body["totals"]["codex"]["tasks"] == 2
    assert body["threshold"] == 1.0


def test_people_get_a_row_for_each_task_and_a_column_for_each_agent(made: Matrix) -> None:
    """A cell that was not graded is no zero."""
    lines = shown(matrix_table.table(made)).splitlines()
    assert lines[0].split() == ["task", "codex", "pi", "aider"]
    low, high = wilson(1.0, 4)
    assert f"1.00 {low:.2f} to {high:.2f} 4/4" in lines[1] and "not graded" in lines[1]
    assert lines[4].startswith("pass@1") and "over 2 tasks" in lines[5] and "6 attempts" in lines[6]


@pytest.mark.parametrize("form", FORMATS)
def test_a_picture_is_the_same_for_the_same_matrix(made: Matrix, form: str, tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_heat_map(tmp_path / f"{name}.{form}", made)
    first = (tmp_path / f"one.{form}").read_bytes()
    assert first == (tmp_path / f"two.{form}").read_bytes()
    assert b"PNG" in first[:8] or b"<svg" in first[:1000] or first.startswith(b"%PDF")


def test_a_picture_of_any_names_is_drawn(tmp_path: Path) -> None:
    """Names of tasks are anybody's; more tasks than fit are counted."""
    tasks = dict.fromkeys([*HOSTILE, "$\\frac{1}{0}$" * 20], 2)
    write_heat_map(tmp_path / "hostile.png", matrix({"pi": summary(tasks)}))
    assert (tmp_path / "hostile.png").stat().st_size > 5000


@pytest.mark.requirement("R48")
def test_a_picture_without_matplotlib_names_what_to_install(
    made: Matrix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match=r"penstock\[report\]"):
        write_heat_map(tmp_path / "m.png", made)
