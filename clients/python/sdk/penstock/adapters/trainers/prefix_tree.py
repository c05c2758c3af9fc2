"""Batches in which each shared prefix stands once: for trainers of one's own whose attention takes a mask.

    batch = pack(tree_samples(select(results)), max_tokens=32_768)
    for row in batch.rows: ...          # input_ids, position_ids, ends for the mask, terms of the loss

The samples of a group begin alike, and so do branches. A row is the trie of its samples by token ids, packed in
depth-first order: a token's descendants follow it without a gap, so that a query sees a key where
`key <= query < ends[key]`, and these keys are exactly the tokens before it in each of its samples. What is computed
once are states and logits; terms of the loss are never merged, because samples that share a token may differ in
whether it was sampled, in its advantage and its logprob.

Invariants: a sample is in one row, whole, and its trained tokens are terms of that row once. A term's token is
predicted by the logits of its parent. `TreeBatch.unpack` returns the samples bit for bit.

The idea is of "Tree Training: Accelerating Agentic LLMs Training via Shared Prefix Reuse" (arXiv 2511.00413), and for
a prompt alone of "Prefix Grouper: Efficient GRPO Training through Shared-Prefix Forward" (arXiv 2506.05433). Masks of
trees in one sequence are older: "SpecInfer" (arXiv 2305.09781). AReaL's tree training (areal-project/AReaL, pull
request 804) gives such masks to FlexAttention (arXiv 2412.05496) too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.adapters.trainers.selection import Selection
from penstock.client.errors import InvalidArgument
from penstock.client.types.chat import Logprobs, TokenIds

MAX_DENSE_TOKENS: Final = 8192
"""The longest row of which `PackedRow.attention_mask` makes a dense mask: 64 MiB."""

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TreeSample:
    """One sequence of n tokens to train on; `of` checks it. Routed experts and images have no place here.

    Attributes:
        input_ids: int32, shape (n,), n at least 1.
        loss_mask: bool, shape (n,): True on the tokens that are trained; False on the first, which nothing predicts.
        logprobs: float32, shape (n,): when they were sampled; 0.0 where the mask is False.
        advantages: float32, shape (n,); 0.0 where the mask is False.
        weight: this sample's share of its rollout's loss.
        sample_id: any name.
    """

    input_ids: TokenIds
    loss_mask: NDArray[np.bool_]
    logprobs: Logprobs
    advantages: NDArray[np.float32]
    weight: float = 1.0
    sample_id: str = ""

    def __len__(self) -> int:
        return len(self.input_ids)

    @classmethod
    def of(
        cls,
        input_ids: ArrayLike,
        loss_mask: ArrayLike,
        logprobs: ArrayLike,
        advantages: ArrayLike,
        *,
        weight: float = 1.0,
        sample_id: str = "",
    ) -> TreeSample:
        """Returns a sample of arrays of n tokens each; logprobs and advantages become 0.0 where the mask is False.

        Args:
            input_ids, loss_mask, logprobs: as the attributes.
            advantages: one for each token, or one number for all.
            weight, sample_id: as the attributes.

        Raises:
            InvalidArgument: `SAMPLE_BROKEN`, there is no token, an array has another shape, or the first token is
                trained.
        """
        ids, mask = np.array(input_ids, np.int32), np.array(loss_mask, np.bool_)
        given = np.asarray(logprobs, np.float32), np.asarray(advantages, np.float32)
        if given[1].ndim == 0:
            given = given[0], np.full(ids.shape, given[1])
        if ids.ndim != 1 or not ids.size or any(one.shape != ids.shape for one in (mask, *given)):
            raise _broken(sample_id, "its arrays are not of one length of at least 1")
        if mask[0]:
            raise _broken(sample_id, "its first token is trained, which no token predicts")
        # Not by multiplication: what is not trained may be infinite or NaN.
        known = [np.where(mask, one, np.float32(0)) for one in given]
        return cls(ids, mask, known[0], known[1], weight, sample_id)


@dataclass(frozen=True, slots=True, eq=False)
class LossTerms:
    """The m trained tokens of a row's samples, sample by sample: one term each, also where samples share a token.

    The logprob of a term's token is `log_softmax(logits[predictors])` at `input_ids[nodes]`. With the sum of terms as
    the loss, the gradients that samples have in common add up by themselves.

    Attributes:
        nodes: int64, shape (m,): where the token stands in the row.
        predictors: int64, shape (m,): its parent, whose logits predict it.
        samples: int64, shape (m,): the sample's index among those given to `pack`.
        positions: int64, shape (m,): where the token stands in the sample; `position_ids[nodes]`.
        advantages, logprobs: float32, shape (m,): the sample's own.
        weights: float32, shape (m,): the weight of the sample.
    """

    nodes: Indices
    predictors: Indices
    samples: Indices
    positions: Indices
    advantages: NDArray[np.float32]
    logprobs: Logprobs
    weights: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.nodes)


@dataclass(frozen=True, slots=True)
class Leaf:
    """Where a sample ends: `node` is its last token, and those that see it from there back are the sample."""

    sample: int
    """Its index among those given to `pack`."""
    node: int
    weight: float
    sample_id: str


@dataclass(frozen=True, slots=True, eq=False)
class PackedRow:
    """Trees of t tokens in depth-first order. Samples without a common first token are trees of their own.

    Attributes:
        input_ids: int32, shape (t,).
        position_ids: int32, shape (t,): the depth in the tree, which is the position in each sample.
        parents: int32, shape (t,): the token before it in its samples; -1 for a first one.
        ends: int32, shape (t,): the first index after its subtree, above its own.
        terms: of the loss.
        leaves: of the samples, in depth-first order.
    """

    input_ids: TokenIds
    position_ids: NDArray[np.int32]
    parents: NDArray[np.int32]
    ends: NDArray[np.int32]
    terms: LossTerms
    leaves: tuple[Leaf, ...]

    def __len__(self) -> int:
        return len(self.input_ids)

    def attention_mask(self) -> NDArray[np.bool_]:
        """Returns the dense mask, shape (t, t), True where the query (first axis) sees the key. For short rows.

        Raises:
            InvalidArgument: `MASK_TOO_LARGE`, the row has more than `MAX_DENSE_TOKENS`: use `mask_mod`.
        """
        if len(self) > MAX_DENSE_TOKENS:
            raise InvalidArgument(
                f"A dense mask of {len(self)} tokens, more than {MAX_DENSE_TOKENS}: use mask_mod(ends)",
                reason="MASK_TOO_LARGE",
            )
        order = np.arange(len(self))
        visible: NDArray[np.bool_] = (order <= order[:, None]) & (order[:, None] < self.ends)
        return visible

    def padded(self, tokens: int, pad_token_id: int) -> PackedRow:
        """Returns the row with padding behind it, for rows of one length.

        A token of padding sees itself alone, so that no softmax is over nothing, and is seen by no other.

        Raises:
            InvalidArgument: `SEQUENCE_TOO_LONG`, the row has more tokens.
        """
        count = tokens - len(self)
        if count < 0:
            raise InvalidArgument(f"A row of {len(self)} tokens does not fit {tokens}", reason="SEQUENCE_TOO_LONG")

        def longer(array: NDArray[np.int32], added: ArrayLike) -> NDArray[np.int32]:
            return np.concatenate((array, np.broadcast_to(np.asarray(added, np.int32), count)))

        return replace(
            self,
            input_ids=longer(self.input_ids, pad_token_id),
            position_ids=longer(self.position_ids, 0),
            parents=longer(self.parents, -1),
            ends=longer(self.ends, np.arange(len(self), tokens) + 1),
        )

    def unpack(self) -> dict[int, TreeSample]:
        """Returns its samples by their index among those given to `pack`, bit for bit."""
        found = {}
        for leaf in self.leaves:
            path = np.flatnonzero(self.ends[: leaf.node + 1] > leaf.node)
            mask = np.zeros(len(path), np.bool_)
            logprobs, advantages = np.zeros(len(path), np.float32), np.zeros(len(path), np.float32)
            own = self.terms.samples == leaf.sample
            at = self.terms.positions[own]
            mask[at] = True
            logprobs[at], advantages[at] = self.terms.logprobs[own], self.terms.advantages[own]
            ids = self.input_ids[path]
            found[leaf.sample] = TreeSample(ids, mask, logprobs, advantages, leaf.weight, leaf.sample_id)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class TreeBatch:
    """The rows of some samples. `sample_tokens` is how many tokens the samples have, one by one."""

    rows: tuple[PackedRow, ...]
    sample_tokens: int

    @property
    def packed_tokens(self) -> int:
        """Tokens of the rows, which a model computes."""
        return sum(map(len, self.rows))

    @property
    def saving(self) -> float:
        """The share of the samples' tokens that is not computed again: from 0 to below 1."""
        return 1.0 - self.packed_tokens / self.sample_tokens if self.sample_tokens else 0.0

    def unpack(self) -> list[TreeSample]:
        """Returns the samples as they were given to `pack`, in that order."""
        found = {index: sample for row in self.rows for index, sample in row.unpack().items()}
        return [found[index] for index in range(len(found))]


