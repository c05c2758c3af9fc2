"""Metrics of a training step, and the trackers that take them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.unit.analysis.trajectory_cases import failed, sample, trajectory

from penstock.adapters.loggers import Logger, MlflowLogger, TrackioLogger, WandbLogger, step_metrics
from penstock.client import ConfigurationError
from penstock.client.types.results import FailureCause, Outcome, RolloutResult
from penstock.client.types.trajectories import Reward, Sample

ROOT = Path(__file__).parents[3]
METRICS = {"reward/mean": 0.5, "staleness/max": 2}


def ended(rollout_id: str, samples: list[Sample], reward: Reward | None) -> RolloutResult:
    rollout = failed(rollout_id, FailureCause.AGENT).rollout
    return RolloutResult(rollout, Outcome(reward=reward), trajectory(rollout_id, samples))


def test_a_step_has_its_rewards_lengths_staleness_and_failures() -> None:
    results = [
        ended("a", [sample("a", [(2, 3, True), (1, 1, False)], version=4)], Reward(1.0)),
        ended("b", [sample("b", [(1, 1, True)], version=1, truncated=True)], Reward(-1.0, -1.0, 1.0)),
        failed("c", FailureCause.INFRASTRUCTURE),
        failed("d", FailureCause.AGENT),
    ]
    assert step_metrics(results, policy_version=5) == {
        "rollouts/count": 4,
        "rollouts/graded": 2,
        "reward/mean": 0.0,
        "reward/std": 1.0,
        "reward/solve_rate": 0.5,
        "tokens/sequence_mean": 4.5,
        "tokens/sequence_max": 7,
        "tokens/trained": 4,
        "tokens/truncated_share": 0.5,
        "staleness/mean": (3 * 1 + 1 * 4) / 4,
        "staleness/max": 4,
        "failures/count": 2,
        "failures/agent": 1,
        "failures/infrastructure": 1,
    }


def test_what_no_rollout_has_is_left_out() -> None:
    """Not graded is not zero."""
    assert step_metrics([failed("c", FailureCause.TASK)], policy_version=5) == {
        "rollouts/count": 1,
        "rollouts/graded": 0,
        "failures/count": 1,
        "failures/task": 1,
    }


MAKERS: dict[str, Callable[[], Logger]] = {
    "trackio": lambda: TrackioLogger("p", name="n", config={"lr": 0.1}),
    "wandb": lambda: WandbLogger("p", name="n", config={"lr": 0.1}, mode="offline"),
    "mlflow": lambda: MlflowLogger("p", name="n", config={"lr": 0.1}),
}


@pytest.mark.requirement("R48")
@pytest.mark.parametrize("package", MAKERS)
def test_a_tracker_that_is_not_installed_is_a_named_error(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigurationError, match=f"pip install {package}") as caught:
        MAKERS[package]()
    assert caught.value.reason == "LOGGER_MISSING"


@pytest.mark.parametrize("package", ["trackio", "wandb"])
def test_a_step_reaches_the_run_of_its_tracker(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vendor's calls by name, and nothing but them."""
    seen: list[Any] = []
    run = SimpleNamespace(
        log=lambda metrics, step: seen.append((metrics, step)), finish=lambda: seen.append("finished")
    )

    def init(*, project: str, name: str, config: dict[str, Any], **options: Any) -> SimpleNamespace:
        seen.append((project, name, config, options))
        return run

    module = ModuleType(package)
    monkeypatch.setattr(module, "init", init, raising=False)
    monkeypatch.setitem(sys.modules, package, module)
    with MAKERS[package]() as logger:
        logger.log(METRICS, 3)
    options = {"mode": "offline"} if package == "wandb" else {}
    assert seen == [("p", "n", {"lr": 0.1}, options), (METRICS, 3), "finished"]


