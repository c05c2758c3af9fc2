"""`penstock eval` where no service is needed: what is compared, and what tells evaluations apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.unit.evaluation.test_attempts import CONFIG, attempt
from typer.testing import CliRunner

from penstock.cli.commands.evals import running
from penstock.cli.connections.model_sources import model_choice
from penstock.cli.main import app
from penstock.client import FailedPrecondition
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


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A model's directory, a script and a task with two models."""
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "script.yaml").write_text("turns: []\n")
    (tmp_path / "mine.yaml").write_text(
        "instruction: x\nverifier: {commands: ['true']}\n"
        "models: [{policy_id: teacher, upstream: u, model: m, trained: false, calls: {until_turn: 1}},"
        " {policy_id: student}]\n"
    )
    return tmp_path


def planned(files: Path, *, engine: str = "numpy", script: bool = False, **more: Any) -> dict[str, Any]:
    """The configuration of an evaluation that has not started."""
    given: dict[str, Any] = {
        "attempts": 1, "concurrency": 1, "only": (), "upstream": None, "model": "", "api_key_env": None,
        "black_box": False, "backend": "", "timeout": None, "max_calls": None, "temperature": None, "seed": None,
        "keep_end_state": None, "retries": 0, "threshold": 1.0, "files_from": (), "as_json": False,
        "choice": model_choice(files / "model", engine, files / "script.yaml" if script else None),
    }  # fmt: skip
    return dict(running.plan(files / "mine.yaml", **{**given, **more}).config)


@pytest.mark.requirement("R63")
@pytest.mark.parametrize("changed", ["model_files", "script", "models of task mine", "engine", "model_dir"])
def test_what_answers_tells_evaluations_apart(files: Path, changed: str) -> None:
    """Trained on in the same directory, or another script: another default directory, and EVAL_CHANGED in one."""
    scripted = changed == "script"
    before = planned(files, script=scripted)
    assert planned(files, script=scripted) == before, "the same is resumed"
    engine = "numpy"
    match changed:
        case "model_files":
            (files / "model" / "model.safetensors").write_text("[]")
        case "script":
            (files / "script.yaml").write_text("turns: []\nstrict: false\n")
        case "models of task mine":
            (files / "mine.yaml").write_text((files / "mine.yaml").read_text().replace("model: m", "model: n"))
        case "engine":
            engine = "vllm"
        case _:
            (files / "model").rename(files / "moved")
            (files / "model").symlink_to("moved")
    after = planned(files, engine=engine, script=scripted)
    assert before["model"] == after["model"] == "model"
    assert running.directory_name(before, "shell") != running.directory_name(after, "shell")
    Book(files / "out", before).close()
    with pytest.raises(FailedPrecondition, match=f": {changed} changed") as caught:
        Book(files / "out", after)
    assert caught.value.reason == "EVAL_CHANGED"
