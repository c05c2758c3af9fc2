"""The backend of Kubernetes: pods that agent-sandbox keeps ready, claimed for one sandbox each.

Purpose: combines the parts. One sandbox is: a SandboxClaim with this instance's label, the pod that the cluster binds
to it, adopted over TLS at its address, and the guest that the service starts there. No byte of a sandbox passes the
API server: it is asked to claim, to say when a pod is ready, and to delete.

Invariants
- Capabilities are tested: ``open`` claims a sandbox, reads its template's policy and tries the network from inside
  before the backend is available (R55); so is each further warm pool at its first use, and each whose template changed.
- The cluster ends each claim a margin after its lease, so that a forgotten one does not stay (R50).
- A cancelled create is awaited and its claim deleted; a claim counts as deleted when the cluster has it no more.
- Claims with our label that this process does not know are deleted, at ``open`` and periodically.
"""

from __future__ import annotations

import asyncio
import fnmatch
import functools
import secrets
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from penstock_chassis.aio.deletion import Deletion, Deletions
from penstock_chassis.aio.pace import Pace
from penstock_chassis.aio.retry import Backoff, Delays
from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.errors import FailedPrecondition, PenstockError, Unavailable
from penstock_chassis.times import even_time
from penstock_sandbox.backends.guest_client import program
from penstock_sandbox.backends.guest_client.stream import LinkLost
from penstock_sandbox.backends.kubernetes import diagnosis, trial_checks
from penstock_sandbox.backends.kubernetes.claims import Claims, Followed
from penstock_sandbox.backends.kubernetes.cluster import ClaimState, Cluster, missing
from penstock_sandbox.backends.kubernetes.errors import Gone
from penstock_sandbox.backends.kubernetes.keys import ClaimKey, client_context
from penstock_sandbox.backends.kubernetes.pod import Address, AdoptedPod
from penstock_sandbox.backends.kubernetes.sandbox import MARGIN_S, PodSandbox
from penstock_sandbox.backends.remote_machine import bootstrap
from penstock_sandbox.backends.remote_machine.archive_store import Archives
from penstock_sandbox.backends.remote_machine.archive_transfer import equip
from penstock_sandbox.backends.remote_machine.sweeping import SWEEP_S, sweep_forever
from penstock_sandbox.domain.backend import Backend, MountedToolbox, SandboxHandle, SealedLayer
from penstock_sandbox.domain.errno import Refused
from penstock_sandbox.domain.model import Capabilities, ForkKind, NetworkKind, NetworkPolicy, SandboxSpec

_TRIAL_S: Final = 120.0
_LOOK_S: Final = 3.0
"""So often a pod that is not ready is asked why, and its claim itself, in case the watch stands still."""
_OPENING_S: Final = 60.0
_TRIAL_DELAYS: Final = Delays(1.0, SWEEP_S)
_REMOVAL_DELAYS: Final = Delays(0.5, 60.0, jitter=(0.5, 1.0))
_LAST_CHANCE_S: Final = 15.0
_KEY_DAYS: Final = 30

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class KubernetesOptions:
    """The operator's options for this backend; an empty ``warm_pool`` or no ``keys`` = it is not configured."""

    state_dir: Path
    namespace: str = ""
    warm_pool: str = ""
    allowed_warm_pools: tuple[str, ...] = ()
    keys: Path | None = None
    kubeconfig: Path | None = None
    context: str = ""
    port: int = 7790
    creates_per_s: float = 10.0
    ready_timeout_s: float = 180.0
    delete_timeout_s: float = 60.0
    layer_bytes: int = 20 * 1024**3
    allow_open_network: bool = False


