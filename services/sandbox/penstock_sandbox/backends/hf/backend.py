"""The hf backend: sandboxes that are jobs of Hugging Face, with a guest agent in each.

Purpose: combines the parts. One sandbox is: a job, a user in it, a guest agent that runs as root there, a pipe to the
guest agent that the service opened outwards, and the touches that keep the job from its idle timeout.

Invariants
- A job's network reaches the whole internet and nothing here can change that: no narrower network policy is offered,
  unless the operator accepted the open network, which the capabilities then report (R55).
- There are never more sandboxes than threads to stream from them; more are refused, not queued.
- Ending a job is retried until it is known to have ended, with growing pauses, while the service runs; the rest is
  ended by its successor, by the idle timeout, or by the job's own time limit.
"""

from __future__ import annotations

import asyncio
import fnmatch
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from penstock_chassis.aio.deletion import DELAYS, Deletions
from penstock_chassis.aio.retry import Backoff
from penstock_chassis.errors import FailedPrecondition, PenstockError, ResourceExhausted, Unavailable
from penstock_sandbox.backends.guest_client import program
from penstock_sandbox.backends.guest_client.stream import LinkLost
from penstock_sandbox.backends.hf import hub_sdk
from penstock_sandbox.backends.hf.client import Client, HfOptions, Remote
from penstock_sandbox.backends.hf.hub_sdk import HubClient
from penstock_sandbox.backends.hf.legacy_sdk import LegacyClient
from penstock_sandbox.backends.hf.sandbox import HfSandbox
from penstock_sandbox.backends.hf.threads import Threads
from penstock_sandbox.backends.remote_machine import bootstrap
from penstock_sandbox.backends.remote_machine.archive_store import Archives
from penstock_sandbox.backends.remote_machine.archive_transfer import equip
from penstock_sandbox.domain.backend import Backend, MountedToolbox, SandboxHandle, SealedLayer
from penstock_sandbox.domain.errno import Refused
from penstock_sandbox.domain.model import Capabilities, ForkKind, NetworkKind, SandboxSpec
from penstock_sandbox.settings import SandboxSettings

NO_TOKEN = "no Hugging Face token: set PENSTOCK_SANDBOX_HF_TOKEN or HF_TOKEN"  # noqa: S105 - says that there is none

_TOUCHES_PER_IDLE_TIMEOUT = 4
_CLOSING_S = 20.0

_log = structlog.get_logger(__name__)


def from_settings(settings: SandboxSettings) -> Backend:
    """Returns the hf backend, built from the settings; the entry point."""
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
        max_lifetime_s=min(settings.max_lease_s, hub_sdk.LIFETIME_S),
        allow_open_egress=settings.hf_allow_open_egress,
        layer_bytes=settings.snapshot_cache_bytes,
    )
    return HfBackend(options, settings.hf_client, settings.state_dir / "hf", wait=settings.default_backend == "hf")


