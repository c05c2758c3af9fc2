"""The demo's learner: advantages, updates, the trainer's logprobs against the engine's."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_codec import Codec
from penstock_demo import model, tasks
from penstock_demo.learner import WARM_CHUNK, Learner, Row, advantages, step_advantages
from penstock_demo.train import entropy
from penstock_inference.engines.base import Done, EngineOptions, GenerateRequest, Sampling
from penstock_inference.testing import NumpyEngine

# One length for everything, so that XLA compiles one forward pass and one update.
LENGTH = 128
_compiled = jax.jit(model.token_logprobs, static_argnums=1)


@pytest.fixture(scope="module")
def codec() -> Codec:
    return tasks.build_codec()


@pytest.fixture
def learner(codec: Codec) -> Learner:
    return Learner(model.ModelConfig(vocab_size=codec.vocab_size), seed=7)


@pytest.mark.requirement("R74")
@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=16))
def test_ungraded_rollouts_get_no_advantage_and_do_not_move_the_others(rewards: list[float | None]) -> None:
    """Not graded is not zero."""
    answers = advantages(rewards)
    assert [answer is None for answer in answers] == [reward is None for reward in rewards]
    graded = [reward for reward in rewards if reward is not None]
    assert [answer for answer in answers if answer is not None] == advantages(graded)
    assert all(answer >= -1.0 for answer in answers if answer is not None)


@pytest.mark.requirement("R74", "R149")
def test_a_group_of_equal_rewards_teaches_nothing(learner: Learner) -> None:
    """Without a difference there is no signal, and no step; exactly, for whatever reward."""
    for size in range(1, 65):
        assert all(set(advantages([hundredths / 100] * size)) == {0.0} for hundredths in range(101))
    assert advantages([1.0, 1.0, None]) == [0.0, 0.0, None]
    before = learner.weights()
    learner.update([_row(learner, 0.0, seed) for seed in range(4)])
    assert all(np.array_equal(before[name], value) for name, value in learner.weights().items())


@pytest.mark.requirement("R74")
def test_a_group_that_fails_as_a_whole_has_what_it_lacks_to_the_step(learner: Learner) -> None:
    """Only if that is asked for, and only below the mean: a group that succeeds as a whole has nothing to unlearn."""
    groups: list[list[float | None]] = [[1.0, 1.0], [0.0, None, 0.0], [0.3, 0.3], [1.0, 0.0], [None]]
    assert step_advantages(groups) == [advantages(group) for group in groups]
    solved, failed, partial, mixed, ungraded = step_advantages(groups, 0.5)
    assert solved == [0.0, 0.0] and mixed == advantages(groups[3]) and ungraded == [None]
    assert failed == [-0.5, None, -0.5]
    assert partial[0] == partial[1] and -0.5 < (partial[0] or 0.0) < 0.0
    assert step_advantages([[None], []], 0.5) == [[None], []]
    assert step_advantages([[0.3, 0.3], [0.3]], 0.5) == [[0.0, 0.0], [0.0]]


@pytest.mark.requirement("R84")
def test_an_update_makes_what_was_rewarded_likelier_and_the_rest_less_likely(learner: Learner) -> None:
    """Only sampled tokens count, and they count by their advantage."""
    good, bad = _row(learner, 1.0, 1), _row(learner, -1.0, 2)
    before = [_likelihood(learner, row) for row in (good, bad)]
    for _ in range(3):
        learner.update([good, bad])
    after = [_likelihood(learner, row) for row in (good, bad)]
    assert after[0] > before[0]
    assert after[1] < before[1]


@pytest.mark.requirement("R84")
def test_each_token_of_a_row_is_moved_by_its_own_advantage(learner: Learner) -> None:
    """The last ten tokens are sampled; the first five of them are rewarded, the others are not."""
    row = _row(learner, 1.0, 1)
    row.advantages[LENGTH - 5 :] = -1.0
    before = _logprobs(learner, row)
    for _ in range(3):
        learner.update([row])
    moved = (_logprobs(learner, row) - before)[LENGTH - 10 :]
    assert moved[:5].sum() > 0 > moved[5:].sum()


@pytest.mark.requirement("R84")
def test_a_distilled_policy_moves_to_its_teachers_logprobs(learner: Learner) -> None:
    """To those, from where it is now: the tokens were sampled before it came to say them with 0.5 nats more."""
    assert learner.distill([]) == (0.0, 0.0)
    row = _row(learner, 0.0, 1)
    sampled = row.logprobs - 0.5 * row.mask
    for advantage, direction in ((0.1, -1.0), (2.0, 1.0)):
        before = learner.params
        _, gap = learner.distill([Row(row.ids, row.mask, sampled, advantage * row.mask)])
        assert gap == pytest.approx(0.5, abs=1e-3)
        assert direction * (_likelihood(learner, row) - row.logprobs.sum()) > 0.0
        learner.params = before


def test_the_same_seed_and_rows_give_the_same_weights(codec: Codec) -> None:
    """A run is repeated by its seed."""
    ends = []
    for _ in range(2):
        learner = Learner(model.ModelConfig(vocab_size=codec.vocab_size), seed=11)
        learner.update([_row(learner, advantage, seed) for seed, advantage in enumerate((1.0, -1.0, 0.5))])
        ends.append(learner.weights())
    assert all(np.array_equal(value, ends[1][name]) for name, value in ends[0].items())


def test_a_cached_warm_start_leaves_the_learner_where_a_fresh_one_does(
    codec: Codec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is repeated by its seed, the second time from the cache."""
    monkeypatch.setattr("penstock_demo.learner.WARM_STEPS", WARM_CHUNK)
    ends, said = [], list[str]()
    for _ in range(2):
        learner = Learner(model.ModelConfig(vocab_size=codec.vocab_size), seed=5)
        learner.warm_start(tasks.Corpus(codec), tmp_path, said.append)
        learner.update([_row(learner, 1.0 - seed, seed) for seed in range(20)])
        ends.append(learner.weights())
    assert len(said) == 1
    assert all(np.array_equal(value, ends[1][name]) for name, value in ends[0].items())


