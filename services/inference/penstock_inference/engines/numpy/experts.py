"""A mixture of experts: the router's choice for each token, and the sum of its experts' results.

Nothing here depends on the other tokens of a batch, to the last bit: see `decoder`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_inference.engines.numpy.model import Array, Dense, ExpertsConfig


def router_choices(logits: Array, config: ExpertsConfig) -> tuple[NDArray[Any], Array]:
    """Return the experts (tokens, config.chosen) of router logits (tokens, experts), and their weights, float32.

    The likeliest expert is first, the lower id among equals. A weight is the softmax over all experts, scaled to a sum
    of 1 over the token's own if `config.normalised`.
    """
    chosen = np.argsort(-logits, axis=-1, kind="stable")[:, : config.chosen]
    shares: Array = np.exp(logits - logits.max(axis=-1, keepdims=True))
    total: Array = np.add.reduce(shares, axis=-1, keepdims=True)
    own: Array = np.take_along_axis(shares, chosen, axis=-1)
    own /= total
    if config.normalised:
        own /= np.add.reduce(own, axis=-1, keepdims=True)
    return chosen.astype(config.dtype), own


def mixture(
    x: Array,
    chosen: NDArray[Any],
    shares: Array,
    experts: Sequence[Dense],
    tile: int,
    product: Callable[[Array, Dense], Array],
) -> Array:
    """Return the weighted sum (tokens, hidden) of each token's experts, added in the order of their ids.

    `product` computes one expert for rows that are a multiple of `tile`.
    """
    out: Array = np.zeros(x.shape, np.float32)
    for expert in np.unique(chosen):
        rows, places = np.nonzero(chosen == expert)
        padded: Array = np.zeros((-(-rows.size // tile) * tile, x.shape[1]), np.float32)
        padded[: rows.size] = x[rows]
        out[rows] += product(padded, experts[int(expert)])[: rows.size] * shares[rows, places][:, None]
    return out
