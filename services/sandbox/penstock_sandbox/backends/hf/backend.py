"""The hf backend: sandboxes that are jobs of Hugging Face, with an attendant in each.

Purpose: ties the parts together. One sandbox is: a job, a user in it, an attendant that runs as root there, a pipe to
the attendant that the service opened outwards, and the touches that keep the job from idling out.

Invariants
- A job's network reaches the whole internet and nothing here can change that: no network is offered that says
  otherwise, but where the operator accepted that the rest is open, which the capabilities then tell (R55).
- There are never more sandboxes than threads to stream from them; more are refused, not queued.
- A job is ended until it is known to have ended: again and again, with growing pauses, while the service runs; what
  is left then is ended by its successor, by the idle timeout, or by the job's own time limit.
"""

from __future__ import annotations

import asyncio
import fnmatch
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from penstock_chassis.errors import FailedPrecondition, PenstockError, ResourceExhausted, Unavailable
from penstock_sandbox.attendant import program
from penstock_sandbox.backends.attended.stream import LinkLost
from penstock_sandbox.backends.base import Backend, MountedToolbox, SandboxHandle, SealedLayer
from penstock_sandbox.backends.hf import bootstrap, hub
from penstock_sandbox.backends.hf.archives import Archives
from penstock_sandbox.backends.hf.carrying import equip
from penstock_sandbox.backends.hf.classic import ClassicClient
from penstock_sandbox.backends.hf.client import Client, HfOptions, Remote
from penstock_sandbox.backends.hf.hub import HubClient
from penstock_sandbox.backends.hf.sandbox import HfSandbox
from penstock_sandbox.backends.hf.threads import Threads
from penstock_sandbox.backends.refusals import Refused
from penstock_sandbox.model import Capabilities, ForkKind, NetworkKind, SandboxSpec
from penstock_sandbox.settings import SandboxSettings

NO_TOKEN = "no Hugging Face token: set PENSTOCK_SANDBOX_HF_TOKEN or HF_TOKEN"  # noqa: S105 - says that there is none

_TOUCHES_PER_IDLE_TIMEOUT = 4
_FIRST_RETRY_S = 0.5
_LAST_RETRY_S = 60.0
_CLOSING_S = 20.0

_log = structlog.get_logger(__name__)


def from_settings(settings: SandboxSettings) -> Backend:
    """The hf backend as the settings want it; the entry point."""
    token = settings.hf_token.get_secret_value() if settings.hf_token is not None else os.environ.get("HF_TOKEN", "")
    options = HfOptions(
        token=token.strip(),
        image=settings.hf_image,
        images=settings.hf_allowed_images,
        flavor=settings.hf_flavor,
        namespace=settings.hf_namespace,
        max_sandboxes=settings.hf_max_sandboxes,
        idle_timeout_s=settings.hf_idle_timeout_s,
        start_timeout_s=settings.hf_start_timeout_s,
        max_lifetime_s=min(settings.max_lease_s, hub.LIFETIME_S),
        allow_open_egress=settings.hf_allow_open_egress,
        layer_bytes=settings.snapshot_cache_bytes,
    )
    return HfBackend(options, settings.hf_client, settings.state_dir / "hf", wait=settings.default_backend == "hf")


