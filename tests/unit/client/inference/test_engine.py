"""What the client makes of what an inference service says of its engine."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.client import InvalidArgument
from penstock.client.inference.engine_info import stats_from
from penstock.client.inference.weights import as_json
from penstock.inference.v1 import inference_service_pb2 as pb


@pytest.mark.requirement("R87")
def test_statistics_have_each_replica_and_each_gap_that_was_reported() -> None:
    """Who watches sees every engine behind the service, and how far trainers are from it."""
    replica: dict[str, Any] = {"name": "r0", "live": True, "restarts": 2, "running": 3, "load_tokens": 9}
    gap: dict[str, Any] = {"policy_version": 7, "tokens": 20, "mean": -0.5, "kl": 0.25, "effective_share": 0.5}
    message = pb.WatchStatsResponse(
        running=3, policy_version=7, replicas=[pb.ReplicaStats(**replica)], gaps=[pb.LogprobGap(**gap)]
    )
    stats = stats_from(message)
    assert (stats.running, stats.policy_version) == (3, 7)
    (told,), (reported,) = stats.replicas, stats.gaps
    assert {name: getattr(told, name) for name in replica} == replica
    assert {name: getattr(reported, name) for name in gap} == gap
    assert stats_from(pb.WatchStatsResponse()).replicas == ()


@pytest.mark.requirement("R27")
@pytest.mark.parametrize("value", [{"target_modules": {"q_proj"}}, {"r": float("nan")}, [object()]])
def test_options_outside_of_json_are_refused_unsent(value: object) -> None:
    """A PEFT configuration that was not saved has sets."""
    with pytest.raises(InvalidArgument) as caught:
        as_json(value, "config")
    assert caught.value.reason == "NOT_JSON" and str(caught.value).startswith("config ")
