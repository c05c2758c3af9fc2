"""Two teams on one sandbox service: every RPC, from the descriptors, and what one team can do to the other's (R107)."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
import pytest_asyncio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from penstock.sandbox.v1 import (
    file_service_pb2,
    file_service_pb2_grpc,
    process_service_pb2,
    process_service_pb2_grpc,
    sandbox_pb2,
    sandbox_service_pb2_grpc,
    toolbox_service_pb2_grpc,
)
from penstock.sandbox.v1 import sandbox_service_pb2 as ss
from penstock.sandbox.v1 import toolbox_service_pb2 as tb
from penstock_chassis.auth import Role, Token
from penstock_chassis.channel import connect, error_from_rpc
from penstock_sandbox.app import servicers
from penstock_sandbox.testing import OpenSandboxes, open_sandboxes

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.requirement("R107")]

NAMES: Final = {
    "SandboxService": "GetSandbox GetDataPlane WatchSandbox RenewLease SetNetworkPolicy PauseSandbox ResumeSandbox "
    "GetStats DiffSandbox GetSnapshot",
    "ProcessService": "StartProcess WatchProcess WatchProcesses WriteStdin SignalProcess KillProcess ResizePty "
    "GetProcess ListProcesses WaitProcess Run",
    "FileService": "ReadFile WriteFile ReadTree WriteTree Stat List MakeDirectory Remove",
}
"""The request names one resource: another team's is unknown, by `Service.owned`."""
DELETES: Final = {"SandboxService": "DeleteSandbox DeleteSnapshot", "ToolboxService": "DeleteToolbox"}
"""The request names one resource, and an unknown one is a success: another team's is left alone."""
SELECTS: Final = {
    "SandboxService": "ListSandboxes WatchSandboxes DeleteSandboxes ListSnapshots",
    "ToolboxService": "ListToolboxes",
}
"""The request selects among the caller's own."""
CREATES: Final = {"SandboxService": "CreateSandbox PrepareSnapshot ForkSandboxes", "ToolboxService": "PrepareToolbox"}
"""The result is the caller's; whatever its spec or source names must be too."""
OPEN: Final = {"SandboxService": "ListBackends"}
"""What backends can do and the operator's limits: the same for all, with no count of what exists."""
OPERATORS: Final = {"SandboxService": "GetNodeStatus"}
"""Refused to every team: it counts what all have (tests/security/test_roles.py)."""


def _sorted(*tables: dict[str, str]) -> list[str]:
    return [f"{service}/{name}" for table in tables for service, names in table.items() for name in names.split()]


