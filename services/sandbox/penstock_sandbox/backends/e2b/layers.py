"""Sealed layers on E2B: snapshots with our names, which outlive this process.

Invariants: a sealed snapshot is taken after all of the workload's processes have ended, and a copy of a live sandbox
has its files only. A snapshot is tried once: a failure to keep a sandbox's files does not keep the sandbox. Partial and
orphaned snapshots are removed. ``adopt`` states once which layers of earlier processes are in use; before that none is
removed, and afterwards all others of this service are, also one that E2B was still making when its service died.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import structlog

from penstock_chassis.aio.deletion import Deletions
from penstock_chassis.errors import FailedPrecondition, PenstockError
from penstock_sandbox.backends.e2b.cloud import Cloud
from penstock_sandbox.backends.e2b.errors import Denied, Gone
from penstock_sandbox.backends.e2b.provisioning import end_workload, used_bytes
from penstock_sandbox.backends.e2b.sandbox import E2BSandbox
from penstock_sandbox.domain.backend import SealedLayer

_log = structlog.get_logger(__name__)


class Layers:
    """All sealed layers of a backend."""

    def __init__(self, cloud: Cloud, removals: Deletions) -> None:
        self._cloud = cloud
        self._removals = removals
        self._snapshots: dict[str, str] = {}
        """E2B's ids, by ours."""
        self._taking: set[str] = set()
        self._adopted = False

    def __contains__(self, layer_id: str) -> bool:
        return layer_id in self._snapshots

    def template(self, layer_id: str) -> str:
        """Returns the template from which a sandbox with the layer's files is made."""
        return self._snapshots[layer_id]

    async def seal(self, sandbox: E2BSandbox, layer_id: str) -> SealedLayer:
        """Ends the sandbox and keeps its files. Raises FailedPrecondition (SEAL_FAILED) or E2B's error as ours."""
        kept: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()

        async def keep() -> None:
            try:
                size = await end_workload(sandbox.made, sandbox.id)
                snapshot_id = await self._cloud.create_snapshot(sandbox.e2b_id, layer_id)
            except (Gone, Denied, PenstockError) as error:
                # For the sealing caller alone; the sandbox's end is repeated until it succeeds.
                if not kept.cancelled():
                    kept.set_exception(error)
                return
            if kept.cancelled():
                await self._removals.delete(snapshot_id, functools.partial(self._cloud.delete_snapshot, snapshot_id))
            else:
                kept.set_result((snapshot_id, size))

        sandbox.keep = keep
        try:
            async with self._taken(layer_id):
                await sandbox.destroy()
                if not kept.done():
                    raise FailedPrecondition("the sandbox ended before its files were saved", reason="SEAL_FAILED")
                self._snapshots[layer_id], size = kept.result()
        finally:
            # Only has effect after a cancellation: the end continues, and a layer that it still makes is an orphan.
            kept.cancel()
            if not kept.cancelled():
                kept.exception()
        return SealedLayer(layer_id, size)

    async def seal_live(self, sandbox: E2BSandbox, layer_id: str) -> SealedLayer:
        """Keeps a live sandbox's files; E2B stops it meanwhile. Raises as ``seal`` does."""
        async with self._taken(layer_id), sandbox.detached():
            size = await used_bytes(sandbox.made)
            self._snapshots[layer_id] = await self._cloud.create_snapshot(sandbox.e2b_id, layer_id, files_only=True)
        return SealedLayer(layer_id, size)

    @asynccontextmanager
    async def _taken(self, layer_id: str) -> AsyncIterator[None]:
        self._taking.add(layer_id)
        try:
            yield
        except (Gone, Denied):
            # Nothing was made: E2B refused.
            raise FailedPrecondition("E2B could not save the sandbox's files", reason="SEAL_FAILED") from None
        except BaseException:
            if layer_id not in self._snapshots:
                await self._removals.delete(layer_id, functools.partial(self._remove_named, layer_id))
            raise
        finally:
            self._taking.discard(layer_id)

    async def remove(self, layer_id: str) -> None:
        """Removes a layer. Sandboxes made from it live on: each has a copy."""
        snapshot_id = self._snapshots.pop(layer_id, None)
        if snapshot_id is not None:
            await self._removals.delete(layer_id, functools.partial(self._cloud.delete_snapshot, snapshot_id))

    def forget(self, layer_id: str) -> None:
        """Forgets a layer that E2B does not have any more."""
        self._snapshots.pop(layer_id, None)

    async def adopt(self, known: Sequence[str]) -> frozenset[str]:
        """Adopts those of ``known`` that E2B still has, returns them, and removes the rest."""
        for snapshot_id, layer_id in (await self._cloud.our_snapshots()).items():
            if layer_id in known:
                self._snapshots.setdefault(layer_id, snapshot_id)
        self._adopted = True
        await self.sweep()
        return frozenset(known) & self._snapshots.keys()

    async def sweep(self) -> None:
        """Removes this service's snapshots that are not in use."""
        if not self._adopted:
            return
        for snapshot_id, layer_id in (await self._cloud.our_snapshots()).items():
            # Checked only now: it may have been made after the listing.
            if layer_id not in self._taking and self._snapshots.get(layer_id) != snapshot_id:
                _log.warning("removing a leftover", snapshot=layer_id)
                await self._removals.delete(snapshot_id, functools.partial(self._cloud.delete_snapshot, snapshot_id))

    async def _remove_named(self, layer_id: str) -> None:
        for snapshot_id, named in (await self._cloud.our_snapshots()).items():
            if named == layer_id:
                await self._cloud.delete_snapshot(snapshot_id)
