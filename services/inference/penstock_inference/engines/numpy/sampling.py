"""From logits to a token and the logprob that it really had.

The distribution is computed in float64; a token is drawn from it by inverting its cumulative sum at one uniform number,
and the logprob reported is of the very distribution that was summed. (Gumbel noise would be as exact, and needs one
number per entry of the vocabulary: it took a quarter of a step.) The numbers come from a Philox generator of the
request's own, one per token, so a seed gives the same tokens whoever else is in the batch. All functions work on rows
that are independent of each other.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock_inference.engines.base import Sampling

Floats = NDArray[np.float64]
_NEVER = -np.inf
_UNIFORMS_AT_ONCE = 32


def log_softmax(logits: Floats) -> Floats:
    """Over the last axis of (rows, vocab); -inf stays -inf."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: Floats = shifted - np.log(np.add.reduce(np.exp(shifted), axis=-1, keepdims=True))
    return result


def apply_penalties(
    logits: Floats, sampling: Sampling, prompt_ids: NDArray[np.int32], sampled: NDArray[np.int32]
) -> None:
    """Change one row (vocab,) in place.

    The repetition penalty counts prompt and completion, the presence and frequency penalties the completion.
    """
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(np.concatenate([prompt_ids, sampled]))
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
    if (sampling.presence_penalty or sampling.frequency_penalty) and sampled.size:
        ids, counts = np.unique(sampled, return_counts=True)
        logits[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts


def filter_logprobs(logprobs: Floats, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Floats:
    """One row of normalised logprobs (vocab,) with the unlikely ones at -inf, normalised again.

    min-p keeps tokens at least `min_p` times as likely as the likeliest; top-k keeps the k likeliest of those; top-p
    keeps the fewest likeliest whose share of what is left reaches `top_p`. Ties are broken by the lower id; at least
    one token survives.
    """
    kept = logprobs.copy()
    if min_p > 0:
        kept[kept < kept.max() + np.log(min_p)] = _NEVER
    if (0 < top_k < kept.size) or top_p < 1:
        order = np.argsort(-kept, kind="stable")
        if 0 < top_k < kept.size:
            kept[order[top_k:]] = _NEVER
        if top_p < 1:
            cumulative = np.cumsum(np.exp(log_softmax(kept[None])[0][order]))
            keep = int(np.searchsorted(cumulative, top_p)) + 1
            kept[order[keep:]] = _NEVER
    result: Floats = log_softmax(kept[None])[0]
    return result


class Uniforms:
    """One request's uniform numbers in [0, 1): the i-th is for its i-th sampled token, a function of the seed and i."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.Generator(np.random.Philox(seed))
        self._numbers: list[float] = []

    def next(self) -> float:
        """The number for the next token."""
        if not self._numbers:
            # Several at once, because a call costs more than the numbers; reversed, because a list pops from its end.
            self._numbers = self._random.random(_UNIFORMS_AT_ONCE).tolist()[::-1]
        return self._numbers.pop()


def draw(logprobs: Floats, uniforms: Floats) -> NDArray[np.int64]:
    """One token per row of (rows, vocab) logprobs, at the row's uniform number; never one whose logprob is -inf."""
    cumulative = np.cumsum(np.exp(logprobs), axis=-1)
    total = cumulative[:, -1]
    # The sum is 1 up to rounding; stay below it so that some entry always exceeds the threshold.
    threshold = np.minimum(uniforms * total, np.nextafter(total, 0.0))
    tokens: NDArray[np.int64] = (cumulative > threshold[:, None]).argmax(axis=-1)
    return tokens


def top_logprobs(logprobs: Floats, count: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The `count` likeliest tokens of one row, most likely first, ties by the lower id."""
    order = np.argsort(-logprobs, kind="stable")[:count]
    return order.astype(np.int32), logprobs[order].astype(np.float32)
