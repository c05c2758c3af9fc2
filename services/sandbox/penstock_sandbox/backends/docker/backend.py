"""The Docker backend: sandboxes as containers of a daemon, here or elsewhere, served by guest agents.

Purpose: combines the parts. One sandbox is: a hardened container of a prepared image, whose first process does nothing;
a guest agent, in one of several ways (``access``); and its mounts (``sandboxes`` makes and ends them).

Invariants
- Capabilities are tested: ``open`` makes a sandbox and checks it from inside before the backend is available.
- Everything carries the labels of the instance and of the run; leftovers of another run are removed (see ``reaper``).
- A daemon that cannot be reached is tried until it answers; until then what an earlier run left counts as there.
- A snapshot is a committed image, immutable, and stays while a sandbox or another snapshot is based on it.
"""

from __future__ import annotations

import asyncio
import fnmatch
import secrets
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import datetime
from pathlib import Path
from typing import Final

import structlog

from penstock_chassis.aio.retry import Backoff, Delays
from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.errors import FailedPrecondition, Internal, PenstockError, Unavailable
from penstock_sandbox.backends.docker import seccomp
from penstock_sandbox.backends.docker.access.started_inside import Inside
from penstock_sandbox.backends.docker.access.ways import Direct, Reach, Sidecar
from penstock_sandbox.backends.docker.cleanup.exits import Deaths
from penstock_sandbox.backends.docker.cleanup.reaper import Owner, Reaper
from penstock_sandbox.backends.docker.companions import Companions
from penstock_sandbox.backends.docker.engine.daemon import Daemon
from penstock_sandbox.backends.docker.engine.errors import Missing, Refused
from penstock_sandbox.backends.docker.images.images import Images
from penstock_sandbox.backends.docker.images.layers import Layers, name_of
from penstock_sandbox.backends.docker.images.prepared_images import Prepared, ReadyImage, described
from penstock_sandbox.backends.docker.mounts import Mounts
from penstock_sandbox.backends.docker.names_files import NamesFiles
from penstock_sandbox.backends.docker.options import DockerOptions
from penstock_sandbox.backends.docker.probe.trial_container import Trial, keeps_apart, unusable
from penstock_sandbox.backends.docker.sandboxes import DockerSandboxes
from penstock_sandbox.backends.images.additions import USER
from penstock_sandbox.domain.backend import Backend, MountedToolbox, SandboxHandle, SealedLayer
from penstock_sandbox.domain.model import SandboxSpec

_ADVICE = "start it, or set docker_host (or DOCKER_HOST) to its address"
_RETRIES: Final = Delays(1.0, 60.0, jitter=(0.5, 1.0))

_log = structlog.get_logger(__name__)


