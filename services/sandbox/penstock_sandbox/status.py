"""The sandbox service's gauges and health checks, and what is left of the machine that it runs on. Read-only."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from penstock_chassis.operations import Trouble
from penstock_chassis.telemetry.metrics import Read, Reader
from penstock_chassis.times import even_time
from penstock_sandbox import metrics
from penstock_sandbox.domain.model import State
from penstock_sandbox.sandboxes.manager import Sandboxes
from penstock_sandbox.snapshots.manager import Snapshots

_MEMORY = Path("/proc/meminfo")


class Health:
    """Observes the sandboxes of one service. `clock` returns seconds since the epoch."""

    def __init__(self, sandboxes: Sandboxes, snapshots: Snapshots, clock: Callable[[], float] = even_time) -> None:
        self._sandboxes = sandboxes
        self._snapshots = snapshots
        self._clock = clock

    @contextmanager
    def reported(self) -> Iterator[None]:
        """While the context is open, supplies the gauges' values."""
        with ExitStack() as stack:
            reading: list[tuple[Read, Reader]] = [
                (metrics.SANDBOXES, self._by_state),
                (metrics.NODE_ROOM, lambda: self._sandboxes.room),
                (metrics.SNAPSHOTS, lambda: len(self._snapshots.all())),
                (metrics.SNAPSHOT_BYTES, lambda: sum(snapshot.size for snapshot in self._snapshots.all())),
            ]
            for gauge, read in reading:
                stack.enter_context(gauge.supplied_by(read))
            yield

    def troubles(self, patience_s: float) -> Iterator[Trouble]:
        """Yields a diagnostic for an unusable default backend and one for sandboxes that outlived their lease."""
        for backend in self._sandboxes.backends():
            if backend.is_default and not backend.available:
                yield Trouble(
                    "BACKEND_UNAVAILABLE",
                    f"the default backend {backend.name} is unavailable: {backend.unavailable_reason}",
                    "run `penstock doctor` on the service's machine to see what it needs, or set another "
                    "default_backend",
                )
        now = self._clock()
        over = [
            view
            for view in self._sandboxes.table.matching({})
            if view.state is not State.CREATING and now - view.expires_at > patience_s
        ]
        if over:
            yield Trouble(
                "SANDBOXES_OVERDUE",
                f"{len(over)} sandbox{'es' * (len(over) > 1)} should be gone since their lease ended, and"
                f" {'are' if len(over) > 1 else 'is'} still there",
                "the service keeps retrying; its log has the backend's answers",
                subjects=tuple(view.id for view in over),
                owners=tuple(view.namespace for view in over),
            )

    def _by_state(self) -> dict[tuple[str, ...], float]:
        """With the default backend's that no sandbox is in: autoscalers take a gauge without values for an error."""
        default = [backend.name for backend in self._sandboxes.backends() if backend.is_default]
        counted = Counter({(name, state.value): 0 for name in default for state in State if not state.terminal})
        counted.update((view.spec.backend, view.state.value) for view in self._sandboxes.table.matching({}))
        return {place: float(count) for place, count in counted.items()}


def free_memory(path: Path = _MEMORY) -> int | None:
    """Returns the bytes of memory that new processes can have without swapping; None if the kernel does not say."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if found is None else int(found) * 1024


def busy_cpus() -> float:
    """Returns how many processes ran or waited for a processor, as the mean of the last minute."""
    return os.getloadavg()[0]
