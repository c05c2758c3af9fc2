"""Finds out what this backend can claim of a daemon by checking a sandbox from inside (R55).

Invariants: nothing is claimed that a trial did not show; of the ways of access that the operator allows, the first is
used for which everything holds.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import replace

import structlog

from penstock_chassis.errors import Internal, PenstockError
from penstock_sandbox.backends.docker import container
from penstock_sandbox.backends.docker.access.ways import Reach
from penstock_sandbox.backends.docker.cleanup.reaper import Owner, Reaper
from penstock_sandbox.backends.docker.engine.daemon import Daemon
from penstock_sandbox.backends.docker.engine.errors import Json, Refused
from penstock_sandbox.backends.docker.images.images import Images
from penstock_sandbox.backends.docker.images.prepared_images import ReadyImage
from penstock_sandbox.backends.docker.mounts import Mounts, bind
from penstock_sandbox.backends.docker.options import DockerOptions
from penstock_sandbox.backends.docker.probe.inspection import look, look_closer, reads, write_nonce
from penstock_sandbox.backends.docker.sandboxes import TRIAL, DockerSandboxes
from penstock_sandbox.backends.guest_client.sandbox import GuestSandbox
from penstock_sandbox.backends.guest_client.stream import LinkLost
from penstock_sandbox.backends.images.additions import OURS
from penstock_sandbox.domain.errno import Refused as RefusedInside
from penstock_sandbox.domain.model import (
    Capabilities,
    DiskLimit,
    ForkKind,
    NetworkKind,
    RepeatablePart,
    Resources,
    SandboxSpec,
)

_TRIAL = Resources(cpu=0.5, memory_bytes=256 * 1024 * 1024, pids=64)
# Number of processes really started, within the operator's memory for one sandbox.
_TRIAL_PIDS_TRIED = 16
_TRIAL_DISK = 64 * 1024 * 1024
_SHARED_PROBE = f"{OURS}/shared"
# No process ids: programs of Penstock's own start among the sandbox's, as many as the daemon's pace has it.
_REPEATABLE = frozenset({RepeatablePart.HOSTNAME, RepeatablePart.MACHINE_ID})
_OWN_KERNELS = ("runsc", "kata")
_GVISOR_ADVICE = (
    "; to have it, install gVisor (apt-get install runsc), name it under runtimes in the daemon's daemon.json and "
    "restart the daemon: docs/guides/backend-docker.md has the lines"
)

_log = structlog.get_logger(__name__)


def unusable(info: Json, runtime: str) -> str:
    """Returns why a daemon, by its own description, cannot make sandboxes at all; empty: nothing found."""
    if info.get("OSType") != "linux":
        return "the daemon runs no Linux containers"
    if runtime and runtime not in (info.get("Runtimes") or {}):
        has = ", ".join(sorted(info.get("Runtimes") or {}))
        how = _GVISOR_ADVICE if "runsc" in runtime else ""
        return f"the daemon has no runtime {runtime!r}; it has: {has}{how}"
    return ""


def keeps_apart(info: Json, runtime: str) -> bool:
    """Whether the runtime's program, as configured in the daemon, is known to give containers another kernel."""
    described = (info.get("Runtimes") or {}).get(runtime) or {}
    program = str(described.get("path") or described.get("runtimeType") or "")
    return any(name in program.rpartition("/")[2] for name in _OWN_KERNELS)


