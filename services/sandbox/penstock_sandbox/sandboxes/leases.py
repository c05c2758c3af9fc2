"""Leases: a sandbox ends when its lease does, even if its creator has vanished (R50, R61).

Invariants
- A lease starts at READY: waiting for a slot or for the backend uses none of it. Pausing does not stop it.
- No renewal extends beyond ``max_lifetime_s`` after READY; callers get the end that was granted.
- Its clock advances evenly even if the machine's clock is set (`times.even_time`). No lease outlives the service:
  sandboxes of an earlier instance are LOST.
- The backend applies a renewal before the caller gets its response; if the backend fails, the lease is unchanged.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import structlog

from penstock_chassis.aio.broadcast import Signal
from penstock_chassis.errors import FailedPrecondition
from penstock_chassis.validation import invalid_field
from penstock_sandbox.domain.model import State
from penstock_sandbox.metrics import LEASES_EXPIRED
from penstock_sandbox.sandboxes.removal import Teardowns
from penstock_sandbox.sandboxes.table import SandboxEntry, Table

_REAP_AT_MOST_EVERY_S = 0.2

_log = structlog.get_logger(__name__)


class Leases:
    """The leases of all sandboxes, and their reaper.

    Args:
            max_lease_s: maximum requested lease, from now.
            max_lifetime_s: hard end after READY; None = no limit.
    """

    def __init__(
        self,
        table: Table,
        teardowns: Teardowns,
        max_lease_s: float,
        max_lifetime_s: float | None,
        clock: Callable[[], float],
    ) -> None:
        self._table = table
        self._teardowns = teardowns
        self._max_lease_s = max_lease_s
        self._max_lifetime_s = max_lifetime_s
        self._clock = clock
        self._next = math.inf
        """When the reaper looks again: no lease ends before, one that was extended since may end later."""
        self._sooner = Signal()
        self._reaper: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Starts the reaper. The first look finds what an earlier instance left."""
        self._next = self._clock()
        self._reaper = asyncio.create_task(self._reap_forever(), name="lease-reaper")

    async def aclose(self) -> None:
        """Stops the reaper."""
        if self._reaper is not None:
            self._reaper.cancel()
            await asyncio.gather(self._reaper, return_exceptions=True)

    def begin(self, live: SandboxEntry, lease_s: float) -> float:
        """Starts the lease and the lifetime of a sandbox that became ready; returns the lease's end."""
        live.ready_at = self._clock()
        until = self._granted(live.ready_at, lease_s)
        self._look_at(until)
        return until

    async def renew(self, sandbox_id: str, lease_s: float) -> float:
        """Sets the lease's end to now + ``lease_s``, or to the end of its lifetime if sooner; returns it.

        Raises InvalidArgument (FIELD_INVALID), NotFound (SANDBOX_UNKNOWN: also while it is being removed),
        FailedPrecondition (SANDBOX_NOT_READY; SANDBOX_LOST while a lost sandbox is being removed; LEASE_REFUSED if its
        provider does not keep it for so long).
        """
        live = self._table.get(sandbox_id)
        if not 0 < lease_s <= self._max_lease_s:
            raise invalid_field("lease", f"must be positive and at most {self._max_lease_s:g} s")
        if live.view.state is State.CREATING:
            raise FailedPrecondition("the sandbox is still being created", reason="SANDBOX_NOT_READY")
        # One renewal at a time: backend and table must end up with the same lease end.
        async with live.renewing:
            _check_stays(live)
            until = self._granted(live.ready_at, lease_s)
            if live.handle is not None and not live.view.state.terminal:
                await live.handle.renewed(until)
                _check_stays(live)
            live.become(expires_at=until)
        self._look_at(until)
        return until

    def _granted(self, ready_at: float | None, lease_s: float) -> float:
        until = self._clock() + lease_s
        if self._max_lifetime_s is None or ready_at is None:
            return until
        return min(until, ready_at + self._max_lifetime_s)

    def _look_at(self, end: float) -> None:
        # The start or the renewal of a lease looks at no other: there may be thousands.
        if end < self._next:
            self._next = end
            self._sooner.notify()

    def reap(self) -> list[str]:
        """Starts to delete the sandboxes whose lease has ended; returns their ids."""
        now = self._clock()
        expired, self._next = list[SandboxEntry](), math.inf
        for live in self._table:
            if live.removal is not None or live.view.state is State.CREATING:
                continue
            if live.view.expires_at <= now:
                expired.append(live)
            else:
                self._next = min(self._next, live.view.expires_at)
        for live in expired:
            _log.info("lease ended", sandbox_id=live.view.id)
            LEASES_EXPIRED.labels(live.backend.name).inc()
            self._teardowns.begin_removal(live)
        return [live.view.id for live in expired]

    async def _reap_forever(self) -> None:
        while True:
            number = self._sooner.number
            wait_s = max(_REAP_AT_MOST_EVERY_S, self._next - self._clock()) if self._next < math.inf else None
            if await self._sooner.wait(number, wait_s):
                continue
            try:
                self.reap()
            except Exception:  # noqa: BLE001
                # One failure must not stop the reaper.
                _log.exception("reaping failed")
                self._next = self._clock()


def _check_stays(live: SandboxEntry) -> None:
    """Raises for a sandbox whose removal has begun, which no renewal stops. A lost one stays until its lease ends."""
    if live.removal is not None:
        live.check_lives()