@pytest.mark.parametrize("is_new", [True, False])
def test_a_step_reaches_an_experiment_of_mlflow(is_new: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An experiment is made once."""
    seen: list[Any] = []

    class Client:
        def __init__(self, *, tracking_uri: str | None) -> None:
            seen.append(tracking_uri)

        def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
            return None if is_new else SimpleNamespace(experiment_id=f"id of {name}")

        def create_experiment(self, name: str) -> str:
            seen.append("created")
            return f"id of {name}"

        def create_run(self, experiment_id: str, *, run_name: str) -> SimpleNamespace:
            seen.append((experiment_id, run_name))
            return SimpleNamespace(info=SimpleNamespace(run_id="r"))

        def log_batch(self, run_id: str, *, metrics: Any = (), params: Any = ()) -> None:
            seen.append((run_id, list(metrics), list(params)))

        def set_terminated(self, run_id: str) -> None:
            seen.append(f"{run_id} ended")

    module, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    monkeypatch.setattr(module, "MlflowClient", Client, raising=False)
    monkeypatch.setattr(entities, "Param", lambda key, value: (key, value), raising=False)
    monkeypatch.setattr(entities, "Metric", lambda key, value, _, step: (key, value, step), raising=False)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    with MAKERS["mlflow"]() as logger:
        logger.log(METRICS, 3)
    assert seen == [
        *([None, "created"] if is_new else [None]),
        ("id of p", "n"),
        ("r", [], [("lr", "0.1")]),
        ("r", [("reward/mean", 0.5, 3), ("staleness/max", 2.0, 3)], []),
        "r ended",
    ]


REAL = {
    "trackio": (
        "trackio==0.43.0",
        """
from penstock.adapters.loggers import TrackioLogger
from trackio.sqlite_storage import SQLiteStorage
with TrackioLogger("p", name="n", config={"lr": 0.1}) as logger:
    logger.log({"reward/mean": 0.5, "staleness/max": 2}, 3)
kept = SQLiteStorage.get_logs("p", "n")
""",
    ),
    "wandb": (
        "wandb==0.31.0",
        """
import pathlib
from penstock.adapters.loggers import WandbLogger
with WandbLogger("p", name="n", config={"lr": 0.1}, mode="offline") as logger:
    logger.log({"reward/mean": 0.5, "staleness/max": 2}, 3)
(stored,) = pathlib.Path(".").glob("wandb/offline-run-*/run-*.wandb")
kept = [{"step": 3} | {name: value for name, value in METRICS.items() if name.encode() in stored.read_bytes()}]
""",
    ),
    "mlflow": (
        "mlflow-skinny==3.11.1",  # 3.17.2 lacks a module of its own
        """
import mlflow
from penstock.adapters.loggers import MlflowLogger
with MlflowLogger("p", name="n", config={"lr": 0.1}, tracking_uri="file:./store") as logger:
    logger.log({"reward/mean": 0.5, "staleness/max": 2}, 3)
client = mlflow.MlflowClient("file:./store")
(run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
(entry,) = client.get_metric_history(run.info.run_id, "reward/mean")
assert run.info.status == "FINISHED" and run.data.params == {"lr": "0.1"}
kept = [{"step": entry.step, **run.data.metrics}]
""",
    ),
}


@pytest.mark.on_demand("the loggers with the trackers' own packages, which are installed for it (160 MB for trackio)")
@pytest.mark.parametrize("package", REAL)
def test_the_tracker_itself_keeps_a_step(package: str, tmp_path: Path) -> None:
    """Offline, in an environment of its own: its needs contradict ours."""
    needed, program = REAL[package]
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    (site,) = (tmp_path / "env" / "lib").glob("python3*/site-packages")
    # What it needs and does not get for itself is ours.
    (site / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    quiet = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    subprocess.run([*quiet, needed], check=True, timeout=600)
    sources = [path for path in sys.path if path.startswith(str(ROOT)) and "site-packages" not in path]
    environment = {
        **os.environ,
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "WANDB_MODE": "offline",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PYTHONPATH": os.pathsep.join(sources),
    }
    head = f"METRICS = {METRICS!r}\n"
    tail = "\nimport json, pathlib\nfound = [{key: row[key] for key in ('step', *METRICS)} for row in kept]\n"
    tail += "pathlib.Path('kept.json').write_text(json.dumps(found))\n"
    subprocess.run([str(python), "-c", head + program + tail], env=environment, cwd=tmp_path, check=True, timeout=300)
    assert json.loads((tmp_path / "kept.json").read_text()) == [{"step": 3, **METRICS}]
