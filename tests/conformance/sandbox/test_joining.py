"""Forks that join a live sandbox, to reach its companions as they are."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
from tests.conformance.sandbox.conftest import Box, failure
from tests.conformance.sandbox.needs import needs
from tests.conformance.sandbox.services import Running
from tests.support.docker import dockerd

from penstock.sandbox.v1 import process_service_pb2 as ps
from penstock.sandbox.v1 import sandbox_pb2 as sb
from penstock.sandbox.v1 import sandbox_service_pb2 as ss
from penstock_chassis.errors import InvalidArgument

pytestmark = pytest.mark.asyncio(loop_scope="session")

DATABASE = sb.Companion(name="db", image=dockerd.TINY, entrypoint=["/bin/sleep", "600"], user="65534")


async def forked(service: Running, **request: Any) -> list[ss.ForkSandboxesResponse]:
    asked = ss.ForkSandboxesRequest(request_id=secrets.token_hex(8), **{"count": 1, **request})
    return [event async for event in service.sandboxes.ForkSandboxes(asked, timeout=120)]


@pytest.mark.requirement("R54", "R90")
@needs("fork", "companions")
async def test_a_fork_that_joins_a_sandbox_ends_its_programs_and_goes_with_it(service: Running) -> None:
    """It has the names of the other's companions, none of its own, and neither its files nor its network policy."""
    spec = ss.SnapshotSpec(sandbox=sb.SandboxSpec(companions=[DATABASE]))
    prepared = [event async for event in service.sandboxes.PrepareSnapshot(ss.PrepareSnapshotRequest(spec=spec))]
    snapshot_id = prepared[-1].snapshot.snapshot_id
    one = sb.NetworkPolicy(one_endpoint=sb.OneEndpoint(local_port=4000, upstream="127.0.0.1:9"))
    (made,) = await forked(service, snapshot_id=snapshot_id, spec=sb.SandboxSpec(network=one))
    other = Box(service, made.sandbox)
    await other.start("p", shell="touch mine; sleep 1000")
    joining = {"snapshot_id": snapshot_id, "join_sandbox_id": other.id}
    for wrong, field in (
        ({**joining, "count": 2}, "join_sandbox_id"),
        ({"sandbox_id": other.id, "join_sandbox_id": other.id}, "join_sandbox_id"),
    ):
        error = await failure(forked(service, **wrong))
        assert isinstance(error, InvalidArgument) and [one.field for one in error.violations] == [field]
    (refused,) = await forked(service, **joining, spec=sb.SandboxSpec(network=one))
    assert refused.failure.reason == "FIELD_INVALID"
    (made,) = await forked(service, **joining)
    joined = Box(service, made.sandbox)
    assert not made.sandbox.spec.companions
    assert (await joined.out("getent hosts db; ls")).split() == ["127.0.0.1", "db"]
    ended = await service.processes.KillProcess(ps.KillProcessRequest(sandbox_id=other.id, process_id="p"), timeout=60)
    assert ended.exit.reason == ps.EXIT_REASON_KILLED
    seen = (await service.sandboxes.GetSandbox(ss.GetSandboxRequest(sandbox_id=other.id), timeout=60)).sandbox
    assert seen.spec.network.WhichOneof("policy") in (None, "none")
    (second,) = await forked(service, **joining)
    assert (second.failure.reason, second.failure.retriable) == ("SANDBOX_JOINED", True)
    watch = service.sandboxes.WatchSandbox(ss.WatchSandboxRequest(sandbox_id=joined.id), timeout=60)
    await service.sandboxes.DeleteSandbox(ss.DeleteSandboxRequest(sandbox_id=other.id), timeout=60)
    states = [event.sandbox async for event in watch]
    assert (states[-1].state, states[-1].lost_reason) == (sb.SANDBOX_STATE_LOST, "SANDBOX_VANISHED")
    await service.sandboxes.DeleteSandbox(ss.DeleteSandboxRequest(sandbox_id=joined.id), timeout=60)
