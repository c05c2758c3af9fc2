"""kill -9 of the sandbox service at every write of its journal, under one fixed scenario.

The scenario: a sandbox is made; a process starts in it, and its lease is renewed; a snapshot is prepared and forked;
the sandbox is forked while it lives; a fork and the snapshot are deleted; another fork's lease ends; the rest is
deleted by its label. Every request is repeated. The client comes back as its library does, and asks again, by the same
request id, for a sandbox that is reported as lost. What the service had on its host goes with it, or with its next
start. The enumeration ends by itself, with the first write that is not reached.

The short form kills before the commit of each fourth write, and on e2b, where a start takes longer, of each sixth one.
All of them, before and after their commit, takes some minutes:

    pytest --full tests/faults/sandbox/test_every_write.py
"""

from __future__ import annotations

import secrets
import signal
import sqlite3
import tempfile
from asyncio import timeout
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sized
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc
import pytest
from tests.support.e2b_cloud.running import StandIn, stand_in
from tests.support.services.dying import Mortal, Warm, insisting
from tests.support.services.leftovers import (
    groups_in,
    groups_of,
    layers_of,
    mounts_with,
    processes_with,
    sandboxes_of,
)
from tests.support.waiting import eventually, eventually_async

from penstock.sandbox.v1 import process_service_pb2 as ps
from penstock.sandbox.v1 import process_service_pb2_grpc as ps_grpc
from penstock.sandbox.v1 import sandbox_pb2 as sb
from penstock.sandbox.v1 import sandbox_service_pb2 as ss
from penstock.sandbox.v1 import sandbox_service_pb2_grpc as ss_grpc
from penstock_chassis.channel import connect, error_from_rpc

pytestmark = pytest.mark.timeout(1200)  # a guard: a service is killed at each of its writes

T = TypeVar("T")
TOKEN: Final = "operator-token-of-this-test"
HANGS_S: Final = 120.0
LABELS: Final = {"test": "every-write"}
WORD: Final = "kiwi"
SNAPSHOT: Final = ss.PrepareSnapshotRequest(
    spec=ss.SnapshotSpec(setup=[ps.Command(shell=f"echo {WORD} > word.txt")], sandbox=sb.SandboxSpec())
)
TWO: Final = 2


