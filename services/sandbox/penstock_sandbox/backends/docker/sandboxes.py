"""This backend's live sandboxes: each is a container with access to it, and is ended once.

Invariants
- A failed create leaves nothing behind and releases the layers below.
- Container names derive from sandbox ids, so a name conflict is with this service's own container.
- No secret reaches the daemon: environments, files and commands of sandboxes go through the guest agent alone.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import structlog

from penstock_chassis.errors import FailedPrecondition, Internal, InvalidArgument, PenstockError, Unavailable
from penstock_sandbox.backends.docker import container
from penstock_sandbox.backends.docker.access.ways import SIDECAR_SUFFIX, Reach, Reached, Started
from penstock_sandbox.backends.docker.cleanup.reaper import SANDBOX, SNAPSHOT, Owner, Reaper
from penstock_sandbox.backends.docker.companions import Companions, Planned
from penstock_sandbox.backends.docker.container import HOSTNAME
from penstock_sandbox.backends.docker.engine.daemon import Daemon
from penstock_sandbox.backends.docker.engine.errors import Json, Missing, Refused
from penstock_sandbox.backends.docker.images import account_files, changes
from penstock_sandbox.backends.docker.images.diff_buffer import read_ahead
from penstock_sandbox.backends.docker.images.layers import REPOSITORY, Layers, name_of
from penstock_sandbox.backends.docker.images.prepared_images import ReadyImage, described
from penstock_sandbox.backends.docker.names_files import NamesFiles
from penstock_sandbox.backends.docker.options import DockerOptions
from penstock_sandbox.backends.guest_client.sandbox import BackendHooks, GuestSandbox, ProcessDefaults
from penstock_sandbox.backends.guest_client.stream import LinkLost
from penstock_sandbox.backends.images.additions import SYSTEM_PATH, unwanted
from penstock_sandbox.domain.backend import SandboxHandle
from penstock_sandbox.domain.errno import Refused as RefusedInside
from penstock_sandbox.domain.model import NetworkKind, SandboxSpec

TRIAL = "trial"
"""The sandbox id of the trial."""

_EXIT_REPORTED_S = 3.0
_TOO_LONG = "file name too long"
"""End of a daemon's message for ENAMETOOLONG, which only a sandbox's own paths can cause."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class DockerSandbox:
    """A live sandbox: its container, the access to it, and its handle."""

    name: str
    container: str
    image: ReadyImage
    reached: Reached
    handle: GuestSandbox | None = None
    layers: tuple[str, ...] = ()
    joins: str = ""
    """The name of the sandbox whose network it shares."""
    names: tuple[Json, ...] = ()
    """The mounts of names that it shares with its companions and with what joins it."""
    beside: asyncio.Task[tuple[str, ...]] | None = None
    """Starts its companions; results in the names of their containers once all are healthy."""
    seal_as: str = ""
    sealed: ReadyImage | None = None
    seal_failure: Refused | PenstockError | None = None
    died: asyncio.Event = field(default_factory=asyncio.Event)
    seen: bool = False
    """Whether the daemon reported its container's death live."""
    signalled: bool = False
    """Whether someone signalled its container or its sidecar through the daemon."""
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while its changes are read."""
    written_since: float = -math.inf
    """When its last sync to disk began, on the event loop's clock."""

    @property
    def companions(self) -> tuple[str, ...]:
        """The names of its companions' containers; none while they are started."""
        started = self.beside
        return started.result() if started and _succeeded(started) else ()

    async def destroy(self) -> None:
        """Ends it; harmless if it has ended."""
        if self.handle is not None:
            await self.handle.destroy()

    def lose(self, reason: str) -> None:
        """Handles that it ended by itself."""
        if self.handle is not None:
            self.handle.lose(reason)


