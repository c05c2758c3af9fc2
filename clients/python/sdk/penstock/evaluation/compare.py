"""Compares two evaluations of the same tasks: the difference of their pass rates, task by task, with its interval.

Tasks are paired (E. Miller, "Adding Error Bars to Evals", arXiv:2411.00640): differences in difficulty between tasks
cancel out.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from penstock.evaluation.permutation import sign_flips
from penstock.evaluation.statistics import mean
from penstock.evaluation.summary import Summary, TaskScore


@dataclass(frozen=True, slots=True)
class TaskDifference:
    """A task's pass@1 in both."""

    task_id: str
    before: float
    after: float

    @property
    def difference(self) -> float:
        """After minus before."""
        return self.after - self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The comparison. `changed` are tasks of one id that are not the same, which are not compared.

    `difference` is the mean over tasks with its 95 % half-width, None without a common task.

    The half-width is None too where the tasks show no variance: there is one, or all differ by the same. `p` is of the
    exact paired permutation test: the probability of a difference at least as large if each task's had either sign by
    chance.
    """

    tasks: tuple[TaskDifference, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    changed: tuple[str, ...]
    difference: float | None
    half_width: float | None
    p: float | None

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values, for programs."""
        return asdict(self)


def compare(
    before: Summary,
    after: Summary,
    before_digests: Mapping[str, str] = MappingProxyType({}),
    after_digests: Mapping[str, str] = MappingProxyType({}),
) -> Comparison:
    """Compares two evaluations over the tasks that were graded in both and are the same.

    Args:
        before: the first.
        after: the second.
        before_digests: digests of the first one's tasks by id, as its configuration has them.
        after_digests: those of the second. A task whose digest is missing in one of them counts as the same.
    """
    first = {task.task_id: task for task in before.tasks if task.attempts}
    second = {task.task_id: task for task in after.tasks if task.attempts}
    both = sorted(first.keys() & second.keys())
    changed = tuple(name for name in both if _differ(before_digests.get(name), after_digests.get(name)))
    names = [name for name in both if name not in set(changed)]
    common = tuple(TaskDifference(name, first[name].pass_at[1], second[name].pass_at[1]) for name in names)
    found = mean([task.difference for task in common])
    return Comparison(
        tasks=common,
        only_before=tuple(sorted(first.keys() - second.keys())),
        only_after=tuple(sorted(second.keys() - first.keys())),
        changed=changed,
        difference=None if found is None else found[0],
        half_width=None if found is None else found[1],
        p=sign_flips([_rate(second[name]) - _rate(first[name]) for name in names]),
    )


def _differ(before: str | None, after: str | None) -> bool:
    """Whether two digests are known and differ."""
    return bool(before) and bool(after) and before != after


def _rate(task: TaskScore) -> Fraction:
    """The pass rate without rounding: equal sums must be found equal."""
    return Fraction(task.passed, task.attempts)