class HfBackend(Backend):
    """See the module. ``sdk`` is "hub" or "hf-sandbox"; ``state_dir`` keeps this service's identity between starts.

    ``wait``: opening waits for Hugging Face's first response. Without it a service with other backends starts at once.
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
        self._ending = Deletions()
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
            self._client = LegacyClient(self._options, self._state_dir / "jobs", self._threads)
        self.unavailable_reason = "Hugging Face has not answered yet"
        tried = asyncio.Event()
        self._tasks.append(asyncio.create_task(self._connect(self._client, tried), name="hf-connect"))
        if self._wait:
            await tried.wait()

    async def _connect(self, client: Client, tried: asyncio.Event) -> None:
        """Becomes available, now or when Hugging Face responds; never, if a retry would change nothing."""
        backoff = Backoff(DELAYS)
        while True:
            try:
                self.unavailable_reason = await client.open()
                if not self.unavailable_reason:
                    await self._ready(client)
                return
            except PenstockError as error:
                self.unavailable_reason = f"Hugging Face does not answer: {error.message}"
                _log.warning("hf backend unavailable", reason=error.message)
            finally:
                tried.set()
            await backoff.wait()

    async def _ready(self, client: Client) -> None:
        # Before anything new is made: every job with this service's name is an earlier run's.
        self.unavailable_reason = "leftovers of an earlier run have not ended yet"
        left = await client.sweep()
        if left:
            _log.warning("ended leftover jobs of an earlier run of this service", count=left)
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
        # What is left, the next start ends.
        await self._ending.aclose(_CLOSING_S)
        if self._threads is not None:
            await self._archives.aclose()
            self._threads.close()

    # Sandboxes ---------------------------------------------------------------------------------------------------

    def refuse_unsupported(self, spec: SandboxSpec) -> None:
        super().refuse_unsupported(spec)
        missing = ""
        if spec.image and spec.image != self._options.image and not _matches(spec.image, self._options.images):
            missing = f"image: the operator's hf_allowed_images does not allow {spec.image!r}"
        elif spec.user not in ("", bootstrap.USER, "root"):
            missing = f"user: must be {bootstrap.USER!r} or 'root'"
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
                f"{self._options.max_sandboxes} hf sandboxes exist, which is hf_max_sandboxes: delete one, or raise it",
                reason="SANDBOX_LIMIT",
                retry_after_s=1.0,
            )
        self._making += 1
        try:
            image = self._archives.base(spec.snapshot_id) if spec.snapshot_id else spec.image or self._options.image
            remote = await self._client.create(sandbox_id, image)
            try:
                sandbox = await self._furnished(sandbox_id, remote, image, spec, toolboxes, on_lost)
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
                    f"the guest did not answer: {error}", reason="CREATE_FAILED", retry_after_s=1.0
                ) from error
            raise
        return sandbox

    async def _furnished(
        self,
        sandbox_id: str,
        remote: Remote,
        image: str,
        spec: SandboxSpec,
        toolboxes: Sequence[MountedToolbox],
        on_lost: Callable[[str], None],
    ) -> HfSandbox:
        place = await bootstrap.prepare(remote, as_root=spec.user == "root", backend=self.name)
        layers = [self._archives.layer(spec.snapshot_id)] if spec.snapshot_id else []
        async with self._archives.packed(toolboxes) as packed:
            # Recorded before anything is unpacked, so that a later capture includes the layer below.
            await equip(remote, place, [*layers, *packed], noted=spec.to_be_sealed)
        await bootstrap.start_guest(remote, place, program.text().encode())
        path = [folder for toolbox in toolboxes for folder in toolbox.path]
        return HfSandbox(sandbox_id, remote, image, place, path, on_lost, self._release)

    async def _release(self, sandbox: HfSandbox) -> None:
        self._live.pop(sandbox.id, None)
        await self._end(sandbox.machine)

    async def _end(self, remote: Remote) -> None:
        """Ends a job, with retries; waits for it for a while, then continues in the background."""
        deletion = self._ending.start(f"job {remote.job_id}", remote.kill)
        await asyncio.wait([deletion.task], timeout=_CLOSING_S)

    async def _touch_all(self) -> None:
        """Keeps live jobs from their idle timeout. A job that does not respond shows in its pipe, not here."""
        while True:
            await asyncio.sleep(self._options.idle_timeout_s / _TOUCHES_PER_IDLE_TIMEOUT)
            touched = await asyncio.gather(
                *(one.machine.touch() for one in list(self._live.values())), return_exceptions=True
            )
            for result in touched:
                if isinstance(result, Exception):
                    _log.warning("a sandbox's keep-alive failed", error=str(result))

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
    """Returns this service's identity: random, and the same as long as its state is kept."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = folder / "instance"
    if not file.exists():
        fresh = folder / "instance.new"
        fresh.write_text(secrets.token_hex(16))
        fresh.replace(file)
    return file.read_text().strip()
