"""Sealed layers on E2B: snapshots under names of ours, which outlive this process.

Invariants: a sealed snapshot is taken of a sandbox in which nothing of the workload runs any more, and a copy of a live
one has its files only. Making one is tried once: that a sandbox's files cannot be kept does not keep the sandbox. What
was made half way, or for nobody any more, is removed. Which layers of earlier processes count is told once (``adopt``);
before that none is removed, and from then on every one of this service's that nobody counts, also one that E2B was
still making as its service died.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import structlog

from penstock_chassis.errors import FailedPrecondition, PenstockError
from penstock_sandbox.backends.base import SealedLayer
from penstock_sandbox.backends.e2b.cloud import Cloud
from penstock_sandbox.backends.e2b.equipment import end_workload, used_bytes
from penstock_sandbox.backends.e2b.errors import Denied, Gone
from penstock_sandbox.backends.e2b.removals import Removals
from penstock_sandbox.backends.e2b.sandbox import E2BSandbox

_log = structlog.get_logger(__name__)


class Layers:
    """All sealed layers of a backend."""

    def __init__(self, cloud: Cloud, removals: Removals) -> None:
        self._cloud = cloud
        self._removals = removals
        self._snapshots: dict[str, str] = {}
        """E2B's ids, by ours."""
        self._taking: set[str] = set()
        self._adopted = False

    def __contains__(self, layer_id: str) -> bool:
        return layer_id in self._snapshots

    def template(self, layer_id: str) -> str:
        """What to make a sandbox from, to have the layer's files."""
        return self._snapshots[layer_id]

    async def seal(self, sandbox: E2BSandbox, layer_id: str) -> SealedLayer:
        """End the sandbox and keep its files. Raises FailedPrecondition (SEAL_FAILED) or what E2B's failure means."""
        kept: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()

        async def keep() -> None:
            try:
                size = await end_workload(sandbox.made, sandbox.id)
                snapshot_id = await self._cloud.create_snapshot(sandbox.e2b_id, layer_id)
            except (Gone, Denied, PenstockError) as error:
                # For whoever seals, and not for the sandbox's end, which is repeated until it succeeds.
                if not kept.cancelled():
                    kept.set_exception(error)
                return
            if kept.cancelled():
                await self._removals.remove(snapshot_id, functools.partial(self._cloud.delete_snapshot, snapshot_id))
            else:
                kept.set_result((snapshot_id, size))

        sandbox.keep = keep
        try:
            async with self._taken(layer_id):
                await sandbox.destroy()
                if not kept.done():
                    raise FailedPrecondition("the sandbox had ended before its files were kept", reason="SEAL_FAILED")
                self._snapshots[layer_id], size = kept.result()
        finally:
            # Of no effect but when this was given up: the end goes on, and what it may still keep is nobody's.
            kept.cancel()
            if not kept.cancelled():
                kept.exception()
        return SealedLayer(layer_id, size)

    async def seal_live(self, sandbox: E2BSandbox, layer_id: str) -> SealedLayer:
        """Keep a live sandbox's files; E2B stops it for as long as that takes. Raises as ``seal`` does."""
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
            # Nothing was made: E2B refused it.
            raise FailedPrecondition("E2B could not keep the sandbox's files", reason="SEAL_FAILED") from None
        except BaseException:
            if layer_id not in self._snapshots:
                await self._removals.remove(layer_id, functools.partial(self._remove_named, layer_id))
            raise
        finally:
            self._taking.discard(layer_id)

    async def remove(self, layer_id: str) -> None:
        """Remove a layer. Sandboxes made from it live on: each has a copy."""
        snapshot_id = self._snapshots.pop(layer_id, None)
        if snapshot_id is not None:
            await self._removals.remove(layer_id, functools.partial(self._cloud.delete_snapshot, snapshot_id))

    def forget(self, layer_id: str) -> None:
        """E2B does not know it any more."""
        self._snapshots.pop(layer_id, None)

    async def adopt(self, known: Sequence[str]) -> frozenset[str]:
        """Count those of ``known`` that E2B still has, answer which, and remove the rest."""
        for snapshot_id, layer_id in (await self._cloud.our_snapshots()).items():
            if layer_id in known:
                self._snapshots.setdefault(layer_id, snapshot_id)
        self._adopted = True
        await self.sweep()
        return frozenset(known) & self._snapshots.keys()

    async def sweep(self) -> None:
        """Remove the snapshots of this service that nobody counts."""
        if not self._adopted:
            return
        for snapshot_id, layer_id in (await self._cloud.our_snapshots()).items():
            # Asked only now: it may have been made since the list was.
            if layer_id not in self._taking and self._snapshots.get(layer_id) != snapshot_id:
                _log.warning("removing a leftover", snapshot=layer_id)
                await self._removals.remove(snapshot_id, functools.partial(self._cloud.delete_snapshot, snapshot_id))

    async def _remove_named(self, layer_id: str) -> None:
        for snapshot_id, named in (await self._cloud.our_snapshots()).items():
            if named == layer_id:
                await self._cloud.delete_snapshot(snapshot_id)
