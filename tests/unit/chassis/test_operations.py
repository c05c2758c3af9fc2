"""`penstock.ops.v1` for every service, and the doctor's eyes for what no service sees by itself."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import resource
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, closing
from importlib import metadata
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.support.services.processes import descriptors
from tests.support.waiting import GUARD_S, eventually

from penstock.cli.commands.doctor.live import examine
from penstock.client import Endpoints, Trouble
from penstock.ops.v1 import operations_service_pb2 as pb
from penstock.ops.v1 import operations_service_pb2_grpc as rpc
from penstock_chassis.auth import Authenticator, Caller, Role, serve_for
from penstock_chassis.channel import connect, typed_errors
from penstock_chassis.errors import InvalidArgument, PermissionDenied
from penstock_chassis.health import Draining
from penstock_chassis.operations import CONTRACT_REVISION, Operations
from penstock_chassis.operations import Trouble as RowCounts
from penstock_chassis.server import Server, Service, watched_by
from penstock_chassis.telemetry.loop_lag import LoopLag
from penstock_chassis.testing import serve

TOKENS = {Role.OPERATOR: "an-operator", Role.OBSERVER: "an-observer"}


async def test_an_operator_drains_a_service_and_undoes_it() -> None:
    """Everybody sees it: by health, by the service's info, by its troubles."""
    running = 1
    draining = Draining(running=lambda: running)
    watched = Operations("driver", draining=draining)
    with closing(watched):
        service = watched_by(watched, Service(registrations=(), draining=draining))
        async with (
            Server(service, Authenticator(TOKENS), stop_s=0.0) as server,
            connect(server.address, "an-operator") as channel,
            connect(server.address, "an-observer") as observer,
        ):
            operator, health = rpc.OperationsServiceStub(channel), health_pb2_grpc.HealthStub(channel)
            with pytest.raises(PermissionDenied), typed_errors():
                await rpc.OperationsServiceStub(observer).Drain(pb.DrainRequest())
            answer = await operator.Drain(pb.DrainRequest())
            assert (answer.running_count, answer.drained) == (1, False)
            assert (await operator.GetServerInfo(pb.GetServerInfoRequest())).draining
            assert "SERVICE_DRAINING" in [one.reason for one in (await status(server.address)).troubles]
            seen = await health.Check(health_pb2.HealthCheckRequest())
            assert seen.status == health_pb2.HealthCheckResponse.NOT_SERVING
            running = 0
            assert (await operator.Drain(pb.DrainRequest(wait=True))).drained
            await operator.Undrain(pb.UndrainRequest())
            assert not (await operator.GetServerInfo(pb.GetServerInfoRequest())).draining
            seen = await health.Check(health_pb2.HealthCheckRequest())
            assert seen.status == health_pb2.HealthCheckResponse.SERVING


@asynccontextmanager
async def serving(watched: Operations) -> AsyncIterator[str]:
    """A server with nothing but the service for operators."""
    with closing(watched):
        server = Server(watched_by(watched, Service(registrations=())), Authenticator(TOKENS), stop_s=0.0)
        async with server:
            yield server.address


async def status(address: str, token: str = "an-observer", **asked: object) -> pb.GetStatusResponse:
    """What a service says of itself."""
    async with connect(address, token) as channel:
        with typed_errors():
            answer: pb.GetStatusResponse = await rpc.OperationsServiceStub(channel).GetStatus(
                pb.GetStatusRequest(**asked)  # type: ignore[arg-type]
            )
            return answer


@pytest.mark.requirement("R110")
async def test_server_info_has_the_contract_and_the_limits() -> None:
    """For every role; features are sorted."""
    async with (
        serving(Operations("driver", features=("b", "a"))) as address,
        connect(address, "an-observer") as channel,
    ):
        answer = await rpc.OperationsServiceStub(channel).GetServerInfo(pb.GetServerInfoRequest())
    server = answer.server
    assert (server.service, server.version, list(server.features)) == (
        "driver",
        metadata.version("penstock-driver"),
        ["a", "b", "namespaces"],
    )
    assert server.contract_revision == CONTRACT_REVISION
    assert (server.max_message_bytes, server.min_ping_interval.seconds) == (64 << 20, 10)


async def test_status_is_open_to_every_role_and_lists_the_gravest_first(tmp_path: Path) -> None:
    """Its own troubles, with what to do; as many subjects as a person reads."""
    patience: list[float] = []

    def troubles(patience_s: float) -> list[RowCounts]:
        patience.append(patience_s)
        many = tuple(map(str, range(100)))
        return [RowCounts("LATER", "m", "a", grave=False), RowCounts("NOW", "m", "do it", subjects=many)]

    async with serving(Operations("driver", troubles, {"state": tmp_path, "gone": tmp_path / "gone"})) as address:
        said = await status(address, min_free_bytes=0)
    assert (said.service, said.version) == ("driver", "0.1.0") and patience == [60.0]
    assert [disk.name for disk in said.disks] == ["state"] and said.disks[0].free_bytes > 0
    own = [trouble for trouble in said.troubles if trouble.reason != "LOOP_LAG"]
    assert [(trouble.reason, trouble.grave) for trouble in own] == [("NOW", True), ("LATER", False)]
    assert len(own[0].subjects) == 20


