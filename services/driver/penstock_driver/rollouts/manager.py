"""Runs all rollouts as owned tasks: start, cancel, wait, and recovery after a restart.

Invariants: every accepted rollout ends with one outcome on disk. After a kill -9 of the driver the next start goes on
with it in its phase, or ends it and releases its sandbox and its rollout at the gate, found by labels (R50, R127).
Cancelling is idempotent and returns when the sandbox is gone (R70). A rollout that runs costs no thread and two tasks:
its runner's, and one that records its end. One that waits costs no task, and no spec that no other has too.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from sqlite3 import OperationalError
from typing import Any, Final, TypeVar

import structlog

from penstock_chassis.aio.fair_queue import FairQueue, Ticket
from penstock_chassis.aio.moment import Moment
from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.auth import acting_in
from penstock_chassis.errors import FailedPrecondition, NotFound, ResourceExhausted, Unavailable
from penstock_driver.domain.pauses import PauseEnd, PauseLimits
from penstock_driver.domain.ports import CallEnded
from penstock_driver.domain.records import GroupRecord, Record, RolloutEnd
from penstock_driver.domain.rollout import (
    MAKE_S,
    CallFinished,
    Cause,
    Failure,
    Outcome,
    Phase,
    Progress,
    RolloutFailed,
    RolloutSpec,
)
from penstock_driver.domain.unended import Unended
from penstock_driver.environments.cleanup import DRIVER_LABEL, Cleanups
from penstock_driver.placement.placement import Placement
from penstock_driver.rollouts.event_limits import DEFAULT_LIMITS, EventLimits
from penstock_driver.rollouts.groups import GroupPolicy, GroupWatch
from penstock_driver.rollouts.pausing import Pausing
from penstock_driver.rollouts.recorder import RolloutRecorder, count_end, serializable
from penstock_driver.rollouts.recovery.history import History
from penstock_driver.rollouts.recovery.sealed_specs import LeftSpecs, NotAdoptable, SealedSpecs
from penstock_driver.rollouts.runner import STOPPED, Left, RolloutRunner
from penstock_driver.store.end_states import EndStates
from penstock_driver.store.event_log import EventLog
from penstock_driver.store.records import Records
from penstock_driver.wire.specs import limits_from_proto
from penstock_driver.wire.to_proto import outcome_to_proto

ROLLOUT_LABEL: Final = "penstock_rollout"
PAUSE_LIMITS: Final = PauseLimits(86_400.0)
RETRY_S: Final = 1.0
"""Delay before retrying work that must eventually succeed."""

_log = structlog.get_logger("penstock.driver")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Capacity:
    """At most `max_running` rollouts run at once; `max_queued` more of each namespace may wait, and share what becomes
    free (`FairQueue`). `events` limits what each records, `pauses` how long each may be paused. A paused one keeps its
    slot, or its place among those that wait.

    `quotas` has the most that run at once in a namespace, for those that have a quota; `weights` the share of those
    whose share is not 1.
    """

    max_running: int
    max_queued: int
    events: EventLimits = DEFAULT_LIMITS
    quotas: Mapping[str, int] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    pauses: PauseLimits = PAUSE_LIMITS


@dataclass(slots=True)
class _End:
    """The end of a rollout: `reached` is set when nothing of it runs any more, `recorded` when it is also on disk."""

    reached: Moment = field(default_factory=Moment)
    recorded: Moment = field(default_factory=Moment)
    cancelled: Failure | None = None
    """Why it was cancelled before it was started."""

    def set(self) -> None:
        self.reached.set()
        self.recorded.set()


class RolloutManager:
    """All rollouts of one driver. Start with `recover()` and `watch_calls()`, stop with `aclose()`."""

    def __init__(
        self,
        records: Records,
        log: EventLog,
        placement: Placement,
        specs: SealedSpecs,
        *,
        instance_id: str,
        capacity: Capacity,
        on_end: Callable[[str], None] = lambda _: None,
        end_states: EndStates | None = None,
    ) -> None:
        """`on_end` is called with a rollout's id once its end is on disk."""
        self._records = records
        self._event_log = log
        self._placement = placement
        self._specs = specs
        self._instance_id = instance_id
        self._on_end = on_end
        self._end_states = end_states
        weights = capacity.weights
        self._queue = FairQueue[str](capacity.max_running, capacity.quotas.get, lambda name: weights.get(name, 1.0))
        self._max_running = capacity.max_running
        self._max_live = capacity.max_running + capacity.max_queued
        self._held: Counter[str] = Counter()
        """By namespace: the rollouts that run, wait, or are being recorded."""
        self._limits = capacity.events
        self._pause_limits = capacity.pauses
        self._cleanups = Cleanups(self._release)
        placement.on_return(self._cleanups.look_again)
        self._live: dict[str, RolloutRunner] = {}
        """Those that run, and those that wait for a slot."""
        self._waiting: dict[str, Ticket[str]] = {}
        self._ends: dict[str, _End] = {}
        """Of live rollouts, of those that are being recorded, and of those that recovery still has to end."""
        self._tasks = TaskOwner()
        self._groups: dict[str, GroupWatch] = {}
        self._stopping = False
        self._leaving = False
        self.draining = False
        """Whether new rollouts are refused."""
        self._calls: asyncio.Task[None] | None = None

    def watch_calls(self) -> None:
        """Start recording model calls in the rollouts' events."""
        self._calls = asyncio.ensure_future(self._record_calls())

    async def _record_calls(self) -> None:
        while True:
            try:
                async for ended in self._placement.calls({DRIVER_LABEL: self._instance_id}):
                    self._record_call(ended)
            except Exception:  # noqa: BLE001 - all rollouts depend on this one task
                _log.exception("the watch of calls broke")
            await asyncio.sleep(RETRY_S)

    def _record_call(self, ended: CallEnded) -> None:
        runner = self._live.get(ended.rollout_id)
        if runner is None:
            return
        try:
            runner.recorder.append_call(CallFinished(ended.call, ended.spent))
        except Exception:  # noqa: BLE001 - one call of one rollout
            _log.exception("a call's event could not be recorded", rollout_id=ended.rollout_id)

    # Recovery ---------------------------------------------------------------------------------------------------------

    async def recover(self) -> int:
        """Go on with the rollouts that the last process left; return how many that are.

        Those that are furthest get their slots first. One that cannot be taken up is released, found by its labels, and
        then ended, so an ended rollout has no sandbox. If the other services stay unreachable for a minute, it is ended
        anyway with an event that states this, and its cleanup stays pending.
        """
        pending = await self._records.pending_cleanups()
        found = await self._records.unended()
        for rollout_id in pending:
            self._clean_up_later(rollout_id)
        # Read first: an end that a watch of its group did not see would be counted twice, or never.
        ids = {item.record.group_id for item in found if item.record.group_id is not None}
        groups = [known for one in ids if (known := await self._read_group(one)) is not None]
        specs, runners = LeftSpecs(self._specs, self._records, found), list[RolloutRunner]()
        for unended in found:
            record = unended.record
            self._ends[record.rollout_id] = _End()
            try:
                spec = await specs.of(unended)
            except NotAdoptable as error:
                _log.warning("a rollout is not taken up", rollout_id=record.rollout_id, reason=error.failure.reason)
                self._tasks.start(self._recover(record, error.failure))
                continue
            history = await History.read(self._event_log, record, self._limits)
            recorder = RolloutRecorder(record, self._event_log, self._limits, history)
            left = Left(replace(unended, record=recorder.record), self._cleanups.release)
            runner = self._runner(spec, recorder, left)
            if len(runners) >= self._max_running and not specs.is_shared(record):
                runner.put_away(self._read_spec)  # it is to wait, and the specs of all may not fit in memory
            runners.append(runner)
        for runner in runners:
            self._live[runner.recorder.record.rollout_id] = runner
            self._held[runner.recorder.record.namespace] += 1
        for runner in runners:
            self._await_slot(runner, has_own_spec=not specs.is_shared(runner.recorder.record))
        # After the rollouts: one that its group cancels at once has been taken up then, and ends as any other.
        for group, ends in groups:
            quorum_time = ends[group.plan.quorum - 1] if 0 < group.plan.quorum <= len(ends) else None
            ago_s = 0.0 if quorum_time is None else max(0.0, time.time() - quorum_time)
            # How long a pause lasted within the grace is not known: the grace begins anew after it.
            is_paused = self.paused_count(self._live_of(group)) > 0
            self._begin_group(group, len(ends), 0.0 if is_paused else ago_s)
        return len(found)

    async def _read_group(self, group_id: str) -> tuple[GroupRecord, list[float]] | None:
        """A group, and when each of its results ended, in order, in seconds since the epoch.

        None if an earlier version deleted the group alone: its rollouts go on without it.
        """
        ended = await self._records.group_ended(group_id)
        try:
            group = await self._records.group(group_id)
        except NotFound:
            _log.error("rollouts go on without their group, which was deleted", group_id=group_id)
            return None
        return group, [one.end_time or 0.0 for one in ended if one.is_result]

    async def _recover(self, record: Record, failure: Failure) -> None:
        try:
            await self._end_lost(record, failure)
        except Exception:  # noqa: BLE001 - release the waiters even if the end is not on disk
            _log.exception("a rollout's end was not journalled", rollout_id=record.rollout_id)
        self._ends.pop(record.rollout_id).set()

    async def _end_lost(self, record: Record, failure: Failure) -> None:
        released = await self._cleanups.release(record.rollout_id)
        if not released and self._stopping:
            return  # the next start continues this
        sequence = await self._last_sequence(record.rollout_id)
        if not released:
            sequence += 1
            event = Progress("the sandbox service or the gate is unreachable; leftovers are cleaned up later")
            self._event_log.append(record.rollout_id, record.group_id, sequence, event, is_summary=False)
        outcome = Outcome(failure=failure)
        end = RolloutEnd(
            outcome_to_proto(outcome),
            record.phase_times,
            last_sequence=sequence + 1,
            fork_kind=record.fork_kind,
            attempts=record.attempts,
            cleanup_pending=not released,
            gates=record.gates_to_report(record.gates),
        )
        await self._finish(record, outcome, end)

    async def _last_sequence(self, rollout_id: str) -> int:
        while True:
            try:
                return await self._event_log.last_sequence(rollout_id)
            except OperationalError:
                if self._stopping:
                    raise
                _log.exception("the journal cannot be read", rollout_id=rollout_id)
                await asyncio.sleep(RETRY_S)

    # Running ----------------------------------------------------------------------------------------------------------

    async def see_through(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to completion and return its result, even if the caller is cancelled; `aclose` waits for it."""
        return await self._tasks.run(work)

    @contextmanager
    def beginning(self, rollout_ids: Sequence[str]) -> Iterator[None]:
        """Count rollouts as running while they are recorded, so that callers can wait for them and cancel them.

        Within it, `start` starts those that were recorded.
        """
        ends = {rollout_id: _End() for rollout_id in rollout_ids if rollout_id not in self._ends}
        self._ends |= ends
        try:
            yield
        finally:
            for rollout_id in ends.keys() - self._live.keys():
                # Another create of this id may have been the one that was recorded, and its rollout over by now.
                if self._ends.get(rollout_id) is ends[rollout_id]:
                    self._ends.pop(rollout_id).set()

    def start(self, spec: RolloutSpec, records: Sequence[Record], group: GroupRecord | None = None) -> None:
        """Start rollouts that are already recorded."""
        for record in records:
            recorder = RolloutRecorder(record, self._event_log, self._limits)
            runner = self._runner(spec, recorder)
            self._live[record.rollout_id] = runner
            self._held[record.namespace] += 1
            if self._leaving:
                self._left(runner)
                continue
            end = self._ends.setdefault(record.rollout_id, _End())
            # Of `aclose`: recorded before it, started too late for its cancellation.
            if cancelled := end.cancelled or (STOPPED if self._stopping else None):
                self._end_waiting(runner, cancelled)
            else:
                self._await_slot(runner, has_own_spec=group is None)
        if group and not self._leaving:
            self._begin_group(group)

    def _runner(self, spec: RolloutSpec, recorder: RolloutRecorder, left: Left | None = None) -> RolloutRunner:
        rollout_id = recorder.record.rollout_id
        pausing = Pausing(recorder, self._pause_limits, self._unpaused)
        labels = self._labels(rollout_id)
        return RolloutRunner(
            spec, recorder, self._placement, labels, left, pausing=pausing, end_states=self._end_states
        )

    def _begin_group(self, group: GroupRecord, results: int = 0, quorum_ago_s: float = 0.0) -> None:
        watch = GroupWatch(
            GroupPolicy(group.plan.size, group.plan.quorum, group.plan.grace_s),
            running=lambda: self._live_of(group),
            cancel=self._cancel_all,
            is_paused=lambda: self.paused_count(self._live_of(group)) > 0,
            results=results,
            quorum_ago_s=quorum_ago_s,
        )
        self._groups[group.group_id] = watch
        self._tasks.start(self._watch_group(group.group_id, watch))

    def _live_of(self, group: GroupRecord) -> Collection[str]:
        """A group's live rollouts. The id of one that was deleted may be another rollout's by now."""
        return {
            rollout_id
            for rollout_id in group.rollout_ids
            if (runner := self._live.get(rollout_id)) and runner.recorder.record.group_id == group.group_id
        }

    def _await_slot(self, runner: RolloutRunner, *, has_own_spec: bool) -> None:
        """Start a rollout once its namespace has a slot for it. Until then it has neither a task nor a place, and its
        spec is on disk alone, unless others of its group have the same one.
        """
        record = runner.recorder.record

        def granted() -> None:
            self._waiting.pop(record.rollout_id, None)
            runner.start()
            self._tasks.start(self._supervise(runner, lambda: self._queue.give_back(record.namespace)))

        # One that was paused while it waited keeps waiting; one that had a slot gets it again.
        aside = record.phase is Phase.QUEUED and record.attempts == 1 and runner.pausing.pause is not None
        ticket = self._queue.request(record.namespace, granted, aside=aside)
        if not runner.is_started:
            self._waiting[record.rollout_id] = ticket
            if has_own_spec:
                runner.put_away(self._read_spec)

    async def _read_spec(self, record: Record) -> RolloutSpec:
        """The spec of a rollout that has waited. Raise RolloutFailed."""
        while True:
            try:
                return await self._specs.read(Unended(record, await self._records.sealed_spec(record)))
            except NotAdoptable as error:
                raise RolloutFailed(error.failure) from error
            except OperationalError:
                _log.exception("the journal cannot be read", rollout_id=record.rollout_id)
                await asyncio.sleep(RETRY_S)

    def _end_waiting(self, runner: RolloutRunner, failure: Failure) -> None:
        """End a rollout that has no slot."""
        runner.cancel(failure)
        self._tasks.start(self._supervise(runner, lambda: None))

    @contextmanager
    def room(self, namespace: str, count: int) -> Iterator[None]:
        """Keep room for `count` more rollouts of a namespace, which are started inside the block.

        Raise ResourceExhausted (ROLLOUT_LIMIT) if there is none, with a delay if there may be some later; Unavailable
        when stopping.
        """
        if self.draining or self._leaving or self._stopping:
            raise Unavailable("the driver takes no new rollouts: it drains", reason="DRAINING", retry_after_s=5.0)
        known = self._held[namespace]
        if count > self._max_live:
            # Without a delay, because no wait makes room for it.
            raise ResourceExhausted(
                f"{count} rollouts at once are more than a namespace may have, which is {self._max_live}: "
                "ask for fewer, or raise max_queued",
                reason="ROLLOUT_LIMIT",
            )
        if known + count > self._max_live:
            raise ResourceExhausted(
                f"{known} rollouts of namespace {namespace} run or wait, the maximum is {self._max_live}: "
                "try again later",
                reason="ROLLOUT_LIMIT",
                retry_after_s=5.0,
            )
        self._held[namespace] += count
        try:
            yield
        finally:
            self._let_go(namespace, count)

    def _let_go(self, namespace: str, count: int = 1) -> None:
        self._held[namespace] -= count
        if not self._held[namespace]:
            del self._held[namespace]

    def current(self, record: Record) -> Record:
        """Return the record with the current phase and times, which a live rollout keeps in memory."""
        runner = self._live.get(record.rollout_id)
        return runner.recorder.current(record) if runner else record

    async def get(self, rollout_id: str) -> Record:
        """Return the current state of a rollout; NotFound (ROLLOUT_UNKNOWN)."""
        return self.current(await self._records.get(rollout_id))

    async def wait(self, rollout_id: str, timeout_s: float | None) -> Record:
        """Return a rollout once its end is on disk, or its current state after `timeout_s`.

        Unavailable (END_NOT_RECORDED) if its end could not be recorded and there is nothing left to wait for.
        """
        if end := self._ends.get(rollout_id):
            try:
                async with asyncio.timeout(timeout_s):
                    await end.recorded.wait()
            except TimeoutError:
                pass
        is_running = self.is_running(rollout_id)
        record = await self.get(rollout_id)
        if record.outcome is None and not is_running:
            self.check_stays()
            raise end_not_recorded()
        return record

    def check_stays(self) -> None:
        """Raise Unavailable (DRIVER_STOPPING) if the next process of this driver goes on with what ran here."""
        if self._leaving:
            message = "the driver stops, and its next process goes on with the rollout: repeat the call there"
            raise Unavailable(message, reason="DRIVER_STOPPING", retry_after_s=RETRY_S)

    async def cancel(self, rollout_id: str, reason: str) -> Record:
        """End a rollout; its sandbox is gone when this returns. A rollout that has ended keeps its outcome.

        While the disk is full, the end itself is recorded later.
        """
        await self._records.get(rollout_id)
        await self._cancel_all([rollout_id], _cancelled(reason))
        self.check_stays()
        return await self.get(rollout_id)

    async def cancel_group(self, group: GroupRecord, reason: str) -> None:
        """End all rollouts of a group that run. Raises as `cancel`."""
        await self._cancel_all(await self._records.members(group), _cancelled(reason))
        self.check_stays()

    # Pauses -----------------------------------------------------------------------------------------------------------

    async def pause(self, rollout_id: str, reason: str, duration_s: float | None, patience_s: float) -> Record:
        """Hold a rollout for at most `duration_s` (None: as long as is allowed); return it once it is held.

        FailedPrecondition (ROLLOUT_ENDED), ResourceExhausted (PAUSE_LIMIT), Unavailable (DRAINING; PAUSE_PENDING: it is
        not held after `patience_s` yet).
        """
        record = await self._records.get(rollout_id)
        if not await self.pause_all([rollout_id], reason, duration_s, patience_s):
            raise _has_ended()
        return self.current(record)

    async def pause_all(
        self, rollout_ids: Collection[str], reason: str, duration_s: float | None, patience_s: float
    ) -> int:
        """Hold those rollouts that have not ended; return how many that are. Raises as `pause` does.

        If some may not be paused any more, the others are.
        """
        if self.draining or self._stopping:
            raise Unavailable("the driver ends every pause: it drains", reason="DRAINING", retry_after_s=5.0)
        self.check_stays()
        paused: list[RolloutRunner] = []
        refusal: ResourceExhausted | None = None
        for rollout_id in rollout_ids:
            runner = self._live.get(rollout_id)
            if runner is None:
                if rollout_id in self._ends:
                    raise _pending("the rollout is just being started, or ended")
                continue
            if runner.pausing.is_closed:
                continue
            try:
                runner.pausing.begin(reason, duration_s)
            except ResourceExhausted as error:
                refusal = error
                continue
            paused.append(runner)
            # One whose agent runs since an earlier process is held once it has its slot.
            is_running = runner.recorder.progress.phase is Phase.RUNNING
            if not is_running and (ticket := self._waiting.get(rollout_id)):
                self._queue.set_aside(ticket)
            self._pause_changed(runner)
        if refusal is not None and not paused:
            raise refusal
        await self._settled(paused, patience_s)
        return len(paused)

    async def resume(self, rollout_id: str, patience_s: float) -> Record:
        """End a rollout's pause, if there is one; return it once nothing holds it. Unavailable (PAUSE_PENDING)."""
        await self._records.get(rollout_id)
        await self.resume_all([rollout_id], patience_s)
        return await self.get(rollout_id)

    async def resume_all(
        self, rollout_ids: Collection[str], patience_s: float, why: PauseEnd = PauseEnd.RESUMED
    ) -> None:
        """End the pauses of rollouts. Raises as `resume` does."""
        self.check_stays()
        resumed = [runner for rollout_id in rollout_ids if (runner := self._live.get(rollout_id))]
        for runner in resumed:
            runner.pausing.end(why)
        await self._settled(resumed, patience_s)

    def drain(self, *, on: bool) -> None:
        """Refuse new rollouts and end every pause, or take rollouts again."""
        self.draining = on
        if on:
            for runner in list(self._live.values()):
                runner.pausing.end(PauseEnd.DRAINING)

    def paused_count(self, rollout_ids: Collection[str]) -> int:
        """How many of these rollouts are paused."""
        return sum(runner.pausing.pause is not None for one in rollout_ids if (runner := self._live.get(one)))

    async def _settled(self, runners: Collection[RolloutRunner], patience_s: float) -> None:
        """Wait until what was asked is in force, and on disk."""
        if not runners:
            return
        loop, any_recorder = asyncio.get_running_loop(), next(iter(runners)).recorder
        until = loop.time() + patience_s
        await any_recorder.secure()  # all that was recorded, of the others too
        for runner in runners:
            is_settled = await runner.pausing.settled(max(0.0, until - loop.time()))
            self.check_stays()
            if not is_settled:
                raise _pending("a service that holds the rollout has not answered yet; the driver keeps trying")
        await any_recorder.secure()

    def _unpaused(self, rollout_id: str) -> None:
        if ticket := self._waiting.get(rollout_id):
            self._queue.put_back(ticket)
        if runner := self._live.get(rollout_id):
            self._pause_changed(runner)

    def _pause_changed(self, runner: RolloutRunner) -> None:
        group_id = runner.recorder.record.group_id
        if group_id and (watch := self._groups.get(group_id)):
            watch.paused_or_resumed()

    async def delete(self, rollout_id: str) -> None:
        """Delete the record and the events of an ended rollout."""
        namespace = await self._records.namespace_of(rollout_id)
        await self._records.delete(rollout_id)
        if namespace is not None:
            self._event_log.deleted([rollout_id], namespace)

    @property
    def pending_cleanups(self) -> tuple[str, ...]:
        """Ended rollouts with pending cleanups, because the other services are unreachable."""
        return self._cleanups.owed

    @property
    def live_groups(self) -> int:
        """Number of groups with a rollout that has not ended."""
        return len(self._groups)

    def live_phases(self) -> list[Phase]:
        """The phase of each rollout that has not ended."""
        return [runner.recorder.progress.phase for runner in self._live.values()]

    @property
    def running_count(self) -> int:
        """Number of rollouts that have not ended, or whose end is not on disk yet."""
        return len(self._ends)

    def is_running(self, rollout_id: str) -> bool:
        """Whether a rollout has not ended, or its end is not on disk yet."""
        return rollout_id in self._ends

    async def ended(self, rollout_id: str) -> None:
        """Return once a rollout whose end is on disk does not count as running any more, a moment later."""
        if end := self._ends.get(rollout_id):
            await end.recorded.wait()

    async def leave(self, wait_s: float) -> None:
        """Stop without ending a rollout: this driver's next process goes on with all (decision 061).

        Wait at most `wait_s` seconds for what that could not go on with, such as a verifier in an agent's own sandbox.
        """
        self._leaving = True
        for rollout_id, ticket in list(self._waiting.items()):
            if self._queue.withdraw(ticket):
                del self._waiting[rollout_id]
                self._left(self._live[rollout_id])
        for runner in list(self._live.values()):
            runner.leave()
        try:
            async with asyncio.timeout(wait_s):
                await self._until_none_lives()
        except TimeoutError:
            for runner in list(self._live.values()):
                runner.leave(at_once=True)
            await self._until_none_lives()
        try:
            await self._event_log.flush()
        except OperationalError as error:
            _log.warning("the next process goes on from what is on the disk, which is full", error=repr(error))
        self._event_log.wake()

    async def _until_none_lives(self) -> None:
        for end in [self._ends[rollout_id] for rollout_id in self._live]:
            await end.reached.wait()

    def _left(self, runner: RolloutRunner) -> None:
        record = runner.recorder.record
        del self._live[record.rollout_id]
        self._let_go(record.namespace)
        if end := self._ends.pop(record.rollout_id, None):
            end.set()
        if record.group_id and (watch := self._groups.get(record.group_id)):
            watch.ended(is_result=False)

    async def aclose(self) -> None:
        """Cancel all running rollouts as DRIVER_STOPPED and wait until all of them are released."""
        self._stopping = True
        self._cleanups.stop()
        await self._cancel_all(list(self._live), STOPPED)
        await self._tasks.wait()
        await self._cleanups.aclose()
        if self._calls:
            self._calls.cancel()
            await asyncio.wait([self._calls])
        await self._event_log.flush()

    # Ends -------------------------------------------------------------------------------------------------------------

    async def _supervise(self, runner: RolloutRunner, free_slot: Callable[[], None]) -> None:
        """Watch one rollout to its end; never cancelled itself, so every end is recorded."""
        try:
            result = await runner.result()
        finally:
            free_slot()
        if runner.is_left:
            self._left(runner)
            return
        runner.pausing.close()
        recorder, record = runner.recorder, runner.recorder.record
        outcome, message = serializable(result.outcome, recorder)
        sequence = recorder.close()  # `_finish` appends the outcome with this number
        is_result = outcome.is_result(verified=runner.is_verified)
        end = RolloutEnd(
            message,
            recorder.progress.times(),
            last_sequence=sequence,
            is_result=is_result,
            fork_kind=recorder.fork_kind,
            attempts=recorder.progress.attempt,
            cleanup_pending=result.cleanup_pending,
            gates=recorder.gates_to_report(),
        )
        try:
            await self._finish(record, outcome, end)
        except Exception:  # noqa: BLE001 - release the waiters even if the end is not on disk yet
            _log.exception("a rollout's end was not journalled", rollout_id=record.rollout_id)
        del self._live[record.rollout_id]
        self._let_go(record.namespace)
        self._ends.pop(record.rollout_id).set()
        if record.group_id and (watch := self._groups.get(record.group_id)):
            watch.ended(is_result=is_result)

    async def _finish(self, record: Record, outcome: Outcome, end: RolloutEnd) -> None:
        """Record the last event and the end; return when both are on disk."""
        count_end(record, outcome)
        self._event_log.append(record.rollout_id, record.group_id, end.last_sequence, outcome, is_summary=True)
        self._event_log.end(record.rollout_id, record.group_id, end)
        try:
            await self._event_log.flush()
        except OperationalError:
            self._ends[record.rollout_id].reached.set()
            if end.cleanup_pending:
                self._clean_up_later(record.rollout_id)
            await self._until_written()
        else:
            if end.cleanup_pending:
                self._clean_up_later(record.rollout_id)
        self._on_end(record.rollout_id)

    async def _until_written(self) -> None:
        """Wait out a full disk: no rollout may appear ended to a caller before the next start would find it ended."""
        while True:
            try:
                return await self._event_log.flush()
            except OperationalError:  # the event log waits before it retries
                if self._stopping:
                    raise

    async def _cancel_all(self, rollout_ids: Collection[str], failure: Failure) -> None:
        ends = [end for rollout_id in rollout_ids if (end := self._ends.get(rollout_id))]
        for end in ends:
            end.cancelled = failure
        for rollout_id in rollout_ids:
            if (ticket := self._waiting.pop(rollout_id, None)) and self._queue.withdraw(ticket):
                self._end_waiting(self._live[rollout_id], failure)
            elif runner := self._live.get(rollout_id):
                runner.cancel(failure)
        for end in ends:
            await end.reached.wait()

    async def _watch_group(self, group_id: str, watch: GroupWatch) -> None:
        try:
            await watch.run()
        finally:
            self._groups.pop(group_id, None)

    # Cleanups ---------------------------------------------------------------------------------------------------------

    def _labels(self, rollout_id: str) -> dict[str, str]:
        return {DRIVER_LABEL: self._instance_id, ROLLOUT_LABEL: rollout_id}

    async def _release(self, rollout_id: str) -> None:
        try:
            record = await self._records.get(rollout_id)
        except NotFound:
            record = None  # deleted: how long its sandboxes could live is not known any more
        # At a sandbox service that is lost they are over once their leases must have ended: nobody renews them.
        over = record is not None and _are_sandboxes_over(record)
        # In no namespace it would close another team's rollout of this id: this one may not have been opened there.
        with acting_in(record.namespace if record else None):
            await self._placement.release(rollout_id, self._labels(rollout_id), sandboxes_over=over)

    def _clean_up_later(self, rollout_id: str) -> None:
        self._cleanups.owe(rollout_id, partial(self._cleaned_up, rollout_id))

    async def _cleaned_up(self, rollout_id: str) -> None:
        await self._event_log.flush()  # the pending cleanup may still be queued there while the disk is full
        await self._records.cleaned_up(rollout_id)


def end_not_recorded() -> Unavailable:
    """The error for callers that wait for an end that the journal did not accept."""
    message = "a rollout's end could not be recorded: the driver's log has the error, and its next start ends it"
    return Unavailable(message, reason="END_NOT_RECORDED", retry_after_s=RETRY_S)


def _are_sandboxes_over(record: Record) -> bool:
    """Whether the leases of all sandboxes of a rollout have ended."""
    if record.end_time is None:
        return False
    # The last request may have been sent just before the end, and a lease begins when its sandbox is ready.
    return time.time() > record.end_time + MAKE_S + limits_from_proto(record.spec.limits).sandbox_s


def _has_ended() -> FailedPrecondition:
    return FailedPrecondition("the rollout has ended: there is nothing to pause", reason="ROLLOUT_ENDED")


def _pending(message: str) -> Unavailable:
    return Unavailable(f"not in force yet: {message}; try again", reason="PAUSE_PENDING", retry_after_s=1.0)


def _cancelled(reason: str) -> Failure:
    message = f"cancelled: {reason}" if reason else "the rollout was cancelled"
    return Failure(Cause.CANCELLED, "CANCELLED", message[:1000], False, Phase.QUEUED)
