"""Rollouts in the forms that trainers take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from tests.unit.analysis.trajectory_cases import failed, groups, sample, trajectory

from penstock.adapters.trainers import (
    Dropped,
    DropReason,
    Place,
    Selection,
    art,
    nemo_gym,
    openrlhf,
    prime_rl,
    select,
    skyrl,
    slime,
    trl,
    verl,
)
from penstock.adapters.trainers.selection import trained_runs
from penstock.client import Completion, InvalidArgument, Sampling
from penstock.client.types.chat import LogprobsMode
from penstock.client.types.results import FailureCause, RolloutResult
from penstock.client.types.trajectories import Call, Trajectory

PAD = 7
Token = tuple[str, int, float]


def of_any_groups(test: Callable[[list[Trajectory | RolloutResult]], None]) -> Callable[[], None]:
    """A property of all groups; enough of them to see each kind of rollout several times."""
    return settings(max_examples=25)(given(groups())(test))


def trained_tokens(selection: Selection) -> list[Token]:
    """All that is trained, as (sample, token id, logprob)."""
    return [
        (row.sample.sample_id, int(row.sample.input_ids[i]), float(row.logprobs[i]))
        for row in selection.rows
        for i in np.flatnonzero(row.sample.loss_mask)
    ]


def masked(sample_id: str, ids: Any, mask: Any, logprobs: Any) -> list[Token]:
    """The tokens of parallel lists whose mask is set."""
    assert len(ids) == len(mask) == len(logprobs)
    return [(sample_id, int(i), float(p)) for i, m, p in zip(ids, mask, logprobs, strict=True) if m]


# ---- what is learned from


@pytest.mark.requirement("R26", "R74")
@of_any_groups
def test_every_rollout_is_learned_from_or_dropped_with_a_reason(results: list[Trajectory | RolloutResult]) -> None:
    """Nothing is left out in silence."""
    selection = select(results)
    assert [place.rollout_id for place in selection.places] == [result.rollout_id for result in results]
    for result, place in zip(results, selection.places, strict=True):
        assert (place.dropped is None) == bool(place.rows)
        samples = () if not isinstance(result, Trajectory) or place.dropped else result.samples
        beside = {item.sample_id for item in selection.siblings if item.rollout_id == place.rollout_id}
        assert {row.sample.sample_id for row in place.rows} | beside == {one.sample_id for one in samples}
    for row in selection.rows:
        assert row.trajectory.reward is not None and row.trajectory.grade != "unusable"
        assert row.trajectory.failure_cause in ("", "AGENT") and row.sample.loss_mask.any()


@pytest.mark.requirement("R74", "R82")
@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (failed("r", FailureCause.INFRASTRUCTURE), DropReason.FAILED),
        (failed("r", FailureCause.AGENT), DropReason.NO_TRAJECTORY),
        (trajectory("r", [sample("s", [(1, 1, True)])], cause="verifier"), DropReason.FAILED),
        (trajectory("r", [sample("s", [(1, 1, True)])], reward=None), DropReason.UNGRADED),
        (trajectory("r", [sample("s", [(1, 1, True)])], grade="unusable"), DropReason.UNUSABLE),
        (trajectory("r", [sample("s", [(1, 1, False)])]), DropReason.NOTHING_TRAINED),
        (trajectory("r", []), DropReason.NOTHING_TRAINED),
        (trajectory("r", [sample("s", [(1, 1, True)], with_logprobs=False)]), DropReason.NO_LOGPROBS),
        (
            trajectory("r", [replace(sample("s", [(1, 1, True)]), logprobs_mode=LogprobsMode.UNSPECIFIED)]),
            DropReason.MIXED_LOGPROBS,
        ),
        (trajectory("r", [sample("s", [(9, 1, True)])]), DropReason.TOO_LONG),
        (trajectory("r", [sample("s", [(1, 9, True)])]), DropReason.TOO_LONG),
    ],
)
def test_untrainable_rollout_states_its_reason(result: Trajectory | RolloutResult, reason: DropReason) -> None:
    """An infrastructure failure is no zero, and neither is a rollout that nobody graded."""
    (dropped,) = select([result], max_prompt_tokens=8, max_response_tokens=8).dropped
    assert (dropped.reason, dropped.rollout_id) == (reason, "r") and dropped.message


@pytest.mark.requirement("R59")
def test_an_agents_own_failure_with_a_reward_is_learned_from() -> None:
    """A crash of the agent is no success, and the policy is to learn that."""
    results = [trajectory("r", [sample("s", [(1, 1, True)])], cause=cause, reward=0.0) for cause in ("agent", "budget")]
    assert len(select(results).rows) == 2


@pytest.mark.requirement("R85")
def test_rollout_counts_once_in_its_groups_mean_whatever_its_branches() -> None:
    """Branches are no weight."""
    branches = [sample(f"s{i}", [(1, 2, True)], weight=1 / 3) for i in range(3)]
    results: list[Trajectory | RolloutResult] = [
        trajectory("a", branches, reward=1.0),
        trajectory("b", [sample("t", [(1, 2, True)])], reward=0.0),
        trajectory("c", [sample("u", [(1, 2, True)])], reward=None),
        failed("d", FailureCause.INFRASTRUCTURE),
    ]
    assert select(results).advantages() == {"a": 1.0, "b": -1.0}
    assert select(results).advantages(scale=False) == {"a": 0.5, "b": -0.5}
    assert select(results).group_reward("g") == 0.5


@pytest.mark.requirement("R149")
@pytest.mark.parametrize("kind", [np.float64, np.float32])
@pytest.mark.parametrize("scale", [True, False])
def test_equal_rewards_have_advantages_of_exactly_zero(kind: type[np.floating[Any]], scale: bool) -> None:
    """For each size of a group from 1 to 64 and each reward from 0 to 1 by hundredths, with dropped members and
    without; the rounded mean of equal rewards is seldom that reward."""
    (row,) = select([trajectory("r", [sample("s", [(1, 1, True)])])]).rows
    places = []
    for size in range(1, 65):
        for hundredths in range(101):
            group, rows = f"{size} of {hundredths}", (replace(row, reward=cast(float, kind(hundredths / 100))),)
            places += [Place(f"{group}, {index}", group, rows) for index in range(size)]
            missing = Dropped(f"{group}, dropped", DropReason.FAILED, "")
            places += [Place(missing.rollout_id, group, dropped=missing)] * (size % 2)
    selection = Selection(tuple(places))
    found = selection.advantages(scale=scale)
    assert len(found) == 101 * sum(range(1, 65)) and set(found.values()) == {0.0}
    assert selection.group_reward("63 of 10") == float(kind(0.1))


@pytest.mark.requirement("R149")
def test_rewards_that_differ_by_little_still_set_rollouts_apart() -> None:
    """No threshold takes a small difference for none, unless it is one of rounding."""
    rewards = {"a": 0.1, "b": 0.1 + 1e-12, "c": 0.1}
    found = select([trajectory(n, [sample(n, [(1, 1, True)])], reward=r) for n, r in rewards.items()]).advantages()
    assert found["b"] > 0 > found["a"] == found["c"]


@pytest.mark.requirement("R149")
@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("rewards", [[0.1 + 0.2, 0.3, 0.3], [0.7 + 0.2 + 0.1, 0.1 + 0.2 + 0.7, 1.0]])
def test_rewards_that_differ_by_rounding_are_equal(rewards: list[float], scale: bool) -> None:
    """The same components, added in another order, are no better and no worse."""
    assert len(set(rewards)) > 1
    results = [trajectory(f"r{n}", [sample(f"s{n}", [(1, 1, True)])], reward=r) for n, r in enumerate(rewards)]
    assert set(select(results).advantages(scale=scale).values()) == {0.0}


@pytest.mark.requirement("R149")
def test_no_rollouts_and_groups_without_a_member_have_no_advantages() -> None:
    """Nothing is divided by nothing."""
    assert select([]).advantages() == {}
    nobody = select([failed("a", FailureCause.INFRASTRUCTURE), failed("b", FailureCause.TASK)])
    assert nobody.advantages() == {} and nobody.group_reward("g") == 0.0


def test_rollouts_without_a_group_are_compared_within_their_task() -> None:
    """Rollouts that were created one by one have a baseline too."""
    results = [trajectory(name, [sample(name, [(1, 1, True)])], group=None, reward=float(name == "a")) for name in "ab"]
    assert select(results).advantages() == {"a": 1.0, "b": -1.0}


@pytest.mark.requirement("R85")
def test_an_adapter_keeps_the_sequence_with_most_trained_tokens() -> None:
    """The others are reported, not forgotten."""
    branches = [sample("small", [(1, 2, True)]), sample("large", [(1, 5, True)]), sample("masked", [(1, 9, False)])]
    selection = select([trajectory("r", branches)], one_sequence=True)
    assert [row.sample.sample_id for row in selection.rows] == ["large"]
    assert {(item.sample_id, item.reason) for item in selection.dropped} == {
        ("small", DropReason.SIBLING),
        ("masked", DropReason.NOTHING_TRAINED),
    }


# ---- every form trains exactly the trained tokens


@pytest.mark.requirement("R84")
@of_any_groups
def test_verls_batch_trains_what_was_sampled(results: list[Trajectory | RolloutResult]) -> None:
    """Padded as verl's agent loop pads, a logprob and an advantage under the mask only."""
    selection = select(results)
    if not selection.rows:
        with pytest.raises(InvalidArgument, match="No rollout"):
            verl.data_proto(selection, pad_token_id=PAD)
        return
    made = verl.data_proto(selection, pad_token_id=PAD)
    batch, others = made["batch"], made["non_tensor_batch"]
    rows, width = batch["input_ids"].shape
    prompt_length = batch["prompts"].shape[1]
    assert rows == len(selection.rows) and all(len(array) == rows for array in (*batch.values(), *others.values()))
    found = [
        token
        for i in range(rows)
        for token in masked(
            others["sample_id"][i], batch["responses"][i], batch["response_mask"][i], batch["rollout_log_probs"][i]
        )
    ]
    assert found == trained_tokens(selection)
    advantages = selection.advantages()
    for i, row in enumerate(selection.rows):
        real = batch["attention_mask"][i].astype(bool)
        assert batch["input_ids"][i][real].tolist() == row.sample.input_ids.tolist()
        assert set(batch["input_ids"][i][~real].tolist()) <= {PAD}
        assert batch["position_ids"][i][real].tolist() == list(range(len(row.sample)))
        # Prompts end, and responses start, where the two arrays meet.
        assert real[prompt_length - 1] and real[prompt_length] and width == prompt_length + batch["responses"].shape[1]
        (last,) = np.flatnonzero(batch["rm_scores"][i]).tolist() or [len(row.response_ids) - 1]
        assert last == len(row.response_ids) - 1 and batch["rm_scores"][i, last] == row.reward
        expected = np.float32(advantages[row.trajectory.rollout_id]) * batch["response_mask"][i]
        np.testing.assert_array_equal(batch["advantages"][i], expected)
        assert others["__num_turns__"][i] == 1 + len(row.sample.turns)
    types = {str(array.dtype) for array in batch.values()}
    assert types == {"int64", "float32"}