class Trial:
    """Tries a daemon; ``info`` is its own description."""

    def __init__(
        self,
        options: DockerOptions,
        info: Json,
        daemon: Daemon,
        owner: Owner,
        reaper: Reaper,
        images: Images,
        mounts: Mounts,
        boxes: DockerSandboxes,
    ) -> None:
        self._options = options
        self._daemon = daemon
        self._owner = owner
        self._reaper = reaper
        self._images = images
        self._mounts = mounts
        self._boxes = boxes
        self._limits = Resources(
            cpu=_TRIAL.cpu if info.get("CpuCfsQuota") else None,
            memory_bytes=_TRIAL.memory_bytes if info.get("MemoryLimit") else None,
            pids=_TRIAL.pids if info.get("PidsLimit") else None,
        )
        self._kernel = str(info.get("KernelVersion") or "")
        self._files_seen = True

    async def choose(self, reaches: Sequence[Reach]) -> Capabilities | str:
        """Opens the first way of access whose trial sandbox passes, and leaves it in ``DockerSandboxes.reach``.

        Returns the capabilities, or why there are none.
        """
        problems = []
        for reach in reaches:
            self._boxes.reach = reach
            if reach.own_kernel:
                # Its control groups are around it, not in it: its processes count there, its memory does not.
                self._limits = replace(self._limits, memory_bytes=None, pids=_TRIAL_PIDS_TRIED)
            try:
                await reach.open()
                image = await self._images.ready(self._options.image)
                problem = await self._try(image, reach)
                if not problem:
                    claims = await self._claims(image, reach)
                    _log.info("docker backend ready", reach=reach.name, shared_files=self._mounts.same_files)
                    return claims
            except (PenstockError, LinkLost, RefusedInside, TimeoutError) as error:
                problem = str(error) or type(error).__name__
            except Refused as error:
                problem = error.what
            self._boxes.reach = None
            await reach.aclose()
            problems.append(f"{reach.name}: {problem}")
            _log.info("this access to containers does not work", reach=reach.name, reason=problem)
        return "a trial sandbox failed: " + "; ".join(problems)

    async def _try(self, image: ReadyImage, reach: Reach) -> str:
        """Makes a sandbox and checks it from inside; returns the failures (empty: none)."""
        nonce = secrets.token_hex(16)
        shared = self._options.state_dir / "shared"
        await asyncio.to_thread(write_nonce, shared, nonce)
        spec = SandboxSpec(resources=self._limits)
        try:
            box = await self._boxes.make(TRIAL, image, spec, [bind(shared, _SHARED_PROBE)], lambda _: None)
            self._mounts.same_files = True
        except Internal as error:
            # The daemon does not see our files: only the bind fails with this message.
            if "bind" not in error.message and "mount" not in error.message:
                raise
            self._mounts.same_files = False
            box = await self._boxes.make(TRIAL, image, spec, [], lambda _: None)
        try:
            if self._mounts.same_files:
                self._mounts.same_files = await reads(box, f"{_SHARED_PROBE}/nonce", nonce)
            problem, running = await look(box, image.account.shell, own_kernel=reach.own_kernel)
            if not problem and reach.own_kernel:
                problem = await self._look_closer(box, reach)
            if not problem and running is not None and self._limits.pids is not None and running < 2:
                problem = "its processes do not count towards its limits"
        finally:
            await box.destroy()
        return problem

    async def _look_closer(self, handle: GuestSandbox, reach: Reach) -> str:
        found = await look_closer(handle, reach.python, self._limits.pids)
        if found.problem:
            return found.problem
        if found.kernel == self._kernel:
            return "it shares the machine's kernel: set docker_reach to direct or sidecar"
        box = self._boxes.of(handle)
        assert box is not None
        # The check left a file there.
        await box.reached.written(ended=False)
        written, container = f"{handle.workdir}/trial", box.container
        self._files_seen = await self._daemon.in_thread(
            lambda: any(path == written for path, _ in self._daemon.changes(container))
        )
        return ""

    async def _claims(self, image: ReadyImage, reach: Reach) -> Capabilities:
        networks = {NetworkKind.NONE, NetworkKind.ONE_ENDPOINT}
        if self._options.allow_open_network:
            networks.add(NetworkKind.OPEN)
        if self._options.allowlists:
            networks.add(NetworkKind.ALLOWLIST)
        writable = not self._options.read_only
        kept = writable and self._files_seen
        return Capabilities(
            networks=frozenset(networks),
            fork=ForkKind.FILESYSTEM if kept else ForkKind.NONE,
            pty=True,
            stdin_stream=True,
            limit_cpu=self._limits.cpu is not None,
            limit_memory=self._limits.memory_bytes is not None,
            limit_pids=self._limits.pids is not None,
            disk_limit=DiskLimit.HARD if not writable or await self._limits_disk(image) else DiskLimit.NONE,
            diff=kept,
            root=self._options.allow_root and not reach.own_kernel and await self._holds_root(),
            toolboxes=True,
            kill_tree=True,
            own_kernel=reach.own_kernel,
            repeatable=_REPEATABLE,
            # A kernel of its own has a network of its own, which no other container can join.
            companions=writable and not reach.own_kernel,
        )

    async def _holds_root(self) -> bool:
        """Whether a root sandbox is as closed as others."""
        image = await self._images.ready(self._options.image, "root")
        box = await self._boxes.make(TRIAL, image, SandboxSpec(resources=self._limits), [], lambda _: None)
        try:
            problem, _ = await look(box, image.account.shell, as_root=True)
        finally:
            await box.destroy()
        if problem:
            _log.warning("root is not offered: its trial sandbox failed", reason=problem)
        return not problem

    async def _limits_disk(self, image: ReadyImage) -> bool:
        """Whether the storage driver limits a container's size: found out by requesting it."""
        settings, host = container.sandbox(
            image,
            self._owner.labels("making"),
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