@pytest.mark.requirement("R82")
async def test_the_engine_reports_the_logprobs_that_the_trainer_computes(
    codec: Codec, learner: Learner, tmp_path: Path
) -> None:
    """Within 1e-4, for the exported model in the embedded engine; the update reports the gap."""
    model.export(learner.params, learner.config, codec.files, tmp_path)
    prompt = codec.render(tasks.prompt(tasks.TASKS[0]), [tasks.BASH])
    engine = await NumpyEngine.open(EngineOptions(model_dir=tmp_path, model_name="demo"))
    rows = []
    try:
        for seed in range(4):
            request = GenerateRequest(f"r{seed}", prompt, Sampling(max_tokens=40, seed=seed, ignore_eos=True))
            done = [event async for event in engine.generate(request)][-1]
            assert isinstance(done, Done)
            zeros = np.zeros(len(prompt), np.float32)
            ids = np.concatenate([prompt, done.token_ids])
            mask = np.concatenate([zeros, np.ones(len(done.token_ids), np.float32)])
            rows.append(Row.alike(ids, mask, np.concatenate([zeros, done.logprobs]), 1.0 - 2.0 * (seed % 2)))
    finally:
        await engine.aclose()
    gaps = [np.abs((_logprobs(learner, row) - row.logprobs) * row.mask).max() for row in rows]
    assert max(gaps) < 1e-4
    _, reported = learner.update(rows)
    assert reported == pytest.approx(max(gaps), abs=1e-5)


def _row(learner: Learner, advantage: float, seed: int) -> Row:
    """Random tokens, the last ten of them sampled with the likelihood that the learner gives them."""
    ids = np.random.default_rng(seed).integers(0, learner.config.vocab_size, LENGTH).astype(np.int32)
    mask = (np.arange(LENGTH) >= LENGTH - 10).astype(np.float32)
    row = Row.alike(ids, mask, np.zeros(LENGTH, np.float32), advantage)
    return Row.alike(ids, mask, (_logprobs(learner, row) * mask).astype(np.float32), advantage)


def _logprobs(learner: Learner, row: Row) -> np.ndarray:
    padded = jnp.zeros((1, LENGTH), jnp.int32).at[0, : len(row.ids)].set(row.ids)
    return np.array(_compiled(learner.params, learner.config, padded)[0])[: len(row.ids)]


def _likelihood(learner: Learner, row: Row) -> float:
    return float((_logprobs(learner, row) * row.mask).sum())


def test_entropy_is_what_sampled_tokens_had_against_them() -> None:
    """In nats a token, of sampled tokens alone; of none it is none."""
    sampled, given = np.array([1, 1, 0], np.float32), np.array([0, 1, 0], np.float32)
    rows = [
        Row.alike(np.arange(3), sampled, np.array([-1.0, -3.0, 0.0], np.float32), 0.5),
        Row.alike(np.arange(3), given, np.array([0.0, -0.5, -9.0], np.float32), 0.0),
    ]
    assert entropy(rows) == {"entropy": pytest.approx(1.5)}
    assert entropy([]) == {}
