"""The Docker backend: sandboxes as containers of a daemon, here or elsewhere, served by attendants.

Purpose: ties the parts together. One sandbox is: a hardened container of a prepared image, whose first process does
nothing; an attendant, in one of two ways (``reach``); and what is mounted into it.

Invariants
- Claims are checked by doing: ``open`` makes a sandbox and looks from inside before the backend calls itself available.
- Names are made of sandbox ids, so that a name that is taken is this service's own; everything carries the labels of
  the instance and of the run, and what another run left is removed (see ``reaper``).
- A snapshot is a committed image, immutable, and stays while a sandbox or another snapshot stands on it.
- No secret reaches the daemon: environments, files and commands of sandboxes go through the attendant alone.
"""

from __future__ import annotations

import asyncio
import fnmatch
import secrets
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import structlog

from penstock_chassis.errors import FailedPrecondition, Internal, PenstockError, Unavailable
from penstock_sandbox.backends.attended.sandbox import AttendedSandbox
from penstock_sandbox.backends.attended.stream import LinkLost
from penstock_sandbox.backends.base import Backend, MountedToolbox, SandboxHandle, SealedLayer
from penstock_sandbox.backends.docker import changes, container
from penstock_sandbox.backends.docker.additions import USER
from penstock_sandbox.backends.docker.daemon import Daemon, Json, Refused
from penstock_sandbox.backends.docker.deaths import Deaths
from penstock_sandbox.backends.docker.images import SYSTEM_PATH, WORKDIR, Images, ReadyImage
from penstock_sandbox.backends.docker.layers import REPOSITORY, Layers
from penstock_sandbox.backends.docker.look import look, reads, write_nonce
from penstock_sandbox.backends.docker.mounts import Mounts, bind
from penstock_sandbox.backends.docker.reach import SIDECAR_SUFFIX, Direct, Reach, Reached, Sidecar, Started
from penstock_sandbox.backends.docker.reaper import SANDBOX, Owner, Reaper
from penstock_sandbox.backends.docker.wire import Wire
from penstock_sandbox.backends.refusals import Refused as RefusedInside
from penstock_sandbox.model import Capabilities, ForkKind, NetworkKind, Resources, SandboxSpec

_TRIAL = Resources(cpu=0.5, memory_bytes=256 * 1024 * 1024, pids=64)
_TRIAL_DISK = 64 * 1024 * 1024
_SHARED_PROBE = "/opt/penstock/shared"
_ADVICE = "start it, or set docker_host (or DOCKER_HOST) to where it listens"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DockerOptions:
    """The operator's choices for this backend (their meanings: ``SandboxSettings``)."""

    state_dir: Path
    image: str
    sidecar_image: str
    host: str = ""
    allowed_images: tuple[str, ...] = ("*",)
    reach: str = "auto"
    runtime: str = ""
    read_only: bool = False
    pull_timeout_s: float = 600.0
    may_pull: bool = True
    """Whether images may be pulled as the service starts, or only for a sandbox that wants one."""
    tmp_bytes: int = 1024 * 1024 * 1024
    allow_open_network: bool = False


