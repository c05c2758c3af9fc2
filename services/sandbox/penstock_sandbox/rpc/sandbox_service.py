"""penstock.sandbox.v1.SandboxService."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, cast

import grpc

from penstock.sandbox.v1 import sandbox_pb2, sandbox_service_pb2_grpc
from penstock.sandbox.v1 import sandbox_service_pb2 as pb
from penstock.values import recordings
from penstock_chassis import times
from penstock_chassis.auth import Role, caller
from penstock_chassis.errors import PenstockError
from penstock_chassis.validation import check_request_id, invalid_field
from penstock_sandbox import files, status
from penstock_sandbox.domain.model import NetworkPolicy, Sandbox, Snapshot
from penstock_sandbox.rpc import convert
from penstock_sandbox.rpc.convert import page
from penstock_sandbox.rpc.usage import stats_to, terms_from, usages
from penstock_sandbox.sandboxes.layer_refs import unknown
from penstock_sandbox.sandboxes.manager import Sandboxes
from penstock_sandbox.snapshots.forks import Forks
from penstock_sandbox.snapshots.manager import CommandStarted, Snapshots
from penstock_sandbox.toolboxes.manager import Toolboxes

Context = grpc.aio.ServicerContext[Any, Any]
_MOST_CHILDREN = 256
# Snapshots and toolboxes named in a status.
_MOST_HELD = 4096
# Fraction of a caller's deadline that may be spent in a queue: the rest is for the create, or for the error response.
_PART_OF_DEADLINE = 0.8


class SandboxServicer(sandbox_service_pb2_grpc.SandboxServiceServicer):
    """See the contract."""

    def __init__(self, sandboxes: Sandboxes, forks: Forks, snapshots: Snapshots, toolboxes: Toolboxes) -> None:
        self._sandboxes = sandboxes
        self._forks = forks
        self._snapshots = snapshots
        self._toolboxes = toolboxes

    async def CreateSandbox(self, request: pb.CreateSandboxRequest, context: Context) -> pb.CreateSandboxResponse:  # noqa: N802
        check_request_id(request.request_id)
        spec = convert.spec_from(request.spec)
        _check_recording(spec.network, "spec.network")
        sandbox = await self._sandboxes.create(
            _scoped(request.request_id), spec, caller().home, wait_s=_may_wait(context)
        )
        return pb.CreateSandboxResponse(sandbox=self._shown(sandbox))

    async def GetSandbox(self, request: pb.GetSandboxRequest, context: Context) -> pb.GetSandboxResponse:  # noqa: N802
        return pb.GetSandboxResponse(sandbox=self._shown(self._sandboxes.table.get(request.sandbox_id).view))

    async def GetDataPlane(self, request: pb.GetDataPlaneRequest, context: Context) -> pb.GetDataPlaneResponse:  # noqa: N802
        # The service that holds the sandboxes serves their processes and files.
        self._sandboxes.table.get(request.sandbox_id)
        return pb.GetDataPlaneResponse()

    async def ListSandboxes(self, request: pb.ListSandboxesRequest, context: Context) -> pb.ListSandboxesResponse:  # noqa: N802
        found = self._sandboxes.table.matching(dict(request.labels), caller().scope(request.all_namespaces))
        shown, token = page(found, lambda one: (one.created_at, one.id), request.page_size, request.page_token)
        return pb.ListSandboxesResponse(sandboxes=map(self._shown, shown), next_page_token=token)

    async def WatchSandbox(  # noqa: N802
        self, request: pb.WatchSandboxRequest, context: Context
    ) -> AsyncIterator[pb.WatchSandboxResponse]:
        async for view in self._sandboxes.table.watch(request.sandbox_id):
            yield pb.WatchSandboxResponse(sandbox=self._shown(view))

    async def WatchSandboxes(  # noqa: N802
        self, request: pb.WatchSandboxesRequest, context: Context
    ) -> AsyncIterator[pb.WatchSandboxesResponse]:
        (interval, most), namespace = terms_from(request), caller().scope(request.all_namespaces)
        while True:
            found = self._sandboxes.table.matching(dict(request.labels), namespace)
            yield pb.WatchSandboxesResponse(
                sandboxes=await usages(self._sandboxes.table, found[:most], self._shown), count=len(found)
            )
            await asyncio.sleep(interval)

    async def DeleteSandbox(self, request: pb.DeleteSandboxRequest, context: Context) -> pb.DeleteSandboxResponse:  # noqa: N802
        await self._sandboxes.delete(request.sandbox_id, caller().namespace)
        return pb.DeleteSandboxResponse()

    async def DeleteSandboxes(  # noqa: N802
        self, request: pb.DeleteSandboxesRequest, context: Context
    ) -> pb.DeleteSandboxesResponse:
        deleted = await self._sandboxes.delete_labelled(dict(request.labels), caller().scope(request.all_namespaces))
        return pb.DeleteSandboxesResponse(sandbox_ids=deleted)

    async def RenewLease(self, request: pb.RenewLeaseRequest, context: Context) -> pb.RenewLeaseResponse:  # noqa: N802
        ends_at = await self._sandboxes.leases.renew(request.sandbox_id, times.seconds(request.lease))
        return pb.RenewLeaseResponse(expire_time=times.timestamp(ends_at))

    async def ListBackends(self, request: pb.ListBackendsRequest, context: Context) -> pb.ListBackendsResponse:  # noqa: N802
        return pb.ListBackendsResponse(backends=map(convert.backend_to, self._sandboxes.backends()))

    async def GetNodeStatus(self, request: pb.GetNodeStatusRequest, context: Context) -> pb.GetNodeStatusResponse:  # noqa: N802
        snapshots = itertools.islice(self._snapshots.all(), _MOST_HELD)
        toolboxes = itertools.islice(self._toolboxes.all(), _MOST_HELD)
        return pb.GetNodeStatusResponse(
            sandbox_count=len(self._sandboxes.table.matching({})),
            waiting_count=self._sandboxes.waiting,
            room=self._sandboxes.room,
            free_memory_bytes=status.free_memory(),
            cpu_count=os.cpu_count() or 0,
            busy_cpu_count=status.busy_cpus(),
            snapshot_keys=dict.fromkeys(snapshot.key for snapshot in snapshots),
            toolbox_ids=(toolbox.id for toolbox in toolboxes),
        )

    async def PrepareSnapshot(  # noqa: N802
        self, request: pb.PrepareSnapshotRequest, context: Context
    ) -> AsyncIterator[pb.PrepareSnapshotResponse]:
        spec = convert.snapshot_spec_from(request.spec)
        _check_recording(spec.sandbox.network, "spec.sandbox.network")
        async for event in self._snapshots.prepare(spec, caller().home):
            if isinstance(event, Snapshot):
                yield pb.PrepareSnapshotResponse(snapshot=self._snapshot(event))
            elif isinstance(event, CommandStarted):
                yield pb.PrepareSnapshotResponse(
                    command_started=pb.PrepareSnapshotResponse.CommandStarted(index=event.index)
                )
            else:
                yield pb.PrepareSnapshotResponse(
                    command_finished=pb.PrepareSnapshotResponse.CommandFinished(
                        index=event.index, result=convert.run_result_to(event.result)
                    )
                )

    async def GetSnapshot(self, request: pb.GetSnapshotRequest, context: Context) -> pb.GetSnapshotResponse:  # noqa: N802
        return pb.GetSnapshotResponse(snapshot=self._snapshot(self._snapshots.get(request.snapshot_id)))

    async def ListSnapshots(self, request: pb.ListSnapshotsRequest, context: Context) -> pb.ListSnapshotsResponse:  # noqa: N802
        shown, token = page(
            self._snapshots.all(caller().scope(request.all_namespaces)),
            lambda one: (one.created_at, one.id),
            request.page_size,
            request.page_token,
        )
        return pb.ListSnapshotsResponse(snapshots=map(self._snapshot, shown), next_page_token=token)

    async def DeleteSnapshot(self, request: pb.DeleteSnapshotRequest, context: Context) -> pb.DeleteSnapshotResponse:  # noqa: N802
        await self._snapshots.delete(request.snapshot_id, caller().namespace)
        return pb.DeleteSnapshotResponse()

    async def ForkSandboxes(  # noqa: N802
        self, request: pb.ForkSandboxesRequest, context: Context
    ) -> AsyncIterator[pb.ForkSandboxesResponse]:
        check_request_id(request.request_id)
        if not 1 <= request.count <= _MOST_CHILDREN:
            raise invalid_field("count", f"must be 1 to {_MOST_CHILDREN}")
        spec = request.spec
        taken = ("backend", "base", "resources", "toolbox_ids", "user", "own_kernel", "companions")
        if any(field.name in taken for field, _ in spec.ListFields()):
            raise invalid_field("spec", f"{', '.join(taken)} come from the source and must be unset")
        asked, wait_s, joins = convert.spec_from(spec), _may_wait(context), request.join_sandbox_id
        _check_recording(asked.network, "spec.network")
        if joins and (request.WhichOneof("source") == "sandbox_id" or request.count != 1):
            raise invalid_field("join_sandbox_id", "needs a snapshot and a count of 1")
        if request.WhichOneof("source") == "sandbox_id":
            children = self._forks.of_sandbox(
                _scoped(request.request_id), request.sandbox_id, request.count, asked, wait_s, caller().namespace
            )
        else:
            snapshot = self._snapshots.get(request.snapshot_id)
            if not caller().may_reach(snapshot.namespace):
                raise unknown(request.snapshot_id)
            origin = self._snapshots.sandbox_spec(snapshot.id)
            children = self._forks.of_snapshot(
                _scoped(request.request_id),
                snapshot.id,
                origin,
                request.count,
                asked,
                wait_s,
                snapshot.namespace,
                joins,
            )
        async with aclosing(children):
            async for index, child in children:
                if isinstance(child, PenstockError):
                    failure = pb.ForkSandboxesResponse.ForkFailure(
                        reason=child.reason, message=child.message, retriable=child.retry_after_s is not None
                    )
                    yield pb.ForkSandboxesResponse(index=index, failure=failure)
                else:
                    yield pb.ForkSandboxesResponse(index=index, sandbox=self._shown(child))

    async def SetNetworkPolicy(  # noqa: N802
        self, request: pb.SetNetworkPolicyRequest, context: Context
    ) -> pb.SetNetworkPolicyResponse:
        policy = convert.network_from(request.network, "network")
        present = self._sandboxes.table.get(request.sandbox_id).view.spec.network
        if policy.recording != present.recording:
            _check_recording(policy, "network")
        await self._sandboxes.set_network(request.sandbox_id, policy)
        return pb.SetNetworkPolicyResponse()

    async def PauseSandbox(self, request: pb.PauseSandboxRequest, context: Context) -> pb.PauseSandboxResponse:  # noqa: N802
        is_frozen = await self._sandboxes.pause(request.sandbox_id, hold_timeouts=request.hold_timeouts)
        return pb.PauseSandboxResponse(timeouts_only=not is_frozen)

    async def ResumeSandbox(self, request: pb.ResumeSandboxRequest, context: Context) -> pb.ResumeSandboxResponse:  # noqa: N802
        await self._sandboxes.resume(request.sandbox_id)
        return pb.ResumeSandboxResponse()

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:  # noqa: N802
        _, handle, _ = self._sandboxes.table.usable(request.sandbox_id)
        return stats_to(await handle.stats())

    async def DiffSandbox(  # noqa: N802
        self, request: pb.DiffSandboxRequest, context: Context
    ) -> AsyncIterator[pb.DiffSandboxResponse]:
        _, handle, _ = self._sandboxes.table.usable(request.sandbox_id)
        below = [files.absolute(handle, path) for path in request.below]
        limit = files.tree_limit(request.max_bytes if request.HasField("max_bytes") else None)
        async with aclosing(files.diff(handle, below, limit)) as pieces:
            async for chunk, deleted, digest in pieces:
                if chunk:
                    yield pb.DiffSandboxResponse(tar_chunk=chunk)
                else:
                    end = pb.DiffSandboxResponse.DiffEnd(
                        deleted_paths=filter(convert.is_text, deleted),
                        raw_deleted_paths=map(os.fsencode, itertools.filterfalse(convert.is_text, deleted)),
                        sha256=digest,
                    )
                    yield pb.DiffSandboxResponse(end=end)

    def _shown(self, sandbox: Sandbox) -> sandbox_pb2.Sandbox:
        message = convert.sandbox_to(sandbox)
        message.service = self._sandboxes.home.name
        message.takes_files = True
        return message

    def _snapshot(self, snapshot: Snapshot) -> pb.Snapshot:
        message = convert.snapshot_to(snapshot)
        message.service = self._sandboxes.home.name
        return message


def _check_recording(policy: NetworkPolicy, field: str) -> None:
    """Raises InvalidArgument where a caller names a recording of the driver's, which alone is an operator here.

    What its programs ask would be what the group's verifiers get.
    """
    if caller().role is not Role.OPERATOR and (problem := recordings.problem(policy.recording)):
        raise invalid_field(f"{field}.allowlist.recording", problem)


def _scoped(request_id: str) -> str:
    """Returns a request's id among those of all namespaces."""
    return f"{caller().home}/{request_id}"


def _may_wait(context: Context) -> float | None:
    left = cast("float | None", context.time_remaining())
    return None if left is None else left * _PART_OF_DEADLINE
