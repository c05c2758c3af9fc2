"""Routed experts of sequences, for trainers that replay the routing of a mixture-of-experts model (R3).

A sequence of n tokens has n - 1 rows: the model was not run on the last one.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.adapters.trainers.selection import Row
from penstock.client.errors import InvalidArgument


def experts_of(rows: Iterable[Row], *, fill: int | None = None) -> list[NDArray[Any]] | None:
    """Returns the experts of each row, (n - 1, layers, experts per token); None if no row has any.

    Args:
        rows: read with `tensors=True`.
        fill: for tokens whose routing was not captured; None = that is an error.

    Raises:
        InvalidArgument: `TENSOR_GAP`, some rows have experts and others have none, or not for each token;
            `TENSOR_LEFT_OUT`; `TENSOR_SHAPE`, rows are of several models.
    """
    held = [*rows]
    found = [row.sample.routed_experts(fill) for row in held]
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
