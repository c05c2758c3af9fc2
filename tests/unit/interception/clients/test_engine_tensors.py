"""What a gate keeps of an engine's tensors while their call goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from penstock.chat.v1.completion_pb2 import TokenTensor
from penstock.inference.v1 import inference_service_pb2 as pb
from penstock.inference.v1 import inference_service_pb2_grpc as pb_grpc
from penstock.values.token_tensors import MOST_PIECES
from penstock_chassis.errors import FailedPrecondition
from penstock_chassis.membership.members import Member
from penstock_interception.clients.engines.pool import EnginePool, one_engine
from penstock_interception.clients.engines.values import Asked, Needs

MIB = 1 << 20
ROW = TokenTensor(name="routed_experts", dtype="uint8", shape=[1, 1, 1], data=b"\1")


class Engine(pb_grpc.InferenceServiceServicer):
    """Sends deltas, and then its end."""

    def __init__(self, deltas: Sequence[pb.GenerateDelta]) -> None:
        self.deltas = deltas

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        """Whatever was asked."""
        for delta in self.deltas:
            yield pb.GenerateResponse(delta=delta)
        yield pb.GenerateResponse(done=pb.GenerateDone())


@asynccontextmanager
async def pool_with(*deltas: pb.GenerateDelta) -> AsyncIterator[EnginePool]:
    """The gate's pool of one such engine."""
    server = grpc.aio.server()
    pb_grpc.add_InferenceServiceServicer_to_server(Engine(deltas), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        member = Member("engine", f"127.0.0.1:{port}")
        async with one_engine("engine", member, lambda one: grpc.aio.insecure_channel(one.address)) as pool:
            await pool.settled(10)
            yield pool
    finally:
        await server.stop(None)


ASKED = Asked(lambda _: pb.GenerateRequest(), Needs(), "session")


@pytest.mark.requirement("R29", "R132")
@pytest.mark.parametrize(
    "deltas",
    [
        [pb.GenerateDelta(tensors=[TokenTensor(sha256=bytes(3 * MIB))])] * 11,
        [pb.GenerateDelta(tensors=[ROW] * (MOST_PIECES // 2 + 1))] * 2,
    ],
    ids=["bytes beside the data", "many rows"],
)
async def test_an_engine_that_sends_more_than_is_kept_fails_its_call(deltas: list[pb.GenerateDelta]) -> None:
    """Its messages stay in memory until its end, with all that is in them."""
    async with pool_with(*deltas) as pool:
        with pytest.raises(FailedPrecondition) as refused:
            await pool.generate(ASKED)
    assert refused.value.reason == "TENSORS_TOO_LARGE"


@pytest.mark.requirement("R132")
async def test_as_many_tensors_as_fit_come_with_the_end() -> None:
    """32 MiB of rows in pieces of 2 MiB, each with what describes it."""
    piece = TokenTensor(name="routed_experts", dtype="uint8", shape=[2 * MIB, 1, 1], data=bytes(2 * MIB))
    async with pool_with(*[pb.GenerateDelta(tensors=[piece])] * 16) as pool:
        end = await pool.generate(ASKED)
    assert end is not None and [one.data for one in end.done.completion.tensors] == [piece.data] * 16
