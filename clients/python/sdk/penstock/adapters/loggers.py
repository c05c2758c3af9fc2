"""Metrics of training steps for experiment trackers: trackio, Weights & Biases, MLflow.

A tracker's package is imported when its logger is made; it is no dependency of `penstock`. `step_metrics` makes the
numbers from results, with names that all three accept. A trainer may add its own to them.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from time import time
from typing import Any, Protocol, Self

import numpy as np

from penstock.client.errors import ConfigurationError
from penstock.client.types.results import RolloutResult
from penstock.client.types.trajectories import Reward, Sample


class Logger(Protocol):
    """Where a trainer's metrics go. Usable as a context manager, which closes it."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records the metrics of a step. Steps only grow."""

    def close(self) -> None:
        """Ends the run at the tracker; what was logged is then stored, or sent."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class _Closing(ABC):
    @abstractmethod
    def close(self) -> None:
        """As `Logger.close`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TrackioLogger(_Closing):
    """A run of a trackio project, on this machine unless `options` name a Space."""

    def __init__(
        self, project: str, *, name: str | None = None, config: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """`options` go to `trackio.init`.

        Raises:
            ConfigurationError: `LOGGER_MISSING`, trackio is not installed.
        """
        self._run = _package("trackio").init(project=project, name=name, config=dict(config or {}), **options)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Writes what is left, and ends the run."""
        self._run.finish()


class WandbLogger(_Closing):
    """A run of a Weights & Biases project; with `mode="offline"` it stays on this machine."""

    def __init__(
        self, project: str, *, name: str | None = None, config: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """`options` go to `wandb.init`.

        Raises:
            ConfigurationError: `LOGGER_MISSING`, wandb is not installed.
        """
        self._run = _package("wandb").init(project=project, name=name, config=dict(config or {}), **options)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Sends what is left, and ends the run."""
        self._run.finish()


class MlflowLogger(_Closing):
    """A run of an MLflow experiment, which is made if it does not exist. MLflow's current run is left alone."""

    def __init__(
        self,
        experiment: str,
        *,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        tracking_uri: str | None = None,
    ) -> None:
        """`tracking_uri` None: as MLflow is configured.

        Raises:
            ConfigurationError: `LOGGER_MISSING`, neither mlflow nor mlflow-skinny is installed.
        """
        package = _package("mlflow", "mlflow-skinny")
        self._entities = import_module("mlflow.entities")
        self._client = package.MlflowClient(tracking_uri=tracking_uri)
        known = self._client.get_experiment_by_name(experiment)
        place = self._client.create_experiment(experiment) if known is None else known.experiment_id
        self._run_id: str = self._client.create_run(place, run_name=name).info.run_id
        if config:
            params = [self._entities.Param(key, str(value)) for key, value in config.items()]
            self._client.log_batch(self._run_id, params=params)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records the metrics of a step."""
        now = int(time() * 1000)
        found = [self._entities.Metric(key, float(value), now, step) for key, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=found)

    def close(self) -> None:
        """Ends the run."""
        self._client.set_terminated(self._run_id)


def step_metrics(
    results: Iterable[RolloutResult], *, policy_version: int | None = None, threshold: float = 1.0
) -> dict[str, float]:
    """Returns what the rollouts of a step say: rewards, solved share, lengths, staleness, failures.

    A number is left out if nothing has it: a mean of no rewards is not zero.

    Args:
        results: ended rollouts, with samples for lengths and staleness.
        policy_version: of the weights that learn from them; None leaves staleness out.
        threshold: a rollout is solved if its reward is this share of the way from the least to the most.
    """
    ended = list(results)
    rewards = [result.reward for result in ended if result.reward is not None]
    samples = [sample for result in ended if result.trajectory is not None for sample in result.trajectory.samples]
    metrics: dict[str, float] = {"rollouts/count": len(ended), "rollouts/graded": len(rewards)}
    if rewards:
        values = np.array([reward.value for reward in rewards])
        metrics |= {
            "reward/mean": float(values.mean()),
            "reward/std": float(values.std()),
            "reward/solve_rate": sum(_solved(reward, threshold) for reward in rewards) / len(rewards),
        }
    metrics |= _lengths(samples)
    if policy_version is not None:
        metrics |= _staleness(samples, policy_version)
    failures = Counter(str(result.failure.cause) for result in ended if result.failure is not None)
    metrics["failures/count"] = failures.total()
    return metrics | {f"failures/{cause}": count for cause, count in sorted(failures.items())}


def _solved(reward: Reward, threshold: float) -> bool:
    width = reward.range_max - reward.range_min
    return reward.value >= reward.range_min + threshold * width - 1e-9 * width


def _lengths(samples: Sequence[Sample]) -> dict[str, float]:
    if not samples:
        return {}
    lengths = [len(sample) for sample in samples]
    return {
        "tokens/sequence_mean": sum(lengths) / len(lengths),
        "tokens/sequence_max": max(lengths),
        "tokens/trained": sum(int(sample.loss_mask.sum()) for sample in samples),
        "tokens/truncated_share": sum(sample.truncated for sample in samples) / len(samples),
    }


def _staleness(samples: Sequence[Sample], policy_version: int) -> dict[str, float]:
    """By how many versions the weights are ahead of those that sampled the trained tokens."""
    behind: Counter[int] = Counter()
    for sample in samples:
        for span in sample.versions:
            behind[policy_version - span.policy_version] += int(sample.loss_mask[span.start : span.end].sum())
    behind = +behind  # masked tokens are not learned from
    if not behind:
        return {}
    mean = sum(versions * count for versions, count in behind.items()) / behind.total()
    return {"staleness/mean": mean, "staleness/max": max(behind)}


def _package(name: str, distribution: str = "") -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise  # it is installed, and lacks something itself
        raise ConfigurationError(
            f"This logger needs {name}, which is not installed: pip install {distribution or name}",
            reason="LOGGER_MISSING",
            metadata={"package": distribution or name},
        ) from None
