"""The sampling filters and the draw, as properties."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from penstock_inference.engines.base import Sampling
from penstock_inference.engines.numpy.sampling import Distribution, Uniforms, apply_penalties, drop_unlikely

Floats = NDArray[np.float64]

rows = hnp.arrays(
    np.float64, st.integers(1, 40), elements=st.floats(-50, 50, allow_nan=False).map(lambda x: round(x, 1))
)


def normal(row: Floats) -> Floats:
    """Logprobs of all tokens of one row."""
    shifted: Floats = row - row.max()
    result: Floats = shifted - np.log(np.exp(shifted).sum())
    return result


def filtered(row: Floats, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Floats:
    """Logprobs of what survives, -inf for what does not."""
    kept = row.copy()
    drop_unlikely(kept, top_k, top_p, min_p)
    return normal(kept)


def draw(logits: Floats, uniforms: Floats) -> NDArray[np.int64]:
    return Distribution(logits.copy()).draw(uniforms)


@pytest.mark.requirement("R63", "R83")
@settings(deadline=None)
@given(rows, st.integers(0, 45), st.floats(0.01, 1), st.floats(0, 1))
def test_filters_leave_a_distribution_over_some_of_the_likeliest_tokens(
    row: Floats, top_k: int, top_p: float, min_p: float
) -> None:
    """What survives sums to one and is more likely than what does not."""
    logprobs = normal(row)
    kept = filtered(row, top_k, top_p, min_p)
    alive = np.isfinite(kept)
    assert alive.any() and np.exp(kept[alive]).sum() == pytest.approx(1)
    assert (kept[alive] <= 1e-12).all() and (kept[alive] >= logprobs[alive] - 1e-9).all()
    if not alive.all():
        assert logprobs[alive].min() >= logprobs[~alive].max()
    if top_k:
        assert alive.sum() <= top_k
    if min_p:
        assert (logprobs[alive] >= logprobs.max() + np.log(min_p) - 1e-9).all()


@pytest.mark.requirement("R63")
@settings(deadline=None)
@given(rows)
def test_filters_that_are_off_change_nothing(row: Floats) -> None:
    logprobs = normal(row)
    np.testing.assert_allclose(filtered(row, row.size, 1.0, 0.0), logprobs, atol=1e-12)


@pytest.mark.requirement("R63")
@settings(deadline=None)
@given(rows, st.floats(0.01, 0.99))
def test_top_p_keeps_the_fewest_tokens_that_reach_its_share(row: Floats, top_p: float) -> None:
    probabilities = np.exp(normal(row))
    alive = np.isfinite(filtered(row, top_p=top_p))
    assert probabilities[alive].sum() >= top_p - 1e-9
    assert probabilities[alive].sum() - probabilities[alive].min() < top_p + 1e-9


@pytest.mark.requirement("R82")
@settings(deadline=None)
@given(rows, st.floats(0, 1, exclude_max=True), st.integers(1, 40))
def test_a_draw_never_takes_a_token_that_was_filtered_out(row: Floats, uniform: float, top_k: int) -> None:
    """The logprob of a sampled token is finite."""
    kept = filtered(row, top_k=top_k)
    distribution = Distribution(kept[None].copy())
    token = distribution.draw(np.array([uniform]))
    assert np.isfinite(kept[token[0]]) and distribution.valid.all()
    assert distribution.logprobs(token)[0] == pytest.approx(kept[token[0]], abs=1e-12)


@pytest.mark.requirement("R82")
@settings(deadline=None)
@given(rows)
def test_draws_over_the_unit_interval_split_it_by_probability(row: Floats) -> None:
    """Tokens are drawn with the probability that is reported."""
    logprobs = normal(row)
    grid = (np.arange(2000) + 0.5) / 2000
    tokens = draw(np.tile(logprobs, (grid.size, 1)), grid)
    shares = np.bincount(tokens, minlength=row.size) / grid.size
    assert np.abs(shares - np.exp(logprobs)).max() < 1e-3
    assert all(a <= b for a, b in pairwise(tokens.tolist()))


@pytest.mark.requirement("R83")
def test_interval_extremes_give_the_first_and_last_live_tokens() -> None:
    logits = np.array([[-np.inf, 0.0, -30.0, 0.0, -np.inf]])
    assert draw(logits, np.array([0.0])).tolist() == [1]
    assert draw(logits, np.array([np.nextafter(1.0, 0.0)])).tolist() == [3]


@pytest.mark.requirement("R63")
@settings(deadline=None)
@given(st.integers(0, 2**63 - 1))
def test_a_seed_gives_the_same_numbers_every_time_and_others_give_others(seed: int) -> None:
    """A seed takes effect."""
    one, two, other = Uniforms(seed), Uniforms(seed), Uniforms(seed ^ 1)
    numbers = [one.next() for _ in range(80)]
    assert numbers == [two.next() for _ in range(80)] != [other.next() for _ in range(80)]
    assert all(0 <= number < 1 for number in numbers)


@pytest.mark.requirement("R83")
@settings(deadline=None)
@given(rows, st.integers(1, 20))
def test_top_logprobs_are_the_likeliest_in_order(row: Floats, count: int) -> None:
    distribution = Distribution(row[None].copy())
    ids, values = distribution.top(0, count)
    assert distribution.likeliest(0) == ids[0]
    assert ids.size == values.size == min(count, row.size) and len(set(ids.tolist())) == ids.size
    assert values.tolist() == sorted(values.tolist(), reverse=True)


@pytest.mark.requirement("R63")
def test_penalties_follow_their_definitions() -> None:
    """Each penalty takes effect as documented."""
    prompt, sampled = np.array([0, 1], np.int32), np.array([2, 2, 3], np.int32)
    logits = np.array([2.0, -2.0, 2.0, 1.0, 1.0])
    apply_penalties(logits, Sampling(max_tokens=1, repetition_penalty=2.0), prompt, sampled)
    assert logits.tolist() == [1.0, -4.0, 1.0, 0.5, 1.0]
    logits = np.array([2.0, -2.0, 2.0, 1.0, 1.0])
    apply_penalties(logits, Sampling(max_tokens=1, presence_penalty=0.5, frequency_penalty=0.25), prompt, sampled)
    assert logits.tolist() == [2.0, -2.0, 1.0, 0.25, 1.0]


@pytest.mark.requirement("R83")
@pytest.mark.parametrize("row", [[np.nan, 0.0], [np.inf, 0.0], [-np.inf, -np.inf]])
def test_a_row_that_is_no_distribution_is_known_as_one(row: list[float]) -> None:
    """Nothing is filled in."""
    with np.errstate(all="ignore"):
        assert Distribution(np.array([[0.0, 1.0], row])).valid.tolist() == [True, False]