class Scenario:
    """What happens to a service, and what does not hold.

    `marker` is in the arguments of its sandboxes' processes; `keeps`: its snapshots outlive it.
    """

    def __init__(self, place: Mortal, channel: grpc.aio.Channel, marker: str, *, keeps: bool) -> None:
        self.found: list[str] = []
        self._place = place
        self._sandboxes: Any = ss_grpc.SandboxServiceStub(channel)
        self._processes: Any = ps_grpc.ProcessServiceStub(channel)
        self._marker = marker
        self._keeps = keeps
        self._made: dict[str, str] = {}
        """The sandbox that each request id has made last."""

    async def play(self) -> None:
        """From the first sandbox to the end of the last."""
        await self._lived_in("one", self._one, self._used)
        children = await self._forked()
        if await self._copies():
            await self._copied()
        await self._deleted(children[0])
        await self._snapshot_deleted()
        await self._expired(children[1])
        await insisting(
            lambda: self._sandboxes.DeleteSandboxes(ss.DeleteSandboxesRequest(labels=LABELS), wait_for_ready=True)
        )
        self.found += [f"{one.sandbox_id} is left, {one.lost_reason}" for one in await self._listed()]

    async def _one(self) -> sb.Sandbox:
        request = ss.CreateSandboxRequest(request_id="one", spec=sb.SandboxSpec(labels=LABELS))
        answer = await insisting(lambda: self._sandboxes.CreateSandbox(request, wait_for_ready=True))
        return await self._checked("one", answer.sandbox)

    async def _checked(self, request_id: str, sandbox: sb.Sandbox) -> sb.Sandbox:
        """What a request id gives: the sandbox that it gave before, or, if that is lost, another."""
        before = self._made.get(request_id, sandbox.sandbox_id)
        self._made[request_id] = sandbox.sandbox_id
        if sandbox.state != sb.SANDBOX_STATE_READY:
            self.found.append(f"{request_id} gave {sandbox}")
        if before != sandbox.sandbox_id:
            request = ss.GetSandboxRequest(sandbox_id=before)
            old = (await insisting(lambda: self._sandboxes.GetSandbox(request, wait_for_ready=True))).sandbox
            reported = (old.state, old.lost_reason)
            if not self._place.died or reported != (sb.SANDBOX_STATE_LOST, "SERVICE_RESTARTED"):
                self.found.append(f"{request_id} gave another one while there was {old}")
        return sandbox

    async def _lived_in(
        self, name: str, make: Callable[[], Awaitable[sb.Sandbox]], use: Callable[[str], Awaitable[None]]
    ) -> str:
        """Makes a sandbox, uses it, and makes it again if it is lost meanwhile; returns its id."""
        while True:
            sandbox = await make()
            try:
                await use(sandbox.sandbox_id)
            except grpc.aio.AioRpcError as error:
                if error_from_rpc(error).reason != "SANDBOX_LOST" or not self._place.died:
                    self.found.append(f"{name}: {error.details()}")
                    raise
            else:
                again = await make()
                if again.sandbox_id == sandbox.sandbox_id:
                    return sandbox.sandbox_id

    async def _used(self, sandbox_id: str) -> None:
        shell = f"setsid bash -c 'exec -a {self._marker} sleep 4901' & exec -a {self._marker} sleep 4900"
        start = ps.StartProcessRequest(
            sandbox_id=sandbox_id, process_id="p", command=ps.Command(argv=ps.Argv(args=["bash", "-c", shell]))
        )
        for _ in range(TWO):
            await insisting(lambda: self._processes.StartProcess(start, wait_for_ready=True))
        renew = ss.RenewLeaseRequest(sandbox_id=sandbox_id)
        renew.lease.FromSeconds(3000)
        await insisting(lambda: self._sandboxes.RenewLease(renew, wait_for_ready=True))
        await self._says(sandbox_id, "echo here", "here")

    async def _says(self, sandbox_id: str, shell: str, text: str) -> None:
        run = ps.RunRequest(sandbox_id=sandbox_id, command=ps.Command(shell=shell))
        result = (await insisting(lambda: self._processes.Run(run, wait_for_ready=True))).result
        if result.exit.reason == ps.EXIT_REASON_SANDBOX_LOST:
            return  # it is found to be lost when it is asked for again
        if result.stdout.decode().strip() != text:
            self.found.append(f"{shell} in {sandbox_id}: {result}")

    async def _snapshot(self) -> str:
        """Prepares the snapshot, and finds it again: that it is there was acknowledged."""
        prepared = await self._prepared()
        for _ in range(TWO):
            again = await self._prepared()
            if again == prepared:
                break
            if self._keeps or not self._place.died:
                self.found.append(f"the snapshot {prepared} was prepared again as {again}")
            prepared = again
        return prepared

    async def _prepared(self) -> str:
        async def prepare() -> str:
            events = [event async for event in self._sandboxes.PrepareSnapshot(SNAPSHOT, wait_for_ready=True)]
            found: str = events[-1].snapshot.snapshot_id
            return found

        return await insisting(prepare)

    async def _forked(self) -> list[str]:
        """Forks the snapshot; it is prepared again if it went with the service."""
        while True:
            snapshot_id = await self._snapshot()
            try:
                return [
                    await self._lived_in(f"forked/{index}", partial(self._fork, index, snapshot_id), self._reads)
                    for index in range(TWO)
                ]
            except grpc.aio.AioRpcError as error:
                if error_from_rpc(error).reason != "SNAPSHOT_UNKNOWN" or self._keeps or not self._place.died:
                    raise

    async def _fork(self, index: int, snapshot_id: str = "") -> sb.Sandbox:
        """One of two children of the snapshot, or the child of the sandbox that lives."""
        if snapshot_id:
            request = ss.ForkSandboxesRequest(request_id="forked", snapshot_id=snapshot_id, count=TWO)
        else:
            request = ss.ForkSandboxesRequest(request_id="copied", sandbox_id=self._made["one"], count=1)
        request.spec.labels.update(LABELS)

        async def fork() -> dict[int, Any]:
            answers = self._sandboxes.ForkSandboxes(request, wait_for_ready=True)
            return {answer.index: answer async for answer in answers}

        while True:
            answers = await insisting(fork)
            if not any(answer.HasField("failure") for answer in answers.values()):
                break
            self.found += [
                f"{answer}" for answer in answers.values() if answer.failure.message and not answer.failure.retriable
            ]
        return await self._checked(f"{request.request_id}/{index}", answers[index].sandbox)

    async def _reads(self, sandbox_id: str) -> None:
        await self._says(sandbox_id, "cat word.txt", WORD)

    async def _copies(self) -> bool:
        """Whether a sandbox that lives can be forked here."""
        request = ss.ListBackendsRequest()
        answer = await insisting(lambda: self._sandboxes.ListBackends(request, wait_for_ready=True))
        return any(one.is_default and one.capabilities.live_fork for one in answer.backends)

    async def _copied(self) -> None:
        """Forks the living sandbox; it is made again if it is lost."""

        async def make() -> sb.Sandbox:
            while True:
                try:
                    return await self._fork(0)
                except grpc.aio.AioRpcError as error:
                    if error_from_rpc(error).reason != "SANDBOX_LOST" or not self._place.died:
                        raise
                await self._lived_in("one", self._one, self._used)

        async def use(sandbox_id: str) -> None:
            await self._says(sandbox_id, "echo here", "here")

        await self._lived_in("copied/0", make, use)

    async def _deleted(self, sandbox_id: str) -> None:
        request = ss.DeleteSandboxRequest(sandbox_id=sandbox_id)
        for _ in range(TWO):
            await insisting(lambda: self._sandboxes.DeleteSandbox(request, wait_for_ready=True))
        self.found += [f"{sandbox_id} was deleted" for one in await self._listed() if one.sandbox_id == sandbox_id]

    async def _snapshot_deleted(self) -> None:
        there = await self._snapshots()
        for snapshot_id in there:
            request = ss.DeleteSnapshotRequest(snapshot_id=snapshot_id)
            for _ in range(TWO):
                await insisting(lambda: self._sandboxes.DeleteSnapshot(request, wait_for_ready=True))  # noqa: B023
        if len(there) != 1 and (self._keeps or not self._place.died):
            self.found.append(f"of one snapshot there were {there}")
        self.found += [f"the snapshot {one} was deleted" for one in await self._snapshots()]

    async def _snapshots(self) -> list[str]:
        request = ss.ListSnapshotsRequest()
        answer = await insisting(lambda: self._sandboxes.ListSnapshots(request, wait_for_ready=True))
        return [one.snapshot_id for one in answer.snapshots]

    async def _listed(self) -> list[sb.Sandbox]:
        request = ss.ListSandboxesRequest()
        return list((await insisting(lambda: self._sandboxes.ListSandboxes(request, wait_for_ready=True))).sandboxes)

    async def _expired(self, sandbox_id: str) -> None:
        """Ends a sandbox's lease, also one that a restart gave it as a lost one, until it is gone."""
        renew = ss.RenewLeaseRequest(sandbox_id=sandbox_id)
        renew.lease.FromMilliseconds(1)

        async def gone() -> bool:
            try:
                await insisting(lambda: self._sandboxes.RenewLease(renew, wait_for_ready=True))
            except grpc.aio.AioRpcError as error:
                if error_from_rpc(error).reason not in ("SANDBOX_UNKNOWN", "SANDBOX_LOST"):
                    raise
            return all(one.sandbox_id != sandbox_id for one in await self._listed())

        await eventually_async(gone, f"{sandbox_id} ends with its lease")