class DockerBackend(Backend):
    """See the module. What it keeps on disk is under ``options.state_dir``."""

    name = "docker"
    host_programs = False

    def __init__(self, options: DockerOptions) -> None:
        self._options = options
        self._stack = AsyncExitStack()
        self._live: dict[str, _Box] = {}
        self._reach: Reach | None = None

    # Opening and closing -----------------------------------------------------------------------------------------

    async def open(self) -> None:
        try:
            await self._open()
        except PenstockError as error:
            self.unavailable_reason = error.message
        except Refused as error:
            self.unavailable_reason = f"the Docker daemon refused: {error.what}"
        if self.unavailable_reason:
            _log.info("docker backend unavailable", reason=self.unavailable_reason)
            await self._stack.aclose()

    async def _open(self) -> None:
        options = self._options
        daemon = Daemon.connect(options.host)
        self._stack.push_async_callback(daemon.aclose)
        try:
            info = await daemon.info()
        except Unavailable as error:
            raise Unavailable(f"{error.message}: {_ADVICE}", reason="DOCKER_UNREACHABLE") from error
        if problem := self._unusable(info):
            raise FailedPrecondition(problem, reason="BACKEND_UNAVAILABLE")
        options.state_dir.mkdir(parents=True, exist_ok=True)
        owner = Owner(await asyncio.to_thread(_instance, options.state_dir), secrets.token_hex(8))
        wire = Wire(options.host)
        reaper = Reaper(daemon, owner)
        self._stack.push_async_callback(reaper.aclose)
        await reaper.open()
        images = Images(daemon, wire, owner, reaper, options.pull_timeout_s)
        self._stack.push_async_callback(images.aclose)
        self._layers = Layers(reaper)
        self._stack.push_async_callback(self._layers.aclose)
        mounts = Mounts(daemon, owner, reaper)
        self._stack.push_async_callback(mounts.aclose)
        self._daemon, self._images, self._mounts, self._owner, self._reaper = daemon, images, mounts, owner, reaper
        if not options.may_pull and not await images.there(options.image):
            raise FailedPrecondition(
                f"the daemon has no image {options.image!r}: docker pull it, set docker_image, or make docker the "
                "default_backend, which then pulls it as it starts",
                reason="BACKEND_UNAVAILABLE",
            )
        deaths = Deaths(daemon, wire, owner, _epoch(str(info["SystemTime"])), self._died, lambda: list(self._live))
        self._stack.push_async_callback(deaths.aclose)
        self._stack.push_async_callback(self._close_reach)
        self._stack.push_async_callback(self._destroy_all)
        sidecar = Sidecar(daemon, wire, images, owner, reaper, options.sidecar_image)
        direct = Direct(options.state_dir)
        ways: list[Reach] = [way for way in (direct, sidecar) if options.reach in ("auto", way.name)]
        await self._choose(info, ways)

    def _unusable(self, info: Json) -> str:
        """Why a daemon cannot make sandboxes at all."""
        if info.get("OSType") != "linux":
            return "the daemon runs no Linux containers"
        runtime = self._options.runtime
        if runtime and runtime not in (info.get("Runtimes") or {}):
            return f"the daemon has no runtime {runtime!r}; it has: {', '.join(sorted(info.get('Runtimes') or {}))}"
        return ""

    async def _choose(self, info: Json, reaches: Sequence[Reach]) -> None:
        """Take the first way in by which a trial sandbox is as it should be."""
        problems = []
        for reach in reaches:
            self._reach = reach
            try:
                await reach.open()
                problem = await self._trial(info)
            except (PenstockError, LinkLost, RefusedInside, TimeoutError) as error:
                problem = str(error) or type(error).__name__
            except Refused as error:
                problem = error.what
            if not problem:
                self.unavailable_reason = ""
                _log.info("docker backend ready", reach=reach.name, shared_files=self._mounts.same_files)
                return
            await self._close_reach()
            problems.append(f"{reach.name}: {problem}")
            _log.info("this way into containers does not do", reach=reach.name, reason=problem)
        self.unavailable_reason = "a trial sandbox failed: " + "; ".join(problems)

    async def _trial(self, info: Json) -> str:
        """Make a sandbox, look from inside, and only then claim anything (R55); answers what does not hold."""
        able = Resources(
            cpu=_TRIAL.cpu if info.get("CpuCfsQuota") else None,
            memory_bytes=_TRIAL.memory_bytes if info.get("MemoryLimit") else None,
            pids=_TRIAL.pids if info.get("PidsLimit") else None,
        )
        nonce = secrets.token_hex(16)
        shared = self._options.state_dir / "shared"
        await asyncio.to_thread(write_nonce, shared, nonce)
        ready = await self._images.ready(self._options.image)
        spec = SandboxSpec(resources=able)
        try:
            box = await self._make("trial", ready, spec, [bind(shared, _SHARED_PROBE)], lambda _: None)
            self._mounts.same_files = True
        except Internal as error:
            # The daemon does not see our files: it says so of the bind, and of nothing else.
            if "bind" not in error.message and "mount" not in error.message:
                raise
            self._mounts.same_files = False
            box = await self._make("trial", ready, spec, [], lambda _: None)
        try:
            if self._mounts.same_files:
                self._mounts.same_files = await reads(box, f"{_SHARED_PROBE}/nonce", nonce)
            problem, running = await look(box, ready.account.shell)
            if not problem and running is not None and able.pids is not None and running < 2:
                problem = "what runs in it does not count towards its limits"
        finally:
            await box.destroy()
        if not problem:
            networks = {NetworkKind.NONE, NetworkKind.ONE_ENDPOINT}
            if self._options.allow_open_network:
                networks.add(NetworkKind.OPEN)
            kept = not self._options.read_only
            self.capabilities = Capabilities(
                networks=frozenset(networks),
                fork=ForkKind.FILESYSTEM if kept else ForkKind.NONE,
                pty=True,
                stdin_stream=True,
                limit_cpu=able.cpu is not None,
                limit_memory=able.memory_bytes is not None,
                limit_pids=able.pids is not None,
                limit_disk=not kept or await self._limits_disk(ready),
                diff=kept,
                toolboxes=True,
                kill_tree=True,
            )
        return problem

    async def _limits_disk(self, image: ReadyImage) -> bool:
        """Whether the storage driver holds a container to a size: by asking it for one."""
        settings, host = container.sandbox(
            image.name,
            self._owner.labels("making"),
            image.account,
            Resources(disk_bytes=_TRIAL_DISK),
            NetworkKind.NONE,
            mounts=(),
            tmp_bytes=self._options.tmp_bytes,
            read_only=False,
            runtime=self._options.runtime,
        )
        try:
            made = await self._daemon.create("", settings, host)
        except Refused:
            return False
        await self._reaper.container(made)
        return True

    async def aclose(self) -> None:
        await self._stack.aclose()

    async def _destroy_all(self) -> None:
        results = await asyncio.gather(*(box.destroy() for box in list(self._live.values())), return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                _log.error("a sandbox was not removed at the end", error=repr(result))

    async def _close_reach(self) -> None:
        reach, self._reach = self._reach, None
        if reach is not None:
            await reach.aclose()

    # Sandboxes ---------------------------------------------------------------------------------------------------

    async def create(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        toolboxes: Sequence[MountedToolbox],
        on_lost: Callable[[str], None],
    ) -> SandboxHandle:
        if spec.user not in ("", USER):
            raise FailedPrecondition(
                f"the docker backend has one user, {USER!r}",
                reason="CAPABILITY_MISSING",
                metadata={"user": spec.user},
            )
        layers: tuple[str, ...] = ()
        if spec.snapshot_id:
            image, layers = self._layers.stack(spec.snapshot_id)
        else:
            name = spec.image or self._options.image
            self._check_allowed(name)
            image = await self._images.ready(name)
        # Held from here: a layer must not go while a container is being made from it.
        self._layers.hold(layers)
        try:
            mounts = await self._mounts.of(toolboxes, image.name)
        except BaseException as error:
            self._layers.release(layers)
            if isinstance(error, Refused):
                raise Internal(f"toolboxes cannot be mounted: {error.what}", reason="CREATE_FAILED") from error
            raise
        path = [folder for toolbox in toolboxes for folder in toolbox.path]
        return await self._make(sandbox_id, image, spec, mounts, on_lost, path, layers)

    def _check_allowed(self, image: str) -> None:
        if image != self._options.image and not any(
            fnmatch.fnmatchcase(image, pattern) for pattern in self._options.allowed_images
        ):
            raise FailedPrecondition(
                f"the operator's docker_allowed_images does not name {image!r}",
                reason="IMAGE_NOT_ALLOWED",
                metadata={"image": image},
            )

    async def _make(
        self,
        sandbox_id: str,
        image: ReadyImage,
        spec: SandboxSpec,
        mounts: Sequence[Json],
        on_lost: Callable[[str], None],
        path: Sequence[str] = (),
        layers: tuple[str, ...] = (),
    ) -> AttendedSandbox:
        """A container of an image, its attendant and its link. Nothing is left where it fails, ``layers`` not held."""
        name = f"penstock-{sandbox_id}" if sandbox_id != "trial" else f"penstock-trial-{self._owner.run}"
        labels = {
            **self._owner.labels("sandbox"),
            SANDBOX: sandbox_id,
            "penstock.lease_s": f"{spec.lease_s or 0:g}",
        }
        settings, host = container.sandbox(
            image.name,
            labels,
            image.account,
            spec.resources,
            spec.network.kind,
            mounts=mounts,
            tmp_bytes=self._options.tmp_bytes,
            read_only=self._options.read_only,
            runtime=self._options.runtime,
        )
        reached: Reached | None = None
        try:
            try:
                made = await self._daemon.create(name, settings, host)
                await self._daemon.start(made)
                state = (await self._daemon.inspect(made))["State"]
            except Refused as error:
                raise Internal(f"the sandbox could not be made: {error.what}", reason="CREATE_FAILED") from error
            started = Started(
                sandbox_id,
                name,
                made,
                int(state["Pid"]),
                image,
                WORKDIR,
                spec.resources,
                not self._options.read_only,
            )
            if self._reach is None:
                raise Unavailable("this service is stopping", reason="DRAINING", retry_after_s=1.0)
            reached = await self._reach.reach(started)
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(self._remove(name, reached)))
            self._layers.release(layers)
            raise
        box = self._live[name] = _Box(name, made, image, reached, layers=layers)
        box.handle = AttendedSandbox(
            sandbox_id,
            reached.opener,
            home=image.account.home,
            workdir=WORKDIR,
            user=USER,
            default_env=_environment(image, path),
            on_lost=on_lost,
            destroy=lambda: self._end(box),
            diff=lambda: changes.diff(self._daemon, made),
            stats=reached.stats,
            oom_kills=reached.oom_kills,
        )
        try:
            await box.handle.open(spec.network)
        except BaseException as error:
            await box.destroy()
            if isinstance(error, LinkLost):
                raise Internal(f"the attendant cannot be reached: {error.reason}", reason="CREATE_FAILED") from error
            if isinstance(error, RefusedInside):
                raise Internal(f"the endpoint cannot be opened: {error.what}", reason="CREATE_FAILED") from error
            raise
        return box.handle

    async def _end(self, box: _Box) -> None:
        """A sandbox's end, whatever brought it."""
        try:
            if box.seal_as:
                # Dead before it is committed: nothing can be half written.
                await self._daemon.kill(box.container)
                labels = {**self._owner.labels("snapshot"), SANDBOX: ""}
                made = await self._daemon.commit(box.container, REPOSITORY, box.seal_as, labels)
                box.sealed = self._images.described(await self._daemon.image(made))
        finally:
            await self._remove(box.name, box.reached)
            self._live.pop(box.name, None)
            self._layers.release(box.layers)

    async def _remove(self, name: str, reached: Reached | None) -> None:
        await asyncio.gather(self._reaper.container(name), *([reached.close()] if reached is not None else []))

    def _died(self, name: str) -> None:
        """The daemon says that a container ended."""
        # A sidecar's name is its sandbox's and a word.
        box, reason = self._live.get(name), "PROCESS_ENDED"
        if box is None:
            box, reason = self._live.get(name.removesuffix(SIDECAR_SUFFIX)), "SIDECAR_ENDED"
        if box is not None:
            box.lose(reason)

    # Layers ------------------------------------------------------------------------------------------------------

    async def seal(self, handle: SandboxHandle, layer_id: str) -> SealedLayer:
        box = next((one for one in self._live.values() if one.handle is handle), None)
        if box is None:
            raise FailedPrecondition("the sandbox is gone", reason="SANDBOX_LOST")
        box.seal_as = layer_id
        # The layer's own hold; the sandbox's ends with it.
        self._layers.hold(box.layers)
        try:
            await handle.destroy()
            if box.sealed is None:
                raise Internal("the sandbox ended before it was sealed", reason="CREATE_FAILED")
        except BaseException as error:
            self._layers.release(box.layers)
            if isinstance(error, Refused):
                raise Internal(f"the sandbox could not be sealed: {error.what}", reason="CREATE_FAILED") from error
            raise
        self._layers.add(layer_id, box.sealed, box.layers)
        return SealedLayer(layer_id, max(0, box.sealed.size - box.image.size))

    async def has_layer(self, layer_id: str) -> bool:
        # A daemon's images are swept by others too.
        return layer_id in self._layers and await self._images.there(f"{REPOSITORY}:{layer_id}")

    async def remove_layer(self, layer_id: str) -> None:
        self._layers.remove(layer_id)


