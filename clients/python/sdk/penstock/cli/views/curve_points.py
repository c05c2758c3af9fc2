"""The points of the reward curve of `penstock watch`: by training step, by policy version, by group, or by time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from operator import attrgetter
from statistics import fmean
from typing import Final

from penstock.analysis.readable_calls import counted
from penstock.cli.views.reward_curve import Point
from penstock.client.types.results import RolloutSummary
from penstock.evaluation.statistics import bounded_mean

_WINDOW: Final = 8
"""Number of rollouts without a group that form one point."""
_LONG_AGO: Final = datetime.min.replace(tzinfo=UTC)


class By(StrEnum):
    """What a point of the curve stands for."""

    STEP = "step"
    VERSION = "version"
    GROUP = "group"


def points(
    rollouts: Sequence[RolloutSummary],
    groups: Sequence[Sequence[float]],
    span: tuple[float, float],
    by: By | None = None,
) -> tuple[list[Point], str]:
    """Returns the points, oldest first, and the meaning of a point.

    Args:
        rollouts: any; those without a reward count nowhere.
        groups: rewards of each group, oldest group first.
        span: the minimum and maximum possible reward.
        by: None = by step where labels name several, else by version where there are several, else by group. What no
            rollout has is drawn by group, too.
    """
    over = [item for item in rollouts if item.reward is not None]
    for kind, value in ((By.STEP, attrgetter("step")), (By.VERSION, attrgetter("min_version"))):
        if by in (None, kind):
            found = _numbered(over, value)
            if len(found) >= (2 if by is None else 1):
                return [_estimated(found[number], span) for number in sorted(found)], _caption(kind, found)
    with_rewards = [rewards for rewards in groups if rewards]
    if with_rewards:
        made = [Point(min(rewards), fmean(rewards), max(rewards)) for rewards in with_rewards]
        return made, f"mean and range of {counted(len(made), 'group')} in the order in which they began"
    over.sort(key=lambda item: item.end_time or _LONG_AGO)
    rewards = [item.reward.value for item in over if item.reward is not None]
    of = counted(len(rewards), "rollout")
    return list(_windows(rewards)), f"{of} in the order in which they ended; mean and range of {_WINDOW} together"


def _numbered(
    items: Sequence[RolloutSummary], value: Callable[[RolloutSummary], int | None]
) -> dict[int, list[RolloutSummary]]:
    found: dict[int, list[RolloutSummary]] = {}
    for item in items:
        number = value(item)
        if number is not None:
            found.setdefault(number, []).append(item)
    return found


def _caption(kind: By, found: Mapping[int, object]) -> str:
    word = "step" if kind is By.STEP else "policy version"
    which = f"{word} {min(found)}" if len(found) == 1 else f"{counted(len(found), word)}, {min(found)} to {max(found)}"
    return f"mean and its 95 % interval by {which}"


def _estimated(items: Sequence[RolloutSummary], span: tuple[float, float]) -> Point:
    """The mean with its interval: the range of binary rewards is the same at every step."""
    rewards: dict[str, list[float]] = {}
    for item in items:
        if item.reward is not None:
            rewards.setdefault(item.task_id, []).append(item.reward.value)
    found = bounded_mean(rewards, *span)
    assert found is not None, "every item has a reward"
    return Point(found.low, found.value, found.high)


def _windows(values: Sequence[float]) -> Iterator[Point]:
    for end in range(1, len(values) + 1):
        part = values[max(0, end - _WINDOW) : end]
        yield Point(min(part), fmean(part), max(part))
