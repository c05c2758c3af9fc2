"""Batches in which each shared prefix stands once."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.analysis.trajectory_cases import groups, sample, trajectory

from penstock.adapters.trainers import prefix_tree, select
from penstock.adapters.trainers.prefix_tree import PackedRow, TreeSample, mask_mod, pack, tree_samples
from penstock.client import InvalidArgument
from penstock.client.types.chat import PromptImage
from penstock.client.types.results import RolloutResult
from penstock.client.types.trajectories import Trajectory
from penstock_demo import model

CONFIG = model.ModelConfig(vocab_size=5, hidden=16, layers=2, heads=2, head_dim=8, ffn=24)
PARAMS = model.init(CONFIG, seed=1)
ROW_TOKENS, ROW_TERMS = 128, 96
VOCABULARY = 3
"""Few token ids, so that samples share prefixes, are equal, or begin one another."""


@st.composite
def tree_sample(draw: st.DrawFn) -> TreeSample:
    """A sample with figures of its own, whatever others have at the same tokens."""
    size = draw(st.integers(1, 9))

    def of_tokens(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
        return st.lists(values, min_size=size, max_size=size)

    figure = st.floats(-4, 4, width=32)
    return TreeSample.of(
        draw(of_tokens(st.integers(0, VOCABULARY - 1))),
        [False, *draw(of_tokens(st.booleans()))][:size],
        draw(of_tokens(st.floats(-9, 0, width=32))),
        draw(figure | of_tokens(figure)),
        weight=draw(st.floats(0, 1)),
        sample_id=draw(st.text(max_size=2)),
    )


SAMPLES = st.lists(tree_sample(), max_size=8)
LIMITS = st.integers(9, 40)


def simple(ids: list[int], mask: list[bool] | None = None, advantage: float = 1.0, weight: float = 1.0) -> TreeSample:
    """A sample of which all but the first token is trained, unless a mask says otherwise."""
    trained = [False, *[True] * (len(ids) - 1)] if mask is None else mask
    return TreeSample.of(ids, trained, [-0.5] * len(ids), advantage, weight=weight)


def same(first: TreeSample, second: TreeSample) -> bool:
    """Whether two samples are equal, bit for bit."""
    names = ("input_ids", "loss_mask", "logprobs", "advantages")
    arrays = [[getattr(one, name) for name in names] for one in (first, second)]
    return (first.weight, first.sample_id) == (second.weight, second.sample_id) and all(
        a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(*arrays, strict=True)
    )


# ---- what a row is


@pytest.mark.requirement("R85")
@given(SAMPLES, LIMITS)
def test_samples_are_unpacked_bit_for_bit(samples: list[TreeSample], limit: int) -> None:
    """In their order, from rows with padding too."""
    batch = pack(samples, max_tokens=limit)
    unpacked = batch.unpack()
    assert len(unpacked) == len(samples) and all(map(same, unpacked, samples))
    assert all(len(row) <= limit for row in batch.rows)
    assert batch.sample_tokens == sum(map(len, samples)) and batch.packed_tokens == sum(map(len, batch.rows))
    for row in batch.rows:
        padded = row.padded(limit, pad_token_id=VOCABULARY)
        assert len(padded) == limit
        assert all(same(one, samples[index]) for index, one in padded.unpack().items())


@pytest.mark.requirement("R85")
@given(SAMPLES)
def test_each_shared_prefix_stands_once_where_all_fits_a_row(samples: list[TreeSample]) -> None:
    """A token of the row is one beginning of a sample."""
    prefixes = {one.input_ids[:end].tobytes() for one in samples for end in range(1, len(one) + 1)}
    batch = pack(samples, max_tokens=100)
    assert len(batch.rows) == bool(samples) and batch.packed_tokens == len(prefixes)


@pytest.mark.requirement("R85")
@given(SAMPLES, LIMITS)
def test_a_query_sees_the_tokens_before_it_in_its_samples_and_no_others(samples: list[TreeSample], limit: int) -> None:
    """For each sample the mask is the causal one."""
    for row in pack(samples, max_tokens=limit).rows:
        padded = row.padded(limit, pad_token_id=0)
        mask = padded.attention_mask()
        assert (mask.sum(axis=1)[: len(row)] == row.position_ids + 1).all()
        assert (mask[len(row) :] == np.eye(limit, dtype=bool)[len(row) :]).all()
        order = np.arange(limit)
        as_function = mask_mod(np.stack([padded.ends, padded.ends]))(1, 0, order[:, None], order[None])
        assert (as_function == mask).all()
        for leaf in row.leaves:
            path = [leaf.node]
            while row.parents[path[0]] >= 0:
                path.insert(0, int(row.parents[path[0]]))
            assert (row.position_ids[path] == np.arange(len(path))).all()
            assert row.input_ids[path].tolist() == samples[leaf.sample].input_ids.tolist()
            assert (mask[np.ix_(path, path)] == np.tri(len(path), dtype=bool)).all()


@pytest.mark.requirement("R84", "R85")
@given(SAMPLES, LIMITS)
def test_each_trained_token_of_each_sample_is_one_term_with_its_own_figures(
    samples: list[TreeSample], limit: int
) -> None:
    """Terms are never merged, and its parent predicts a token."""
    found = []
    for row in pack(samples, max_tokens=limit).rows:
        terms = row.terms
        assert (terms.predictors == row.parents[terms.nodes]).all() and (terms.predictors >= 0).all()
        assert (terms.positions == row.position_ids[terms.nodes]).all()
        figures = (terms.samples, terms.positions, row.input_ids[terms.nodes], terms.advantages, terms.logprobs)
        found += list(zip(*(one.tolist() for one in figures), terms.weights.tolist(), strict=True))
    assert sorted(found) == sorted(
        (index, at, int(one.input_ids[at]), float(one.advantages[at]), float(one.logprobs[at]),
         float(np.float32(one.weight)))
        for index, one in enumerate(samples)
        for at in np.flatnonzero(one.loss_mask).tolist()
    )  # fmt: skip


@pytest.mark.requirement("R84")
def test_token_that_one_sample_sampled_and_another_was_given_is_a_term_of_the_first_alone() -> None:
    """And two that sampled it have a term each."""
    samples = [
        simple([1, 2, 3], [False, True, True], 1.0),
        simple([1, 2, 4], [False, False, True], -1.0),
        simple([1, 2], [False, True], -2.0, weight=0.5),
    ]
    (row,) = pack(samples, max_tokens=9).rows
    assert row.input_ids.tolist() == [1, 2, 3, 4]
    assert row.position_ids.tolist() == [0, 1, 2, 2]
    assert row.parents.tolist() == [-1, 0, 1, 1]
    assert row.ends.tolist() == [4, 4, 3, 4]
    of_two = row.terms.nodes == 1
    assert sorted(zip(row.terms.samples[of_two], row.terms.advantages[of_two], strict=True)) == [(0, 1.0), (2, -2.0)]
    assert row.terms.weights[row.terms.samples == 2].tolist() == [0.5]


@pytest.mark.requirement("R85")
@settings(max_examples=60)
@given(st.lists(tree_sample(), min_size=1, max_size=6), st.integers(9, 16))
def test_rows_are_cut_where_the_fewest_tokens_are_repeated(samples: list[TreeSample], limit: int) -> None:
    """As trying all cuts of the sorted samples finds them, and then with the fewest rows."""
    ordered = sorted(tuple(one.input_ids.tolist()) for one in samples)
    best = []
    for cuts in product([False, True], repeat=len(ordered) - 1):
        rows = [[ordered[0]]]
        for one, cut in zip(ordered[1:], cuts, strict=True):
            rows.append([one]) if cut else rows[-1].append(one)
        sizes = [len({one[:end] for one in row for end in range(1, len(one) + 1)}) for row in rows]
        if max(sizes) <= limit:
            best.append((sum(sizes), len(sizes)))
    batch = pack(samples, max_tokens=limit)
    assert (batch.packed_tokens, len(batch.rows)) == min(best)


# ---- what a model computes of it


@jax.jit
@jax.value_and_grad
def loss_of(params: model.Params, row: dict[str, jax.Array]) -> jax.Array:
    """The clipped policy-gradient loss of one row as a sum over its terms, each with its sample's weight."""
    states = model.hidden_states(params, CONFIG, row["ids"][None], row["positions"], row["visible"])[0]
    logprobs = jax.nn.log_softmax(states @ params["model.embed_tokens.weight"].T)
    ratio = jnp.exp(logprobs[row["predictors"], row["targets"]] - row["logprobs"])
    objective = jnp.minimum(ratio * row["advantages"], jnp.clip(ratio, 0.8, 1.28) * row["advantages"])
    return -(objective * row["weights"]).sum()


