"""The forward pass, arranged so that a token's numbers depend on its own prefix and on nothing else.

A matrix product's rounding depends on the shape that BLAS is given: one row alone and the same row among 64 differ in
the last bits, which is enough to flip a sampled token. So no product here has a shape that depends on the other
rows of the batch:

- Projections run in tiles of `row_tile` rows (padded), one GEMM of a fixed shape per tile. Rows of one GEMM do not mix,
  and `Decoder` checks when it is built that on this BLAS a row's result does not depend on its place in the tile.
- Attention runs per query token over blocks of `BLOCK` keys: each product is (group, head_dim) x (head_dim, BLOCK),
  whether the token is one of a prompt or one being decoded. Blocks are added in order; a masked block adds exact zeros.
- The experts of a mixture get their tokens in tiles of the same fixed shape; a token adds its experts' results in the
  order of their ids.

Hence a token's hidden state is a pure function of (weights, prefix ids), bit for bit: batching, chunked prefill, prefix
reuse and scoring cannot change a result. The price is measured in docs/benchmarks.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_inference.engines.numpy.experts import mixture, router_choices
from penstock_inference.engines.numpy.model import Array, Dense, Experts, ModelConfig, Weights

BLOCK = 64
"""Keys per attention product."""

_ROW_TILES = (32, 16, 1)
_NEVER = np.float32(-np.inf)

Ints = NDArray[np.int64]


class KVCache:
    """Keys and values of `slots` sequences, each (layers, slots, kv_heads, length, head_dim) float32; their experts.

    Memory is touched, and so used, only as far as sequences grow. Every number in it is finite, also in unwritten
    positions: masked positions are multiplied by zero, which a NaN would survive.
    """

    def __init__(self, config: ModelConfig, slots: int, max_tokens: int) -> None:
        length = -(-max_tokens // BLOCK) * BLOCK
        shape = (config.layers, slots, config.kv_heads, length, config.head_dim)
        self.keys: Array = np.zeros(shape, np.float32)
        self.values: Array = np.zeros(shape, np.float32)
        self.routes: NDArray[Any] | None = None
        """The experts of each token that was computed, (slots, length, mixtures, experts per token); None: dense."""
        if (experts := config.experts) is not None:
            self.routes = np.zeros((slots, length, len(experts.layers), experts.chosen), experts.dtype)

    @staticmethod
    def bytes_per_slot(config: ModelConfig, max_tokens: int) -> int:
        """Bytes that one full slot takes."""
        per_token = 2 * 4 * config.layers * config.kv_heads * config.head_dim
        if (experts := config.experts) is not None:
            per_token += len(experts.layers) * experts.chosen * experts.dtype.itemsize
        return per_token * (-(-max_tokens // BLOCK) * BLOCK)

    def copy_prefix(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` positions of one slot to another."""
        if self.routes is not None:
            self.routes[target, :tokens] = self.routes[source, :tokens]
        self.keys[:, target, :, :tokens] = self.keys[:, source, :, :tokens]
        self.values[:, target, :, :tokens] = self.values[:, source, :, :tokens]

    def clear(self, slot: int) -> None:
        """Zero a slot that may hold numbers that are not finite."""
        self.keys[:, slot] = 0
        self.values[:, slot] = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive prompt tokens of one slot, from position `start`."""

    slot: int
    start: int
    token_ids: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _AttentionGroup:
    """Query rows that attend in one product: `slots` is a view (one slot, a range of slots) or an index of slots."""

    rows: slice | Ints
    slots: slice | Ints
    blocks: int
    mask: Array
    """(queries or slots, 1, blocks, 1, BLOCK): 0 where a query may attend, -inf elsewhere."""


class Decoder:
    """Computes hidden states and logits for one configuration."""

    def __init__(self, config: ModelConfig, max_tokens: int) -> None:
        self._config = config
        half = config.head_dim // 2
        frequency = config.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
        angle = np.arange(max_tokens, dtype=np.float64)[:, None] * frequency
        self._cos: Array = np.cos(angle).astype(np.float32)[:, None, :]
        self._sin: Array = np.sin(angle).astype(np.float32)[:, None, :]
        self._scale = np.float32(config.head_dim**-0.5)
        self.row_tile = _find_row_tile(config)

    def forward(
        self,
        weights: Weights,
        cache: KVCache,
        decode_ids: NDArray[np.int32],
        decode_positions: Ints,
        decode_slots: Ints,
        chunks: Sequence[Chunk],
    ) -> Array:
        """Write the tokens' keys, values and experts to the cache; return their hidden states (tokens, hidden_size).

        Rows: one per entry of the (decode) arrays, then each chunk's tokens in order. A slot appears once.
        """
        config = self._config
        ids = np.concatenate([decode_ids, *(c.token_ids for c in chunks)])
        positions = np.concatenate(
            [decode_positions, *(np.arange(c.start, c.start + c.token_ids.size) for c in chunks)]
        )
        slots = np.concatenate([decode_slots, *(np.full(c.token_ids.size, c.slot) for c in chunks)])
        groups = _group_decodes(decode_positions, decode_slots)
        row = decode_ids.size
        for chunk in chunks:
            rows = slice(row, row + chunk.token_ids.size)
            groups.append(_attention_group(rows, slice(chunk.slot, chunk.slot + 1), positions[rows]))
            row = rows.stop

        count = ids.size
        padded = -(-count // self.row_tile) * self.row_tile
        x = np.zeros((padded, config.hidden_size), np.float32)
        x[:count] = weights.embed[ids]
        cos, sin = self._cos[positions], self._sin[positions]
        heads, kv_heads, dim = config.heads, config.kv_heads, config.head_dim
        attended = np.zeros((padded, heads * dim), np.float32)
        attended_by_head = attended.reshape(padded, kv_heads, heads // kv_heads, dim)
        mixtures = 0
        for n, layer in enumerate(weights.layers):
            qkv = self._product(self._norm(x, layer.attn_norm), layer.qkv)
            if layer.qkv_bias is not None:
                qkv += layer.qkv_bias
            by_head = qkv[:count].reshape(count, heads + 2 * kv_heads, dim)
            qk = by_head[:, : heads + kv_heads]
            if layer.qk_norm is not None:
                qk = self._norm(qk, layer.qk_norm)
            qk = _rotate(qk, cos, sin)
            keys, values = cache.keys[n], cache.values[n]
            keys[slots, :, positions] = qk[:, heads:]
            values[slots, :, positions] = by_head[:, heads + kv_heads :]
            queries = (qk[:, :heads] * self._scale).reshape(count, kv_heads, heads // kv_heads, dim)
            for group in groups:
                attended_by_head[group.rows] = _attend(queries, keys, values, group)
            mixed = self._product(attended, layer.out)
            if layer.out_bias is not None:
                mixed += layer.out_bias
            x += mixed
            normed = self._norm(x, layer.mlp_norm)
            if isinstance(layer.mlp, Dense):
                x += self._dense(normed, layer.mlp)
                continue
            chosen, shares = self._routed(normed, layer.mlp, count)
            if cache.routes is not None:
                cache.routes[slots, positions, mixtures] = chosen
            mixtures += 1
            x[:count] += mixture(normed[:count], chosen, shares, layer.mlp.experts, self.row_tile, self._dense)
        return self._norm(x[:count], weights.final_norm)

    def logits(self, weights: Weights, hidden: Array) -> Array:
        """Logits (rows, vocab_size) of final hidden states (rows, hidden_size)."""
        rows = hidden.shape[0]
        padded = np.zeros((-(-rows // self.row_tile) * self.row_tile, hidden.shape[1]), np.float32)
        padded[:rows] = hidden
        return self._product(padded, weights.head)[:rows]

    def _routed(self, x: Array, mlp: Experts, count: int) -> tuple[NDArray[Any], Array]:
        """The experts of the first `count` rows, and their weights."""
        assert self._config.experts is not None
        return router_choices(self._product(x, mlp.router)[:count], self._config.experts)

    def _dense(self, x: Array, mlp: Dense) -> Array:
        gate_up = self._product(x, mlp.gate_up)
        inner = gate_up.shape[1] // 2
        return self._product(_silu(gate_up[:, :inner]) * gate_up[:, inner:], mlp.down)

    def _product(self, x: Array, w: Array) -> Array:
        """x (rows, in) times w (in, out), one fixed-shape GEMM per tile of rows."""
        out: Array = np.matmul(x.reshape(-1, self.row_tile, x.shape[1]), w).reshape(x.shape[0], w.shape[1])
        return out

    def _norm(self, x: Array, weight: Array) -> Array:
        mean: Array = np.add.reduce(x * x, axis=-1, keepdims=True)
        mean /= np.float32(x.shape[-1])
        mean += np.float32(self._config.norm_eps)
        np.sqrt(mean, out=mean)
        normed: Array = np.divide(x, mean)
        normed *= weight
        return normed


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = np.empty(x.shape, np.float32)
    out[..., :half] = first * cos - second * sin
    out[..., half:] = second * cos + first * sin
    return out


def _silu(x: Array) -> Array:
    # For a very negative x the exponential overflows to inf, and x / inf is the right limit.
    divisor: Array = np.exp(-x)
    divisor += np.float32(1)
    out: Array = np.divide(x, divisor)
    return out


def _attend(queries: Array, keys: Array, values: Array, group: _AttentionGroup) -> Array:
    """Attention of one group; queries is all rows (rows, kv_heads, group, head_dim), keys one layer's."""
    kv_heads, length, dim = keys.shape[1], group.blocks * BLOCK, keys.shape[3]
    blocked = (-1, kv_heads, group.blocks, BLOCK, dim)
    k = keys[group.slots, :, :length].reshape(blocked)
    v = values[group.slots, :, :length].reshape(blocked)
    scores = np.matmul(queries[group.rows][:, :, None], k.swapaxes(-1, -2))
    scores += group.mask
    scores -= scores.max(axis=(2, 4), keepdims=True)
    np.exp(scores, out=scores)
    weighted = np.matmul(scores, v)
    totals = np.add.reduce(scores, axis=-1)
    # In order, block by block: numpy's own reduction would associate differently for different lengths. The leading
    # zero makes a lone -0.0 the same +0.0 that adding a masked block would make it.
    out: Array = weighted[:, :, 0] + np.float32(0)
    total = totals[:, :, 0] + np.float32(0)
    for block in range(1, group.blocks):
        out += weighted[:, :, block]
        total += totals[:, :, block]
    out /= total[..., None]
    return out