class DockerSandboxes:
    """The live sandboxes of one daemon. ``reach`` is the access to them; None: creates are not possible now."""

    def __init__(
        self,
        options: DockerOptions,
        daemon: Daemon,
        owner: Owner,
        reaper: Reaper,
        layers: Layers,
        companions: Companions,
        names: NamesFiles,
    ) -> None:
        self._names = names
        self._options = options
        self._companions = companions
        self._daemon = daemon
        self._owner = owner
        self._reaper = reaper
        self._layers = layers
        self._live: dict[str, DockerSandbox] = {}
        self.reach: Reach | None = None

    async def aclose(self) -> None:
        results = await asyncio.gather(*(box.destroy() for box in list(self._live.values())), return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                _log.error("a sandbox was not removed at shutdown", error=repr(result))

    def names(self) -> list[str]:
        """Returns the names of their containers."""
        return list(self._live)

    def of(self, handle: SandboxHandle) -> DockerSandbox | None:
        """Returns the sandbox of a handle, while it is alive."""
        return next((one for one in self._live.values() if one.handle is handle), None)

    def died(self, name: str, seen: bool) -> None:
        """Handles the death of a container; ``seen`` if the daemon reported it live."""
        box = self._live.get(name)
        if box is not None:
            box.seen = seen
            box.died.set()
            box.lose("SANDBOX_VANISHED")
            if box.beside is not None:
                box.beside.cancel()  # they cannot become healthy
            self._lose_joined(name)
        elif (box := self._served(name)) is not None:
            box.lose("SIDECAR_ENDED")
        elif (box := next((one for one in self._live.values() if name in one.companions), None)) is not None:
            _log.warning("a companion ended; its sandbox lives on", sandbox=box.name, companion=name)

    def _lose_joined(self, name: str) -> None:
        """Ends what shares the network of a sandbox: without its companions a verifier would grade something else."""
        for box in [one for one in self._live.values() if one.joins == name]:
            box.lose("SANDBOX_VANISHED")

    def signalled(self, name: str) -> None:
        """Handles that someone signalled a container through the daemon."""
        box = self._live.get(name) or self._served(name)
        if box is not None:
            box.signalled = True

    def _served(self, name: str) -> DockerSandbox | None:
        """Returns the sandbox that a sidecar of this name serves."""
        return self._live.get(name.removesuffix(SIDECAR_SUFFIX))

    def _alive(self, name: str) -> DockerSandbox:
        box = self._live.get(name)
        if box is None or box.died.is_set():
            raise FailedPrecondition("the sandbox that is joined is gone", reason="SANDBOX_LOST")
        return box

    async def make(
        self,
        sandbox_id: str,
        image: ReadyImage,
        spec: SandboxSpec,
        mounts: Sequence[Json],
        on_lost: Callable[[str], None],
        path: Sequence[str] = (),
        layers: tuple[str, ...] = (),
        companions: Sequence[Planned] = (),
    ) -> GuestSandbox:
        """Makes a container, its guest agent, its link and its companions. References to ``layers`` are held until its
        end. Raises FailedPrecondition (SANDBOX_LOST) without the sandbox that it joins.
        """
        name = f"penstock-{sandbox_id}" if sandbox_id != TRIAL else f"penstock-trial-{self._owner.run}"
        joins = f"penstock-{spec.joins}" if spec.joins else ""
        labels = {
            **self._owner.labels("sandbox"),
            SANDBOX: sandbox_id,
            "penstock.lease_s": f"{spec.lease_s or 0:g}",
        }
        own_names = [HOSTNAME, *(name for one in companions for name in one.spec.names)] if companions else []
        try:
            other = self._alive(joins) if joins else None
            resolver = spec.network.kind is not NetworkKind.OPEN
            names = other.names if other else await self._names.mounts(own_names, resolver=resolver)
            settings, host = container.sandbox(
                image,
                labels,
                spec.resources,
                spec.network.kind,
                mounts=[*mounts, *names],
                tmp_bytes=self._options.tmp_bytes,
                read_only=self._options.read_only,
                runtime=self._options.runtime,
                own_names=own_names,
                joins=other.container if other else "",
            )
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
            if joins:
                try:
                    self._alive(joins)
                except BaseException:
                    await reached.close()
                    raise
        except BaseException:
            try:
                await self._reaper.container(name)
            finally:
                self._layers.release(layers)
            raise
        box = self._live[name] = DockerSandbox(name, made, image, reached, layers=layers, joins=joins, names=names)
        box.handle = GuestSandbox(
            sandbox_id,
            reached.opener,
            ProcessDefaults(image.account.home, image.workdir, image.account.name, _environment(image, path)),
            BackendHooks(
                on_lost,
                destroy=lambda: self._end(box),
                diff=lambda below, max_bytes: self._diff(box, below, max_bytes),
                stats=reached.stats,
                oom_kills=reached.oom_kills,
                judge=lambda reason: _what_ended(box, reason),
                keeps_network=spec.network.kind is NetworkKind.OPEN,
            ),
        )
        try:
            await box.handle.open(spec.network)
            if companions:
                starting = self._companions.start(sandbox_id, made, companions, names)
                box.beside = asyncio.create_task(starting, name=f"companions-{name}")
                try:
                    await box.beside
                except asyncio.CancelledError:
                    task = asyncio.current_task()
                    if task is not None and task.cancelling():
                        raise
                    what = "the sandbox was lost during its creation"
                    raise Unavailable(what, reason="CREATE_FAILED", retry_after_s=0.1) from None
        except BaseException as error:
            try:
                error_text = await reached.error_text() if isinstance(error, LinkLost) else ""
            finally:
                await box.destroy()
            if isinstance(error, LinkLost):
                what = f"the guest cannot be reached: {': '.join(filter(None, (error.reason, error_text)))}"
                raise Internal(what, reason="CREATE_FAILED") from error
            if isinstance(error, RefusedInside):
                raise Internal(f"the endpoint cannot be opened: {error.what}", reason="CREATE_FAILED") from error
            raise
        return box.handle

    async def _diff(
        self, box: DockerSandbox, below: Sequence[str], max_bytes: int
    ) -> AsyncGenerator[bytes | list[str], None]:
        read = self._read(box, below, max_bytes)
        try:
            async with aclosing(read_ahead(read, self._options.state_dir)) as pieces:
                async for piece in pieces:
                    yield piece
        except Missing as error:
            raise FailedPrecondition("the sandbox is gone", reason="SANDBOX_LOST") from error
        except Refused as error:
            what = f"the Docker daemon does not list the changes: {error.what}"
            if _TOO_LONG in error.what:
                raise InvalidArgument(
                    "the sandbox has a path that is longer than the daemon can read: remove it", reason="PATH_TOO_LONG"
                ) from error
            raise Internal(what, reason="FILE_OPERATION_FAILED") from error

    async def _read(
        self, box: DockerSandbox, below: Sequence[str], max_bytes: int
    ) -> AsyncGenerator[bytes | list[str], None]:
        loop = asyncio.get_running_loop()
        asked = loop.time()
        # The daemon reads a container, and starts programs in it, for one request at a time, and each waiting one would
        # hold one of our few threads.
        async with box.reading:
            if box.written_since < asked:
                began = loop.time()
                await box.reached.written(ended=False)
                box.written_since = began  # valid for all requests made before
            async with aclosing(changes.diff(self._daemon, box.container, below, max_bytes)) as pieces:
                async for piece in pieces:
                    yield piece

    async def _end(self, box: DockerSandbox) -> None:
        """Ends a sandbox, whatever the cause."""
        try:
            if box.seal_as and box.sealed is None and box.seal_failure is None:
                await self._seal(box, box.seal_as)
        finally:
            self._lose_joined(box.name)
            beside, box.beside = box.beside, None
            if beside is not None:
                beside.cancel()
                await asyncio.wait([beside])
            names = beside.result() if beside is not None and _succeeded(beside) else ()
            try:
                # Before the sandbox's own: Podman removes no container whose namespaces another one uses.
                await asyncio.gather(box.reached.close(), self._companions.remove(names))
            finally:
                await self._reaper.container(box.name)
                self._live.pop(box.name, None)
                self._lose_joined(box.name)
                self._layers.release(box.layers)

    async def _seal(self, box: DockerSandbox, layer_id: str) -> None:
        """Keeps its files, once; an error is the sealing caller's alone, and the sandbox's end continues."""
        try:
            # Dead before the commit, so nothing can be half written.
            await box.reached.written(ended=True)
            await self._daemon.kill(box.container)
            try:
                await account_files.check(self._daemon, box.container)
            except Refused as error:
                problem = f"no sandbox can be made of this one: {error.what}"
                raise FailedPrecondition(problem, reason="IMAGE_UNUSABLE") from error
            labels = {**self._owner.labels(SNAPSHOT), SANDBOX: ""}
            made = await self._daemon.commit(box.container, REPOSITORY, layer_id, labels)
            box.sealed = described(await self._daemon.image(made))
        except (Refused, PenstockError) as error:
            box.seal_failure = error
        if box.seal_as != layer_id or box.seal_failure is not None:
            # The caller is gone, or only the response was lost.
            await self._reaper.image(name_of(layer_id))


async def _what_ended(box: DockerSandbox, reason: str) -> str:
    """Returns the reason of a sandbox's loss.

    A container that was not signalled ends only by its own workload: its first process does nothing, so its memory was
    used up or its kernel broken. The same holds for a guest agent within the sandbox's limits while the container is
    alive.
    """
    try:
        # The link may report before the daemon does, and so may the sidecar, which ends with it.
        async with asyncio.timeout(_EXIT_REPORTED_S):
            await box.died.wait()
    except TimeoutError:
        served = reason in ("ATTENDANT_ENDED", "SIDECAR_ENDED") and box.reached.within_limits
        return "ATTENDANT_KILLED" if served and not box.signalled else reason
    return "PROCESS_ENDED" if box.seen and not box.signalled else "SANDBOX_VANISHED"


def _succeeded(task: asyncio.Task[tuple[str, ...]]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _not_made(error: Refused) -> Internal:
    return Internal(f"the sandbox could not be made: {error.what}", reason="CREATE_FAILED")


def _environment(image: ReadyImage, path: Sequence[str]) -> dict[str, str]:
    """Returns the environment of every process of a sandbox: the image's own, and the user's."""
    account = image.account
    kept = {name: value for name, value in image.env.items() if not unwanted(name)}
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
