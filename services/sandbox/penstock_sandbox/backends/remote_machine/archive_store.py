"""Archives for machines elsewhere, kept here: packed toolboxes, and layers, the changes of a prepared sandbox.

Invariants
- Nothing here outlives the service: a killed one's archives are removed at the start.
- A layer exists completely, with the digest reported by its sandbox, or not at all. It names its base: its archive
  holds only the differences from that.
- Toolboxes are packed once for all concurrent callers; a few unused ones are cached.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import shutil
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock_chassis.aio.single_flight import SingleFlight
from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.errors import FailedPrecondition, PenstockError
from penstock_sandbox.backends.guest_client.program import folders, pack
from penstock_sandbox.backends.remote_machine.archive_transfer import Archive, capture
from penstock_sandbox.backends.remote_machine.bootstrap import PreparedMachine
from penstock_sandbox.backends.remote_machine.machine import Machine
from penstock_sandbox.domain.backend import MountedToolbox, SealedLayer

_UNUSED_KEPT = 4
_Key = tuple[tuple[str, str], ...]


class MachineSandbox(Protocol):
    """A sandbox on a machine, as ``Archives.seal`` needs it."""

    place: PreparedMachine
    base: str
    """The image, or pool of machines, that it was started in."""
    keep: Callable[[], Awaitable[None]] | None
    """Run once by ``destroy``, after the link has closed and before the machine is ended."""

    @property
    def machine(self) -> Machine:
        """The machine that the sandbox runs on."""

    async def destroy(self) -> None:
        """Ends it."""


@dataclass(frozen=True, slots=True)
class _Layer:
    archive: Archive
    base: str


class Archives:
    """All archives under ``folder``; a layer may have ``layer_bytes`` of files."""

    def __init__(self, folder: Path, layer_bytes: int) -> None:
        self._folder = folder
        self._layer_bytes = layer_bytes
        self._layers: dict[str, _Layer] = {}
        self._packing: SingleFlight[_Key, Archive] = SingleFlight(keep=0, finish=True)
        self._threads = TaskOwner()
        # Least recently used first.
        self._packed: OrderedDict[_Key, Archive] = OrderedDict()
        self._users: Counter[_Key] = Counter()

    def open(self) -> None:
        """Removes what an earlier run left."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700, parents=True)

    async def aclose(self) -> None:
        """Removes everything."""
        await self._packing.aclose()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    # Layers ------------------------------------------------------------------------------------------------------

    def __contains__(self, layer_id: str) -> bool:
        return layer_id in self._layers

    def layer(self, layer_id: str) -> Archive:
        """Returns an existing layer."""
        return self._layers[layer_id].archive

    def base(self, layer_id: str) -> str:
        """Returns the image or pool that an existing layer was made in; sandboxes made from it start in the same."""
        return self._layers[layer_id].base

    async def seal(self, sandbox: MachineSandbox, layer_id: str) -> SealedLayer:
        """Ends the sandbox and keeps its changes. Raises FailedPrecondition (SEAL_FAILED)."""
        failure: PenstockError | None = None
        wanted = True

        async def keep() -> None:
            nonlocal failure
            try:
                made = await capture(sandbox.machine, sandbox.place, self._folder / layer_id, self._layer_bytes)
            except PenstockError as error:
                failure = error
                return
            self._layers[layer_id] = _Layer(made, sandbox.base)
            if not wanted:
                self._forget(layer_id)

        sandbox.keep = keep
        try:
            await sandbox.destroy()
        except BaseException:
            # The end continues in the background; the caller gets no layer.
            wanted = False
            self._forget(layer_id)
            raise
        if layer_id not in self._layers:
            raise FailedPrecondition(
                f"the sandbox's files could not be saved: {failure.message if failure else 'it had ended'}",
                reason="SEAL_FAILED",
            ) from failure
        return SealedLayer(layer_id, self._layers[layer_id].archive.size)

    async def remove(self, layer_id: str) -> None:
        """Removes a layer; idempotent. Sandboxes made from it live on: each has a copy."""
        await asyncio.to_thread(self._forget, layer_id)

    def _forget(self, layer_id: str) -> None:
        layer = self._layers.pop(layer_id, None)
        if layer is not None:
            layer.archive.path.unlink(missing_ok=True)

    # Toolboxes ---------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def packed(self, toolboxes: Sequence[MountedToolbox]) -> AsyncIterator[list[Archive]]:
        """Yields one archive of all of them (none for no toolboxes), which is kept while in use."""
        if not toolboxes:
            yield []
            return
        key = tuple(sorted((target, str(source)) for target, source in folders(toolboxes).items()))
        self._users[key] += 1  # first: one that is packed meanwhile is not trimmed
        try:
            packed = self._packed.get(key) or await self._packing.get(key, lambda: self._make(key, toolboxes))
            self._packed.move_to_end(key)
            yield [packed]
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
            self._trim()

    async def _make(self, key: _Key, toolboxes: Sequence[MountedToolbox]) -> Archive:
        target = self._folder / f"toolboxes-{secrets.token_hex(8)}"
        # The thread cannot be stopped, so nothing is removed before its end.
        packed = await self._threads.finish(asyncio.to_thread(_pack, toolboxes, target))
        self._packed[key] = packed
        return packed

    def _trim(self) -> None:
        unused = [key for key in self._packed if key not in self._users]
        for key in unused[: max(0, len(unused) - _UNUSED_KEPT)]:
            self._packed.pop(key).path.unlink(missing_ok=True)


def _pack(toolboxes: Sequence[MountedToolbox], target: Path) -> Archive:
    try:
        with target.open("w+b") as file:
            pack(toolboxes, file)
            return Archive(target, target.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
    except BaseException:
        target.unlink(missing_ok=True)
        raise
