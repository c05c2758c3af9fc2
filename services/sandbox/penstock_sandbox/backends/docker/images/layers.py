"""Snapshots as committed images, with reference counts.

Invariants: a removed layer is deleted as soon as no sandbox and no other layer is based on it, and not before; after
its removal nothing new is based on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from penstock_chassis.aio.tasks import TaskOwner
from penstock_sandbox.backends.docker.cleanup.reaper import Reaper
from penstock_sandbox.backends.docker.images.prepared_images import ReadyImage

REPOSITORY = "penstock-snapshot"


def name_of(layer_id: str) -> str:
    return f"{REPOSITORY}:{layer_id}"


@dataclass(frozen=True, slots=True)
class _Layer:
    image: ReadyImage
    below: tuple[str, ...]


class Layers:
    """The layers of this run, and those adopted from earlier ones."""

    def __init__(self, reaper: Reaper) -> None:
        self._reaper = reaper
        self._layers: dict[str, _Layer] = {}
        self._users: Counter[str] = Counter()
        self._removed: set[str] = set()
        self._dropping = TaskOwner()

    def __contains__(self, layer_id: str) -> bool:
        return layer_id in self._layers and layer_id not in self._removed

    def add(self, layer_id: str, image: ReadyImage, below: tuple[str, ...]) -> None:
        """Adds a layer, which takes over the references to those below it."""
        self._layers[layer_id] = _Layer(image, below)

    def stack(self, layer_id: str) -> tuple[ReadyImage, tuple[str, ...]]:
        """Returns a layer's image, and the layers that a user of it must reference."""
        layer = self._layers[layer_id]
        return layer.image, (*layer.below, layer_id)

    def hold(self, layer_ids: Iterable[str]) -> None:
        """Adds a reference to each of these."""
        self._users.update(layer_ids)

    def release(self, layer_ids: Iterable[str]) -> None:
        """Drops a reference to each of these."""
        for layer_id in layer_ids:
            self._users[layer_id] -= 1
            self._drop_unused(layer_id)

    def remove(self, layer_id: str) -> None:
        """Removes a layer once it is unreferenced; idempotent."""
        if layer_id in self._layers:
            self._removed.add(layer_id)
            self._drop_unused(layer_id)

    def _drop_unused(self, layer_id: str) -> None:
        if layer_id not in self._removed or self._users[layer_id]:
            return
        layer = self._layers.pop(layer_id)
        self._removed.discard(layer_id)
        del self._users[layer_id]
        self._dropping.start(self._reaper.image(name_of(layer_id)), f"drop-{layer_id}")
        self.release(layer.below)

    async def aclose(self) -> None:
        """Waits for removals in progress."""
        await self._dropping.wait()
