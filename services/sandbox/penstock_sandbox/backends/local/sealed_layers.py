"""The sealed layers of the local backend: files of sandboxes that others are based on.

Invariants: a layer is immutable once sealed, and stays while a sandbox or another layer is based on it. Its files
belong to one host user, which is not reused while the layer exists.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock_chassis.errors import Internal
from penstock_sandbox.backends.host import copying, layers
from penstock_sandbox.backends.local.disk import usage
from penstock_sandbox.backends.local.disk.usage import Use
from penstock_sandbox.backends.local.host_users import UserPool
from penstock_sandbox.backends.local.images.bases import Base, Bases
from penstock_sandbox.backends.local.sandbox import LocalSandbox
from penstock_sandbox.domain.backend import SealedLayer


@dataclass(frozen=True, slots=True)
class _Layer:
    uid: int | None
    below: tuple[str, ...]
    use: Use
    base: Base | None


class SealedLayers:
    """The layers under ``root``; ``remove_later`` removes a folder in the background. ``bases`` are those of images."""

    def __init__(self, root: Path, users: UserPool, bases: Bases, remove_later: Callable[[Path], None]) -> None:
        self._root = root
        self._users = users
        self._bases = bases
        self._remove_later = remove_later
        self._layers: dict[str, _Layer] = {}
        self._standing: Counter[str] = Counter()
        self._removed: set[str] = set()

    def has(self, layer_id: str) -> bool:
        """Whether sandboxes can be made from it."""
        return layer_id in self._layers and layer_id not in self._removed

    def found(self, layer_id: str) -> tuple[int | None, tuple[str, ...], Base | None]:
        """Returns the user, the layers, lowest first, and the image below them, of a sandbox based on it."""
        layer = self._layers[layer_id]
        return layer.uid, (*layer.below, layer_id), layer.base

    def base(self, layer_id: str) -> Base | None:
        """Returns the image that a layer stands on, if it is one."""
        layer = self._layers.get(layer_id)
        return layer.base if layer is not None else None

    def use(self, stack: Iterable[str]) -> Use:
        """Returns the disk usage of layers together."""
        return sum((self._layers[layer_id].use for layer_id in stack), Use())

    def hold(self, stack: Iterable[str]) -> None:
        """Adds a reference to each of these."""
        self._standing.update(stack)

    def release(self, stack: Iterable[str]) -> None:
        """Drops a reference to each of these."""
        for layer_id in stack:
            self._standing[layer_id] -= 1
            self._drop_unused(layer_id)

    async def seal(self, sandbox: LocalSandbox, layer_id: str) -> SealedLayer:
        """Ends a sandbox and keeps its files. Raises FailedPrecondition (SANDBOX_LOST) if they are gone already."""
        uid, below = sandbox.uid, sandbox.layer_ids
        target = self._root / "layers" / layer_id
        # The layer keeps the user; the sandbox's own reference ends with it.
        self._users.share(sandbox.uid)
        self.hold(sandbox.layer_ids)
        if sandbox.base is not None:
            self._bases.hold(sandbox.base)
        sandbox.keep_upper(target)
        try:
            await sandbox.destroy()
            if not target.exists():
                # It had ended by itself, and the removal of its files had begun.
                raise await sandbox.lost()
        except BaseException:
            # The sandbox is destroyed later, and then its files are removed.
            sandbox.kept_as = None
            self._users.release(sandbox.uid)
            self.release(sandbox.layer_ids)
            if sandbox.base is not None:
                self._bases.release(sandbox.base)
            raise
        use = await asyncio.to_thread(usage.measure, target, 0, None)
        self._layers[layer_id] = _Layer(uid, below, use, sandbox.base)
        return SealedLayer(layer_id, use.bytes)

    async def seal_live(self, sandbox: LocalSandbox, layer_id: str) -> SealedLayer:
        """Keeps a copy of a live sandbox's files.

        Raises FailedPrecondition (SANDBOX_LOST) if it ends meanwhile, Internal (SEAL_FAILED), and what freezing raises.
        """
        # The next start looks here for leftovers, until the copy is complete.
        draft = self._root / "trash" / f"{layer_id}.draft"
        try:
            async with sandbox.being_copied, sandbox.freezing.still():
                await _copy(sandbox, draft)
            use = await asyncio.to_thread(usage.measure, draft, 0, None)
            if not sandbox.at_work:
                # Its user and its layers are released, so nothing may be made of them.
                raise await sandbox.lost()
        except BaseException as error:
            if draft.exists():
                self._remove_later(draft)
            if isinstance(error, OSError):
                if not sandbox.at_work:
                    raise await sandbox.lost() from error
                raise Internal(f"the files could not be copied: {error.strerror}", reason="SEAL_FAILED") from error
            raise
        draft.rename(self._root / "layers" / layer_id)
        self._users.share(sandbox.uid)
        self.hold(sandbox.layer_ids)
        if sandbox.base is not None:
            self._bases.hold(sandbox.base)
        self._layers[layer_id] = _Layer(sandbox.uid, sandbox.layer_ids, use, sandbox.base)
        return SealedLayer(layer_id, use.bytes)

    def remove(self, layer_id: str) -> None:
        """Refuses new sandboxes from it; removes its files when nothing is based on it any more."""
        if layer_id in self._layers:
            self._removed.add(layer_id)
            self._drop_unused(layer_id)

    def _drop_unused(self, layer_id: str) -> None:
        if layer_id not in self._removed or self._standing[layer_id]:
            return
        layer = self._layers.pop(layer_id)
        self._removed.discard(layer_id)
        self._users.release(layer.uid)
        self.release(layer.below)
        if layer.base is not None:
            self._bases.release(layer.base)
        trashed = layers.to_trash(self._root / "layers" / layer_id, self._root / "trash")
        if trashed is not None:
            self._remove_later(trashed)


async def _copy(sandbox: LocalSandbox, draft: Path) -> None:
    """Copies a frozen sandbox's files; returns, whatever the outcome, only when the copy has ended."""
    stopped = threading.Event()

    def unwanted() -> bool:
        # The removal of a sandbox that has ended waits for its copy, which nobody can use any more.
        return stopped.is_set() or not sandbox.at_work

    # No upload goes on while the sandbox is frozen: its helper begins and ends each.
    unfinished = frozenset(sandbox.unfinished)
    work = asyncio.ensure_future(asyncio.to_thread(copying.copy, sandbox.upper, draft, unwanted, unfinished))
    try:
        await asyncio.shield(work)
    except BaseException:
        # Wait for the thread, so that nothing is made after the removal.
        stopped.set()
        await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # the cancellation is known
        raise
