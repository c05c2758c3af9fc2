"""RolloutService: rollouts and groups over gRPC."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, Protocol

from penstock.driver.v1 import rollout_pb2, rollout_service_pb2, rollout_service_pb2_grpc
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis import times
from penstock_chassis.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound, Unavailable, Violation
from penstock_driver.fleet import Fleet, end_not_recorded
from penstock_driver.preflight import Preflight
from penstock_driver.records import Filter, GroupRecord, Record, new_id, new_records
from penstock_driver.registry import AgentRegistry
from penstock_driver.rollouts import RolloutOrder
from penstock_driver.rows import Rows
from penstock_driver.rpc.applied import as_applied
from penstock_driver.rpc.orders import order_from_proto, preparation_key
from penstock_driver.rpc.paging import page_size, page_token
from penstock_driver.rpc.row_stream import watch_rows
from penstock_driver.rpc.shown import decode_event, fill_in, group_to_proto, rollout_to_proto

HEARTBEAT_S: Final = 10.0
WAIT_SHARE: Final = 0.8
MAX_GROUP: Final = 256
RELEASE_OWED_S: Final = 5.0
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")


class Captures(Protocol):
    """What the gate keeps of rollouts."""

    def capture(self, rollout_id: str, *, include_bodies: bool) -> AsyncIterator[trajectory_pb2.Trajectory]:
        """The trajectory in fragments; NotFound (ROLLOUT_UNKNOWN)."""

    async def delete(self, rollout_id: str) -> None:
        """Remove it; idempotent."""


class RolloutServicer(rollout_service_pb2_grpc.RolloutServiceServicer):
    """See rollout_service.proto."""

    def __init__(self, fleet: Fleet, rows: Rows, registry: AgentRegistry, preflight: Preflight, gate: Captures) -> None:
        self._fleet = fleet
        self._records = fleet.records
        self._history = fleet.history
        self._rows = rows
        self._registry = registry
        self._preflight = preflight
        self._gate = gate

    # Rollouts ---------------------------------------------------------------------------------------------------------

    async def CreateRollout(  # noqa: N802
        self, request: rollout_service_pb2.CreateRolloutRequest, context: Any
    ) -> rollout_service_pb2.CreateRolloutResponse:
        """Checks, remembers, starts."""
        request_id = request.request_id or new_id("q")
        digest = _digest(request)
        known = await self._records.known_request(request_id, digest)
        if known is None:
            order = order_from_proto(request.spec, self._registry)
            rollout_id = _chosen_id(request.rollout_id, "rollout_id") or new_id("r")
            self._fleet.check_room(1)
            order = await self._preflight.check(order, rollout_id)
            shown = as_applied(request.spec, order).SerializeToString()
            records = new_records(order, shown, [rollout_id])
            key = _preparation_key(request.spec)
            known = await self._fleet.see_through(self._begin(request_id, digest, order, key, records))
        return rollout_service_pb2.CreateRolloutResponse(rollout=rollout_to_proto(await self._fleet.get(known)))

    async def GetRollout(  # noqa: N802
        self, request: rollout_service_pb2.GetRolloutRequest, context: Any
    ) -> rollout_service_pb2.GetRolloutResponse:
        """As it stands."""
        record = await self._fleet.get(request.rollout_id)
        return rollout_service_pb2.GetRolloutResponse(rollout=rollout_to_proto(record))

    async def ListRollouts(  # noqa: N802
        self, request: rollout_service_pb2.ListRolloutsRequest, context: Any
    ) -> rollout_service_pb2.ListRolloutsResponse:
        """Newest first."""
        records, more = await self._records.list(
            _filter(request.filter), page_token(request.page_token), page_size(request.page_size)
        )
        return rollout_service_pb2.ListRolloutsResponse(
            rollouts=[rollout_to_proto(self._fleet.phase_of(record)) for record in records],
            next_page_token=str(more) if more else "",
        )

    async def WatchRollout(  # noqa: N802
        self, request: rollout_service_pb2.WatchRolloutRequest, context: Any
    ) -> AsyncIterator[rollout_service_pb2.WatchRolloutResponse]:
        """Past events from the journal, then new ones as they are written there."""
        await self._records.get(request.rollout_id)
        after = request.after_sequence
        with self._history.signal(request.rollout_id) as signal:
            while True:
                signal.clear()
                has_ended = not self._fleet.is_running(request.rollout_id)
                page = await self._history.events(request.rollout_id, after)
                for sequence, payload in page:
                    event = decode_event(payload)
                    yield rollout_service_pb2.WatchRolloutResponse(event=event)
                    after = sequence
                    if event.HasField("ended"):
                        return
                if not page:
                    if has_ended:
                        return
                    if not await _within(signal, HEARTBEAT_S):
                        heartbeat = rollout_service_pb2.WatchHeartbeat()
                        yield rollout_service_pb2.WatchRolloutResponse(heartbeat=heartbeat)

    async def WatchRollouts(  # noqa: N802
        self, request: rollout_service_pb2.WatchRolloutsRequest, context: Any
    ) -> AsyncIterator[rollout_service_pb2.WatchRolloutsResponse]:
        """Rows of all that match, then those that change."""
        matching = _filter(request.filter)
        async for message in watch_rows(self._rows, self._history, matching, request, heartbeat_s=HEARTBEAT_S):
            yield message

    async def WaitRollout(  # noqa: N802
        self, request: rollout_service_pb2.WaitRolloutRequest, context: Any
    ) -> rollout_service_pb2.WaitRolloutResponse:
        """Until the end, or 80 % of the call's deadline."""
        record = await self._fleet.wait(request.rollout_id, _patience(context))
        return rollout_service_pb2.WaitRolloutResponse(rollout=rollout_to_proto(record))

    async def CancelRollout(  # noqa: N802
        self, request: rollout_service_pb2.CancelRolloutRequest, context: Any
    ) -> rollout_service_pb2.CancelRolloutResponse:
        """Returns when the sandbox is gone."""
        record = await self._fleet.cancel(request.rollout_id, request.reason)
        return rollout_service_pb2.CancelRolloutResponse(rollout=rollout_to_proto(record))

    async def DeleteRollout(  # noqa: N802
        self, request: rollout_service_pb2.DeleteRolloutRequest, context: Any
    ) -> rollout_service_pb2.DeleteRolloutResponse:
        """With its events, and its capture at the gate."""
        await self._delete([request.rollout_id])
        return rollout_service_pb2.DeleteRolloutResponse()

    # Groups -----------------------------------------------------------------------------------------------------------

    async def CreateGroup(  # noqa: N802
        self, request: rollout_service_pb2.CreateGroupRequest, context: Any
    ) -> rollout_service_pb2.CreateGroupResponse:
        """As CreateRollout, for all of them at once."""
        request_id = request.request_id or new_id("q")
        digest = _digest(request)
        known = await self._records.known_request(request_id, digest)
        if known is None:
            _check_group(request)
            order = order_from_proto(request.spec, self._registry)
            count = request.size + request.spares
            self._fleet.check_room(count)
            group_id = _chosen_id(request.group_id, "group_id") or new_id("g")
            ids = tuple(f"{group_id}-{index}" for index in range(count))
            order = await self._preflight.check(order, ids[0], group_id)
            shown = as_applied(request.spec, order).SerializeToString()
            records = new_records(order, shown, ids, group_id)
            stragglers = request.stragglers
            group = GroupRecord(
                group_id=group_id,
                run_id=order.run_id,
                spec=shown,
                size=request.size,
                spares=request.spares,
                quorum=request.quorum if request.HasField("quorum") else request.size,
                grace_s=times.seconds(stragglers.grace) if stragglers.HasField("grace") else None,
                create_time=time.time(),
                rollout_ids=ids,
            )
            key = _preparation_key(request.spec)
            known = await self._fleet.see_through(self._begin(request_id, digest, order, key, records, group))
        return rollout_service_pb2.CreateGroupResponse(group=await self._group(known))

    async def GetGroup(  # noqa: N802
        self, request: rollout_service_pb2.GetGroupRequest, context: Any
    ) -> rollout_service_pb2.GetGroupResponse:
        """As it stands."""
        return rollout_service_pb2.GetGroupResponse(group=await self._group(request.group_id))

    async def ListGroups(  # noqa: N802
        self, request: rollout_service_pb2.ListGroupsRequest, context: Any
    ) -> rollout_service_pb2.ListGroupsResponse:
        """Newest first."""
        run_id = request.run_id if request.HasField("run_id") else None
        groups, more = await self._records.groups(run_id, page_token(request.page_token), page_size(request.page_size))
        shown = [group_to_proto(group, await self._records.group_ended(group.group_id)) for group in groups]
        return rollout_service_pb2.ListGroupsResponse(groups=shown, next_page_token=str(more) if more else "")

    async def WatchGroup(  # noqa: N802
        self, request: rollout_service_pb2.WatchGroupRequest, context: Any
    ) -> AsyncIterator[rollout_service_pb2.WatchGroupResponse]:
        """The events of all of a group's rollouts, in the order in which they were written."""
        group = await self._records.group(request.group_id)
        position = 0
        with self._history.signal(group.group_id) as signal:
            while True:
                signal.clear()
                has_ended = not any(self._fleet.is_running(rollout_id) for rollout_id in group.rollout_ids)
                page = await self._history.group_events(group.group_id, position, summary=request.summary)
                for position, rollout_id, sequence, payload in page:  # noqa: B007 - the next page begins there
                    if sequence > request.after_sequences.get(rollout_id, 0):
                        event = decode_event(payload)
                        yield rollout_service_pb2.WatchGroupResponse(event=event)
                if not page:
                    if has_ended:
                        yield rollout_service_pb2.WatchGroupResponse(group=await self._group(group.group_id))
                        return
                    if not await _within(signal, HEARTBEAT_S):
                        yield rollout_service_pb2.WatchGroupResponse(heartbeat=rollout_service_pb2.WatchHeartbeat())

    async def WaitGroup(  # noqa: N802
        self, request: rollout_service_pb2.WaitGroupRequest, context: Any
    ) -> rollout_service_pb2.WaitGroupResponse:
        """Until all have ended, or 80 % of the call's deadline."""
        group = await self._records.group(request.group_id)
        patience, loop = _patience(context), asyncio.get_running_loop()
        until = None if patience is None else loop.time() + patience
        for rollout_id in group.rollout_ids:
            if self._fleet.is_running(rollout_id):
                await self._fleet.wait(rollout_id, None if until is None else max(0.0, until - loop.time()))
        is_running = any(self._fleet.is_running(rollout_id) for rollout_id in group.rollout_ids)
        shown = await self._group(request.group_id)
        if not shown.ended and not is_running:
            raise end_not_recorded()
        return rollout_service_pb2.WaitGroupResponse(group=shown)

    async def CancelGroup(  # noqa: N802
        self, request: rollout_service_pb2.CancelGroupRequest, context: Any
    ) -> rollout_service_pb2.CancelGroupResponse:
        """As CancelRollout, for all that run."""
        await self._fleet.cancel_group(await self._records.group(request.group_id), request.reason)
        return rollout_service_pb2.CancelGroupResponse(group=await self._group(request.group_id))

    async def DeleteGroup(  # noqa: N802
        self, request: rollout_service_pb2.DeleteGroupRequest, context: Any
    ) -> rollout_service_pb2.DeleteGroupResponse:
        """As DeleteRollout, for each; none is removed while one runs."""
        try:
            group = await self._records.group(request.group_id)
        except NotFound:
            return rollout_service_pb2.DeleteGroupResponse()
        await self._delete(group.rollout_ids)
        await self._records.delete_group(group.group_id)
        return rollout_service_pb2.DeleteGroupResponse()

    # Trajectories -----------------------------------------------------------------------------------------------------

    async def GetTrajectory(  # noqa: N802
        self, request: rollout_service_pb2.GetTrajectoryRequest, context: Any
    ) -> AsyncIterator[rollout_service_pb2.GetTrajectoryResponse]:
        """The gate's capture, with what only the driver knows."""
        record = await self._records.get(request.rollout_id)
        if self._fleet.is_running(record.rollout_id):
            raise FailedPrecondition("the rollout has not ended: wait for it", reason="ROLLOUT_RUNNING")
        async for trajectory in self._trajectory(record, include_bodies=request.include_bodies):
            if request.samples_only:
                trajectory.ClearField("calls")
                trajectory.ClearField("branches")
                trajectory.ClearField("host_tool_calls")
            yield rollout_service_pb2.GetTrajectoryResponse(trajectory=trajectory)

    async def ExportTrajectories(  # noqa: N802
        self, request: rollout_service_pb2.ExportTrajectoriesRequest, context: Any
    ) -> AsyncIterator[rollout_service_pb2.ExportTrajectoriesResponse]:
        """Every ended rollout that matches; one that never reached the gate has its outcome only."""
        async for record in self._records.all(_filter(request.filter)):
            if record.outcome is None:
                continue
            outcome: rollout_pb2.Outcome | None = rollout_pb2.Outcome.FromString(record.outcome)
            try:
                async for trajectory in self._trajectory(record, include_bodies=request.include_bodies):
                    yield rollout_service_pb2.ExportTrajectoriesResponse(trajectory=trajectory, outcome=outcome)
                    outcome = None
            except FailedPrecondition:
                bare = trajectory_pb2.Trajectory()
                fill_in(bare, record)
                yield rollout_service_pb2.ExportTrajectoriesResponse(trajectory=bare, outcome=outcome)

    # ------------------------------------------------------------------------------------------------------------------

    async def _begin(
        self,
        request_id: str,
        digest: str,
        order: RolloutOrder,
        key: str,
        records: Sequence[Record],
        group: GroupRecord | None = None,
    ) -> str:
        """Remember new rollouts and start them; the id of what was made, by this or by the same request at once.

        Not to be cancelled in between: what is remembered and not started would never end.
        """
        try:
            await self._records.create(request_id, digest, records, group)
        except AlreadyExists:
            known = await self._records.known_request(request_id, digest)
            if known is None:
                raise
            return known
        self._fleet.start(order, key, records, group)
        return group.group_id if group else records[0].rollout_id

    async def _trajectory(self, record: Record, *, include_bodies: bool) -> AsyncIterator[trajectory_pb2.Trajectory]:
        is_first = True
        try:
            async for fragment in self._gate.capture(record.rollout_id, include_bodies=include_bodies):
                if is_first:
                    fill_in(fragment, record)
                    is_first = False
                yield fragment
        except NotFound as error:
            message = "the gate has no capture of this rollout: it ended before the gate was opened, or it was deleted"
            raise FailedPrecondition(message, reason="TRAJECTORY_ABSENT") from error
        if is_first:
            bare = trajectory_pb2.Trajectory()
            fill_in(bare, record)
            yield bare

    async def _delete(self, rollout_ids: Sequence[str]) -> None:
        for rollout_id in rollout_ids:
            if self._fleet.is_running(rollout_id):
                raise FailedPrecondition("the rollout runs: cancel it first", reason="ROLLOUT_RUNNING")
        if await self._records.owing(rollout_ids):
            # What it holds is found by its id, which would be free to be another rollout's.
            message = "a part of what the rollout held is not released yet: try again later"
            raise Unavailable(message, reason="RELEASE_OWED", retry_after_s=RELEASE_OWED_S)
        for rollout_id in rollout_ids:
            await self._gate.delete(rollout_id)
            await self._records.delete(rollout_id)
            self._history.deleted([rollout_id])

    async def _group(self, group_id: str) -> rollout_pb2.Group:
        group = await self._records.group(group_id)
        return group_to_proto(group, await self._records.group_ended(group_id))