def tree_samples(selection: Selection, *, scale: bool = True) -> list[TreeSample]:
    """Returns the sequences of a selection, rollout by rollout, as `pack` takes them.

    A token's advantage is its sample's own (`Sample.advantages`) if that has any, else its rollout's in its group.
    Routed experts are left out: a token that samples share may have been routed differently in each.

    Args:
        selection: of any number of groups, and of one policy.
        scale: as of `Selection.advantages`.

    Raises:
        InvalidArgument: `POLICY_NOT_CHOSEN`, the sequences are of several policies, which share no computation;
            `IMAGES`, a sequence has images, whose tokens are alike whatever they show.
    """
    advantages = selection.advantages(scale=scale)
    policies = sorted({row.sample.policy_id for row in selection.rows})
    if len(policies) > 1:
        raise InvalidArgument(
            f"The sequences are of several policies, {', '.join(map(repr, policies))}: use select(policy_id=...)",
            reason="POLICY_NOT_CHOSEN",
        )
    samples = []
    for place in selection.places:
        for row in place.rows:
            one = row.sample
            if one.images:
                raise InvalidArgument(f"{one.sample_id} has images: a prefix tree is of tokens alone", reason="IMAGES")
            own = advantages[place.rollout_id] if one.advantages is None else one.advantages
            samples.append(
                TreeSample.of(
                    one.input_ids, one.loss_mask, row.logprobs, own, weight=one.weight, sample_id=one.sample_id
                )
            )
    return samples


