"""The driver goes where a scheduler in front of sandbox services sends it."""

from __future__ import annotations

import time
from typing import Any

import grpc
import pytest

from penstock.sandbox.v1 import sandbox_pb2, sandbox_service_pb2, sandbox_service_pb2_grpc
from penstock_chassis.auth import Role
from penstock_chassis.channel import connect
from penstock_chassis.testing import serve
from penstock_driver.clients.sandboxes import GrpcSandboxes
from penstock_driver.domain.ports import SandboxTerms

add = sandbox_service_pb2_grpc.add_SandboxServiceServicer_to_server


class Node(sandbox_service_pb2_grpc.SandboxServiceServicer):
    """Has the sandboxes."""

    def __init__(self) -> None:
        self.deleted: list[tuple[str, str]] = []

    async def DeleteSandbox(self, request: Any, context: Any) -> Any:  # noqa: N802
        sent = dict(context.invocation_metadata())
        self.deleted.append((sent["authorization"], sent["x-penstock-sandbox-id"]))
        return sandbox_service_pb2.DeleteSandboxResponse()


class Scheduler(sandbox_service_pb2_grpc.SandboxServiceServicer):
    """Names the node, with a token that has ended already, and a fresh one by GetDataPlane.

    One that is `away` gives a token for half a minute, and no fresh one.
    """

    def __init__(self, address: str, *, away: bool = False) -> None:
        self._address = address
        self._away = away

    async def CreateSandbox(self, request: Any, context: Any) -> Any:  # noqa: N802
        return sandbox_service_pb2.CreateSandboxResponse(
            sandbox=sandbox_pb2.Sandbox(sandbox_id="s1"),
            data_plane=self._plane("old", time.time() + 30 if self._away else 0),
        )

    async def GetDataPlane(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self._away:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        return sandbox_service_pb2.GetDataPlaneResponse(data_plane=self._plane("fresh", time.time() + 3600))

    def _plane(self, token: str, ends: float) -> sandbox_pb2.DataPlane:
        plane = sandbox_pb2.DataPlane(address=self._address, token=token)
        plane.token_expire_time.FromNanoseconds(int(ends * 1e9))
        return plane


@pytest.mark.requirement("R118")
async def test_a_sandbox_is_used_at_its_data_plane() -> None:
    """With the token for it, renewed before it ends; another sandbox stays at the service's own address."""
    node = Node()  # type: ignore[abstract]
    async with serve((node, add), tokens={Role.OPERATOR: "fresh"}) as (address, _):  # noqa: SIM117
        async with serve((Scheduler(address), add)) as (_, channel):  # type: ignore[abstract]
            sandboxes = GrpcSandboxes(channel, lambda where, token: connect(where, token))
            made = await sandboxes.create(SandboxTerms(), 60.0, {})
            await sandboxes.delete(made.sandbox_id)
    assert node.deleted == [("Bearer fresh", "s1")]


@pytest.mark.requirement("R118")
async def test_a_token_that_cannot_be_renewed_is_used_until_its_end() -> None:
    node = Node()  # type: ignore[abstract]
    async with serve((node, add), tokens={Role.OPERATOR: "old"}) as (address, _):  # noqa: SIM117
        async with serve((Scheduler(address, away=True), add)) as (_, channel):  # type: ignore[abstract]
            sandboxes = GrpcSandboxes(channel, lambda where, token: connect(where, token))
            made = await sandboxes.create(SandboxTerms(), 60.0, {})
            await sandboxes.delete(made.sandbox_id)
    assert node.deleted == [("Bearer old", "s1")]