class DockerBackend(Backend):
    """See the module. Its files are under ``options.state_dir``."""

    name = "docker"
    layers_outlive = True
    host_programs = False

    def __init__(self, options: DockerOptions) -> None:
        self._options = options
        self._stack = AsyncExitStack()
        self._retrying = TaskOwner()
        self._sweeps = False
        """Whether the reaper has been opened: then what earlier runs left is removed."""

    # Opening and closing -----------------------------------------------------------------------------------------

    async def open(self) -> None:
        if not await self._answered():
            self._retrying.start(self._try_until_it_answers(), "docker-retry")

    async def _try_until_it_answers(self) -> None:
        backoff = Backoff(_RETRIES)
        await backoff.wait()
        while not await self._answered():
            await backoff.wait()

    async def _answered(self) -> bool:
        """Opens everything, or says why it cannot; returns whether the daemon answered."""
        answered, reason = True, self.unavailable_reason
        try:
            await self._open()
        except PenstockError as error:
            answered, self.unavailable_reason = not isinstance(error, Unavailable), error.message
        except Refused as error:
            self.unavailable_reason = f"the Docker daemon refused: {error.what}"
        if self.unavailable_reason:
            if self.unavailable_reason != reason:
                _log.info("docker backend unavailable", reason=self.unavailable_reason, tried_again=not answered)
            await self._stack.aclose()
        return answered

    async def _open(self) -> None:
        options = self._options
        try:
            daemon = await Daemon.connect(options.host)
            self._stack.push_async_callback(daemon.aclose)
            info = await daemon.info()
        except Unavailable as error:
            raise Unavailable(f"{error.message}: {_ADVICE}", reason="DOCKER_UNREACHABLE") from error
        if problem := unusable(info, options.runtime):
            raise FailedPrecondition(problem, reason="BACKEND_UNAVAILABLE")
        options.state_dir.mkdir(parents=True, exist_ok=True)
        owner = Owner(await asyncio.to_thread(_instance, options.state_dir), secrets.token_hex(8))
        reaper = Reaper(daemon, owner, other_runtime=bool(options.runtime))
        self._stack.push_async_callback(reaper.aclose)
        await reaper.open()
        self._sweeps = True
        prepared = Prepared(daemon, owner, reaper, options.prepared_bytes, keep_workdir=options.read_only)
        self._stack.push_async_callback(prepared.aclose)
        operators = (options.image, options.sidecar_image)
        images = Images(daemon, prepared, options.pull_timeout_s, operators, options.registries)
        self._stack.push_async_callback(images.aclose)
        layers = Layers(reaper)
        self._stack.push_async_callback(layers.aclose)
        mounts = Mounts(daemon, owner, reaper)
        self._stack.push_async_callback(mounts.aclose)
        if not options.may_pull and not await images.there(options.image):
            raise FailedPrecondition(
                f"the daemon has no image {options.image!r}: run docker pull, set docker_image, or make docker the "
                "default_backend, which pulls the image at its start",
                reason="BACKEND_UNAVAILABLE",
            )
        companions = Companions(
            options, daemon, owner, reaper, images, await seccomp.offered(daemon, options.state_dir)
        )
        names = NamesFiles(options.state_dir.absolute() / "names" if await daemon.is_podman() else None)
        boxes = DockerSandboxes(options, daemon, owner, reaper, layers, companions, names)
        deaths = Deaths(daemon, owner, _epoch(str(info["SystemTime"])), boxes.died, boxes.signalled, boxes.names)
        self._stack.push_async_callback(deaths.aclose)
        self._prepared, self._images, self._layers = prepared, images, layers
        self._mounts, self._boxes, self._companions = mounts, boxes, companions
        self._daemon, self._reaper = daemon, reaper
        self._stack.push_async_callback(self._close_reach)
        self._stack.push_async_callback(boxes.aclose)
        sidecar = Sidecar(daemon, images, owner, reaper, options.sidecar_image)
        direct = Direct(options.state_dir)
        inside = Inside(daemon, images, owner, reaper, mounts, options.sidecar_image, options.memory_bytes)
        ways: list[Reach] = [direct, sidecar, inside]
        if options.reach != "auto":
            ways = [way for way in ways if way.name == options.reach]
        elif keeps_apart(info, options.runtime):
            # An operator with such a runtime wants no weaker isolation, and the other ways would wait in vain.
            ways = [inside]
        found = await Trial(options, info, daemon, owner, reaper, images, mounts, boxes).choose(ways)
        if isinstance(found, str):
            self.unavailable_reason = found
        else:
            self.capabilities, self.unavailable_reason = found, ""

    async def aclose(self) -> None:
        await self._retrying.aclose()
        await self._stack.aclose()

    async def _close_reach(self) -> None:
        reach, self._boxes.reach = self._boxes.reach, None
        if reach is not None:
            await reach.aclose()

    async def reconcile(self, known: Sequence[str]) -> None:
        # The reaper finds them by their labels. It has nothing to confirm where the journal names none.
        if known and not self._sweeps:
            raise Unavailable(self.unavailable_reason, reason="DOCKER_UNREACHABLE")

    # Sandboxes ---------------------------------------------------------------------------------------------------

    async def create(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        toolboxes: Sequence[MountedToolbox],
        on_lost: Callable[[str], None],
    ) -> SandboxHandle:
        layers: tuple[str, ...] = ()
        # A sandbox that becomes a snapshot has none: what its setup did to them would be lost.
        beside = () if spec.to_be_sealed else spec.companions
        for companion in beside:
            self._check_allowed(companion.image)
        planned = await self._companions.plan(beside, root=self.capabilities.root)
        if spec.snapshot_id:
            image, layers = self._layers.stack(spec.snapshot_id)
            _check_user(spec.user, image)
        else:
            name = spec.image or self._options.image
            self._check_allowed(name)
            image = await self._images.ready(name, "" if spec.user == USER else spec.user)
            if image.account.uid == 0 and not self.capabilities.root:
                # By account: an image may have several names for it.
                raise FailedPrecondition(
                    "the docker backend does not run programs as root: the operator must set docker_allow_root",
                    reason="CAPABILITY_MISSING",
                    metadata={"backend": self.name, "capabilities": "root"},
                )
        # Referenced from here: a layer must not be removed while a container is made from it.
        self._layers.hold(layers)
        try:
            mounts = await self._mounts.of(toolboxes, image.name)
        except BaseException as error:
            self._layers.release(layers)
            if isinstance(error, Refused):
                raise Internal(f"toolboxes cannot be mounted: {error.what}", reason="CREATE_FAILED") from error
            raise
        path = [folder for toolbox in toolboxes for folder in toolbox.path]
        return await self._boxes.make(sandbox_id, image, spec, mounts, on_lost, path, layers, planned)

    def _check_allowed(self, image: str) -> None:
        if image != self._options.image and not any(
            fnmatch.fnmatchcase(image, pattern) for pattern in self._options.allowed_images
        ):
            raise FailedPrecondition(
                f"the operator's docker_allowed_images does not allow {image!r}",
                reason="IMAGE_NOT_ALLOWED",
                metadata={"image": image},
            )

    # Layers ------------------------------------------------------------------------------------------------------

    async def seal(self, handle: SandboxHandle, layer_id: str) -> SealedLayer:
        box = self._boxes.of(handle)
        if box is None:
            raise FailedPrecondition("the sandbox is gone", reason="SANDBOX_LOST")
        box.seal_as = layer_id
        # The layer's own reference; the sandbox's ends with it.
        self._layers.hold(box.layers)
        try:
            await handle.destroy()
            if box.seal_failure is not None:
                raise box.seal_failure
            if box.sealed is None:
                raise Internal("the sandbox ended before it was sealed", reason="CREATE_FAILED")
        except BaseException as error:
            box.seal_as = ""
            self._layers.release(box.layers)
            if isinstance(error, Refused):
                raise Internal(f"the sandbox could not be sealed: {error.what}", reason="CREATE_FAILED") from error
            raise
        self._layers.add(layer_id, box.sealed, box.layers)
        return SealedLayer(layer_id, max(0, box.sealed.size - box.image.size))

    async def adopt_layers(self, known: Sequence[str]) -> frozenset[str]:
        if not self.available:
            if known and self._retrying:
                raise Unavailable(self.unavailable_reason, reason="DOCKER_UNREACHABLE")
            raise FailedPrecondition(self.unavailable_reason, reason="BACKEND_UNAVAILABLE")
        there = {}
        for layer_id in known:
            with suppress(Missing):
                there[layer_id] = described(await self._daemon.image(name_of(layer_id)))
        for layer_id, image in there.items():
            # Its base needs no reference: an image keeps what is below it.
            self._layers.add(layer_id, image, ())
        self._reaper.snapshots = frozenset(map(name_of, there))
        return frozenset(there)

    async def has_layer(self, layer_id: str) -> bool:
        # Others may delete a daemon's images too.
        return layer_id in self._layers and await self._images.there(name_of(layer_id))

    async def remove_layer(self, layer_id: str) -> None:
        self._layers.remove(layer_id)


def _check_user(user: str, image: ReadyImage) -> None:
    if user not in ("", image.account.name, str(image.account.uid)):
        raise FailedPrecondition(
            f"the snapshot's user is {image.account.name!r}",
            reason="CAPABILITY_MISSING",
            metadata={"user": user},
        )


def _epoch(moment: str) -> str:
    """Converts a daemon's time for its filters."""
    return f"{datetime.fromisoformat(moment).timestamp():.6f}"


def _instance(folder: Path) -> str:
    """Returns the permanent name of this state directory: objects with this label are ours."""
    file = folder / "instance"
    if not file.exists():
        partial = folder / "instance.partial"
        partial.write_text(secrets.token_hex(16))
        partial.rename(file)
    return file.read_text().strip()