def _group_decodes(positions: Ints, slots: Ints) -> list[_AttentionGroup]:
    """How decode rows attend: one product over a view of the cache when the slots are dense, else by length class.

    A view computes idle slots, and short rows to the longest length; an index copies keys and values. The choice
    affects the time, never a row's numbers.
    """
    if positions.size == 0:
        return []
    blocks = positions // BLOCK + 1
    low, high = int(slots.min()), int(slots.max()) + 1
    ascending = positions.size == 1 or bool((np.diff(slots) > 0).all())
    if ascending and high - low == positions.size and positions.size * int(blocks.max()) <= 2 * int(blocks.sum()):
        return [_attention_group(slice(0, positions.size), slice(low, high), positions)]
    groups = []
    classes = np.frexp(blocks)[1]
    for length_class in np.unique(classes):
        rows = np.flatnonzero(classes == length_class)
        groups.append(_attention_group(rows, slots[rows], positions[rows]))
    return groups


def _attention_group(rows: slice | Ints, slots: slice | Ints, positions: Ints) -> _AttentionGroup:
    blocks = int(positions.max()) // BLOCK + 1
    mask = np.where(np.arange(blocks * BLOCK) <= positions[:, None], np.float32(0), _NEVER)
    return _AttentionGroup(rows, slots, blocks, mask.reshape(-1, 1, blocks, 1, BLOCK))


