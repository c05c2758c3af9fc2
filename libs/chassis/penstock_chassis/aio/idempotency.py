"""Idempotent requests: concurrent or repeated requests with one request id share one task and one result.

Invariants: a request id with other content is refused, never replaced (R25); a failed request may be repeated under
its id; when the last caller cancels, the work is cancelled and the call ends after its clean-up (R49).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from penstock_chassis.errors import Aborted, AlreadyExists, PenstockError, Unavailable

TTL_S: Final = 3600.0
KEPT: Final = 65_536

V = TypeVar("V")


@dataclass(slots=True, eq=False)
class _Request(Generic[V]):
    content: object
    task: asyncio.Task[V]
    expires_at: float
    waiters: int = 0

    @property
    def failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


def cancel_once(work: asyncio.Task[Any]) -> None:
    """Cancels a task unless it is being cancelled already, so that its clean-up is never interrupted."""
    if not work.cancelling():
        work.cancel()


def _aborted() -> PenstockError:
    return Aborted("the work of this request was cancelled", reason="CANCELLED_MEANWHILE")


class IdempotencyTable(Generic[V]):
    """Requests by request id.

    Args:
        clock: seconds; must not go back.
        ttl_s: how long a result is kept, from the first request on.
        keep: how many results are kept; the oldest is dropped first.
        cancelled: the error for callers of work that another party cancelled.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        ttl_s: float = TTL_S,
        keep: int = KEPT,
        cancelled: Callable[[], PenstockError] = _aborted,
    ) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._keep = keep
        self._cancelled = cancelled
        self._known: dict[Hashable, _Request[V]] = {}
        self._draining = False

    def check_open(self) -> None:
        """Raises Unavailable (DRAINING) when the service is stopping."""
        if self._draining:
            raise Unavailable("this service is stopping", reason="DRAINING", retry_after_s=1.0)

    async def join(self, request_id: str, content: object, work: Callable[[], Coroutine[Any, Any, V]]) -> V:
        """Returns the result of ``work``, called once per request id, or once for this call if the id is empty.

        Raises AlreadyExists (REQUEST_ID_REUSED) if the id was given with other ``content``, Unavailable (DRAINING),
        the error of ``cancelled``, and what ``work`` raises.
        """
        self._forget_old()
        request = self._known.get(request_id) if request_id else None
        if request is None:
            self.check_open()
            request = _Request(content, asyncio.create_task(work()), self._clock() + self._ttl_s)
            # Without an id no later call can ask for the result: it is known until it is there, to be cancelled.
            self._known[request_id or request] = request
            if not request_id:
                request.task.add_done_callback(lambda _, own=request: self._forget(own, own))  # type: ignore[misc]
        elif request.content != content:
            raise AlreadyExists("the request id was used for another request", reason="REQUEST_ID_REUSED")
        return await self._wait(request_id or request, request)

    async def _wait(self, key: Hashable, request: _Request[V]) -> V:
        request.waiters += 1
        try:
            return await asyncio.shield(request.task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if request.task.cancelled() and caller is not None and not caller.cancelling():
                self.check_open()
                raise self._cancelled() from None
            if request.waiters == 1 and not request.task.done():
                # The last caller was cancelled: clean up the partial work before the call ends.
                cancel_once(request.task)
                await asyncio.wait([request.task])
            raise
        finally:
            request.waiters -= 1
            if request.failed:
                self._forget(key, request)

    def forget(self, request_id: str, result: V) -> None:
        """Drops a request if it has this result, which is no longer valid, so that a repeat runs again."""
        known = self._known.get(request_id)
        if known is not None and known.task.done() and not known.failed and known.task.result() is result:
            del self._known[request_id]

    async def drain(self) -> None:
        """Refuses new requests and cancels those in progress; returns after their clean-up."""
        self._draining = True
        working = [known.task for known in self._known.values() if not known.task.done()]
        for task in working:
            cancel_once(task)
        await asyncio.gather(*working, return_exceptions=True)

    def _forget(self, key: Hashable, request: _Request[V]) -> None:
        if self._known.get(key) is request:
            del self._known[key]

    def _forget_old(self) -> None:
        now, excess = self._clock(), len(self._known) - self._keep
        old = []
        for key, known in self._known.items():  # in the order in which they expire
            if known.expires_at >= now and excess <= 0:
                break
            if known.task.done():
                old.append(key)
                excess -= 1
        for key in old:
            del self._known[key]
