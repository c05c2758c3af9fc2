"""What a sandbox service says of its load and of what it has prepared."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from penstock.sandbox.v1 import sandbox_service_pb2 as pb
from penstock.sandbox.v1 import sandbox_service_pb2_grpc
from penstock_chassis.auth import Role
from penstock_chassis.channel import connect
from penstock_sandbox import metrics
from penstock_sandbox.testing import open_sandboxes

TOKENS = {Role.OPERATOR: "o" * 64, Role.TRAINER: "t" * 64, Role.OBSERVER: "v" * 64}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o755)
    return tmp_path


async def test_a_services_room_is_its_limit_less_what_it_has(folder: Path) -> None:
    async with open_sandboxes(folder, max_sandboxes=3, min_free_bytes=0) as opened:
        stub = sandbox_service_pb2_grpc.SandboxServiceStub(opened.channel)
        empty = await stub.GetNodeStatus(pb.GetNodeStatusRequest())
        assert (empty.sandbox_count, empty.room, empty.waiting_count) == (0, 3, 0)
        assert empty.free_memory_bytes > 0 and empty.cpu_count > 0
        answer = await stub.CreateSandbox(pb.CreateSandboxRequest(request_id="a"))
        keys = [event.snapshot.key async for event in stub.PrepareSnapshot(pb.PrepareSnapshotRequest())]
        status = await stub.GetNodeStatus(pb.GetNodeStatusRequest())
        assert (status.sandbox_count, status.room) == (1, 2)
        assert list(status.snapshot_keys) == keys[-1:]
        assert metrics.NODE_ROOM.values() == {(): 2.0}
        await stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=answer.sandbox.sandbox_id))
        assert (await stub.GetNodeStatus(pb.GetNodeStatusRequest())).room == 3


async def test_a_service_whose_disk_is_low_has_no_room(folder: Path) -> None:
    async with open_sandboxes(folder, min_free_bytes=1 << 60) as opened:
        stub = sandbox_service_pb2_grpc.SandboxServiceStub(opened.channel)
        assert (await stub.GetNodeStatus(pb.GetNodeStatusRequest())).room == 0


@pytest.mark.requirement("R6")
@pytest.mark.parametrize("role", [Role.TRAINER, Role.OBSERVER])
async def test_only_an_operator_may_read_a_services_status(folder: Path, role: Role) -> None:
    async with open_sandboxes(folder, tokens=TOKENS) as opened, connect(opened.address, TOKENS[role]) as channel:
        stub = sandbox_service_pb2_grpc.SandboxServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetNodeStatus(pb.GetNodeStatusRequest())
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