MODULES: Final = (ss, process_service_pb2, file_service_pb2, tb)
METHODS: Final[dict[str, MethodDescriptor]] = {
    f"{service.name}/{method.name}": method
    for module in MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


def box_spec(snapshot_id: str = "", **spec: Any) -> sandbox_pb2.SandboxSpec:
    made = sandbox_pb2.SandboxSpec(**spec)
    if snapshot_id:
        made.base.snapshot_id = snapshot_id
    return made


@dataclass(frozen=True, slots=True)
class Team:
    """A caller's stubs."""

    channel: grpc.aio.Channel
    boxes: Any
    tools: Any

    async def create(self, request_id: str = "", **spec: Any) -> sandbox_pb2.Sandbox:
        request = ss.CreateSandboxRequest(request_id=request_id or secrets.token_hex(8), spec=box_spec(**spec))
        made: sandbox_pb2.Sandbox = (await self.boxes.CreateSandbox(request)).sandbox
        return made

    async def snapshot(self, **spec: Any) -> ss.Snapshot:
        request = ss.PrepareSnapshotRequest(spec=ss.SnapshotSpec(sandbox=box_spec(**spec)))
        made: ss.Snapshot = [event async for event in self.boxes.PrepareSnapshot(request)][-1].snapshot
        return made

    async def toolbox(self, name: str) -> tb.Toolbox:
        files = [tb.ToolboxFile(path="bin/tool", content=b"#!/bin/sh\necho tool\n")]
        request = tb.PrepareToolboxRequest(spec=tb.ToolboxSpec(name=name, files=files))
        made: tb.Toolbox = [event async for event in self.tools.PrepareToolbox(request)][-1].toolbox
        return made

    async def fork(self, request_id: str = "", count: int = 1, **source: str) -> list[ss.ForkSandboxesResponse]:
        request = ss.ForkSandboxesRequest(request_id=request_id or secrets.token_hex(8), count=count, **source)  # type: ignore[arg-type]
        return [answer async for answer in self.boxes.ForkSandboxes(request)]

    async def listed(self, labels: Mapping[str, str] | None = None, *, everything: bool = False) -> set[str]:
        request = ss.ListSandboxesRequest(labels=labels, all_namespaces=everything, page_size=1000)
        return {one.sandbox_id for one in (await self.boxes.ListSandboxes(request)).sandboxes}


@dataclass(frozen=True, slots=True)
class Teams:
    """The two teams and the operator."""

    opened: OpenSandboxes
    a: Team
    b: Team
    operator: Team


@asynccontextmanager
async def opened_for_teams(**settings: Any) -> AsyncIterator[Teams]:
    tokens = {Role.OPERATOR: "operator-token", Role.TRAINER: "trainer-token"}
    more = [Token(Role.TRAINER, f"team-{name}", f"token-of-{name}") for name in "ab"]
    with tempfile.TemporaryDirectory(prefix="penstock-teams-") as folder:
        Path(folder).chmod(0o755)  # the users of sandboxes enter it
        async with (
            open_sandboxes(Path(folder), tokens=tokens, more=more, **settings) as opened,
            connect(opened.address, "token-of-a") as first,
            connect(opened.address, "token-of-b") as second,
        ):
            yield Teams(opened, _team(first), _team(second), _team(opened.channel))


def _team(channel: grpc.aio.Channel) -> Team:
    return Team(
        channel,
        sandbox_service_pb2_grpc.SandboxServiceStub(channel),
        toolbox_service_pb2_grpc.ToolboxServiceStub(channel),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def teams() -> AsyncIterator[Teams]:
    async with opened_for_teams() as teams:
        yield teams


async def refusal(work: Coroutine[Any, Any, Any] | Any) -> tuple[Any, ...]:
    """What a caller sees of a refused call."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await work
    error = error_from_rpc(caught.value)
    return caught.value.code(), error.reason, error.message, dict(error.metadata)


async def seen(work: Callable[[str], Any], theirs: str, unknown: str) -> str:
    """Asserts that another team's id is refused exactly as an unknown one; returns the reason."""
    found, expected = await refusal(work(theirs)), await refusal(work(unknown))
    assert repr(found).replace(theirs, "ID") == repr(expected).replace(unknown, "ID")
    return str(found[1])


def _call(channel: grpc.aio.Channel, method: MethodDescriptor, resource_id: str) -> Any:
    """Calls any method with a request in which only the id is set."""
    request: Any = GetMessageClass(method.input_type)()
    field = "snapshot_id" if method.name == "GetSnapshot" else "sandbox_id"
    module = {
        "SandboxService": sandbox_service_pb2_grpc.SandboxServiceStub,
        "ProcessService": process_service_pb2_grpc.ProcessServiceStub,
        "FileService": file_service_pb2_grpc.FileServiceStub,
    }[method.containing_service.name]
    setattr(request.start if method.client_streaming else request, field, resource_id)
    call = getattr(module(channel), method.name)
    return _ended(call([request] if method.client_streaming else request), streams=method.server_streaming)


async def _ended(call: Any, *, streams: bool) -> None:
    if streams:
        async for answer in call:
            if "opened" not in answer.DESCRIPTOR.fields_by_name or not answer.HasField("opened"):
                return
    else:
        await call


async def test_every_rpc_of_the_sandbox_service_is_sorted(teams: Teams) -> None:
    """A new RPC fails here until it is in one of the tables above, and with it under one of the attacks below."""
    assert sorted(METHODS) == sorted(_sorted(NAMES, DELETES, SELECTS, CREATES, OPEN, OPERATORS))
    owned = servicers(teams.opened.app, teams.opened.health).owned
    assert sorted(owned) == sorted(f"penstock.sandbox.v1.{name}" for name in _sorted(NAMES))
    selecting = [name for name, method in METHODS.items() if "all_namespaces" in method.input_type.fields_by_name]
    assert sorted(selecting) == sorted(_sorted(SELECTS))


@pytest.mark.parametrize("method", _sorted(NAMES))
async def test_resource_of_another_team_is_as_unknown_as_any(teams: Teams, method: str) -> None:
    """The rest of the request is invalid for most methods: that does not show that the id exists either."""
    kind = "ss" if method.endswith("GetSnapshot") else "sb"
    theirs = (await teams.a.snapshot()).snapshot_id if kind == "ss" else (await teams.a.create()).sandbox_id
    reason = await seen(
        lambda one: _call(teams.b.channel, METHODS[method], one), theirs, f"{kind}-{secrets.token_hex(16)}"
    )
    assert reason in ("SNAPSHOT_UNKNOWN" if kind == "ss" else "SANDBOX_UNKNOWN", "FIELD_INVALID")
    if kind == "sb":
        assert (await teams.a.boxes.GetSandbox(ss.GetSandboxRequest(sandbox_id=theirs))).sandbox.namespace == "team-a"
        await teams.a.boxes.DeleteSandbox(ss.DeleteSandboxRequest(sandbox_id=theirs))


async def test_a_watch_of_anothers_process_is_refused_like_one_of_nothing(teams: Teams) -> None:
    """It ends alone: the caller's own watch on the same stream goes on."""
    theirs, own = await teams.a.create(), await teams.b.create()
    command = process_service_pb2.Command(shell="echo of a team")
    for team, box in ((teams.a, theirs), (teams.b, own)):
        start = process_service_pb2.StartProcessRequest(sandbox_id=box.sandbox_id, process_id="p", command=command)
        await process_service_pb2_grpc.ProcessServiceStub(team.channel).StartProcess(start)
    ids = {1: theirs.sandbox_id, 2: f"sb-{secrets.token_hex(16)}", 3: own.sandbox_id}
    frames = [
        process_service_pb2.WatchProcessesRequest(
            start=process_service_pb2.WatchProcessesRequest.WatchStart(
                watch_id=watch_id, sandbox_id=sandbox_id, process_id="p", window_bytes=1 << 16
            )
        )
        for watch_id, sandbox_id in ids.items()
    ]
    found: dict[int, list[process_service_pb2.WatchProcessesResponse]] = {}
    async for event in process_service_pb2_grpc.ProcessServiceStub(teams.b.channel).WatchProcesses(iter(frames)):
        found.setdefault(event.watch_id, []).append(event)
    refused = [[event.failure.reason for event in found[watch_id]] for watch_id in (1, 2)]
    assert refused == [["SANDBOX_UNKNOWN"]] * 2
    assert b"".join(event.chunk.data for event in found[3]) == b"of a team\n"
    assert found[3][-1].HasField("exit")


async def test_deletes_leave_another_teams_resources_alone(teams: Teams) -> None:
    box, snapshot, toolbox = await teams.a.create(), await teams.a.snapshot(), await teams.a.toolbox("kept")
    await teams.b.boxes.DeleteSandbox(ss.DeleteSandboxRequest(sandbox_id=box.sandbox_id))
    await teams.b.boxes.DeleteSnapshot(ss.DeleteSnapshotRequest(snapshot_id=snapshot.snapshot_id))
    await teams.b.tools.DeleteToolbox(tb.DeleteToolboxRequest(toolbox_id=toolbox.toolbox_id))
    made = await teams.a.create(snapshot_id=snapshot.snapshot_id, toolbox_ids=[toolbox.toolbox_id])
    assert {box.sandbox_id, made.sandbox_id} <= await teams.a.listed()


async def test_selections_are_of_the_callers_namespace(teams: Teams) -> None:
    label = {"run": secrets.token_hex(8)}
    theirs, own = await teams.a.create(labels=label), await teams.b.create(labels=label)
    assert await teams.b.listed(label) == {own.sandbox_id}
    assert await teams.operator.listed(label) == set(), "an operator who names no namespace selects in the default"
    assert await teams.operator.listed(label, everything=True) == {own.sandbox_id, theirs.sandbox_id}
    watch = teams.b.boxes.WatchSandboxes(ss.WatchSandboxesRequest(labels=label))
    async for shown in watch:
        assert shown.count == 1
        assert [one.sandbox.sandbox_id for one in shown.sandboxes] == [own.sandbox_id]
        break
    watch.cancel()
    deleted = await teams.b.boxes.DeleteSandboxes(ss.DeleteSandboxesRequest(labels=label))
    assert list(deleted.sandbox_ids) == [own.sandbox_id]
    assert await teams.a.listed(label) == {theirs.sandbox_id}


async def test_lists_show_no_snapshot_or_toolbox_of_another_team(teams: Teams) -> None:
    snapshot, toolbox = await teams.a.snapshot(env={"OF": "a"}), await teams.a.toolbox("of-a")

    async def shown(team: Team, everything: bool = False) -> tuple[bool, bool]:
        first = await team.boxes.ListSnapshots(ss.ListSnapshotsRequest(page_size=1000, all_namespaces=everything))
        second = await team.tools.ListToolboxes(tb.ListToolboxesRequest(page_size=1000, all_namespaces=everything))
        return snapshot in first.snapshots, toolbox in second.toolboxes

    assert (await shown(teams.a), await shown(teams.b)) == ((True, True), (False, False))
    assert (await shown(teams.operator), await shown(teams.operator, True)) == ((False, False), (True, True))


@pytest.mark.parametrize("method", _sorted(SELECTS))
async def test_a_team_may_not_select_in_all_namespaces(teams: Teams, method: str) -> None:
    request: Any = GetMessageClass(METHODS[method].input_type)(all_namespaces=True)
    stub = teams.b.tools if method.startswith("Toolbox") else teams.b.boxes
    call = getattr(stub, METHODS[method].name)(request)
    code, reason, *_ = await refusal(_ended(call, streams=METHODS[method].server_streaming))
    assert (code, reason) == (grpc.StatusCode.PERMISSION_DENIED, "NAMESPACE_NOT_ALLOWED")


async def test_what_a_spec_or_fork_names_must_be_the_teams_own(teams: Teams) -> None:
    """Also a live fork's layer, which a record shows. An operator has to name the namespace."""
    box, snapshot, toolbox = await teams.a.create(), await teams.a.snapshot(), await teams.a.toolbox("guessed")
    (child,) = await teams.a.fork(sandbox_id=box.sandbox_id)
    assert child.sandbox.namespace == "team-a", child
    for team in (teams.b, teams.operator):
        for layer in (snapshot.snapshot_id, child.sandbox.spec.base.snapshot_id):
            for make in (team.create, team.snapshot):
                unknown = f"ss-{secrets.token_hex(16)}"
                assert await seen(lambda one, make=make: make(snapshot_id=one), layer, unknown) == "SNAPSHOT_UNKNOWN"  # type: ignore[misc]
        for make in (team.create, team.snapshot):
            unknown = secrets.token_hex(32)
            reason = await seen(lambda one, make=make: make(toolbox_ids=[one]), toolbox.toolbox_id, unknown)  # type: ignore[misc]
            assert reason == "TOOLBOX_UNKNOWN"
    unknown = f"sb-{secrets.token_hex(16)}"
    assert await seen(lambda one: teams.b.fork(sandbox_id=one), box.sandbox_id, unknown) == "SANDBOX_UNKNOWN"
    assert await seen(lambda one: teams.b.fork(snapshot_id=one), snapshot.snapshot_id, unknown) == "SNAPSHOT_UNKNOWN"


async def test_forks_by_an_operator_stay_with_their_source(teams: Teams) -> None:
    box, snapshot = await teams.a.create(), await teams.a.snapshot()
    for (child,) in (
        await teams.operator.fork(sandbox_id=box.sandbox_id),
        await teams.operator.fork(snapshot_id=snapshot.snapshot_id),
    ):
        assert child.sandbox.namespace == "team-a"
        assert child.sandbox.sandbox_id in await teams.a.listed()


@pytest.mark.requirement("R141")
@pytest.mark.parametrize("name", ["group/g1", "rollout/r1/verifier", "mine"])
async def test_a_team_may_not_name_the_drivers_recordings(teams: Teams, name: str) -> None:
    """What its programs ask would be what a group's verifiers get. The driver, an operator here, may."""
    listed = sandbox_pb2.NetworkPolicy(allowlist=sandbox_pb2.Allowlist(hosts=["a.test"], recording=name))
    spec = box_spec(network=listed)
    made = await teams.a.create()
    fork = ss.ForkSandboxesRequest(request_id=secrets.token_hex(8), sandbox_id=made.sandbox_id, count=1, spec=spec)
    narrower = ss.SetNetworkPolicyRequest(sandbox_id=made.sandbox_id, network=listed)
    of_snapshot = ss.PrepareSnapshotRequest(spec=ss.SnapshotSpec(sandbox=spec))
    refused = set[str]()
    for team in (teams.a, teams.operator):
        for place, work in (
            ("spec.network", team.create(network=listed)),
            ("spec.network", _ended(team.boxes.ForkSandboxes(fork), streams=True)),
            ("spec.sandbox.network", _ended(team.boxes.PrepareSnapshot(of_snapshot), streams=True)),
            ("network", team.boxes.SetNetworkPolicy(narrower)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:  # nobody has an egress proxy here
                await work
            fields = [one.field for one in error_from_rpc(caught.value).violations]
            if fields == [f"{place}.allowlist.recording"]:
                refused.add("team" if team is teams.a else "operator")
            else:
                assert team is teams.operator or name == "mine", fields
    assert refused == ({"team"} if name != "mine" else set())


async def test_request_ids_of_two_teams_are_independent(teams: Teams) -> None:
    first, second = await teams.a.create("one"), await teams.b.create("one")
    assert first.sandbox_id != second.sandbox_id and second.namespace == "team-b"
    assert (await teams.a.create("one")).sandbox_id == first.sandbox_id
    forks = [await team.fork("fork", sandbox_id=box.sandbox_id) for team, box in ((teams.a, first), (teams.b, second))]
    assert [one[0].sandbox.namespace for one in forks] == ["team-a", "team-b"]


async def test_equal_specs_of_two_teams_give_two_snapshots(teams: Teams) -> None:
    spec = {"env": {"SPEC": secrets.token_hex(8)}}
    first, second, again = (
        await teams.a.snapshot(**spec),
        await teams.b.snapshot(**spec),
        await teams.a.snapshot(**spec),
    )
    assert (first.namespace, second.namespace) == ("team-a", "team-b")
    assert first.snapshot_id != second.snapshot_id and again.snapshot_id == first.snapshot_id
    await teams.b.boxes.DeleteSnapshot(ss.DeleteSnapshotRequest(snapshot_id=second.snapshot_id))
    assert (await teams.a.create(snapshot_id=first.snapshot_id)).namespace == "team-a"


async def test_a_toolbox_of_two_teams_goes_with_the_last(teams: Teams) -> None:
    name = f"shared-{secrets.token_hex(4)}"
    first, second = await teams.a.toolbox(name), await teams.b.toolbox(name)
    assert (first.namespace, second.namespace) == ("team-a", "team-b") and first.toolbox_id == second.toolbox_id
    used = await teams.a.create(toolbox_ids=[first.toolbox_id])
    delete = tb.DeleteToolboxRequest(toolbox_id=first.toolbox_id)
    await teams.b.tools.DeleteToolbox(delete)  # not refused because of the other team's sandbox
    listed = await teams.b.tools.ListToolboxes(tb.ListToolboxesRequest(page_size=1000))
    assert first.toolbox_id not in [one.toolbox_id for one in listed.toolboxes]
    assert (await refusal(teams.a.tools.DeleteToolbox(delete)))[1] == "TOOLBOX_IN_USE"
    await teams.a.create(toolbox_ids=[first.toolbox_id])
    for sandbox_id in await teams.a.listed():
        await teams.a.boxes.DeleteSandbox(ss.DeleteSandboxRequest(sandbox_id=sandbox_id))
    await teams.a.tools.DeleteToolbox(delete)
    assert used.sandbox_id not in await teams.a.listed()
    assert first.toolbox_id not in [one.id for one in teams.opened.app.toolboxes.all()]


async def test_a_quota_counts_the_sandboxes_of_its_namespace_alone() -> None:
    """The sandbox of a snapshot's setup counts too, and each child of a fork by itself."""
    async with opened_for_teams(namespaces={"team-a": {"quota": 2}}) as teams:
        first, snapshot = await teams.a.create(), await teams.a.snapshot()
        children = await teams.a.fork(count=3, snapshot_id=snapshot.snapshot_id)
        failures = [one.failure for one in children if one.HasField("failure")]
        assert [(one.reason, one.retriable) for one in failures] == [("NAMESPACE_QUOTA", True)] * 2
        for refused in (teams.a.create(), teams.a.snapshot(env={"NEW": "1"})):
            code, reason, *_ = await refusal(refused)
            assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "NAMESPACE_QUOTA")
        for team in (teams.b, teams.operator):
            for _ in range(3):
                await team.create()
        await teams.a.boxes.DeleteSandbox(ss.DeleteSandboxRequest(sandbox_id=first.sandbox_id))
        await teams.a.create()