@dataclass(slots=True)
class _Box:
    """A live sandbox: its container, the way into it, and its handle."""

    name: str
    container: str
    image: ReadyImage
    reached: Reached
    handle: AttendedSandbox | None = None
    layers: tuple[str, ...] = ()
    seal_as: str = ""
    sealed: ReadyImage | None = None

    async def destroy(self) -> None:
        """End it; harmless when it has ended."""
        if self.handle is not None:
            await self.handle.destroy()

    def lose(self, reason: str) -> None:
        """It ended by itself."""
        if self.handle is not None:
            self.handle.lose(reason)


def _environment(image: ReadyImage, path: Sequence[str]) -> dict[str, str]:
    """What every process of a sandbox has in its environment: the image's own, and the user's."""
    account = image.account
    return {
        "LANG": "C.UTF-8",
        **image.env,
        "PATH": ":".join([*path, image.env.get("PATH") or SYSTEM_PATH]),
        "HOME": account.home,
        "USER": USER,
        "LOGNAME": USER,
        "SHELL": account.shell,
        "TERM": "dumb",
        "TMPDIR": "/tmp",  # noqa: S108 - a path in the sandbox
    }


def _epoch(moment: str) -> str:
    """A daemon's time as its filters take it."""
    return f"{datetime.fromisoformat(moment).timestamp():.6f}"


def _instance(folder: Path) -> str:
    """The name of this state directory for ever: what is labelled with it is ours."""
    file = folder / "instance"
    if not file.exists():
        partial = folder / "instance.partial"
        partial.write_text(secrets.token_hex(16))
        partial.rename(file)
    return file.read_text().strip()
