"""Values of calls and advantages of turns, from the rewards of branches.

The estimator is that of VinePPO (Kazemnejad et al. 2024, arXiv:2410.01679): the value of an intermediate state is the
mean reward of rollouts that continue from it. The state before call t is all calls before t with their answers.

    V(t)  mean reward of the branches that sample call t anew. The rollout's own reward is not among them: it depends on
          the answer whose advantage is estimated.
    A(t)  V(t+1) - V(t), the advantage of the rollout's own answer to call t; of the last call reward - V(T).

Where not each call was branched, the turns between two that were are one action, and share its advantage. Invariant:
the advantages of the actions add up to the reward minus the first value that is known.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.client.errors import InvalidArgument
from penstock.client.types.results import POLICY_CAUSES, RolloutResult
from penstock.client.types.trajectories import Annotation, Call, Sample, Trajectory


@dataclass(frozen=True, slots=True)
class Value:
    """What the state before a call is worth.

    Attributes:
        rewards: of the rollouts that sampled the call anew, those that count; at least one.
        left_out: how many others ended without a reward that counts, or never came to the call.
        group_id: the group of the branches; None = these are the rollout's siblings, which all sampled the call.
    """

    rewards: tuple[float, ...]
    left_out: int = 0
    group_id: str | None = None

    @property
    def mean(self) -> float:
        """The estimate, in units of reward."""
        return math.fsum(self.rewards) / len(self.rewards)

    @property
    def count(self) -> int:
        """The number of rewards."""
        return len(self.rewards)

    @property
    def standard_error(self) -> float | None:
        """Of the mean, from the sample's standard deviation; None for one reward."""
        if self.count < 2:
            return None
        mean = self.mean
        variance = math.fsum((reward - mean) ** 2 for reward in self.rewards) / (self.count - 1)
        return math.sqrt(variance / self.count)


@dataclass(frozen=True, slots=True)
class TurnCredit:
    """What a rollout's answer to one call changed.

    Attributes:
        call_id, index: the call.
        value: of the state before this call; None = it was not branched, or no branch of it counts.
        advantage: of the action that this turn is part of, in units of reward; None = there is no value before it.
        standard_error: of the advantage; None where it has none, or a value is the reward of a single branch.
        shared_by: how many turns the action has: 1 = the advantage is this turn's alone.
    """

    call_id: str
    index: int
    value: Value | None
    advantage: float | None
    standard_error: float | None
    shared_by: int


@dataclass(frozen=True, slots=True)
class RolloutCredit:
    """The turns that a rollout answered itself, in order of arrival, and its reward."""

    rollout_id: str
    reward: float
    turns: tuple[TurnCredit, ...]

    @property
    def pivotal(self) -> TurnCredit | None:
        """The turn whose advantage is largest in standard errors, of equal ones the largest, then the first.

        None = no turn has a standard error. Without any spread on both sides of a turn, a change is certain.
        """

        def surely(turn: TurnCredit) -> tuple[float, float]:
            change, error = abs(turn.advantage or 0.0), turn.standard_error or 0.0
            return (change / error if error else math.inf if change else 0.0), change

        known = [turn for turn in self.turns if turn.advantage is not None and turn.standard_error is not None]
        return max(known, key=surely, default=None)

    def token_advantages(self, sample: Sample) -> NDArray[np.float32]:
        """Returns the advantage of each token of one of this rollout's samples.

        Returns:
            float32, shape (n,): on tokens whose mask is True that of their turn; 0.0 on all others, and where a turn
            has none.

        Raises:
            InvalidArgument: `SAMPLE_UNKNOWN`, the sample trains a call that is not among the turns.
        """
        advantages = {turn.call_id: turn.advantage for turn in self.turns}
        found = np.zeros(len(sample), np.float32)
        for span in sample.turns:
            if not sample.loss_mask[span.start : span.end].any():
                continue
            if span.call_id not in advantages:
                raise InvalidArgument(
                    f"sample {sample.sample_id} trains call {span.call_id}, which is no turn of {self.rollout_id}: "
                    "give a sample of that rollout",
                    reason="SAMPLE_UNKNOWN",
                )
            found[span.start : span.end] = advantages[span.call_id] or 0.0
        found[~sample.loss_mask] = 0.0
        return found

    def annotated(self, trajectory: Trajectory) -> Trajectory:
        """Returns this rollout's trajectory, whose samples have the advantages of their tokens, as exports take them.

        Raises:
            InvalidArgument: `SAMPLE_UNKNOWN`, as `token_advantages`.
        """
        samples = (replace(one, advantages=self.token_advantages(one)) for one in trajectory.samples)
        return replace(trajectory, samples=tuple(samples))

    def annotations(self, author: str, name: str = "advantage") -> list[Annotation]:
        """Returns the advantages as annotations of the turns that have one, for `ps.rollouts.annotate`.

        `author` says who estimated, such as "branches, n = 8". Details: the standard error, and `shared_by`.
        """
        return [
            Annotation(
                name=name,
                author=author,
                call_id=turn.call_id,
                value=turn.advantage,
                details={"standard_error": turn.standard_error, "shared_by": turn.shared_by},
            )
            for turn in self.turns
            if turn.advantage is not None
        ]


def turns_of(trajectory: Trajectory) -> list[Call]:
    """Returns the calls that a rollout answered itself, in order of arrival: of a branch, none of its parent's."""
    return [
        call
        for call in sorted(trajectory.calls, key=lambda call: call.index)
        if call.state == "delivered"
        and (call.replayed_from is None or call.replayed_from.rollout_id == trajectory.rollout_id)
        and not call.given
    ]


def counted_reward(result: RolloutResult) -> float | None:
    """Returns the reward of an ended rollout; None where it says nothing of the policy.

    That is one without a reward, one that failed by no fault of the policy, and a branch that never came to its call.
    """
    failure, trajectory = result.failure, result.trajectory
    if result.reward is None or (failure is not None and failure.cause not in POLICY_CAUSES):
        return None
    if trajectory is not None and any(finding.reason == "BRANCH_MISSED" for finding in trajectory.findings):
        return None
    return result.reward.value


def credited(rollout_id: str, calls: Sequence[Call], values: Mapping[str, Value], reward: float) -> RolloutCredit:
    """Returns the advantages of a rollout's turns.

    Args:
        rollout_id: the rollout.
        calls: its turns in order, as `turns_of` returns them.
        values: the values that are known, by call id.
        reward: the rollout's own.
    """
    starts = [number for number, call in enumerate(calls) if call.call_id in values]
    turns = [TurnCredit(call.call_id, call.index, None, None, None, 1) for call in calls]
    for start, end in zip(starts, [*starts, len(calls)][1:], strict=True):
        before = values[calls[start].call_id]
        after = values[calls[end].call_id] if end < len(calls) else None
        advantage = (reward if after is None else after.mean) - before.mean
        # The reward is what the last state is worth, without an error.
        errors = [before.standard_error, 0.0 if after is None else after.standard_error]
        known = [error for error in errors if error is not None]
        error = math.hypot(*known) if len(known) == len(errors) else None
        for number in range(start, end):
            call = calls[number]
            value = values.get(call.call_id)
            turns[number] = TurnCredit(call.call_id, call.index, value, advantage, error, end - start)
    return RolloutCredit(rollout_id, reward, tuple(turns))
