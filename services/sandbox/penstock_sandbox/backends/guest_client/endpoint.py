"""The service's end of a sandbox's one endpoint: streams of the link, connected to one upstream.

Invariants: those of ``host.relay``; closing cuts every connection at once. A broken pipe of the link does not show
here.
"""

from __future__ import annotations

from penstock_chassis.aio.tasks import TaskOwner
from penstock_sandbox.backends.guest_client.stream import LinkLost, Stream, StreamReset
from penstock_sandbox.backends.host.relay import MAX_CONNECTIONS, relay
from penstock_sandbox.domain.model import NetworkPolicy


class Endpoint:
    """Carries the connections that the guest agent's listener accepts, until closed."""

    def __init__(self, sandbox_id: str, policy: NetworkPolicy) -> None:
        self._sandbox_id = sandbox_id
        self._policy = policy
        self._connections = TaskOwner()

    def accept(self, stream: Stream) -> None:
        """Handles a connection by a program in the sandbox."""
        if len(self._connections) >= MAX_CONNECTIONS:
            stream.reset()
            return
        self._connections.start(self._carry(stream))

    async def aclose(self) -> None:
        """Cuts every connection."""
        await self._connections.aclose()

    async def _carry(self, stream: Stream) -> None:
        try:
            await relay(stream, self._policy, self._sandbox_id, (OSError, StreamReset, LinkLost))
        finally:
            # Harmless after both ends: the stream is over by then.
            stream.reset()