def packed_arrays(row: PackedRow) -> dict[str, jax.Array]:
    """What the loss takes of a packed row: by its own mask, positions and terms. One shape, which XLA compiles once."""
    padded, terms = row.padded(ROW_TOKENS, 0), row.terms
    return {
        "ids": jnp.asarray(padded.input_ids),
        "positions": jnp.asarray(padded.position_ids),
        "visible": jnp.asarray(padded.attention_mask()),
        "predictors": terms_of(terms.predictors, np.int32),
        "targets": terms_of(row.input_ids[terms.nodes], np.int32),
        "logprobs": terms_of(terms.logprobs, np.float32),
        "advantages": terms_of(terms.advantages, np.float32),
        "weights": terms_of(terms.weights, np.float32),
    }


def sample_arrays(one: TreeSample) -> dict[str, jax.Array]:
    """The same of a sample alone: causal, from position 0, by its own mask."""
    at = np.flatnonzero(one.loss_mask)
    return {
        "ids": jnp.asarray(np.pad(one.input_ids, (0, ROW_TOKENS - len(one)))),
        "positions": jnp.arange(ROW_TOKENS, dtype=jnp.int32),
        "visible": jnp.asarray(np.tri(ROW_TOKENS, dtype=bool)),
        "predictors": terms_of(at - 1, np.int32),
        "targets": terms_of(one.input_ids[at], np.int32),
        "logprobs": terms_of(one.logprobs[at], np.float32),
        "advantages": terms_of(one.advantages[at], np.float32),
        "weights": terms_of(np.full(len(at), one.weight), np.float32),
    }


