"""Sandboxes of this backend that live: each made of a container and the way into it, and ended once.

Invariants
- Where the making of a sandbox fails, nothing of it is left, and what it stood on is released.
- Names are made of sandbox ids, so that a name that is taken is this service's own.
- No secret reaches the daemon: environments, files and commands of sandboxes go through the attendant alone.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import structlog

from penstock_chassis.errors import FailedPrecondition, Internal, InvalidArgument, PenstockError, Unavailable
from penstock_sandbox.backends.attended.sandbox import AttendedSandbox
from penstock_sandbox.backends.attended.stream import LinkLost
from penstock_sandbox.backends.base import SandboxHandle
from penstock_sandbox.backends.docker import changes, container
from penstock_sandbox.backends.docker.ahead import read_ahead
from penstock_sandbox.backends.docker.daemon import Daemon, Json, Missing, Refused
from penstock_sandbox.backends.docker.layers import REPOSITORY, Layers, name_of
from penstock_sandbox.backends.docker.options import DockerOptions
from penstock_sandbox.backends.docker.places import SYSTEM_PATH
from penstock_sandbox.backends.docker.prepared import ReadyImage, described
from penstock_sandbox.backends.docker.reach import SIDECAR_SUFFIX, Reach, Reached, Started
from penstock_sandbox.backends.docker.reaper import SANDBOX, SNAPSHOT, Owner, Reaper
from penstock_sandbox.backends.refusals import Refused as RefusedInside
from penstock_sandbox.model import SandboxSpec

TRIAL = "trial"
"""The sandbox id of the one that is made to look at."""

_DEATH_TOLD_S = 3.0
_TOO_LONG = "file name too long"
"""What a daemon's message ends with that met ENAMETOOLONG, which a sandbox's own paths are the only cause of."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Box:
    """A live sandbox: its container, the way into it, and its handle."""

    name: str
    container: str
    image: ReadyImage
    reached: Reached
    handle: AttendedSandbox | None = None
    layers: tuple[str, ...] = ()
    seal_as: str = ""
    sealed: ReadyImage | None = None
    seal_failure: Refused | PenstockError | None = None
    died: asyncio.Event = field(default_factory=asyncio.Event)
    seen: bool = False
    """Whether the daemon told of its container's death as it happened."""
    signalled: bool = False
    """Whether somebody had the daemon signal its container or its sidecar."""
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by who has its changes read."""
    written_since: float = -math.inf
    """When what it had written was last begun to be written out, on the event loop's clock."""

    async def destroy(self) -> None:
        """End it; harmless when it has ended."""
        if self.handle is not None:
            await self.handle.destroy()

    def lose(self, reason: str) -> None:
        """It ended by itself."""
        if self.handle is not None:
            self.handle.lose(reason)