@pytest.mark.requirement("R107")
@pytest.mark.parametrize(
    ("namespace", "seen"),
    [(None, ["a", "b", "unknown", "e0"]), ("team-a", ["a", "e0"]), ("team-c", ["e0"])],
)
async def test_a_status_names_to_a_team_none_of_another_teams_objects(namespace: str | None, seen: list[str]) -> None:
    """That something is wrong, everybody is told; also which member of the fleet it is."""
    of_teams = RowCounts("STUCK", "m", "a", subjects=("a", "b", "unknown"), owners=("team-a", "team-b", ""))
    watched = Operations("driver", lambda _: [of_teams, RowCounts("LOST", "m", "a", subjects=("e0",))])

    async def asked() -> pb.GetStatusResponse:
        serve_for(Caller(Role.OPERATOR, namespace))
        return await watched.GetStatus(pb.GetStatusRequest(min_free_bytes=0), None)

    said = await asyncio.create_task(asked())
    own = [trouble for trouble in said.troubles if trouble.reason in ("STUCK", "LOST")]
    assert [subject for trouble in own for subject in trouble.subjects] == seen and len(own) == 2


@pytest.mark.requirement("R33")
async def test_a_request_that_makes_no_sense_is_refused_by_field() -> None:
    """R33's like for RPCs: a negative size or patience."""
    async with serving(Operations("driver")) as address:
        with pytest.raises(InvalidArgument) as refused:
            await status(address, min_free_bytes=-1)
    assert refused.value.reason == "FIELD_INVALID"
    assert [violation.field for violation in refused.value.violations] == ["min_free_bytes"]


async def test_stalled_event_loop_is_reported() -> None:
    """The longest delay of the last minute, while it lasts too: also one that ends within the second it began in."""
    with closing(LoopLag()) as lag:
        time.sleep(0.7)  # noqa: ASYNC251 - this is the trouble
        assert lag.longest >= 0.6
        await eventually(lambda: len(lag._last) > 0, "told")
        assert lag.longest >= 0.6


async def test_a_loop_that_is_held_up_is_the_services_trouble() -> None:
    """A warning: every call of everybody waits for the loop."""
    watched = Operations("interception")
    async with serving(watched) as address:
        watched.begin()
        time.sleep(0.7)  # noqa: ASYNC251 - this is the trouble
        (trouble,) = (await status(address, min_free_bytes=0)).troubles
    assert (trouble.reason, trouble.grave) == ("LOOP_LAG", False)
    assert "interception service's event loop was blocked for" in trouble.message and "processor" in trouble.advice


async def test_service_with_a_different_clock_is_reported() -> None:
    """By how much, beyond what asking took."""
    watched = Operations("driver", clock=lambda: time.time() + 1000.0)
    async with serving(watched) as address:
        found = await examined(address)
    assert [trouble.reason for trouble in found] == ["CLOCK_SKEW"]
    ahead = re.search(r"([0-9.]+) s ahead", found[0].message)
    assert ahead is not None and abs(float(ahead[1]) - 1000.0) < GUARD_S


async def test_outdated_service_is_reported_for_an_upgrade() -> None:
    """UNIMPLEMENTED is no failure of the service: a warning."""
    async with serve(tokens=TOKENS) as (address, _):
        found = await examined(address)
    assert [(trouble.reason, trouble.grave) for trouble in found] == [("SERVICE_OLD", False)]


async def test_services_of_different_versions_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning that names who is of which; the same version everywhere is none."""
    versions = {"penstock-driver": "0.2.0", "penstock-interception": "0.1.0"}
    monkeypatch.setattr("penstock_chassis.operations.metadata.version", versions.__getitem__)
    async with serving(Operations("driver")) as driver, serving(Operations("interception")) as other:
        endpoints = Endpoints(sandbox=other, driver=driver, interception=other, inference="", token="an-observer")
        (found,) = await troubles_of(endpoints)
        assert (found.reason, found.service, found.grave) == ("VERSIONS_DIFFER", "all", False)
        assert "driver 0.2.0, interception 0.1.0" in found.message and "upgrade all of them" in found.advice
        versions["penstock-interception"] = "0.2.0"
        assert not await troubles_of(endpoints)


@pytest.fixture
def nearly_all_files_open() -> Iterator[tuple[int, int]]:
    """Seven eighths of what this process may have open is open: how many this fixture opened, and the limit.

    Most are the fixture's own. What ends or begins beside it, such as a thread of an earlier test, changes little.
    """
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        gc.collect()  # else what earlier tests left could be closed between the count and the service's own
        for _ in range(400):
            stack.enter_context(Path(os.devnull).open("rb"))
        most = len(descriptors()) * 8 // 7
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
        yield 400, most


@pytest.mark.requirement("R32")
async def test_process_short_of_descriptors_is_reported(nearly_all_files_open: tuple[int, int]) -> None:
    """Every agent's connection is a file; how many there are, of how many, and which limit to raise."""
    own, most = nearly_all_files_open
    async with serving(Operations("interception")) as address:
        said = await status(address, min_free_bytes=0)
    assert said.max_files == most and own <= said.open_files <= most
    (trouble,) = (trouble for trouble in said.troubles if trouble.reason != "LOOP_LAG")
    assert (trouble.reason, trouble.grave) == ("FILES_LOW", True)
    assert f"{said.open_files} files and connections open; its limit is {most}" in trouble.message
    assert "ulimit -n" in trouble.advice


async def test_a_process_with_files_to_spare_is_not() -> None:
    """The same process, with the limit that it has."""
    async with serving(Operations("interception")) as address:
        said = await status(address, min_free_bytes=0)
    assert "FILES_LOW" not in {trouble.reason for trouble in said.troubles}


async def examined(address: str) -> list[Trouble]:
    """What the doctor says of one service; a client wants three, so it is all of them."""
    endpoints = Endpoints(sandbox=address, driver=address, interception=address, inference="", token="an-observer")
    found = await troubles_of(endpoints)
    assert len(found) == 3
    return found[:1]


async def troubles_of(endpoints: Endpoints) -> list[Trouble]:
    """What the doctor says, but for a loop that others of this machine held up."""
    return [found for found in (await examine(endpoints, 0.0, 0)).troubles if found.reason != "LOOP_LAG"]
