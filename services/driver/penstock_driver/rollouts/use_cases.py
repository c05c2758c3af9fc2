"""The use cases of rollouts and groups: create, delete, and read with what the gate captured.

Invariant: a request that is repeated with the same id creates nothing more, whatever has changed since, and returns
what it created.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from penstock.driver.v1 import rollout_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.errors import AlreadyExists, FailedPrecondition, NotFound, Unavailable
from penstock_chassis.homes import Home
from penstock_driver.agents.registry import AgentRegistry
from penstock_driver.domain.ports import Captures
from penstock_driver.domain.records import Filter, GroupPlan, GroupRecord, Record, RequestKey, new_records
from penstock_driver.domain.rollout import RolloutSpec
from penstock_driver.domain.validation import Violations, check_chosen_id, check_group
from penstock_driver.rollouts.manager import RolloutManager, end_not_recorded
from penstock_driver.rollouts.preflight import Preflight
from penstock_driver.store.event_log import EventLog
from penstock_driver.store.records import Records
from penstock_driver.wire.specs import effective_spec, rollout_spec
from penstock_driver.wire.to_proto import add_driver_fields

CLEANUP_RETRY_S: Final = 5.0
HEARTBEAT_S: Final = 10.0


class RolloutUseCases:
    """The use cases that take more than the manager or the records alone."""

    def __init__(
        self,
        manager: RolloutManager,
        records: Records,
        event_log: EventLog,
        agents: AgentRegistry,
        preflight: Preflight,
        captures: Captures,
        home: Home,
    ) -> None:
        self._home = home
        self._manager = manager
        self._records = records
        self._event_log = event_log
        self._agents = agents
        self._preflight = preflight
        self._captures = captures
        self._deleting: Counter[str] = Counter()

    async def create(self, key: RequestKey, request: rollout_pb2.RolloutSpec, rollout_id: str = "") -> Record:
        """Check, record and start a rollout; an empty `rollout_id` is replaced by a fresh one."""
        known = await self._records.known_request(key)
        if known is None:
            spec = rollout_spec(request, self._agents, key.namespace)
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
            spec = rollout_spec(request, self._agents, key.namespace)
            count = plan.size + plan.spares
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

    async def _begin(
        self, key: RequestKey, spec: RolloutSpec, records: Sequence[Record], group: GroupRecord | None = None
    ) -> str:
        """Record new rollouts and start them; return the id created by this request, or by an equal concurrent one.

        Must not be cancelled in between: a rollout that is recorded but not started would never end.
        """
        ids = [record.rollout_id for record in records]
        if self._deleting.keys() & {*ids, group.group_id if group else ids[0]}:
            message = "the rollout or group with this id is being deleted: try again, or choose another id"
            raise AlreadyExists(message, reason="ROLLOUT_EXISTS")
        with self._manager.beginning(ids):
            try:
                await self._records.create(key, records, group)
            except AlreadyExists:
                known = await self._records.known_request(key)
                if known is None:
                    raise
                return known
            self._manager.start(spec, records, group)
        return group.group_id if group else records[0].rollout_id

    async def delete(self, rollout_ids: Sequence[str]) -> None:
        """Delete ended rollouts with their events, and their captures at the gate; none while one of them runs."""
        if any(map(self._manager.is_running, rollout_ids)):
            raise FailedPrecondition("the rollout runs: cancel it first", reason="ROLLOUT_RUNNING")
        # No rollout of the same id begins meanwhile: it would lose its events and its capture.
        with self._deletes(rollout_ids):
            if await self._records.with_pending_cleanup(rollout_ids):
                # Cleanup finds its resources by its id, which another rollout could reuse after a deletion.
                message = "the rollout's clean-up is still pending: try again later"
                raise Unavailable(message, reason="RELEASE_OWED", retry_after_s=CLEANUP_RETRY_S)
            for rollout_id in rollout_ids:
                await self._captures.delete(rollout_id)
                await self._manager.delete(rollout_id)

    async def delete_group(self, group_id: str) -> None:
        """Delete a group and its rollouts; idempotent."""
        with self._deletes([group_id]):
            try:
                group = await self._records.group(group_id)
            except NotFound:
                return
            await self.delete(group.rollout_ids)
            await self._records.delete_group(group_id)

    async def wait_group(self, group_id: str, timeout_s: float | None) -> GroupRecord:
        """Return a group once all its rollouts have ended, or after `timeout_s`.

        Unavailable (END_NOT_RECORDED) as in `RolloutManager.wait`.
        """
        group, loop = await self._records.group(group_id), asyncio.get_running_loop()
        until = None if timeout_s is None else loop.time() + timeout_s
        for rollout_id in group.rollout_ids:
            if self._manager.is_running(rollout_id):
                await self._manager.wait(rollout_id, None if until is None else max(0.0, until - loop.time()))
        is_running = any(map(self._manager.is_running, group.rollout_ids))
        if not is_running and len(await self._records.group_ended(group_id)) < len(group.rollout_ids):
            raise end_not_recorded()
        return group

    async def cancel_group(self, group_id: str, reason: str) -> GroupRecord:
        """End all rollouts of a group that run; their sandboxes are gone when this returns."""
        group = await self._records.group(group_id)
        await self._manager.cancel_group(group, reason)
        return group

    @contextmanager
    def _deletes(self, ids: Sequence[str]) -> Iterator[None]:
        """Refuse new rollouts and groups of these ids meanwhile."""
        self._deleting.update(ids)
        try:
            yield
        finally:
            self._deleting -= Counter(ids)  # keeps none that no deletion holds

    # Reading ----------------------------------------------------------------------------------------------------------

    async def watch(self, rollout_id: str, after: int) -> AsyncGenerator[rollout_pb2.RolloutEvent | None, None]:
        """Yield the events after a sequence number as they are on disk, to the last one; None every HEARTBEAT_S."""
        await self._records.get(rollout_id)
        with self._event_log.signal(rollout_id) as signal:
            while True:
                signal.clear()
                has_ended = not self._manager.is_running(rollout_id)
                page = await self._event_log.events(rollout_id, after)
                for event in page:
                    yield event
                    after = event.sequence
                    if event.HasField("ended"):
                        return
                if not page:
                    if has_ended:
                        return
                    if not await _within(signal, HEARTBEAT_S):
                        yield None

    async def watch_group(
        self, group_id: str, after: Mapping[str, int], *, summary: bool
    ) -> AsyncGenerator[rollout_pb2.RolloutEvent | None, None]:
        """Yield the events of a group's rollouts in the order in which they were written, as `watch` does.

        `after` has sequence numbers by rollout id; `summary` leaves out all but phases, attempts and outcomes.
        """
        group, position = await self._records.group(group_id), 0
        with self._event_log.signal(group_id) as signal:
            while True:
                signal.clear()
                has_ended = not any(map(self._manager.is_running, group.rollout_ids))
                page = await self._event_log.group_events(group_id, position, summary=summary)
                for position, event in page:  # noqa: B007 - the next page starts there
                    if event.sequence > after.get(event.rollout_id, 0):
                        yield event
                if not page:
                    if has_ended:
                        return
                    if not await _within(signal, HEARTBEAT_S):
                        yield None

    async def trajectory(
        self, rollout_id: str, *, include_bodies: bool, include_top: bool = False
    ) -> AsyncGenerator[trajectory_pb2.Trajectory, None]:
        """Yield the capture of an ended rollout in fragments, with the fields that only the driver knows.

        `include_top`: with the alternatives of sampled tokens.

        FailedPrecondition (ROLLOUT_RUNNING, TRAJECTORY_ABSENT).
        """
        record = await self._records.get(rollout_id)
        if self._manager.is_running(rollout_id):
            raise FailedPrecondition("the rollout has not ended: wait for it", reason="ROLLOUT_RUNNING")
        async for fragment in self._trajectory(record, include_bodies=include_bodies, include_top=include_top):
            yield fragment

    async def export(
        self, matching: Filter, *, include_bodies: bool, include_top: bool = False
    ) -> AsyncGenerator[tuple[trajectory_pb2.Trajectory, rollout_pb2.Outcome | None], None]:
        """Yield the trajectories of all matching rollouts that have ended; the outcome comes with the first fragment.

        A rollout that never reached the gate has only its outcome.
        """
        async for record in self._records.all(matching):
            outcome = record.outcome
            if outcome is None:
                continue
            try:
                async for fragment in self._trajectory(record, include_bodies=include_bodies, include_top=include_top):
                    yield fragment, outcome
                    outcome = None
            except FailedPrecondition:
                yield add_driver_fields(trajectory_pb2.Trajectory(), record), outcome

    async def _trajectory(
        self, record: Record, *, include_bodies: bool, include_top: bool
    ) -> AsyncIterator[trajectory_pb2.Trajectory]:
        is_first = True
        try:
            fragments = self._captures.capture(
                record.rollout_id,
                gate=record.home.gate if record.home else "",
                include_bodies=include_bodies,
                include_top=include_top,
            )
            async for fragment in fragments:
                yield add_driver_fields(fragment, record) if is_first else fragment
                is_first = False
        except NotFound as error:
            message = "the gate has no capture of this rollout: it was never opened there, or its capture was deleted"
            raise FailedPrecondition(message, reason="TRAJECTORY_ABSENT") from error
        if is_first:
            yield add_driver_fields(trajectory_pb2.Trajectory(), record)


async def _within(signal: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await signal.wait()
    except TimeoutError:
        return False
    return True
