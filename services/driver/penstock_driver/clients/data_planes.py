"""Where each sandbox is served: at the sandbox service's own address, or at a data plane that it named (D15)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import grpc

from penstock.sandbox.v1 import (
    file_service_pb2_grpc,
    process_service_pb2_grpc,
    sandbox_pb2,
    sandbox_service_pb2,
    sandbox_service_pb2_grpc,
)
from penstock_chassis.channel import typed_errors
from penstock_chassis.errors import PenstockError
from penstock_driver.clients.watches import ProcessWatches

Dial: TypeAlias = Callable[[str, str], grpc.aio.Channel]
"""Opens a channel to an address with a token, with the CA of the sandbox service."""

RENEW_S: Final = 60.0
"""How long before its end a token is renewed."""
CALL_S: Final = 60.0


class Stubs:
    """The stubs of one address."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.sandboxes = sandbox_service_pb2_grpc.SandboxServiceStub(channel)
        self.processes = process_service_pb2_grpc.ProcessServiceStub(channel)
        self.watches = ProcessWatches(self.processes)
        self.files = file_service_pb2_grpc.FileServiceStub(channel)


@dataclass(frozen=True, slots=True)
class _Plane:
    stubs: Stubs
    token_ends: float | None


class DataPlanes:
    """The data planes of live sandboxes. One that names none is served at the address that created it."""

    def __init__(self, service: grpc.aio.Channel, dial: Dial | None = None) -> None:
        self.service = Stubs(service)
        self._dial = dial
        self._planes: dict[str, _Plane] = {}

    def keep(self, sandbox_id: str, plane: sandbox_pb2.DataPlane) -> None:
        """Remembers where a sandbox is served. An empty address = the service's own."""
        if not plane.address or self._dial is None:
            self.drop(sandbox_id)
            return
        ends = plane.token_expire_time.ToNanoseconds() / 1e9 if plane.HasField("token_expire_time") else None
        self._planes[sandbox_id] = _Plane(Stubs(self._dial(plane.address, plane.token)), ends)

    async def at(self, sandbox_id: str) -> Stubs:
        """Returns the stubs of a sandbox, whose token is valid. Raises PenstockError: it could not be renewed."""
        plane = self._planes.get(sandbox_id)
        if plane is None:
            return self.service
        if plane.token_ends is None or time.time() < plane.token_ends - RENEW_S:
            return plane.stubs
        try:
            with typed_errors():
                request = sandbox_service_pb2.GetDataPlaneRequest(sandbox_id=sandbox_id)
                fresh = await self.service.sandboxes.GetDataPlane(request, timeout=CALL_S)
        except PenstockError:
            if time.time() < plane.token_ends:
                return plane.stubs
            raise
        if sandbox_id not in self._planes:  # deleted meanwhile
            return plane.stubs
        # The channel before stays open for its streams, and is closed when the last of them ends.
        self.keep(sandbox_id, fresh.data_plane)
        known = self._planes.get(sandbox_id)
        return self.service if known is None else known.stubs

    def drop(self, sandbox_id: str) -> None:
        """Forgets a deleted sandbox."""
        self._planes.pop(sandbox_id, None)