@pytest.mark.requirement("R84")
@of_any_groups
def test_an_output_of_verls_agent_loop_trains_what_was_sampled(results: list[Trajectory | RolloutResult]) -> None:
    """The fields of AgentLoopOutput, with equal lengths."""
    selection = select(results)
    outputs = verl.agent_loop_outputs(selection)
    found = [
        token
        for output in outputs
        for token in masked(
            output["extra_fields"]["sample_id"],
            output["response_ids"],
            output["response_mask"],
            output["response_logprobs"],
        )
    ]
    assert found == trained_tokens(selection)
    assert [output["reward_score"] for output in outputs] == [row.reward for row in selection.rows]


@pytest.mark.requirement("R26")
def test_verl_refuses_a_sequence_that_its_arrays_do_not_hold() -> None:
    """Nothing is cut in silence."""
    selection = select([trajectory("r", [sample("s", [(3, 2, True)])])])
    with pytest.raises(InvalidArgument, match="max_prompt_tokens=2"):
        verl.data_proto(selection, pad_token_id=PAD, prompt_length=2)
    with pytest.raises(InvalidArgument, match="max_response_tokens=1"):
        verl.data_proto(selection, pad_token_id=PAD, response_length=1)
    assert verl.data_proto(selection, pad_token_id=PAD, prompt_length=5, response_length=4)["batch"][
        "input_ids"
    ].tolist() == [[PAD, PAD, 100, 101, 102, 103, 104, PAD, PAD]]


