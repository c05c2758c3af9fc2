"""Whose leases a caller holds: a driver's are kept by a driver alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from tests.support.services.inner_gate import tokenizer

from penstock.interception.v1 import interception_pb2
from penstock.interception.v1 import rollout_gate_service_pb2 as pb
from penstock_chassis import auth
from penstock_chassis.auth.callers import Caller, serve_for
from penstock_interception.domain.calls import RolloutState
from penstock_interception.gate.context import GateLimits
from penstock_interception.rpc.gate_service import RolloutGateServicer, spec_from
from penstock_interception.testing import open_gate

LEASE_S = 60.0
DRIVER = Caller(auth.Role.OPERATOR, None)
TEAM = Caller(auth.Role.TRAINER, "team-b")


async def opened_by(caller: Caller, number: int) -> Any:
    """The spec of a rollout that a caller opens, with the same driver's id."""
    serve_for(caller)
    request = pb.OpenRolloutRequest(
        request_id=f"q{number}",
        rollout_id=f"r{number}",
        mode=interception_pb2.MODE_INTERCEPTION_GATE,
        driver_id="d0",
        source=interception_pb2.ModelSource(tokenizer=interception_pb2.ModelSource.Tokenizer(name="tiny")),
    )
    return spec_from(request, {})[0]


@pytest.mark.requirement("R107", "R127")
@pytest.mark.parametrize(("holder", "kept"), [(DRIVER, [1]), (TEAM, [2])])
async def test_no_team_keeps_the_rollouts_of_a_lost_driver(tmp_path: Path, holder: Caller, kept: list[int]) -> None:
    """Whoever knows its id: what is not an operator's has that id for itself."""
    async with open_gate(tmp_path, tokenizer(), limits=GateLimits(driver_lease_s=LEASE_S)) as gate:
        servicer = RolloutGateServicer(gate.interceptor, [], lambda: "", asyncio.Event())
        rollouts = {}
        for number, caller in ((1, DRIVER), (2, TEAM)):
            spec = await asyncio.create_task(opened_by(caller, number))  # each RPC has a context of its own
            rollouts[number] = await gate.open(
                driver_id=spec.driver_id, request_id=f"q{number}", rollout_id=f"r{number}"
            )
        watching = asyncio.Event()

        async def watch() -> None:
            serve_for(holder)
            async for _ in servicer.WatchCalls(pb.WatchCallsRequest(driver_id="d0"), cast("Any", None)):
                watching.set()

        task = asyncio.create_task(watch())
        await watching.wait()
        await gate.passes(LEASE_S)
        left = [number for number, rollout in rollouts.items() if rollout.state is not RolloutState.CLOSED]
        task.cancel()
        await asyncio.wait([task])
    assert left == kept
