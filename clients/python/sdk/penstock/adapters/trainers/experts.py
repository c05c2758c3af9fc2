"""Routed experts of sequences, for trainers that replay the routing of a mixture-of-experts model (R3).

A sequence of n tokens has n - 1 rows: the model was not run on the last one.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.adapters.trainers.selection import Row
from penstock.client.errors import InvalidArgument
from penstock.client.types.trajectories import Sample
from penstock.values.token_tensors import ROUTED_EXPERTS

_ABSENT: Final = -1


def experts_of(rows: Iterable[Row], *, fill: int | None = None) -> list[NDArray[Any]] | None:
    """Returns the experts of each row, (n - 1, layers, experts per token); None if no row has any.

    Args:
        rows: read with `tensors=True`.
        fill: for tokens whose routing was not captured; None = that is an error, unless they come after the last
            trained one, as where another policy goes on: such get the first experts, and no trained token depends on
            them.

    Raises:
        InvalidArgument: `TENSOR_GAP`, some rows have experts and others have none, or not for each token;
            `TENSOR_LEFT_OUT`; `TENSOR_SHAPE`, rows are of several models.
    """
    held = [*rows]
    found = [_in_effect(row.sample) if fill is None else row.sample.routed_experts(fill) for row in held]
    there = [one for one in found if one is not None]
    if not there:
        return None
    if len({one.shape[1:] for one in there}) > 1:
        raise InvalidArgument("The sequences have routed experts of several models", reason="TENSOR_SHAPE")
    for row, one in zip(held, found, strict=True):
        if one is None and fill is None:
            raise InvalidArgument(
                f"{row.sample.sample_id} has no routed experts, but others have: leave it out", reason="TENSOR_GAP"
            )
    shape = there[0].shape[1:]
    return [
        np.full((len(row.sample) - 1, *shape), fill or 0, np.int32) if one is None else one
        for row, one in zip(held, found, strict=True)
    ]


def _in_effect(sample: Sample) -> NDArray[Any] | None:
    """Returns a sample's experts; tokens that no trained one depends on may lack them, and then have the first ones."""
    tensors = sorted((one for one in sample.tensors if one.name == ROUTED_EXPERTS), key=lambda one: one.start)
    known = 0
    for tensor in tensors:
        if tensor.start > known:
            break
        known = tensor.end
    # A trained token was chosen by the pass before it.
    needed = int(np.flatnonzero(sample.loss_mask)[-1]) if sample.loss_mask.any() else 0
    if not needed <= known < len(sample) - 1:
        return sample.routed_experts()
    experts = sample.routed_experts(_ABSENT)
    if experts is None:
        return None
    # Zeros are a capture that failed, for slime.
    experts[experts[:, 0, 0] == _ABSENT] = np.arange(experts.shape[2])
    return experts.astype(np.result_type(*(one.dtype for one in tensors)))


def with_last(experts: NDArray[Any], fill: int = 0) -> NDArray[Any]:
    """Returns the experts with a row for the last token too, whose ids are `fill`."""
    return np.concatenate((experts, np.full((1, *experts.shape[1:]), fill, experts.dtype)))


def as_type(experts: NDArray[Any], dtype: type[np.integer[Any]]) -> NDArray[Any]:
    """Returns a copy of this type. Raises InvalidArgument `TENSOR_SHAPE` for an id that it cannot hold."""
    if experts.size and int(experts.max()) > np.iinfo(dtype).max:
        raise InvalidArgument(f"expert {experts.max()} is too large for {np.dtype(dtype).name}", reason="TENSOR_SHAPE")
    return experts.astype(dtype)


def in_all_layers(experts: NDArray[Any], dense_layers: Sequence[int]) -> NDArray[Any]:
    """Returns the experts with rows of zeros for the layers that have none, by their place in the model.

    Raises:
        InvalidArgument: `TENSOR_SHAPE`, a layer is not in the model, or named twice.
    """
    if not dense_layers:
        return experts
    layers = experts.shape[1] + len(dense_layers)
    if len({*dense_layers}) < len(dense_layers) or not all(0 <= layer < layers for layer in dense_layers):
        raise InvalidArgument(f"dense_layers: each of 0 to {layers - 1} at most once", reason="TENSOR_SHAPE")
    whole = np.zeros((experts.shape[0], layers, experts.shape[2]), experts.dtype)
    whole[:, [layer for layer in range(layers) if layer not in dense_layers]] = experts
    return whole
