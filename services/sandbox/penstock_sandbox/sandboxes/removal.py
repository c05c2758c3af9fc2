"""Teardown of sandboxes, retried until it succeeds; also of those that an earlier instance left.

Invariants
- A sandbox's journal row is erased, and its holds (its slot, toolboxes, the layer below it) are released, only after
  its backend has confirmed that nothing of it is left.
- A sandbox stays in the table until its deletion has succeeded; failed attempts are retried (R50).
- A lost sandbox is destroyed at once; its record, exits and outputs stay until its lease ends or it is deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import structlog

from penstock_chassis.aio.deletion import Deletion, Deletions
from penstock_chassis.aio.retry import Pause
from penstock_chassis.aio.tasks import TaskOwner
from penstock_sandbox.domain.backend import Backend
from penstock_sandbox.domain.model import ENDED_INSIDE, SNAPSHOT_LABEL, Sandbox, SandboxSpec, State
from penstock_sandbox.metrics import LOST
from penstock_sandbox.sandboxes.table import SandboxEntry, Table
from penstock_sandbox.store.records import Record, Records

_log = structlog.get_logger(__name__)


class Teardowns:
    """Tears down sandboxes: *destroyed* in the backend, with their holds released; then *removed* from the table."""

    def __init__(
        self, table: Table, records: Records, pause: Pause, on_removal: Callable[[SandboxEntry], None]
    ) -> None:
        """`on_removal` is called when the removal of a sandbox begins, whatever the cause; must not raise."""
        self._table = table
        self._on_removal = on_removal
        self._records = records
        self._deletions = Deletions(pause=pause)
        self._removal_tasks = TaskOwner()

    async def open(self, backends: Mapping[str, Backend], lost_until: float) -> None:
        """Shows an earlier instance's sandboxes as LOST until ``lost_until``, and makes the backends remove them.

        Sandboxes in which snapshots were made are not shown: no caller knew of them.
        """
        records = await self._records.all()
        for name, backend in backends.items():
            left = [record for record in records if record.backend == name]
            destruction = self._reconcile(backend, [record.id for record in left])
            for record in left:
                if SNAPSHOT_LABEL in record.labels:
                    continue
                live = SandboxEntry(_left(record, lost_until), backend)
                live.destruction = destruction
                self._table.add(live)
        for name in sorted({record.backend for record in records} - set(backends)):
            # Their rows stay, in case the backend is configured again.
            _log.error("leftover sandboxes are on a backend that no longer exists", backend=name)

    def _reconcile(self, backend: Backend, known: Sequence[str]) -> Deletion:
        async def attempt() -> None:
            await backend.reconcile(known)
            await self._records.erase(known)

        return self._deletions.start(f"leftovers on the {backend.name} backend", attempt)

    def destroy(self, live: SandboxEntry) -> Deletion:
        """Starts to destroy a sandbox and to release its holds, or joins that."""
        if live.destruction is None:

            async def attempt() -> None:
                async with live.changing:
                    if live.handle is not None:
                        await live.handle.destroy()
                    else:
                        await live.backend.discard(live.view.id)
                await self._records.erase([live.view.id])
                live.holds.close()

            def failed() -> None:
                if live.removal is not None and not live.view.state.terminal:
                    live.become(state=State.LOST, lost_reason="DELETE_PENDING")

            live.destruction = self._deletions.start(f"sandbox {live.view.id}", attempt, on_failure=failed)
        return live.destruction

    def begin_removal(self, live: SandboxEntry) -> Deletion:
        """Starts to remove a sandbox, or joins that; returns the part that may fail."""
        destruction = self.destroy(live)
        if live.removal is None:
            self._on_removal(live)
            if live.processes is not None:
                live.processes.condemn()
            live.removal = self._removal_tasks.start(self._remove(live, destruction), f"remove-{live.view.id}")
        return destruction

    async def remove(self, live: SandboxEntry) -> None:
        """Removes a sandbox; returns when it is gone.

        Raises Unavailable (DELETE_PENDING) if its backend failed; retries continue.
        """
        destruction = self.begin_removal(live)
        await destruction.outcome()
        assert live.removal is not None
        await asyncio.shield(live.removal)

    async def _remove(self, live: SandboxEntry, destruction: Deletion) -> None:
        await destruction.finished()
        try:
            if live.processes is not None:
                await live.processes.aclose()
        except Exception:  # noqa: BLE001
            # A spool file or a descriptor failed; the sandbox itself is gone.
            _log.exception("deleting the records of a sandbox's processes failed", sandbox_id=live.view.id)
        finally:
            self._table.drop(live)
            if not live.view.state.terminal:
                live.become(state=State.DELETED)

    def lost(self, live: SandboxEntry, reason: str) -> None:
        """Handles a backend's report that a sandbox ended without being destroyed."""
        if live.view.state.terminal or live.removal is not None:
            return
        _log.warning("sandbox lost", sandbox_id=live.view.id, reason=reason)
        LOST.labels(live.backend.name).inc()
        live.become(state=State.LOST, lost_reason=reason, ended_inside=reason in ENDED_INSIDE)
        if live.handle is not None:
            self.destroy(live)

    async def aclose(self) -> None:
        """Makes a last attempt of each teardown, then stops; the next start continues with the rest."""
        await self._deletions.aclose()
        await self._removal_tasks.wait()


def _left(record: Record, lost_until: float) -> Sandbox:
    spec = SandboxSpec(backend=record.backend, labels=record.labels)
    return Sandbox(
        record.id,
        State.LOST,
        spec,
        record.created_at,
        lost_until,
        lost_reason="SERVICE_RESTARTED",
        namespace=record.namespace,
    )
