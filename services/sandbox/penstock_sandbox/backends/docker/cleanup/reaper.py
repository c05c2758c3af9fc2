"""Removes this backend's objects of a daemon: at once, by retries, and what an earlier run left.

Purpose: every container, image and volume carries the label of the instance (one state directory, permanent) and of the
run (one start of the service). Objects of this instance and another run are orphans, except valid snapshots:
``snapshots`` names those, and until it is set all snapshots are kept.

Invariants
- Only objects with this instance's label are removed.
- A requested removal is carried out, even if its caller is cancelled, and before the service ends.
- A failed removal is retried forever, at growing intervals. Only the service's end waits for it, for a while.
- With a runtime chosen by the operator, leftover processes of removed containers are ended too, and those of containers
  that the daemon cannot remove (``leftovers``).
- The daemon may still be executing requests of a killed service, so orphans are searched for repeatedly.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from penstock_chassis.aio.deletion import Deletions
from penstock_chassis.aio.retry import Backoff, Delays
from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.errors import PenstockError
from penstock_sandbox.backends.docker.cleanup import leftovers
from penstock_sandbox.backends.docker.engine.daemon import Daemon
from penstock_sandbox.backends.docker.engine.errors import Json, Missing, Refused

INSTANCE = "penstock.instance"
RUN = "penstock.run"
KIND = "penstock.kind"
SANDBOX = "penstock.sandbox"
SNAPSHOT = "snapshot"
"""The label value of an image that is a snapshot."""

_RETRIES = Delays(0.5, 60.0)
_SWEEPS = Delays(1.0, 300.0)
_AT_ONCE = 8
# A container that the daemon cannot remove keeps no service from starting.
_FIRST_SWEEP_S = 10.0
# Time to retry removals at the service's end; a stop of the service must allow more.
_PATIENCE_S = 10.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Owner:
    """The labels of the instance and its present run."""

    instance: str
    run: str

    @property
    def filter(self) -> str:
        """The daemon's filter for everything of the instance."""
        return f"{INSTANCE}={self.instance}"

    def labels(self, kind: str) -> dict[str, str]:
        """Returns the labels of an object that this run makes."""
        return {INSTANCE: self.instance, RUN: self.run, KIND: kind}

    def abandoned(self, found: Json) -> bool:
        """Whether an object of the instance is of another run."""
        labels = found.get("Labels") or {}
        return labels.get(INSTANCE) == self.instance and labels.get(RUN) != self.run


class Reaper:
    """Removes objects; see the module."""

    def __init__(self, daemon: Daemon, owner: Owner, *, other_runtime: bool = False) -> None:
        self._daemon = daemon
        self._owner = owner
        self._other_runtime = other_runtime
        self._sweeping = TaskOwner()
        self._asked = TaskOwner()
        self._failed = TaskOwner()
        self._ending = TaskOwner()
        self._closing = asyncio.Event()
        self._deletions = Deletions(_RETRIES, at_once=_AT_ONCE, pause=self._pause)
        self.snapshots: frozenset[str] | None = None
        """Image names of earlier runs' snapshots that are still valid; None while unknown."""

    async def open(self, wait_s: float = _FIRST_SWEEP_S) -> None:
        """Removes earlier runs' orphans, and keeps looking; waits for the first removals, at most ``wait_s`` seconds.

        Raises Unavailable when the daemon does not respond.
        """
        first = self._sweeping.start(self.sweep(), "docker-first-sweep")
        done, _ = await asyncio.wait([first], timeout=wait_s)
        if done:
            first.result()
        self._sweeping.start(self._sweep_forever(), "docker-sweep")

    async def aclose(self) -> None:
        """Stops. Objects that remain are found by their labels at the next start; processes of removed ones are not."""
        await self._asked.wait()
        self._closing.set()
        await self._failed.wait(_PATIENCE_S)
        await self._ending.wait()
        await self._sweeping.aclose()
        await self._deletions.aclose(0)
        await self._failed.aclose()

    async def container(self, name: str) -> None:
        """Removes a container now; if that fails, retries in the background."""
        await self._asked.run(self._remove(f"container {name}", lambda: self._remove_container(name)))

    async def image(self, name: str) -> None:
        """Removes an image, as ``container`` does."""
        await self._asked.run(self._remove(f"image {name}", lambda: self._daemon.remove_image(name)))

    async def volume(self, name: str) -> None:
        """Removes a volume, as ``container`` does."""
        await self._asked.run(self._remove(f"volume {name}", lambda: self._daemon.remove_volume(name)))

    async def _remove_container(self, name: str) -> None:
        if not self._other_runtime:
            await self._daemon.remove(name)
            return
        try:
            made = str((await self._daemon.inspect(name))["Id"])
        except Missing:
            return
        try:
            await self._daemon.remove(made)
        except Refused:
            # A kernel or a supervisor that hangs cannot be stopped, and the daemon waits for it each time.
            await leftovers.end(made)
            raise
        # In the background; only the end of this service waits for it.
        self._ending.start(leftovers.end(made), f"docker-remnants-{made[:12]}")

    async def _remove(self, what: str, attempt: Callable[[], Awaitable[None]]) -> None:
        """Returns after the first attempt, or the present one."""
        deletion = self._deletions.start(what, attempt)
        if not await deletion.attempted():
            self._failed.start(deletion.finished(), f"docker-insist-{what}")

    async def _pause(self, seconds: float) -> None:
        """Waits; during the service's end, never longer than the first time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()
            await asyncio.sleep(min(seconds, _RETRIES.first_s))

    async def sweep(self) -> int:
        """Removes orphans of earlier runs of this instance; returns how many."""
        owner, daemon = self._owner, self._daemon
        containers = [one for one in await daemon.containers(owner.filter) if owner.abandoned(one)]
        # Podman removes no container whose namespaces another one uses.
        sandboxes = [one["Id"] for one in containers if one["Labels"].get(KIND) == "sandbox"]
        beside = [one["Id"] for one in containers if one["Labels"].get(KIND) != "sandbox"]
        await asyncio.gather(*map(self.container, beside))
        await asyncio.gather(*map(self.container, sandboxes))
        # Images and volumes can be removed after the containers that use them.
        found = await daemon.images(owner.filter)
        images = [one for one in found if owner.abandoned(one) and not self._counts(one)]
        # The newest first: one image may be based on another.
        for one in sorted(images, key=lambda image: -int(image.get("Created") or 0)):
            for name in one.get("RepoTags") or [one["Id"]]:
                await self.image(name)
        volumes = [one["Name"] for one in await daemon.volumes(owner.filter) if owner.abandoned(one)]
        await asyncio.gather(*map(self.volume, volumes))
        removed = len(containers) + len(images) + len(volumes)
        if removed:
            _log.warning("removed leftovers of an earlier run", count=removed)
        return removed

    def _counts(self, image: Json) -> bool:
        """Whether an image of an earlier run is a snapshot that may be used again."""
        if (image.get("Labels") or {}).get(KIND) != SNAPSHOT:
            return False
        return self.snapshots is None or not self.snapshots.isdisjoint(image.get("RepoTags") or [])

    async def _sweep_forever(self) -> None:
        backoff = Backoff(_SWEEPS)
        while True:
            await backoff.wait()
            try:
                if await self.sweep():
                    backoff.reset()
            except (Refused, PenstockError) as error:
                _log.warning("looking for leftovers failed", error=str(error))