@pytest.mark.requirement("R74", "R84")
@of_any_groups
def test_skyrls_output_has_a_row_for_every_prompt(results: list[Trajectory | RolloutResult]) -> None:
    """What was dropped is masked, and its reward moves no baseline."""
    selection = select(results, one_sequence=True)
    output = skyrl.generator_output(selection, filler_token_id=PAD)
    assert len(output["response_ids"]) == len(results) and output["is_last_step"] is None
    names = [place.rows[0].sample.sample_id if place.rows else "" for place in selection.places]
    columns = zip(names, output["response_ids"], output["loss_masks"], output["rollout_logprobs"], strict=True)
    assert [token for column in columns for token in masked(*column)] == trained_tokens(selection)
    for group in {place.group for place in selection.places}:
        members = [i for i, place in enumerate(selection.places) if place.group == group]
        kept = [output["rewards"][i] for i in members if selection.places[i].rows]
        assert np.mean([output["rewards"][i] for i in members]) == pytest.approx(np.mean(kept) if kept else 0.0)
        assert [output["trajectory_ids"][i]["repetition_id"] for i in members] == list(range(len(members)))


@pytest.mark.requirement("R85")
@of_any_groups
def test_skyrls_steps_of_a_rollout_stand_side_by_side(results: list[Trajectory | RolloutResult]) -> None:
    """Every branch is a row, the last has the reward, as SkyRL's check of step-wise outputs wants it."""
    selection = select(results)
    output = skyrl.generator_output(selection, filler_token_id=PAD, step_wise=True)
    last = output["is_last_step"]
    assert last is not None and len(last) == len(output["response_ids"]) and sum(last) == len(results) and last[-1]
    ids = [tuple(one.values()) for one in output["trajectory_ids"]]
    assert [i + 1 == len(ids) or ids[i] != ids[i + 1] for i in range(len(ids))] == last
    rewards = [reward for reward, end in zip(output["rewards"], last, strict=True) if end]
    assert rewards == [
        place.rows[0].reward if place.rows else selection.group_reward(place.group) for place in selection.places
    ]
    assert sum(map(sum, output["loss_masks"])) == len(trained_tokens(selection))


