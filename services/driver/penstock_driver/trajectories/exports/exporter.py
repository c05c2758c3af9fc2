"""Exports rollouts as they end: batches of one run, each as one file per table, at a `Destination`.

Invariants
- Every rollout that ends is stored, at least once, whatever is killed when: the queue is in the journal
  (`store.exports`), and the gate keeps a capture until its rollout is stored.
- A rollout's rows of a table are in one file. A file is named NAMESPACE/RUN/DRIVER/NUMBER.TABLE.parquet, and its number
  is journalled before it is sent, so that it is sent again under its name. The table `rollouts` is sent last: once
  that file is there, the batch is whole, and is not sent again.
- Memory holds one trajectory and some of its rows; the disk one batch more. What waits while the store is away is rows
  of the journal, and captures on the gates' disks.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

import structlog

from penstock.driver.v1 import rollout_pb2
from penstock.tables.columns import Table
from penstock_chassis import times
from penstock_chassis.aio.retry import Delays, retry
from penstock_chassis.auth import acting_in
from penstock_chassis.errors import DeadlineExceeded, NotFound, PenstockError, ResourceExhausted, Unavailable
from penstock_driver import metrics
from penstock_driver.domain.ports import GATE_GONE, Captures
from penstock_driver.store.annotations import Annotations
from penstock_driver.store.event_log import EventLog
from penstock_driver.store.exports import Backlog, ExportQueue, Queued
from penstock_driver.store.records import Records
from penstock_driver.trajectories.exports.batch import Batch, clean
from penstock_driver.trajectories.exports.destination import Destination, described
from penstock_driver.trajectories.reading import whole

DELAYS: Final = Delays(1.0, 60.0, jitter=(0.75, 1.25))
"""Between attempts to send a file, and to go on after another error."""
REPORTS_AT_ONCE: Final = 8
"""Requests to gates at the same time."""
REPORT_AGAIN_S: Final = 30.0
"""how often gates that were away are asked again."""
READ_S: Final = 300.0
"""Limit of reading one trajectory."""
BROKEN_AGAIN_S: Final = 3600.0
"""How often a rollout that could not be exported for a reason of its own is tried again."""
GONE_S: Final = 86_400.0
"""How long rollouts wait for a gate that is no member any more, from when that was first found: it has the only copy of
their calls. After that they are stored without."""
_PAGE: Final = 256
_LONG: Final = 200
_TRANSIENT: Final = (Unavailable, DeadlineExceeded, ResourceExhausted)

_log = structlog.get_logger("penstock.driver")


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """A file has at most so many rollouts, and one rollout more than so many bytes; a rollout waits at most so long."""

    rollouts: int = 256
    size_bytes: int = 64 << 20
    wait_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Failing:
    """Why nothing can be stored now, and since when (seconds since the epoch)."""

    since: float
    message: str


@dataclass(frozen=True, slots=True)
class Sources:
    """What is kept of rollouts that have ended, by the driver and by the gates."""

    records: Records
    event_log: EventLog
    captures: Captures
    annotations: Annotations


class Exporter:
    """Exports what is in the queue. `run` runs beside the driver, `finish` empties the queue at its end."""

    def __init__(
        self,
        queue: ExportQueue,
        sources: Sources,
        destination: Destination,
        *,
        driver: str,
        spool: Path,
        limits: BatchLimits = BatchLimits(),
        bodies: bool = False,
        failing: Failing | None = None,
        delays: Delays = DELAYS,
    ) -> None:
        self._queue = queue
        self._records = sources.records
        self._event_log = sources.event_log
        self._captures = sources.captures
        self._annotations = sources.annotations
        self._destination = destination
        self._driver = driver
        self._spool = spool
        self._limits = limits
        self._bodies = bodies
        self._delays = delays
        self._wake = asyncio.Event()
        self._due_at: float | None = 0.0
        """When the queue is looked at next, on the loop's clock: at once, for what an earlier driver left."""
        self._broken_at = 0.0
        self._draining = False
        self._ended = 0
        """Rollouts that have ended since the last look."""
        self._idle = asyncio.Event()
        self._away: set[str] = set()
        """Gates that did not answer in this pass."""
        self._gone: dict[str, float] = {}
        """When gates were first found to be no members any more, on the loop's clock; those of rollouts
        in the queue."""
        self._missed: set[str] = set()
        """Those of them that this pass asked for."""
        self.failing = failing
        self.backlog = Backlog(0, None, ())

    @property
    def url(self) -> str:
        """URL of the directory that files are exported to."""
        return self._destination.url

    @property
    def pending(self) -> int:
        """How many rollouts are not stored yet, about: those that just ended are counted at once."""
        return self.backlog.count + self._ended

    def ended(self) -> None:
        """A rollout's end is on disk, and with it its place in the queue."""
        self._ended += 1
        self._idle.clear()
        at_once = self._draining or self._ended >= self._limits.rollouts
        self._look_in(0.0 if at_once else self._limits.wait_s)

    def drain(self, *, on: bool) -> None:
        """While the driver drains, store each rollout as it ends."""
        self._draining = on
        if on:
            self._look_in(0.0)

    async def settled(self, rollout_ids: Sequence[str], timeout_s: float) -> Sequence[str]:
        """Store these rollouts soon; return those that are not stored after a while."""
        left = await self._queue.unstored(rollout_ids)
        if left:
            self._idle.clear()
            self._look_in(0.0)
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._idle.wait()
            left = await self._queue.unstored(rollout_ids)
        return left

    async def finish(self) -> None:
        """Return when the queue is empty. `run` must run."""
        self._idle.clear()
        self.drain(on=True)
        await self._idle.wait()

    async def run(self) -> None:
        """Export without end; cancel it."""
        await self._insisting(self._begin)
        while True:
            await self._insisting(self._pass)
            await self._until_due()

    # When -------------------------------------------------------------------------------------------------------------

    def _look_in(self, seconds: float) -> None:
        at = asyncio.get_running_loop().time() + seconds
        self._due_at = at if self._due_at is None else min(at, self._due_at)
        self._wake.set()

    async def _until_due(self) -> None:
        loop = asyncio.get_running_loop()
        while self._due_at is None or loop.time() < self._due_at:
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._due_at):
                    await self._wake.wait()

    async def _insisting(self, work: Callable[[], Awaitable[None]]) -> None:
        """Work until it succeeds: after a full disk, say. What is not stored stays in the queue."""
        with acting_in(None):
            await retry(work, self._delays, patience_s=lambda _: math.inf, retry_info=False, on_retry=self._fails)

    def _fails(self, error: Exception, again_in_s: float) -> None:
        message = described(error)
        log = _log.debug if self.failing is not None and self.failing.message == message else _log.warning
        log("cannot export yet", error=message, again_in_s=round(again_in_s, 1), waiting=self.pending)
        since = time.time() if self.failing is None else self.failing.since
        self.failing = Failing(since, message)
        metrics.EXPORT_FAILURES.inc()

    # What -------------------------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        await self._destination.run(lambda: clean(self._spool))

    async def _pass(self) -> None:
        """Store what is in the queue, but for what gates have that do not answer; report to gates what is stored."""
        self._due_at, self._ended = None, 0
        self._away.clear()
        self._missed.clear()
        loop = asyncio.get_running_loop()
        if loop.time() >= self._broken_at:
            await self._queue.try_all_again()
            self._broken_at = loop.time() + BROKEN_AGAIN_S
        self.backlog = await self._queue.backlog()
        # What ends meanwhile waits for the next pass: else a busy driver would store each rollout in a file of its own.
        last = await self._queue.last()
        # Gates are informed before each file: one that fails for hours keeps nothing of theirs that is stored.
        while True:
            all_known = await self._report()
            queued = await self._queue.next(self._limits.rollouts, last, self._away)
            if not queued:
                break
            await self._export(queued)
            self.backlog = await self._queue.backlog()
        self._gone = {gate: since for gate, since in self._gone.items() if gate in self._missed}
        if not self.backlog.count:
            self.failing = None
        if self._away or not all_known:
            self._look_in(REPORT_AGAIN_S)
        if self.backlog.broken:
            self._look_in(self._broken_at - loop.time())
        if not self.backlog.count and not self._ended:
            self._idle.set()

    async def _export(self, queued: Sequence[Queued]) -> None:
        number = queued[0].file
        if number is not None and await self._destination.has(_file(self._name(queued[0], number), Table.ROLLOUTS)):
            await self._stored(queued, number)
            return
        batch = await self._destination.run(lambda: Batch(self._spool))
        try:
            taken = await self._fill(batch, queued)
            if taken is None:
                return
            left_out = [one.rollout_id for one in queued if one.file is not None and one not in taken]
            if taken or left_out:
                number = await self._queue.number([one.rollout_id for one in taken], left_out, number)
            if taken and number is not None:
                await self._send(await self._destination.run(batch.close), self._name(queued[0], number))
                await self._stored(taken, number)
        finally:
            await self._destination.run(batch.discard)

    async def _fill(self, batch: Batch, queued: Sequence[Queued]) -> Sequence[Queued] | None:
        """Add rollouts until the batch is full; return those that it has. None: one broke it."""
        taken: list[Queued] = []
        for one in queued:
            if one.gate in self._away:
                continue
            try:
                record = await self._records.get(one.rollout_id)
            except NotFound:  # deleted while the driver exported nothing
                await self._queue.done([one.rollout_id])
                continue
            try:
                # In no namespace it would reach another team's rollout of this id: this one may have been cancelled
                # before it was opened at the gate.
                with acting_in(record.namespace):
                    async with asyncio.timeout(READ_S):
                        trajectory = await whole(
                            self._captures,
                            self._annotations,
                            record,
                            include_bodies=self._bodies,
                            may_return=self._may_return,
                        )
                size = await self._destination.run(lambda found=trajectory: batch.add(found))  # type: ignore[misc]
            except _TRANSIENT as error:
                _log.info("cannot read a trajectory yet", rollout_id=one.rollout_id, gate=one.gate, error=repr(error))
                self._away.add(one.gate)
                continue
            except OSError as error:
                if not isinstance(error, TimeoutError):
                    raise  # this machine's disk: all are concerned
                await self._queue.fail(one.rollout_id, f"its trajectory could not be read within {READ_S:g} s")
                return None
            except Exception as error:  # noqa: BLE001 - one rollout's trouble must not keep the others
                _log.exception("a rollout cannot be exported", rollout_id=one.rollout_id)
                await self._queue.fail(one.rollout_id, described(error))
                return None
            taken.append(one)
            if size >= self._limits.size_bytes:
                break
        return taken

    async def _send(self, files: Mapping[Table, Path], name: str) -> None:
        for table, path in files.items():
            await retry(
                lambda path=path, table=table: self._destination.put(path, _file(name, table)),  # type: ignore[misc]
                self._delays,
                patience_s=lambda _: math.inf,
                retry_info=False,
                on_retry=self._fails,
            )
            metrics.EXPORTED_BYTES.inc(path.stat().st_size)
        self.failing = None

    async def _stored(self, stored: Sequence[Queued], number: int) -> None:
        location = f"{self.url}/{self._name(stored[0], number)}"
        ids = [one.rollout_id for one in stored]
        export = rollout_pb2.Export(location=location, time=times.timestamp(time.time()))
        await self._queue.stored(ids, export)
        metrics.EXPORTED.inc(len(ids))
        self._event_log.changed(ids)
        _log.info("exported", rollouts=len(ids), location=location)

    def _name(self, of: Queued, number: int) -> str:
        return f"{of.namespace}/{run_directory(of.run_id)}/{self._driver}/{number:08d}"

    # The gates --------------------------------------------------------------------------------------------------------

    def _may_return(self, gate: str) -> bool:
        """Whether a gate that is no member any more is still waited for."""
        now = asyncio.get_running_loop().time()
        if gate not in self._gone:
            _log.warning("a gate that has what is to be exported is no member any more", gate=gate, waits_s=GONE_S)
        self._missed.add(gate)
        return now < self._gone.setdefault(gate, now) + GONE_S

    async def _report(self) -> bool:
        """Report to gates which rollouts are stored; return whether all know it."""
        slots, all_known, after = asyncio.Semaphore(REPORTS_AT_ONCE), True, 0

        async def reported(one: Queued) -> str | None:
            async with slots:
                try:
                    with acting_in(one.namespace):  # as in `_fill`
                        await self._captures.stored(one.rollout_id, one.gates)
                except PenstockError as error:
                    if error.reason != GATE_GONE or self._may_return(error.metadata["gate"]):
                        _log.info("a gate is informed later", rollout_id=one.rollout_id, error=repr(error))
                        return None
            return one.rollout_id

        while page := await self._queue.unreported(after, _PAGE):
            after = page[-1][0]
            results = await asyncio.gather(*(reported(one) for _, one in page))
            known = [rollout_id for rollout_id in results if rollout_id is not None]
            await self._queue.done(known)
            all_known &= len(known) == len(page)
        return all_known


def _file(name: str, table: Table) -> str:
    return f"{name}.{table}.parquet"


def run_directory(run_id: str | None) -> str:
    """The directory of a run: its id, percent-encoded; "_" without one. A long one ends with its digest."""
    if run_id is None:
        return "_"
    if not run_id.strip("."):
        return run_id.replace(".", "%2E") or "%"
    name = quote(run_id, safe="")
    if run_id.startswith(("_", ".")):  # readers of tables skip such directories
        name = f"%{ord(run_id[0]):02X}{name[1:]}"
    if len(name) > _LONG:
        name = f"{name[:_LONG]}~{hashlib.sha256(run_id.encode()).hexdigest()[:32]}"
    return name
