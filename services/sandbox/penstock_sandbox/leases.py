"""Leases: whoever made a sandbox may vanish; it ends when its lease does (R50, R61).

Invariants
- A lease runs from READY: waiting for a place or for the backend costs nothing of it. Pausing does not stop it.
- No renewal reaches beyond ``max_lifetime_s`` after READY; what was granted is told.
- It runs on a clock that goes on evenly, whatever is done to the machine's (`clock.steady`); no lease outlives the
  service: what an earlier one left is LOST.
- A backend hears of a renewal before the caller does; if it fails, the lease is as it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from penstock_chassis.errors import FailedPrecondition, InvalidArgument, Violation
from penstock_sandbox.deletion import Deletion
from penstock_sandbox.metrics import LEASES_EXPIRED
from penstock_sandbox.model import State
from penstock_sandbox.table import LiveSandbox, Table

_REAP_AT_MOST_EVERY_S = 0.2

_log = structlog.get_logger(__name__)


class Leases:
    """The leases of all sandboxes, and their reaper.

    Args:
        max_lease_s: longest time from now that may be asked for.
        max_lifetime_s: hard end after READY; None = there is none.
        end: begins the removal of a sandbox.
    """

    def __init__(
        self,
        table: Table,
        max_lease_s: float,
        max_lifetime_s: float | None,
        clock: Callable[[], float],
        end: Callable[[LiveSandbox], Deletion],
    ) -> None:
        self._table = table
        self._max_lease_s = max_lease_s
        self._max_lifetime_s = max_lifetime_s
        self._clock = clock
        self._end = end
        self._moved = asyncio.Event()
        self._reaper: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Start the reaper."""
        self._reaper = asyncio.create_task(self._reap_forever(), name="lease-reaper")

    async def aclose(self) -> None:
        """Stop the reaper."""
        if self._reaper is not None:
            self._reaper.cancel()
            await asyncio.gather(self._reaper, return_exceptions=True)

    def begin(self, live: LiveSandbox, lease_s: float) -> float:
        """A sandbox is ready: its lease and its life begin now; answers the lease's end."""
        live.ready_at = self._clock()
        self._moved.set()
        return self._granted(live.ready_at, lease_s)

    async def renew(self, sandbox_id: str, lease_s: float) -> float:
        """Set the end of the lease to now + ``lease_s``, or to the end of its life if that is sooner; answers it.

        Raises InvalidArgument (INVALID_LEASE), NotFound (SANDBOX_UNKNOWN), FailedPrecondition (SANDBOX_NOT_READY).
        """
        live = self._table.get(sandbox_id)
        if not 0 < lease_s <= self._max_lease_s:
            raise InvalidArgument(
                f"lease must be positive and at most {self._max_lease_s:g} s",
                reason="INVALID_LEASE",
                violations=[Violation("lease", f"not in (0, {self._max_lease_s:g}] s")],
            )
        if live.view.state is State.CREATING:
            raise FailedPrecondition("the sandbox is still being made", reason="SANDBOX_NOT_READY")
        # One at a time: the backend must end up with the same end as the table.
        async with live.renewing:
            until = self._granted(live.ready_at, lease_s)
            if live.handle is not None and not live.view.state.terminal:
                await live.handle.renewed(until)
            if live.removal is not None:
                self._table.get(sandbox_id)  # unknown once it is gone
                live.check_lives()
            live.become(expires_at=until)
        self._moved.set()
        return until

    def _granted(self, ready_at: float | None, lease_s: float) -> float:
        until = self._clock() + lease_s
        if self._max_lifetime_s is None or ready_at is None:
            return until
        return min(until, ready_at + self._max_lifetime_s)

    def reap(self) -> list[str]:
        """Begin to delete the sandboxes whose lease has ended; answers their ids."""
        now = self._clock()
        expired = [live for live in self._leased() if live.view.expires_at <= now]
        for live in expired:
            _log.info("lease ended", sandbox_id=live.view.id)
            LEASES_EXPIRED.labels(live.backend.name).inc()
            self._end(live)
        return [live.view.id for live in expired]

    def _leased(self) -> list[LiveSandbox]:
        return [live for live in self._table if live.removal is None and live.view.state is not State.CREATING]

    async def _reap_forever(self) -> None:
        while True:
            self._moved.clear()
            ends = [live.view.expires_at for live in self._leased()]
            wait_s = max(_REAP_AT_MOST_EVERY_S, min(ends) - self._clock()) if ends else None
            try:
                async with asyncio.timeout(wait_s):
                    await self._moved.wait()
            except TimeoutError:
                pass
            try:
                self.reap()
            except Exception:  # noqa: BLE001
                # One failure must not end all reaping.
                _log.exception("reaping failed")
