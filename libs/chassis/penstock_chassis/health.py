"""`grpc.health.v1.Health`: whether a service serves, for load balancers, orchestrators and peers; and `Draining`.

Both methods need no credential, so a watcher holds nothing but its stream: no other caller waits for a slow one, as
they would with the servicer of grpcio-health-checking, which sends while it holds the lock that a change needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Final

from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock_chassis.errors import NotFound, ResourceExhausted, Unavailable

HEALTH_SERVICE: Final[str] = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
MAX_WATCHES: Final = 256
"""Of one server, together."""
LOOK_S: Final = 0.25
"""How often a drain looks whether anything still runs."""
NOTICE_S: Final = 5.0
"""How long a service that drivers place work on must have had none: by then they all know that it drains, and that one
which was restarted just before is back (three probes)."""
_Status: Any = health_pb2.HealthCheckResponse


class Draining:
    """Whether a service takes no new work, and how much of its work still runs. Belongs to one event loop.

    Args:
        take: called with False when the service is to refuse new work (DRAINING), with True when it takes it again.
        running: how much runs now; >= 0.
        quiet_s: seconds without work after which no work can be on its way any more.
    """

    def __init__(
        self,
        take: Callable[[bool], None] = lambda _takes: None,
        running: Callable[[], int] = lambda: 0,
        quiet_s: float = 0.0,
    ) -> None:
        self.is_on = False
        self.is_stopping = False
        """Whether the service is about to end, so that this cannot be undone."""
        self.on_change: Callable[[], None] = lambda: None
        self.running = running
        self._take = take
        self._quiet_s = quiet_s

    def begin(self, *, stopping: bool = False) -> None:
        """Refuses new work. Idempotent."""
        self.is_stopping |= stopping
        self._set(True)

    def leave(self) -> None:
        """Reports that the service stops and leaves its work: leaving refuses new work, and `take` is not called."""
        self.is_stopping = True
        if not self.is_on:
            self.is_on = True
            self.on_change()

    def undo(self) -> None:
        """Takes new work again. Raises Unavailable (DRAINING) once the service is stopping."""
        if self.is_stopping:
            raise Unavailable("The service is stopping.", reason="DRAINING", retry_after_s=5.0)
        self._set(False)

    async def finished(self) -> None:
        """Waits until nothing has run for `quiet_s` seconds."""
        loop = asyncio.get_running_loop()
        quiet_since: float | None = None
        while True:
            now = loop.time()
            if self.running():
                quiet_since = None
            else:
                quiet_since = now if quiet_since is None else quiet_since
                if now - quiet_since >= self._quiet_s:
                    return
            await asyncio.sleep(LOOK_S)

    def _set(self, on: bool) -> None:
        if on is not self.is_on:
            self.is_on = on
            self._take(not on)
            self.on_change()


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
