"""Logs a run's metrics in the background: in their order, many in a request, none left out without an error."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Final, Self, SupportsFloat

from penstock.client.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    PenstockError,
    ResourceExhausted,
    SessionLost,
    Unavailable,
    Violation,
)
from penstock.client.transport.background import TaskOwner
from penstock.client.transport.rpc import Backoff
from penstock.driver.v1 import run_service_pb2 as pb
from penstock.values import metrics as rules

_log = logging.getLogger("penstock.metrics")

_MOST_WAITING: Final = 4 * rules.MOST_VALUES
"""Values that wait to be sent; with more, `log` waits."""
_PATIENCE_S: Final = 300.0
"""How long a driver that is away is waited for, as sessions wait for a gate."""

Send = Callable[[Sequence[pb.StepMetrics]], Awaitable[None]]


class MetricLog:
    """Logs the metrics of one run, made by `ps.runs.metric_log`. Leaving its block waits until all are on disk.

    After an error that does not pass by itself nothing more is logged: `log`, `flush` and `close` raise it.
    """

    def __init__(self, run_id: str, send: Send) -> None:
        self._run_id = run_id
        self._send = send
        self._waiting: deque[pb.StepMetrics] = deque()
        self._count = 0
        """Values that wait or are being sent."""
        self._owner = TaskOwner()
        self._sending: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()
        self._is_closing = False
        self._failure: PenstockError | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close_after(error)

    async def log(self, metrics: Mapping[str, SupportsFloat], *, step: int, time: datetime | None = None) -> None:
        """Logs metrics of a step. Returns at once; with 16,384 values that are not sent yet it waits.

        Args:
            metrics: finite numbers by name: 1 to 128 names of 1 to 128 letters, digits and `_ . / -`.
            step: 0 to 2^53 - 1, in any order. The last value that is logged of a step counts.
            time: when it was measured, with a time zone; None = now.

        Raises:
            InvalidArgument: `FIELD_INVALID`; violations name the fields, and nothing of the step is logged.
            PenstockError: earlier metrics could not be logged.
        """
        made = checked(self._run_id, metrics, step, time)
        async with self._changed:
            await self._changed.wait_for(lambda: self._failure is not None or self._count < _MOST_WAITING)
            self._raise_if_over()
            self._waiting.append(made)
            self._count += len(made.values)
            if self._sending is None:
                self._sending = self._owner.start(self._send_all(), name="penstock-metrics")

    async def flush(self) -> None:
        """Waits until all that was logged is on disk. Raises PenstockError: it could not be."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._failure is not None or not self._count)
        self._raise_if_failed()

    async def close(self) -> None:
        """As `flush`; a driver that is away is waited for a minute at most. Idempotent."""
        self._is_closing = True
        try:
            await self.flush()
        finally:
            await self._owner.close()

    async def close_after(self, error: BaseException | None) -> None:
        """As `close`; after an error its own is only noted, so that the first one is what is raised."""
        try:
            await self.close()
        except PenstockError as failure:
            if error is None:
                raise
            _log.warning("metrics of run %s were not logged: %s", self._run_id, failure)

    async def _send_all(self) -> None:
        while batch := self._next_batch():
            try:
                await self._send_patiently(batch)
            except PenstockError as error:
                await self._fail(error)
                return
            except Exception as error:
                await self._fail(Internal(f"The log of metrics failed: {error!r}", reason="SESSION_FAILED"))
                raise
            async with self._changed:
                self._count -= sum(len(one.values) for one in batch)
                self._changed.notify_all()
        self._sending = None

    async def _send_patiently(self, batch: Sequence[pb.StepMetrics]) -> None:
        backoff, loop, broke = Backoff(), asyncio.get_running_loop(), 0.0
        while True:
            try:
                await self._send(batch)
            except (Unavailable, DeadlineExceeded, ResourceExhausted) as error:
                broke = broke or loop.time()
                passes = not isinstance(error, ResourceExhausted) or error.retry_after is not None
                if not passes or self._is_closing or loop.time() - broke > _PATIENCE_S:
                    raise
                await asyncio.sleep(backoff.next(error))
            else:
                return

    def _next_batch(self) -> Sequence[pb.StepMetrics]:
        """Takes as much as one request may have, in the order in which it was logged."""
        batch: list[pb.StepMetrics] = []
        size = 0
        while self._waiting and len(batch) < rules.MOST_STEPS:
            size += len(self._waiting[0].values)
            if size > rules.MOST_VALUES:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _fail(self, error: PenstockError) -> None:
        async with self._changed:
            self._failure = error
            self._waiting.clear()
            self._changed.notify_all()

    def _raise_if_over(self) -> None:
        self._raise_if_failed()
        if self._is_closing:
            raise SessionLost("This log of metrics is closed", reason="SESSION_CLOSED")

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise self._failure


def checked(run_id: str, metrics: Mapping[str, SupportsFloat], step: int, time: datetime | None) -> pb.StepMetrics:
    """Returns the message of a step. Raises InvalidArgument `FIELD_INVALID` with every wrong field."""
    found: list[Violation] = []
    if problem := rules.run_problem(run_id):
        found.append(Violation("run_id", problem))
    values: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            values[name] = float(value)
        except (TypeError, ValueError, OverflowError):
            raise _invalid([Violation(f"values[{name!s:.64}]", f"is no number: {type(value).__name__}")]) from None
    found += [Violation(field, problem) for field, problem in rules.problems(step, values)]
    at = datetime.now(UTC) if time is None else time
    if at.tzinfo is None:
        found.append(Violation("time", "has no time zone"))
    elif at.timestamp() < 0:
        found.append(Violation("time", "is before 1970"))
    if found:
        raise _invalid(found)
    made = pb.StepMetrics(step=step, values=values)
    made.time.FromDatetime(at)
    return made


def _invalid(found: Sequence[Violation]) -> InvalidArgument:
    text = "; ".join(f"{item.field}: {item.description}" for item in found[:20])
    return InvalidArgument(text, reason="FIELD_INVALID", violations=tuple(found))
