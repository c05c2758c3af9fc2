"""Sealed layers on E2B: snapshots under names of ours, kept while this process knows them.

Invariants: a snapshot is taken of a sandbox in which nothing of the workload runs any more; one whose making failed
half way is removed; those of an earlier process, which nobody knows any more, are removed at the start.
"""

from __future__ import annotations

import asyncio
import functools

from penstock_chassis.errors import FailedPrecondition
from penstock_sandbox.backends.base import SealedLayer
from penstock_sandbox.backends.e2b.cloud import Cloud
from penstock_sandbox.backends.e2b.equipment import end_workload
from penstock_sandbox.backends.e2b.errors import Denied, Gone
from penstock_sandbox.backends.e2b.removals import Removals
from penstock_sandbox.backends.e2b.sandbox import E2BSandbox


class Layers:
    """All sealed layers of a backend."""

    def __init__(self, cloud: Cloud, removals: Removals) -> None:
        self._cloud = cloud
        self._removals = removals
        self._snapshots: dict[str, str] = {}
        """E2B's ids, by ours."""

    def __contains__(self, layer_id: str) -> bool:
        return layer_id in self._snapshots

    def template(self, layer_id: str) -> str:
        """What to make a sandbox from, to have the layer's files."""
        return self._snapshots[layer_id]

    async def seal(self, sandbox: E2BSandbox, layer_id: str) -> SealedLayer:
        """End the sandbox and keep its files. Raises FailedPrecondition (SEAL_FAILED) or what E2B's failure means."""
        size = 0

        async def keep() -> None:
            nonlocal size
            size = await end_workload(sandbox.made, sandbox.id)
            self._snapshots[layer_id] = await self._cloud.create_snapshot(sandbox.e2b_id, layer_id)

        sandbox.keep = keep
        try:
            await sandbox.destroy()
        except (Gone, Denied):
            raise FailedPrecondition("E2B could not keep the sandbox's files", reason="SEAL_FAILED") from None
        finally:
            if layer_id not in self._snapshots:
                await self._removals.remove(layer_id, functools.partial(self._remove_named, layer_id))
        return SealedLayer(layer_id, size)

    async def remove(self, layer_id: str) -> None:
        """Remove a layer. Sandboxes made from it live on: each has a copy."""
        snapshot_id = self._snapshots.pop(layer_id, None)
        if snapshot_id is not None:
            await self._removals.remove(layer_id, functools.partial(self._cloud.delete_snapshot, snapshot_id))

    async def remove_unknown(self) -> None:
        """Remove the snapshots of this service that this process did not make."""
        known = set(self._snapshots.values())
        for snapshot_id in await self._cloud.our_snapshots():
            if snapshot_id not in known:
                await self._removals.remove(snapshot_id, functools.partial(self._cloud.delete_snapshot, snapshot_id))

    async def aclose(self) -> None:
        """Remove all of them: nobody could use them after this process."""
        await asyncio.gather(*(self.remove(layer_id) for layer_id in list(self._snapshots)))

    async def _remove_named(self, layer_id: str) -> None:
        for snapshot_id in await self._cloud.our_snapshots(layer_id):
            await self._cloud.delete_snapshot(snapshot_id)
