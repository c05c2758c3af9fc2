"""The use cases of rollouts and groups that take more than the manager or the records alone.

Invariants: a request that is repeated with the same id creates nothing more, whatever has changed since, and returns
what it created. While a rollout or group is deleted, none of its id begins.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from penstock.driver.v1 import rollout_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock.values.token_tensors import TokenTensor
from penstock_chassis.auth import acting_in
from penstock_chassis.errors import AlreadyExists, FailedPrecondition, NotFound, Unavailable
from penstock_chassis.homes import Home
from penstock_driver.agents.registry import AgentRegistry
from penstock_driver.domain.ports import Captures
from penstock_driver.domain.records import Filter, GroupPlan, GroupRecord, Record, RequestKey, new_records
from penstock_driver.domain.rollout import FIRST_GRADE, RolloutSpec
from penstock_driver.domain.validation import Violations, check_chosen_id, check_group, check_recordings, check_seeds
from penstock_driver.rollouts.branch_room import Recorded
from penstock_driver.rollouts.branching import BranchOrder, Parents
from penstock_driver.rollouts.manager import RolloutManager, end_not_recorded
from penstock_driver.rollouts.preflight import Preflight
from penstock_driver.rollouts.recovery.replayed_answers import RecordingFile
from penstock_driver.rollouts.recovery.sealed_specs import SealedSpecs
from penstock_driver.rollouts.regrading import Regrader
from penstock_driver.store.annotations import Annotations
from penstock_driver.store.end_states import EndStates, gone
from penstock_driver.store.event_log import EventLog
from penstock_driver.store.records import Records
from penstock_driver.trajectories.annotating import Annotator
from penstock_driver.trajectories.exports.exporter import Exporter
from penstock_driver.trajectories.media import MediaFiles
from penstock_driver.trajectories.reading import fragments
from penstock_driver.trajectories.tensors import Tensors
from penstock_driver.wire.specs import effective_spec, rollout_spec, with_locks
from penstock_driver.wire.to_proto import add_driver_fields

CLEANUP_RETRY_S: Final = 5.0
EXPORT_S: Final = 10.0
"""How long a deletion waits for the export of what it would delete."""
HEARTBEAT_S: Final = 10.0


class RolloutDeletion:
    """Deletes ended rollouts and groups."""

    def __init__(
        self,
        manager: RolloutManager,
        records: Records,
        captures: Captures,
        exporter: Exporter | None = None,
        end_states: EndStates | None = None,
    ) -> None:
        self._manager = manager
        self._records = records
        self._captures = captures
        self._exporter = exporter
        self._end_states = end_states
        self._deleting: Counter[str] = Counter()

    async def delete(self, rollout_ids: Sequence[str]) -> None:
        """Delete ended rollouts with their events, and their captures at the gate; none unless all of them have ended.

        FailedPrecondition (ROLLOUT_RUNNING), Unavailable (DRIVER_STOPPING, END_NOT_RECORDED, RELEASE_OWED,
        EXPORT_PENDING).
        """
        self._manager.check_stays()  # what this process left runs on, though not here
        if any(map(self._manager.is_running, rollout_ids)):
            raise FailedPrecondition("the rollout runs: cancel it first", reason="ROLLOUT_RUNNING")
        # No rollout of the same id begins meanwhile: it would lose its events and its capture.
        with self._deletes(rollout_ids):
            if await self._records.without_end(rollout_ids):
                raise end_not_recorded()
            if await self._records.with_pending_cleanup(rollout_ids):
                # Cleanup finds its resources by its id, which another rollout could reuse after a deletion.
                message = "the rollout's clean-up is still pending: try again later"
                raise Unavailable(message, reason="RELEASE_OWED", retry_after_s=CLEANUP_RETRY_S)
            if self._exporter and (left := await self._exporter.settled(rollout_ids, EXPORT_S)):
                message = f"{left[0]} is not exported yet, and would be lost: try again later, see `penstock doctor`"
                raise Unavailable(message, reason="EXPORT_PENDING", retry_after_s=CLEANUP_RETRY_S)
            for rollout_id in rollout_ids:
                # For an operator of no namespace it would delete another team's rollout of this id at the gate, too.
                with acting_in(await self._records.namespace_of(rollout_id)):
                    await self._captures.delete(rollout_id)
                await self._manager.delete(rollout_id)
                if self._end_states:
                    await self._end_states.forget(rollout_id)

    async def delete_group(self, group_id: str) -> None:
        """Delete a group and its rollouts; idempotent. Raises as `delete`."""
        with self._deletes([group_id]):
            try:
                group = await self._records.group(group_id)
            except NotFound:
                return
            with self._deletes(group.rollout_ids):
                await self.delete(await self._records.members(group))
            await self._records.delete_group(group_id)

    def check_none_of(self, ids: Collection[str]) -> None:
        """Raise AlreadyExists (ROLLOUT_EXISTS) if a rollout or group of one of these ids is being deleted."""
        if self._deleting.keys() & ids:
            message = "the rollout or group with this id is being deleted: try again, or choose another id"
            raise AlreadyExists(message, reason="ROLLOUT_EXISTS")

    @contextmanager
    def _deletes(self, ids: Sequence[str]) -> Iterator[None]:
        """Refuse new rollouts and groups of these ids meanwhile, by `check_none_of`."""
        self._deleting.update(ids)
        try:
            yield
        finally:
            self._deleting -= Counter(ids)  # keeps none that no deletion holds


class RolloutCreation:
    """Creates rollouts, groups and branches."""

    def __init__(
        self,
        manager: RolloutManager,
        records: Records,
        agents: AgentRegistry,
        preflight: Preflight,
        specs: SealedSpecs,
        home: Home,
        parents: Parents,
        deletion: RolloutDeletion,
    ) -> None:
        self._manager = manager
        self._records = records
        self._agents = agents
        self._preflight = preflight
        self._specs = specs
        self._home = home
        self._parents = parents
        self._deletion = deletion

    async def create(self, key: RequestKey, request: rollout_pb2.RolloutSpec, rollout_id: str = "") -> Record:
        """Check, record and start a rollout; an empty `rollout_id` is replaced by a fresh one."""
        known = await self._records.known_request(key)
        if known is None:
            spec = await self._spec(request, key.namespace)
            check_recordings(spec)
            check_chosen_id(rollout_id, "rollout_id")
            rollout_id = rollout_id or self._home.new_id("r")
            with self._manager.room(spec.namespace, 1):
                spec = await self._preflight.check(spec, rollout_id)
                records = new_records(spec, effective_spec(spec), [rollout_id], driver=self._home.name)
                known = await self._manager.see_through(self._begin(key, spec, records))
        return await self._manager.get(known)

    async def create_group(
        self, key: RequestKey, request: rollout_pb2.RolloutSpec, plan: GroupPlan, group_id: str = ""
    ) -> GroupRecord:
        """Like `create`, for all rollouts of a group at once."""
        known = await self._records.known_request(key)
        if known is None:
            found = Violations()
            check_group(plan, found)
            found.refuse()
            spec = await self._spec(request, key.namespace)
            count = plan.size + plan.spares
            check_recordings(spec)
            check_seeds(spec, count)
            check_chosen_id(group_id, "group_id")
            group_id = group_id or self._home.new_id("g")
            ids = tuple(f"{group_id}-{index}" for index in range(count))
            with self._manager.room(spec.namespace, count):
                spec = await self._preflight.check(spec, ids[0], group_id)
                effective = effective_spec(spec)
                records = new_records(spec, effective, ids, group_id, driver=self._home.name)
                group = GroupRecord(group_id, spec.run_id, effective, plan, time.time(), ids, spec.namespace)
                known = await self._manager.see_through(self._begin(key, spec, records, group))
        return await self._records.group(known)

    async def branch(self, key: RequestKey, order: BranchOrder) -> GroupRecord:
        """Like `create_group`, for rollouts that continue another one from one of its calls.

        Also FailedPrecondition (SPEC_FORGOTTEN, TRAJECTORY_ABSENT, CALL_UNANSWERED), NotFound (ROLLOUT_UNKNOWN,
        CALL_UNKNOWN), ResourceExhausted (RECORDINGS_FULL).
        """
        known = await self._records.known_request(key)
        if known is None:
            plan, found = GroupPlan(size=order.count, quorum=order.count), Violations()
            order.check(found)
            check_chosen_id(order.group_id, "group_id")
            parent = await self._manager.get(order.rollout_id)
            request = await self._parents.request(parent, order)
            spec = await self._spec(request, parent.namespace)
            group_id = order.group_id or self._home.new_id("g")
            ids = tuple(f"{group_id}-{index}" for index in range(order.count))
            with self._manager.room(spec.namespace, order.count):
                spec = await self._preflight.check(spec, ids[0], group_id)
                file, counted, point = await self._parents.record(parent, order)
                effective = effective_spec(spec)
                records = new_records(spec, effective, ids, group_id, driver=self._home.name, branched_from=point)
                group = GroupRecord(group_id, spec.run_id, effective, plan, time.time(), ids, spec.namespace, point)
                known = await self._manager.see_through(self._begin_branches(key, spec, records, group, file, counted))
        return await self._records.group(known)

    async def _spec(self, request: rollout_pb2.RolloutSpec, namespace: str) -> RolloutSpec:
        return await with_locks(request.sandbox.packages, lambda: rollout_spec(request, self._agents, namespace))

    async def _begin_branches(
        self,
        key: RequestKey,
        spec: RolloutSpec,
        records: Sequence[Record],
        group: GroupRecord,
        file: RecordingFile,
        counted: Recorded,
    ) -> str:
        """Begin branches, each with the file of what it replays. An equal concurrent request has the same content."""
        begun = ""
        try:
            file.share(one for one in group.rollout_ids if not self._manager.is_running(one))
            begun = await self._begin(key, spec, records, group, file)
        except BaseException:
            self._parents.unshare(one for one in group.rollout_ids if not self._manager.is_running(one))
            raise
        finally:
            file.remove()
            self._parents.counts(counted, group if begun == group.group_id else None)
        return begun

    async def _begin(
        self,
        key: RequestKey,
        spec: RolloutSpec,
        records: Sequence[Record],
        group: GroupRecord | None = None,
        file: RecordingFile | None = None,
    ) -> str:
        """Record new rollouts and start them; return the id created by this request, or by an equal concurrent one.

        Must not be cancelled in between: a rollout that is recorded but not started would never end.
        """
        ids = [record.rollout_id for record in records]
        self._deletion.check_none_of({*ids, group.group_id if group else ids[0]})
        with self._manager.beginning(ids):
            sealed = await self._specs.sealed(spec, records[0])
            recording = self._records.create(key, records, group, sealed=sealed)
            if (known := await self._records.unless_known(key, recording)) is not None:
                return known
            self._parents.assign(ids, file)
            self._manager.start(spec, records, group)
        return group.group_id if group else records[0].rollout_id


class RolloutReading:
    """Reads events, and trajectories with what the gate captured."""

    def __init__(
        self,
        manager: RolloutManager,
        records: Records,
        event_log: EventLog,
        captures: Captures,
        annotations: Annotations,
    ) -> None:
        self._manager = manager
        self._records = records
        self._event_log = event_log
        self._captures = captures
        self._annotations = annotations
        self._tensors = Tensors(captures)
        self._media = MediaFiles(captures)

    async def ended(self, rollout_id: str) -> Record:
        """An ended rollout. NotFound (ROLLOUT_UNKNOWN); FailedPrecondition (ROLLOUT_RUNNING)."""
        record = await self._records.get(rollout_id)
        if self._manager.is_running(rollout_id):
            raise FailedPrecondition("the rollout has not ended: wait for it", reason="ROLLOUT_RUNNING")
        return record

    async def watch(self, rollout_id: str, after: int) -> AsyncGenerator[rollout_pb2.RolloutEvent | None, None]:
        """Yield the events after a sequence number as they are on disk, to the last one; None every HEARTBEAT_S."""
        await self._records.get(rollout_id)
        signal = self._event_log.signal(rollout_id)
        while True:
            seen, has_ended = signal.number, not self._manager.is_running(rollout_id)
            page = await self._event_log.events(rollout_id, after)
            for event in page:
                await self._known_ended(event)
                yield event
                after = event.sequence
                if event.HasField("ended"):
                    return
            if not page:
                if has_ended:
                    self._manager.check_stays()
                    return
                if not await signal.wait(seen, HEARTBEAT_S):
                    yield None

    async def watch_group(
        self, group_id: str, after: Mapping[str, int], *, summary: bool
    ) -> AsyncGenerator[rollout_pb2.RolloutEvent | None, None]:
        """Yield the events of a group's rollouts in the order in which they were written, as `watch` does.

        `after` has sequence numbers by rollout id; `summary` leaves out all but phases, attempts and outcomes.
        """
        group, position = await self._records.group(group_id), 0
        signal = self._event_log.signal(group_id)
        while True:
            seen = signal.number
            has_ended = not any(map(self._manager.is_running, await self._records.members(group)))
            page = await self._event_log.group_events(group_id, position, summary=summary)
            for position, event in page:  # noqa: B007 - the next page starts there
                if event.sequence > after.get(event.rollout_id, 0):
                    await self._known_ended(event)
                    yield event
            if not page:
                if has_ended:
                    self._manager.check_stays()
                    return
                if not await signal.wait(seen, HEARTBEAT_S):
                    yield None

    async def _known_ended(self, event: rollout_pb2.RolloutEvent) -> None:
        """Hold back an end that this process has written and not taken note of: its watcher asks for the outcome."""
        if event.HasField("ended"):
            await self._manager.ended(event.rollout_id)

    async def trajectory(
        self, rollout_id: str, *, include_bodies: bool, include_top: bool = False, grade: str = ""
    ) -> AsyncGenerator[trajectory_pb2.Trajectory, None]:
        """Yield the capture of an ended rollout in fragments, with the fields that only the driver knows.

        `include_top`: with the alternatives of sampled tokens. `grade`: with the reward of that further grade; empty or
        "first" = the one that it ended with.

        NotFound (GRADE_UNKNOWN); FailedPrecondition (ROLLOUT_RUNNING, TRAJECTORY_ABSENT).
        """
        record = await self.ended(rollout_id)
        if grade not in ("", FIRST_GRADE, *(one.name for one in record.grades)):
            names = ", ".join([FIRST_GRADE, *(one.name for one in record.grades)])
            message = f"{rollout_id} has no grade {grade}; it has: {names}. `penstock regrade` makes further ones"
            raise NotFound(message, reason="GRADE_UNKNOWN")
        async for fragment in self._trajectory(
            record, include_bodies=include_bodies, include_top=include_top, grade=grade
        ):
            yield fragment

    async def tensor(
        self, rollout_id: str, *, call_id: str = "", sample_id: str = "", name: str, start: int
    ) -> AsyncGenerator[TokenTensor, None]:
        """Yield the data of one tensor of an ended rollout's call or sample, in pieces of consecutive rows.

        NotFound (CALL_UNKNOWN, TENSOR_UNKNOWN); FailedPrecondition (ROLLOUT_RUNNING, TRAJECTORY_ABSENT).
        """
        record = await self.ended(rollout_id)
        found = (
            self._tensors.of_call(record, call_id, name, start)
            if call_id
            else self._tensors.of_sample(record, sample_id, name, start)
        )
        async for piece in found:
            yield piece

    async def media(self, rollout_id: str, sha256: bytes) -> AsyncGenerator[bytes, None]:
        """Yield the file of an image of an ended rollout's prompts, in pieces.

        NotFound (MEDIA_UNKNOWN); FailedPrecondition (ROLLOUT_RUNNING, TRAJECTORY_ABSENT).
        """
        record = await self.ended(rollout_id)
        async for piece in self._media.file(record, sha256):
            yield piece

    async def export(
        self, matching: Filter, *, include_bodies: bool, include_top: bool = False, grade: str = ""
    ) -> AsyncGenerator[tuple[trajectory_pb2.Trajectory, rollout_pb2.Outcome | None], None]:
        """Yield the trajectories of all matching rollouts that have ended; the outcome comes with the first fragment.

        A rollout that never reached the gate has only its outcome.
        """
        async for record in self._records.all(matching):
            outcome = record.outcome
            if outcome is None:
                continue
            try:
                async for fragment in self._trajectory(
                    record, include_bodies=include_bodies, include_top=include_top, grade=grade
                ):
                    yield fragment, outcome
                    outcome = None
            except FailedPrecondition:
                yield add_driver_fields(trajectory_pb2.Trajectory(), record, grade), outcome

    def _trajectory(
        self, record: Record, *, include_bodies: bool, include_top: bool, grade: str
    ) -> AsyncIterator[trajectory_pb2.Trajectory]:
        return fragments(
            self._captures,
            self._annotations,
            record,
            include_bodies=include_bodies,
            include_top=include_top,
            grade=grade,
        )


class RolloutUseCases:
    """All of them: `creation`, `deletion`, `reading`, and what is done with groups that run and rollouts that ended."""

    def __init__(
        self,
        manager: RolloutManager,
        records: Records,
        creation: RolloutCreation,
        deletion: RolloutDeletion,
        reading: RolloutReading,
        annotator: Annotator,
        regrader: Regrader | None = None,
    ) -> None:
        self._manager = manager
        self._records = records
        self.creation = creation
        self.deletion = deletion
        self.reading = reading
        self._annotator = annotator
        self._regrader = regrader

    async def wait_group(self, group_id: str, timeout_s: float | None) -> GroupRecord:
        """Return a group once all its rollouts have ended, or after `timeout_s`.

        Unavailable (END_NOT_RECORDED) as in `RolloutManager.wait`.
        """
        group, loop = await self._records.group(group_id), asyncio.get_running_loop()
        until = None if timeout_s is None else loop.time() + timeout_s
        members = await self._records.members(group)
        for rollout_id in members:
            if self._manager.is_running(rollout_id):
                await self._manager.wait(rollout_id, None if until is None else max(0.0, until - loop.time()))
        is_running = any(map(self._manager.is_running, members))
        if not is_running and await self._records.without_end(members):
            self._manager.check_stays()
            raise end_not_recorded()
        return group

    async def cancel_group(self, group_id: str, reason: str) -> GroupRecord:
        """End all rollouts of a group that run; their sandboxes are gone when this returns."""
        group = await self._records.group(group_id)
        await self._manager.cancel_group(group, reason)
        return group

    async def pause_group(self, group_id: str, reason: str, duration_s: float | None, patience_s: float) -> GroupRecord:
        """Pause all rollouts of a group that have not ended. Raises as `RolloutManager.pause`."""
        group = await self._records.group(group_id)
        members = await self._records.members(group)
        if not await self._manager.pause_all(members, reason, duration_s, patience_s):
            raise FailedPrecondition("all rollouts of the group have ended", reason="ROLLOUT_ENDED")
        return group

    async def resume_group(self, group_id: str, patience_s: float) -> GroupRecord:
        """End the pauses of a group's rollouts. Raises as `RolloutManager.resume_all`."""
        group = await self._records.group(group_id)
        await self._manager.resume_all(await self._records.members(group), patience_s)
        return group

    async def regrade(self, rollout_id: str, verifier: rollout_pb2.Verifier | None, name: str) -> rollout_pb2.Grade:
        """Grade an ended rollout again. Raises as `Regrader.regrade`, and FailedPrecondition (ROLLOUT_RUNNING)."""
        record = await self.reading.ended(rollout_id)
        if self._regrader is None:
            raise gone(rollout_id, "this driver keeps none")
        with self._manager.room(record.namespace, 0):  # none while it drains
            return await self._regrader.regrade(record, verifier, name)

    async def annotate(self, rollout_id: str, annotations: Sequence[trajectory_pb2.Annotation]) -> None:
        """Annotate an ended rollout. Raises as `Annotator.annotate`, and FailedPrecondition (ROLLOUT_RUNNING)."""
        await self._annotator.annotate(await self.reading.ended(rollout_id), annotations)
