"""The driver's client of the sandbox service reads what that service answers."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, cast

import pytest
from pydantic import ValidationError

from penstock.sandbox.v1 import sandbox_pb2, sandbox_service_pb2, sandbox_service_pb2_grpc
from penstock_chassis.aio.pace import Pace
from penstock_chassis.errors import FailedPrecondition
from penstock_chassis.testing import serve
from penstock_driver.clients.sandboxes import GrpcSandboxes
from penstock_driver.domain.ports import Load, PreparedSnapshot, SandboxTerms, SnapshotSpec
from penstock_driver.environments.throttle import Creations
from penstock_driver.settings import DriverSettings


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


class Making(sandbox_service_pb2_grpc.SandboxServiceServicer):
    """Makes sandboxes at once, and notes when it was asked."""

    def __init__(self) -> None:
        self.asked_at: list[float] = []

    async def CreateSandbox(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.asked_at.append(asyncio.get_running_loop().time())
        return sandbox_service_pb2.CreateSandboxResponse(sandbox=sandbox_pb2.Sandbox(sandbox_id="s"))

    async def GetNodeStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        return sandbox_service_pb2.GetNodeStatusResponse(
            sandbox_count=3, waiting_count=2, room=7, free_memory_bytes=1 << 30, snapshot_keys=["k"]
        )


async def test_a_sandbox_services_load_has_what_it_says_and_the_measured_creations() -> None:
    servicer = Making()  # type: ignore[abstract]
    async with serve((servicer, sandbox_service_pb2_grpc.add_SandboxServiceServicer_to_server)) as (_, channel):
        sandboxes = GrpcSandboxes(channel)
        assert await sandboxes.load(10.0) == Load(5, 7, 1 << 30, frozenset({"k"}), None)
        await sandboxes.create(SandboxTerms(), 60.0, {})
        took = (await sandboxes.load(10.0)).creation_s
        assert took is not None and took > 0


@pytest.mark.requirement("R40", "R61")
async def test_a_sandbox_whose_lease_is_not_extended_is_paused_resumed_and_rejoined() -> None:
    """It lives on for as long as before; another refusal is an error."""
    reason = "LEASE_REFUSED"

    class Service(sandbox_service_pb2_grpc.SandboxServiceServicer):
        async def PauseSandbox(self, request: Any, context: Any) -> Any:  # noqa: N802
            return sandbox_service_pb2.PauseSandboxResponse(timeouts_only=True)

        async def ResumeSandbox(self, request: Any, context: Any) -> Any:  # noqa: N802
            return sandbox_service_pb2.ResumeSandboxResponse()

        async def GetDataPlane(self, request: Any, context: Any) -> Any:  # noqa: N802
            return sandbox_service_pb2.GetDataPlaneResponse()

        async def RenewLease(self, request: Any, context: Any) -> Any:  # noqa: N802
            raise FailedPrecondition("a job ends after a day", reason=reason)

    servicer = Service()  # type: ignore[abstract]  # what else a sandbox service does is not asked for
    async with serve((servicer, sandbox_service_pb2_grpc.add_SandboxServiceServicer_to_server)) as (_, channel):
        sandboxes = GrpcSandboxes(channel)
        assert await sandboxes.pause("s", 60.0) is False
        await sandboxes.resume("s", 60.0)
        await sandboxes.rejoin("s", 60.0)
        reason = "SANDBOX_LOST"
        with pytest.raises(FailedPrecondition):
            await sandboxes.renew("s", 60.0)


@pytest.mark.requirement("R51")
@pytest.mark.parametrize("late_s", [0.0, 1.5])
async def test_many_creates_at_once_keep_to_the_rate_of_a_node(monkeypatch: pytest.MonkeyPatch, late_s: float) -> None:
    """Time passes by the pauses alone, each tenth of which ends late, and with it all that are over by then."""
    now, starts, turn = 100.0, list[float](), asyncio.sleep
    pauses: list[tuple[float, asyncio.Event]] = []

    async def pause(seconds: float) -> None:
        pauses.append((now + seconds, over := asyncio.Event()))
        await over.wait()

    async def start() -> None:
        await pace.turn()
        starts.append(now)

    monkeypatch.setattr(asyncio, "sleep", pause)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    pace = Pace(10.0)
    work = asyncio.gather(*(start() for _ in range(150)))
    for number in itertools.count(1):
        for _ in range(3):  # what may go on does so
            await turn(0)
        if not pauses:
            break
        now = min(at for at, _ in pauses) + late_s * (number % 10 == 0)
        for item in [item for item in pauses if item[0] <= now]:
            pauses.remove(item)
            item[1].set()
    await work
    assert len(starts) == 150
    assert all(sum(start <= one < start + 1 for one in starts) <= 10 for start in starts), "the cap of every second"
    assert starts[-1] - starts[0] < 150 / 10 * 1.25 + 14 * late_s, "and it is used"


async def test_without_a_rate_creates_start_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(asyncio, "sleep")
    for _ in range(3):
        await Pace().turn()


def _failing(creations: Creations) -> None:
    with creations.measured():
        raise ValueError


def _seconds(creations: Creations) -> float | None:
    """For a reader of types, who takes a property for constant."""
    return creations.seconds


async def test_a_creation_under_way_shows_how_slow_a_service_is() -> None:
    creations = Creations()
    assert _seconds(creations) is None
    with creations.measured():
        assert _seconds(creations) is not None
    took = _seconds(creations)
    with pytest.raises(ValueError):
        _failing(creations)
    assert _seconds(creations) == took, "a creation that fails does not count"
    assert creations.seconds is not None and creations.seconds < 60


@pytest.mark.parametrize("rate", ["-1", "nan", "inf", "many"])
def test_a_bad_creation_rate_is_refused_by_name(rate: str) -> None:
    with pytest.raises(ValidationError, match="node_creates_per_s"):
        DriverSettings(anonymous=True, node_creates_per_s=cast(Any, rate))
