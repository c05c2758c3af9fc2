"""TRL (1.16.0): the return value of a `rollout_func` of `GRPOTrainer`, and the samples that a rollout worker of
`AsyncGRPOTrainer` puts on its queue.

Forms: trl/trainer/grpo_trainer.py (`_generate`) and trl/experimental/async_grpo/async_rollout_worker.py
(`RolloutSample`), https://github.com/huggingface/trl/tree/v1.16.0.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from penstock.adapters.trainers.selection import Selection, only_row

Messages = list[dict[str, str]]


class RolloutOutput(TypedDict):
    """The dict of a `rollout_func`, an entry per prompt. Reward functions get the entries after `env_mask`."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]]
    env_mask: list[list[int]]
    """Of the completion: 1 = sampled, and trained."""
    reward: list[float | None]
    """None = not to be learned from: TRL leaves it out of the group's baseline."""
    rollout_id: list[str]
    policy_version: list[int | None]
    truncated: list[bool]


class RolloutSample(TypedDict):
    """The fields of TRL's `RolloutSample`; `RolloutSample(**it)` makes it."""

    prompt: Messages
    completion: Messages
    input_ids: NDArray[np.int64]
    completion_mask: NDArray[np.int64]
    old_log_probs: NDArray[np.float32]
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float]


def rollout_output(selection: Selection, *, filler_token_id: int) -> RolloutOutput:
    """Returns a `rollout_func`'s result: a completion per rollout, in order, with tool output masked by `env_mask`.

    A dropped rollout keeps its place, since TRL requires one per prompt: one masked token without a reward.

    Args:
        selection: of `select(results, one_sequence=True)`.
        filler_token_id: for dropped rollouts; the tokenizer's padding.

    Raises:
        InvalidArgument: `SEVERAL_SEQUENCES`, a rollout has more than one.
    """
    output = RolloutOutput(
        prompt_ids=[], completion_ids=[], logprobs=[], env_mask=[],
        reward=[], rollout_id=[], policy_version=[], truncated=[],
    )  # fmt: skip
    for place in selection.places:
        row = only_row(place, "TRL")
        filler = [filler_token_id]
        output["prompt_ids"].append(filler if row is None else row.prompt_ids.tolist())
        output["completion_ids"].append(filler if row is None else row.response_ids.tolist())
        output["logprobs"].append([0.0] if row is None else row.response_logprobs.tolist())
        output["env_mask"].append([0] if row is None else row.response_mask.astype(int).tolist())
        output["reward"].append(None if row is None else row.reward)
        output["rollout_id"].append(place.rollout_id)
        output["policy_version"].append(None if row is None else min(row.policy_versions, default=None))
        output["truncated"].append(row is not None and row.sample.truncated)
    return output


def reward(*, reward: Sequence[float | None], **_: Any) -> list[float | None]:
    """A reward function for `GRPOTrainer(reward_funcs=...)`: returns the rewards of `rollout_output`."""
    return list(reward)


def rollout_samples(
    selection: Selection, *, first_group_id: int = 0, decode: Callable[[list[int]], str] | None = None
) -> list[RolloutSample]:
    """Returns samples for the `rollout_buffer` of a rollout worker: a row per sequence.

    All rows of a rollout have its advantage: TRL's loss is a mean over all tokens, so that branches weigh by their
    trained tokens. `model_version` is the oldest that sampled the row, by which TRL judges staleness.

    Args:
        selection: of any number of groups.
        first_group_id: of the first group; the others count on.
        decode: the tokenizer's, for the texts that TRL logs; None = empty ones.
    """
    advantages = selection.advantages()
    numbers = {group: first_group_id + i for i, group in enumerate(dict.fromkeys(p.group for p in selection.places))}
    samples = []
    for place in selection.places:
        for row in place.rows:
            texts = [decode(ids.tolist()) if decode else "" for ids in (row.prompt_ids, row.response_ids)]
            samples.append(
                RolloutSample(
                    prompt=[{"role": "user", "content": texts[0]}],
                    completion=[{"role": "assistant", "content": texts[1]}],
                    input_ids=row.sample.input_ids.astype(np.int64),
                    completion_mask=row.sample.loss_mask.astype(np.int64),
                    old_log_probs=row.logprobs.astype(np.float32),
                    advantage=advantages[place.rollout_id],
                    model_version=min(row.policy_versions, default=0),
                    group_id=numbers[place.group],
                    metrics={"reward": row.reward, "truncated": float(row.sample.truncated)},
                )
            )
    return samples
