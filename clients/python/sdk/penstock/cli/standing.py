"""Rollouts that are watched, as they stand: kept up to date by changes, summed up by group. Nothing here draws.

Invariants: a group is shown whole or not at all, since its mean and its spread are of all of it; what is held is
bounded however long it is watched.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from statistics import fmean, pstdev
from typing import Final

from penstock.cli.curve import Point
from penstock.client.counting import counted
from penstock.client.results import FailureCause, Phase, RolloutChanges, RolloutSummary

MOST_ENDED: Final = 10_000
"""Of those that have ended this many are held, the newest, and what their groups lack: a driver tells of no more."""
_SLACK: Final = 500
"""So many more may come before the oldest are let go: that looks at all of them."""
_WINDOW: Final = 8
"""Rollouts of no group that make a point of the curve together."""
_LONG_AGO: Final = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class GroupStanding:
    """A group's rollouts, in the order of their index."""

    group_id: str
    rollouts: tuple[RolloutSummary, ...]

    @property
    def rewards(self) -> list[float]:
        """Of those that have one."""
        return [item.reward.value for item in self.rollouts if item.reward is not None]

    @property
    def ended(self) -> int:
        """How many are over."""
        return sum(item.ended for item in self.rollouts)

    @property
    def failed(self) -> int:
        """How many did not complete although nobody cancelled them."""
        return sum(item.failure is not None for item in self.rollouts) - self.cancelled

    @property
    def cancelled(self) -> int:
        """How many somebody cancelled."""
        return sum(is_cancelled(item) for item in self.rollouts)

    @property
    def mean(self) -> float | None:
        """Of the rewards; None without one."""
        return fmean(self.rewards) if self.rewards else None

    @property
    def deviation(self) -> float | None:
        """Of the rewards, as of a whole population: what a group's advantages are divided by."""
        return pstdev(self.rewards) if self.rewards else None


