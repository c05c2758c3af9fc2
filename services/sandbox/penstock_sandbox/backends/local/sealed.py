"""The sealed layers of the local backend: files of sandboxes that are kept for others to stand on.

Invariants: a layer is immutable once sealed, and stays while a sandbox or another layer stands on it. Its files belong
to one host user, which nobody else gets as long as the layer is there.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock_chassis.errors import Internal
from penstock_sandbox.backends.base import SealedLayer
from penstock_sandbox.backends.local import copying, disk_use, layers
from penstock_sandbox.backends.local.disk_use import Use
from penstock_sandbox.backends.local.sandbox import LocalSandbox
from penstock_sandbox.backends.local.uids import UserPool


@dataclass(frozen=True, slots=True)
class _Layer:
    uid: int | None
    below: tuple[str, ...]
    use: Use


class SealedLayers:
    """Those under ``root``; ``remove_later`` removes a folder while others go on."""

    def __init__(self, root: Path, users: UserPool, remove_later: Callable[[Path], None]) -> None:
        self._root = root
        self._users = users
        self._remove_later = remove_later
        self._layers: dict[str, _Layer] = {}
        self._standing: Counter[str] = Counter()
        self._removed: set[str] = set()

    def has(self, layer_id: str) -> bool:
        """Whether sandboxes can be made from it."""
        return layer_id in self._layers and layer_id not in self._removed

    def found(self, layer_id: str) -> tuple[int | None, tuple[str, ...]]:
        """The user and the layers, lowest first, of a sandbox that stands on it."""
        layer = self._layers[layer_id]
        return layer.uid, (*layer.below, layer_id)

    def use(self, stack: Iterable[str]) -> Use:
        """What layers take on disk together."""
        return sum((self._layers[layer_id].use for layer_id in stack), Use())

    def hold(self, stack: Iterable[str]) -> None:
        """Something stands on these from here on."""
        self._standing.update(stack)

    def release(self, stack: Iterable[str]) -> None:
        """It does no longer."""
        for layer_id in stack:
            self._standing[layer_id] -= 1
            self._drop_unused(layer_id)

    async def seal(self, sandbox: LocalSandbox, layer_id: str) -> SealedLayer:
        """End a sandbox and keep its files."""
        uid, below = sandbox.uid, sandbox.layer_ids
        target = self._root / "layers" / layer_id
        # The user stays held by the layer; the sandbox's own hold ends with it.
        self._users.share(sandbox.uid)
        self.hold(sandbox.layer_ids)
        sandbox.keep_upper(target)
        try:
            await sandbox.destroy()
        except BaseException:
            # The sandbox is destroyed later, and its files are nobody's then.
            sandbox.kept_as = None
            self._users.release(sandbox.uid)
            self.release(sandbox.layer_ids)
            raise
        use = await asyncio.to_thread(disk_use.measure, target, 0, None)
        self._layers[layer_id] = _Layer(uid, below, use)
        return SealedLayer(layer_id, use.bytes)

    async def seal_live(self, sandbox: LocalSandbox, layer_id: str) -> SealedLayer:
        """Keep a copy of a live sandbox's files."""
        # Where the next start looks for leftovers, until it is whole.
        draft = self._root / "trash" / f"{layer_id}.draft"
        async with sandbox.freezing.still():
            stopped = threading.Event()
            work = asyncio.ensure_future(asyncio.to_thread(copying.copy, sandbox.upper, draft, stopped.is_set))
            try:
                await asyncio.shield(work)
                use = await asyncio.to_thread(disk_use.measure, draft, 0, None)
            except BaseException as error:
                # What the thread makes must not outlive it.
                stopped.set()
                await asyncio.wait([work])
                if not work.cancelled():
                    work.exception()  # that it was stopped is known
                self._remove_later(draft)
                if isinstance(error, OSError):
                    raise Internal(f"the files could not be copied: {error.strerror}", reason="SEAL_FAILED") from error
                raise
        draft.rename(self._root / "layers" / layer_id)
        self._users.share(sandbox.uid)
        self.hold(sandbox.layer_ids)
        self._layers[layer_id] = _Layer(sandbox.uid, sandbox.layer_ids, use)
        return SealedLayer(layer_id, use.bytes)

    def remove(self, layer_id: str) -> None:
        """Make no more sandboxes from it; its files go when nothing stands on it any more."""
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
        trashed = layers.to_trash(self._root / "layers" / layer_id, self._root / "trash")
        if trashed is not None:
            self._remove_later(trashed)