class Boxes:
    """The live sandboxes of one daemon. ``reach`` is the way into them; None: none is made now."""

    def __init__(self, options: DockerOptions, daemon: Daemon, owner: Owner, reaper: Reaper, layers: Layers) -> None:
        self._options = options
        self._daemon = daemon
        self._owner = owner
        self._reaper = reaper
        self._layers = layers
        self._live: dict[str, Box] = {}
        self.reach: Reach | None = None

    async def aclose(self) -> None:
        """End all."""
        results = await asyncio.gather(*(box.destroy() for box in list(self._live.values())), return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                _log.error("a sandbox was not removed at the end", error=repr(result))

    def names(self) -> list[str]:
        """The names of their containers."""
        return list(self._live)

    def of(self, handle: SandboxHandle) -> Box | None:
        """The sandbox behind a handle, while it lives."""
        return next((one for one in self._live.values() if one.handle is handle), None)

    def died(self, name: str, seen: bool) -> None:
        """The daemon says that a container ended; ``seen`` where it said so as that happened."""
        box = self._live.get(name)
        if box is not None:
            box.seen = seen
            box.died.set()
            box.lose("SANDBOX_VANISHED")
        elif (box := self._served(name)) is not None:
            box.lose("SIDECAR_ENDED")

    def signalled(self, name: str) -> None:
        """Somebody had the daemon signal a container."""
        box = self._live.get(name) or self._served(name)
        if box is not None:
            box.signalled = True

    def _served(self, name: str) -> Box | None:
        """Whose sidecar has a name."""
        return self._live.get(name.removesuffix(SIDECAR_SUFFIX))

    async def make(
        self,
        sandbox_id: str,
        image: ReadyImage,
        spec: SandboxSpec,
        mounts: Sequence[Json],
        on_lost: Callable[[str], None],
        path: Sequence[str] = (),
        layers: tuple[str, ...] = (),
    ) -> AttendedSandbox:
        """A container of an image, its attendant and its link. ``layers`` are held for it, and released at its end."""
        name = f"penstock-{sandbox_id}" if sandbox_id != TRIAL else f"penstock-trial-{self._owner.run}"
        labels = {
            **self._owner.labels("sandbox"),
            SANDBOX: sandbox_id,
            "penstock.lease_s": f"{spec.lease_s or 0:g}",
        }
        settings, host = container.sandbox(
            image,
            labels,
            spec.resources,
            spec.network.kind,
            mounts=mounts,
            tmp_bytes=self._options.tmp_bytes,
            read_only=self._options.read_only,
            runtime=self._options.runtime,
        )
        try:
            if self.reach is None:
                raise Unavailable("this service is stopping", reason="DRAINING", retry_after_s=1.0)
            reach = self.reach
            writable = not self._options.read_only
            reach.furnish(settings, host, image, spec.resources, writable=writable)
            try:
                made = await self._daemon.create(name, settings, host)
            except Refused as error:
                raise _not_made(error) from error

            async def start() -> Started:
                try:
                    await self._daemon.start(made)
                    state = (await self._daemon.inspect(made))["State"]
                except Refused as error:
                    raise _not_made(error) from error
                return Started(sandbox_id, made, int(state["Pid"]), image, spec.resources, writable)

            reached = await reach.reach(name, start)
        except BaseException:
            try:
                await self._reaper.container(name)
            finally:
                self._layers.release(layers)
            raise
        box = self._live[name] = Box(name, made, image, reached, layers=layers)
        box.handle = AttendedSandbox(
            sandbox_id,
            reached.opener,
            home=image.account.home,
            workdir=image.workdir,
            user=image.account.name,
            default_env=_environment(image, path),
            on_lost=on_lost,
            destroy=lambda: self._end(box),
            diff=lambda below, max_bytes: self._diff(box, below, max_bytes),
            stats=reached.stats,
            oom_kills=reached.oom_kills,
            judge=lambda reason: _what_ended(box, reason),
        )
        try:
            await box.handle.open(spec.network)
        except BaseException as error:
            said = await reached.said() if isinstance(error, LinkLost) else ""
            await box.destroy()
            if isinstance(error, LinkLost):
                what = f"the attendant cannot be reached: {': '.join(filter(None, (error.reason, said)))}"
                raise Internal(what, reason="CREATE_FAILED") from error
            if isinstance(error, RefusedInside):
                raise Internal(f"the endpoint cannot be opened: {error.what}", reason="CREATE_FAILED") from error
            raise
        return box.handle

    async def _diff(self, box: Box, below: Sequence[str], max_bytes: int) -> AsyncGenerator[bytes | list[str], None]:
        read = self._read(box, below, max_bytes)
        try:
            async with aclosing(read_ahead(read, self._options.state_dir)) as pieces:
                async for piece in pieces:
                    yield piece
        except Missing as error:
            raise FailedPrecondition("the sandbox is gone", reason="SANDBOX_LOST") from error
        except Refused as error:
            what = f"the Docker daemon does not tell what changed: {error.what}"
            if _TOO_LONG in error.what:
                raise InvalidArgument(
                    "the sandbox has a path that is longer than the daemon can read: remove it", reason="PATH_TOO_LONG"
                ) from error
            raise Internal(what, reason="FILE_OPERATION_FAILED") from error

    async def _read(self, box: Box, below: Sequence[str], max_bytes: int) -> AsyncGenerator[bytes | list[str], None]:
        loop = asyncio.get_running_loop()
        asked = loop.time()
        # The daemon has a container read, and programs started in it, for one at a time, and whoever waits there holds
        # one of our few threads.
        async with box.reading:
            if box.written_since < asked:
                began = loop.time()
                await box.reached.written(ended=False)
                box.written_since = began  # good for all who had asked by then
            async with aclosing(changes.diff(self._daemon, box.container, below, max_bytes)) as pieces:
                async for piece in pieces:
                    yield piece

    async def _end(self, box: Box) -> None:
        """A sandbox's end, whatever brought it."""
        try:
            if box.seal_as and box.sealed is None and box.seal_failure is None:
                await self._seal(box, box.seal_as)
        finally:
            await asyncio.gather(self._reaper.container(box.name), box.reached.close())
            self._live.pop(box.name, None)
            self._layers.release(box.layers)

    async def _seal(self, box: Box, layer_id: str) -> None:
        """Keep its files, once; how that failed is for whoever seals, and not for its end, which comes all the same."""
        try:
            # Dead before it is committed: nothing can be half written.
            await box.reached.written(ended=True)
            await self._daemon.kill(box.container)
            labels = {**self._owner.labels(SNAPSHOT), SANDBOX: ""}
            made = await self._daemon.commit(box.container, REPOSITORY, layer_id, labels)
            box.sealed = described(await self._daemon.image(made))
        except (Refused, PenstockError) as error:
            box.seal_failure = error
        if box.seal_as != layer_id or box.seal_failure is not None:
            # Nobody waits for it any more, or only the answer was lost.
            await self._reaper.image(name_of(layer_id))


async def _what_ended(box: Box, reason: str) -> str:
    """The reason of a sandbox's loss.

    A container that nobody signalled ends by what runs in it alone: its first process does nothing, so somebody took
    its memory or broke its kernel. The same goes for an attendant within the sandbox's limits while the container
    lives.
    """
    try:
        # Its link may tell before the daemon does, and so may its sidecar, which ends with it.
        async with asyncio.timeout(_DEATH_TOLD_S):
            await box.died.wait()
    except TimeoutError:
        served = reason in ("ATTENDANT_ENDED", "SIDECAR_ENDED") and box.reached.within_limits
        return "ATTENDANT_KILLED" if served and not box.signalled else reason
    return "PROCESS_ENDED" if box.seen and not box.signalled else "SANDBOX_VANISHED"


def _not_made(error: Refused) -> Internal:
    return Internal(f"the sandbox could not be made: {error.what}", reason="CREATE_FAILED")


def _environment(image: ReadyImage, path: Sequence[str]) -> dict[str, str]:
    """What every process of a sandbox has in its environment: the image's own, and the user's."""
    account = image.account
    kept = {name: value for name, value in image.env.items() if not container.unwanted(name)}
    return {
        "LANG": "C.UTF-8",
        **kept,
        "PATH": ":".join([*path, image.env.get("PATH") or SYSTEM_PATH]),
        "HOME": account.home,
        "USER": account.name,
        "LOGNAME": account.name,
        "SHELL": account.shell,
        "TERM": "dumb",
        "TMPDIR": "/tmp",  # noqa: S108 - a path in the sandbox
    }
