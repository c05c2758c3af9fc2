"""The scheduler step by step, where exactly when something happens matters."""

from dataclasses import replace

import numpy as np
import pytest

from penstock_chassis.errors import FailedPrecondition
from penstock_inference.engines.base import Delta, Done, FinishReason, GenerateRequest, Sampling, VersionSpan
from penstock_inference.engines.numpy.model import ModelConfig, Weights
from penstock_inference.engines.numpy.scheduler import PREFILL_TOKENS_PER_STEP, Scheduler
from penstock_inference.engines.numpy.sequence import Event, Sequence
from penstock_inference.testing import random_config, random_tensors

CONFIG = random_config(max_position_embeddings=4096, eos_token_id=None)
MODEL = ModelConfig.from_dict(CONFIG)
OLD, NEW = (Weights.build(MODEL, random_tensors(CONFIG, seed)) for seed in (0, 2))


def scheduler(weights: Weights = OLD, slots: int = 4) -> Scheduler:
    return Scheduler(MODEL, weights, slots, 4096)


def sequence(name: str, length: int, max_tokens: int = 20, stream: bool = False) -> Sequence:
    ids = np.random.default_rng(length).integers(0, 101, length).astype(np.int32)
    return Sequence(GenerateRequest(name, ids, Sampling(max_tokens=max_tokens), stream=stream), seed=7)


def finish(running: Scheduler) -> dict[str, Done]:
    """Step to the end; each request's end by its id."""
    ends: dict[str, Done] = {}
    while running.has_work:
        ends |= {s.request.request_id: event for s, event in running.step() if isinstance(event, Done)}
    return ends


@pytest.mark.requirement("R87")
def test_a_swap_after_n_tokens_leaves_spans_of_n_and_the_rest() -> None:
    """Spans are exact to the token."""
    for n in (1, 7, 19):
        running = scheduler()
        running.submit(sequence("r", 30))
        for _ in range(n):  # the first step computes the prompt and samples the first token
            running.step()
        running.replace_weights(NEW, 3, "")
        assert finish(running)["r"].version_spans == (VersionSpan(0, 0, n), VersionSpan(3, n, 20))


@pytest.mark.requirement("R87")
def test_prompt_under_way_during_a_swap_uses_the_new_policy_alone() -> None:
    """Only a completion that spans the swap is of mixed origin."""
    running, fresh = scheduler(), scheduler(NEW)
    length = 2 * PREFILL_TOKENS_PER_STEP
    running.submit(sequence("r", length))
    running.step()
    assert running.stats().prompt_tokens > 0
    running.replace_weights(NEW, 1, "")
    fresh.submit(sequence("r", length))
    one, other = finish(running)["r"], finish(fresh)["r"]
    assert one.version_spans == (VersionSpan(1, 0, 20),)
    np.testing.assert_array_equal(one.token_ids, other.token_ids)
    np.testing.assert_array_equal(one.logprobs, other.logprobs)


@pytest.mark.requirement("R87")
def test_a_prompt_under_way_for_an_exact_version_ends_at_a_swap_and_frees_its_slot() -> None:
    """The new policy would sample all of it."""
    running = scheduler(slots=1)
    exact = sequence("exact", 2 * PREFILL_TOKENS_PER_STEP)
    exact.request = replace(exact.request, exact_policy_version=0)
    running.submit(exact)
    running.step()
    assert running.running == 1 and not exact.token_ids
    ((ended, error),) = running.replace_weights(NEW, 1, "")
    assert ended is exact
    assert isinstance(error, FailedPrecondition) and error.reason == "POLICY_VERSION_UNAVAILABLE"
    assert (running.running, running.stats().failed, running.has_work) == (0, 1, False)
    running.submit(sequence("next", 30))
    assert finish(running)["next"].version_spans == (VersionSpan(1, 0, 20),)


@pytest.mark.requirement("R87")
def test_a_completion_for_an_exact_version_that_has_begun_goes_on_after_a_swap() -> None:
    """The version is asked for at the start."""
    running = scheduler()
    exact = sequence("exact", 30)
    exact.request = replace(exact.request, exact_policy_version=0)
    running.submit(exact)
    running.step()
    running.replace_weights(NEW, 1, "")
    assert finish(running)["exact"].version_spans == (VersionSpan(0, 0, 1), VersionSpan(1, 1, 20))


@pytest.mark.requirement("R32")
def test_a_long_prompt_does_not_keep_others_from_decoding() -> None:
    """Each step takes a bounded piece of a prompt and one token of everybody else."""
    running = scheduler()
    short = sequence("short", 10, max_tokens=100)
    running.submit(short)
    running.step()
    running.submit(sequence("long", 3000, max_tokens=1))
    steps = 0
    while running.stats().finished == 0:
        running.step()
        steps += 1
        assert len(short.token_ids) == steps + 1
    assert steps >= 3000 / PREFILL_TOKENS_PER_STEP


@pytest.mark.requirement("R22")
def test_an_aborted_donor_leaves_those_that_waited_for_its_prefix_unharmed() -> None:
    """Whoever waits for a shared prompt computes it when its first owner goes away."""
    running, alone = scheduler(), scheduler()
    for name in ("donor", "heir"):
        running.submit(sequence(name, 1500))
    running.step()
    assert (running.running, running.stats().waiting) == (1, 1)
    ended = running.abort(lambda s: s.request.request_id == "donor")
    assert [event.finish_reason for _, event in ended if isinstance(event, Done)] == [FinishReason.ABORT]
    alone.submit(sequence("heir", 1500))
    heir = finish(running)["heir"]
    np.testing.assert_array_equal(heir.token_ids, finish(alone)["heir"].token_ids)
    assert heir.cached_tokens == PREFILL_TOKENS_PER_STEP


@pytest.mark.requirement("R87")
def test_deltas_before_and_after_a_swap_carry_one_version_each() -> None:
    running = scheduler()
    running.submit(sequence("r", 30, stream=True))
    events: list[Event] = []
    for _ in range(5):
        events += [event for _, event in running.step()]
    events += [event for _, event in running.replace_weights(NEW, 1, "")]
    while running.has_work:
        events += [event for _, event in running.step()]
    deltas = [event for event in events if isinstance(event, Delta)]
    counted = {v: sum(d.token_ids.size for d in deltas if d.policy_version == v) for v in (0, 1)}
    assert counted == {0: 5, 1: 15}


@pytest.mark.requirement("R23")
def test_slots_are_taken_from_the_longest_unused() -> None:
    """Prefixes in use stay, old ones go."""
    running = scheduler(slots=2)
    for length in (100, 200):
        running.submit(sequence("r", length))
        finish(running)
    running.submit(sequence("again", 100))
    assert finish(running)["again"].cached_tokens == 99
    running.submit(sequence("other", 300))  # takes the slot of the prompt of 200
    finish(running)
    for name, length, cached in (("kept", 100, 99), ("gone", 200, 0)):
        running.submit(sequence(name, length))
        assert finish(running)[name].cached_tokens == cached