def pack(samples: Sequence[TreeSample], *, max_tokens: int) -> TreeBatch:
    """Returns rows of at most `max_tokens` in which each shared prefix stands once.

    Samples are brought into the order of their token ids, which is a trie's depth-first order, and cut into rows where
    the fewest tokens have to be repeated, then into the fewest rows. Where a cut parts a tree, the second row begins
    with the path from the root to its first sample. Deterministic.

    Args:
        samples: of any number of groups.
        max_tokens: of a row; at least the longest sample.

    Raises:
        InvalidArgument: `SEQUENCE_TOO_LONG`, a sample has more tokens.
    """
    longest = max(samples, key=len, default=None)
    if longest is not None and len(longest) > max_tokens:
        raise InvalidArgument(
            f"Sample {longest.sample_id!r} has {len(longest)} tokens, more than {max_tokens}",
            reason="SEQUENCE_TOO_LONG",
        )
    # Of big-endian numbers bytes compare like the numbers; a prefix comes before what continues it.
    order = sorted(range(len(samples)), key=lambda index: samples[index].input_ids.astype(">u4").tobytes())
    shared = [0, *(_shared(samples[a].input_ids, samples[b].input_ids) for a, b in pairwise(order))]
    lengths = np.array([len(samples[index]) for index in order], np.int64)
    spans = _spans(lengths, np.array(shared[: len(order)], np.int64), max_tokens)
    rows = tuple(
        _row([(index, samples[index]) for index in order[start:end]], [0, *shared[start + 1 : end]])
        for start, end in spans
    )
    return TreeBatch(rows, int(lengths.sum()))


