"""The sealed layers that sandboxes stand on: who holds which, and when one may go.

Invariants: a layer is removed only when nobody holds it; from the moment that its removal begins nobody can hold it
any more; its removal is tried until it succeeds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from penstock_chassis.errors import NotFound
from penstock_sandbox.backends.base import Backend
from penstock_sandbox.deletion import Deletion, Pause


@dataclass(slots=True)
class _Leaving:
    backend: Backend
    closed: bool
    gone: Callable[[], None]
    deletion: Deletion | None = None


class Bases:
    """Holds on layers, by the layer's id."""

    def __init__(self, pause: Pause = asyncio.sleep) -> None:
        self._pause = pause
        self._holders: Counter[str] = Counter()
        self._leaving: dict[str, _Leaving] = {}
        self.on_unused: Callable[[], None] = lambda: None
        """Told when a layer has lost its last holder."""

    def hold(self, layer_id: str) -> None:
        """Keep a layer from going. Raises NotFound (SNAPSHOT_UNKNOWN) for one that goes."""
        leaving = self._leaving.get(layer_id)
        if leaving is not None and (leaving.closed or leaving.deletion is not None):
            raise unknown(layer_id)
        self._holders[layer_id] += 1

    def hold_below(self, layer_id: str) -> None:
        """Hold what a present holder stands on, for what is made of that holder; it may be closed to others."""
        assert self.held(layer_id)
        self._holders[layer_id] += 1

    def release(self, layer_id: str) -> None:
        """Give up one hold."""
        self._holders[layer_id] -= 1
        if not self._holders[layer_id]:
            del self._holders[layer_id]
            self._go(layer_id)
            self.on_unused()

    def held(self, layer_id: str) -> bool:
        """Whether anybody holds it."""
        return layer_id in self._holders

    def leave(self, layer_id: str, backend: Backend, gone: Callable[[], None], *, closed: bool) -> Deletion | None:
        """Remove a layer once nobody holds it; ``closed`` lets nobody hold it any more from now on.

        ``gone`` is told when it is removed. Answers the removal if it could begin.
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
            leaving.gone()

        leaving.deletion = Deletion(f"snapshot {layer_id}", attempt, pause=self._pause)

    async def aclose(self) -> None:
        """Wait for one attempt of each removal in progress, then give up."""
        deletions = [leaving.deletion for leaving in self._leaving.values() if leaving.deletion is not None]
        await asyncio.gather(*(deletion.outcome() for deletion in deletions), return_exceptions=True)
        await asyncio.gather(*(deletion.aclose() for deletion in deletions))


def unknown(snapshot_id: str) -> NotFound:
    """The error for a snapshot that is not there."""
    return NotFound(
        f"there is no snapshot {snapshot_id[:200]!r}", reason="SNAPSHOT_UNKNOWN", metadata={"snapshot_id": snapshot_id}
    )
