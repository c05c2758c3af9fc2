"""Retries of requests to another service that fails for a transient reason.

`AdaptiveThrottle` limits requests that create something, one for each service or backend (R51); `patiently` retries a
single request of another kind, and `while_full` a preparation. `Creations` measures creations.

While the service is well, requests go out at once, and the window grows by one with each success. After
RESOURCE_EXHAUSTED or UNAVAILABLE all callers back off together: exponentially, with jitter, and at least as long as the
service's own RetryInfo. Then one caller probes for all. No caller waits longer than its own limit: one that would has
the service's last error at once. Other errors pass through and change nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from penstock_chassis.aio.retry import Backoff, Delays, retry
from penstock_chassis.errors import PenstockError, ResourceExhausted, Unavailable

FIRST_WINDOW: Final = 32
"""Concurrent requests before the service has shown its capacity."""
MOST_AT_ONCE: Final = 192
"""Requests of a kind that a service has at once. It answers none faster for having more, and all other requests wait
behind them. A connection takes 256: with more than that, services refused calls when 10,000 rollouts began at once."""
FIRST_PAUSE_S: Final = 0.2
MOST_PAUSE_S: Final = 15.0
UNAVAILABLE_PATIENCE_S: Final = 10.0
"""Wait limit for a service that does not answer: its absence is reported soon (R51)."""
_JITTER: Final = 0.25
_OLD: Final = 0.7
"""Weight of the earlier creations in the mean."""
_DELAYS: Final = Delays(0.2, 5.0, jitter=(1.0, 1.25))
_PASSING: Final = (ResourceExhausted, Unavailable)

T = TypeVar("T")


def passes(error: PenstockError) -> bool:
    """Whether waiting may help: false for an exhausted budget of the whole run and for errors marked as permanent."""
    is_final = error.reason == "BUDGET_EXHAUSTED" or error.metadata.get("permanent") == "true"
    return isinstance(error, _PASSING) and not is_final


TAKES_NO_MORE: Final = frozenset({"DRAINING", "CAPTURES_FULL"})
"""Refusals of a service that drains, or is full of what was not exported yet: another one may take the attempt."""
NODE_LOST: Final = "NODE_LOST"
"""Of what one of several sandbox services has, while that one is lost: it says nothing of the others, and nobody waits
here for it."""
FULL: Final = frozenset({"SANDBOX_LIMIT", "DISK_LOW"})
"""Refusals of a sandbox service that is full: another one may take the attempt, if it has room."""


def never() -> bool:
    """Of a service beside which there is no other, and of one whose absence is waited out."""
    return False


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    granted: asyncio.Future[float]
    limit: Callable[[PenstockError], float]
    """Time of the loop up to which it waits out an error."""


class AdaptiveThrottle:
    """One per service and kind of request, shared by all rollouts.

    `waits_out_drains`: whether a service that takes no more is waited for. Where there are others, it is not.
    """

    def __init__(
        self,
        *,
        first_pause_s: float = FIRST_PAUSE_S,
        most_pause_s: float = MOST_PAUSE_S,
        waits_out_drains: bool = True,
    ) -> None:
        self._waits_out_drains = waits_out_drains
        self._backoff = Backoff(Delays(first_pause_s, most_pause_s, jitter=(1.0, 1.0 + _JITTER)))
        self._pause_s = 0.0
        self._window = FIRST_WINDOW
        self._under_way = 0
        self._opens = 0.0
        self._failed_at = 0.0
        self._trouble: PenstockError | None = None
        self._waiting: deque[_Waiting] = deque()
        self._timer: asyncio.Handle | None = None
        self._looks_at = math.inf

    async def run(
        self,
        work: Callable[[], Awaitable[T]],
        *,
        full_s: float,
        absent_s: float = UNAVAILABLE_PATIENCE_S,
        has_room_elsewhere: Callable[[], bool] = never,
    ) -> T:
        """Run `work`, retrying transient errors, and return its result.

        Raises the last error once the wait exceeds, or would exceed, its limit: `full_s` if the service is full, and at
        once if another one has room then; `absent_s` if it does not answer. Callers take their turns in the order in
        which they came.
        """
        began = asyncio.get_running_loop().time()

        def limit(error: PenstockError) -> float:
            if error.reason in FULL and has_room_elsewhere():
                return -math.inf
            is_full = isinstance(error, ResourceExhausted) or error.reason == "STREAM_REFUSED"
            return began + (full_s if is_full else absent_s)

        while True:
            asked = await self._place(limit)
            try:
                result = await work()
            except PenstockError as error:
                is_of_one = error.reason == NODE_LOST or (error.reason in TAKES_NO_MORE and not self._waits_out_drains)
                if is_of_one or not passes(error):
                    raise
                self._fails(error, asked)
                if self._opens > limit(error):
                    raise
            else:
                self._succeeds(asked)
                return result
            finally:
                self._leave()

    async def _place(self, limit: Callable[[PenstockError], float]) -> float:
        """Wait for a slot; return the time at which it was granted."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if not self._waiting and self._has_room(now):
            self._under_way += 1
            return now
        if self._trouble is not None:
            until = limit(self._trouble)
            if max(now, self._opens) > until:
                raise self._trouble
            self._look_at(min(until, self._opens) if now < self._opens else until)
        one = _Waiting(loop.create_future(), limit)
        self._waiting.append(one)
        try:
            return await one.granted
        except asyncio.CancelledError:
            if one.granted.done() and not one.granted.cancelled() and one.granted.exception() is None:
                self._leave()
            raise

    def _has_room(self, now: float) -> bool:
        return now >= self._opens and self._under_way < self._window

    def _leave(self) -> None:
        self._under_way -= 1
        self._grant(asyncio.get_running_loop().time())

    def _grant(self, now: float) -> None:
        """Give the free slots to the first that wait. The others are not woken: there may be thousands."""
        while self._waiting and self._has_room(now):
            one = self._waiting.popleft()
            if not one.granted.done():
                self._under_way += 1
                one.granted.set_result(now)

    def _look_at(self, when: float) -> None:
        """Have `_look` called then, or before."""
        if when < self._looks_at:
            if self._timer is not None:
                self._timer.cancel()
            self._looks_at = when
            self._timer = asyncio.get_running_loop().call_at(when, self._look)

    def _look(self) -> None:
        """Grant what the end of a pause allows; give the error to those whose limit has passed, or would pass."""
        self._timer, self._looks_at = None, math.inf
        now = asyncio.get_running_loop().time()
        self._grant(now)
        if self._trouble is None:
            return
        opens, kept, following = max(now, self._opens), deque[_Waiting](), list[float]()
        for one in self._waiting:
            if one.granted.done():
                continue
            limit = one.limit(self._trouble)
            if opens > limit:
                one.granted.set_exception(self._trouble)
            else:
                kept.append(one)
                following.append(limit)
        self._waiting = kept
        if kept:
            self._look_at(min(*following, opens) if now < opens else min(following))

    def _fails(self, error: PenstockError, asked: float) -> None:
        now = asyncio.get_running_loop().time()
        if self._trouble is None or asked >= self._failed_at:
            self._pause_s = self._backoff.next(error.retry_after_s)
        # Sent before the last failure: the pause is not doubled once more, only as long as this error says.
        pause = max(self._pause_s, error.retry_after_s or 0.0)
        self._trouble, self._failed_at, self._window = error, now, 1
        self._opens = max(self._opens, now + pause)
        self._look_at(now)

    def _succeeds(self, asked: float) -> None:
        if asked < self._failed_at:
            return  # sent before the failure: it does not show that the service has recovered
        self._backoff.reset()
        self._trouble, self._opens = None, 0.0
        self._window = min(self._window + 1, MOST_AT_ONCE)


