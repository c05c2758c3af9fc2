"""Groups in the forms of trainers that tell them apart by the places of their rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.unit.analysis.trajectory_cases import failed, sample, trajectory

from penstock.adapters.trainers import DropReason, openrlhf, select, skyrl, slime, trl
from penstock.client import InvalidArgument
from penstock.client.types.results import FailureCause, Group, RolloutResult
from penstock.client.types.trajectories import Trajectory

PAD = 7


def rollout(rollout_id: str, reward: float, group: str = "g") -> Trajectory:
    return trajectory(rollout_id, [sample(rollout_id, [(2, 3, True)])], reward=reward, group=group)


def two_groups() -> list[Trajectory | RolloutResult]:
    """Three rollouts of each, in the order in which they might end; one of the first group is lost."""
    return [
        rollout("a", 1.0),
        rollout("d", 0.0, "h"),
        failed("b", FailureCause.INFRASTRUCTURE),
        rollout("e", 0.0, "h"),
        rollout("c", 0.0),
        rollout("f", 1.0, "h"),
    ]


@pytest.mark.requirement("R74", "R84")
def test_openrlhfs_rows_are_whole_groups_one_after_another() -> None:
    """It has no key of a group: it cuts the rewards into pieces of n_samples_per_prompt, in the order of the rows."""
    made = openrlhf.experiences(select(two_groups()), filler_token_id=PAD)
    rewards = np.concatenate([one["rewards"] for one in made]).reshape(-1, 3)
    assert rewards.tolist() == [[1.0, 0.5, 0.0], [0.0, 0.0, 1.0]]
    assert [bool(one["action_mask"].any()) for one in made] == [True, False, True, True, True, True]


@pytest.mark.requirement("R74", "R84")
def test_a_dropped_rollout_has_a_row_of_openrlhfs_that_trains_nothing() -> None:
    """It has all that other rows have, so that OpenRLHF can put them into one batch, and makes none look older."""
    other, filler = openrlhf.experiences(
        select([rollout("a", 1.0), failed("b", FailureCause.INFRASTRUCTURE)]), filler_token_id=PAD
    )
    assert (filler["sequences"].tolist(), filler["attention_mask"].tolist()) == ([[PAD, PAD]], [[1, 1]])
    assert (filler["action_mask"].tolist(), filler["rollout_log_probs"].tolist()) == ([[0]], [[0.0]])
    assert (filler["rewards"].tolist(), filler["scores"].tolist()) == ([1.0], [1.0])
    assert (filler["response_length"].tolist(), filler["total_length"].tolist()) == ([0], [2.0])
    assert filler["truncated"].tolist() == [False]
    assert filler.keys() == other.keys() and filler["info"].keys() == other["info"].keys()
    assert filler["info"]["policy_version"].tolist() == other["info"]["policy_version"].tolist() == [1.0]
    for name in ("sequences", "attention_mask", "action_mask", "rollout_log_probs", "rewards", "truncated"):
        assert (filler[name].ndim, filler[name].dtype) == (other[name].ndim, other[name].dtype)


@pytest.mark.requirement("R26")
def test_openrlhf_is_given_no_group_that_lacks_a_rollout() -> None:
    """Without a word, the rollouts after it would be compared with those of other prompts."""
    with pytest.raises(InvalidArgument, match=r"b: failed: infrastructure.*filler_token_id") as raised:
        openrlhf.experiences(select(two_groups()))
    assert raised.value.reason == "ROLLOUT_DROPPED"


@pytest.mark.requirement("R26", "R85")
def test_openrlhf_takes_one_sequence_of_a_rollout() -> None:
    """A second row would shift all later groups."""
    branched = replace(rollout("a", 1.0), samples=(sample("s", [(1, 2, True)]), sample("t", [(1, 4, True)])))
    with pytest.raises(InvalidArgument, match="one_sequence=True") as raised:
        openrlhf.experiences(select([branched]), filler_token_id=PAD)
    assert raised.value.reason == "SEVERAL_SEQUENCES"
    (made,) = openrlhf.experiences(select([branched], one_sequence=True))
    assert made["sequences"].shape == (1, 5)


def ended(rollout_id: str, reason: str) -> RolloutResult:
    """A rollout that was cancelled before its first call."""
    result = failed(rollout_id, FailureCause.CANCELLED)
    assert result.failure is not None
    outcome = replace(result.outcome, failure=replace(result.failure, reason=reason))
    return RolloutResult(replace(result.rollout, outcome=outcome), outcome)


@pytest.mark.requirement("R26", "R74")
def test_spares_have_no_places_in_the_forms() -> None:
    """A group has as many rows as it was to have results, and what is left out is named."""
    spare = replace(ended("c", "STRAGGLER"), surplus=True)
    results: list[Trajectory | RolloutResult] = [rollout("a", 1.0), ended("b", "GROUP_COMPLETE"), spare]
    results.append(rollout("d", 0.0))
    selection = select(results)
    assert [place.rollout_id for place in selection.places] == ["a", "d"]
    assert [(one.rollout_id, one.reason) for one in selection.dropped] == [
        ("b", DropReason.SURPLUS),
        ("c", DropReason.SURPLUS),
    ]
    assert "GROUP_COMPLETE" in selection.dropped[0].message and "STRAGGLER" in selection.dropped[1].message
    assert len(trl.rollout_output(selection, filler_token_id=PAD)["reward"]) == 2
    assert len(skyrl.generator_output(selection, filler_token_id=PAD)["rewards"]) == 2
    assert [len(group) for group in slime.samples(selection, filler_token_id=PAD)] == [2]


@pytest.mark.requirement("R74")
def test_a_spare_of_an_export_that_its_complete_group_cancelled_has_no_place() -> None:
    """A straggler has one: nothing in its trajectory says how many results its group was to have."""
    kinds = ("GROUP_COMPLETE", "STRAGGLER")
    results = [
        trajectory(name, [sample(name, [(1, 2, True)])], cause="cancelled", reason=name, reward=None) for name in kinds
    ]
    selection = select(results)
    assert [place.rollout_id for place in selection.places] == ["STRAGGLER"]
    assert {one.rollout_id: one.reason for one in selection.dropped} == {
        "GROUP_COMPLETE": DropReason.SURPLUS,
        "STRAGGLER": DropReason.FAILED,
    }


@pytest.mark.requirement("R74")
@pytest.mark.parametrize(
    ("counted", "surplus"),
    [
        (("g-4", "g-0", "g-1"), ("g-2", "g-3")),  # cancelled, or graded as the last result came
        (("g-0", "g-4"), ("g-2", "g-3")),  # one of the others takes the third place
        ((), ("g-3", "g-4")),
        (("g-0",), ("g-3", "g-4")),
    ],
)
def test_group_of_n_has_n_places_whichever_of_its_rollouts_count(
    counted: tuple[str, ...], surplus: tuple[str, ...]
) -> None:
    """Those that count first, then the others by their index."""
    group = Group(
        group_id="g",
        size=3,
        spares=2,
        quorum=2,
        rollout_ids=tuple(f"g-{index}" for index in range(5)),
        ended_count=5,
        ended=True,
        complete=len(counted) >= 2,
        result_rollout_ids=counted,
        create_time=None,
        end_time=None,
    )
    assert group.surplus_rollout_ids == surplus
    assert replace(group, ended=False).surplus_rollout_ids == ()
