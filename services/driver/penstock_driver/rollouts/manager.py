"""Runs all rollouts as owned tasks: start, cancel, wait, and recovery after a restart.

Invariants: every accepted rollout ends with one outcome on disk, also after a kill -9 of the driver: the next start
ends it as DRIVER_RESTARTED and releases its sandbox and its rollout at the gate, found by labels (R50). Cancelling is
idempotent and returns when the sandbox is gone (R70). A rollout that runs costs no thread and two tasks: its runner's,
and one that records its end. One that waits costs no task.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from sqlite3 import OperationalError
from typing import Any, Final, TypeVar

import structlog

from penstock.driver.v1 import rollout_pb2
from penstock_chassis.aio.fair_queue import FairQueue, Ticket
from penstock_chassis.errors import NotFound, ResourceExhausted, Unavailable
from penstock_driver.domain.failures import internal_failure
from penstock_driver.domain.ports import CallEnded
from penstock_driver.domain.records import Filter, GroupRecord, Record, RolloutEnd
from penstock_driver.domain.rollout import (
    MAKE_S,
    CallFinished,
    Cause,
    Component,
    Failure,
    Outcome,
    Phase,
    Progress,
    RolloutSpec,
)
from penstock_driver.environments.cleanup import DRIVER_LABEL, Cleanups
from penstock_driver.placement.placement import Placement
from penstock_driver.rollouts.event_limits import DEFAULT_LIMITS, EventLimits
from penstock_driver.rollouts.groups import GroupPolicy, GroupWatch
from penstock_driver.rollouts.recorder import RolloutRecorder, count_end
from penstock_driver.rollouts.runner import STOPPED, RolloutRunner
from penstock_driver.store.event_log import EventLog
from penstock_driver.store.records import Records
from penstock_driver.wire.specs import limits_from_proto
from penstock_driver.wire.to_proto import outcome_to_proto

ROLLOUT_LABEL: Final = "penstock_rollout"
RETRY_S: Final = 1.0
"""Delay before retrying work that must eventually succeed."""

_log = structlog.get_logger("penstock.driver")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Capacity:
    """At most `max_running` rollouts run at once; `max_queued` more of each namespace may wait, and share what becomes
    free (`FairQueue`). `events` limits what each records.

    `quotas` has the most that run at once in a namespace, for those that have a quota; `weights` the share of those
    whose share is not 1.
    """

    max_running: int
    max_queued: int
    events: EventLimits = DEFAULT_LIMITS
    quotas: Mapping[str, int] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)


class _Moment:
    """A moment that callers wait for. As `asyncio.Event`, without the 600 bytes of one that nobody waits for."""

    __slots__ = ("_future",)

    def __init__(self) -> None:
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def set(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    async def wait(self) -> None:
        await asyncio.wait([self._future])


@dataclass(slots=True)
class _End:
    """The end of a rollout: `reached` is set when nothing of it runs any more, `recorded` when it is also on disk."""

    reached: _Moment = field(default_factory=_Moment)
    recorded: _Moment = field(default_factory=_Moment)
    cancelled: Failure | None = None
    """Why it was cancelled before it was started."""

    def set(self) -> None:
        self.reached.set()
        self.recorded.set()


class RolloutManager:
    """All rollouts of one driver. Start with `recover()` and `watch_calls()`, stop with `aclose()`."""

    def __init__(
        self, records: Records, log: EventLog, placement: Placement, *, instance_id: str, capacity: Capacity
    ) -> None:
        self._records = records
        self._event_log = log
        self._placement = placement
        self._instance_id = instance_id
        weights = capacity.weights
        self._queue = FairQueue[str](capacity.max_running, capacity.quotas.get, lambda name: weights.get(name, 1.0))
        self._max_live = capacity.max_running + capacity.max_queued
        self._held: Counter[str] = Counter()
        """By namespace: the rollouts that run, wait, or are being recorded."""
        self._limits = capacity.events
        self._cleanups = Cleanups(self._release)
        self._live: dict[str, RolloutRunner] = {}
        """Those that run, and those that wait for a slot."""
        self._waiting: dict[str, Ticket[str]] = {}
        self._ends: dict[str, _End] = {}
        """Of live rollouts, of those that are being recorded, and of those that recovery still has to end."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._groups: dict[str, GroupWatch] = {}
        self._stopping = False
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
        """Start ending the rollouts that ran when the last driver died; return their number.

        Each one is released first, found by its labels, and then ended, so an ended rollout has no sandbox. If the
        other services stay unreachable for a minute, the rollout is ended anyway with an event that states this, and
        its cleanup stays pending.
        """
        pending = await self._records.pending_cleanups()
        lost = [record async for record in self._records.all(Filter(ended=False))]
        for rollout_id in pending:
            self._clean_up_later(rollout_id)
        for record in lost:
            self._ends[record.rollout_id] = _End()
            self._own(self._recover(record))
        return len(lost)

    async def _recover(self, record: Record) -> None:
        try:
            await self._end_lost(record)
        except Exception:  # noqa: BLE001 - release the waiters even if the end is not on disk
            _log.exception("a rollout's end was not journalled", rollout_id=record.rollout_id)
        self._ends.pop(record.rollout_id).set()

    async def _end_lost(self, record: Record) -> None:
        released = await self._cleanups.release(record.rollout_id)
        if not released and self._stopping:
            return  # the next start continues this
        sequence = await self._last_sequence(record.rollout_id)
        if not released:
            sequence += 1
            event = Progress("the sandbox service or the gate is unreachable; leftovers are cleaned up later")
            self._event_log.append(record.rollout_id, record.group_id, sequence, event, is_summary=False)
        message = "the driver died while the rollout ran"
        failure = Failure(
            Cause.INFRASTRUCTURE, "DRIVER_RESTARTED", message, True, record.phase, component=Component.DRIVER
        )
        outcome = Outcome(failure=failure)
        end = RolloutEnd(
            outcome_to_proto(outcome),
            record.phase_times,
            last_sequence=sequence + 1,
            fork_kind=record.fork_kind,
            attempts=record.attempts,
            cleanup_pending=not released,
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
        return await asyncio.shield(self._own(work))

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
            labels = self._labels(record.rollout_id)
            runner = RolloutRunner(spec, recorder, self._placement, labels)
            self._live[record.rollout_id] = runner
            self._held[record.namespace] += 1
            end = self._ends.setdefault(record.rollout_id, _End())
            # Of `aclose`: recorded before it, started too late for its cancellation.
            if cancelled := end.cancelled or (STOPPED if self._stopping else None):
                self._end_waiting(runner, cancelled)
            else:
                self._await_slot(runner)
        if group:
            ids = frozenset(record.rollout_id for record in records)
            watch = GroupWatch(
                GroupPolicy(group.plan.size, group.plan.quorum, group.plan.grace_s),
                running=lambda: ids & self._live.keys(),
                cancel=self._cancel_all,
            )
            self._groups[group.group_id] = watch
            self._own(self._watch_group(group.group_id, watch))

    def _await_slot(self, runner: RolloutRunner) -> None:
        """Start a rollout once its namespace has a slot for it. Until then it has neither a task nor a place."""
        record = runner.recorder.record

        def granted() -> None:
            self._waiting.pop(record.rollout_id, None)
            runner.start()
            self._own(self._supervise(runner, lambda: self._queue.give_back(record.namespace)))

        ticket = self._queue.request(record.namespace, granted)
        if not runner.is_started:
            self._waiting[record.rollout_id] = ticket

    def _end_waiting(self, runner: RolloutRunner, failure: Failure) -> None:
        """End a rollout that has no slot."""
        runner.cancel(failure)
        self._own(self._supervise(runner, lambda: None))

    @contextmanager
    def room(self, namespace: str, count: int) -> Iterator[None]:
        """Keep room for `count` more rollouts of a namespace, which are started inside the block.

        Raise ResourceExhausted (ROLLOUT_LIMIT) if there is none; Unavailable when stopping.
        """
        if self.draining or self._stopping:
            raise Unavailable("the driver takes no new rollouts: it drains", reason="DRAINING", retry_after_s=5.0)
        known = self._held[namespace]
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
        return runner.recorder.current if runner else record

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
            raise end_not_recorded()
        return record

    async def cancel(self, rollout_id: str, reason: str) -> Record:
        """End a rollout; its sandbox is gone when this returns. A rollout that has ended keeps its outcome.

        While the disk is full, the end itself is recorded later.
        """
        await self._records.get(rollout_id)
        await self._cancel_all([rollout_id], _cancelled(reason))
        return await self.get(rollout_id)

    async def cancel_group(self, group: GroupRecord, reason: str) -> None:
        await self._cancel_all(group.rollout_ids, _cancelled(reason))

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

    async def aclose(self) -> None:
        """Cancel all running rollouts as DRIVER_STOPPED and wait until all of them are released."""
        self._stopping = True
        self._cleanups.stop()
        await self._cancel_all(list(self._live), STOPPED)
        while self._tasks:
            await asyncio.wait(self._tasks)
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
        recorder, record = runner.recorder, runner.recorder.record
        outcome, message = _serializable(result.outcome, recorder)
        sequence = recorder.close()  # `_finish` appends the outcome with this number
        is_result = outcome.is_result(verified=runner.spec.task.verifier is not None)
        end = RolloutEnd(
            message,
            recorder.progress.times(),
            last_sequence=sequence,
            is_result=is_result,
            fork_kind=recorder.fork_kind,
            attempts=recorder.progress.attempt,
            cleanup_pending=result.cleanup_pending,
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
        # At a sandbox service that is lost they are over once their leases must have ended: nobody renews them.
        over = await self._are_sandboxes_over(rollout_id)
        await self._placement.release(rollout_id, self._labels(rollout_id), sandboxes_over=over)

    async def _are_sandboxes_over(self, rollout_id: str) -> bool:
        try:
            record = await self._records.get(rollout_id)
        except NotFound:
            return False  # deleted: how long its sandboxes could live is not known any more
        if record.end_time is None:
            return False
        # The last request may have been sent just before the end, and a lease begins when its sandbox is ready.
        return time.time() > record.end_time + MAKE_S + limits_from_proto(record.spec.limits).sandbox_s

    def _clean_up_later(self, rollout_id: str) -> None:
        self._cleanups.owe(rollout_id, partial(self._cleaned_up, rollout_id))

    async def _cleaned_up(self, rollout_id: str) -> None:
        await self._event_log.flush()  # the pending cleanup may still be queued there while the disk is full
        await self._records.cleaned_up(rollout_id)

    def _own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def end_not_recorded() -> Unavailable:
    """The error for callers that wait for an end that the journal did not accept."""
    message = "a rollout's end could not be recorded: the driver's log has the error, and its next start ends it"
    return Unavailable(message, reason="END_NOT_RECORDED", retry_after_s=RETRY_S)


def _serializable(outcome: Outcome, recorder: RolloutRecorder) -> tuple[Outcome, rollout_pb2.Outcome]:
    """The outcome with its message; an internal failure if no message can hold it."""
    try:
        message = outcome_to_proto(outcome)
        message.SerializeToString()
    except Exception:  # noqa: BLE001 - the rollout ends, whatever the error
        _log.exception("a rollout's outcome event failed", rollout_id=recorder.record.rollout_id)
        outcome = Outcome(failure=internal_failure(recorder.progress.phase))
        return outcome, outcome_to_proto(outcome)
    return outcome, message


def _cancelled(reason: str) -> Failure:
    message = f"cancelled: {reason}" if reason else "the rollout was cancelled"
    return Failure(Cause.CANCELLED, "CANCELLED", message[:1000], False, Phase.QUEUED)
