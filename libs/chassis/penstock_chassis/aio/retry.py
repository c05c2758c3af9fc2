"""Retries: delays that double, with jitter and the other side's RetryInfo, and a call that is retried.

No library fits: they retry one function. Half of the loops here reconnect a stream, watch something or restart a
process: they need a delay that starts again after a success, and no function to call.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from typing import Final, TypeVar

RETRY_INFO_SPREAD: Final = 1.25
"""A RetryInfo is obeyed with up to a quarter more, so that callers who got the same one do not come back together."""
_DOUBLINGS: Final = 64

T = TypeVar("T")

Pause = Callable[[float], Awaitable[None]]
"""Waits for some seconds: `asyncio.sleep`, or a test's."""


@dataclass(frozen=True, slots=True)
class Delays:
    """The delays between attempts: `first_s`, doubled after each failure up to `most_s`.

    Each is multiplied by a random number from the range `jitter`: (0.5, 1.0) gives the upper half of each delay.
    """

    first_s: float
    most_s: float
    jitter: tuple[float, float] = (1.0, 1.0)

    def after(self, failures: int) -> float:
        """Returns the seconds to wait after so many failures in a row, at least 1."""
        doubled = self.first_s * 2.0 ** min(failures - 1, _DOUBLINGS)
        return min(doubled, self.most_s) * random.uniform(*self.jitter)  # noqa: S311 - jitter is no secret


class Backoff:
    """The next delay of one loop. Not shared between tasks."""

    def __init__(self, delays: Delays, *, pause: Pause = asyncio.sleep) -> None:
        self._delays = delays
        self._pause = pause
        self._failures = 0

    def reset(self) -> None:
        """Starts again with the first delay, after a success."""
        self._failures = 0

    def next(self, retry_after_s: float | None = None) -> float:
        """Returns the seconds until the next attempt, at least `retry_after_s`; the delay after it is longer."""
        self._failures += 1
        delay = self._delays.after(self._failures)
        if retry_after_s is None:
            return delay
        return max(delay, retry_after_s * random.uniform(1.0, RETRY_INFO_SPREAD))  # noqa: S311 - jitter

    async def wait(self, retry_after_s: float | None = None) -> None:
        """Waits for the next delay."""
        await self._pause(self.next(retry_after_s))


async def retry(
    work: Callable[[], Awaitable[T]],
    delays: Delays,
    *,
    patience_s: Callable[[Exception], float],
    attempts: int | None = None,
    retry_info: bool = True,
    on_retry: Callable[[Exception, float], None] = lambda error, delay_s: None,
    pause: Pause = asyncio.sleep,
) -> T:
    """Returns the result of `work`, called again after errors that may pass.

    Cancellation ends the attempt or the delay at once, also where the attempt's clean-up then fails with another error.

    Args:
        work: one attempt; may be repeated.
        delays: between attempts.
        patience_s: for an error, the seconds after the first attempt's start in which another attempt may start; 0 for
            an error that does not pass, `math.inf` for no limit.
        attempts: at most so many; None = no limit.
        retry_info: whether an error's `retry_after_s`, the other service's RetryInfo, is obeyed; False where this
            process itself wrote it for its callers.
        on_retry: called with the error and the delay in seconds before each delay.
        pause: waits for a delay.

    Raises:
        Exception: the error of the last attempt.
    """
    loop, backoff = asyncio.get_running_loop(), Backoff(delays)
    began = loop.time()
    task = asyncio.current_task()
    cancelled_before = task.cancelling() if task else 0
    for attempt in count(1):
        try:
            return await work()
        except Exception as error:
            if task and task.cancelling() > cancelled_before:
                raise asyncio.CancelledError from error
            patience = patience_s(error)
            if patience <= 0 or attempt == attempts:
                raise
            delay = backoff.next(getattr(error, "retry_after_s", None) if retry_info else None)
            if loop.time() + delay > began + patience:
                raise
            on_retry(error, delay)
        await pause(delay)
    raise AssertionError("the last attempt returns or raises")
