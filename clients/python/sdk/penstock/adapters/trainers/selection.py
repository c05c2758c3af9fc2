"""Selects the sequences of ended rollouts that a trainer may learn from, with the reason for each that is dropped.

Invariants: every given rollout has one place, in the given order, unless it is a spare beyond its group's size; a place
has either rows or a reason, never both and never neither. A row has logprobs, and at least one token that is trained. A
token is trained in one row only, because the samples of a trajectory share nothing under their masks.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.client.errors import InvalidArgument
from penstock.client.types.chat import Logprobs, LogprobsMode, TokenIds
from penstock.client.types.results import POLICY_CAUSES, FailureCause, RolloutResult
from penstock.client.types.trajectories import Reward, Sample, Trajectory

_ROUNDING: Final = 64 * float(np.finfo(np.float64).eps)
"""Rewards that differ by no more than this share of the largest, 1.4e-14, are equal: so much is lost where the same
components are added in another order."""

_GROUP_COMPLETE: Final = "GROUP_COMPLETE"
"""The reason of a rollout that was cancelled as its group had all its results."""


class DropReason(StrEnum):
    """Why a rollout, or a sequence of one, is not learned from."""

    NO_TRAJECTORY = "no_trajectory"
    """It ended before its first model call."""
    FAILED = "failed"
    """Something other than the policy failed: infrastructure, task, verifier, model; or it was cancelled."""
    UNGRADED = "ungraded"
    """No verifier gave a reward, which is not a reward of zero."""
    UNUSABLE = "unusable"
    """The trajectory's grade: text only, scripted, without exact tokens."""
    NO_LOGPROBS = "no_logprobs"
    """No logprobs for importance ratios."""
    MIXED_LOGPROBS = "mixed_logprobs"
    """Its turns have logprobs of different kinds, raw and processed, which no ratio may mix."""
    NOTHING_TRAINED = "nothing_trained"
    """All of it is masked: every turn was cut by a limit, for example."""
    TOO_LONG = "too_long"
    """It does not fit the trainer's arrays. It is not cut: the rest would not be what was graded."""
    SIBLING = "sibling"
    """The trainer accepts one sequence of a rollout, and another one has more trained tokens."""
    SURPLUS = "surplus"
    """A spare beyond its group's size: it has no place at all."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A dropped rollout or sequence. `sample_id` is empty for a whole rollout."""

    rollout_id: str
    reason: DropReason
    message: str
    sample_id: str = ""

    def __str__(self) -> str:
        what = f"sample {self.sample_id} of " if self.sample_id else ""
        return f"{what}{self.rollout_id}: {self.reason}: {self.message}"


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A sequence to learn from: a prompt, and from the first sampled token on a response, tool output included."""

    trajectory: Trajectory
    sample: Sample
    logprobs: Logprobs
    """float32, shape (n,): the engine's; 0.0 where nothing is trained."""
    reward: float
    """The rollout's."""

    @property
    def prompt_ids(self) -> TokenIds:
        """int32, before the first sampled token."""
        return self.sample.input_ids[: self.sample.prompt_count]

    @property
    def response_ids(self) -> TokenIds:
        """int32, from the first sampled token on."""
        return self.sample.input_ids[self.sample.prompt_count :]

    @property
    def response_mask(self) -> NDArray[np.bool_]:
        """Of `response_ids`: True on sampled tokens that are trained."""
        return self.sample.loss_mask[self.sample.prompt_count :]

    @property
    def response_logprobs(self) -> Logprobs:
        """Of `response_ids`."""
        return self.logprobs[self.sample.prompt_count :]

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """The versions of its policy that sampled it, ascending; of a branch without those of its parent's turns.

        Those of other policies' turns count from other beginnings, and are left out.
        """
        others = [
            turn
            for turn in self.sample.turns
            if turn.untrained_reason == "PARENT" or turn.policy_id != self.sample.policy_id
        ]
        own = (
            span
            for span in self.sample.versions
            if not any(turn.start <= span.start and span.end <= turn.end for turn in others)
        )
        return tuple(sorted({span.policy_version for span in own}))


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """One rollout: `rows`, or why there are none. Its reward is compared within `group`."""

    rollout_id: str
    group: str
    rows: tuple[Row, ...] = ()
    dropped: Dropped | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The rollouts in the given order; sequences dropped beside kept ones are in `siblings`, spares in `surplus`."""

    places: tuple[Place, ...]
    siblings: tuple[Dropped, ...] = field(default=())
    surplus: tuple[Dropped, ...] = field(default=())

    @property
    def rows(self) -> tuple[Row, ...]:
        """All sequences, rollout by rollout."""
        return tuple(row for place in self.places for row in place.rows)

    @property
    def dropped(self) -> tuple[Dropped, ...]:
        """Everything that is not learned from, to be reported."""
        return (*(place.dropped for place in self.places if place.dropped is not None), *self.siblings, *self.surplus)

    def group_reward(self, group: str) -> float:
        """Returns the mean reward of a group's rollouts that are learned from; 0.0 without any.

        Used as the reward of a dropped rollout for trainers that need a number for each: its mask is 0, and this reward
        moves no baseline.
        """
        rewards = _rewards(self.places).get(group)
        return _mean_and_spread(rewards)[0] if rewards else 0.0

    def advantages(self, *, scale: bool = True) -> dict[str, float]:
        """Returns, by rollout id, the reward minus its group's mean, over the group's standard deviation if `scale`.

        A rollout counts once, however many sequences it has; dropped ones do not count. If all rewards of a group are
        equal but for rounding (1.4e-14 of the largest), the advantages are exactly 0.0.
        """
        figures = {group: _mean_and_spread(rewards) for group, rewards in _rewards(self.places).items()}
        found = {}
        for place in self.places:
            if place.rows:
                mean, spread = figures[place.group]
                advantage = float(place.rows[0].reward) - mean if spread else 0.0
                found[place.rollout_id] = advantage / spread if scale and spread else advantage
        return found


def select(
    results: Iterable[RolloutResult | Trajectory],
    *,
    one_sequence: bool = False,
    max_prompt_tokens: int | None = None,
    max_response_tokens: int | None = None,
    policy_id: str | None = None,
) -> Selection:
    """Selects what to learn from ended rollouts. Pure and deterministic.

    Spares beyond a group's size have no place. `group.results()` says which these are; of other rollouts, and of
    trajectories, it is known of those alone that were cancelled as their group had all its results (GROUP_COMPLETE).

    Args:
        results: rollouts as `group.results()` returns them, or trajectories: the first of each pair from
            `ps.rollouts.export`.
        one_sequence: for trainers that accept one sequence of a rollout: that with most trained tokens.
        max_prompt_tokens, max_response_tokens: longer sequences are dropped.
        policy_id: samples of this policy only, where rollouts have several. None = those of all policies: each is of
            one (`row.sample.policy_id`), and is for the trainer of that one.
    """
    places, siblings, surplus = [], [], []
    for result in results:
        if _is_surplus(result):
            cause, why = _failure(result)
            message = "its group has its size without it" + (f"; {cause}: {why}" if cause else "")
            surplus.append(Dropped(result.rollout_id, DropReason.SURPLUS, message))
            continue
        place, beside = _place(result, max_prompt_tokens, max_response_tokens, policy_id)
        if one_sequence and len(place.rows) > 1:
            largest = max(place.rows, key=lambda row: int(row.sample.loss_mask.sum()))
            for row in place.rows:
                if row is not largest:
                    message = f"the trainer uses one sequence per rollout, here {largest.sample.sample_id}"
                    beside.append(Dropped(place.rollout_id, DropReason.SIBLING, message, row.sample.sample_id))
            place = Place(place.rollout_id, place.group, (largest,))
        places.append(place)
        siblings += beside
    return Selection(tuple(places), tuple(siblings), tuple(surplus))


def _failure(result: RolloutResult | Trajectory) -> tuple[str, str]:
    """Returns cause and reason; empty if it completed."""
    if isinstance(result, Trajectory):
        # The wire has these words in upper case.
        return result.failure_cause.lower(), result.failure_reason
    return ("", "") if result.failure is None else (str(result.failure.cause), result.failure.reason)


def _is_surplus(result: RolloutResult | Trajectory) -> bool:
    if isinstance(result, RolloutResult) and result.surplus is not None:
        return result.surplus
    return _failure(result) == (FailureCause.CANCELLED, _GROUP_COMPLETE)


def _place(
    result: RolloutResult | Trajectory,
    max_prompt_tokens: int | None,
    max_response_tokens: int | None,
    policy_id: str | None,
) -> tuple[Place, list[Dropped]]:
    """Returns the rollout's place, and its sequences that were dropped beside its rows."""
    if isinstance(result, Trajectory):
        trajectory: Trajectory | None = result
        reward: Reward | None = result.reward
        rollout_id, group_id, task_id = result.rollout_id, result.group_id, result.task_id
    else:
        trajectory, reward = result.trajectory, result.reward
        rollout_id, group_id, task_id = result.rollout_id, result.rollout.group_id, result.rollout.task_id
    cause, why = _failure(result)
    # Rollouts that were started one by one are compared with those of the same task.
    group = group_id or f"task {task_id}"

    def dropped(reason: DropReason, message: str) -> tuple[Place, list[Dropped]]:
        return Place(rollout_id, group, dropped=Dropped(rollout_id, reason, message)), []

    if cause and cause not in POLICY_CAUSES:
        return dropped(DropReason.FAILED, f"{cause}: {why}")
    if trajectory is None:
        return dropped(DropReason.NO_TRAJECTORY, why or "it has no trajectory")
    if reward is None:
        return dropped(DropReason.UNGRADED, f"{cause}: {why}" if cause else "no verifier returned a reward")
    if trajectory.grade == "unusable":
        found = sorted({finding.reason for finding in trajectory.findings if finding.severity == "fatal"})
        return dropped(DropReason.UNUSABLE, ", ".join(found) or "the trajectory's grade")
    rows, beside = [], []
    for sample in trajectory.samples:
        if policy_id not in (None, sample.policy_id):
            continue
        fault = _fault(sample, max_prompt_tokens, max_response_tokens)
        if fault is not None:
            beside.append(Dropped(rollout_id, *fault, sample.sample_id))
        elif sample.logprobs is not None:
            rows.append(Row(trajectory, sample, sample.logprobs, reward.value))
    if not rows:
        first = beside[0] if beside else Dropped(rollout_id, DropReason.NOTHING_TRAINED, "it has no samples")
        return dropped(first.reason, first.message)
    return Place(rollout_id, group, tuple(rows)), beside


