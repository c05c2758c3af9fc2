"""The E2B backend: sandboxes of E2B's cloud, with a guest agent over a command's standard input and output.

Purpose: combines the parts. One sandbox is: an E2B sandbox with our labels and no internet, the guest agent that root
started in it, and a pipe that this service opened outwards; model calls come back over that pipe, so the sandbox needs
no network access, and this machine no inbound one.

Invariants
- Capabilities are tested: ``open`` makes a sandbox, asks E2B whether it is closed and tries from inside, before the
  backend is available (R55).
- E2B itself ends each sandbox a margin after its lease, so that a forgotten one does not stay (R50).
- A cancelled create is awaited and its sandbox removed: a sent request cannot be taken back (R49).
- Sandboxes with our label that this process does not know are removed, at ``open`` and periodically.
"""

from __future__ import annotations

import asyncio
import dataclasses
import fnmatch
import functools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from penstock_chassis.aio.deletion import Deletions
from penstock_chassis.aio.retry import Backoff, Delays
from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.errors import (
    FailedPrecondition,
    Internal,
    PenstockError,
    ResourceExhausted,
    Unavailable,
)
from penstock_chassis.times import even_time
from penstock_chassis.validation import invalid_field
from penstock_sandbox.backends.e2b.cloud import Address, Cloud, installed
from penstock_sandbox.backends.e2b.errors import Denied, Gone
from penstock_sandbox.backends.e2b.layers import Layers
from penstock_sandbox.backends.e2b.provisioning import equip, longest_s
from penstock_sandbox.backends.e2b.sandbox import MARGIN_S, E2BSandbox, Lifetime, process_defaults
from penstock_sandbox.backends.e2b.trial_checks import holds_processes, leak, pauses
from penstock_sandbox.backends.guest_client.stream import LinkLost
from penstock_sandbox.backends.remote_machine.sweeping import SWEEP_S, sweep_forever
from penstock_sandbox.domain.backend import Backend, MountedToolbox, SandboxHandle, SealedLayer
from penstock_sandbox.domain.errno import Refused
from penstock_sandbox.domain.model import Capabilities, ForkKind, NetworkKind, NetworkPolicy, SandboxSpec

_TRIAL_S = 120.0
_TRIAL_DELAYS = Delays(1.0, SWEEP_S)
_REMOVAL_DELAYS = Delays(0.5, 60.0, jitter=(0.5, 1.0))
_LAST_CHANCE_S = 10.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class E2BOptions:
    """The operator's options for this backend; ``address`` is None if no key is set."""

    state_dir: Path
    address: Address | None
    template: str = "base"
    allowed_templates: tuple[str, ...] = ("*",)
    max_lifetime_s: float = 86_400.0
    allow_open_network: bool = False