def _digest(
    request: rollout_service_pb2.CreateRolloutRequest | rollout_service_pb2.CreateGroupRequest,
) -> str:
    """What a repeated request_id must ask for again. A digest, so that no secret of the spec is kept."""
    return hashlib.sha256(request.SerializeToString(deterministic=True)).hexdigest()


def _preparation_key(spec: rollout_pb2.RolloutSpec) -> str:
    return preparation_key(spec.task, spec.sandbox, spec.limits)


def _filter(wire: rollout_service_pb2.RolloutFilter) -> Filter:
    return Filter(
        run_id=wire.run_id if wire.HasField("run_id") else None,
        group_id=wire.group_id if wire.HasField("group_id") else None,
        labels=dict(wire.labels),
        ended=wire.ended if wire.HasField("ended") else None,
        task_id=wire.task_id if wire.HasField("task_id") else None,
        agent=wire.agent if wire.HasField("agent") else None,
    )


def _chosen_id(value: str, field: str) -> str:
    if value and not _ID.fullmatch(value):
        problem = "expected 1 to 120 letters, digits and . _ -"
        raise InvalidArgument(f"{field}: {problem}", reason="ID_INVALID", violations=[Violation(field, problem)])
    return value


def _check_group(request: rollout_service_pb2.CreateGroupRequest) -> None:
    violations = []
    if not 1 <= request.size <= MAX_GROUP:
        violations.append(Violation("size", f"expected 1 to {MAX_GROUP}"))
    if not 0 <= request.spares <= request.size:
        violations.append(Violation("spares", "expected 0 to size"))
    if request.HasField("quorum") and not 1 <= request.quorum <= request.size:
        violations.append(Violation("quorum", "expected 1 to size"))
    if request.stragglers.HasField("grace") and times.seconds(request.stragglers.grace) < 0:
        violations.append(Violation("stragglers.grace", "must not be negative"))
    if violations:
        summary = "; ".join(f"{item.field}: {item.description}" for item in violations)
        raise InvalidArgument(summary, reason="GROUP_INVALID", violations=violations)


def _patience(context: Any) -> float | None:
    """Most of the time that the caller gives the call, None when it gives no limit."""
    remaining = context.time_remaining()
    return None if remaining is None else max(0.0, remaining * WAIT_SHARE)


async def _within(signal: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await signal.wait()
    except TimeoutError:
        return False
    return True
