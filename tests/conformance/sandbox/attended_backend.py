"""A backend of attended sandboxes with nothing of its own: the local backend's sandboxes, entered by an attendant.

Purpose: the least that a backend of attended sandboxes must do (make a sandbox, start the attendant, open pipes to it,
destroy), on a sandbox that is a real one. What processes and files do here they do on any such backend. It is found
as any plug-in is: through an entry point, which ``tests/conformance/sandbox/services.py`` puts on the path.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock_chassis.errors import Internal
from penstock_sandbox.backends.guest_client import launch
from penstock_sandbox.backends.guest_client.pipe import Armoured, Opener, Pipe, StreamPipe, unix_socket
from penstock_sandbox.backends.guest_client.sandbox import BackendHooks, GuestSandbox, ProcessDefaults
from penstock_sandbox.backends.guest_client.stream import LinkLost
from penstock_sandbox.backends.local.backend import LocalBackend, LocalOptions
from penstock_sandbox.backends.local.sandbox import LocalSandbox
from penstock_sandbox.backends.local.spawner import seccomp
from penstock_sandbox.domain import paths
from penstock_sandbox.domain.backend import Backend, MountedToolbox, SandboxHandle, SealedLayer
from penstock_sandbox.domain.errno import Refused
from penstock_sandbox.domain.model import NetworkKind, NetworkPolicy, RepeatablePart, SandboxSpec
from penstock_sandbox.settings import SandboxSettings
from penstock_sandbox.toolboxes import runtimes


class AttendedBackend(Backend):
    """See the module. Each sandbox has a directory of its own for its attendant's socket."""

    name = "attended"

    def __init__(self, settings: SandboxSettings) -> None:
        self._folder = settings.state_dir / "attended"
        self._toolboxes = settings.state_dir / "local" / "toolboxes"
        self._local = LocalBackend(
            LocalOptions(
                state_dir=self._folder / "local",
                # Beside the users of the real local backend, which runs in the same service.
                first_uid=settings.first_uid + 2 * settings.uid_count,
                uid_count=settings.uid_count,
                tmp_bytes=settings.tmp_bytes,
                staged={**runtimes.mountable(), "service": self._toolboxes},
            )
        )
        self._backing: dict[str, LocalSandbox] = {}

    async def open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._toolboxes.mkdir(parents=True, exist_ok=True)
        self._folder.chmod(0o711)
        await self._local.open()
        # Its handles are the attendant's, which freeze nothing and start processes beside the helper.
        same = frozenset({RepeatablePart.HOSTNAME, RepeatablePart.MACHINE_ID})
        self.capabilities = dataclasses.replace(self._local.capabilities, pause=False, live_fork=False, repeatable=same)
        self.unavailable_reason = self._local.unavailable_reason
        self._program = launch.write_program(self._folder)
        (self._folder / "calls").write_bytes(seccomp.program(allocates=True) or b"")

    async def aclose(self) -> None:
        await self._local.aclose()

    async def create(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        toolboxes: Sequence[MountedToolbox],
        on_lost: Callable[[str], None],
    ) -> SandboxHandle:
        made: list[GuestSandbox] = []

        def gone(reason: str) -> None:
            for sandbox in made:
                sandbox.lose(reason)

        network = spec.network
        bare = _without_endpoint(spec)
        backing = await self._local.create(sandbox_id, bare, toolboxes, gone)
        assert isinstance(backing, LocalSandbox)
        folder = self._folder / sandbox_id

        async def destroy() -> None:
            self._backing.pop(sandbox_id, None)
            try:
                await backing.destroy()
            finally:
                shutil.rmtree(folder, ignore_errors=True)

        sandbox = GuestSandbox(
            sandbox_id,
            await self._opener(folder / "socket"),
            ProcessDefaults(backing.home, backing.workdir, backing.user, backing.default_env),
            BackendHooks(on_lost, destroy, diff=backing.diff, stats=backing.stats, oom_kills=backing.oom_kills),
        )
        made.append(sandbox)
        self._backing[sandbox_id] = backing
        try:
            await self._start_attendant(folder, backing)
            await sandbox.open(network)
        except BaseException as error:
            await sandbox.destroy()
            if isinstance(error, Refused | LinkLost | launch.GuestFailed):
                raise Internal(f"the sandbox could not be made: {error}", reason="CREATE_FAILED") from error
            raise
        return sandbox

    async def _start_attendant(self, folder: Path, backing: LocalSandbox) -> None:
        folder.mkdir(mode=0o700)
        await launch.serve(
            self._program,
            folder / "socket",
            enter=backing.first_pid,
            user=(paths.USER_ID, paths.USER_ID) if os.geteuid() == 0 else None,
            cgroups=backing.group.members_files if backing.group is not None else (),
            seccomp=self._folder / "calls",
        )

    async def _opener(self, path: Path) -> Opener:
        return unix_socket(str(path))

    async def seal(self, handle: SandboxHandle, layer_id: str) -> SealedLayer:
        assert isinstance(handle, GuestSandbox)
        sealed = await self._local.seal(self._backing[handle.id], layer_id)
        await handle.destroy()
        return sealed

    async def has_layer(self, layer_id: str) -> bool:
        return await self._local.has_layer(layer_id)

    async def remove_layer(self, layer_id: str) -> None:
        await self._local.remove_layer(layer_id)


class ArmouredBackend(AttendedBackend):
    """The same over ``attach --armour`` in a process of its own, as where only programs can be run in a sandbox."""

    name = "attended-armoured"

    async def _opener(self, path: Path) -> Opener:
        async def attach() -> Pipe:
            ours, theirs = socket.socketpair()
            with theirs:
                process = subprocess.Popen(  # as in launch: never a fork of this process
                    [sys.executable, "-I", "-S", str(self._program), "attach", "--socket", str(path), "--armour"],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    env={},
                )
            reader, writer = await asyncio.open_connection(sock=ours)

            async def end() -> None:
                process.kill()
                await asyncio.to_thread(process.wait)

            return Armoured(StreamPipe(reader, writer, end))

        return attach


def _without_endpoint(spec: SandboxSpec) -> SandboxSpec:
    if spec.network.kind is NetworkKind.ONE_ENDPOINT:
        return dataclasses.replace(spec, network=NetworkPolicy())
    return spec
