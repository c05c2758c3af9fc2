"""A service newer than the client may answer with enum values that the client has no word for (R109)."""

from __future__ import annotations

import copy
import pickle

import pytest

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.client.types.chat import FinishReason, LogprobsMode, Role
from penstock.client.types.results import Failure, FailureCause, Party, Phase
from penstock.client.wire import chat, results
from penstock.driver.v1 import rollout_pb2
from penstock.values import ValueMismatch, to_proto


@pytest.mark.requirement("R109")
def test_rollout_with_unknown_values_is_read_and_keeps_the_numbers() -> None:
    """Phase, cause and component at fault of a later contract."""
    failure = rollout_pb2.Failure(cause=42, reason="NEW", caused_by=77, phase=99)  # type: ignore[arg-type]
    message = rollout_pb2.Rollout(
        rollout_id="x",
        phase=99,  # type: ignore[arg-type]
        spec=rollout_pb2.RolloutSpec(mode=9),  # type: ignore[arg-type]
        outcome=rollout_pb2.Outcome(failure=failure),
    )
    rollout = results.rollout(message)
    assert rollout.outcome is not None
    read = rollout.outcome.failure
    assert read is not None
    assert (rollout.phase, read.cause, read.caused_by, read.phase) == ("99", "42", "77", "99")
    assert isinstance(read.cause, FailureCause)
    assert not read.cause.known
    assert read.cause not in list(FailureCause)


@pytest.mark.requirement("R109")
def test_completion_with_unknown_values_is_read() -> None:
    """A finish reason and a logprobs mode of a later contract, and an author."""
    span = completion_pb2.TokenSpan(logprobs_mode=9)  # type: ignore[arg-type]
    message = completion_pb2.Completion(
        finish_reason=77,  # type: ignore[arg-type]
        span=span,
        message=chat_pb2.Message(role=8),  # type: ignore[arg-type]
    )
    completion = chat.completion_from(message)
    assert (completion.finish_reason, completion.logprobs_mode) == ("77", "9")
    assert completion.message is not None
    assert completion.message.role == "8"


@pytest.mark.requirement("R109")
def test_unknown_values_are_equal_by_number_and_survive_copies() -> None:
    """As members do: in sets, copies and pickles."""
    unknown = Party.of("77")
    assert unknown == Party.of("77") != Party.of("78")
    assert {unknown: 1}[Party.of("77")] == 1
    for twin in (copy.deepcopy(unknown), pickle.loads(pickle.dumps(unknown))):
        assert (twin, twin.known, type(twin)) == (unknown, False, Party)
    assert pickle.loads(pickle.dumps(Party.GATE)) is Party.GATE
    assert copy.copy(Phase.ENDED) is Phase.ENDED


@pytest.mark.requirement("R109")
def test_unknown_value_is_never_sent_and_never_typed_by_a_user() -> None:
    """A word of the client's own is needed to ask for something."""
    with pytest.raises(ValueMismatch, match=r"caused_by.*is not one of agent, task"):
        to_proto(Failure(FailureCause.AGENT, "R", "", False, None, Party.of("77")), rollout_pb2.Failure)
    for kind in (FinishReason, LogprobsMode, Role):
        with pytest.raises(ValueError, match="is not a valid"):
            kind("77")
