"""Snapshots as committed images, and who stands on them.

Invariants: a layer that was removed goes as soon as nothing stands on it, neither a sandbox nor another layer, and not
before; from its removal on nobody new is put on it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from penstock_sandbox.backends.docker.prepared import ReadyImage
from penstock_sandbox.backends.docker.reaper import Reaper

REPOSITORY = "penstock-snapshot"


def name_of(layer_id: str) -> str:
    """The image that a layer is."""
    return f"{REPOSITORY}:{layer_id}"


@dataclass(frozen=True, slots=True)
class _Layer:
    image: ReadyImage
    below: tuple[str, ...]


class Layers:
    """The layers of one run, and those of earlier ones that it took over."""

    def __init__(self, reaper: Reaper) -> None:
        self._reaper = reaper
        self._layers: dict[str, _Layer] = {}
        self._users: Counter[str] = Counter()
        self._removed: set[str] = set()
        self._dropping: set[asyncio.Task[None]] = set()

    def __contains__(self, layer_id: str) -> bool:
        return layer_id in self._layers and layer_id not in self._removed

    def add(self, layer_id: str, image: ReadyImage, below: tuple[str, ...]) -> None:
        """A new layer, which takes over the hold on those below it."""
        self._layers[layer_id] = _Layer(image, below)

    def stack(self, layer_id: str) -> tuple[ReadyImage, tuple[str, ...]]:
        """A layer's image, and the layers that who stands on it must hold."""
        layer = self._layers[layer_id]
        return layer.image, (*layer.below, layer_id)

    def hold(self, layer_ids: Iterable[str]) -> None:
        """Somebody stands on these."""
        self._users.update(layer_ids)

    def release(self, layer_ids: Iterable[str]) -> None:
        """Somebody stands on these no more."""
        for layer_id in layer_ids:
            self._users[layer_id] -= 1
            self._drop_unused(layer_id)

    def remove(self, layer_id: str) -> None:
        """Let a layer go; idempotent."""
        if layer_id in self._layers:
            self._removed.add(layer_id)
            self._drop_unused(layer_id)

    def _drop_unused(self, layer_id: str) -> None:
        if layer_id not in self._removed or self._users[layer_id]:
            return
        layer = self._layers.pop(layer_id)
        self._removed.discard(layer_id)
        del self._users[layer_id]
        task = asyncio.create_task(self._reaper.image(name_of(layer_id)), name=f"drop-{layer_id}")
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)
        self.release(layer.below)

    async def aclose(self) -> None:
        """Wait for what is being removed."""
        await asyncio.gather(*self._dropping, return_exceptions=True)
