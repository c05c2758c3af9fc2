"""The end of sandboxes: destroyed until that succeeded, then forgotten; also those that an earlier instance left.

Invariants
- What a sandbox holds (its place, toolboxes, the layer below it, its row in the journal) is given back once its backend
  has confirmed that nothing of it is left, and not before.
- A sandbox that is to be deleted stays in the table until then; its backend is asked again and again (R50).
- A lost sandbox is destroyed at once; its record, exits and outputs stay until its lease ends or it is deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import structlog

from penstock_sandbox.backends.base import Backend
from penstock_sandbox.deletion import Deletion, Pause
from penstock_sandbox.metrics import LOST
from penstock_sandbox.model import ENDED_INSIDE, SNAPSHOT_LABEL, Sandbox, SandboxSpec, State
from penstock_sandbox.records import Record, Records
from penstock_sandbox.table import LiveSandbox, Table

_log = structlog.get_logger(__name__)


class Removals:
    """Ends sandboxes."""

    def __init__(self, table: Table, records: Records, pause: Pause) -> None:
        self._table = table
        self._records = records
        self._pause = pause
        self._deletions: set[Deletion] = set()
        self._removals: set[asyncio.Task[None]] = set()

    async def open(self, backends: Mapping[str, Backend], lost_until: float) -> None:
        """Show what an earlier instance left as LOST until ``lost_until``, and have the backends remove it.

        Sandboxes in which it made snapshots are not shown: nobody was told of them.
        """
        records = await self._records.all()
        for name, backend in backends.items():
            left = [record for record in records if record.backend == name]
            release = self._reconcile(backend, [record.id for record in left])
            for record in left:
                if SNAPSHOT_LABEL in record.labels:
                    continue
                live = LiveSandbox(_left(record, lost_until), backend)
                live.release = release
                self._table.add(live)
        for name in sorted({record.backend for record in records} - set(backends)):
            # Their rows stay: the backend may be configured again.
            _log.error("sandboxes were left on a backend that is not there any more", backend=name)

    def _reconcile(self, backend: Backend, known: Sequence[str]) -> Deletion:
        async def attempt() -> None:
            await backend.reconcile(known)
            await self._records.erase(known)

        return self._started(Deletion(f"what was left on the {backend.name} backend", attempt, pause=self._pause))

    def release(self, live: LiveSandbox) -> Deletion:
        """Begin to destroy a sandbox and to give back what it holds, or join that."""
        if live.release is None:

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

            deletion = Deletion(f"sandbox {live.view.id}", attempt, on_failure=failed, pause=self._pause)
            live.release = self._started(deletion)
        return live.release

    def begin(self, live: LiveSandbox) -> Deletion:
        """Begin to remove a sandbox, or join that; answers the part of it that may fail."""
        release = self.release(live)
        if live.removal is None:
            if live.processes is not None:
                live.processes.condemn()
            live.removal = asyncio.create_task(self._remove(live, release), name=f"remove-{live.view.id}")
            self._removals.add(live.removal)
            live.removal.add_done_callback(self._removals.discard)
        return release

    async def remove(self, live: LiveSandbox) -> None:
        """Remove a sandbox; returns when it is gone.

        Raises Unavailable (DELETE_PENDING) when its backend failed; it is tried again all the same.
        """
        release = self.begin(live)
        await release.outcome()
        assert live.removal is not None
        await asyncio.shield(live.removal)

    async def _remove(self, live: LiveSandbox, release: Deletion) -> None:
        await release.finished()
        try:
            if live.processes is not None:
                await live.processes.aclose()
        except Exception:  # noqa: BLE001
            # What failed is a spool file or a descriptor; the sandbox itself is gone.
            _log.exception("forgetting a sandbox's processes failed", sandbox_id=live.view.id)
        finally:
            self._table.drop(live)
            if not live.view.state.terminal:
                live.become(state=State.DELETED)

    def lost(self, live: LiveSandbox, reason: str) -> None:
        """A backend tells that a sandbox ended by itself."""
        if live.view.state.terminal or live.removal is not None:
            return
        _log.warning("sandbox lost", sandbox_id=live.view.id, reason=reason)
        LOST.labels(live.backend.name).inc()
        live.become(state=State.LOST, lost_reason=reason, ended_inside=reason in ENDED_INSIDE)
        if live.handle is not None:
            self.release(live)

    def _started(self, deletion: Deletion) -> Deletion:
        self._deletions = {known for known in self._deletions if not known.done}
        self._deletions.add(deletion)
        return deletion

    async def aclose(self) -> None:
        """Wait for one attempt of each removal, then give up what is left: the next start goes on with it."""
        await asyncio.gather(*(deletion.outcome() for deletion in self._deletions), return_exceptions=True)
        # An attempt that ended well is followed by the end of its task, which must not be cut short.
        settled = [removal for removal in self._removals if not removal.done()]
        await asyncio.gather(*(deletion.aclose() for deletion in self._deletions))
        await asyncio.gather(*settled, return_exceptions=True)


def _left(record: Record, lost_until: float) -> Sandbox:
    spec = SandboxSpec(backend=record.backend, labels=record.labels)
    return Sandbox(record.id, State.LOST, spec, record.created_at, lost_until, lost_reason="SERVICE_RESTARTED")
