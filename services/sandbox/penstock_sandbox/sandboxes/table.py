"""The sandbox registry: each sandbox's record, lookups, and checks that it can be used.

Invariants
- States only move forward: CREATING -> READY <-> PAUSED -> LOST or DELETED. Terminal states are announced once.
- A sandbox is in the table until all of it is gone.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack

from penstock_chassis.aio.broadcast import Signal
from penstock_chassis.aio.deletion import Deletion
from penstock_chassis.errors import FailedPrecondition, NotFound
from penstock_sandbox.domain.backend import Backend, SandboxHandle
from penstock_sandbox.domain.errno import sandbox_lost
from penstock_sandbox.domain.model import Sandbox, State
from penstock_sandbox.processes.manager import Processes


class SandboxEntry:
    """A sandbox's record: its view, its handle and processes once it is made (kept to the end), and its holds."""

    def __init__(
        self, view: Sandbox, backend: Backend, holds: ExitStack | None = None, *, request_id: str = ""
    ) -> None:
        self.view = view
        self.backend = backend
        self.request_id = request_id
        """The request that created it; empty if that had none, or was an earlier instance's."""
        self.handle: SandboxHandle | None = None
        self.processes: Processes | None = None
        self.ready_at: float | None = None
        self.holds = holds or ExitStack()
        """Released when nothing of the sandbox is left: its slot, its toolboxes, the layer below it."""
        self.creation: asyncio.Task[SandboxEntry] | None = None
        self.changing = asyncio.Lock()
        """Serializes the backend's pause, resume, copy, seal and destroy of this sandbox."""
        self.renewing = asyncio.Lock()
        self.destruction: Deletion | None = None
        """Destroys it and releases its holds; begun when it is lost or to be removed."""
        self.removal: asyncio.Task[None] | None = None
        """Takes it out of the table after its destruction; begun when it is to be removed."""
        self.changed = Signal()

    def become(self, **changes: object) -> None:
        """Changes the view and notifies the watchers."""
        self.view = dataclasses.replace(self.view, **changes)  # type: ignore[arg-type]
        self.changed.notify()

    def check_lives(self) -> None:
        """Raises FailedPrecondition (SANDBOX_LOST) if it is lost, NotFound if it was deleted or is being removed."""
        if self.view.state is State.LOST:
            raise sandbox_lost(self.view.lost_reason, self.view.id)
        if self.view.state is State.DELETED or self.removal is not None:
            raise unknown(self.view.id)


class Table:
    """All sandboxes by id."""

    def __init__(self) -> None:
        self._live: dict[str, SandboxEntry] = {}
        self._labelled: dict[tuple[str, str], dict[str, SandboxEntry]] = {}
        """By label: each rollout ends with a deletion by label, which reads no others'."""

    def __iter__(self) -> Iterator[SandboxEntry]:
        return iter(list(self._live.values()))

    @property
    def count(self) -> int:
        """Number of sandboxes, with those that are being made and removed."""
        return len(self._live)

    def add(self, live: SandboxEntry) -> None:
        self._live[live.view.id] = live
        for label in live.view.spec.labels.items():
            self._labelled.setdefault(label, {})[live.view.id] = live

    def drop(self, live: SandboxEntry) -> None:
        """Removes a sandbox; an absent one is ignored."""
        gone = self._live.pop(live.view.id, None)
        if gone is None:
            return
        for label in gone.view.spec.labels.items():
            labelled = self._labelled[label]
            del labelled[gone.view.id]
            if not labelled:
                del self._labelled[label]

    def find(self, sandbox_id: str, namespace: str | None = None) -> SandboxEntry | None:
        """Returns a sandbox's record; None if a namespace (None: any) has no such sandbox."""
        live = self._live.get(sandbox_id)
        return live if live is None or namespace in (None, live.view.namespace) else None

    def get(self, sandbox_id: str, namespace: str | None = None) -> SandboxEntry:
        """Returns a sandbox's record. Raises NotFound (SANDBOX_UNKNOWN) if a namespace (None: any) has no such one."""
        live = self.find(sandbox_id, namespace)
        if live is None:
            raise unknown(sandbox_id)
        return live

    def there(self, sandbox_id: str, namespace: str | None = None) -> tuple[SandboxEntry, SandboxHandle, Processes]:
        """Returns a sandbox of a namespace (None: of any) that is READY or PAUSED.

        Raises NotFound (SANDBOX_UNKNOWN), FailedPrecondition (SANDBOX_LOST, SANDBOX_NOT_READY).
        """
        live = self.get(sandbox_id, namespace)
        live.check_lives()
        if live.handle is None or live.processes is None:
            raise FailedPrecondition("the sandbox is still being created", reason="SANDBOX_NOT_READY")
        return live, live.handle, live.processes

    def usable(self, sandbox_id: str) -> tuple[SandboxEntry, SandboxHandle, Processes]:
        """Returns a READY sandbox. Raises as ``there`` does, and FailedPrecondition (SANDBOX_PAUSED)."""
        found = self.there(sandbox_id)
        if found[0].view.state is State.PAUSED:
            raise FailedPrecondition(
                "the sandbox is paused: resume it first",
                reason="SANDBOX_PAUSED",
                metadata={"sandbox_id": sandbox_id},
            )
        return found

    def processes(self, sandbox_id: str) -> Processes:
        """Returns a sandbox's processes, also if it is paused or lost (outputs and exits stay readable)."""
        live = self.get(sandbox_id)
        return live.processes if live.processes is not None else self.there(sandbox_id)[2]

    def matching(self, labels: Mapping[str, str], namespace: str | None = None) -> list[Sandbox]:
        """Returns the sandboxes of a namespace (None: of all) with all of ``labels``, newest first."""
        fewest = min((self._labelled.get(label, {}) for label in labels.items()), key=len, default=self._live)
        found = [
            live.view
            for live in fewest.values()
            if namespace in (None, live.view.namespace) and labels.items() <= live.view.spec.labels.items()
        ]
        return sorted(found, key=lambda view: (view.created_at, view.id), reverse=True)

    async def watch(self, sandbox_id: str) -> AsyncIterator[Sandbox]:
        """Yields the present state, then each change, up to the terminal one."""
        live = self.get(sandbox_id)
        while True:
            number, view = live.changed.number, live.view
            yield view
            if view.state.terminal:
                return
            await live.changed.wait(number)


def unknown(sandbox_id: str) -> NotFound:
    return NotFound(
        f"there is no sandbox {sandbox_id[:200]!r}", reason="SANDBOX_UNKNOWN", metadata={"sandbox_id": sandbox_id}
    )
