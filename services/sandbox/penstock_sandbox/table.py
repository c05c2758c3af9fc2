"""The table of sandboxes: each one's record, how callers find it, and whether it can be worked in.

Invariants
- States only move forward: CREATING -> READY <-> PAUSED -> LOST or DELETED. Terminal states are announced once.
- A sandbox is in the table until everything of it is gone.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack

from penstock_chassis.errors import FailedPrecondition, NotFound
from penstock_sandbox.backends.base import Backend, SandboxHandle
from penstock_sandbox.backends.refusals import sandbox_lost
from penstock_sandbox.deletion import Deletion
from penstock_sandbox.model import Sandbox, State
from penstock_sandbox.processes import Processes


class LiveSandbox:
    """A sandbox's record: its view, its handle while it lives, its processes, and what it holds."""

    def __init__(self, view: Sandbox, backend: Backend, holds: ExitStack | None = None) -> None:
        self.view = view
        self.backend = backend
        self.handle: SandboxHandle | None = None
        self.processes: Processes | None = None
        self.ready_at: float | None = None
        self.holds = holds or ExitStack()
        """Given back once nothing of the sandbox is left: its place, its toolboxes, the layer that it stands on."""
        self.making: asyncio.Task[LiveSandbox] | None = None
        self.changing = asyncio.Lock()
        """Held while its backend pauses, resumes, copies, seals or destroys it: one of these at a time."""
        self.renewing = asyncio.Lock()
        self.release: Deletion | None = None
        """Destroys it and gives back what it holds; begun when it is lost or to be removed."""
        self.removal: asyncio.Task[None] | None = None
        """Takes it out of the table once it is released; begun when it is to be removed."""
        self.changed = asyncio.Event()

    def become(self, **changes: object) -> None:
        """Change the view and tell the watchers."""
        self.view = dataclasses.replace(self.view, **changes)  # type: ignore[arg-type]
        self.changed.set()
        self.changed = asyncio.Event()

    def check_lives(self) -> None:
        """Raise FailedPrecondition (SANDBOX_LOST) when it is lost, NotFound when it was deleted meanwhile."""
        if self.view.state is State.LOST:
            raise sandbox_lost(self.view.lost_reason, self.view.id)
        if self.view.state is State.DELETED:
            raise _unknown(self.view.id)


class Table:
    """All sandboxes by id."""

    def __init__(self) -> None:
        self._live: dict[str, LiveSandbox] = {}

    def __iter__(self) -> Iterator[LiveSandbox]:
        return iter(list(self._live.values()))

    def add(self, live: LiveSandbox) -> None:
        """Put a sandbox in."""
        self._live[live.view.id] = live

    def drop(self, live: LiveSandbox) -> None:
        """Take a sandbox out; one that is not there is fine."""
        self._live.pop(live.view.id, None)

    def find(self, sandbox_id: str) -> LiveSandbox | None:
        """A sandbox's record, if it is there."""
        return self._live.get(sandbox_id)

    def get(self, sandbox_id: str) -> LiveSandbox:
        """A sandbox's record. Raises NotFound (SANDBOX_UNKNOWN)."""
        live = self._live.get(sandbox_id)
        if live is None:
            raise _unknown(sandbox_id)
        return live

    def there(self, sandbox_id: str) -> tuple[LiveSandbox, SandboxHandle, Processes]:
        """A sandbox that is READY or PAUSED.

        Raises NotFound (SANDBOX_UNKNOWN), FailedPrecondition (SANDBOX_LOST, SANDBOX_NOT_READY).
        """
        live = self.get(sandbox_id)
        live.check_lives()
        if live.handle is None or live.processes is None:
            raise FailedPrecondition("the sandbox is still being made", reason="SANDBOX_NOT_READY")
        return live, live.handle, live.processes

    def usable(self, sandbox_id: str) -> tuple[LiveSandbox, SandboxHandle, Processes]:
        """A sandbox to work in. Raises as ``there`` does, and FailedPrecondition (SANDBOX_PAUSED)."""
        found = self.there(sandbox_id)
        if found[0].view.state is State.PAUSED:
            raise FailedPrecondition(
                "the sandbox is paused: resume it first",
                reason="SANDBOX_PAUSED",
                metadata={"sandbox_id": sandbox_id},
            )
        return found

    def processes(self, sandbox_id: str) -> Processes:
        """A sandbox's processes, also of a paused or lost one (their outputs and exits stay readable)."""
        live = self.get(sandbox_id)
        return live.processes if live.processes is not None else self.there(sandbox_id)[2]

    def matching(self, labels: Mapping[str, str]) -> list[Sandbox]:
        """Sandboxes with all of ``labels``, newest first."""
        found = [live.view for live in self if labels.items() <= live.view.spec.labels.items()]
        return sorted(found, key=lambda view: (view.created_at, view.id), reverse=True)

    async def watch(self, sandbox_id: str) -> AsyncIterator[Sandbox]:
        """The present state, then each change, to the terminal one."""
        live = self.get(sandbox_id)
        while True:
            changed, view = live.changed, live.view
            yield view
            if view.state.terminal:
                return
            await changed.wait()


def _unknown(sandbox_id: str) -> NotFound:
    return NotFound(
        f"there is no sandbox {sandbox_id[:200]!r}", reason="SANDBOX_UNKNOWN", metadata={"sandbox_id": sandbox_id}
    )
