"""Samples a token from logits and computes its exact logprob.

The distribution is computed in float64. A token is drawn by inverting the cumulative sum at one uniform number, and the
reported logprob is of the very distribution that was summed. (Gumbel noise would be as exact, but needs one number per
vocabulary entry: it took a quarter of a step.) The numbers come from the request's own Philox generator, one per token,
so a seed gives the same tokens whatever else is in the batch. All functions work on independent rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock_inference.domain.generation import Sampling

Floats = NDArray[np.float64]
_NEVER = -np.inf
_UNIFORMS_AT_ONCE = 32


class Distribution:
    """The distribution of each row's next token: softmax of (rows, vocab) logits, which it overwrites.

    A logit of -inf is a token that cannot be drawn. A row with any other non-finite number, or without a possible
    token, is not `valid`, and results for it are meaningless.
    """

    def __init__(self, logits: Floats) -> None:
        logits -= logits.max(axis=-1, keepdims=True)
        self._shifted = logits
        self._cumulative: Floats = np.exp(logits)
        np.cumsum(self._cumulative, axis=-1, out=self._cumulative)
        self._total: Floats = self._cumulative[:, -1]
        self.valid: NDArray[np.bool_] = np.isfinite(self._total)

    def draw(self, uniforms: Floats) -> NDArray[np.int64]:
        """One token per row, at the row's uniform number in [0, 1)."""
        # At least one unit in the last place below the total, so that some entry always exceeds the threshold.
        threshold = np.minimum(uniforms * self._total, np.nextafter(self._total, 0.0))
        tokens: NDArray[np.int64] = (self._cumulative > threshold[:, None]).argmax(axis=-1)
        return tokens

    def likeliest(self, row: int) -> int:
        """The row's likeliest token, the lowest id among equals."""
        return int(self._shifted[row].argmax())

    def logprobs(self, tokens: NDArray[np.int64]) -> Floats:
        """The logprob of one token per row."""
        result: Floats = self._shifted[np.arange(tokens.size), tokens] - np.log(self._total)
        return result

    def top(self, row: int, count: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The row's `count` likeliest tokens and their logprobs, most likely first, the lower id first among equals."""
        values = self._shifted[row]
        # Only those that reach the last place are sorted: a sort of the whole vocabulary costs milliseconds.
        last = max(0, values.size - count)
        among = np.flatnonzero(values >= np.partition(values, last)[last])
        order = among[np.argsort(-values[among], kind="stable")[:count]]
        return order.astype(np.int32), (values[order] - np.log(self._total[row])).astype(np.float32)


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


def drop_unlikely(logits: Floats, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> None:
    """Set the logits of one row's (vocab,) unlikely tokens to -inf.

    min-p keeps tokens at least `min_p` times as likely as the most likely one; top-k keeps the k most likely of those;
    top-p keeps the fewest most likely whose share of the rest reaches `top_p`. Ties are broken by the lower id; at
    least one token survives.
    """
    if min_p > 0:
        logits[logits < logits.max() + np.log(min_p)] = _NEVER
    if (0 < top_k < logits.size) or top_p < 1:
        order = np.argsort(-logits, kind="stable")
        if 0 < top_k < logits.size:
            logits[order[top_k:]] = _NEVER
        if top_p < 1:
            cumulative = np.cumsum(np.exp(logits[order] - logits[order[0]]))
            keep = int(np.searchsorted(cumulative, top_p * cumulative[-1])) + 1
            logits[order[keep:]] = _NEVER


class Uniforms:
    """One request's uniform numbers in [0, 1): the i-th is for its i-th sampled token, a function of the seed and i."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.Generator(np.random.Philox(seed))
        self._numbers: list[float] = []

    def next(self) -> float:
        """The number for the next token."""
        if not self._numbers:
            # Drawn in batches, because a call costs more than the numbers; reversed, because a list pops from its end.
            self._numbers = self._random.random(_UNIFORMS_AT_ONCE).tolist()[::-1]
        return self._numbers.pop()