def _find_row_tile(config: ModelConfig) -> int:
    """The largest tile in which a row's product does not depend on its place, checked on this BLAS for each shape."""
    d, heads = config.hidden_size, config.heads * config.head_dim
    shapes = {
        (d, heads + 2 * config.kv_heads * config.head_dim),
        (heads, d),
        (d, 2 * config.intermediate_size),
        (config.intermediate_size, d),
        (d, config.vocab_size),
    }
    if (experts := config.experts) is not None:
        shapes |= {(d, experts.count), (d, 2 * experts.intermediate_size), (experts.intermediate_size, d)}
    random = np.random.Generator(np.random.Philox(0))
    for tile in _ROW_TILES[:-1]:
        if all(_rows_are_independent(random, tile, *shape) for shape in shapes):
            return tile
    return _ROW_TILES[-1]


def _rows_are_independent(random: np.random.Generator, tile: int, inner: int, outer: int) -> bool:
    x = random.standard_normal((tile, inner), np.float32)
    w = random.standard_normal((inner, outer), np.float32)
    straight = np.matmul(x[None], w)[0]
    orders = [np.roll(np.arange(tile), shift) for shift in (1, 3, tile // 2)] + [random.permutation(tile)]
    return all(np.array_equal(np.matmul(x[order][None], w)[0], straight[order]) for order in orders)
