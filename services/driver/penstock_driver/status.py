"""The driver's health: its gauges and its diagnostics. Read-only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from penstock_chassis.operations import Trouble
from penstock_chassis.telemetry.metrics import Read, Reader
from penstock_driver import metrics
from penstock_driver.rollouts.manager import RolloutManager
from penstock_driver.terminals.manager import TerminalManager


class Health:
    """Observes one driver."""

    def __init__(self, manager: RolloutManager, terminals: TerminalManager) -> None:
        self._manager = manager
        self._terminals = terminals

    @contextmanager
    def reported(self) -> Iterator[None]:
        """While the context is open, the gauges report this driver's values."""
        with ExitStack() as stack:
            reading: list[tuple[Read, Reader]] = [
                (metrics.ROLLOUTS, self._rollouts),
                (metrics.GROUPS, lambda: self._manager.live_groups),
                (metrics.OWED, lambda: len(self._manager.pending_cleanups) + len(self._terminals.pending_cleanups)),
                (metrics.TERMINALS, lambda: self._terminals.open_count),
            ]
            for gauge, read in reading:
                stack.enter_context(gauge.supplied_by(read))
            yield

    def troubles(self, _patience_s: float) -> Iterator[Trouble]:
        """Pending cleanups: resources of ended rollouts and episodes, because the other services are unreachable."""
        for what, pending in (
            ("rollout", self._manager.pending_cleanups),
            ("terminal", self._terminals.pending_cleanups),
        ):
            if pending:
                yield Trouble(
                    "RELEASES_OWED",
                    f"{len(pending)} {what}{'s' * (len(pending) > 1)} ended with pending clean-up: a sandbox, or a "
                    "place at the gate, is still in use",
                    "check that the sandbox and interception services answer; the driver keeps retrying",
                    subjects=pending,
                )

    def _rollouts(self) -> dict[tuple[str, ...], float]:
        return {(phase.name.lower(),): count for phase, count in Counter(self._manager.live_phases()).items()}
