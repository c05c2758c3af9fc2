"""The rollouts that run, as owned tasks: start, cancel, wait, and what a restart does about those that ran.

Invariants: every rollout that was accepted ends with one outcome that is on disk, a kill -9 of the driver included: the
next start ends it as DRIVER_RESTARTED and releases its sandbox and its place at the gate, found by labels (R50).
Cancelling is idempotent and returns when the sandbox is gone (R70). A rollout costs one task and no thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from sqlite3 import OperationalError
from typing import Any, Final, TypeVar

import structlog

from penstock_chassis.errors import ResourceExhausted, Unavailable
from penstock_chassis.tracing import working_for
from penstock_driver import observing
from penstock_driver.allowance import DEFAULT_MOST, Allowance, Most
from penstock_driver.attempts import Attempts, End, Live, order_of
from penstock_driver.endings import fault_of_the_driver
from penstock_driver.grading import DEFAULT_MAX_CHANGES_BYTES
from penstock_driver.groups import GroupPolicy, GroupWatch
from penstock_driver.history import History
from penstock_driver.ports import CallEnded, Gate, Sandboxes
from penstock_driver.records import Filter, GroupRecord, Record, Records
from penstock_driver.releases import DRIVER_LABEL, Releases
from penstock_driver.rollouts import (
    CallFinished,
    Cause,
    Failure,
    Outcome,
    Party,
    Phase,
    PhaseChanged,
    Progress,
    RolloutOrder,
)

ROLLOUT_LABEL: Final = "penstock_rollout"
RETRY_S: Final = 1.0
"""After how long what failed, and must not, is tried again."""
_STOPPED: Final = Failure(
    Cause.INFRASTRUCTURE, "DRIVER_STOPPED", "the driver was stopped", True, Phase.QUEUED, part=Party.OPERATOR
)

_log = structlog.get_logger("penstock.driver")
T = TypeVar("T")


class Fleet:
    """All rollouts of one driver. Open with `open()`, stop with `aclose()`.

    `encode_outcome` gives an outcome in the wire's form. `max_running` rollouts run at once, `max_queued` may wait.
    An agent finds its model endpoint at `agent_port` of its sandbox's own loopback. `spool` is where temporary files of
    grading lie, at most `max_changes_bytes` of each kind.
    """

    def __init__(
        self,
        records: Records,
        history: History,
        sandboxes: Sandboxes,
        gate: Gate,
        *,
        instance_id: str,
        encode_outcome: Callable[[Outcome], bytes],
        max_running: int,
        max_queued: int,
        agent_port: int,
        spool: Path | None = None,
        max_changes_bytes: int = DEFAULT_MAX_CHANGES_BYTES,
        most: Most = DEFAULT_MOST,
    ) -> None:
        self.records = records
        self.history = history
        self._sandboxes = sandboxes
        self._gate = gate
        self._instance_id = instance_id
        self._encode_outcome = encode_outcome
        self._slots = asyncio.Semaphore(max_running)
        self._most = most
        self._max_live = max_running + max_queued
        self._attempts = Attempts(
            history,
            sandboxes,
            gate,
            self._labels,
            agent_port=agent_port,
            spool=spool,
            max_changes_bytes=max_changes_bytes,
        )
        self._releases = Releases(self._release)
        self._live: dict[str, Live] = {}
        self._recovering: dict[str, End] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._groups: dict[str, GroupWatch] = {}
        self._closing = False
        self._calls: asyncio.Task[None] | None = None

    def watch_calls(self) -> None:
        """Begin to tell of the rollouts' model calls in their events."""
        self._calls = asyncio.ensure_future(self._tell_calls())

    async def _tell_calls(self) -> None:
        while True:
            try:
                async for ended in self._gate.calls({DRIVER_LABEL: self._instance_id}):
                    self._tell_call(ended)
            except Exception:  # noqa: BLE001 - all rollouts depend on this one task
                _log.exception("the watch of calls broke")
            await asyncio.sleep(RETRY_S)

    def _tell_call(self, ended: CallEnded) -> None:
        # The last call of an agent that has just ended may be told too late: the trajectory has all of them.
        live = self._live.get(ended.rollout_id)
        if live is None or live.is_over:
            return
        try:
            self._attempts.tell(live, CallFinished(ended.call, ended.spent))
        except Exception:  # noqa: BLE001 - one call of one rollout
            _log.exception("a call cannot be told", rollout_id=ended.rollout_id)

    async def recover(self) -> int:
        """Begin to end what ran when the last driver died, and return how many rollouts that were.

        Each is released first, found by its labels, and ended then, so that an ended rollout has no sandbox. If the
        other services are not there for a minute, it is ended all the same, says so, and its release is owed.
        """
        owed = await self.records.owed()
        lost = [record async for record in self.records.all(Filter(ended=False))]
        for rollout_id in owed:
            self._owe_release(rollout_id)
        for record in lost:
            self._recovering[record.rollout_id] = End()
            self._own(self._see_lost(record))
        return len(lost)

    async def _see_lost(self, record: Record) -> None:
        try:
            await self._end_lost(record)
        except Exception:  # noqa: BLE001 - who waits for the end is let go also when it is not on disk
            _log.exception("a rollout's end is not on disk", rollout_id=record.rollout_id)
        end = self._recovering.pop(record.rollout_id)
        end.come.set()
        end.recorded.set()

    async def _end_lost(self, record: Record) -> None:
        released = await self._releases.release(record.rollout_id)
        if not released and self._closing:
            return  # the next start takes it up again
        sequence = await self._last_sequence(record.rollout_id)
        if not released:
            sequence += 1
            event = Progress("the sandbox service or the gate cannot be reached; what is left there is ended later")
            self.history.append(record.rollout_id, record.group_id, sequence, event, is_summary=False)
        message = "the driver died while the rollout ran"
        failure = Failure(Cause.INFRASTRUCTURE, "DRIVER_RESTARTED", message, True, record.phase, part=Party.DRIVER)
        await self._finish(
            record,
            self._recovering[record.rollout_id],
            sequence + 1,
            Outcome(failure=failure),
            record.phase_times,
            is_result=False,
            fork_kind=record.fork_kind,
            attempts=record.attempts,
            owes=not released,
        )

    async def _last_sequence(self, rollout_id: str) -> int:
        while True:
            try:
                return await self.history.last_sequence(rollout_id)
            except OperationalError:
                if self._closing:
                    raise
                _log.exception("the journal cannot be read", rollout_id=rollout_id)
                await asyncio.sleep(RETRY_S)

    async def see_through(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` gives: it is done also when the caller goes away meanwhile, and before the fleet is closed."""
        return await asyncio.shield(self._own(work))

    def _own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _labels(self, rollout_id: str) -> dict[str, str]:
        return {DRIVER_LABEL: self._instance_id, ROLLOUT_LABEL: rollout_id}

    async def _release(self, rollout_id: str) -> None:
        await self._sandboxes.delete_labelled(self._labels(rollout_id))
        await self._gate.close(rollout_id, "ROLLOUT_ENDED")

    def _owe_release(self, rollout_id: str) -> None:
        self._releases.owe(rollout_id, partial(self._settled, rollout_id))

    async def _settled(self, rollout_id: str) -> None:
        await self.history.flush()  # that it is owed may wait there for a disk that is full
        await self.records.settled(rollout_id)

    def start(
        self,
        order: RolloutOrder,
        key: str,
        records: Sequence[Record],
        group: GroupRecord | None = None,
    ) -> None:
        """Start rollouts that are remembered already; `key` is the digest of what their preparation depends on."""
        for record in records:
            live = self._admit(record, order, key)
            live.task = asyncio.ensure_future(self._conduct(live))
            self._own(self._supervise(live, live.task))
            if self._closing:  # remembered before, and started too late to be among those that are cancelled
                live.cancel(_STOPPED)
        if group:
            ids = frozenset(record.rollout_id for record in records)
            watch = GroupWatch(
                GroupPolicy(group.size, group.quorum, group.grace_s),
                running=lambda: ids & self._live.keys(),
                cancel=self._cancel_all,
            )
            self._groups[group.group_id] = watch
            self._own(self._watch_group(group.group_id, watch))

    def check_room(self, count: int) -> None:
        """ResourceExhausted (ROLLOUT_LIMIT) when `count` more rollouts would be too many; Unavailable when stopping."""
        if self._closing:
            raise Unavailable("the driver is stopping", reason="DRAINING", retry_after_s=5.0)
        if len(self._live) + count > self._max_live:
            raise ResourceExhausted(
                f"{len(self._live)} rollouts run or wait already, at most {self._max_live} may",
                reason="ROLLOUT_LIMIT",
                retry_after_s=5.0,
            )

    def phase_of(self, record: Record) -> Record:
        """The record as it stands now: a live rollout's phase and times are in memory."""
        live = self._live.get(record.rollout_id)
        if live is None:
            return record
        return replace(
            record,
            phase=live.course.phase,
            phase_times=live.course.times(),
            last_sequence=live.sequence,
            fork_kind=live.conductor.fork_kind if live.conductor else 0,
            attempts=live.course.attempt,
        )

    async def get(self, rollout_id: str) -> Record:
        """A rollout as it stands now; NotFound (ROLLOUT_UNKNOWN)."""
        return self.phase_of(await self.records.get(rollout_id))

    async def wait(self, rollout_id: str, timeout_s: float | None) -> Record:
        """A rollout when its end is on disk, or as it stands after `timeout_s`.

        Unavailable (END_NOT_RECORDED) when there is nothing to wait for any more: its end did not get there.
        """
        if end := self._end_of(rollout_id):
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
        """End a rollout; when this returns its sandbox is gone. One that has ended keeps its outcome.

        While the disk is full the end itself is recorded later.
        """
        await self.records.get(rollout_id)
        await self._cancel_all([rollout_id], _cancelled(reason))
        return await self.get(rollout_id)

    async def cancel_group(self, group: GroupRecord, reason: str) -> None:
        """End all rollouts of a group."""
        await self._cancel_all(group.rollout_ids, _cancelled(reason))

    @property
    def owed(self) -> tuple[str, ...]:
        """Ended rollouts that still hold something, because the other services cannot be reached."""
        return self._releases.owed

    @property
    def live_groups(self) -> int:
        """How many groups have a rollout that has not ended."""
        return len(self._groups)

    def live_phases(self) -> list[Phase]:
        """Where each rollout that has not ended stands."""
        return [live.course.phase for live in self._live.values()]

    def is_running(self, rollout_id: str) -> bool:
        """Whether a rollout has not ended, or its end is not on disk yet."""
        return self._end_of(rollout_id) is not None

    def _end_of(self, rollout_id: str) -> End | None:
        """The end of a rollout that is still to come, or to be recorded."""
        live = self._live.get(rollout_id)
        return live.end if live else self._recovering.get(rollout_id)

    async def aclose(self) -> None:
        """Cancel what runs, as DRIVER_STOPPED, and wait until all of it is released."""
        self._closing = True
        self._releases.stop()
        await self._cancel_all(list(self._live), _STOPPED)
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._releases.aclose()
        if self._calls:
            self._calls.cancel()
            await asyncio.wait([self._calls])
        await self.history.flush()

    # ------------------------------------------------------------------------------------------------------------------

    def _admit(self, record: Record, order: RolloutOrder, key: str) -> Live:
        live = Live(record, order_of(order, record.index), key, Allowance(self._most), Allowance(self._most))
        self._live[record.rollout_id] = live
        self._attempts.tell(live, PhaseChanged(Phase.QUEUED))
        return live

    async def _conduct(self, live: Live) -> Outcome:
        # On every line of this task's log, and on those of whoever it asks.
        record = live.record
        working_for(request_id=record.rollout_id, rollout_id=record.rollout_id, group_id=record.group_id)
        async with self._slots:
            return await self._attempts.conduct(live)

    async def _supervise(self, live: Live, task: asyncio.Task[Outcome]) -> None:
        """See one rollout to its end; never cancelled itself, so that every end is recorded."""
        await asyncio.wait([task])
        # A task that is cancelled before it has a slot, or between two attempts, has nothing to be released.
        if task.cancelled():
            outcome = Outcome(failure=live.cancelled or _STOPPED)
        elif error := task.exception():
            _log.error("a rollout's course broke", rollout_id=live.record.rollout_id, exc_info=error)
            # Nobody knows how far it came.
            outcome, live.owes = Outcome(failure=fault_of_the_driver(live.course.phase)), True
        else:
            outcome = task.result()
        outcome = self._tellable(outcome, live)
        self._attempts.tell_left_out(live)
        took = observing.enter(live.course, Phase.ENDED)
        self._attempts.tell(live, PhaseChanged(Phase.ENDED, took))
        live.is_over = True
        live.sequence += 1  # the outcome's, which `_finish` tells with the end
        is_result = outcome.is_result(verified=live.order.task.verifier is not None)
        try:
            await self._finish(
                live.record,
                live.end,
                live.sequence,
                outcome,
                live.course.times(),
                is_result=is_result,
                fork_kind=live.conductor.fork_kind if live.conductor else 0,
                attempts=live.course.attempt,
                owes=live.owes,
            )
        except Exception:  # noqa: BLE001 - who waits for the end is let go also when it is not on disk yet
            _log.exception("a rollout's end is not on disk", rollout_id=live.record.rollout_id)
        del self._live[live.record.rollout_id]
        live.end.come.set()
        live.end.recorded.set()
        if live.record.group_id and (watch := self._groups.get(live.record.group_id)):
            watch.ended(is_result=is_result)

    def _tellable(self, outcome: Outcome, live: Live) -> Outcome:
        """The outcome, or a fault of the driver instead of one that no reader could be told."""
        try:
            self._encode_outcome(outcome)
        except Exception:  # noqa: BLE001 - whatever is wrong with it, the rollout ends
            _log.exception("a rollout's outcome cannot be told", rollout_id=live.record.rollout_id)
            return Outcome(failure=fault_of_the_driver(live.course.phase))
        return outcome

    async def _finish(
        self,
        record: Record,
        end: End,
        sequence: int,
        outcome: Outcome,
        times: Mapping[Phase, float],
        *,
        is_result: bool,
        fork_kind: int,
        attempts: int,
        owes: bool,
    ) -> None:
        """Put the last event, number `sequence`, and the end in order, and return when they are on disk."""
        observing.ended(record, outcome)
        encoded = self._encode_outcome(outcome)
        self.history.append(record.rollout_id, record.group_id, sequence, outcome, is_summary=True)
        self.history.end(
            record.rollout_id,
            record.group_id,
            encoded,
            times,
            is_result=is_result,
            fork_kind=fork_kind,
            last_sequence=sequence,
            attempts=attempts,
            owes=owes,
        )
        try:
            await self.history.flush()
        except OperationalError:
            end.come.set()
            if owes:
                self._owe_release(record.rollout_id)
            await self._until_written()
        else:
            if owes:
                self._owe_release(record.rollout_id)

    async def _until_written(self) -> None:
        """A full disk is waited for: nobody shall take for ended what the next start would not know as such."""
        while True:
            try:
                return await self.history.flush()
            except OperationalError:  # the history waits before it tries again
                if self._closing:
                    raise

    async def _cancel_all(self, rollout_ids: Collection[str], failure: Failure) -> None:
        ends = [end for rollout_id in rollout_ids if (end := self._end_of(rollout_id))]
        for rollout_id in rollout_ids:
            if live := self._live.get(rollout_id):
                live.cancel(failure)
        for end in ends:
            await end.come.wait()

    async def _watch_group(self, group_id: str, watch: GroupWatch) -> None:
        try:
            await watch.run()
        finally:
            self._groups.pop(group_id, None)


def end_not_recorded() -> Unavailable:
    """The error of what waits for an end that the journal did not take."""
    message = "a rollout's end could not be recorded, the driver's log says why: its next start ends it"
    return Unavailable(message, reason="END_NOT_RECORDED", retry_after_s=RETRY_S)


def _cancelled(reason: str) -> Failure:
    message = f"cancelled: {reason}" if reason else "the rollout was cancelled"
    return Failure(Cause.CANCELLED, "CANCELLED", message[:1000], False, Phase.QUEUED)
