"""One sandbox in a pod, with its guest behind the pod's entrypoint; the cluster ends it with its claim.

Invariants
- A pod that ended, was replaced, or whose claim is gone is lost at once; one that is only not ready is not: its pipe
  decides.
- The cluster's own deadline lies a margin after the lease, and is moved before a renewal gets its response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from penstock_chassis.times import even_time
from penstock_sandbox.backends.guest_client.files import lost
from penstock_sandbox.backends.guest_client.messages import Greeting
from penstock_sandbox.backends.guest_client.pipe import Pipe
from penstock_sandbox.backends.guest_client.sandbox import (
    BackendHooks,
    GuestSandbox,
    ProcessDefaults,
    by_what_serves_it,
)
from penstock_sandbox.backends.guest_client.stream import LinkLost
from penstock_sandbox.backends.kubernetes import diagnosis
from penstock_sandbox.backends.kubernetes.cluster import ClaimState, Cluster
from penstock_sandbox.backends.kubernetes.errors import Gone
from penstock_sandbox.backends.kubernetes.pod import AdoptedPod
from penstock_sandbox.backends.remote_machine import bootstrap
from penstock_sandbox.domain.model import POD_OUT_OF_MEMORY, NetworkPolicy

MARGIN_S: Final = 300.0
"""After the lease the cluster itself ends a sandbox so much later. Within it a renewal needs no request."""
_LEAST_MARGIN_S: Final = 60.0

GONE: Final = "SANDBOX_VANISHED"


class PodSandbox(GuestSandbox):
    """See the module. ``release`` deletes the claim; ``path`` are directories for PATH, before the system's."""

    def __init__(
        self,
        sandbox_id: str,
        cluster: Cluster,
        claim: ClaimState,
        pod: AdoptedPod,
        place: bootstrap.PreparedMachine,
        path: Sequence[str],
        until: float,
        on_lost: Callable[[str], None],
        release: Callable[[PodSandbox], Awaitable[None]],
    ) -> None:
        super().__init__(
            sandbox_id,
            self._open_pipe,
            ProcessDefaults(place.home, bootstrap.WORKDIR, place.user, bootstrap.environment(place, path)),
            BackendHooks(on_lost, destroy=self._end_at_cluster, judge=self._what_ended_it),
        )
        self.claim = claim
        self.machine = pod
        self.base = claim.pool
        self.place = place
        self.keep: Callable[[], Awaitable[None]] | None = None
        self._pod = pod
        self._cluster = cluster
        self._release = release
        self._until = until
        self._renewing = asyncio.Lock()
        self.terminals = False
        """Whether the template has terminals; known once it is open."""

    async def open(self, policy: NetworkPolicy | None = None) -> Greeting:
        greeting = await super().open(policy)
        self.terminals = greeting.pty
        return greeting

    async def _open_pipe(self) -> Pipe:
        return await self._pod.attach(bootstrap.SOCKET)

    async def _what_ended_it(self, reason: str) -> str:
        # With the first process the kernel kills the container, if its programs used up its memory.
        if reason == "POD_ENDED" and diagnosis.out_of_memory(await self._cluster.pods_of(self.claim.uid)):
            return POD_OUT_OF_MEMORY
        return await by_what_serves_it(reason)

    def observe(self, state: ClaimState | None) -> None:
        """The cluster says that the claim is like this now; None: it is gone."""
        if state is None or state.deleting:
            self.lose(GONE)
        elif state.finished:
            self.lose("POD_ENDED")
        elif state.address and state.address != self.claim.address:
            self.lose("POD_REPLACED")

    async def renewed(self, until: float) -> None:
        try:
            await self.extend(until)
        except Gone:
            self.lose(GONE)
            raise lost(LinkLost(GONE)) from None

    async def extend(self, until: float) -> None:
        """Moves the cluster's deadline for a lease that ends at ``until`` (seconds since the epoch), if it must.

        Raises Gone, or PenstockError where the cluster does not do it.
        """
        async with self._renewing:
            wanted = until + MARGIN_S
            if until + _LEAST_MARGIN_S <= self._until <= wanted + MARGIN_S and self._until > even_time():
                return
            await self._cluster.extend_claim(self.claim.name, wanted)
            self._until = wanted

    async def _end_at_cluster(self) -> None:
        keep, self.keep = self.keep, None
        try:
            if keep is not None:
                await keep()
        finally:
            await self._release(self)
