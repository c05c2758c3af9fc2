"""RolloutService: rollouts and groups over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, Final

from penstock.driver.v1 import rollout_pb2, rollout_service_pb2, rollout_service_pb2_grpc
from penstock.values import token_tensors
from penstock_chassis import auth, times
from penstock_chassis.auth import Owned
from penstock_chassis.homes import Home
from penstock_chassis.validation import invalid_field, page_size
from penstock_driver.domain.pauses import MOST_REASON
from penstock_driver.domain.records import Filter, GroupPlan, GroupRecord, RequestKey
from penstock_driver.rollouts.branching import branch_order
from penstock_driver.rollouts.manager import RolloutManager
from penstock_driver.rollouts.use_cases import HEARTBEAT_S, RolloutUseCases
from penstock_driver.rpc.row_stream import watch_rows
from penstock_driver.store.event_log import EventLog
from penstock_driver.store.records import Records
from penstock_driver.store.summaries import Summaries
from penstock_driver.wire.converters import page_token
from penstock_driver.wire.to_proto import group_to_proto, listed_to_proto, rollout_to_proto

_SHA256_BYTES: Final = 32
FEATURES: Final = ("rollouts.pause", "annotations", "media", "policies", "turn_rewards", "token_tensors", "users")
WAIT_SHARE: Final = 0.8
HOLD_S: Final = 45.0
"""How long at most a pause, or its end, is waited for."""
PAGE_BYTES: Final = 16 << 20
"""The most of a page of rollouts, but for a single larger one: verifiers may reward each token."""
_PAUSE_S: Final = (1.0, 86_400.0)
SERVICE: Final = "penstock.driver.v1.RolloutService"


class RolloutServicer(rollout_service_pb2_grpc.RolloutServiceServicer):
    """See rollout_service.proto."""

    def __init__(
        self,
        service: RolloutUseCases,
        manager: RolloutManager,
        records: Records,
        event_log: EventLog,
        rows: Summaries,
        home: Home,
    ) -> None:
        self._home = home
        self._service = service
        self._manager = manager
        self._records = records
        self._event_log = event_log
        self._rows = rows

    # Rollouts ---------------------------------------------------------------------------------------------------------

    async def CreateRollout(  # noqa: N802
        self, request: rollout_service_pb2.CreateRolloutRequest, context: Any
    ) -> rollout_service_pb2.CreateRolloutResponse:
        """Checks, records and starts it."""
        key = RequestKey.of(auth.caller().home, request.request_id, request)
        record = await self._service.creation.create(key, request.spec, request.rollout_id)
        return rollout_service_pb2.CreateRolloutResponse(rollout=rollout_to_proto(record))

    async def GetRollout(  # noqa: N802
        self, request: rollout_service_pb2.GetRolloutRequest, context: Any
    ) -> rollout_service_pb2.GetRolloutResponse:
        """The current state."""
        record = await self._manager.get(request.rollout_id)
        return rollout_service_pb2.GetRolloutResponse(rollout=rollout_to_proto(record))

    async def ListRollouts(  # noqa: N802
        self, request: rollout_service_pb2.ListRolloutsRequest, context: Any
    ) -> rollout_service_pb2.ListRolloutsResponse:
        """Newest first. A page of rollouts with long rewards is shorter than was asked for."""
        matching, before, limit = _filter(request.filter), page_token(request.page_token), page_size(request.page_size)
        while True:
            records, more = await self._records.list(matching, before, limit)
            answer = rollout_service_pb2.ListRolloutsResponse(
                rollouts=[listed_to_proto(self._manager.current(record)) for record in records],
                next_page_token=str(more) if more else "",
            )
            if limit == 1 or answer.ByteSize() <= PAGE_BYTES:
                return answer
            limit = max(1, limit // 4)

    async def WatchRollout(  # noqa: N802
        self, request: rollout_service_pb2.WatchRolloutRequest, context: Any
    ) -> AsyncIterator[rollout_service_pb2.WatchRolloutResponse]:
        """Past events from the journal, then new ones as they are written there."""
        async with aclosing(self._service.reading.watch(request.rollout_id, request.after_sequence)) as events:
            async for event in events:
                heartbeat = rollout_service_pb2.WatchHeartbeat() if event is None else None
                yield rollout_service_pb2.WatchRolloutResponse(event=event, heartbeat=heartbeat)

    async def WatchRollouts(  # noqa: N802
        self, request: rollout_service_pb2.WatchRolloutsRequest, context: Any
    ) -> AsyncIterator[rollout_service_pb2.WatchRolloutsResponse]:
        """The summary rows of all matching rollouts, then their changes."""
        matching = _filter(request.filter)
        async for message in watch_rows(self._rows, self._event_log, matching, request, heartbeat_s=HEARTBEAT_S):
            yield message

    async def WaitRollout(  # noqa: N802
        self, request: rollout_service_pb2.WaitRolloutRequest, context: Any
    ) -> rollout_service_pb2.WaitRolloutResponse:
        """Waits until the end, or for 80 % of the call's deadline."""
        record = await self._manager.wait(request.rollout_id, _wait_limit(context))
        return rollout_service_pb2.WaitRolloutResponse(rollout=rollout_to_proto(record))

    async def CancelRollout(  # noqa: N802
        self, request: rollout_service_pb2.CancelRolloutRequest, context: Any
    ) -> rollout_service_pb2.CancelRolloutResponse:
        """Returns when the sandbox is gone."""
        record = await self._manager.cancel(request.rollout_id, request.reason)
        return rollout_service_pb2.CancelRolloutResponse(rollout=rollout_to_proto(record))

    async def PauseRollout(  # noqa: N802
        self, request: rollout_service_pb2.PauseRolloutRequest, context: Any
    ) -> rollout_service_pb2.PauseRolloutResponse:
        """Returns when it is held."""
        reason, duration_s = _pause_terms(request)
        record = await self._manager.pause(request.rollout_id, reason, duration_s, _patience_s(context))
        is_frozen = record.pause is not None and record.pause.sandbox_frozen
        return rollout_service_pb2.PauseRolloutResponse(rollout=rollout_to_proto(record), sandbox_paused=is_frozen)

    async def ResumeRollout(  # noqa: N802
        self, request: rollout_service_pb2.ResumeRolloutRequest, context: Any
    ) -> rollout_service_pb2.ResumeRolloutResponse:
        """Returns when nothing holds it."""
        record = await self._manager.resume(request.rollout_id, _patience_s(context))
        return rollout_service_pb2.ResumeRolloutResponse(rollout=rollout_to_proto(record))

    async def DeleteRollout(  # noqa: N802
        self, request: rollout_service_pb2.DeleteRolloutRequest, context: Any
    ) -> rollout_service_pb2.DeleteRolloutResponse:
        """Deletes it with its events, and its capture at the gate."""
        await self._service.deletion.delete([request.rollout_id])
        return rollout_service_pb2.DeleteRolloutResponse()

    # Groups -----------------------------------------------------------------------------------------------------------

    async def CreateGroup(  # noqa: N802
        self, request: rollout_service_pb2.CreateGroupRequest, context: Any
    ) -> rollout_service_pb2.CreateGroupResponse:
        """Like CreateRollout, for all of them at once."""
        stragglers = request.stragglers
        plan = GroupPlan(
            size=request.size,
            spares=request.spares,
            quorum=request.quorum if request.HasField("quorum") else request.size,
            grace_s=times.seconds(stragglers.grace) if stragglers.HasField("grace") else None,
        )
        key = RequestKey.of(auth.caller().home, request.request_id, request)
        group = await self._service.creation.create_group(key, request.spec, plan, request.group_id)
        return rollout_service_pb2.CreateGroupResponse(group=await self._group(group))

    async def BranchRollout(  # noqa: N802
        self, request: rollout_service_pb2.BranchRolloutRequest, context: Any
    ) -> rollout_service_pb2.BranchRolloutResponse:
        """Reads the parent's answers, then starts a group of its branches."""
        key = RequestKey.of(auth.caller().home, request.request_id, request, b"BranchRollout")
        group = await self._service.creation.branch(key, branch_order(request))
        return rollout_service_pb2.BranchRolloutResponse(group=await self._group(group))

    async def RegradeRollout(  # noqa: N802
        self, request: rollout_service_pb2.RegradeRolloutRequest, context: Any
    ) -> rollout_service_pb2.RegradeRolloutResponse:
        """Returns when the grade is on disk."""
        verifier = request.verifier if request.HasField("verifier") else None
        grade = await self._service.regrade(request.rollout_id, verifier, request.name)
        return rollout_service_pb2.RegradeRolloutResponse(grade=grade)

    async def GetGroup(  # noqa: N802
        self, request: rollout_service_pb2.GetGroupRequest, context: Any
    ) -> rollout_service_pb2.GetGroupResponse:
        """The current state."""
        return rollout_service_pb2.GetGroupResponse(
            group=await self._group(await self._records.group(request.group_id))
        )

    async def ListGroups(  # noqa: N802
        self, request: rollout_service_pb2.ListGroupsRequest, context: Any
    ) -> rollout_service_pb2.ListGroupsResponse:
        """Newest first."""
        run_id = request.run_id if request.HasField("run_id") else None
        groups, more = await self._records.groups(
            run_id,
            page_token(request.page_token),
            page_size(request.page_size),
            auth.caller().scope(request.all_namespaces),
        )
        return rollout_service_pb2.ListGroupsResponse(
            groups=[await self._group(group) for group in groups], next_page_token=str(more) if more else ""
        )

    async def WatchGroup(  # noqa: N802
        self, request: rollout_service_pb2.WatchGroupRequest, context: Any
    ) -> AsyncIterator[rollout_service_pb2.WatchGroupResponse]:
        """The events of all rollouts of a group, in the order in which they were written."""
        after, summary = dict(request.after_sequences), request.summary
        async with aclosing(self._service.reading.watch_group(request.group_id, after, summary=summary)) as events:
            async for event in events:
                heartbeat = rollout_service_pb2.WatchHeartbeat() if event is None else None
                yield rollout_service_pb2.WatchGroupResponse(event=event, heartbeat=heartbeat)
        group = await self._records.group(request.group_id)
        yield rollout_service_pb2.WatchGroupResponse(group=await self._group(group))

    async def WaitGroup(  # noqa: N802
        self, request: rollout_service_pb2.WaitGroupRequest, context: Any
    ) -> rollout_service_pb2.WaitGroupResponse:
        """Waits until all have ended, or for 80 % of the call's deadline."""
        group = await self._service.wait_group(request.group_id, _wait_limit(context))
        return rollout_service_pb2.WaitGroupResponse(group=await self._group(group))

    async def CancelGroup(  # noqa: N802
        self, request: rollout_service_pb2.CancelGroupRequest, context: Any
    ) -> rollout_service_pb2.CancelGroupResponse:
        """Like CancelRollout, for all that run."""
        group = await self._service.cancel_group(request.group_id, request.reason)
        return rollout_service_pb2.CancelGroupResponse(group=await self._group(group))

    async def PauseGroup(  # noqa: N802
        self, request: rollout_service_pb2.PauseGroupRequest, context: Any
    ) -> rollout_service_pb2.PauseGroupResponse:
        """Like PauseRollout, for all that have not ended."""
        group = await self._service.pause_group(request.group_id, *_pause_terms(request), _patience_s(context))
        return rollout_service_pb2.PauseGroupResponse(group=await self._group(group))

    async def ResumeGroup(  # noqa: N802
        self, request: rollout_service_pb2.ResumeGroupRequest, context: Any
    ) -> rollout_service_pb2.ResumeGroupResponse:
        """Like ResumeRollout, for each."""
        group = await self._service.resume_group(request.group_id, _patience_s(context))
        return rollout_service_pb2.ResumeGroupResponse(group=await self._group(group))

    async def DeleteGroup(  # noqa: N802
        self, request: rollout_service_pb2.DeleteGroupRequest, context: Any
    ) -> rollout_service_pb2.DeleteGroupResponse:
        """Like DeleteRollout, for each; deletes nothing while one runs."""
        await self._service.deletion.delete_group(request.group_id)
        return rollout_service_pb2.DeleteGroupResponse()

    # Trajectories -----------------------------------------------------------------------------------------------------

    async def GetTrajectory(  # noqa: N802
        self, request: rollout_service_pb2.GetTrajectoryRequest, context: Any
    ) -> AsyncIterator[rollout_service_pb2.GetTrajectoryResponse]:
        """The gate's capture, with the fields that only the driver knows."""
        fragments = self._service.reading.trajectory(
            request.rollout_id,
            include_bodies=request.include_bodies,
            include_top=request.include_top,
            grade=request.grade,
        )
        async with aclosing(fragments):
            async for trajectory in fragments:
                if request.samples_only:
                    for name in ("calls", "branches", "host_tool_calls"):
                        trajectory.ClearField(name)
                yield rollout_service_pb2.GetTrajectoryResponse(trajectory=trajectory)

    async def GetTensor(  # noqa: N802
        self, request: rollout_service_pb2.GetTensorRequest, context: Any
    ) -> AsyncIterator[rollout_service_pb2.GetTensorResponse]:
        """Pieces of at most 2 MiB, or of one row."""
        if not (request.call_id or request.sample_id):
            raise invalid_field("holder", "must be a call or a sample")
        rows = self._service.reading.tensor(
            request.rollout_id,
            call_id=request.call_id,
            sample_id=request.sample_id,
            name=request.name,
            start=request.start,
        )
        async with aclosing(rows):
            async for piece in rows:
                yield rollout_service_pb2.GetTensorResponse(tensor=token_tensors.write(piece, with_data=True))

    async def GetMedia(  # noqa: N802
        self, request: rollout_service_pb2.GetMediaRequest, context: Any
    ) -> AsyncIterator[rollout_service_pb2.GetMediaResponse]:
        """Pieces of at most 1 MiB."""
        if len(request.sha256) != _SHA256_BYTES:
            raise invalid_field("sha256", f"{_SHA256_BYTES} bytes")
        pieces = self._service.reading.media(request.rollout_id, request.sha256)
        async with aclosing(pieces):
            async for piece in pieces:
                yield rollout_service_pb2.GetMediaResponse(chunk=piece)

    async def AnnotateTrajectory(  # noqa: N802
        self, request: rollout_service_pb2.AnnotateTrajectoryRequest, context: Any
    ) -> rollout_service_pb2.AnnotateTrajectoryResponse:
        """Returns when they are on disk."""
        await self._service.annotate(request.rollout_id, request.annotations)
        return rollout_service_pb2.AnnotateTrajectoryResponse()

    async def ExportTrajectories(  # noqa: N802
        self, request: rollout_service_pb2.ExportTrajectoriesRequest, context: Any
    ) -> AsyncIterator[rollout_service_pb2.ExportTrajectoriesResponse]:
        """Every ended rollout that matches; one that never reached the gate has only its outcome."""
        exported = self._service.reading.export(
            _filter(request.filter),
            include_bodies=request.include_bodies,
            include_top=request.include_top,
            grade=request.grade,
        )
        async with aclosing(exported):
            async for trajectory, outcome in exported:
                yield rollout_service_pb2.ExportTrajectoriesResponse(trajectory=trajectory, outcome=outcome)

    async def _group(self, group: GroupRecord) -> rollout_pb2.Group:
        members = await self._records.members(group)
        paused = self._manager.paused_count(members)
        is_running = any(map(self._manager.is_running, members))
        # First: what ends meanwhile would else be missing among those of a group that is over.
        is_over = not is_running and not await self._records.without_end(members)
        ended = await self._records.group_ended(group.group_id)
        message = group_to_proto(group, ended, paused, is_over=is_over)
        message.home = self._home.name
        return message


