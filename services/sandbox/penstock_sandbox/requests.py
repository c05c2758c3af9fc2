"""Creating requests: the same id is the same work, and its answer is there for who asks again.

Invariants: an id with another spec is refused, never replaced (R25); a failed request may be tried again under its id;
work that its last caller gave up on is cancelled, and the call ends when that is cleaned up (R49).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from penstock_chassis.errors import Aborted, AlreadyExists, Unavailable
from penstock_sandbox.model import SandboxSpec
from penstock_sandbox.table import LiveSandbox

_TTL_S = 3600.0


@dataclass(slots=True)
class _Request:
    spec: SandboxSpec
    made: asyncio.Task[LiveSandbox]
    expires_at: float
    waiters: int = 0

    @property
    def failed(self) -> bool:
        return self.made.done() and (self.made.cancelled() or self.made.exception() is not None)


def give_up(making: asyncio.Task[LiveSandbox]) -> None:
    """Cancel a making, once, whoever gives it up and however often: its cleaning up is not to be interrupted."""
    if not making.cancelling():
        making.cancel()


class Requests:
    """What was asked for, by request id."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: dict[str, _Request] = {}
        self._draining = False

    def check_open(self) -> None:
        """Raise Unavailable (DRAINING) when the service stops."""
        if self._draining:
            raise Unavailable("this service is stopping", reason="DRAINING", retry_after_s=1.0)

    async def join(
        self, request_id: str, spec: SandboxSpec, make: Callable[[], Coroutine[Any, Any, LiveSandbox]]
    ) -> LiveSandbox:
        """What ``make`` makes, called once for an id; without an id, once for this call.

        Raises AlreadyExists (REQUEST_ID_REUSED), Aborted (DELETED_MEANWHILE), Unavailable (DRAINING), and what the
        making raises.
        """
        self._forget_old()
        request = self._known.get(request_id) if request_id else None
        if request is None:
            request = _Request(spec, asyncio.create_task(make()), self._clock() + _TTL_S)
            # Without an id nobody can come back for the answer.
            self._known[request_id or secrets.token_hex(16)] = request
        elif request.spec != spec:
            raise AlreadyExists("the request id belongs to another request", reason="REQUEST_ID_REUSED")
        return await self._wait(request)

    async def _wait(self, request: _Request) -> LiveSandbox:
        request.waiters += 1
        try:
            return await asyncio.shield(request.made)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if request.made.cancelled() and caller is not None and not caller.cancelling():
                self.check_open()
                raise Aborted("the sandbox was deleted as it was made", reason="DELETED_MEANWHILE") from None
            if request.waiters == 1 and not request.made.done():
                # The last one who wanted it gave up: whatever is half made goes away before the call ends.
                give_up(request.made)
                await asyncio.wait([request.made])
            raise
        finally:
            request.waiters -= 1
            if request.failed:
                self._forget(lambda known: known is request)

    def forget(self, sandbox_id: str) -> None:
        """The sandbox that a request made is to be deleted: asked again, the request makes another."""
        self._forget(lambda known: known.made.done() and not known.failed and known.made.result().view.id == sandbox_id)

    async def drain(self) -> None:
        """Take no more and cancel what is in progress; returns when that is cleaned up."""
        self._draining = True
        for request in list(self._known.values()):
            give_up(request.made)
        await asyncio.gather(*(request.made for request in self._known.values()), return_exceptions=True)

    def _forget_old(self) -> None:
        now = self._clock()
        self._forget(lambda known: known.expires_at < now and known.made.done())

    def _forget(self, which: Callable[[_Request], bool]) -> None:
        for key in [key for key, known in self._known.items() if which(known)]:
            del self._known[key]
