"""`grpc.health.v1.Health`: whether a service serves, for load balancers, orchestrators and peers.

Both methods need no credential, so a watcher holds nothing but its stream: no other caller waits for a slow one, as
they would with the servicer of grpcio-health-checking, which sends while it holds the lock that a change needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, Final

from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock_chassis.errors import NotFound, ResourceExhausted

HEALTH_SERVICE: Final[str] = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
MAX_WATCHES: Final = 256
"""Of one server, together."""
_Status: Any = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpcio-health-checking has no types
    """The status of each service of one server; "" is the server as a whole. Belongs to one event loop."""

    def __init__(self) -> None:
        self._names: frozenset[str] = frozenset()
        self._status = _Status.NOT_SERVING
        self._changed = asyncio.Event()
        self._ending = False
        self._watches = 0

    def serve(self, names: Iterable[str], status: int) -> None:
        """Sets the status (a ServingStatus) of the services of these names and of the server; notifies all watchers."""
        self._names, self._status = frozenset({"", *names}), status
        self._changed.set()
        self._changed = asyncio.Event()

    def stop(self) -> None:
        """Reports NOT_SERVING from now on."""
        self.serve(self._names, _Status.NOT_SERVING)

    def end(self) -> None:
        """Ends all watches: a server that stops would wait for them."""
        self._ending = True
        self._changed.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> Any:  # noqa: N802
        if request.service not in self._names:
            raise NotFound("This server has no such service.", reason="SERVICE_UNKNOWN")
        return _Status(status=self._status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Yields the status and each change of it; SERVICE_UNKNOWN for a name that is not served.

        Raises ResourceExhausted WATCH_LIMIT: they need no token, and must not hold all connections.
        """
        if self._watches >= MAX_WATCHES:
            raise ResourceExhausted("Too many watches of this server's health.", reason="WATCH_LIMIT")
        self._watches += 1
        try:
            sent = None
            while True:
                changed = self._changed
                status = self._status if request.service in self._names else _Status.SERVICE_UNKNOWN
                if status != sent:
                    sent = status
                    yield _Status(status=status)
                elif self._ending:
                    return
                else:
                    await changed.wait()
        finally:
            self._watches -= 1
