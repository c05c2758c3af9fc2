"""Summarises an evaluation's attempts: a score per task, pass@k over all, and the excluded attempts by cause.

Invariants: the order in which attempts ended changes nothing; an attempt without a reward counts nowhere and is shown
by its cause; of several rollouts for one index the first that was graded counts.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock.evaluation.attempts import Attempt
from penstock.evaluation.statistics import Estimate, bounded_mean, estimate, mean, pass_at_k


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScore:
    """One task: `attempts` were graded, `passed` of them passed; `missing` were neither graded nor excluded (yet)."""

    task_id: str
    attempts: int
    passed: int
    excluded: int
    missing: int
    reward: float | None
    pass_at: Mapping[int, float]
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The whole summary. `excluded` counts the attempts that were not graded, by cause and reason; `ended` graded ones
    that were cut short (a timeout, a budget). `reward` is the mean over tasks of their means, with its 95 % interval
    within the range of rewards."""

    tasks: tuple[TaskScore, ...]
    wanted: int
    threshold: float
    pass_at: Mapping[int, Estimate]
    reward: Estimate | None
    excluded: Mapping[str, int]
    ended: Mapping[str, int]
    repeated: int
    prompt_tokens: int
    completion_tokens: int

    @property
    def complete(self) -> bool:
        """Whether every wanted attempt was graded."""
        return all(task.attempts == self.wanted for task in self.tasks)

    def table(self) -> dict[str, Any]:
        """Returns the part that does not depend on durations: the same attempts always give the same."""
        return {
            "tasks": [
                {
                    "task_id": task.task_id,
                    "attempts": task.attempts,
                    "passed": task.passed,
                    "excluded": task.excluded,
                    "missing": task.missing,
                    "reward": task.reward,
                    "pass_at": {str(k): value for k, value in task.pass_at.items()},
                }
                for task in self.tasks
            ],
            "attempts_wanted": self.wanted,
            "threshold": self.threshold,
            "pass_at": {str(k): asdict(value) for k, value in self.pass_at.items()},
            "reward": None
            if self.reward is None
            else {
                "mean": self.reward.value,
                "low": self.reward.low,
                "high": self.reward.high,
                "half_width": (self.reward.high - self.reward.low) / 2,
            },
            "excluded": dict(self.excluded),
            "ended_early": dict(self.ended),
        }


def settled(attempts: Iterable[Attempt]) -> dict[tuple[str, int], Attempt]:
    """Returns the attempt that counts, or is shown, for each task and index."""
    found: dict[tuple[str, int], Attempt] = {}
    for attempt in sorted(attempts, key=lambda item: (item.task_id, item.index, item.again)):
        before = found.get((attempt.task_id, attempt.index))
        if before is None or not before.graded:
            found[attempt.task_id, attempt.index] = attempt
    return found


def summarise(attempts: Iterable[Attempt], tasks: Iterable[str], wanted: int, threshold: float = 1.0) -> Summary:
    """Summarises attempts at `tasks`, `wanted` at each; `threshold` is the passing share of the range of rewards."""
    all_of_them = list(attempts)
    chosen = {key: item for key, item in settled(all_of_them).items() if key[1] < wanted}
    scores = []
    counts: dict[str, tuple[int, int]] = {}
    rewards: dict[str, list[float]] = {}
    ranges: list[tuple[float, float]] = []
    for task_id in sorted(set(tasks)):
        own = [chosen[task_id, index] for index in range(wanted) if (task_id, index) in chosen]
        graded = [item for item in own if item.graded]
        passed = sum(item.passed(threshold) for item in graded)
        rewards[task_id] = [item.reward for item in graded if item.reward is not None]
        ranges += [item.range for item in graded]
        reward = mean(rewards[task_id])
        seconds = mean([item.seconds for item in graded])
        if graded:
            counts[task_id] = (len(graded), passed)
        scores.append(
            TaskScore(
                task_id=task_id,
                attempts=len(graded),
                passed=passed,
                excluded=len(own) - len(graded),
                missing=wanted - len(own),
                reward=None if reward is None else reward[0],
                pass_at={k: pass_at_k(len(graded), passed, k) for k in range(1, len(graded) + 1)},
                seconds=None if seconds is None else seconds[0],
            )
        )
    shown = [item for item in chosen.values() if item.task_id in set(tasks)]
    return Summary(
        tasks=tuple(scores),
        wanted=wanted,
        threshold=threshold,
        pass_at={k: found for k in range(1, wanted + 1) if (found := estimate(counts, k)) is not None},
        reward=bounded_mean(rewards, *_whole(ranges)),
        excluded=_counted(item for item in shown if not item.graded),
        ended=_counted(item for item in shown if item.graded and item.reason is not None),
        repeated=sum((item.task_id, item.index) in chosen for item in all_of_them) - len(chosen),
        prompt_tokens=sum(item.prompt_tokens for item in shown),
        completion_tokens=sum(item.completion_tokens for item in shown),
    )


def _whole(ranges: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the minimum and maximum possible reward over all attempts."""
    return min((low for low, _ in ranges), default=0.0), max((high for _, high in ranges), default=1.0)


def _counted(attempts: Iterable[Attempt]) -> dict[str, int]:
    found = Counter(f"{item.cause or 'unknown'}: {item.reason or 'UNKNOWN'}" for item in attempts)
    return dict(sorted(found.items()))
