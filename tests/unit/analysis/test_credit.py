"""Values, advantages and the choice of calls, on trajectories made by hand and by hypothesis."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.replaying.credit import AIM, STEPS, drawn
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.analysis.trajectory_cases import failed, sample, trajectory

from penstock.analysis import credit, export
from penstock.client import InvalidArgument
from penstock.client.types.chat import Completion, Sampling
from penstock.client.types.results import Failure, FailureCause, Outcome, RolloutResult
from penstock.client.types.trajectories import Call, Finding, ReplayOrigin, Reward, Trajectory

REWARDS = st.lists(st.floats(0, 1), min_size=1, max_size=8)


def call(rollout_id: str, index: int, ids: list[int], logprob: float | None = -0.5) -> Call:
    """An answered call whose prompt is all before it."""
    logprobs = None if logprob is None else np.full(len(ids), logprob, np.float32)
    return Call(
        call_id=f"{rollout_id}-{index}",
        rollout_id=rollout_id,
        index=index,
        state="delivered",
        dialect="chat_completions",
        call_class="main",
        branch_id="b",
        parent_call_id=f"{rollout_id}-{index - 1}" if index else None,
        prompt_shared_count=2 + 2 * index - 1 if index else 0,
        prompt_suffix_token_ids=np.array([7], np.int32) if index else np.array([1, 2], np.int32),
        prompt_count=0,
        completion=Completion.of_tokens(np.array(ids, np.int32), logprobs),
        sampled_count=len(ids),
        capture_level="tokens_and_logprobs",
        sampling_requested=Sampling(),
        normalisations=(),
        tools=(),
        tools_sha256=b"",
        request_body=b"",
        request_body_sha256=b"",
        model_requested="m",
        http_attempts=1,
        leases=1,
        injected=False,
        answerer="trainer",
        end_reason="",
        receive_time=None,
        lease_time=None,
        end_time=None,
    )


def rollout(rollout_id: str, answers: list[int], logprobs: list[float | None] | None = None) -> Trajectory:
    """A rollout of one token per answer."""
    made = [
        call(rollout_id, index, [token], -0.5 if logprobs is None else logprobs[index])
        for index, token in enumerate(answers)
    ]
    return replace(trajectory(rollout_id, []), calls=tuple(made))


def values(of: Trajectory, rewards: dict[int, list[float]]) -> dict[str, credit.Value]:
    return {of.calls[index].call_id: credit.Value(tuple(found)) for index, found in rewards.items()}


@given(REWARDS)
def test_a_value_is_the_mean_with_its_error(rewards: list[float]) -> None:
    value = credit.Value(tuple(rewards))
    assert value.count == len(rewards) and math.isclose(value.mean, np.mean(rewards), abs_tol=1e-12)
    if len(rewards) == 1:
        assert value.standard_error is None
    else:
        assert value.standard_error is not None
        expected = float(np.std(rewards, ddof=1) / math.sqrt(len(rewards)))
        assert math.isclose(value.standard_error, expected, abs_tol=1e-9)


@given(st.data(), st.integers(1, 6), st.floats(0, 1))
def test_advantages_add_up_to_the_reward(data: st.DataObject, count: int, reward: float) -> None:
    """Over the actions, minus the first known value; turns before it have none."""
    parent = rollout("p", list(range(count)))
    known = data.draw(st.dictionaries(st.integers(0, count - 1), REWARDS, min_size=1))
    found = credit.credited("p", parent.calls, values(parent, known), reward)
    starts = sorted(known)
    actions = [found.turns[start] for start in starts]
    total = math.fsum(turn.advantage for turn in actions if turn.advantage is not None)
    assert math.isclose(total, reward - np.mean(known[starts[0]]), abs_tol=1e-9)
    assert [turn.advantage for turn in found.turns[: starts[0]]] == [None] * starts[0]
    assert [turn.index for turn in found.turns if turn.value is not None] == starts
    for start, end in zip(starts, [*starts[1:], count], strict=True):
        assert {turn.advantage for turn in found.turns[start:end]} == {found.turns[start].advantage}
        assert {turn.shared_by for turn in found.turns[start:end]} == {end - start}


def test_each_turn_is_credited_with_what_it_changed() -> None:
    parent = rollout("p", [1, 2, 3])
    known = values(parent, {0: [0, 1, 0, 0], 1: [0, 1, 1, 0], 2: [1, 1, 1, 1]})
    found = credit.credited("p", parent.calls, known, 1.0)
    assert [turn.advantage for turn in found.turns] == [0.25, 0.5, 0.0]
    errors = [turn.standard_error for turn in found.turns]
    first, second = known["p-0"].standard_error, known["p-1"].standard_error
    assert first is not None and second is not None
    assert errors == [math.hypot(first, second), second, 0.0]
    assert found.pivotal == found.turns[1]


@pytest.mark.requirement("R135")
def test_advantages_are_annotations_of_their_turns() -> None:
    """A turn without an advantage has none: nothing is said of it."""
    parent = rollout("p", [1, 2, 3])
    found = credit.credited("p", parent.calls, values(parent, {1: [0.0, 1.0], 2: [1.0, 1.0]}), 1.0)
    first, second = found.annotations("branches, n = 2")
    assert (first.name, first.author, first.call_id, first.value) == ("advantage", "branches, n = 2", "p-1", 0.5)
    assert (second.call_id, second.value) == ("p-2", 0.0)
    assert first.details == {"standard_error": found.turns[1].standard_error, "shared_by": 1}


def test_the_error_of_a_single_branch_is_unknown() -> None:
    parent = rollout("p", [1, 2])
    found = credit.credited("p", parent.calls, values(parent, {0: [0.0], 1: [1.0, 1.0]}), 1.0)
    assert [turn.standard_error for turn in found.turns] == [None, 0.0]
    assert found.turns[0].advantage == 1.0 and found.pivotal == found.turns[1]
    assert credit.credited("p", parent.calls, {}, 1.0).pivotal is None


@pytest.mark.parametrize("one_in", [2, 4])
def test_eight_branches_find_the_call_that_decided(one_in: int) -> None:
    """In arithmetic alone; over services in tests/integration/client/test_credit.py."""
    by_errors, by_size = drawn(rollout("p", [1] * (STEPS + 1)), 1 / one_in)
    assert by_errors >= AIM and by_errors > by_size


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.booleans()), min_size=1, max_size=4))
def test_tokens_have_their_turns_advantage_under_the_mask(turns: list[tuple[int, int, bool]]) -> None:
    one = sample("s", turns)
    calls = [replace(call("p", index, [index]), call_id=f"s-{index}") for index in range(len(turns))]
    known = {f"s-{index}": credit.Value((index / 8, index / 8)) for index in range(len(turns))}
    found = credit.credited("p", calls, known, 1.0).token_advantages(one)
    assert found.dtype == np.float32 and found.shape == one.input_ids.shape
    assert not found[~one.loss_mask].any()
    for index, span in enumerate(one.turns):
        expected = 0.125 if index + 1 < len(turns) else 1.0 - index / 8
        assert (found[span.start : span.end][one.loss_mask[span.start : span.end]] == np.float32(expected)).all()


@pytest.mark.requirement("R129")
def test_credited_samples_are_exported_with_their_advantages(tmp_path: Path) -> None:
    one = sample("s", [(2, 1, True), (1, 2, True)])
    calls = [replace(call("p", index, [index]), call_id=f"s-{index}") for index in range(2)]
    known = {"s-0": credit.Value((0.5,)), "s-1": credit.Value((0.25,))}
    whole = replace(rollout("p", [1]), samples=(one,))
    credited = credit.credited("p", calls, known, 1.0).annotated(whole)
    assert whole.samples[0].advantages is None
    export.write_jsonl([whole, credited], tmp_path / "rows.jsonl", export.Table.SEQUENCES)
    plain, row = export.read_rows(tmp_path / "rows.jsonl")
    assert plain["advantages"] is None
    assert row["advantages"] == credit.credited("p", calls, known, 1.0).token_advantages(one).tolist()
    assert {-0.25, 0.75} <= set(row["advantages"])


def test_a_sample_of_another_rollout_is_refused() -> None:
    found = credit.credited("p", rollout("p", [1]).calls, {}, 1.0)
    with pytest.raises(InvalidArgument, match="no turn of p") as refused:
        found.token_advantages(sample("s", [(1, 1, True)]))
    assert refused.value.reason == "SAMPLE_UNKNOWN"
    assert not found.token_advantages(sample("s", [(1, 1, False)])).any()


def test_turns_of_a_branch_are_its_own() -> None:
    parents = replace(call("b", 0, [1]), replayed_from=ReplayOrigin("p", 1, "p-0"))
    given_answer = replace(call("b", 1, [2]), branch_point=True, injected=True, given=True)
    own_attempt = replace(call("b", 2, [3]), replayed_from=ReplayOrigin("b", 1, "b-old"))
    lost = replace(call("b", 3, [4]), state="failed")
    last = call("b", 4, [5])
    of = replace(trajectory("b", []), calls=(last, lost, own_attempt, given_answer, parents))
    assert [one.index for one in credit.turns_of(of)] == [2, 4]


def ended(reward: float | None, cause: FailureCause | None, finding: str = "") -> RolloutResult:
    """An ended branch."""
    of = failed("b", cause or FailureCause.AGENT)
    failure = None if cause is None else Failure(cause, "WHY", "", False, None)
    findings = (Finding("warning", finding, "", None),) if finding else ()
    outcome = Outcome(failure=failure, reward=None if reward is None else Reward(reward))
    return RolloutResult(of.rollout, outcome, replace(trajectory("b", []), findings=findings))


@pytest.mark.parametrize("cause", list(FailureCause))
def test_failures_count_where_the_policy_may_have_caused_them(cause: FailureCause) -> None:
    ours = cause in (FailureCause.AGENT, FailureCause.TIMEOUT, FailureCause.BUDGET)
    assert credit.counted_reward(ended(0.5, cause)) == (0.5 if ours else None)
    assert credit.counted_reward(ended(None, cause)) is None


def test_a_branch_that_missed_its_call_does_not_count() -> None:
    assert credit.counted_reward(ended(0.5, None, "BRANCHED")) == 0.5
    assert credit.counted_reward(ended(0.5, None, "BRANCH_MISSED")) is None


def test_surprise_is_of_the_whole_answer() -> None:
    assert credit.surprise(call("p", 0, [1, 2, 3], -0.5)) == 1.5
    assert credit.surprise(call("p", 0, [1], 0.0)) == 0.0
    assert credit.surprise(call("p", 0, [1], None)) is None


def test_siblings_part_at_the_first_other_answer() -> None:
    group = [rollout("a", [1, 2, 3]), rollout("b", [1, 2, 4]), rollout("c", [1, 5, 3])]
    assert credit.partings(group) == {"a-2": 1, "b-2": 1, "a-1": 1, "b-1": 1, "c-1": 2}
    other = rollout("d", [1, 2, 3])
    changed = replace(other.calls[1], prompt_suffix_token_ids=np.array([9], np.int32))
    # Here a command's output differs: no answer to which branches could give another.
    assert credit.partings([group[0], replace(other, calls=(other.calls[0], changed, other.calls[2]))]) == {}


def test_a_turn_is_chosen_with_both_its_sides() -> None:
    of = rollout("p", [1, 2, 3, 4], [-0.1, -2.0, -0.2, -0.3])
    indexes = [point.index for point in credit.plan([of], budget=8, n=4)]
    assert indexes == [1, 2]
    assert [point.index for point in credit.plan([of], budget=12, n=4)] == [1, 2, 3]
    # One call is all that there is: only the last turn needs no more.
    assert [point.index for point in credit.plan([of], budget=4, n=4)] == [3]
    assert [point.index for point in credit.plan([of], budget=4, n=4, known={"p-1": ()})] == [2]


def test_partings_rank_before_surprise() -> None:
    group = [rollout("a", [1, 2, 3, 4], [-9, -0.1, -1, -1]), rollout("b", [1, 5, 3, 4], [-8, -0.1, -1, -1])]
    chosen = credit.plan(group, budget=4, n=1)
    assert {(point.rollout_id, point.index) for point in chosen} == {("a", 1), ("a", 2), ("b", 1), ("b", 2)}
    chosen = credit.plan(group, budget=4, n=1, by="surprise")
    assert [(point.rollout_id, point.index) for point in chosen] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 40), st.integers(0, 9))
def test_plans_keep_their_budget_and_repeat(counts: list[int], n: int, more: int, seed: int) -> None:
    group = [rollout(f"r{number}", [1] * count, [None] * count) for number, count in enumerate(counts)]
    budget = n + more
    chosen = credit.plan(group, budget=budget, n=n, seed=seed)
    assert len(chosen) * n <= budget and len(set(chosen)) == len(chosen)
    assert chosen == credit.plan(group, budget=budget, n=n, seed=seed)
    if budget >= n * sum(counts):
        assert len(chosen) == sum(counts)


def test_equal_turns_are_drawn_by_the_seed() -> None:
    of = rollout("p", [1] * 20)
    plans = {credit.plan([of], budget=4, n=2, seed=seed) for seed in range(10)}
    assert len(plans) > 1


@pytest.mark.parametrize(
    ("budget", "n", "by"), [(7, 8, "parting"), (8, 0, "parting"), (999, 257, "parting"), (8, 8, "x")]
)
def test_a_plan_that_cannot_be_is_refused(budget: int, n: int, by: credit.By) -> None:
    with pytest.raises(InvalidArgument) as refused:
        credit.plan([rollout("p", [1])], budget=budget, n=n, by=by)
    assert refused.value.reason == "BRANCH_PLAN"