def terms_of(values: Any, dtype: type[np.generic]) -> jax.Array:
    """Padded to as many terms as any row has; those of padding weigh nothing."""
    return jnp.asarray(np.pad(values.astype(dtype), (0, ROW_TERMS - len(values))))


def total(rows: list[dict[str, jax.Array]]) -> tuple[float, dict[str, np.ndarray[Any, Any]]]:
    """The sum of the losses of rows, and its gradients."""
    found = [loss_of(PARAMS, row) for row in rows]
    gradients = {name: np.sum([np.asarray(one[name]) for _, one in found], axis=0) for name in PARAMS}
    return sum(float(loss) for loss, _ in found), gradients


@pytest.mark.requirement("R84", "R85")
@pytest.mark.parametrize(("seed", "limit"), [(1, ROW_TOKENS), (2, 30), (3, 24)])
def test_loss_and_gradients_of_packed_rows_are_those_of_the_samples(seed: int, limit: int) -> None:
    """In the demo's decoder, with rotary positions: to 1e-5, of gradients above 1 of their size."""
    random = np.random.default_rng(seed)
    samples: list[TreeSample] = []
    for _ in range(6):
        size = int(random.integers(12, 24))
        ids = random.integers(CONFIG.vocab_size, size=size)
        if samples:
            earlier = samples[int(random.integers(len(samples)))].input_ids[: int(random.integers(4, 12))]
            ids[: len(earlier)] = earlier
        mask = (random.random(size) < 0.7) & (np.arange(size) > 0)
        drawn = -2 * random.random(size), random.normal(size=size)
        samples.append(TreeSample.of(ids, mask, *drawn, weight=float(random.random())))
    batch = pack(samples, max_tokens=limit)
    assert batch.packed_tokens < batch.sample_tokens and (len(batch.rows) == 1) == (limit == ROW_TOKENS)
    loss, gradients = total([packed_arrays(row) for row in batch.rows])
    expected, expected_gradients = total([sample_arrays(one) for one in samples])
    assert abs(expected) > 0.01
    assert loss == pytest.approx(expected, rel=1e-5, abs=1e-5)
    for name, gradient in gradients.items():
        wanted = expected_gradients[name]
        np.testing.assert_allclose(gradient, wanted, atol=1e-5 * max(1.0, np.abs(wanted).max()), rtol=0, err_msg=name)