@dataclass(frozen=True)
class Backend:
    """A backend with its settings.

    `keeps`: its snapshots outlive the service, in `cloud`; `every`: at which writes the short form kills.
    """

    name: str
    keeps: bool
    every: int
    settings: Mapping[str, str]
    cloud: StandIn | None = None

    async def left(self, directory: Path, marker: str) -> list[str]:
        """What is left once everything was deleted, while the service runs: its removals may take a moment."""
        checks: dict[str, Callable[[], Sized]] = {
            "processes": lambda: processes_with(marker),
            "mounts": lambda: mounts_with(str(directory)),
            "directories of sandboxes": lambda: sandboxes_of(directory),
            "directories of snapshots": lambda: layers_of(directory),
            "control groups": lambda: [name for group in groups_of(directory) for name in groups_in(group)],
        }
        found = []
        for what, check in checks.items():
            try:
                await eventually(lambda check=check: not check(), what)  # type: ignore[misc]
            except AssertionError:
                found.append(f"{what} are left: {check()}")
        if (cloud := self.cloud) is not None:

            async def is_empty() -> bool:
                return not await cloud.sandboxes() and not await cloud.snapshots()

            try:
                await eventually_async(is_empty, "the cloud is empty")
            except AssertionError:
                found.append(f"in the cloud are left: {await cloud.sandboxes()}, {await cloud.snapshots()}")
        return found


