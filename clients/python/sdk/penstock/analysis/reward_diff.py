"""Compares two grades of the same rollouts."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from penstock.client import Failure, Reward, Rollout

FIRST: Final = "first"
"""Name of the grade that a rollout ended with."""


@dataclass(frozen=True, slots=True)
class RewardPair:
    """A rollout's two rewards; None = that grade has none, and its reason."""

    rollout_id: str
    task_id: str
    before: float | None
    after: float | None
    reason_before: str = ""
    reason_after: str = ""

    @property
    def is_changed(self) -> bool:
        """Whether the rewards differ, or only one is there."""
        return self.before != self.after


@dataclass(frozen=True, slots=True)
class RewardDiff:
    """Two grades of the rollouts that have both; `missing` rollouts lack one of them."""

    before: str
    after: str
    pairs: tuple[RewardPair, ...]
    missing: int

    @property
    def changed(self) -> tuple[RewardPair, ...]:
        """The rollouts whose rewards differ."""
        return tuple(pair for pair in self.pairs if pair.is_changed)

    def counts(self) -> dict[str, int]:
        """Counts rollouts: compared, same, raised, lowered, gained (a reward only after), lost (only before), and
        missing.
        """
        both = [(one.before, one.after) for one in self.pairs if one.before is not None and one.after is not None]
        return {
            "compared": len(self.pairs),
            "same": len(self.pairs) - len(self.changed),
            "raised": sum(before < after for before, after in both),
            "lowered": sum(before > after for before, after in both),
            "gained": sum(one.before is None and one.after is not None for one in self.pairs),
            "lost": sum(one.before is not None and one.after is None for one in self.pairs),
            "missing": self.missing,
        }

    def means(self) -> tuple[float | None, float | None]:
        """The mean rewards of both grades, of the rollouts that have both rewards."""
        both = [(one.before, one.after) for one in self.pairs if one.before is not None and one.after is not None]
        if not both:
            return None, None
        return sum(before for before, _ in both) / len(both), sum(after for _, after in both) / len(both)

    def as_dict(self) -> dict[str, Any]:
        """The comparison as JSON values, with the changed rollouts."""
        before, after = self.means()
        return {
            "before": self.before,
            "after": self.after,
            "counts": self.counts(),
            "mean_before": before,
            "mean_after": after,
            "changed": [
                {
                    "rollout_id": pair.rollout_id,
                    "task_id": pair.task_id,
                    "before": pair.before,
                    "after": pair.after,
                    "reason_before": pair.reason_before,
                    "reason_after": pair.reason_after,
                }
                for pair in self.changed
            ],
        }


def grade_names(rollouts: Iterable[Rollout]) -> tuple[str, ...]:
    """The names of all further grades, those of the newest grades last."""
    graded = sorted(
        (grade.time.timestamp() if grade.time else 0.0, grade.name) for one in rollouts for grade in one.grades
    )
    return tuple(dict.fromkeys(name for _, name in reversed(graded)))[::-1]


def reward_diff(rollouts: Iterable[Rollout], before: str, after: str) -> RewardDiff:
    """Compares two grades by their names; `FIRST` is the one that a rollout ended with."""
    pairs, missing = list[RewardPair](), 0
    for rollout in rollouts:
        one, other = _graded(rollout, before), _graded(rollout, after)
        if one is None or other is None:
            missing += 1
            continue
        pairs.append(
            RewardPair(rollout.rollout_id, rollout.task_id, _value(one), _value(other), _reason(one), _reason(other))
        )
    return RewardDiff(before, after, tuple(pairs), missing)


_Graded = tuple[Reward | None, Failure | None]


def _graded(rollout: Rollout, name: str) -> _Graded | None:
    if name == FIRST:
        outcome = rollout.outcome
        return None if outcome is None else (outcome.reward, outcome.failure)
    grade = next((one for one in rollout.grades if one.name == name), None)
    return None if grade is None else (grade.reward, grade.failure)


def _value(graded: _Graded) -> float | None:
    return None if graded[0] is None else graded[0].value


def _reason(graded: _Graded) -> str:
    """Why there is no reward: a rollout that failed may have one all the same."""
    return graded[1].reason if graded[0] is None and graded[1] is not None else ""