async def patiently(
    work: Callable[[], Awaitable[T]],
    *,
    full_s: float = UNAVAILABLE_PATIENCE_S,
    absent_s: float = UNAVAILABLE_PATIENCE_S,
) -> T:
    """Retry transient failures: for `full_s` if the service is full, for `absent_s` if it does not answer.

    Requests that create rollout resources use a shared `AdaptiveThrottle` instead (R51).
    """

    def patience_s(error: Exception) -> float:
        if not isinstance(error, ResourceExhausted | Unavailable) or not passes(error):
            return 0.0
        return full_s if isinstance(error, ResourceExhausted) else absent_s

    return await retry(work, _DELAYS, patience_s=patience_s)


async def while_full(
    work: Callable[[], Awaitable[T]], *, full_s: float, has_room_elsewhere: Callable[[], bool] = never
) -> T:
    """Run `work` again, for `full_s` seconds, while the sandbox service is full and no other one has room.

    Raises the last error. For work that takes minutes, such as a task's setup: it would hold others up in a throttle.
    """

    def patience_s(error: Exception) -> float:
        is_full = isinstance(error, PenstockError) and error.reason in FULL and passes(error)
        return full_s if is_full and not has_room_elsewhere() else 0.0

    return await retry(work, _DELAYS, patience_s=patience_s)


class Creations:
    """How long recent creations took, with more weight on the last ones, and those under way."""

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._began: dict[object, float] = {}

    @property
    def seconds(self) -> float | None:
        """Seconds of one creation; None before the first one."""
        if not self._began:
            return self._mean_s
        under_way = asyncio.get_running_loop().time() - next(iter(self._began.values()))
        return under_way if self._mean_s is None else max(self._mean_s, under_way)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count what happens inside as one creation, unless it fails."""
        one, began = object(), asyncio.get_running_loop().time()
        self._began[one] = began
        try:
            yield
            took = asyncio.get_running_loop().time() - began
            self._mean_s = took if self._mean_s is None else _OLD * self._mean_s + (1 - _OLD) * took
        finally:
            del self._began[one]
