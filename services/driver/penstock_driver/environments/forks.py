"""Forks of prepared states: one request, and one way to wait for room (R51)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from penstock.sandbox.v1 import sandbox_pb2
from penstock_driver.domain.ports import Sandboxes, SandboxFacts
from penstock_driver.environments.throttle import AdaptiveThrottle, never


class ThrottledForks:
    """Forks snapshots through one throttle for each backend."""

    def __init__(self, sandboxes: Sandboxes, *, waits_out_drains: bool = True) -> None:
        self._sandboxes = sandboxes
        self._throttles: defaultdict[str, AdaptiveThrottle] = defaultdict(
            lambda: AdaptiveThrottle(waits_out_drains=waits_out_drains)
        )

    async def fork(
        self,
        snapshot_id: str,
        *,
        request_id: str,
        backend: str,
        lease_s: float,
        labels: Mapping[str, str],
        patience_s: float,
        port: int = 0,
        upstream: str = "",
        repeatable: bool = False,
        allowlist: sandbox_pb2.Allowlist | None = None,
        joins: str = "",
        has_room_elsewhere: Callable[[], bool] = never,
    ) -> SandboxFacts:
        """Fork a snapshot of `backend` as in `ports.Sandboxes`; idempotent.

        Waits `patience_s` for a full service, unless another one has room, and the throttle's short limit for one that
        does not answer; then raises its last error.
        """
        return await self._throttles[backend].run(
            lambda: self._sandboxes.fork(
                snapshot_id,
                request_id=request_id,
                port=port,
                upstream=upstream,
                lease_s=lease_s,
                labels=labels,
                repeatable=repeatable,
                allowlist=allowlist,
                joins=joins,
            ),
            full_s=patience_s,
            has_room_elsewhere=has_room_elsewhere,
        )
