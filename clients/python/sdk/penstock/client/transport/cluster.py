"""All drivers and gates, found from one address: a driver says which there are (`GetServerInfo.members`).

A member's token is the connection's own. So a driver is asked, and its members are used, only where decision 033 lets
the token go: over TLS with the caller's own CA, or from this machine to this machine.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.client.errors import ConfigurationError, DeadlineExceeded, Unavailable, Unsupported
from penstock.client.transport.endpoints import Endpoints, ServiceName
from penstock.client.transport.rpc import MAX_HOMES, Service, may_receive_token
from penstock.ops.v1 import operations_service_pb2 as pb
from penstock.ops.v1 import operations_service_pb2_grpc as pb_grpc

FRESH_S: Final = 5.0
"""How long an answer is used before the driver is asked again."""
_ASK_S: Final = 5.0
_AWAY: Final = (Unavailable, DeadlineExceeded)


@dataclass(frozen=True, slots=True)
class Member:
    """A driver or a gate. `name` is empty where it is not known; `service` are calls to it."""

    name: str
    service: Service
    is_lost: bool = False
    """Whether the driver that was asked cannot reach it."""
    takes_work: bool = True


class Cluster:
    """The members of each kind, and the channels to them. A kind of which no driver has a list has one member: the
    service of the connection.
    """

    def __init__(self, endpoints: Endpoints, services: Mapping[str, Service]) -> None:
        """`services` are those at the addresses of `endpoints`, which the caller closes."""
        self._endpoints = endpoints
        self._given = services
        self._opened: dict[tuple[str, str, str], Service] = {}
        self._listed: Sequence[pb.Member] = ()
        self._asked_at: float | None = None
        driver = services.get("driver")
        address = "" if driver is None else driver.address
        self.may_ask = endpoints.discover and bool(address) and may_receive_token(endpoints, address, address)
        """Whether a driver can be asked for members."""

    async def close(self) -> None:
        """Closes the channels to members; calls that are open end."""
        for service in self._opened.values():
            await service.close()

    async def members(self, kind: ServiceName, *, patient: bool = True, age_s: float = FRESH_S) -> Sequence[Member]:
        """Returns all members of a kind: at least one, where the connection has such a service.

        Args:
            kind: "driver" or "interception".
            patient: whether to wait for a driver that is away, for ten seconds at most.
            age_s: the greatest age of the list, in seconds.

        Raises:
            Unavailable, DeadlineExceeded: no driver can be asked, and none ever was.
            ConfigurationError: `MEMBER_NOT_TRUSTED`, the token must not be sent to a member.
            PenstockError: the driver's error.
        """
        if self.may_ask and not self._is_fresh(age_s):
            await self._ask(patient)
        found = [self._member(kind, item) for item in self._listed if item.service == kind]
        if found or kind not in self._given:
            return found
        return [Member("", self._given[kind])]

    def _is_fresh(self, age_s: float) -> bool:
        return self._asked_at is not None and asyncio.get_running_loop().time() - self._asked_at < age_s

    async def _ask(self, patient: bool) -> None:
        """Asks the connection's driver, or another one that is known."""
        is_first = self._asked_at is None
        others = [item for item in self._listed if item.service == "driver"]
        for service in (self._given["driver"], *(self._member("driver", item).service for item in others)):
            stub = pb_grpc.OperationsServiceStub(service.channel)
            try:
                answer = await service.call(
                    stub.GetServerInfo, pb.GetServerInfoRequest(), timeout=_ASK_S, repeatable=patient and is_first
                )
            except Unsupported:  # an older driver
                self.may_ask = False
                return
            except _AWAY:
                if is_first:
                    raise
                continue
            self._take(answer, service)
            return
        # All are away. The list stays, and who uses a member that is away gets an error that names it.

    def _take(self, answer: pb.GetServerInfoResponse, asked: Service) -> None:
        drivers = [item for item in answer.members if item.service == "driver"]
        listed = list(answer.members)
        if drivers and not any(item.name == answer.server.name for item in drivers):
            # Its list of drivers lacks itself.
            own = pb.Member(service="driver", name=answer.server.name, address=asked.address)
            listed.append(own)
        self._listed = listed
        self._asked_at = asyncio.get_running_loop().time()

    def _member(self, kind: ServiceName, item: pb.Member) -> Member:
        is_lost = item.state == pb.MEMBER_STATE_LOST
        takes_work = item.state in (pb.MEMBER_STATE_UP, pb.MEMBER_STATE_UNSPECIFIED)
        return Member(item.name, self._service(kind, item), is_lost, takes_work)

    def _service(self, kind: ServiceName, item: pb.Member) -> Service:
        given = self._given.get(kind)
        if given is not None and given.address == item.address and not item.certified_name:
            return given
        key = (kind, item.address, item.certified_name)
        if key not in self._opened:
            if not may_receive_token(self._endpoints, self._given["driver"].address, item.address):
                raise ConfigurationError(
                    f"The {kind} service {item.name} is at {item.address}, where the token must not be sent: use TLS"
                    " with your own CA, or Endpoints(discover=False) for the given addresses only",
                    reason="MEMBER_NOT_TRUSTED",
                )
            if len(self._opened) >= MAX_HOMES:
                raise ConfigurationError(f"More than {MAX_HOMES} services are listed", reason="MEMBER_LIMIT")
            self._opened[key] = Service(
                kind, self._endpoints, address=item.address, name=item.name, certified=item.certified_name
            )
        return self._opened[key]