class KubernetesBackend(Backend):
    """See the module. ``wait``: opening waits for the trial, for a minute at most."""

    name = "kubernetes"
    host_programs = False
    creates_at_once = 64

    def __init__(self, options: KubernetesOptions, *, wait: bool = True) -> None:
        self._options = options
        self._wait = wait
        self._cluster: Cluster | None = None
        self._claims: Claims | None = None
        self._keys: ssl.SSLContext | None = None
        self._pace = Pace(options.creates_per_s)
        self._archives = Archives(options.state_dir / "archives", options.layer_bytes)
        self._removals = Deletions(_REMOVAL_DELAYS, gone=(Gone,))
        self._live: dict[str, PodSandbox | None] = {}
        """By our ids; None during the create."""
        self._closed_pools: dict[str, tuple[str, int]] = {}
        """Warm pools whose sandboxes were found closed, and the uid and generation of the template they had then."""
        self._loops = TaskOwner()
        self._cleanups = TaskOwner()

    # Opening and closing -----------------------------------------------------------------------------------------

    async def open(self) -> None:
        options = self._options
        if not options.warm_pool or options.keys is None:
            self.unavailable_reason = (
                "not configured: set PENSTOCK_SANDBOX_KUBERNETES_WARM_POOL and PENSTOCK_SANDBOX_KUBERNETES_KEYS "
                "(docs/guides/backend-kubernetes.md)"
            )
            return
        if lacking := missing():
            self.unavailable_reason = f"{lacking} is not installed: pip install 'penstock-sandbox[kubernetes]'"
            return
        try:
            self._keys = await asyncio.to_thread(client_context, options.keys / "service.pem", options.keys / "pod.crt")
        except OSError as error:
            self.unavailable_reason = (
                f"kubernetes_keys: {options.keys} must have service.pem and pod.crt, as the guide's manifests make "
                f"them ({error.strerror or error})"
            )
            return
        await asyncio.to_thread(self._archives.open)
        instance = await asyncio.to_thread(_instance, options.state_dir)
        self._cluster = Cluster(options.namespace, instance, options.kubeconfig, options.context)
        self.unavailable_reason = "the cluster has not answered yet"
        try:
            await self._cluster.open()
        except PenstockError as error:
            self.unavailable_reason = error.message
            return
        self._claims = Claims(self._cluster)
        tried = asyncio.Event()
        self._loops.start(self._claims.watch())
        self._loops.start(self._try_until_it_works(tried))
        if self._wait:
            try:
                async with asyncio.timeout(_OPENING_S):
                    await tried.wait()
            except TimeoutError:
                _log.warning("the first sandbox of the cluster is not ready yet; the service starts without it")

    async def _try_until_it_works(self, tried: asyncio.Event) -> None:
        """Becomes available, now or when the cluster is ready for it."""
        backoff = Backoff(_TRIAL_DELAYS)
        while True:
            try:
                await self._sweep()
                self.capabilities = await self._tried()
                self.unavailable_reason = ""
                self._loops.start(sweep_forever(self._sweep, (PenstockError, Gone)))
                return
            except (PenstockError, Gone) as error:
                # An operator may apply what is missing at any time.
                self.unavailable_reason = error.message if isinstance(error, PenstockError) else str(error)
                _log.warning("kubernetes backend is unavailable for now", reason=self.unavailable_reason)
            finally:
                tried.set()
            await backoff.wait()

    async def _tried(self) -> Capabilities:
        """Returns the capabilities that a trial shows. Raises PenstockError with the reason if there are none."""
        trial_id = f"trial-{secrets.token_hex(8)}"
        self._live[trial_id] = None
        spec = SandboxSpec(network=NetworkPolicy(NetworkKind.NONE), lease_s=_TRIAL_S)
        try:
            sandbox = await self._make(trial_id, spec, (), lambda _: None, is_trial=True)
            terminals = sandbox.terminals
        finally:
            await self._discard_patiently(trial_id)
        closed = self._options.warm_pool in self._closed_pools
        if not closed and not self._options.allow_open_network:
            raise FailedPrecondition(
                f"sandboxes of the warm pool {self._options.warm_pool!r} reach a network: give its template a "
                "networkPolicy without egress and a network plugin that enforces it, or set allow_open_network",
                reason="BACKEND_UNAVAILABLE",
            )
        return Capabilities(
            networks=frozenset({NetworkKind.NONE, NetworkKind.ONE_ENDPOINT} if closed else {NetworkKind.OPEN}),
            fork=ForkKind.ARCHIVE,
            pty=terminals,
            stdin_stream=True,
            toolboxes=True,
            kill_tree=True,
        )

    async def aclose(self) -> None:
        await self._loops.aclose()
        await self._cleanups.wait(_LAST_CHANCE_S)
        ending = [asyncio.create_task(live.destroy()) for live in list(self._live.values()) if live is not None]
        if ending:
            # What is left then, the next start deletes, or the cluster at its deadline.
            await asyncio.wait(ending, timeout=_LAST_CHANCE_S)
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
        await self._removals.aclose(_LAST_CHANCE_S)
        if self._cluster is not None:
            await self._archives.aclose()
            await self._cluster.aclose()

    # Sandboxes ---------------------------------------------------------------------------------------------------

    def refuse_unsupported(self, spec: SandboxSpec) -> None:
        super().refuse_unsupported(spec)
        if spec.user not in ("", bootstrap.USER):
            raise FailedPrecondition(
                f"sandboxes of Kubernetes run as {bootstrap.USER!r}",
                reason="CAPABILITY_MISSING",
                metadata={"backend": self.name, "user": spec.user},
            )
        allowed = (self._options.warm_pool, *self._options.allowed_warm_pools)
        if spec.image and not any(fnmatch.fnmatchcase(spec.image, pattern) for pattern in allowed):
            raise FailedPrecondition(
                f"the operator's kubernetes_allowed_warm_pools does not allow {spec.image!r} (an image names a warm "
                "pool on this backend)",
                reason="IMAGE_NOT_ALLOWED",
                metadata={"backend": self.name, "image": spec.image},
            )

    async def create(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        toolboxes: Sequence[MountedToolbox],
        on_lost: Callable[[str], None],
    ) -> SandboxHandle:
        await self._pace.turn()
        self._live[sandbox_id] = None
        making = asyncio.create_task(self._make(sandbox_id, spec, toolboxes, on_lost))
        try:
            return await asyncio.shield(making)
        except BaseException:
            making.cancel()
            await self._cleanups.run(self._abandon(sandbox_id, making))
            raise

    async def _make(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        toolboxes: Sequence[MountedToolbox],
        on_lost: Callable[[str], None],
        *,
        is_trial: bool = False,
    ) -> PodSandbox:
        pool = self._archives.base(spec.snapshot_id) if spec.snapshot_id else spec.image or self._options.warm_pool
        until = even_time() + (spec.lease_s or 0.0) + MARGIN_S
        followed = self._our_claims.follow(self._our_cluster.claim_name(sandbox_id))
        try:
            followed.observe(await self._our_cluster.create_claim(sandbox_id, pool, until))
            claim = await self._ready(followed)
            pod = await self._adopted(claim)
            place = await bootstrap.prepare(pod, as_root=False, backend=self.name)
            await self._check_pool(pool, pod, place, is_trial=is_trial)
            sandbox = await self._furnished(sandbox_id, claim, pod, place, spec, toolboxes, until, on_lost)
            self._live[sandbox_id] = sandbox
            await sandbox.open(spec.network)
            # The lease begins now; a pod that was long in coming has used up the deadline's margin.
            await sandbox.extend(even_time() + (spec.lease_s or 0.0))
        except (Gone, LinkLost, Refused) as error:
            raise Unavailable(
                f"the sandbox was lost during its creation ({error})", reason="CREATE_FAILED", retry_after_s=1.0
            ) from None
        followed.on_change = lambda: sandbox.observe(None if followed.gone else followed.state)
        followed.on_change()
        return sandbox

    async def _ready(self, followed: Followed) -> ClaimState:
        """Returns the claim once its pod is ready. Raises PenstockError: why it is not, in time or ever."""
        loop = asyncio.get_running_loop()
        limit = self._options.ready_timeout_s
        deadline, look = loop.time() + limit, loop.time() + _LOOK_S
        while True:
            if followed.gone:
                raise Gone("its claim was deleted by somebody else")
            state = followed.state
            assert state is not None, "its create has set it"
            if state.ready and state.address and state.sandbox:
                return state
            now = loop.time()
            pods = await self._our_cluster.pods_of(state.uid) if now >= min(look, deadline) else ()
            if (problem := diagnosis.hopeless(state, pods)) is not None:
                raise problem
            if now >= deadline:
                raise diagnosis.too_late(state, pods, limit)
            if now >= look:
                look = loop.time() + _LOOK_S
                followed.observe(await self._our_cluster.claim(state.name))
            await followed.change(min(look, deadline) - loop.time())

    async def _adopted(self, claim: ClaimState) -> AdoptedPod:
        assert self._keys is not None, "an unavailable backend is never called"
        key = await asyncio.to_thread(ClaimKey.make, _KEY_DAYS)
        name = await self._our_cluster.pod_name(claim.sandbox)
        return await AdoptedPod.adopt(Address(claim.address, self._options.port), self._keys, key, name)

    async def _check_pool(
        self, pool: str, pod: AdoptedPod, place: bootstrap.PreparedMachine, *, is_trial: bool
    ) -> None:
        """Looks at a warm pool. Raises FailedPrecondition if it is more open than the trial's was.

        Its template is read each time, since an operator may change it; the network is tried once for each version.
        """
        if not is_trial and NetworkKind.OPEN in self.capabilities.networks:
            return
        template = await self._our_cluster.template_of(pool)
        version = str(template["metadata"]["uid"]), int(template["metadata"]["generation"])
        closed = trial_checks.declares_closed(template)
        untried = is_trial or self._closed_pools.get(pool) != version
        if closed and untried and (reached := await trial_checks.leak(pod, place)):
            _log.error("the cluster does not enforce a template's network policy", pool=pool, reached=reached)
            closed = False
        if closed:
            self._closed_pools[pool] = version
        else:
            self._closed_pools.pop(pool, None)
        if not is_trial and not closed:
            raise FailedPrecondition(
                f"sandboxes of the warm pool {pool!r} reach a network: give its template a networkPolicy without "
                "egress",
                reason="TEMPLATE_UNSUITABLE",
                metadata={"backend": self.name, "image": pool},
            )

    async def _furnished(
        self,
        sandbox_id: str,
        claim: ClaimState,
        pod: AdoptedPod,
        place: bootstrap.PreparedMachine,
        spec: SandboxSpec,
        toolboxes: Sequence[MountedToolbox],
        until: float,
        on_lost: Callable[[str], None],
    ) -> PodSandbox:
        layers = [self._archives.layer(spec.snapshot_id)] if spec.snapshot_id else []
        async with self._archives.packed(toolboxes) as packed:
            # Recorded before anything is unpacked, so that a later capture includes the layer below.
            await equip(pod, place, [*layers, *packed], noted=spec.to_be_sealed)
        await bootstrap.start_guest(pod, place, program.text().encode())
        path = [folder for toolbox in toolboxes for folder in toolbox.path]
        return PodSandbox(sandbox_id, self._our_cluster, claim, pod, place, path, until, on_lost, self._release)

    async def _abandon(self, sandbox_id: str, making: asyncio.Task[PodSandbox]) -> None:
        # The caller got the error already; here only the claim's end matters.
        await asyncio.gather(making, return_exceptions=True)
        await self._discard_patiently(sandbox_id)

    async def _discard_patiently(self, sandbox_id: str) -> None:
        """The same as `_discard` for who has no use for its error: a deletion that is pending goes on."""
        try:
            await self._discard(sandbox_id)
        except Unavailable as error:
            _log.warning("a claim is not deleted yet", sandbox=sandbox_id, why=error.message)

    async def discard(self, sandbox_id: str) -> None:
        await self._discard(sandbox_id)

    async def _discard(self, sandbox_id: str) -> None:
        """Ends a create that was begun under one of our ids."""
        live = self._live.get(sandbox_id)
        if live is not None:
            await live.destroy()
        else:
            await self._remove(sandbox_id)

    async def _release(self, sandbox: PodSandbox) -> None:
        await self._remove(sandbox.id)

    async def _remove(self, sandbox_id: str) -> None:
        """Deletes a sandbox's claim, and forgets it. Raises Unavailable (DELETE_PENDING); it is retried then."""
        await self._removal(sandbox_id).outcome()

    def _removal(self, sandbox_id: str) -> Deletion:
        name = self._our_cluster.claim_name(sandbox_id)

        async def once() -> None:
            await self._delete(name)
            self._our_claims.forget(name)
            self._live.pop(sandbox_id, None)

        return self._removals.start(f"claim {name}", once)

    async def _delete(self, name: str) -> None:
        """Deletes a claim and waits until it is gone, with its pod. Raises PenstockError, also if that takes long."""
        loop = asyncio.get_running_loop()
        followed = self._our_claims.follow(name)
        try:
            await self._our_cluster.delete_claim(name)
            deadline = loop.time() + self._options.delete_timeout_s
            while not followed.gone:
                if loop.time() >= deadline:
                    raise Unavailable("the cluster has not ended its pod yet", reason="PROVIDER_FAILED")
                await followed.change(min(_LOOK_S, deadline - loop.time()))
                if not followed.gone:
                    await self._our_cluster.claim(name)
        except Gone:
            return

    # Layers ------------------------------------------------------------------------------------------------------

    async def seal(self, handle: SandboxHandle, layer_id: str) -> SealedLayer:
        assert isinstance(handle, PodSandbox)
        return await self._archives.seal(handle, layer_id)

    async def has_layer(self, layer_id: str) -> bool:
        return layer_id in self._archives

    async def remove_layer(self, layer_id: str) -> None:
        await self._archives.remove(layer_id)

    # Sweeping ----------------------------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        """Deletes our claims that are unknown here, and loses sandboxes whose claims are gone."""
        before = [live for live in self._live.values() if live is not None]
        found, _ = await self._our_cluster.claims()
        there = {claim.name for claim in found}
        for sandbox in before:
            if sandbox.claim.name not in there:
                sandbox.observe(None)
        for claim in found:
            if claim.sandbox_id not in self._live:
                _log.warning("removing a leftover", claim=claim.name, sandbox=claim.sandbox_id)
                self._removals.start(f"claim {claim.name}", functools.partial(self._delete_leftover, claim.name))

    async def _delete_leftover(self, name: str) -> None:
        await self._delete(name)
        self._our_claims.forget(name)

    # Parts -------------------------------------------------------------------------------------------------------

    @property
    def _our_cluster(self) -> Cluster:
        assert self._cluster is not None, "an unavailable backend is never called"
        return self._cluster

    @property
    def _our_claims(self) -> Claims:
        assert self._claims is not None, "an unavailable backend is never called"
        return self._claims


def _instance(state_dir: Path) -> str:
    """Returns the permanent mark of this service's sandboxes."""
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = state_dir / "instance"
    if not file.exists():
        partial = file.with_suffix(".partial")
        partial.write_text(secrets.token_hex(8))
        partial.replace(file)
    return file.read_text().strip()
