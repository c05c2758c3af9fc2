"""The driver's client of the sandbox service reads what that service answers."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.sandbox.v1 import sandbox_pb2, sandbox_service_pb2, sandbox_service_pb2_grpc
from penstock_chassis.testing import serve
from penstock_driver.clients.sandboxes import GrpcSandboxes
from penstock_driver.domain.ports import PreparedSnapshot, SandboxTerms, SnapshotSpec


@pytest.mark.requirement("R57")
async def test_a_prepared_snapshot_tells_how_its_sandboxes_are_copied() -> None:
    """The backend knows it, and `Rollout.fork_kind` passes it on."""

    class Service(sandbox_service_pb2_grpc.SandboxServiceServicer):
        async def PrepareSnapshot(self, request: Any, context: Any) -> Any:  # noqa: N802
            snapshot = sandbox_service_pb2.Snapshot(snapshot_id="n", fork_kind=sandbox_pb2.FORK_KIND_ARCHIVE)
            yield sandbox_service_pb2.PrepareSnapshotResponse(snapshot=snapshot)

    servicer = Service()  # type: ignore[abstract]  # what else a sandbox service does is not asked for
    async with serve((servicer, sandbox_service_pb2_grpc.add_SandboxServiceServicer_to_server)) as (_, channel):
        spec = SnapshotSpec(terms=SandboxTerms(), toolbox_ids=(), files=(), setup=())
        steps = [step async for step in GrpcSandboxes(channel).prepare_snapshot(spec)]
    assert steps == [PreparedSnapshot("n", sandbox_pb2.FORK_KIND_ARCHIVE)]
