"""The sandbox service's counters; docs/guides/operate.md lists them. Imports nothing of the service."""

from __future__ import annotations

from typing import Final

from penstock_chassis.telemetry.metrics import counter, gauge, histogram

SANDBOXES: Final = gauge("penstock_sandbox_sandboxes", "Sandboxes that exist, by state", "backend", "state")
CREATION_SECONDS: Final = histogram(
    "penstock_sandbox_creation_seconds", "From a free place until a sandbox is READY", "backend"
)
CREATION_FAILURES: Final = counter(
    "penstock_sandbox_creation_failures_total", "Sandboxes whose creation failed", "backend", "reason"
)
FORKS: Final = counter(
    "penstock_sandbox_forks_total", "Sandboxes forked from a snapshot or from a live sandbox", "backend"
)
LEASES_EXPIRED: Final = counter("penstock_sandbox_leases_expired_total", "Sandboxes whose lease ended", "backend")
LOST: Final = counter("penstock_sandbox_lost_total", "Sandboxes that ended by themselves", "backend")
SNAPSHOTS: Final = gauge("penstock_sandbox_snapshots", "Snapshots in the cache")
SNAPSHOT_BYTES: Final = gauge(
    "penstock_sandbox_snapshot_bytes", "Disk space of the snapshots, where the backend reports it"
)
NODE_ROOM: Final = gauge(
    "penstock_node_room", "Sandboxes that this service admits beyond those it has; 0 while its disk is low"
)
