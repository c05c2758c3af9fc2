"""The removal of what this backend made with a daemon: now, later if need be, and what an earlier run left.

Purpose: every container, image and volume carries the label of the instance (one state directory, for ever) and of the
run (one start of the service). What is of this instance and of another run is nobody's, snapshots aside: which of those
count is told (``snapshots``), and until then all of them do.

Invariants
- Only what carries this instance's label is ever removed.
- A removal that was asked for is carried out, also where who asked is cancelled, and before the service ends.
- One that fails is tried again, for ever, ever more rarely. Nobody waits for it but, for a while, the service's end.
- With a runtime of the operator's choice, a removed container's processes are looked for too, and those of one that
  the daemon cannot remove (``remnants``).
- The daemon may still be carrying out what a killed service asked of it, so leftovers are looked for again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from penstock_chassis.errors import PenstockError
from penstock_sandbox.backends.docker import remnants
from penstock_sandbox.backends.docker.daemon import Daemon, Json, Missing, Refused

INSTANCE = "penstock.instance"
RUN = "penstock.run"
KIND = "penstock.kind"
SANDBOX = "penstock.sandbox"
SNAPSHOT = "snapshot"
"""The kind of an image that is a snapshot."""

_FIRST_RETRY_S = 0.5
_LAST_RETRY_S = 60.0
_FIRST_SWEEP_S = 1.0
_LAST_SWEEP_S = 300.0
_AT_ONCE = 8
# What failed until the service ends is tried for so long; who stops the service gives it more.
_PATIENCE_S = 10.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose things are: the instance and its present run."""

    instance: str
    run: str

    @property
    def filter(self) -> str:
        """What the daemon is asked for to find everything of the instance."""
        return f"{INSTANCE}={self.instance}"

    def labels(self, kind: str) -> dict[str, str]:
        """The labels of something that this run makes."""
        return {INSTANCE: self.instance, RUN: self.run, KIND: kind}

    def abandoned(self, found: Json) -> bool:
        """Whether something of the instance is of another run."""
        labels = found.get("Labels") or {}
        return labels.get(INSTANCE) == self.instance and labels.get(RUN) != self.run


class Reaper:
    """Removes; see the module."""

    def __init__(self, daemon: Daemon, owner: Owner, *, other_runtime: bool = False) -> None:
        self._daemon = daemon
        self._owner = owner
        self._other_runtime = other_runtime
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked: set[asyncio.Task[None]] = set()
        self._failed: dict[asyncio.Task[None], str] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self.snapshots: frozenset[str] | None = None
        """Names of the images of earlier runs that are snapshots still; None while that is not known."""

    async def open(self) -> None:
        """Remove what earlier runs left, and go on looking. Raises Unavailable when the daemon does not answer."""
        await self.sweep()
        self._own(self._sweep_forever(), "docker-sweep")

    async def aclose(self) -> None:
        """Stop. What cannot be removed is found by its label at the next start; what removed ones left is not."""
        await asyncio.gather(*self._asked, return_exceptions=True)
        self._closing.set()
        if self._failed:
            await asyncio.wait(self._failed, timeout=_PATIENCE_S)
        if self._failed:
            _log.warning("left to the next start of this service", what=sorted(self._failed.values()))
        await asyncio.gather(*self._ending, return_exceptions=True)
        for task in (*self._tasks, *self._failed):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._failed, return_exceptions=True)

    async def container(self, name: str) -> None:
        """Remove a container now; where that fails it is tried again in the background."""
        await self._ask(lambda: self._remove_container(name), "container", name)

    async def image(self, name: str) -> None:
        """Remove an image, as ``container`` does."""
        await self._ask(lambda: self._daemon.remove_image(name), "image", name)

    async def volume(self, name: str) -> None:
        """Remove a volume, as ``container`` does."""
        await self._ask(lambda: self._daemon.remove_volume(name), "volume", name)

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
            # A kernel or a supervisor that hangs ends at nobody's word, and the daemon waits for it each time.
            await remnants.end(made)
            raise
        # Nobody waits for it, but for the end of this service.
        ending = asyncio.create_task(remnants.end(made), name=f"docker-remnants-{made[:12]}")
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _ask(self, remove: Callable[[], Awaitable[None]], kind: str, name: str) -> None:
        asked = asyncio.create_task(self._attempt(remove, kind, name), name=f"docker-remove-{name}")
        self._asked.add(asked)
        asked.add_done_callback(self._asked.discard)
        # Who asks may be cancelled, and again as it cleans up.
        await asyncio.shield(asked)

    async def _attempt(self, remove: Callable[[], Awaitable[None]], kind: str, name: str) -> None:
        try:
            async with self._slots:
                await remove()
        except (Refused, PenstockError) as error:
            _log.warning("removal failed; it is tried again", kind=kind, name=name, error=str(error))
            failed = asyncio.create_task(self._insist(remove, kind, name), name=f"docker-insist-{name}")
            self._failed[failed] = f"{kind} {name}"
            failed.add_done_callback(self._failed.pop)

    async def _insist(self, remove: Callable[[], Awaitable[None]], kind: str, name: str) -> None:
        wait_s = _FIRST_RETRY_S
        while True:
            await self._pause(wait_s)
            wait_s = min(2 * wait_s, _LAST_RETRY_S)
            try:
                async with self._slots:
                    await remove()
            except (Refused, PenstockError) as error:
                _log.warning("removal failed again", kind=kind, name=name, error=str(error), next_s=wait_s)
            else:
                return

    async def _pause(self, seconds: float) -> None:
        """Wait; once the service ends, no longer than the first time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()
            await asyncio.sleep(min(seconds, _FIRST_RETRY_S))

    async def sweep(self) -> int:
        """Remove what earlier runs of this instance left; answers how much that was."""
        owner, daemon = self._owner, self._daemon
        containers = [one["Id"] for one in await daemon.containers(owner.filter) if owner.abandoned(one)]
        await asyncio.gather(*map(self.container, containers))
        # Images and volumes can go once no container stands on them.
        found = await daemon.images(owner.filter)
        images = [one for one in found if owner.abandoned(one) and not self._counts(one)]
        # The newest first: one image may stand on another.
        for one in sorted(images, key=lambda image: -int(image.get("Created") or 0)):
            for name in one.get("RepoTags") or [one["Id"]]:
                await self.image(name)
        volumes = [one["Name"] for one in await daemon.volumes(owner.filter) if owner.abandoned(one)]
        await asyncio.gather(*map(self.volume, volumes))
        removed = len(containers) + len(images) + len(volumes)
        if removed:
            _log.warning("removed what an earlier run left", count=removed)
        return removed

    def _counts(self, image: Json) -> bool:
        """Whether an image of an earlier run is a snapshot that may be used again."""
        if (image.get("Labels") or {}).get(KIND) != SNAPSHOT:
            return False
        return self.snapshots is None or not self.snapshots.isdisjoint(image.get("RepoTags") or [])

    async def _sweep_forever(self) -> None:
        wait_s = _FIRST_SWEEP_S
        while True:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LAST_SWEEP_S)
            try:
                if await self.sweep():
                    wait_s = _FIRST_SWEEP_S
            except (Refused, PenstockError) as error:
                _log.warning("looking for leftovers failed", error=str(error))

    def _own(self, work: Awaitable[None], name: str) -> None:
        task = asyncio.ensure_future(work)
        if isinstance(task, asyncio.Task):
            task.set_name(name)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
