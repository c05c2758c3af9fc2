"""prime-rl: the `TrainingSample` that its orchestrator packs for the trainer.

Form: src/prime_rl/transports/rollouts/types.py of https://github.com/PrimeIntellect-ai/prime-rl at commit 559b447
(0.8.1.dev67, 2026-08-21): a flat sequence with a mask, and advantages per token.
"""

from typing import NotRequired, TypedDict

import numpy as np

from penstock.adapters.trainers.experts import experts_of, with_last
from penstock.adapters.trainers.selection import Row, Selection
from penstock.client.errors import InvalidArgument


class RoutedExperts(TypedDict):
    """The fields of a `RoutedExperts`; `RoutedExperts(**it)` makes it. The shape: tokens, layers, experts per token."""

    data: bytes
    shape: list[int]
    dtype: str


class TrainingSample(TypedDict):
    """The fields of a `TrainingSample`, all lists as long as `token_ids`; `TrainingSample(**it)` makes it."""

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    env_name: str
    advantages: list[float]
    routed_experts: NotRequired[RoutedExperts]


def training_samples(selection: Selection, *, env_name: str, temperature: float | None = None) -> list[TrainingSample]:
    """Returns a sample per sequence.

    The advantage is the reward minus its group's mean, prime-rl's default; a rollout counts once in the mean, and all
    its sequences have its advantage: prime-rl's loss is a sum over tokens. Routed experts, if the sequences have them
    (read with `tensors=True`), are of each token, 0 for the last.

    Args:
        selection: of any number of groups.
        env_name: of the environment, by which prime-rl keeps its metrics.
        temperature: of the sampling, for trajectories without calls, such as those of `results()`. None = each trained
            turn has that of its call, which `results(samples_only=False)` has.

    Raises:
        InvalidArgument: `TEMPERATURE_UNKNOWN`, it is None, and a trained turn's call is absent or has none; as
            `experts_of`.
    """
    experts = experts_of(selection.rows)
    advantages = selection.advantages(scale=False)
    samples = []
    for place in selection.places:
        for row in place.rows:
            trained = row.sample.loss_mask
            samples.append(
                TrainingSample(
                    token_ids=row.sample.input_ids.tolist(),
                    mask=trained.tolist(),
                    logprobs=row.logprobs.tolist(),
                    temperatures=_temperatures(row, temperature),
                    env_name=env_name,
                    advantages=np.where(trained, advantages[place.rollout_id], 0.0).tolist(),
                )
            )
    for made, own in zip(samples, experts or (), strict=False):
        whole = with_last(own)
        made["routed_experts"] = RoutedExperts(
            data=whole.astype(whole.dtype.newbyteorder("<"), copy=False).tobytes(),
            shape=list(whole.shape),
            dtype=whole.dtype.name,
        )
    return samples


def _temperatures(row: Row, default: float | None) -> list[float]:
    """Returns the temperature per token, from the calls that sampled them; that of context means nothing."""
    by_call = {
        call.call_id: call.completion.sampling_used.temperature
        for call in row.trajectory.calls
        if call.completion is not None and call.completion.sampling_used is not None
    }
    temperatures = np.full(len(row.sample), 1.0 if default is None else default)
    for turn in row.sample.turns:
        temperature = by_call.get(turn.call_id)
        if temperature is not None:
            temperatures[turn.start : turn.end] = temperature
        elif default is None and row.sample.loss_mask[turn.start : turn.end].any():
            raise InvalidArgument(
                f"Call {turn.call_id} of {row.trajectory.rollout_id} has no temperature here: read the rollouts with "
                "their calls, results(samples_only=False), or give temperature=",
                reason="TEMPERATURE_UNKNOWN",
            )
    found: list[float] = temperatures.tolist()
    return found