def owned(records: Records) -> Mapping[str, Owned]:
    """Whose the rollouts and groups are that requests name."""
    rollout = Owned(("rollout_id",), records.namespace_of)
    group = Owned(("group_id",), records.namespace_of_group)
    of_rollouts = (
        *("GetRollout", "WatchRollout", "WaitRollout", "CancelRollout", "PauseRollout", "ResumeRollout"),
        *("BranchRollout", "RegradeRollout", "DeleteRollout", "GetTrajectory", "GetTensor", "GetMedia"),
        "AnnotateTrajectory",
    )
    of_groups = ("GetGroup", "WatchGroup", "WaitGroup", "CancelGroup", "PauseGroup", "ResumeGroup", "DeleteGroup")
    return {
        **{f"{SERVICE}/{method}": rollout for method in of_rollouts},
        **{f"{SERVICE}/{method}": group for method in of_groups},
    }


def _filter(wire: rollout_service_pb2.RolloutFilter) -> Filter:
    return Filter(
        run_id=wire.run_id if wire.HasField("run_id") else None,
        group_id=wire.group_id if wire.HasField("group_id") else None,
        labels=dict(wire.labels),
        ended=wire.ended if wire.HasField("ended") else None,
        task_id=wire.task_id if wire.HasField("task_id") else None,
        agent=wire.agent if wire.HasField("agent") else None,
        namespace=auth.caller().scope(wire.all_namespaces),
    )


def _pause_terms(
    request: rollout_service_pb2.PauseRolloutRequest | rollout_service_pb2.PauseGroupRequest,
) -> tuple[str, float | None]:
    """A pause's reason and duration. InvalidArgument (FIELD_INVALID)."""
    if len(request.reason) > MOST_REASON:
        raise invalid_field("reason", f"at most {MOST_REASON} characters")
    if not request.HasField("max_duration"):
        return request.reason, None
    duration_s = times.seconds(request.max_duration)
    if not _PAUSE_S[0] <= duration_s <= _PAUSE_S[1]:
        raise invalid_field("max_duration", "1 s to 1 day")
    return request.reason, duration_s


def _patience_s(context: Any) -> float:
    limit = _wait_limit(context)
    return HOLD_S if limit is None else min(limit, HOLD_S)


def _wait_limit(context: Any) -> float | None:
    """80 % of the caller's deadline; None without one."""
    remaining = context.time_remaining()
    return None if remaining is None else max(0.0, remaining * WAIT_SHARE)
