"""The Python SDK sends the header that routes each RPC."""

import pytest
from tests.unit.client.conftest import Fakes

from penstock.client import Penstock
from penstock.driver.v1 import rollout_pb2, rollout_service_pb2


@pytest.mark.requirement("R113")
async def test_the_sdk_names_the_rollout_in_a_header(ps: Penstock, fakes: Fakes) -> None:
    answer = rollout_service_pb2.GetRolloutResponse(
        rollout=rollout_pb2.Rollout(rollout_id="r1", phase=rollout_pb2.PHASE_QUEUED)
    )
    fakes.queue("GetRollout", answer)
    await ps.rollouts.get("r1")
    assert fakes.metadata[-1]["x-penstock-rollout-id"] == "r1"
