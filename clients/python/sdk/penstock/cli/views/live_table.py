"""The state of watched rollouts: updated by changes, aggregated by group. Nothing here draws.

Invariants: a group is shown whole or not at all, since its mean and its spread are over all of it; memory is bounded
however long rollouts are watched.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from statistics import fmean, pstdev
from typing import Final

from penstock.cli.views.curve_points import By, points
from penstock.cli.views.reward_curve import Point
from penstock.client.types.results import FailureCause, Phase, RolloutChanges, RolloutSummary

MOST_ENDED: Final = 10_000
"""Maximum ended rollouts held, the newest, plus the rest of their groups: a driver's maximum, too."""
_SLACK: Final = 500
"""Further rollouts held before the oldest are pruned: pruning scans all of them."""
_LONG_AGO: Final = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class GroupStanding:
    """A group's rollouts, in the order of their index."""

    group_id: str
    rollouts: tuple[RolloutSummary, ...]

    @property
    def rewards(self) -> list[float]:
        """The existing rewards."""
        return [item.reward.value for item in self.rollouts if item.reward is not None]

    @property
    def ended(self) -> int:
        """Number of ended rollouts."""
        return sum(item.ended for item in self.rollouts)

    @property
    def failed(self) -> int:
        """Number of rollouts that failed without being cancelled."""
        return sum(item.failure is not None for item in self.rollouts) - self.cancelled

    @property
    def cancelled(self) -> int:
        """Number of cancelled rollouts."""
        return sum(is_cancelled(item) for item in self.rollouts)

    @property
    def mean(self) -> float | None:
        """The mean reward; None without one."""
        return fmean(self.rewards) if self.rewards else None

    @property
    def deviation(self) -> float | None:
        """The rewards' population standard deviation, by which a group's advantages are divided; None without one."""
        return pstdev(self.rewards) if self.rewards else None


class Standing:
    """All watched rollouts.

    Args:
        ended_limit: maximum ended rollouts shown, the newest, plus the rest of their groups.
        most: maximum ended rollouts held, the newest, plus the rest of their groups.
    """

    def __init__(self, ended_limit: int = MOST_ENDED, most: int = MOST_ENDED) -> None:
        self._limit = ended_limit
        self._most = most
        self._rollouts: dict[str, RolloutSummary] = {}
        self._fresh: dict[str, RolloutSummary] | None = None
        self._shown: list[RolloutSummary] | None = None
        self._groups: list[GroupStanding] | None = None
        self._curves: dict[By | None, tuple[list[Point], str]] = {}
        self._prune_at = most + _SLACK
        self.complete = False
        """Whether the full state has arrived once."""
        self.older = False
        """Whether older ended rollouts may exist beyond those held: the limit was reached."""
        self.away: tuple[str, ...] = ()
        """Drivers that do not answer now: their rollouts are missing, or as they were."""

    def __len__(self) -> int:
        return len(self._rollouts)

    @property
    def hidden(self) -> int:
        """Number of rollouts held but not shown."""
        return len(self._rollouts) - len(self.rollouts())

    def begin(self) -> None:
        """Starts a full refresh; the current state stays until it is complete."""
        self._fresh = {}

    def apply(self, change: RolloutChanges) -> tuple[list[RolloutSummary], list[str]]:
        """Applies a change; returns the actual updates: rollouts, and ids of deleted ones."""
        changed, gone = list(change.rollouts), list(change.gone)
        self.away = change.away
        if self._fresh is not None:
            self._fresh.update((item.rollout_id, item) for item in changed)
            for name in gone:
                self._fresh.pop(name, None)
            gone = []
            if change.complete:
                gone = [name for name in self._rollouts if name not in self._fresh]
                self._fresh = None
        self.complete |= change.complete
        new = [item for item in changed if self._rollouts.get(item.rollout_id) != item]
        self._rollouts.update((item.rollout_id, item) for item in new)
        lost = [name for name in gone if self._rollouts.pop(name, None) is not None]
        if self.complete and self._fresh is None and (change.complete or len(self._rollouts) > self._prune_at):
            self._prune()
        if new or lost or change.complete:
            self._shown = self._groups = None
            self._curves.clear()
        return new, lost

    def _prune(self) -> None:
        """Drops the oldest."""
        self.older |= sum(item.ended for item in self._rollouts.values()) >= self._most
        kept = _newest(self._rollouts.values(), self._most)
        self._rollouts = {item.rollout_id: item for item in kept}
        self._prune_at = max(self._most, len(kept)) + _SLACK

    @property
    def ended(self) -> bool:
        """Whether there are rollouts, and all have ended."""
        return bool(self._rollouts) and all(item.ended for item in self._rollouts.values())

    @property
    def has_failures(self) -> bool:
        """Whether a rollout failed or was cancelled, shown or not."""
        return any(item.failure is not None for item in self._rollouts.values())

    def rollouts(self) -> Sequence[RolloutSummary]:
        """Returns the shown rollouts: running ones first, then the newest."""
        if self._shown is None:
            newest = _newest(self._rollouts.values(), self._limit)
            self._shown = sorted(newest, key=lambda item: item.ended)
        return self._shown

    def groups(self) -> Sequence[GroupStanding]:
        """Returns the shown groups, newest first."""
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
        """Returns the number of rollouts in each phase, in the order of phases."""
        counts = Counter(item.phase for item in self.rollouts())
        return {phase: counts[phase] for phase in Phase if counts[phase]}

    def rewards(self) -> list[float]:
        return [item.reward.value for item in self.rollouts() if item.reward is not None]

    def range(self) -> tuple[float, float]:
        """The minimum and maximum possible reward."""
        ranges = [(item.reward.range_min, item.reward.range_max) for item in self.rollouts() if item.reward]
        return (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else (0.0, 1.0)

    def curve(self, by: By | None = None) -> tuple[list[Point], str]:
        """Returns the points of the reward curve, oldest first, and the meaning of a point."""
        if by not in self._curves:
            rewards = [group.rewards for group in reversed(self.groups())]
            self._curves[by] = points(self.rollouts(), rewards, self.range(), by)
        return self._curves[by]


def is_cancelled(item: RolloutSummary) -> bool:
    """Whether it was cancelled on request, which is no failure."""
    return item.failure is not None and item.failure.cause is FailureCause.CANCELLED


def _newest(items: Iterable[RolloutSummary], most: int) -> list[RolloutSummary]:
    """Returns, newest first: all running, `most` ended ones, and the rest of their groups."""
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
    """Returns the sums of calls, prompt tokens and sampled tokens."""
    found = list(items)
    return (
        sum(item.calls for item in found),
        sum(item.prompt_tokens for item in found),
        sum(item.completion_tokens for item in found),
    )
