"""Leases of drivers on the rollouts that they opened: a driver that is lost for good must not keep its places here.

A driver holds its leases by its stream of calls, which it has at every gate anyway, and which it opens again when it
breaks. So there is one thing less to renew, and a driver that is busy is not taken for one that is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from penstock_interception.domain.state import Rollout
from penstock_interception.gate.context import DeadlineKind, GateContext


class DriverLeases:
    """Which drivers are connected, and when the leases of the others end. Belongs to the gate."""

    def __init__(self, context: GateContext) -> None:
        self._deadlines = context.deadlines
        self._clock = context.clock
        self._lease_s = context.limits.driver_lease_s
        self._streams: Counter[str] = Counter()
        self._leased: set[str] = set()
        """Those that are not connected, and whose leases run."""

    @contextmanager
    def held(self, driver_id: str) -> Iterator[None]:
        """Holds a driver's leases while the context is open, and for `driver_lease_s` after it. "" holds nothing."""
        if not driver_id:
            yield
            return
        self._streams[driver_id] += 1
        self._deadlines.drop((DeadlineKind.DRIVER, driver_id))
        self._leased.discard(driver_id)
        try:
            yield
        finally:
            self._streams[driver_id] -= 1
            if not self._streams[driver_id]:
                del self._streams[driver_id]
                self._begin(driver_id)

    def opened(self, rollout: Rollout) -> None:
        """Begins the lease of a rollout that was opened while its driver is not connected."""
        driver_id = rollout.spec.driver_id
        if driver_id and driver_id not in self._streams:
            self._begin(driver_id)

    def restored(self, rollout: Rollout) -> None:
        """Leases a restored rollout to its driver, which is not lost until `begin_restored` begins the lease."""
        if rollout.spec.driver_id:
            self._leased.add(rollout.spec.driver_id)

    def begin_restored(self) -> None:
        """Begins the leases of all restored rollouts."""
        for driver_id in tuple(self._leased):
            self._begin(driver_id)

    def ended(self, driver_id: str) -> None:
        """The lease of a driver is over: it is lost."""
        self._leased.discard(driver_id)

    def is_lost(self, driver_id: str) -> bool:
        """Whether a driver is not connected, and its lease is over. "" is nobody's id, and always lost."""
        return driver_id not in self._streams and driver_id not in self._leased

    def _begin(self, driver_id: str) -> None:
        self._leased.add(driver_id)
        self._deadlines.set((DeadlineKind.DRIVER, driver_id), self._clock.steady() + self._lease_s)
