"""Rewards of turns in trajectories: by the ids of their calls, and in the samples that have those calls."""

from __future__ import annotations

import struct

import pytest

from penstock.trajectory.v1 import trajectory_pb2
from penstock_driver.domain.rollout import Outcome, Reward, RolloutFailed, TurnReward
from penstock_driver.trajectories.turn_rewards import add_to_samples, with_call_ids
from penstock_driver.wire.outcomes import outcome_from_proto
from penstock_driver.wire.to_proto import outcome_to_proto

pytestmark = pytest.mark.requirement("R135")


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def call(index: int, tokens: int | None) -> trajectory_pb2.Call:
    made = trajectory_pb2.Call(call_id=f"c{index}", index=index)
    if tokens is not None:
        made.completion.span.count = tokens
    return made


def rewarding(*turns: TurnReward) -> Reward:
    return Reward(1.0, 0.0, 1.0, {}, turns)


def test_turns_get_the_ids_of_their_calls_in_their_order() -> None:
    given = rewarding(TurnReward(0.5, call_index=2), TurnReward(None, {}, floats(1, 2), 0))
    found = with_call_ids(given, [call(0, 2), call(1, None), call(2, 3)])
    assert [(turn.call_id, turn.value) for turn in found.turns] == [("c0", None), ("c2", 0.5)]
    assert (found.value, found.turns[0].token_values) == (1.0, floats(1, 2))


@pytest.mark.parametrize(
    ("turn", "says"),
    [
        (TurnReward(1.0, call_index=1), "call 1 of the rollout has no answer; these have one: 0"),
        (TurnReward(1.0, call_index=7), "call 7 of the rollout has no answer"),
        (TurnReward(None, {}, floats(1), 0), "call 0 sampled 2 tokens, and tokens has 1 numbers"),
    ],
)
def test_a_turn_of_no_answer_is_the_verifiers_failure(turn: TurnReward, says: str) -> None:
    with pytest.raises(RolloutFailed) as caught:
        with_call_ids(rewarding(turn), [call(0, 2), call(1, None)])
    assert says in caught.value.failure.message
    assert (caught.value.failure.cause, caught.value.failure.reason) == ("VERIFIER", "REWARD_INVALID")


def test_a_stored_reward_keeps_its_turns() -> None:
    """A driver that goes on with a graded rollout reads the outcome so far."""
    turns = (TurnReward(0.5, {"style": 1.0}, floats(1, 2), call_id="c0"), TurnReward(-1.0, call_id="c1"))
    outcome = Outcome(reward=rewarding(*turns))
    assert outcome_from_proto(outcome_to_proto(outcome)) == outcome


def test_samples_have_the_rewards_of_their_turns_and_tokens() -> None:
    """A turn of which a sample has the beginning only has the rewards of that."""
    fragment = trajectory_pb2.Trajectory()
    whole, cut, other = fragment.samples.add(count=9), fragment.samples.add(count=5), fragment.samples.add(count=3)
    whole.turns.add(call_id="c0", start=2, end=4)
    whole.turns.add(call_id="c1", start=6, end=9)
    cut.turns.add(call_id="c0", start=2, end=4)
    cut.turns.add(call_id="c1", start=4, end=5)
    other.turns.add(call_id="c2", start=1, end=3)
    reward = trajectory_pb2.Reward(value=1)
    reward.turns.add(call_id="c0", value=0.0)
    reward.turns.add(call_id="c1", token_values=floats(1, 2, 3))
    add_to_samples(fragment, reward)
    assert [(turn.HasField("reward"), turn.reward) for turn in whole.turns] == [(True, 0.0), (False, 0.0)]
    assert whole.token_rewards == floats(0, 0, 0, 0, 0, 0, 1, 2, 3)
    assert cut.token_rewards == floats(0, 0, 0, 0, 1)
    assert other.token_rewards == b"" and not other.turns[0].HasField("reward")
    before = fragment.SerializeToString()
    add_to_samples(fragment, None)
    add_to_samples(fragment, trajectory_pb2.Reward(value=1))
    assert fragment.SerializeToString() == before