def left_after_the_stop(directory: Path) -> list[str]:
    """What is left once the service has stopped."""
    found = [f"control group {item} is left" for item in groups_of(directory)]
    found += [f"process {item} is left" for item in processes_with(str(directory))]
    with closing(sqlite3.connect(directory / "state" / "journal.sqlite")) as connection:
        for table in ("sandbox", "snapshot"):
            found += [f"row {row} of {table} is left" for row in connection.execute(f"SELECT * FROM {table}")]
    return found


@pytest.fixture
async def warm() -> AsyncIterator[Warm]:
    """The process that forks services."""
    process = await Warm.start("sandbox")
    yield process
    await process.close()


@pytest.fixture(params=["local", "e2b"])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    """One whose snapshots go with the service, and one, in a stand-in of its cloud, whose snapshots stay."""
    if request.param == "local":
        yield Backend("local", keeps=False, every=4, settings={})
        return
    async with stand_in() as cloud:
        prefix = "PENSTOCK_SANDBOX_"
        settings = {name.removeprefix(prefix).lower(): value for name, value in cloud.environment().items()}
        yield Backend("e2b", keeps=True, every=6, settings=settings, cloud=cloud)


async def killed_at(place: Mortal, at: int, backend: Backend, directory: Path, *, committed: bool) -> list[str]:
    """The scenario with a kill at one write, and a stop at its end; what of the promises does not hold."""
    marker = secrets.token_hex(8)
    await place.start(at, committed=committed)
    place.restart()
    found = ["it hangs"]
    async with connect(place.address, TOKEN) as channel:
        scenario = Scenario(place, channel, marker, keeps=backend.keeps)
        try:
            async with timeout(HANGS_S):
                await scenario.play()
                found = await backend.left(directory, marker)
        except grpc.aio.AioRpcError as error:
            found = [f"unexpected: {error.details()}"]
        except AssertionError as error:
            found = [str(error)]
        except TimeoutError:
            pass
    await place.kill(signal.SIGTERM)
    return scenario.found + found + left_after_the_stop(directory)


@pytest.mark.requirement("R43", "R49", "R50", "R127")
@pytest.mark.parametrize(
    "full",
    [
        pytest.param(False, id="short"),
        pytest.param(True, id="full", marks=pytest.mark.on_demand("kills before the commits show it as well")),
    ],
)
async def test_kill_at_any_write_reports_what_is_lost_and_leaves_nothing(
    warm: Warm, backend: Backend, full: bool
) -> None:
    """R50: what a request id gave is there or is reported as lost; what was deleted or has expired leaves nothing."""
    failed: dict[str, list[str]] = {}
    seen: set[str] = set()
    at, reached = 1 if full else max(1, backend.every - 1), True
    with tempfile.TemporaryDirectory(prefix="penstock-fault-") as folder:
        while reached:
            for committed in (False, True) if full else (False,):
                directory = Path(folder) / f"{at}-{committed}"
                settings = {"default_backend": backend.name, "stop_s": "1", **backend.settings}
                place = Mortal(warm, "sandbox", directory, TOKEN, **settings)
                found = await killed_at(place, at, backend, directory, committed=committed)
                reached, writes = place.died, place.writes()
                seen.update(statement for write in writes for statement in write)
                if found:
                    failed[f"{'after' if committed else 'before'} write {at}: {writes[at - 1 : at]}"] = found
            at += 1 if full else backend.every
    assert not failed
    assert at > 10
    kinds = ["INSERT INTO sandbox", "DELETE FROM sandbox", *(["INSERT INTO snapshot"] if backend.keeps else [])]
    for kind in (*kinds, "DELETE FROM snapshot"):
        assert any(statement.startswith(kind) for statement in seen), (kind, seen)