class HfBackend(Backend):
    """See the module. ``sdk`` is "hub" or "hf-sandbox"; ``state_dir`` keeps who this service is between starts.

    ``wait``: opening waits for Hugging Face's first answer. Without it a service with other backends starts at once.
    """

    name = "hf"
    host_programs = False

    def __init__(self, options: HfOptions, sdk: str, state_dir: Path, *, wait: bool = True) -> None:
        self._options = options
        self._sdk = sdk
        self._state_dir = state_dir
        self._wait = wait
        self._threads: Threads | None = None
        self._client: Client | None = None
        self._archives = Archives(state_dir / "archives", options.layer_bytes)
        self._live: dict[str, HfSandbox] = {}
        self._making = 0
        self._ending: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        if not self._options.token:
            self.unavailable_reason = NO_TOKEN
            return
        await asyncio.to_thread(self._archives.open)
        self._threads = Threads(self._options.max_sandboxes)
        if self._sdk == "hub":
            instance = await asyncio.to_thread(_instance, self._state_dir)
            self._client = HubClient(self._options, instance, self._threads)
        else:
            self._client = ClassicClient(self._options, self._state_dir / "jobs", self._threads)
        self.unavailable_reason = "Hugging Face has not answered yet"
        tried = asyncio.Event()
        self._tasks.append(asyncio.create_task(self._connect(self._client, tried), name="hf-connect"))
        if self._wait:
            await tried.wait()

    async def _connect(self, client: Client, tried: asyncio.Event) -> None:
        """Become available, now or when Hugging Face answers; never, where trying again would change nothing."""
        pause = _FIRST_RETRY_S
        while True:
            try:
                self.unavailable_reason = await client.open()
                if not self.unavailable_reason:
                    await self._ready(client)
                return
            except PenstockError as error:
                self.unavailable_reason = f"Hugging Face does not answer: {error.message}"
                _log.warning("hf backend unavailable", reason=error.message, retry_s=pause)
            finally:
                tried.set()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_RETRY_S)

    async def _ready(self, client: Client) -> None:
        # Before anything new is made: whatever carries this service's name is an earlier run's.
        self.unavailable_reason = "what an earlier run left is not ended yet"
        left = await client.sweep()
        if left:
            _log.warning("ended jobs that an earlier run of this service left", count=left)
        open_egress = self._options.allow_open_egress
        more = {NetworkKind.NONE, NetworkKind.ONE_ENDPOINT} if open_egress else set()
        self.capabilities = Capabilities(
            networks=frozenset({NetworkKind.OPEN, *more}),
            open_egress=open_egress,
            fork=ForkKind.ARCHIVE,
            pty=True,
            stdin_stream=True,
            root=True,
            toolboxes=True,
            kill_tree=True,
        )
        self._tasks.append(asyncio.create_task(self._touch_all(), name="hf-touch"))
        self.unavailable_reason = ""

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(one.destroy() for one in list(self._live.values())), return_exceptions=True)
        if self._ending:
            _, unfinished = await asyncio.wait(self._ending, timeout=_CLOSING_S)
            for task in unfinished:
                _log.error("a job may still run; the next start ends it", job=task.get_name())
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)
        if self._threads is not None:
            await self._archives.aclose()
            self._threads.close()

    # Sandboxes ---------------------------------------------------------------------------------------------------

    def refuse_unsupported(self, spec: SandboxSpec) -> None:
        super().refuse_unsupported(spec)
        missing = ""
        if spec.image and spec.image != self._options.image and not _matches(spec.image, self._options.images):
            missing = f"image: the operator's hf_allowed_images do not name {spec.image!r}"
        elif spec.user not in ("", bootstrap.USER, "root"):
            missing = f"user: there are {bootstrap.USER!r} and 'root'"
        elif spec.lease_s is not None and spec.lease_s > self._options.max_lifetime_s:
            missing = f"lease: a job ends after {self._options.max_lifetime_s:g} s"
        if missing:
            raise FailedPrecondition(
                f"the hf backend cannot do this here: {missing}",
                reason="CAPABILITY_MISSING",
                metadata={"backend": self.name, "capabilities": missing.partition(":")[0]},
            )

    async def create(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        toolboxes: Sequence[MountedToolbox],
        on_lost: Callable[[str], None],
    ) -> SandboxHandle:
        assert self._client is not None, "opened and available"
        if len(self._live) + self._making >= self._options.max_sandboxes:
            raise ResourceExhausted(
                f"{self._options.max_sandboxes} hf sandboxes are there, which is hf_max_sandboxes",
                reason="SANDBOX_LIMIT",
                retry_after_s=1.0,
            )
        self._making += 1
        try:
            remote = await self._client.create(sandbox_id, spec.image or self._options.image)
            try:
                sandbox = await self._furnished(sandbox_id, remote, spec, toolboxes, on_lost)
            except BaseException:
                await self._end(remote)
                raise
            # From here on it is known, and destroyed like any other.
            self._live[sandbox_id] = sandbox
        finally:
            self._making -= 1
        try:
            await sandbox.open(spec.network)
        except BaseException as error:
            await sandbox.destroy()
            if isinstance(error, LinkLost | Refused):
                raise Unavailable(
                    f"the attendant did not answer: {error}", reason="CREATE_FAILED", retry_after_s=1.0
                ) from error
            raise
        return sandbox

    async def _furnished(
        self,
        sandbox_id: str,
        remote: Remote,
        spec: SandboxSpec,
        toolboxes: Sequence[MountedToolbox],
        on_lost: Callable[[str], None],
    ) -> HfSandbox:
        place = await bootstrap.prepare(remote, as_root=spec.user == "root")
        layers = [self._archives.layer(spec.snapshot_id)] if spec.snapshot_id else []
        async with self._archives.packed(toolboxes) as packed:
            # Noted before anything is unpacked: what is captured of it then holds what it stands on.
            await equip(remote, place, [*layers, *packed], noted=spec.to_be_sealed)
        await bootstrap.start_attendant(remote, place, program.text().encode())
        path = [folder for toolbox in toolboxes for folder in toolbox.path]
        return HfSandbox(sandbox_id, remote, place, path, on_lost, self._release)

    async def _release(self, sandbox: HfSandbox) -> None:
        self._live.pop(sandbox.id, None)
        await self._end(sandbox.remote)

    async def _end(self, remote: Remote) -> None:
        """End a job, however often that must be tried; waits for it for a while, and goes on behind the caller."""
        task = asyncio.create_task(self._kill(remote), name=remote.job_id)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        await asyncio.wait([task], timeout=_CLOSING_S)

    async def _kill(self, remote: Remote) -> None:
        pause = _FIRST_RETRY_S
        while True:
            try:
                await remote.kill()
                return
            except PenstockError as error:
                _log.warning("a job was not ended yet", job=remote.job_id, error=error.message, retry_s=pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_RETRY_S)

    async def _touch_all(self) -> None:
        """Keep live jobs from idling out. A job that does not answer shows in its pipe, not here."""
        while True:
            await asyncio.sleep(self._options.idle_timeout_s / _TOUCHES_PER_IDLE_TIMEOUT)
            touched = await asyncio.gather(
                *(one.remote.touch() for one in list(self._live.values())), return_exceptions=True
            )
            for result in touched:
                if isinstance(result, Exception):
                    _log.warning("a sandbox could not be touched", error=str(result))

    # Layers ------------------------------------------------------------------------------------------------------

    async def seal(self, handle: SandboxHandle, layer_id: str) -> SealedLayer:
        assert isinstance(handle, HfSandbox)
        return await self._archives.seal(handle, layer_id)

    async def has_layer(self, layer_id: str) -> bool:
        return layer_id in self._archives

    async def remove_layer(self, layer_id: str) -> None:
        await self._archives.remove(layer_id)


def _matches(image: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(image, pattern) for pattern in patterns)


def _instance(folder: Path) -> str:
    """Who this service is: random, and the same as long as its state is kept."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = folder / "instance"
    if not file.exists():
        fresh = folder / "instance.new"
        fresh.write_text(secrets.token_hex(16))
        fresh.replace(file)
    return file.read_text().strip()
