"""Where one sandbox is served, if not at the sandbox service that was asked: an address and a token of its own."""

import time
from typing import Final

from penstock.client.errors import PenstockError
from penstock.client.transport.endpoints import Endpoints
from penstock.client.transport.rpc import Service
from penstock.sandbox.v1 import sandbox_pb2, sandbox_service_pb2_grpc
from penstock.sandbox.v1 import sandbox_service_pb2 as pb

_RENEW_S: Final = 60.0
"""How long before its end a token is renewed."""


class DataPlane(Service):
    """The service that has one sandbox. A sandbox stays at its address; its token is renewed before it ends.

    Args:
        creator: the service that named it, and gives new tokens.
        endpoints: how the creator is called.
        sandbox_id: the sandbox.
        plane: as the creator named it.

    Raises:
        ConfigurationError: the token would leave this machine in cleartext.
    """

    def __init__(self, creator: Service, endpoints: Endpoints, sandbox_id: str, plane: sandbox_pb2.DataPlane) -> None:
        where = Endpoints(
            sandbox=plane.address,
            token=plane.token or None,
            tls=endpoints.tls,
            token_origin="the sandbox service, with this sandbox",  # noqa: S106 - no token
        )
        super().__init__("sandbox", where)
        self._creator = creator
        self._stub = sandbox_service_pb2_grpc.SandboxServiceStub(creator.channel)
        self._sandbox_id = sandbox_id
        self._ends = _end(plane)

    async def prepare(self) -> None:
        """Renews the token, if it ends soon. Raises PenstockError: it has ended, and there is no new one."""
        if self._ends is None or time.time() < self._ends - _RENEW_S:
            return
        try:
            request = pb.GetDataPlaneRequest(sandbox_id=self._sandbox_id)
            plane = (await self._creator.call(self._stub.GetDataPlane, request, repeatable=True)).data_plane
        except PenstockError:
            if time.time() < self._ends:
                return
            raise
        self._ends = _end(plane)
        self.metadata = (("authorization", f"Bearer {plane.token}"),) if plane.token else ()


def _end(plane: sandbox_pb2.DataPlane) -> float | None:
    return plane.token_expire_time.ToNanoseconds() / 1e9 if plane.HasField("token_expire_time") else None
