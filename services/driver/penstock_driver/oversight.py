"""What the driver tells operators of now: its gauges, and what it takes for trouble. It only looks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from penstock_chassis.metrics import Read, Reader
from penstock_chassis.operations import Trouble
from penstock_driver import metrics
from penstock_driver.fleet import Fleet
from penstock_driver.terminals.fleet import Terminals


class Oversight:
    """Looks at one driver."""

    def __init__(self, fleet: Fleet, terminals: Terminals) -> None:
        self._fleet = fleet
        self._terminals = terminals

    @contextmanager
    def told(self) -> Iterator[None]:
        """Inside, the gauges tell of this driver."""
        with ExitStack() as stack:
            reading: list[tuple[Read, Reader]] = [
                (metrics.ROLLOUTS, self._rollouts),
                (metrics.GROUPS, lambda: self._fleet.live_groups),
                (metrics.OWED, lambda: len(self._fleet.owed) + len(self._terminals.owed)),
                (metrics.TERMINALS, lambda: self._terminals.open_count),
            ]
            for told, read in reading:
                stack.enter_context(told.told_by(read))
            yield

    def troubles(self, _patience_s: float) -> Iterator[Trouble]:
        """What ended and still holds something: the other services could not be reached."""
        for what, owed in (("rollout", self._fleet.owed), ("terminal", self._terminals.owed)):
            if owed:
                yield Trouble(
                    "RELEASES_OWED",
                    f"{len(owed)} {what}{'s' * (len(owed) > 1)} ended and could not be released: a sandbox, or a place"
                    " at the gate, is still taken",
                    "look whether the sandbox and interception services answer; the driver goes on trying by itself",
                    subjects=owed,
                )

    def _rollouts(self) -> dict[tuple[str, ...], float]:
        return {(phase.name.lower(),): count for phase, count in Counter(self._fleet.live_phases()).items()}