class Standing:
    """All rollouts that are watched.

    Args:
        ended_limit: of those that have ended, the newest this many are shown, and the rest of their groups.
        most: of those that have ended, the newest this many are held, and the rest of their groups.
    """

    def __init__(self, ended_limit: int = MOST_ENDED, most: int = MOST_ENDED) -> None:
        self._limit = ended_limit
        self._most = most
        self._rollouts: dict[str, RolloutSummary] = {}
        self._fresh: dict[str, RolloutSummary] | None = None
        self._shown: list[RolloutSummary] | None = None
        self._groups: list[GroupStanding] | None = None
        self._prune_at = most + _SLACK
        self.complete = False
        """Whether everything has been told once."""
        self.older = False
        """Whether there may be some that ended before all that are held: the bound was reached."""

    def __len__(self) -> int:
        return len(self._rollouts)

    @property
    def hidden(self) -> int:
        """How many are held and not shown."""
        return len(self._rollouts) - len(self.rollouts())

    def begin(self) -> None:
        """Everything is told anew; what was known stays until it has been."""
        self._fresh = {}

    def apply(self, change: RolloutChanges) -> tuple[list[RolloutSummary], list[str]]:
        """Takes a change over; what is really new by it: rollouts, and ids of those that are gone."""
        told, gone = list(change.rollouts), list(change.gone)
        if self._fresh is not None:
            self._fresh.update((item.rollout_id, item) for item in told)
            for name in gone:
                self._fresh.pop(name, None)
            gone = []
            if change.complete:
                gone = [name for name in self._rollouts if name not in self._fresh]
                self._fresh = None
        self.complete |= change.complete
        new = [item for item in told if self._rollouts.get(item.rollout_id) != item]
        self._rollouts.update((item.rollout_id, item) for item in new)
        lost = [name for name in gone if self._rollouts.pop(name, None) is not None]
        if self.complete and self._fresh is None and (change.complete or len(self._rollouts) > self._prune_at):
            self._prune()
        if new or lost or change.complete:
            self._shown = self._groups = None
        return new, lost

    def _prune(self) -> None:
        """Lets the oldest go."""
        self.older |= sum(item.ended for item in self._rollouts.values()) >= self._most
        kept = _newest(self._rollouts.values(), self._most)
        self._rollouts = {item.rollout_id: item for item in kept}
        self._prune_at = max(self._most, len(kept)) + _SLACK

    @property
    def ended(self) -> bool:
        """Whether there are rollouts, and all are over."""
        return bool(self._rollouts) and all(item.ended for item in self._rollouts.values())

    def rollouts(self) -> Sequence[RolloutSummary]:
        """Those that are shown: those that run first, then the newest."""
        if self._shown is None:
            newest = _newest(self._rollouts.values(), self._limit)
            self._shown = sorted(newest, key=lambda item: item.ended)
        return self._shown

    def groups(self) -> Sequence[GroupStanding]:
        """Newest first, of those that are shown."""
        if self._groups is None:
            found = sorted(
                (item for item in self.rollouts() if item.group_id is not None),
                key=lambda item: (item.group_id or "", item.index),
            )
            made = [
                GroupStanding(name or "", tuple(items)) for name, items in groupby(found, lambda item: item.group_id)
            ]
            self._groups = sorted(made, key=lambda group: min(map(_created, group.rollouts)), reverse=True)
        return self._groups

    def phases(self) -> dict[Phase, int]:
        """How many stand where, in the order of phases."""
        counts = Counter(item.phase for item in self.rollouts())
        return {phase: counts[phase] for phase in Phase if counts[phase]}

    def rewards(self) -> list[float]:
        """All of them."""
        return [item.reward.value for item in self.rollouts() if item.reward is not None]

    def range(self) -> tuple[float, float]:
        """From which reward to which."""
        ranges = [(item.reward.range_min, item.reward.range_max) for item in self.rollouts() if item.reward]
        return (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else (0.0, 1.0)

    def curve(self) -> tuple[list[Point], str]:
        """The points of the reward's curve, oldest first, and what a point is."""
        groups = [group.rewards for group in reversed(self.groups()) if group.rewards]
        if groups:
            return [
                _point(rewards) for rewards in groups
            ], f"mean and range of {counted(len(groups), 'group')} in the order in which they began"
        over = sorted((item for item in self.rollouts() if item.reward), key=lambda item: item.end_time or _LONG_AGO)
        rewards = [item.reward.value for item in over if item.reward is not None]
        points = [_point(part) for part in _windows(rewards)]
        of = counted(len(rewards), "rollout")
        return points, f"{of} in the order in which they ended; mean and range of {_WINDOW} together"


def is_cancelled(item: RolloutSummary) -> bool:
    """Whether somebody wanted no more of it, which is no failure of anything."""
    return item.failure is not None and item.failure.cause is FailureCause.CANCELLED


def _point(rewards: Sequence[float]) -> Point:
    return Point(min(rewards), fmean(rewards), max(rewards))


def _windows(values: Sequence[float]) -> Iterator[Sequence[float]]:
    for end in range(1, len(values) + 1):
        yield values[max(0, end - _WINDOW) : end]


def _newest(items: Iterable[RolloutSummary], most: int) -> list[RolloutSummary]:
    """Newest first: all that run, `most` of those that have ended, and what the groups of all these have besides."""
    ordered = sorted(items, key=_created, reverse=True)
    left = most
    kept: set[str] = set()
    groups: set[str] = set()
    for item in ordered:
        if item.ended:
            if left <= 0:
                continue
            left -= 1
        kept.add(item.rollout_id)
        if item.group_id is not None:
            groups.add(item.group_id)
    return [item for item in ordered if item.rollout_id in kept or item.group_id in groups]


def _created(item: RolloutSummary) -> datetime:
    return item.create_time or _LONG_AGO


def totals(items: Iterable[RolloutSummary]) -> tuple[int, int, int]:
    """Calls, prompt tokens and sampled tokens together."""
    found = list(items)
    return (
        sum(item.calls for item in found),
        sum(item.prompt_tokens for item in found),
        sum(item.completion_tokens for item in found),
    )
