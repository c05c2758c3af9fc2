"""The ids of judges and users at the gate: they are kept free for the rollouts to which these belong."""

from __future__ import annotations

import pytest

from penstock.interception.v1 import interception_pb2
from penstock.interception.v1 import rollout_gate_service_pb2 as pb
from penstock_chassis.errors import InvalidArgument
from penstock_interception.rpc.gate_service import spec_from


def request(rollout_id: str, judge_of: str, user_of: str) -> pb.OpenRolloutRequest:
    """What opens a rollout of this id."""
    return pb.OpenRolloutRequest(
        request_id="q",
        rollout_id=rollout_id,
        mode=interception_pb2.MODE_TRANSPARENT_PROXY,
        judge_of=judge_of,
        user_of=user_of,
    )


@pytest.mark.requirement("R107")
@pytest.mark.parametrize(
    ("rollout_id", "judge_of", "user_of"),
    [
        ("r.judge", "", ""),
        ("r.user", "", ""),
        ("r.judge", "mine", ""),
        ("r.judge", "", "r"),
        ("r.user", "r", ""),
        ("r.user", "", "mine"),
    ],
)
def test_nobody_takes_the_id_of_another_rollouts_judge_or_user(rollout_id: str, judge_of: str, user_of: str) -> None:
    """That rollout would never be graded: its driver could not open the judge."""
    with pytest.raises(InvalidArgument) as refused:
        spec_from(request(rollout_id, judge_of, user_of), {})
    assert [one.field for one in refused.value.violations] == ["rollout_id"]


@pytest.mark.parametrize(
    ("rollout_id", "judge_of", "user_of"),
    [("r.judge", "r", ""), ("r.user", "", "r"), ("r", "", ""), ("r.judged", "", ""), ("judge", "r", "")],
)
def test_other_ids_are_free(rollout_id: str, judge_of: str, user_of: str) -> None:
    spec, _ = spec_from(request(rollout_id, judge_of, user_of), {})
    assert (spec.rollout_id, spec.judge_of, spec.user_of) == (rollout_id, judge_of, user_of)