@pytest.mark.requirement("R84", "R87")
@of_any_groups
def test_a_training_sample_of_prime_rl_has_lists_of_one_length(results: list[Trajectory | RolloutResult]) -> None:
    """Token ids, mask, logprobs, temperatures and advantages, each as long as the sequence."""
    selection = select(results)
    samples = prime_rl.training_samples(selection, env_name="env", temperature=0.5)
    advantages = selection.advantages(scale=False)
    assert [
        token
        for row, made in zip(selection.rows, samples, strict=True)
        for token in masked(row.sample.sample_id, made["token_ids"], made["mask"], made["logprobs"])
    ] == trained_tokens(selection)
    for row, made in zip(selection.rows, samples, strict=True):
        assert made["temperatures"] == [0.5] * len(made["token_ids"])
        assert made["advantages"] == [advantages[row.trajectory.rollout_id] * kept for kept in made["mask"]]


@pytest.mark.requirement("R84", "R87")
def test_prime_rl_is_given_no_temperature_that_nobody_knows() -> None:
    """It divides the logits by it. Turns that are not trained need none."""
    selection = select([trajectory("r", [sample("s", [(1, 2, False), (1, 2, True)])])])
    with pytest.raises(InvalidArgument, match=r"samples_only=False.*temperature=") as raised:
        prime_rl.training_samples(selection, env_name="env")
    assert raised.value.reason == "TEMPERATURE_UNKNOWN"
    (row,) = selection.rows
    answer = Completion.of_tokens([1, 2], [-0.5, -0.5], sampling_used=Sampling(temperature=0.5))
    of_trained = SimpleNamespace(call_id=row.sample.turns[1].call_id, completion=answer)
    calls = replace(row, trajectory=replace(row.trajectory, calls=(cast(Call, of_trained),)))
    known = Selection((Place("r", "g", (calls,)),))
    (made,) = prime_rl.training_samples(known, env_name="env")
    assert made["temperatures"] == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5]
    (made,) = prime_rl.training_samples(known, env_name="env", temperature=0.7)
    assert made["temperatures"] == [0.7, 0.7, 0.7, 0.7, 0.5, 0.5]
    of_trained.completion = replace(answer, sampling_used=Sampling(top_p=0.9))
    with pytest.raises(InvalidArgument, match="temperature="):
        prime_rl.training_samples(known, env_name="env")