class E2BBackend(Backend):
    """See the module."""

    name = "e2b"
    layers_outlive = True
    host_programs = False

    def __init__(self, options: E2BOptions) -> None:
        self._options = options
        self._cloud: Cloud | None = None
        # What stays at E2B costs money, even if its caller has gone.
        self._removals = Deletions(_REMOVAL_DELAYS, gone=(Gone,))
        self._live: dict[str, E2BSandbox | None] = {}
        """By our ids; None during the create."""
        self._layers: Layers | None = None
        self._user = ""
        self._loops = TaskOwner()
        self._cleanups = TaskOwner()

    # Opening and closing -----------------------------------------------------------------------------------------

    async def open(self) -> None:
        if not installed():
            self.unavailable_reason = "the E2B SDK is not installed: pip install 'penstock-sandbox[e2b]'"
        elif self._options.address is None:
            self.unavailable_reason = "no API key: set PENSTOCK_SANDBOX_E2B_API_KEY or E2B_API_KEY"
        else:
            instance = await asyncio.to_thread(_instance, self._options.state_dir)
            self._cloud = Cloud(self._options.address, instance)
            self._layers = Layers(self._cloud, self._removals)
            if not await self._try():
                self._loops.start(self._try_again())
            self._loops.start(sweep_forever(self._sweep_all, (PenstockError, Denied)))

    async def _try(self) -> bool:
        """Removes leftovers and tries a sandbox; returns False if E2B was unreachable, so that a retry may help."""
        try:
            await self._sweep()
            capabilities = await self._tried()
        except (Unavailable, ResourceExhausted) as error:
            self.unavailable_reason = error.message
        except Denied as denied:
            self.unavailable_reason = f"E2B refuses to list sandboxes (status {denied.status})"
            return True
        except PenstockError as error:
            self.unavailable_reason = error.message
            return True
        else:
            self.capabilities = capabilities
            self.unavailable_reason = ""
            return True
        _log.warning("e2b backend is unavailable for now", reason=self.unavailable_reason)
        return False

    async def _try_again(self) -> None:
        backoff = Backoff(_TRIAL_DELAYS)
        while not await self._try():
            await backoff.wait()

    async def _tried(self) -> Capabilities:
        """Returns the capabilities that a trial shows. Raises FailedPrecondition with the reason if there are none."""
        problem, found = await self._trial(NetworkKind.NONE)
        if not problem:
            more = {NetworkKind.OPEN} if self._options.allow_open_network else set()
            networks = frozenset({NetworkKind.NONE, NetworkKind.ONE_ENDPOINT, *more})
            return dataclasses.replace(found, networks=networks)
        _log.error("e2b keeps no sandbox closed", reason=problem)
        if self._options.allow_open_network:
            still, found = await self._trial(NetworkKind.OPEN)
            if not still:
                return dataclasses.replace(found, networks=frozenset({NetworkKind.OPEN}))
        raise FailedPrecondition(problem, reason="BACKEND_UNAVAILABLE")

    async def _trial(self, network: NetworkKind) -> tuple[str, Capabilities]:
        """Makes and checks a sandbox: returns its failure or "", and its capabilities, apart from networks.

        Raises Unavailable if it could not be checked.
        """
        trial_id = f"trial-{secrets.token_hex(8)}"
        self._live[trial_id] = None
        try:
            sandbox = await self._make(trial_id, _trial_spec(network), (), lambda _: None)
            self._user = sandbox.user
            if not sandbox.protected:
                _log.warning("the template's user is root: programs in its sandboxes can end the guest")
            if network is not NetworkKind.OPEN and (problem := await self._open_after_all(sandbox)):
                return problem, Capabilities()
            fork, live_fork = await self._tries_forks(sandbox, network)
            pause = await self._tries_pause(sandbox, network)
            return "", Capabilities(
                fork=fork,
                live_fork=live_fork,
                pause=pause,
                pty=sandbox.terminals,
                stdin_stream=True,
                toolboxes=True,
                kill_tree=True,
            )
        except FailedPrecondition as error:
            return error.message, Capabilities()
        except (Gone, Denied) as error:
            return f"E2B does not report whether a sandbox's network is closed ({error})", Capabilities()
        finally:
            await self._discard(trial_id)

    async def _open_after_all(self, sandbox: E2BSandbox) -> str:
        """Returns the failure of a network that should be closed, or ""."""
        if not await self._our_cloud.is_closed(sandbox.e2b_id):
            return "this deployment of E2B does not confirm that a sandbox's network is closed"
        return await leak(sandbox.made)

    async def _tries_forks(self, source: E2BSandbox, network: NetworkKind) -> tuple[ForkKind, bool]:
        """Finds out whether there are snapshots, and whether a live sandbox's have its files and no processes."""
        layer_id, child_id = f"lf-{source.id}", f"{source.id}-fork"
        try:
            await self._our_layers.seal_live(source, layer_id)
            self._live[child_id] = None
            spec = dataclasses.replace(_trial_spec(network), snapshot_id=layer_id)
            child = await self._make(child_id, spec, (), lambda _: None)
            live_fork = not await holds_processes(child, source)
        except FailedPrecondition as error:
            _log.info("this deployment of E2B has no snapshots", reason=error.message)
            return ForkKind.NONE, False
        finally:
            if child_id in self._live:
                await self._discard(child_id)
            await self._our_layers.remove(layer_id)
        if not live_fork:
            _log.warning("this deployment of E2B copies processes with files: live sandboxes cannot be forked")
        return ForkKind.FILESYSTEM, live_fork

    async def _tries_pause(self, sandbox: E2BSandbox, network: NetworkKind) -> bool:
        problem = await pauses(sandbox)
        if not problem and network is not NetworkKind.OPEN:
            problem = await self._open_after_all(sandbox)
        if problem:
            _log.info("this deployment of E2B cannot pause", reason=problem)
        return not problem

    async def aclose(self) -> None:
        await self._loops.aclose()
        await self._cleanups.wait(_LAST_CHANCE_S)
        await asyncio.gather(*(live.destroy() for live in list(self._live.values()) if live is not None))
        await self._removals.aclose(_LAST_CHANCE_S)

    # Sandboxes ---------------------------------------------------------------------------------------------------

    def refuse_unsupported(self, spec: SandboxSpec) -> None:
        super().refuse_unsupported(spec)
        if spec.user not in ("", self._user):
            raise FailedPrecondition(
                f"sandboxes of E2B run as the template's user, {self._user!r}",
                reason="CAPABILITY_MISSING",
                metadata={"backend": self.name, "user": spec.user},
            )
        if spec.image and not any(
            fnmatch.fnmatchcase(spec.image, pattern) for pattern in self._options.allowed_templates
        ):
            raise FailedPrecondition(
                f"the operator's e2b_allowed_templates does not allow {spec.image!r}",
                reason="IMAGE_NOT_ALLOWED",
                metadata={"backend": self.name, "image": spec.image},
            )
        if (spec.lease_s or 0.0) > self._options.max_lifetime_s:
            most = f"{self._options.max_lifetime_s:g} s"
            raise invalid_field("spec.lease", f"E2B keeps a sandbox for at most {most}")

    async def create(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        toolboxes: Sequence[MountedToolbox],
        on_lost: Callable[[str], None],
    ) -> SandboxHandle:
        self._live[sandbox_id] = None
        making = asyncio.create_task(self._make(sandbox_id, spec, toolboxes, on_lost))
        try:
            return await asyncio.shield(making)
        except BaseException:
            # The request is not cancelled with us, or its result would be an orphan.
            await self._cleanups.run(self._abandon(sandbox_id, making))
            raise

    async def _make(
        self, sandbox_id: str, spec: SandboxSpec, toolboxes: Sequence[MountedToolbox], on_lost: Callable[[str], None]
    ) -> E2BSandbox:
        fresh = spec.image or self._options.template
        template = self._our_layers.template(spec.snapshot_id) if spec.snapshot_id else fresh
        try:
            lease_s, began_at = spec.lease_s or 0.0, even_time()
            # Its lease begins when it is ready. E2B gets it all the same, to refuse what the account cannot have.
            timeout_s = min(max(lease_s, longest_s(toolboxes)) + MARGIN_S, self._options.max_lifetime_s)
            made = await self._our_cloud.create(sandbox_id, template, timeout_s, spec.network.kind)
            workload = await equip(made, sandbox_id, toolboxes, fresh=not spec.snapshot_id)
            path = [folder for toolbox in toolboxes for folder in toolbox.path]
            sandbox = E2BSandbox(
                sandbox_id,
                self._our_cloud,
                made,
                process_defaults(workload, path),
                spec,
                Lifetime(began_at, self._options.max_lifetime_s),
                on_lost,
                self._release,
            )
            self._live[sandbox_id] = sandbox
            await sandbox.open(spec.network)
            await sandbox.begin_lease(lease_s)
        except (Gone, LinkLost) as error:
            why = f" ({error.reason})" if isinstance(error, LinkLost) else ""
            raise Unavailable(
                f"the sandbox was lost during its creation{why}", reason="CREATE_FAILED", retry_after_s=1.0
            ) from None
        except Refused as refusal:
            raise Internal(f"the sandbox could not be made: {refusal.what}", reason="CREATE_FAILED") from refusal
        except Denied as denied:
            if spec.snapshot_id and denied.status == 404:
                self._our_layers.forget(spec.snapshot_id)
            raise _not_made(denied, spec, template) from None
        return sandbox

    async def _abandon(self, sandbox_id: str, making: asyncio.Task[E2BSandbox]) -> None:
        # The caller got the error already; here only the sandbox's end matters.
        await asyncio.gather(making, return_exceptions=True)
        await self._discard(sandbox_id)

    async def _discard(self, sandbox_id: str) -> None:
        """Ends a create that was begun under one of our ids."""
        live = self._live.get(sandbox_id)
        if live is not None:
            await live.destroy()
        await self._remove_made(sandbox_id)

    async def _remove_made(self, sandbox_id: str) -> None:
        """Removes all sandboxes made under one of our ids, and forgets it."""

        async def once() -> None:
            for listed in await self._our_cloud.ours(sandbox_id):
                await self._our_cloud.kill(listed.id)

        await self._removals.delete(f"made {sandbox_id}", once)
        self._live.pop(sandbox_id, None)

    async def _release(self, sandbox: E2BSandbox) -> None:
        await self._removals.delete(sandbox.e2b_id, functools.partial(self._our_cloud.kill, sandbox.e2b_id))
        self._live.pop(sandbox.id, None)

    # Layers ------------------------------------------------------------------------------------------------------

    async def seal(self, handle: SandboxHandle, layer_id: str) -> SealedLayer:
        assert isinstance(handle, E2BSandbox)
        return await self._our_layers.seal(handle, layer_id)

    async def seal_live(self, handle: SandboxHandle, layer_id: str) -> SealedLayer:
        assert isinstance(handle, E2BSandbox)
        return await self._our_layers.seal_live(handle, layer_id)

    async def adopt_layers(self, known: Sequence[str]) -> frozenset[str]:
        if self._layers is None:
            raise FailedPrecondition(self.unavailable_reason, reason="BACKEND_UNAVAILABLE")
        try:
            return await self._layers.adopt(known)
        except Denied as denied:
            raise FailedPrecondition(
                f"E2B refuses to list snapshots (status {denied.status})", reason="BACKEND_UNAVAILABLE"
            ) from None

    async def has_layer(self, layer_id: str) -> bool:
        return layer_id in self._our_layers

    async def remove_layer(self, layer_id: str) -> None:
        await self._our_layers.remove(layer_id)

    # Sweeping ----------------------------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        """Removes our sandboxes that are unknown here, and loses those that are unknown to E2B."""
        before = [live for live in self._live.values() if live is not None and live.settled]
        listed = await self._our_cloud.ours()
        there = {one.id for one in listed}
        for sandbox in before:
            if sandbox.e2b_id not in there and sandbox.settled:
                sandbox.lose("SANDBOX_VANISHED")
        for one in listed:
            if one.sandbox_id not in self._live:
                _log.warning("removing a leftover", sandbox=one.sandbox_id)
                await self._removals.delete(one.id, functools.partial(self._our_cloud.kill, one.id))

    async def _sweep_all(self) -> None:
        await self._sweep()
        await self._our_layers.sweep()

    # Parts -------------------------------------------------------------------------------------------------------

    @property
    def _our_cloud(self) -> Cloud:
        assert self._cloud is not None, "an unavailable backend is never called"
        return self._cloud

    @property
    def _our_layers(self) -> Layers:
        assert self._layers is not None, "an unavailable backend is never called"
        return self._layers


def _trial_spec(network: NetworkKind) -> SandboxSpec:
    return SandboxSpec(network=NetworkPolicy(network), lease_s=_TRIAL_S)


def _not_made(denied: Denied, spec: SandboxSpec, template: str) -> PenstockError:
    if denied.status in (402, 403):
        return FailedPrecondition(
            f"E2B does not allow this account to do this (status {denied.status})", reason="BACKEND_UNAVAILABLE"
        )
    if spec.snapshot_id:
        return FailedPrecondition("E2B no longer has the snapshot", reason="SNAPSHOT_LOST")
    return FailedPrecondition(
        f"E2B refuses this sandbox of the template {template!r} (status {denied.status})",
        reason="CAPABILITY_MISSING",
        metadata={"backend": "e2b", "image": template},
    )


def _instance(state_dir: Path) -> str:
    """Returns the permanent mark of this service's sandboxes."""
    state_dir.mkdir(parents=True, exist_ok=True)
    file = state_dir / "instance"
    if not file.exists():
        partial = file.with_suffix(".partial")
        partial.write_text(secrets.token_hex(8))
        partial.replace(file)
    return file.read_text()