def _fault(
    sample: Sample, max_prompt_tokens: int | None, max_response_tokens: int | None
) -> tuple[DropReason, str] | None:
    if not sample.loss_mask.any():
        return DropReason.NOTHING_TRAINED, "all of it is masked"
    if sample.logprobs is None:
        return DropReason.NO_LOGPROBS, "the engine returned no logprobs"
    if sample.logprobs_mode is LogprobsMode.UNSPECIFIED:  # the gate takes none without a kind: there are several
        return DropReason.MIXED_LOGPROBS, "its turns have raw and processed logprobs"
    sizes = (
        ("prompt", sample.prompt_count, max_prompt_tokens),
        ("response", len(sample) - sample.prompt_count, max_response_tokens),
    )
    for what, count, limit in sizes:
        if limit is not None and count > limit:
            return DropReason.TOO_LONG, f"its {what} has {count} tokens, more than {limit}"
    return None


def _rewards(places: Iterable[Place]) -> dict[str, list[float]]:
    """Returns, for each group, a reward per rollout that is learned from."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for place in places:
        if place.rows:
            rewards[place.group].append(place.rows[0].reward)
    return rewards


def _mean_and_spread(rewards: list[float]) -> tuple[float, float]:
    """Returns mean and population standard deviation of at least one reward; the latter is 0 if all are equal.

    Equal means: but for rounding. The rounded mean of equal rewards is seldom that reward, and sums of the same
    components in another order differ in their last bits: three rewards of 0.1 would each be a whole deviation of
    1.4e-17 from their mean.
    """
    values = np.array(rewards, np.float64)
    if values.max() - values.min() <= _ROUNDING * np.abs(values).max():
        return float(np.median(values)), 0.0
    return float(values.mean()), float(values.std())


def only_row(place: Place, trainer: str) -> Row | None:
    """Returns the place's row, None where it was dropped, for a trainer that takes one sequence of a rollout.

    Raises:
        InvalidArgument: `SEVERAL_SEQUENCES`, it has more than one.
    """
    if len(place.rows) > 1:
        raise InvalidArgument(
            f"Rollout {place.rollout_id} has {len(place.rows)} sequences, but {trainer} uses one per prompt: use "
            "select(results, one_sequence=True)",
            reason="SEVERAL_SEQUENCES",
        )
    return place.rows[0] if place.rows else None


def trained_runs(mask: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yields the runs [start, end) of True in a mask."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
