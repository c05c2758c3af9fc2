"""What the sandbox service counts; docs/guides/operate.md lists it. Imports nothing of the service."""

from __future__ import annotations

from typing import Final

from penstock_chassis.metrics import counter, gauge, histogram

SANDBOXES: Final = gauge("penstock_sandbox_sandboxes", "Sandboxes that are not gone", "backend", "state")
CREATION_SECONDS: Final = histogram(
    "penstock_sandbox_creation_seconds", "Making a sandbox, once it has a place, until it is ready", "backend"
)
CREATION_FAILURES: Final = counter(
    "penstock_sandbox_creation_failures_total", "Sandboxes that could not be made", "backend", "reason"
)
FORKS: Final = counter("penstock_sandbox_forks_total", "Sandboxes made of a snapshot or of another sandbox", "backend")
LEASES_EXPIRED: Final = counter("penstock_sandbox_leases_expired_total", "Sandboxes whose lease ended", "backend")
LOST: Final = counter("penstock_sandbox_lost_total", "Sandboxes that ended by themselves", "backend")
SNAPSHOTS: Final = gauge("penstock_sandbox_snapshots", "Snapshots that are kept")
SNAPSHOT_BYTES: Final = gauge("penstock_sandbox_snapshot_bytes", "What the snapshots take, where their backend tells")