@pytest.mark.requirement("R84")
def test_prime_rl_gets_no_field_that_its_pinned_version_lacks() -> None:
    """Its structure refuses an unknown keyword, and wants the first five."""
    required = {"token_ids", "mask", "logprobs", "temperatures", "env_name"}
    optional = {"ref_logprobs", "mm_kwargs", "routed_experts", "mm_token_type_ids", "advantages"}
    optional |= {"rl_weights", "ce_weights", "ref_kl_weights"}
    assert required <= set(prime_rl.TrainingSample.__annotations__) <= required | optional


@pytest.mark.requirement("R84")
@of_any_groups
def test_openrlhf_trains_the_ranges_that_were_sampled(results: list[Trajectory | RolloutResult]) -> None:
    """The ranges of an executor's response and the shifted mask of an Experience say the same."""
    selection = select(results, one_sequence=True)
    found = []
    for row in selection.rows:
        alone = Selection((Place(row.trajectory.rollout_id, "", (row,)),))
        (response,), (experience,) = openrlhf.agent_responses(alone), openrlhf.experiences(alone)
        mask = np.zeros(len(response["observation_tokens"]), int)
        for start, end in response["action_ranges"]:
            assert start < end and not mask[max(start - 1, 0)]
            mask[start:end] = 1
        found += masked(row.sample.sample_id, response["observation_tokens"], mask, response["rollout_log_probs"])
        # As OpenRLHF itself makes the one from the other.
        np.testing.assert_array_equal(experience["action_mask"][0], mask[1:])
        np.testing.assert_array_equal(experience["rollout_log_probs"][0], response["rollout_log_probs"][1:])
        assert experience["sequences"].shape == experience["attention_mask"].shape == (1, len(row.sample))
        assert experience["truncated"].tolist() == [response["truncated"]]
        assert experience["rewards"].tolist() == [response["reward"]]
    assert found == trained_tokens(selection)


@pytest.mark.requirement("R74", "R84")
@of_any_groups
def test_slime_keeps_the_places_of_a_group(results: list[Trajectory | RolloutResult]) -> None:
    """Each rollout has one sample, and what was dropped is removed without moving the mean."""
    selection = select(results, one_sequence=True)
    made = slime.samples(selection, filler_token_id=PAD, first_group_index=3, first_index=10)
    flat = [one for group in made for one in group]
    found = []
    for one in flat:
        response = one["tokens"][len(one["tokens"]) - one["response_length"] :]
        found += masked(one["metadata"].get("sample_id", ""), response, one["loss_mask"], one["rollout_log_probs"])
    assert sorted(found) == sorted(trained_tokens(selection))
    assert sorted(one["rollout_id"] for one in flat) == list(range(10, 10 + len(results)))
    for number, group in enumerate(made, 3):
        assert {one["group_index"] for one in group} == {number}
        kept = [one["reward"] for one in group if not one["remove_sample"]]
        mean = np.mean([one["reward"] for one in group])
        assert mean == pytest.approx(np.mean(kept) if kept else 0.0)
        assert all((one["status"] == "aborted") == one["remove_sample"] for one in group)


