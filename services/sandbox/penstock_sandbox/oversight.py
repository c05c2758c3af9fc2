"""What the sandbox service tells operators of now: its gauges, and what it takes for trouble. It only looks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from penstock_chassis.metrics import Read, Reader
from penstock_chassis.operations import Trouble
from penstock_sandbox import metrics
from penstock_sandbox.clock import even_time
from penstock_sandbox.model import State
from penstock_sandbox.sandboxes import Sandboxes
from penstock_sandbox.snapshots import Snapshots


class Oversight:
    """Looks at the sandboxes of one service. `clock` gives seconds since the epoch."""

    def __init__(self, sandboxes: Sandboxes, snapshots: Snapshots, clock: Callable[[], float] = even_time) -> None:
        self._sandboxes = sandboxes
        self._snapshots = snapshots
        self._clock = clock

    @contextmanager
    def told(self) -> Iterator[None]:
        """Inside, the gauges tell of these."""
        with ExitStack() as stack:
            reading: list[tuple[Read, Reader]] = [
                (metrics.SANDBOXES, self._by_state),
                (metrics.SNAPSHOTS, lambda: len(self._snapshots.all())),
                (metrics.SNAPSHOT_BYTES, lambda: sum(snapshot.size for snapshot in self._snapshots.all())),
            ]
            for told, read in reading:
                stack.enter_context(told.told_by(read))
            yield

    def troubles(self, patience_s: float) -> Iterator[Trouble]:
        """A default backend that cannot work, and sandboxes that are still there though their lease ended."""
        for backend in self._sandboxes.backends():
            if backend.is_default and not backend.available:
                yield Trouble(
                    "BACKEND_UNAVAILABLE",
                    f"the {backend.name} backend, which is the default, cannot work here: {backend.unavailable_reason}",
                    "`penstock doctor` on the service's machine says what it needs; else name another default_backend",
                )
        now = self._clock()
        over = tuple(
            view.id
            for view in self._sandboxes.matching({})
            if view.state is not State.CREATING and now - view.expires_at > patience_s
        )
        if over:
            yield Trouble(
                "SANDBOXES_OVERDUE",
                f"{len(over)} sandbox{'es' * (len(over) > 1)} should be gone since their lease ended, and"
                f" {'are' if len(over) > 1 else 'is'} still there",
                "the service goes on trying; look in its log what its backend answers",
                subjects=over,
            )

    def _by_state(self) -> dict[tuple[str, ...], float]:
        counted = Counter((view.spec.backend, view.state.value) for view in self._sandboxes.matching({}))
        return {place: float(count) for place, count in counted.items()}