# ---- from selections


@pytest.mark.requirement("R74", "R85")
@settings(max_examples=25)
@given(groups())
def test_sequences_of_a_selection_have_their_rollouts_advantages_and_their_weights(
    results: list[Trajectory | RolloutResult],
) -> None:
    """Rollout by rollout."""
    selection = select(results)
    advantages = selection.advantages()
    made = tree_samples(selection)
    assert [one.sample_id for one in made] == [row.sample.sample_id for row in selection.rows]
    for one, row in zip(made, selection.rows, strict=True):
        expected = np.where(row.sample.loss_mask, np.float32(advantages[row.trajectory.rollout_id]), np.float32(0))
        assert one.advantages.tolist() == expected.tolist() and one.weight == row.sample.weight
        assert one.input_ids.tolist() == row.sample.input_ids.tolist()
        assert one.logprobs.tolist() == np.where(row.sample.loss_mask, row.logprobs, 0).tolist()
    longest = max(map(len, made), default=0)
    assert all(map(same, pack(made, max_tokens=longest).unpack(), made))


@pytest.mark.requirement("R85")
def test_advantages_of_a_samples_tokens_go_before_its_rollouts() -> None:
    """Those that credit estimated."""
    own = np.array([0, 0.25, -0.5], np.float32)
    one = replace(sample("s", [(1, 2, True)]), advantages=own)
    (made,) = tree_samples(select([trajectory("r", [one])]))
    assert made.advantages.tolist() == own.tolist()


@pytest.mark.requirement("R85")
def test_sequences_that_share_ids_but_no_computation_are_refused() -> None:
    """Several policies, and images."""
    pair = [replace(sample(f"s{name}", [(1, 2, True)]), policy_id=name) for name in ("a", "b")]
    with pytest.raises(InvalidArgument) as refused:
        tree_samples(select([trajectory("r", pair)]))
    assert refused.value.reason == "POLICY_NOT_CHOSEN"
    assert len(tree_samples(select([trajectory("r", pair)], policy_id="a"))) == 1
    seen = replace(sample("s", [(1, 2, True)]), images=(cast("PromptImage", object()),))
    with pytest.raises(InvalidArgument) as refused:
        tree_samples(select([trajectory("r", [seen])]))
    assert refused.value.reason == "IMAGES"


# ---- what is refused


@pytest.mark.requirement("R26")
def test_sample_whose_arrays_contradict_each_other_is_refused() -> None:
    """Empty ones, other lengths, and a first token that nothing predicts."""
    for ids, mask, logprobs, advantages in (
        ([], [], [], 0.0),
        ([1, 2], [False], [0.0, 0.0], 0.0),
        ([1, 2], [False, True], [0.0], 0.0),
        ([1, 2], [False, True], [0.0, 0.0], [1.0]),
        ([1, 2], [True, True], [0.0, 0.0], 1.0),
        ([[1, 2]], [[False, True]], [[0.0, 0.0]], 1.0),
    ):
        with pytest.raises(InvalidArgument) as refused:
            TreeSample.of(ids, mask, logprobs, advantages)
        assert refused.value.reason == "SAMPLE_BROKEN"


@pytest.mark.requirement("R26")
def test_what_fits_no_row_or_dense_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is cut in silence."""
    with pytest.raises(InvalidArgument) as refused:
        pack([simple([1, 2, 3])], max_tokens=2)
    assert refused.value.reason == "SEQUENCE_TOO_LONG"
    (row,) = pack([simple([1, 2, 3])], max_tokens=3).rows
    with pytest.raises(InvalidArgument) as refused:
        row.padded(2, 0)
    assert refused.value.reason == "SEQUENCE_TOO_LONG"
    monkeypatch.setattr(prefix_tree, "MAX_DENSE_TOKENS", 2)
    with pytest.raises(InvalidArgument) as refused:
        row.attention_mask()
    assert refused.value.reason == "MASK_TOO_LARGE"


@pytest.mark.requirement("R85")
def test_no_samples_are_no_rows() -> None:
    """And save nothing."""
    batch = pack([], max_tokens=8)
    assert (batch.rows, batch.unpack(), batch.saving) == ((), [], 0.0)
