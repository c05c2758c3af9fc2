"""Standalone sandboxes: created, listed, snapshotted; without agents or models."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from penstock.client.errors import FailedPrecondition, Unavailable
from penstock.client.sandboxes.handle import Fork, SandboxHandle, forks
from penstock.client.tasks import spec as tasks
from penstock.client.transport.cluster import Cluster, Member
from penstock.client.transport.endpoints import Endpoints
from penstock.client.transport.lists import newest_first
from penstock.client.transport.rpc import Service
from penstock.client.types.sandboxes import Backend, NodeStatus, RunResult, SandboxesUsage, SandboxSpec, Snapshot
from penstock.client.wire import chat, sandboxes, specs
from penstock.sandbox.v1 import sandbox_pb2, sandbox_service_pb2_grpc
from penstock.sandbox.v1 import sandbox_service_pb2 as pb

_ANY: Final = SandboxSpec()
_NOTE_BYTES: Final = 2000
"""Maximum length of a failed setup command's output in the error."""


class SandboxesClient:
    """`ps.sandboxes`: of all sandbox services that the driver lists.

    `watch`, `node_status` and `backends` are of the connection's own service, which also has the toolboxes.
    """

    def __init__(self, service: Service, endpoints: Endpoints, cluster: Cluster) -> None:
        self._service = service
        self._stub = sandbox_service_pb2_grpc.SandboxServiceStub(service.channel)
        self._endpoints = endpoints
        self._cluster = cluster

    async def create(self, spec: SandboxSpec = _ANY) -> SandboxHandle:
        """Creates a sandbox and returns when it is ready: `async with await ps.sandboxes.create() as sandbox`.

        The services take turns. One with toolboxes is at the connection's service, one of a snapshot at the snapshot's.

        Args:
            spec: the sandbox; by default an empty one, completed by the operator's settings.
        """
        request = pb.CreateSandboxRequest(request_id=secrets.token_hex(16), spec=sandboxes.spec(spec))

        async def create(member: Member, is_only: bool) -> pb.CreateSandboxResponse:
            service = member.service
            return await service.call(
                _stub(service).CreateSandbox, request, timeout=300.0, repeatable=True, while_draining=is_only
            )

        if request.spec.toolbox_ids:
            member = self._cluster.given("sandbox")
            answer = await create(member, True)
        elif request.spec.base.snapshot_id:
            member = await self._cluster.home("sandbox", request.spec.base.snapshot_id)
            answer = await create(member, True)
        else:
            member, answer = await self._cluster.create("sandbox", create)
        return self._handle(member.service, answer)

    async def prepare(
        self,
        spec: SandboxSpec = _ANY,
        *,
        files: Sequence[tasks.SeedFile] = (),
        setup: Sequence[tasks.Command] = (),
    ) -> Snapshot:
        """Returns the snapshot of a sandbox with these files after this setup; made once and shared by all callers.

        Args:
            spec: the sandbox; its limits also apply to the sandboxes made from the snapshot.
            files: written first.
            setup: then run in order; the first failure fails the snapshot.

        Raises:
            FailedPrecondition: `SETUP_FAILED`, with the end of the command's output; `CAPABILITY_MISSING`.
        """
        request = pb.PrepareSnapshotRequest(
            spec=pb.SnapshotSpec(
                sandbox=sandboxes.spec(spec),
                files=map(specs.seed_file, files),
                setup=map(specs.command, setup),
            )
        )
        ran: list[RunResult] = []

        async def prepare(member: Member, _: bool) -> Snapshot:
            service = member.service
            async with aclosing(service.stream(_stub(service).PrepareSnapshot, request)) as events:
                async for event in events:
                    if event.HasField("command_finished"):
                        ran.append(sandboxes.run_result(event.command_finished.result))
                    elif event.HasField("snapshot"):
                        return replace(sandboxes.snapshot(event.snapshot), setup=tuple(ran))
            raise Unavailable("The service ended the preparation without a snapshot", reason="STREAM_ENDED")

        try:
            if request.spec.sandbox.toolbox_ids:
                return await prepare(self._cluster.given("sandbox"), True)
            # Equal ones are made at the same service, no matter who asks.
            key = request.SerializeToString(deterministic=True).hex()
            _, made = await self._cluster.create("sandbox", prepare, key)
            return made
        except FailedPrecondition as error:
            if error.reason == "SETUP_FAILED" and ran:
                error.add_note((ran[-1].stdout + ran[-1].stderr)[-_NOTE_BYTES:].decode("utf-8", errors="replace"))
            raise

    async def fork(
        self,
        snapshot_id: str,
        count: int,
        *,
        network: tasks.Network | None = None,
        env: Mapping[str, str] | None = None,
        lease: float | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AsyncGenerator["Fork", None]:
        """Creates sandboxes from a snapshot, yielded in order of completion. Arguments as for `SandboxHandle.fork`.

        Raises:
            NotFound: `SNAPSHOT_UNKNOWN`.
        """
        request = pb.ForkSandboxesRequest(snapshot_id=snapshot_id)
        child = SandboxSpec(network=network, env=env or {}, lease=lease, labels=labels or {})
        member = await self._cluster.home("sandbox", snapshot_id)
        async with aclosing(forks(member.service, self._endpoints, request, count, child)) as made:
            async for fork in made:
                yield fork

    async def snapshots(self) -> AsyncGenerator[Snapshot, None]:
        """Yields the existing snapshots of all services, newest first.

        Raises:
            Unavailable: a service is away, which the message names. It is raised after the snapshots of all others.
        """

        async def of(service: Service) -> AsyncGenerator[Snapshot, None]:
            async for page in service.pages(_stub(service).ListSnapshots, pb.ListSnapshotsRequest()):
                for item in page.snapshots:
                    yield sandboxes.snapshot(item)

        lists = [of(member.service) for member in await self._cluster.members("sandbox", or_given=True)]
        async with aclosing(newest_first(lists, lambda item: item.create_time)) as found:
            async for snapshot in found:
                yield snapshot

    async def snapshot(self, snapshot_id: str) -> Snapshot:
        """Returns an existing snapshot. Raises NotFound `SNAPSHOT_UNKNOWN`."""
        service = (await self._cluster.home("sandbox", snapshot_id)).service
        request = pb.GetSnapshotRequest(snapshot_id=snapshot_id)
        answer = await service.call(_stub(service).GetSnapshot, request, repeatable=True)
        return sandboxes.snapshot(answer.snapshot)

    async def delete_snapshot(self, snapshot_id: str) -> None:
        """Deletes a snapshot; sandboxes made from it live on. Idempotent."""
        service = (await self._cluster.home("sandbox", snapshot_id)).service
        request = pb.DeleteSnapshotRequest(snapshot_id=snapshot_id)
        await service.call(_stub(service).DeleteSnapshot, request, timeout=60.0, repeatable=True)

    async def attach(self, sandbox_id: str) -> SandboxHandle:
        """Returns a handle of an existing sandbox. Raises NotFound `SANDBOX_UNKNOWN`."""
        service = (await self._cluster.home("sandbox", sandbox_id)).service
        found = await service.call(
            _stub(service).GetSandbox, pb.GetSandboxRequest(sandbox_id=sandbox_id), repeatable=True
        )
        where = await service.call(
            _stub(service).GetDataPlane, pb.GetDataPlaneRequest(sandbox_id=sandbox_id), repeatable=True
        )
        return SandboxHandle(
            service, self._endpoints, found.sandbox, where.data_plane if where.HasField("data_plane") else None
        )

    async def list(self, *, labels: Mapping[str, str] | None = None) -> AsyncGenerator[tuple[str, str], None]:
        """Yields ids and states (creating, ready, paused, lost) of sandboxes of all services, with all these labels,
        newest first.

        Raises:
            Unavailable: a service is away, which the message names. It is raised after the sandboxes of all others.
        """

        async def of(service: Service) -> AsyncGenerator[sandbox_pb2.Sandbox, None]:
            request = pb.ListSandboxesRequest(labels=labels or {})
            async for page in service.pages(_stub(service).ListSandboxes, request):
                for item in page.sandboxes:
                    yield item

        lists = [of(member.service) for member in await self._cluster.members("sandbox", or_given=True)]
        async with aclosing(newest_first(lists, lambda item: chat.time(item, "create_time"))) as found:
            async for item in found:
                yield item.sandbox_id, chat.word(sandbox_pb2.SandboxState, item.state, "SANDBOX_STATE_")

    async def watch(
        self, *, labels: Mapping[str, str] | None = None, interval: float | None = None, most: int | None = None
    ) -> AsyncGenerator[SandboxesUsage, None]:
        """Yields the sandboxes with all these labels and what they use, measured anew at each interval. Endless.

        Args:
            labels: none = all sandboxes.
            interval: seconds, 1 to 60; None = 2. Measuring adds at most 15.
            most: sandboxes in one message, the newest, 1 to 1000; None = 200.
        """
        request = pb.WatchSandboxesRequest(labels=labels or {}, interval=chat.duration(interval), most=most)
        async with aclosing(self._service.stream(self._stub.WatchSandboxes, request)) as messages:
            async for message in messages:
                yield sandboxes.usage(message)

    async def delete_all(self, labels: Mapping[str, str]) -> tuple[str, ...]:
        """Deletes every sandbox with all these labels, at least one, at all services; returns their ids.

        Raises:
            InvalidArgument: there is no label.
            Unavailable: `DELETE_PENDING`, the service goes on deleting one; the others are deleted.
        """
        request = pb.DeleteSandboxesRequest(labels=labels)
        answers = await asyncio.gather(
            *(
                member.service.call(_stub(member.service).DeleteSandboxes, request, timeout=120.0, repeatable=True)
                for member in await self._cluster.members("sandbox", or_given=True)
            )
        )
        return tuple(sandbox_id for answer in answers for sandbox_id in answer.sandbox_ids)

    async def node_status(self) -> NodeStatus:
        """Returns how much runs at the service, how much more it admits, and what it has prepared. Operators only."""
        answer = await self._service.call(self._stub.GetNodeStatus, pb.GetNodeStatusRequest(), repeatable=True)
        return sandboxes.node_status(answer)

    async def backends(self) -> Sequence[Backend]:
        """Returns the capabilities of the service's backends on its machine."""
        answer = await self._service.call(self._stub.ListBackends, pb.ListBackendsRequest(), repeatable=True)
        return tuple(map(sandboxes.backend, answer.backends))

    def _handle(self, service: Service, answer: pb.CreateSandboxResponse) -> SandboxHandle:
        data_plane = answer.data_plane if answer.HasField("data_plane") else None
        return SandboxHandle(service, self._endpoints, answer.sandbox, data_plane)


def _stub(service: Service) -> "sandbox_service_pb2_grpc.SandboxServiceAsyncStub":
    return sandbox_service_pb2_grpc.SandboxServiceStub(service.channel)
