"""The third way of access: the sandbox's own first process starts the guest agent, inside.

Purpose: runtimes with a kernel of their own (gVisor, virtual machines) run a container's processes where neither this
service nor another container can enter. So the container's first process forks the guest agent, as root of the sandbox,
and then becomes the usual first process. The agent's Python, the operator's, is mounted; nothing of the image is run or
needed.

Invariants
- Only for kernels that are not the machine's: ``probe.inspection`` checks that. The guest agent has another user than
  the workload, which can neither signal nor trace it, nor write its files; it has four capabilities, the workload
  none. On the machine's own kernel nothing of ours should live in a sandbox, so there this way is refused.
- Such a kernel enforces no control groups inside: processes are limited by their user's limit, set for the workload
  alone; memory by the operator's limit for the whole sandbox, which is lost when it exceeds that.
- Written data is visible to the daemon only after ``written`` has returned: these kernels delay it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Final

from penstock_chassis.errors import FailedPrecondition
from penstock_sandbox.backends.docker import container
from penstock_sandbox.backends.docker.access.interpreter import FOLDERS, Interpreter
from penstock_sandbox.backends.docker.access.ways import ENDED, ROOT_MODE, Piped, Reach, Reached, Start, figures
from penstock_sandbox.backends.docker.cleanup.reaper import Owner, Reaper
from penstock_sandbox.backends.docker.engine.daemon import Daemon
from penstock_sandbox.backends.docker.engine.errors import Json, Refused
from penstock_sandbox.backends.docker.images.images import Images
from penstock_sandbox.backends.docker.images.prepared_images import ReadyImage
from penstock_sandbox.backends.docker.mounts import Mounts
from penstock_sandbox.backends.guest_client import ending, program
from penstock_sandbox.backends.guest_client.pipe import SandboxGone
from penstock_sandbox.backends.images import pause_program
from penstock_sandbox.backends.images.additions import OURS, File, packed
from penstock_sandbox.domain.model import Resources, Stats
from penstock_sandbox.guest import confinement

PLACE: Final = f"{OURS}/inside"
_SERVING: Final = f"{OURS}/attendant"
_SOCKET: Final = f"{_SERVING}/socket"
_PROGRAM: Final = f"{PLACE}/attendant"
_FILTER: Final = f"{PLACE}/filter"
# A readable copy: gVisor executes no other file.
_HOLD: Final = f"{PLACE}/hold"
_WRITTEN_S: Final = 60.0
# Tasks on the machine that such a kernel may need per process of a sandbox, and for itself. Only a backstop: a
# kernel (gVisor) that gets no further task panics, and the sandbox is lost. A fork bomb held at 40 processes was seen
# to have 600.
_TASKS_EACH, _TASKS_OWN = 32, 512


class Inside(Reach):
    """Access by a guest agent that lives in the sandbox."""

    name = "inside"
    own_kernel = True

    def __init__(
        self,
        daemon: Daemon,
        images: Images,
        owner: Owner,
        reaper: Reaper,
        mounts: Mounts,
        image: str,
        memory_bytes: int | None,
    ) -> None:
        self._daemon = daemon
        self._images = images
        self._owner = owner
        self._reaper = reaper
        self._mounts = mounts
        self._base = image
        self._memory_bytes = memory_bytes
        self._mount: Json = {}
        self.python: Sequence[str] = ()
        """The argv that starts a Python program in a sandbox."""

    async def open(self) -> None:
        image, architecture = await self._images.known(self._base)
        first = pause_program.program(architecture)
        if first is None:
            problem = f"docker_sidecar_image ({self._base}) is for {architecture}; sandboxes need amd64 or arm64"
            raise FailedPrecondition(problem, reason="BACKEND_UNAVAILABLE")
        files = {
            "attendant": program.text().encode(),
            "filter": confinement.program(architecture),
            "hold": first,
        }
        settings: Json = {"image": image, "command": ["-"], "entrypoint": ["-"], "labels": self._owner.labels("making")}
        source = await self._daemon.create("", settings, {"network_mode": "none"})
        interpreter = Interpreter()
        try:
            self._mount = await self._mounts.made(
                f"inside-{secrets.token_hex(4)}", PLACE, image, lambda: self._pieces(source, interpreter, files)
            )
        except Refused as error:
            problem = f"its Python cannot be copied from {self._base}: {error.what}"
            raise FailedPrecondition(problem, reason="BACKEND_UNAVAILABLE") from error
        finally:
            await self._reaper.container(source)
        command = interpreter.command(PLACE)
        if command is None:
            problem = f"docker_sidecar_image ({self._base}) has no python3 that can be copied"
            raise FailedPrecondition(problem, reason="BACKEND_UNAVAILABLE")
        self.python = command

    def _pieces(self, source: str, interpreter: Interpreter, files: dict[str, bytes]) -> Iterator[Iterator[bytes]]:
        """Yields two tars: the interpreter, and our own files."""

        def folders() -> Iterator[tuple[str, Iterator[bytes]]]:
            for folder in FOLDERS:
                found = self._daemon.fetch_stream(source, folder)
                if found is not None:
                    try:
                        yield folder, found[1]
                    finally:
                        found[1].close()

        yield interpreter.taken(folders(), ".")
        yield iter([packed([File(path, content) for path, content in files.items()])])

    async def aclose(self) -> None:
        return

    def furnish(self, settings: Json, host: Json, image: ReadyImage, resources: Resources, *, writable: bool) -> None:
        # A first process must reap orphans: it becomes a reaper, and a child of it carries the pipe.
        carry = ["attach", "--socket", _SOCKET, "--aside", "--last", ENDED, "--then", _HOLD, "--first"]
        workload = ["--user", f"{image.account.uid}:{image.account.gid}", "--confine", "--seccomp", _FILTER]
        serve = [*self.python, _PROGRAM, "serve", "--socket", _SOCKET, *workload]
        if writable:
            serve += ["--root-mode", f"{ROOT_MODE:o}"]
        if resources.pids is not None:
            serve += ["--most-processes", str(resources.pids)]
        container.inhabit(settings, host, [*serve, "--and", *carry], self._mount)
        host.pop("pids_limit", None)
        if resources.pids is not None:
            host["pids_limit"] = _TASKS_EACH * resources.pids + _TASKS_OWN
        if self._memory_bytes is not None:
            host["mem_limit"] = host["memswap_limit"] = self._memory_bytes
        if not writable:
            host["tmpfs"][_SERVING] = "rw,noexec,nosuid,nodev,mode=700,size=1073741824"

    async def reach(self, name: str, start: Start) -> Reached:
        reached = _Within(self._daemon, name, self.python)
        try:
            await reached.attach()
            await start()
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(reached.close()))
            raise
        return reached


class _Within(Piped):
    def __init__(self, daemon: Daemon, name: str, python: Sequence[str]) -> None:
        super().__init__(daemon, name, [*python, _PROGRAM, "attach", "--socket", _SOCKET, "--aside"])
        self._python = python

    def gone(self) -> SandboxGone:
        return SandboxGone("SANDBOX_VANISHED")

    async def stats(self) -> Stats:
        measured = figures(await self._daemon.stats(self._name))
        # The counted tasks are the kernel's own, on the machine.
        return replace(measured, pids=None)

    async def written(self, *, ended: bool) -> None:
        text, arguments = (ending.PROGRAM, [_SOCKET]) if ended else (ending.SYNC, [])
        problem = ""
        try:
            execution = await self._daemon.execute(self._name, [*self._python, "-c", text, *arguments])
            async with asyncio.timeout(_WRITTEN_S), AsyncExitStack() as stack:
                pipes = await stack.enter_async_context(self._daemon.command(execution))
                async for _ in pipes.output():
                    pass
                problem = pipes.errors.decode(errors="replace").strip()
            if await self._daemon.exit_code(execution) == 0:
                return
        except TimeoutError:
            problem = "it takes too long"
        except Refused as error:
            problem = error.what
        raise FailedPrecondition(f"the sandbox's files could not be synced to disk: {problem}", reason="SEAL_FAILED")
