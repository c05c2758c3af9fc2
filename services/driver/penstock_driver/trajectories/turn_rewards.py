"""Rewards of single turns: a verifier names calls by their index, a trajectory by their ids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from penstock.trajectory.v1 import trajectory_pb2
from penstock_driver.domain.rollout import Reward, TurnReward
from penstock_driver.grading.verifier import invalid_reward

_FLOAT_BYTES: Final = 4


def with_call_ids(reward: Reward, calls: Iterable[trajectory_pb2.Call]) -> Reward:
    """The reward, whose turns have the ids of these calls, in their order.

    Of a call its index, its id and the number of its sampled tokens are read. RolloutFailed (VERIFIER,
    REWARD_INVALID): a turn is of a call that has no answer, or has a value for each of another number of tokens.
    """
    if not reward.turns:
        return reward
    answered = {call.index: call for call in calls if call.HasField("completion")}

    def found(turn: TurnReward) -> TurnReward:
        call = answered.get(turn.call_index)
        if call is None:
            have = ", ".join(map(str, sorted(answered)[:16])) or "none"
            raise invalid_reward(f"turns: call {turn.call_index} of the rollout has no answer; these have one: {have}")
        count, given = call.completion.span.count, len(turn.token_values) // _FLOAT_BYTES
        if given not in (0, count):
            raise invalid_reward(
                f"turns: call {turn.call_index} sampled {count} tokens, and tokens has {given} numbers"
            )
        return replace(turn, call_id=call.call_id)

    ordered = sorted(reward.turns, key=lambda turn: turn.call_index)
    return replace(reward, turns=tuple(map(found, ordered)))


def add_to_samples(fragment: trajectory_pb2.Trajectory, reward: trajectory_pb2.Reward | None) -> None:
    """Set the rewards of turns and tokens in the fragment's samples."""
    turns = {turn.call_id: turn for turn in reward.turns} if reward is not None else {}
    if not turns:
        return
    for sample in fragment.samples:
        tokens = bytearray()
        for span in sample.turns:
            turn = turns.get(span.call_id)
            if turn is None:
                continue
            if turn.HasField("value"):
                span.reward = turn.value
            if turn.token_values:
                tokens = tokens or bytearray(_FLOAT_BYTES * sample.count)
                start, size = _FLOAT_BYTES * span.start, _FLOAT_BYTES * (span.end - span.start)
                # A sample may have the first of the call's tokens only (PARTIAL).
                tokens[start : start + size] = turn.token_values[:size]
        sample.token_rewards = bytes(tokens)
