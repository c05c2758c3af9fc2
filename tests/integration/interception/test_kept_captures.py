"""Who may have captures kept, over the wire."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from tests.integration.interception.conftest import OPERATOR, TRAINER, tiny_source

from penstock.interception.v1 import interception_pb2
from penstock.interception.v1 import rollout_gate_service_pb2 as gate
from penstock.interception.v1 import rollout_gate_service_pb2_grpc as gate_grpc
from penstock_chassis.channel import connect
from penstock_chassis.rpc_status import from_rpc_error
from penstock_interception.domain.kept_captures import Discarded, Why


@pytest.mark.requirement("R124")
async def test_only_an_operator_has_captures_kept(service: Any) -> None:
    """They take the operator's disk for as long as nobody stores them."""
    request = gate.OpenRolloutRequest(
        request_id="q", rollout_id="r", mode=interception_pb2.MODE_INTERCEPTION_GATE, source=tiny_source(),
        keep_capture=True,
    )  # fmt: skip
    async with connect(service.address, TRAINER) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await gate_grpc.RolloutGateServiceStub(channel).OpenRollout(request)
    assert from_rpc_error(refused.value).reason == "OPERATOR_ONLY"
    async with connect(service.address, OPERATOR) as channel:
        operator = gate_grpc.RolloutGateServiceStub(channel)
        await operator.OpenRollout(request)
        await operator.CloseRollout(gate.CloseRolloutRequest(rollout_id="r"))
        assert len(service.interceptor.registry.kept_captures) == 1
        await operator.CloseRollout(gate.CloseRolloutRequest(rollout_id="r", capture_stored=True))
        assert not service.interceptor.registry.kept_captures


@pytest.mark.requirement("R124")
async def test_reader_of_a_discarded_capture_hears_that_it_was(service: Any) -> None:
    """Whoever may have read it, and nobody else."""
    lost = Discarded("gone", "team-a", None, "d0", 1.0, 2.0, 4096, Why.AGE)
    service.interceptor.registry.kept_captures.record([lost])
    request = gate.GetCaptureRequest(rollout_id="gone")
    async with connect(service.address, OPERATOR) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="limit of age") as refused:
            [item async for item in gate_grpc.RolloutGateServiceStub(channel).GetCapture(request)]
    assert from_rpc_error(refused.value).reason == "CAPTURE_DISCARDED"
    async with connect(service.address, TRAINER) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            [item async for item in gate_grpc.RolloutGateServiceStub(channel).GetCapture(request)]
    assert from_rpc_error(refused.value).reason == "ROLLOUT_UNKNOWN"
