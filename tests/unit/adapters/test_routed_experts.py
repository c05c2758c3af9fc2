"""Routed experts in the forms that trainers take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.unit.analysis.trajectory_cases import failed, sample, trajectory

from penstock.adapters.trainers import Selection, nemo_rl, prime_rl, select, skyrl, slime, verl
from penstock.client import InvalidArgument, TokenTensor
from penstock.client.types.results import FailureCause, RolloutResult
from penstock.client.types.trajectories import Sample, Trajectory

PAD = 7
LAYERS, TOP = 3, 2


def rows(count: int, first: int = 1) -> NDArray[Any]:
    return np.arange(first, first + count * LAYERS * TOP).reshape(count, LAYERS, TOP).astype(np.uint8)


def routed(name: str, *tensors: tuple[int, NDArray[Any]]) -> Sample:
    """Two turns: seven tokens of which 2 to 3 and 6 are trained."""
    made = sample(name, [(2, 2, True), (2, 1, True)])
    return replace(made, tensors=tuple(TokenTensor.of("routed_experts", own, start) for start, own in tensors))


@pytest.fixture
def selection() -> Selection:
    """A rollout with all rows, in two tensors; one that was dropped; and one of the same group."""
    whole = rows(6)
    results: list[Trajectory | RolloutResult] = [
        trajectory("a", [routed("s", (0, whole[:4]), (4, whole[4:]))]),
        failed("b", FailureCause.INFRASTRUCTURE),
        trajectory("c", [routed("t", (0, rows(6, 100)))]),
    ]
    return select(results)


def test_a_sample_has_a_row_for_each_token_but_the_last() -> None:
    """Where one is missing, nothing is made up unless the caller says what."""
    found = routed("s", (0, rows(6))).routed_experts()
    assert found is not None and found.dtype == np.uint8 and found.tolist() == rows(6).tolist()
    assert routed("s").routed_experts() is None
    gap = routed("s", (0, rows(2)), (4, rows(2)))
    with pytest.raises(InvalidArgument, match="2 tokens of s have no routed experts, the first at 2"):
        gap.routed_experts()
    filled = gap.routed_experts(-1)
    assert filled is not None and filled.dtype == np.int16 and filled[2:4].tolist() == [[[-1] * TOP] * LAYERS] * 2
    bare = replace(gap, tensors=tuple(replace(one, rows=None) for one in gap.tensors))
    with pytest.raises(InvalidArgument, match="tensors=True"):
        bare.routed_experts()


@pytest.mark.requirement("R84", "R132")
def test_verl_has_them_where_the_tokens_are(selection: Selection) -> None:
    """Prompts are padded on the left; the last token has zeros."""
    batch = verl.data_proto(selection, pad_token_id=PAD, prompt_length=4, response_length=6)["batch"]
    experts = batch["routed_experts"]
    assert experts.shape == (2, 10, LAYERS, TOP) and experts.dtype == np.int16
    assert experts[0, 2:8].tolist() == rows(6).tolist() and not experts[0, :2].any() and not experts[0, 8:].any()
    outputs = verl.agent_loop_outputs(selection)
    assert [output["routed_experts"].tolist() for output in outputs] == [rows(6).tolist(), rows(6, 100).tolist()]


@pytest.mark.requirement("R84", "R132")
def test_skyrl_and_prime_rl_have_a_row_for_every_token(selection: Selection) -> None:
    """A dropped rollout of SkyRL has none, which SkyRL fills up."""
    zeros = np.zeros((1, LAYERS, TOP), np.uint8)
    first, second = (np.concatenate((rows(6, start), zeros)) for start in (1, 100))
    output = skyrl.generator_output(selection, filler_token_id=PAD)
    assert output["rollout_expert_indices"] == [first.tolist(), [], second.tolist()]
    made = [one["routed_experts"] for one in prime_rl.training_samples(selection, env_name="env", temperature=1.0)]
    expected = [(one.tobytes(), [7, LAYERS, TOP], "uint8") for one in (first, second)]
    assert [(one["data"], one["shape"], one["dtype"]) for one in made] == expected


@pytest.mark.requirement("R84", "R132")
def test_slime_has_all_layers_and_no_row_for_the_last_token(selection: Selection) -> None:
    """A dense layer has zeros; a masked sample has rows that are not all zero."""
    ((first, filler, second),) = slime.samples(selection, filler_token_id=PAD, dense_layers=[1])
    assert first["rollout_routed_experts"].shape == (6, LAYERS + 1, TOP)
    assert first["rollout_routed_experts"][:, [0, 2, 3]].tolist() == rows(6).tolist()
    assert not first["rollout_routed_experts"][:, 1].any() and first["rollout_routed_experts"].dtype == np.int32
    assert filler["rollout_routed_experts"].tolist() == [[[0, 1]] * (LAYERS + 1)]
    assert second["rollout_routed_experts"][:, [0, 2, 3]].tolist() == rows(6, 100).tolist()
    with pytest.raises(InvalidArgument, match="dense_layers"):
        slime.samples(selection, filler_token_id=PAD, dense_layers=[9])


@pytest.mark.requirement("R84", "R132")
def test_nemo_rls_messages_are_the_sequence_with_its_experts() -> None:
    """What is trained is the assistant's; tokens without a capture have NeMo RL's sign for none."""
    selection = select([trajectory("a", [routed("s", (0, rows(4)))]), trajectory("b", [sample("t", [(1, 1, True)])])])
    first, second = nemo_rl.message_logs(selection)
    assert [(one["role"], one["token_ids"].tolist()) for one in first] == [
        ("user", [100, 101]),
        ("assistant", [102, 103]),
        ("user", [104, 105]),
        ("assistant", [106]),
    ]
    logprobs = [one["generation_logprobs"].tolist() for one in first if one["role"] == "assistant"]
    assert logprobs == [[-0.375, -0.5], [-0.875]]
    experts = np.concatenate([one["routed_experts"] for one in first])
    missing = [[[-1] * TOP] * LAYERS]
    assert experts.tolist() == rows(4).tolist() + missing * 3 and experts.dtype == np.int16
    assert np.concatenate([one["routed_experts"] for one in second]).tolist() == missing * 2
    with pytest.raises(InvalidArgument, match="too large for int8"):
        nemo_rl.message_logs(select([trajectory("a", [routed("s", (0, rows(6, 100)))])]), routed_experts_dtype="int8")


@pytest.mark.requirement("R132", "R133")
def test_what_comes_after_the_last_trained_token_needs_no_experts() -> None:
    """As where a teacher goes on; a gap before it is an error."""
    ended = replace(sample("s", [(2, 2, True), (2, 1, False)]), tensors=routed("s", (0, rows(3))).tensors)
    ((own,),) = slime.samples(select([trajectory("a", [ended])]), filler_token_id=PAD)
    assert own["rollout_routed_experts"].tolist() == rows(3).tolist() + [[[0, 1]] * LAYERS] * 3
    (made,) = prime_rl.training_samples(select([trajectory("a", [ended])]), env_name="env", temperature=1.0)
    assert (made["routed_experts"]["shape"], made["routed_experts"]["dtype"]) == ([7, LAYERS, TOP], "uint8")
    short = replace(ended, tensors=routed("s", (0, rows(2))).tensors)
    for missing in (short, replace(ended, tensors=routed("s", (1, rows(5))).tensors)):
        with pytest.raises(InvalidArgument, match="s have no routed experts"):
            verl.data_proto(select([trajectory("a", [missing])]), pad_token_id=PAD)


@pytest.mark.requirement("R132")
def test_sequences_with_and_without_experts_are_no_batch() -> None:
    """A trainer that replays needs all of them. Without any, no form has the field."""
    mixed = select([trajectory("a", [routed("s", (0, rows(6)))]), trajectory("b", [sample("t", [(1, 1, True)])])])
    with pytest.raises(InvalidArgument, match="t has no routed experts"):
        verl.data_proto(mixed, pad_token_id=PAD)
    none = select([trajectory("b", [sample("t", [(1, 1, True)])])])
    assert "routed_experts" not in verl.data_proto(none, pad_token_id=PAD)["batch"]
    assert "routed_experts" not in verl.agent_loop_outputs(none)[0]
    assert skyrl.generator_output(none, filler_token_id=PAD)["rollout_expert_indices"] is None
    assert "routed_experts" not in prime_rl.training_samples(none, env_name="env", temperature=1.0)[0]
    assert "rollout_routed_experts" not in slime.samples(none, filler_token_id=PAD)[0][0]
    assert all("routed_experts" not in message for message in nemo_rl.message_logs(none)[0])
