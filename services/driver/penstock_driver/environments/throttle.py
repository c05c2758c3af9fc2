"""Retries of requests to another service that fails for a transient reason.

`AdaptiveThrottle` limits requests that create something, one for each service or backend (R51); `patiently` retries a
single request of another kind. `Pace` spaces the creations at one sandbox service, so that a throttle's window or many
terminals do not start all at once; `Creations` measures them.

While the service is well, requests go out at once, and the window grows by one with each success. After
RESOURCE_EXHAUSTED or UNAVAILABLE all callers back off together: exponentially, with jitter, and at least as long as the
service's own RetryInfo. Then one caller probes for all. No caller waits longer than its own limit: one that would has
the service's last error at once. Other errors pass through and change nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from penstock_chassis.aio.broadcast import Signal
from penstock_chassis.aio.retry import Backoff, Delays, retry
from penstock_chassis.errors import PenstockError, ResourceExhausted, Unavailable

FIRST_WINDOW: Final = 32
"""Concurrent requests before the service has shown its capacity."""
FIRST_PAUSE_S: Final = 0.2
MOST_PAUSE_S: Final = 15.0
_JITTER: Final = 0.25
UNAVAILABLE_PATIENCE_S: Final = 10.0
"""Wait limit for a service that does not answer: its absence is reported soon (R51)."""
_OLD: Final = 0.7
"""Weight of the earlier creations in the mean."""
_DELAYS: Final = Delays(0.2, 5.0, jitter=(1.0, 1.25))
_PASSING: Final = (ResourceExhausted, Unavailable)

T = TypeVar("T")


def passes(error: PenstockError) -> bool:
    """Whether waiting may help: false for an exhausted budget of the whole run and for errors marked as permanent."""
    is_final = error.reason == "BUDGET_EXHAUSTED" or error.metadata.get("permanent") == "true"
    return isinstance(error, _PASSING) and not is_final


class AdaptiveThrottle:
    """One per service and kind of request, shared by all rollouts.

    `waits_out_drains`: whether a service that drains is waited for. Where there are others, it is not.
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
        self._changed = Signal()

    async def run(
        self, work: Callable[[], Awaitable[T]], *, full_s: float, absent_s: float = UNAVAILABLE_PATIENCE_S
    ) -> T:
        """Run `work`, retrying transient errors, and return its result.

        Raises the last error once the wait exceeds, or would exceed, its limit: `full_s` if the service is full,
        `absent_s` if it does not answer.
        """

        def patience_s(error: PenstockError) -> float:
            return full_s if isinstance(error, ResourceExhausted) else absent_s

        began = asyncio.get_running_loop().time()
        while True:
            asked = await self._place(began, patience_s)
            try:
                result = await work()
            except PenstockError as error:
                if not passes(error) or (error.reason == "DRAINING" and not self._waits_out_drains):
                    raise
                self._fails(error, asked)
                if self._opens > began + patience_s(error):
                    raise
            else:
                self._succeeds(asked)
                return result
            finally:
                self._under_way -= 1
                self._changed.notify()

    async def _place(self, began: float, patience_s: Callable[[PenstockError], float]) -> float:
        """Wait for a slot; return the time at which it was granted."""
        loop = asyncio.get_running_loop()
        while (now := loop.time()) < self._opens or self._under_way >= self._window:
            trouble, number = self._trouble, self._changed.number
            until = self._opens if now < self._opens else None
            if trouble is not None:
                limit = began + patience_s(trouble)
                if max(now, self._opens) > limit:
                    raise trouble
                until = limit if until is None else min(until, limit)
            await self._changed.wait(number, None if until is None else until - now)
        self._under_way += 1
        return now

    def _fails(self, error: PenstockError, asked: float) -> None:
        now = asyncio.get_running_loop().time()
        if self._trouble is None or asked >= self._failed_at:
            self._pause_s = self._backoff.next(error.retry_after_s)
        # Sent before the last failure: the pause is not doubled once more, only as long as this error says.
        pause = max(self._pause_s, error.retry_after_s or 0.0)
        self._trouble, self._failed_at, self._window = error, now, 1
        self._opens = max(self._opens, now + pause)

    def _succeeds(self, asked: float) -> None:
        if asked < self._failed_at:
            return  # sent before the failure: it does not show that the service has recovered
        self._backoff.reset()
        self._trouble, self._opens = None, 0.0
        self._window += 1


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


class Pace:
    """At most so many starts a second, evenly spaced with jitter; 0 = any number."""

    def __init__(self, per_s: float = 0.0) -> None:
        self._spacing = Delays(0.0, 0.0) if not per_s else Delays(1 / per_s, 1 / per_s, jitter=(1.0, 1.0 + _JITTER))
        self._next = 0.0

    async def turn(self) -> None:
        """Wait for this caller's turn. A caller that is cancelled meanwhile leaves its turn unused."""
        now = asyncio.get_running_loop().time()
        at = max(now, self._next)
        self._next = at + self._spacing.after(1)
        if at > now:
            await asyncio.sleep(at - now)


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
