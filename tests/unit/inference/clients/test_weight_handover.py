"""What an engine hands on, if a kept file is replaced or the engine is lost meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from penstock.inference.v1 import inference_service_pb2 as pb
from penstock.inference.v1 import inference_service_pb2_grpc as pb_grpc
from penstock_chassis.channel import connect
from penstock_chassis.errors import Unavailable
from penstock_chassis.membership.members import Member
from penstock_chassis.membership.peers import Peer
from penstock_inference.clients.weight_handover import WeightHandover
from penstock_inference.engines.base import UpdateFormat
from penstock_inference.weights.adapters import KeptAdapter
from penstock_inference.weights.kept import KeptPush


class Taking(pb_grpc.InferenceServiceServicer):
    """Takes all that it is sent."""

    async def UpdateWeights(self, requests: Any, context: Any) -> pb.UpdateWeightsResponse:  # noqa: N802
        """All of it."""
        async for _ in requests:
            pass
        return pb.UpdateWeightsResponse()

    async def LoadAdapter(self, requests: Any, context: Any) -> pb.LoadAdapterResponse:  # noqa: N802
        """All of it."""
        async for _ in requests:
            pass
        return pb.LoadAdapterResponse()


@asynccontextmanager
async def newcomer() -> AsyncIterator[Peer]:
    server = grpc.aio.server()
    pb_grpc.add_InferenceServiceServicer_to_server(Taking(), server)  # type: ignore[abstract]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with connect(address) as channel:
            yield Peer(Member("e1", address), channel)
    finally:
        await server.stop(None)


def handover(*pushes: KeptPush) -> WeightHandover:
    nothing: Any = None
    kept: Any = SimpleNamespace(since=lambda _version: pushes)
    return WeightHandover("e0", nothing, nothing, kept, nothing)


@pytest.mark.requirement("R117")
async def test_weights_that_a_newer_push_replaced_end_no_handover(tmp_path: Path) -> None:
    push = KeptPush(1, 0, UpdateFormat.FULL, b"", tmp_path / "gone")
    async with newcomer() as peer:
        await handover(push)._give(peer, 0)


@pytest.mark.requirement("R117")
async def test_an_adapter_that_was_replaced_ends_no_handover(tmp_path: Path) -> None:
    """Its second file is gone when the call has begun."""
    (tmp_path / "adapter_config.json").write_text("{}")
    async with newcomer() as peer:
        await handover()._give_adapters(peer, {("", "one"): KeptAdapter("one", 1, tmp_path)})


@pytest.mark.requirement("R27", "R117")
async def test_an_engine_that_is_lost_ends_no_handover_and_hands_on_when_it_is_found() -> None:
    """The service ended itself, or could not start before its upstream."""
    lost = Unavailable("lost", reason="UPSTREAM_UNREACHABLE", retry_after_s=1.0)
    engine: Any = Mock(**{"info.side_effect": [lost, SimpleNamespace(policy_version=1)]})
    kept: Any = Mock(newest=1)
    peers, adapters = Mock(**{"all.return_value": []}), Mock(**{"kept.return_value": ()})
    looking = WeightHandover("e0", peers, engine, kept, adapters)
    await looking._look()
    assert not peers.all.called
    await looking._look()
    assert peers.all.called
