"""Sessions with a model that is not trained, in the formats of harness workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.unit.analysis.trajectory_cases import sample, trajectory

from penstock.adapters.harness.traces import proxy_trace, training_trace
from penstock.client import Completion, Sampling
from penstock.client.types.trajectories import Call, Sample, Trajectory


def call(call_id: str, index: int, completion: Completion, **other: Any) -> Call:
    """A delivered call with a prompt of two tokens."""
    fields: dict[str, Any] = dict.fromkeys(Call.__dataclass_fields__)
    fields |= {"call_id": call_id, "index": index, "completion": completion, "state": "delivered", "branch_id": "b"}
    fields |= {"prompt_shared_count": 0, "prompt_suffix_token_ids": np.array([100, 101], np.int32), "injected": False}
    fields |= {"sampling_requested": Sampling(), "request_body": b"", "answerer": "teacher", "images": (), "tools": ()}
    return Call(**(fields | other))


def session(samples: list[Sample], *calls: Call) -> Trajectory:
    return replace(trajectory("r", samples), calls=calls)


def tokens(count: int) -> Completion:
    return Completion.of_tokens(range(102, 102 + count), [-0.5] * count)


@pytest.mark.requirement("R82", "R84", "R133")
def test_an_untrained_models_answer_without_tokens_is_left_out_of_what_is_trained() -> None:
    """A teacher behind an endpoint of texts is no reason to lose the student's turns."""
    answered = session(
        [sample("s", [(2, 3, True)])],
        call("t", 0, Completion.of_text("Begin so."), trained=False),
        call("u", 1, replace(tokens(2), logprobs=None), trained=False),
        call("s-0", 2, tokens(3), trained=True),
    )
    (turn,) = training_trace(answered).turns
    assert (turn.node_id, turn.loss_mask) == ("s-0", [0, 0, 1, 1, 1])
    first, second, third = proxy_trace(answered)
    assert (first["completion_token_ids"], first["loss_mask"]) == ([], [0, 0])
    assert (second["loss_mask"], third["loss_mask"]) == ([0] * 4, turn.loss_mask)


@pytest.mark.requirement("R82")
@pytest.mark.parametrize("trained", [True, None])
def test_a_trained_models_answer_without_tokens_is_still_refused(trained: bool | None) -> None:
    """None: the rollout has one model."""
    answered = session([sample("s", [(2, 3, True)])], call("t", 0, Completion.of_text("Hello."), trained=trained))
    with pytest.raises(ValueError, match="call 0 was captured without tokens"):
        training_trace(answered)


@pytest.mark.requirement("R84", "R133")
def test_an_untrained_answer_of_which_a_later_prompt_has_the_beginning_is_context() -> None:
    """After an edit of the history: the model is the reason that the part is masked, and not that it is a part."""
    whole, part = sample("s", [(2, 3, False), (1, 2, True)]), sample("p", [(2, 2, False), (1, 2, True)])

    def taught(given: Sample) -> Sample:
        first = replace(given.turns[0], call_id="t", untrained_reason="MODEL_UNTRAINED")
        return replace(given, turns=(first, *given.turns[1:]))

    answered = session(
        [taught(whole), taught(part)],
        call("t", 0, tokens(3), trained=False),
        call("s-1", 1, tokens(2), trained=True),
        call("p-1", 2, tokens(2), trained=True),
    )
    assert {turn.node_id: turn.loss_mask[2:] for turn in training_trace(answered).turns} == {
        "t": [0, 0, 0],
        "s-1": [1, 1],
        "p-1": [1, 1],
    }
    assert [entry["loss_mask"][2:] for entry in proxy_trace(answered)] == [[0, 0, 0], [1, 1], [1, 1]]