@pytest.mark.requirement("R74", "R84", "R85")
@of_any_groups
def test_arts_choices_rebuild_each_sequence_and_what_was_dropped_is_an_exception(
    results: list[Trajectory | RolloutResult],
) -> None:
    """As ART assembles them: a choice continues the sequence that its prompt begins with, or begins another."""
    selection = select(results)
    made = art.trajectory_groups(selection)
    places = [
        place for group in made for place in selection.places if place.group == group["metadata"]["penstock_group"]
    ]
    trajectories = [one for group in made for one in group["trajectories"]]
    failures = [one["message"] for group in made for one in group["exceptions"]]
    assert [one["metadata"]["penstock_rollout_id"] for one in trajectories] == [p.rollout_id for p in places if p.rows]
    assert failures == [str(place.dropped) for place in places if place.dropped]
    found = []
    for place, one in zip((place for place in places if place.rows), trajectories, strict=True):
        assert one["reward"] == place.rows[0].reward and one["metrics"]["sequences"] == len(place.rows)
        choices = iter(one["messages_and_choices"])
        for row in place.rows:
            for start, end in trained_runs(row.sample.loss_mask):
                choice, ids = next(choices), row.sample.input_ids.tolist()
                assert (choice["prompt_token_ids"], choice["token_ids"]) == (ids[:start], ids[start:end])
                entries = choice["logprobs"]["content"]
                assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in choice["token_ids"]]
                logprobs = [entry["logprob"] for entry in entries]
                found += masked(row.sample.sample_id, choice["token_ids"], [True] * (end - start), logprobs)
        assert next(choices, None) is None
    assert sorted(found) == sorted(trained_tokens(selection))


@pytest.mark.requirement("R84")
@of_any_groups
def test_nemo_gyms_output_items_continue_each_other(results: list[Trajectory | RolloutResult]) -> None:
    """As NeMo-RL walks them: each prompt begins with all that the items before have, and adds what is not trained."""
    selection = select(results)
    found = []
    for row in selection.rows:
        made = nemo_gym.verify_response(row, params={"temperature": 1.0})
        assert made["reward"] == row.reward and made["responses_create_params"] == {"input": [], "temperature": 1.0}
        seen: list[int] = []
        mask: list[bool] = []
        logprobs: list[float] = []
        for item in made["response"]["output"]:
            if not item.get("generation_token_ids"):
                continue
            prompt, generated = item["prompt_token_ids"], item["generation_token_ids"]
            assert prompt[: len(seen)] == seen and len(generated) == len(item["generation_log_probs"])
            mask += [False] * (len(prompt) - len(seen)) + [True] * len(generated)
            logprobs += [0.0] * (len(prompt) - len(seen)) + item["generation_log_probs"]
            seen = prompt + generated
        assert seen == row.sample.input_ids[: len(seen)].tolist()
        found += masked(row.sample.sample_id, seen, mask, logprobs)
    assert found == trained_tokens(selection)


@pytest.mark.requirement("R84")
def test_nemo_gyms_turns_have_their_ids_on_the_last_item_and_untrained_ones_have_none() -> None:
    """As NeMo-Gym's own converter: a turn may be a message and a function call."""
    (row,) = select([trajectory("r", [sample("s", [(3, 2, False), (1, 2, True)])])]).rows
    untrained, trained = (turn.call_id for turn in row.sample.turns)
    items = {
        untrained: [{"type": "message", "id": "a"}],
        trained: [{"type": "message", "id": "b"}, {"type": "function_call", "id": "c"}],
    }
    first, second, third = nemo_gym.output_items(row, items)
    assert [first, second] == [{"type": "message", "id": "a"}, {"type": "message", "id": "b"}]
    assert (third["id"], third["prompt_token_ids"]) == ("c", row.sample.input_ids[:6].tolist())
    assert third["generation_token_ids"] == row.sample.input_ids[6:].tolist()
    assert items[trained][1] == {"type": "function_call", "id": "c"}


