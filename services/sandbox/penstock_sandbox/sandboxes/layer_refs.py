"""Reference counts of sealed layers, and the removal of unreferenced ones.

Invariants: a layer is removed only when nothing references it; once its removal has begun no new reference is granted;
the removal is retried until it succeeds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from penstock_chassis.aio.broadcast import Signal
from penstock_chassis.aio.deletion import Deletion, Deletions
from penstock_chassis.aio.retry import Pause
from penstock_chassis.errors import NotFound
from penstock_sandbox.domain.backend import Backend


@dataclass(slots=True)
class _Leaving:
    backend: Backend
    closed: bool
    gone: Callable[[], None]
    deletion: Deletion | None = None


class LayerRefs:
    """Reference counts, and the namespace of each complete layer, by the layer's id."""

    def __init__(self, pause: Pause = asyncio.sleep) -> None:
        self._deletions = Deletions(pause=pause)
        self._holders: Counter[str] = Counter()
        self._leaving: dict[str, _Leaving] = {}
        self._namespaces: dict[str, str] = {}
        self.unused = Signal()
        """Counts the layers whose last reference was released."""

    def put_in(self, namespace: str, layer_id: str) -> None:
        """Makes a complete layer usable in a namespace, until it is removed."""
        self._namespaces[layer_id] = namespace

    def check(self, namespace: str, layer_id: str) -> None:
        """Raises NotFound (SNAPSHOT_UNKNOWN) for a layer that is not of this namespace."""
        if self._namespaces.get(layer_id) != namespace:
            raise unknown(layer_id)

    def hold(self, layer_id: str) -> None:
        """Adds a reference. Raises NotFound (SNAPSHOT_UNKNOWN) for a layer that is being removed."""
        leaving = self._leaving.get(layer_id)
        if leaving is not None and (leaving.closed or leaving.deletion is not None):
            raise unknown(layer_id)
        self._holders[layer_id] += 1

    def hold_below(self, layer_id: str) -> None:
        """Adds a reference for something made from a current holder; allowed even if the layer is closed."""
        assert self.held(layer_id)
        self._holders[layer_id] += 1

    def release(self, layer_id: str) -> None:
        """Drops one reference."""
        self._holders[layer_id] -= 1
        if not self._holders[layer_id]:
            del self._holders[layer_id]
            self._go(layer_id)
            self.unused.notify()

    def held(self, layer_id: str) -> bool:
        """Whether the layer is referenced."""
        return layer_id in self._holders

    def leave(self, layer_id: str, backend: Backend, gone: Callable[[], None], *, closed: bool) -> Deletion | None:
        """Removes a layer once nothing references it; ``closed`` refuses new references from now on.

        ``gone`` is called after the removal. Returns the removal if it could begin.
        """
        leaving = self._leaving.setdefault(layer_id, _Leaving(backend, closed, gone))
        leaving.closed |= closed
        self._go(layer_id)
        return leaving.deletion

    def _go(self, layer_id: str) -> None:
        leaving = self._leaving.get(layer_id)
        if leaving is None or leaving.deletion is not None or self.held(layer_id):
            return

        async def attempt() -> None:
            await leaving.backend.remove_layer(layer_id)
            del self._leaving[layer_id]
            self._namespaces.pop(layer_id, None)
            leaving.gone()

        leaving.deletion = self._deletions.start(f"snapshot {layer_id}", attempt)

    async def aclose(self) -> None:
        """Makes a last attempt of each removal, then stops."""
        await self._deletions.aclose()


def unknown(snapshot_id: str) -> NotFound:
    return NotFound(
        f"there is no snapshot {snapshot_id[:200]!r}", reason="SNAPSHOT_UNKNOWN", metadata={"snapshot_id": snapshot_id}
    )
