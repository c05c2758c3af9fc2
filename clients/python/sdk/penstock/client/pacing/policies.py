"""When a group of rollouts is started, and which ended ones a trainer's next batch has: policies, all of them pure.

A policy looks at the groups that were started and not yet trained, in the order of their starts, and decides. It has no
clock and keeps nothing, so that a stream and a simulation use the same one. A group's staleness is the number of policy
versions between its start and its batch. The trainer makes at most one version of each batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol


class Group(Protocol):
    """What a policy knows of a group that was started and not yet trained."""

    @property
    def number(self) -> int:
        """The group's place in the order of starts, from 0."""

    @property
    def version(self) -> int:
        """The policy version as it was started."""

    @property
    def ready(self) -> int | None:
        """The group's place in the order in which groups became complete; None = it is not complete."""

    @property
    def size(self) -> int:
        """Number of the group's rollouts."""

    @property
    def running(self) -> int:
        """Number of the group's rollouts that have not ended."""


@dataclass(frozen=True, slots=True)
class Now:
    """What a policy decides by."""

    groups: Sequence[Group]
    """Started and not trained, by number."""
    version: int
    """The trainer's newest policy version."""
    is_taken: bool = False
    """Whether this version has its batch already."""
    is_last: bool = False
    """Whether no further group will be started."""
    started: int = 0
    """Rollouts that were ever started."""
    left_out: int = 0
    """Those that still ran as a batch had the rest of their group."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What becomes of groups: none in `train` = the trainer waits."""

    train: tuple[Group, ...] = ()
    """By number. Of one that is not complete, the rollouts that still run are left out."""
    drop: tuple[Group, ...] = ()
    """Not to be trained: those that run are cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy(ABC):
    """How a stream is paced. `batch`: groups of a batch, at least 1."""

    batch: int

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch: at least 1, not {self.batch}")

    @abstractmethod
    def admits(self, now: Now) -> bool:
        """Returns whether one more group may be started; how many run at once is limited elsewhere."""

    @abstractmethod
    def choose(self, now: Now) -> Choice:
        """Returns the next batch, and what is dropped."""

    def _first(self, now: Now, found: Sequence[Group]) -> tuple[Group, ...]:
        """The first groups of `found`, by number; none if they are too few for a batch."""
        size = min(self.batch, len(now.groups)) if now.is_last else self.batch
        return tuple(sorted(found[:size], key=lambda group: group.number)) if len(found) >= size else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded(Policy):
    """A policy under which at most `most` groups are started and not trained, at least those of a batch."""

    most: int

    def __post_init__(self) -> None:
        super(Bounded, self).__post_init__()
        if self.most < self.batch:
            raise ValueError(f"most: at least the {self.batch} groups of a batch, not {self.most}")

    def admits(self, now: Now) -> bool:
        """See `Policy`."""
        return len(now.groups) < self.most


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstCome(Bounded):
    """Trains what is complete first, however old it is."""

    def choose(self, now: Now) -> Choice:
        """See `Policy`."""
        return Choice(self._first(now, _by_end(now.groups)))


@dataclass(frozen=True, slots=True, kw_only=True)
class InOrder(Bounded):
    """Trains groups strictly in the order of their starts."""

    def choose(self, now: Now) -> Choice:
        """See `Policy`."""
        first = now.groups[: self.batch]
        return Choice(self._first(now, [group for group in first if group.ready is not None]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(Bounded):
    """Trains what is complete first among the oldest `window` groups."""

    window: int

    def choose(self, now: Now) -> Choice:
        """See `Policy`."""
        return Choice(self._first(now, _by_end(now.groups[: max(self.window, self.batch)])))


@dataclass(frozen=True, slots=True, kw_only=True)
class DropStale(Bounded):
    """Trains what is complete first, and drops what is older than `max_staleness` versions, running or not."""

    max_staleness: int

    def choose(self, now: Now) -> Choice:
        """See `Policy`."""
        old = tuple(group for group in now.groups if now.version - group.version > self.max_staleness)
        fresh = replace(now, groups=[group for group in now.groups if group not in old])
        return Choice(self._first(fresh, _by_end(fresh.groups)), old)


@dataclass(frozen=True, slots=True, kw_only=True)
class Oversample(Policy):
    """Starts `extra` groups more than a batch has, trains those that are complete first, and drops the others."""

    extra: int

    def admits(self, now: Now) -> bool:
        """See `Policy`."""
        return not any(group.version < now.version for group in now.groups) and (
            not now.is_taken and len(now.groups) < self.batch + self.extra
        )

    def choose(self, now: Now) -> Choice:
        """See `Policy`."""
        train = self._first(now, _by_end(now.groups))
        return Choice(train, tuple(group for group in now.groups if group not in train) if train else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Paced(Policy):
    """Trains nearly all that is started, none of it older than `max_staleness` versions, and waits only where it must.

    Each group has a last version, that of its start plus `max_staleness`. A batch has the oldest complete groups, if
    those that it leaves can all be trained in time by the batches after it: that at place j of them, from 0, in the
    batch j // batch + 1 versions from now. A group is started if a place in time is free, so that the oldest groups,
    once they are complete, always are such a batch. This bounds how many are started and not trained to
    (max_staleness + 1) * batch.

    Where a group at its last version still runs, the trainer waits for it; or the batch has its rollouts that ended,
    while those that are left out are at most the share `leave_out` of all that were started. So two of the three are
    promised, staleness and the distance between what is started and what is trained, and the third is as it can be: a
    trainer that leaves nothing out makes at most max_staleness + 1 batches in the time of its longest rollouts.
    """

    max_staleness: int
    leave_out: float = 0.015

    def __post_init__(self) -> None:
        super(Paced, self).__post_init__()
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness: at least 0, not {self.max_staleness}")
        if not 0 <= self.leave_out < 1:
            raise ValueError(f"leave_out: at least 0 and below 1, not {self.leave_out}")

    def admits(self, now: Now) -> bool:
        """See `Policy`."""
        return len(now.groups) < (self.max_staleness + 1 - now.is_taken) * self.batch

    def choose(self, now: Now) -> Choice:
        """See `Policy`."""
        left_out = now.left_out
        found: list[Group] = []
        for group in now.groups:
            if group.ready is None:
                left_out += group.running
                is_due = group.version + self.max_staleness <= now.version
                if not is_due or group.running == group.size or left_out > self.leave_out * now.started:
                    left_out -= group.running
                    continue
            found.append(group)
        train = self._first(now, found)
        return Choice(train if train and self._is_in_time(now, train) else ())

    def _is_in_time(self, now: Now, train: Sequence[Group]) -> bool:
        """Whether nothing is gained by waiting: all that is left can be in time, or is too late although complete."""
        chosen, is_awaited = {group.number for group in train}, False
        for place, group in enumerate(group for group in now.groups if group.number not in chosen):
            is_awaited = is_awaited or group.ready is None
            if is_awaited and now.version + place // self.batch + 1 > group.version + self.max_staleness:
                return False
        return True


def _by_end(groups: Sequence[Group]) -> list[Group]:
    ready = [(group.ready, group.number, group) for group in groups if group.ready is not None]
    return [group for _, _, group in sorted(ready, key=lambda item: item[:2])]
