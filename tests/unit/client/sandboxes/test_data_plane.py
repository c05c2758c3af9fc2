"""Sandboxes that are served elsewhere than at the service that made them."""

from __future__ import annotations

import time

import grpc
import pytest
from tests.unit.client.conftest import TOKEN, Fakes, Refusal

from penstock.client import Penstock, SandboxHandle, Unauthenticated
from penstock.sandbox.v1 import file_service_pb2, sandbox_pb2
from penstock.sandbox.v1 import sandbox_service_pb2 as pb

STAT = file_service_pb2.StatResponse(info=file_service_pb2.FileInfo(name="x"))


def plane(ps: Penstock, token: str, lasts_s: float) -> sandbox_pb2.DataPlane:
    """The fakes' own address, with another token."""
    made = sandbox_pb2.DataPlane(address=ps.endpoints.sandbox, token=token)
    made.token_expire_time.FromNanoseconds(int((time.time() + lasts_s) * 1e9))
    return made


async def created(ps: Penstock, fakes: Fakes, lasts_s: float) -> SandboxHandle:
    sandbox = sandbox_pb2.Sandbox(sandbox_id="s")
    fakes.queue("CreateSandbox", pb.CreateSandboxResponse(sandbox=sandbox, data_plane=plane(ps, "one", lasts_s)))
    return await ps.sandboxes.create()


def tokens(fakes: Fakes) -> list[str]:
    return [sent["authorization"].removeprefix("Bearer ") for sent in fakes.metadata]


@pytest.mark.requirement("R118")
async def test_a_sandbox_s_token_is_renewed_before_it_ends(ps: Penstock, fakes: Fakes) -> None:
    """At the service that made the sandbox, with the client's own token, which goes nowhere else."""
    sandbox = await created(ps, fakes, 30)
    fakes.queue("GetDataPlane", pb.GetDataPlaneResponse(data_plane=plane(ps, "two", 3600)))
    fakes.queue("DeleteSandbox", pb.DeleteSandboxResponse())
    fakes.queue("Stat", STAT, STAT)
    await sandbox.stat("x")
    await sandbox.stat("x")
    await sandbox.delete()
    assert tokens(fakes) == [TOKEN, TOKEN, "two", "two", "two"]


@pytest.mark.requirement("R118")
@pytest.mark.parametrize("lasts_s", [30, -1])
async def test_a_token_that_cannot_be_renewed_is_used_until_its_end(ps: Penstock, fakes: Fakes, lasts_s: float) -> None:
    sandbox = await created(ps, fakes, lasts_s)
    fakes.queue("GetDataPlane", Refusal(grpc.StatusCode.UNAUTHENTICATED, "TOKEN_UNKNOWN"))
    if lasts_s > 0:
        fakes.queue("Stat", STAT)
        await sandbox.stat("x")
        assert tokens(fakes)[-1] == "one"
    else:
        with pytest.raises(Unauthenticated):
            await sandbox.stat("x")
