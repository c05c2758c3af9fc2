"""The driver's metrics; docs/guides/operate.md lists them. Imports nothing of the service."""

from __future__ import annotations

from typing import Final

from penstock_chassis.telemetry.metrics import counter, gauge, histogram

ROLLOUTS: Final = gauge("penstock_driver_rollouts", "Rollouts that have not ended", "phase")
ENDED: Final = counter(
    "penstock_driver_rollouts_ended_total", "Rollouts that ended; `completed`, or the kind of failure and the "
                                            "component at fault",
    "end", "caused_by",
)  # fmt: skip
PHASE_SECONDS: Final = histogram("penstock_driver_phase_seconds", "Time that a rollout spent in a phase", "phase")
ATTEMPTS_FAILED: Final = counter(
    "penstock_driver_attempts_failed_total", "Failed attempts of rollouts that were retried", "caused_by"
)
GROUPS: Final = gauge("penstock_driver_groups", "Groups with a rollout that has not ended")
OWED: Final = gauge(
    "penstock_driver_pending_cleanups",
    "Ended rollouts and terminals whose clean-up at the sandbox service or the gate is pending",
)
TERMINALS: Final = gauge("penstock_driver_terminals", "Terminals that are open")
QUEUE_SECONDS: Final = histogram(
    "penstock_driver_queue_seconds", "From a rollout's acceptance until it may run: it waits for others to end"
)
EXPORTS_PENDING: Final = gauge("penstock_driver_exports_pending", "Ended rollouts that are not stored yet")
EXPORTS_OLDEST: Final = gauge(
    "penstock_driver_export_oldest_seconds", "How long the oldest of them has waited; 0 without one"
)
EXPORTED: Final = counter("penstock_driver_exported_rollouts_total", "Rollouts that were stored")
EXPORTED_BYTES: Final = counter("penstock_driver_exported_bytes_total", "Bytes of the files that were sent")
EXPORT_FAILURES: Final = counter("penstock_driver_export_failures_total", "Failed attempts to store a file")