@pytest.mark.requirement("R74", "R84")
@of_any_groups
def test_trls_rollout_function_answers_every_prompt(results: list[Trajectory | RolloutResult]) -> None:
    """What was dropped is a masked token without a reward, which TRL leaves out of the baseline."""
    selection = select(results, one_sequence=True)
    output = trl.rollout_output(selection, filler_token_id=PAD)
    assert {len(column) for column in output.values()} == {len(results)}  # type: ignore[arg-type]
    assert output["rollout_id"] == [result.rollout_id for result in results]
    names = [place.rows[0].sample.sample_id if place.rows else "" for place in selection.places]
    columns = zip(names, output["completion_ids"], output["env_mask"], output["logprobs"], strict=True)
    assert [token for column in columns for token in masked(*column)] == trained_tokens(selection)
    assert all(output["prompt_ids"]) and all(output["completion_ids"])
    rewards = [place.rows[0].reward if place.rows else None for place in selection.places]
    assert trl.reward(prompts=[], completions=[], **output) == rewards


@pytest.mark.requirement("R84", "R87")
@of_any_groups
def test_a_sample_of_trls_asynchronous_trainer_is_a_sequence(results: list[Trajectory | RolloutResult]) -> None:
    """The oldest version that sampled it, and the advantage of its rollout."""
    selection = select(results)
    samples = trl.rollout_samples(selection, first_group_id=5, decode=lambda ids: f"{len(ids)} tokens")
    advantages = selection.advantages()
    found = []
    for row, made in zip(selection.rows, samples, strict=True):
        found += masked(row.sample.sample_id, made["input_ids"], made["completion_mask"], made["old_log_probs"])
        assert made["advantage"] == advantages[row.trajectory.rollout_id]
        assert made["model_version"] == min(span.policy_version for span in row.sample.versions)
        assert made["completion"][0]["content"] == f"{len(row.response_ids)} tokens"
    assert found == trained_tokens(selection)
    groups_seen = dict.fromkeys(place.group for place in selection.places)
    assert {made["group_id"] for made in samples} <= set(range(5, 5 + len(groups_seen)))


@pytest.mark.requirement("R26")
@pytest.mark.parametrize("form", [trl.rollout_output, skyrl.generator_output, slime.samples])
def test_a_form_of_one_sequence_refuses_several(form: Any) -> None:
    """Which branch is left out is said, not chosen on the way."""
    branches = [sample(f"s{i}", [(1, 2, True)]) for i in range(2)]
    with pytest.raises(InvalidArgument, match="one_sequence=True") as raised:
        form(select([trajectory("r", branches)]), filler_token_id=PAD)
    assert raised.value.reason == "SEVERAL_SEQUENCES"


@pytest.mark.requirement("R129")
def test_branches_are_as_old_as_what_they_sampled() -> None:
    """The turns of their parent are in the sequence, and neither trained nor a reason to call it stale."""
    made = sample("s", [(4, 3, False), (2, 3, True)])
    of_the_parent = replace(made.turns[0], untrained_reason="PARENT")
    branch = replace(made, turns=(of_the_parent, made.turns[1]), parent_rollout_id="p", branch_call_id="c")
    selection = select([trajectory("r1", [branch]), trajectory("r2", [branch], reward=0.0)], one_sequence=True)
    assert [row.policy_versions for row in selection.rows] == [(2,), (2,)]
    output = trl.rollout_output(selection, filler_token_id=PAD)
    assert output["policy_version"] == [2, 2] and output["env_mask"][0] == [0, 0, 0, 0, 0, 1, 1, 1]
    assert output["logprobs"][0][:5] == [0.0] * 5
    assert [one["model_version"] for one in trl.rollout_samples(selection)] == [2, 2]
    steps = verl.data_proto(selection, pad_token_id=PAD)["non_tensor_batch"]
    assert [list(steps[name]) for name in ("min_global_steps", "max_global_steps")] == [[2, 2], [2, 2]]
    (group,) = slime.samples(selection, filler_token_id=PAD)
    assert [(one["weight_versions"], one["loss_mask"]) for one in group] == [(["2"], output["env_mask"][0])] * 2
    assert [one["action_ranges"] for one in openrlhf.agent_responses(selection)] == [[(9, 12)]] * 2
    assert {one["info"]["policy_version"].item() for one in openrlhf.experiences(selection)} == {2.0}
    assert skyrl.generator_output(selection, filler_token_id=PAD)["loss_masks"] == output["env_mask"]
    for one in prime_rl.training_samples(selection, env_name="env", temperature=1.0):
        assert one["mask"] == [False] * 9 + [True] * 3 and not any(one["advantages"][:9])