def mask_mod(ends: Any) -> Callable[[Any, Any, Any, Any], Any]:
    """Returns the attention mask of rows as a function of (row, head, query, key), which are indices.

    It is the `mask_mod` that PyTorch's `flex_attention` takes, and works with arrays of NumPy and JAX alike:

        ends = torch.from_numpy(np.stack([row.padded(t, 0).ends for row in rows])).to(device)
        block_mask = create_block_mask(mask_mod(ends), len(rows), None, t, t, device=device)
        attended = flex_attention(q, k, v, block_mask=block_mask)      # q, k, v: (rows, heads, t, size of a head)

    Args:
        ends: `PackedRow.ends` of rows of one length t, an integer array or tensor of shape (rows, t).
    """

    def visible(row: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (query < ends[row, key])

    return visible


def _broken(sample_id: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"Sample {sample_id!r}: {why}", reason="SAMPLE_BROKEN")


def _shared(first: TokenIds, second: TokenIds) -> int:
    """Returns how many tokens two sequences have in common at their beginnings."""
    size = min(len(first), len(second))
    different = np.flatnonzero(first[:size] != second[:size])
    return int(different[0]) if different.size else size


def _spans(lengths: Indices, shared: Indices, max_tokens: int) -> list[tuple[int, int]]:
    """Returns the [start, end) of sorted samples for each row; `shared` is with the sample before.

    A row from `start` has all tokens of its first sample, and of the others those that they do not share. The best
    last row for each number of samples is found in turn: each cut costs the tokens that its row repeats, and a row
    counts where those are equal.
    """
    count = len(lengths)
    new = np.concatenate(([0], np.cumsum(lengths - shared)))
    # Grows, since a sample shares at most all of the one before it: the starts that fit are a window.
    before = new[:-1] - shared
    costs = shared * (count + 1) + 1
    best = np.zeros(count + 1, np.int64)
    starts = np.zeros(count + 1, np.int64)
    for end in range(1, count + 1):
        first = int(np.searchsorted(before, new[end] - max_tokens))
        totals = best[first:end] + costs[first:end]
        chosen = int(np.argmin(totals))
        best[end], starts[end] = totals[chosen], first + chosen
    spans = []
    end = count
    while end:
        spans.append((int(starts[end]), end))
        end = int(starts[end])
    return spans[::-1]


def _row(samples: Sequence[tuple[int, TreeSample]], shared: Sequence[int]) -> PackedRow:
    """Returns the row of sorted samples, each with its index, and what it shares with the one before."""
    size = sum(len(sample) - common for (_, sample), common in zip(samples, shared, strict=True))
    ids, positions = np.empty(size, np.int32), np.empty(size, np.int32)
    parents, ends = np.empty(size, np.int32), np.full(size, size, np.int32)
    path = np.empty(0, np.int64)
    start, leaves = 0, []
    nodes, predictors = [], []
    for (index, sample), common in zip(samples, shared, strict=True):
        ends[path[common:]] = start
        end = start + len(sample) - common
        ids[start:end] = sample.input_ids[common:]
        positions[start:end] = np.arange(common, len(sample))
        parents[start:end] = np.arange(start, end) - 1
        if start < end:
            parents[start] = path[common - 1] if common else -1
        path = np.concatenate((path[:common], np.arange(start, end)))
        leaves.append(Leaf(index, int(path[-1]), sample.weight, sample.sample_id))
        trained = np.flatnonzero(sample.loss_mask)
        nodes.append(path[trained])
        predictors.append(path[trained - 1])
        start = end
    given = [sample for _, sample in samples]
    counts = [len(one) for one in nodes]
    terms = LossTerms(
        nodes=np.concatenate(nodes),
        predictors=np.concatenate(predictors),
        samples=np.repeat(np.array([index for index, _ in samples], np.int64), counts),
        positions=np.concatenate([np.flatnonzero(one.loss_mask) for one in given]),
        advantages=np.concatenate([one.advantages[one.loss_mask] for one in given]),
        logprobs=np.concatenate([one.logprobs[one.loss_mask] for one in given]),
        weights=np.repeat(np.array([one.weight for one in given], np.float32), counts),
    )
    return PackedRow(ids, positions, parents, ends, terms, tuple(leaves))
