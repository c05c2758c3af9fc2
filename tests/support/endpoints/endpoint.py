"""A real OpenAI-compatible server for black-box rollouts: the ingress of a transparent rollout at the same gate."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from tests.support.services.stack import Running

from penstock.client.types.trajectories import Trajectory
from penstock.client.wire.results import trajectory as read_trajectory
from penstock.interception.v1 import interception_pb2, rollout_gate_service_pb2_grpc
from penstock.interception.v1 import rollout_gate_service_pb2 as pb
from penstock.trajectory.v1 import trajectory_pb2


def metadata(token: str) -> Sequence[tuple[str, str]]:
    """What authenticates a call."""
    return (("authorization", f"Bearer {token}"),)


@dataclass(frozen=True)
class GateEndpoint:
    """A rollout at the gate that this test opened itself: no driver, no sandbox."""

    rollout_id: str
    base_url: str
    api_key: str
    stub: Any
    token: str

    async def capture(self) -> Trajectory:
        """What the gate has captured so far, request bodies included."""
        request = pb.GetCaptureRequest(rollout_id=self.rollout_id, include_bodies=True)
        whole = trajectory_pb2.Trajectory()
        async for fragment in self.stub.GetCapture(request, metadata=metadata(self.token)):
            whole.MergeFrom(fragment.trajectory)
        return read_trajectory(whole)


@asynccontextmanager
async def gate_rollout(
    running: Running, mode: interception_pb2.Mode.ValueType = interception_pb2.MODE_TRANSPARENT_PROXY, **more: Any
) -> AsyncIterator[GateEndpoint]:
    """A rollout at the gate, closed at the end."""
    token = running.stack.operator_token
    async with grpc.aio.insecure_channel(running.stack.address("interception")) as channel:
        stub: Any = rollout_gate_service_pb2_grpc.RolloutGateServiceStub(channel)
        rollout_id = secrets.token_hex(16)
        request = pb.OpenRolloutRequest(request_id=secrets.token_hex(8), rollout_id=rollout_id, mode=mode, **more)
        opened = await stub.OpenRollout(request, metadata=metadata(token))
        url = f"http://{opened.ingress_address}{opened.endpoints[0].base_path}"
        try:
            yield GateEndpoint(rollout_id, url, opened.token, stub, token)
        finally:
            await stub.CloseRollout(
                pb.CloseRolloutRequest(rollout_id=rollout_id, reason="TEST_OVER"), metadata=metadata(token)
            )
