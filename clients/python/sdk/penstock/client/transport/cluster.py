"""All drivers, gates and sandbox services, found from one address: a driver says which there are
(`GetServerInfo.members`).

A gate says so of engines.

A member's token is the connection's own. So a driver is asked, and its members are used, only where decision 033 lets
the token go: over TLS with the caller's own CA, or from this machine to this machine.
"""

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from penstock.client.errors import (
    ConfigurationError,
    DeadlineExceeded,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from penstock.client.transport.background import SharedWork
from penstock.client.transport.endpoints import Endpoints, ServiceName
from penstock.client.transport.rpc import DRAINING, MAX_HOMES, Backoff, Service, may_receive_token
from penstock.ops.v1 import operations_service_pb2 as pb
from penstock.ops.v1 import operations_service_pb2_grpc as pb_grpc
from penstock.values import ids

FRESH_S: Final = 5.0
"""How long an answer is used before the driver is asked again."""
_FRESH_FOR_NEW_S: Final = 1.0
"""The same for a creation. A service that has begun to drain since says so, and another one is asked."""
DEFAULT_POOL: Final = "default"
"""A gate's name for its engines without a name."""
_ASK_S: Final = 5.0
_ALL_DRAIN_S: Final = 60.0
_AWAY: Final = (Unavailable, DeadlineExceeded)
NOT_ASKED: Final = (Unavailable, DeadlineExceeded, Unauthenticated, PermissionDenied)
"""Errors of a driver that cannot be asked for others. A token that it refuses may be valid at the given service."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Member:
    """One service of a kind. `name` is empty where it is not known; `service` are calls to it."""

    name: str
    service: Service
    is_lost: bool = False
    """Whether the driver that was asked cannot reach it."""
    takes_work: bool = True


def rank(member: Member, key: str) -> tuple[bytes, str]:
    """Rendezvous hashing: each key ranks all members, and one that comes or goes moves its own share only."""
    return hashlib.sha256(f"{key}\0{member.name}".encode()).digest(), member.name


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
        self._listed_engines: Sequence[pb.Member] = ()
        self._asked_at: float | None = None
        self._asking = SharedWork[None]()
        """Requests for the list, by what is asked with: many calls at once find it stale."""
        self._names: dict[str, str] = {}
        """Names of the services at the connection's own addresses, by kind, as far as they were asked."""
        self._next = random.randrange(1 << 16)  # noqa: S311 - clients should not all begin with the same member
        driver = services.get("driver")
        address = "" if driver is None else driver.address
        self.may_ask = endpoints.discover and bool(address) and may_receive_token(endpoints, address, address)
        """Whether a driver can be asked for members."""

    async def close(self) -> None:
        """Closes the channels to members; calls that are open end."""
        await self._asking.close()
        for service in self._opened.values():
            await service.close()

    async def members(
        self,
        kind: ServiceName,
        *,
        patient: bool = True,
        age_s: float = FRESH_S,
        or_given: bool = False,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> Sequence[Member]:
        """Returns all members of a kind: at least one, where the connection has such a service.

        Args:
            kind: of service.
            patient: whether to wait for a driver that is away, for ten seconds at most.
            age_s: the greatest age of the list, in seconds.
            or_given: whether the connection's own service is enough where no driver can be asked.
            metadata: with which a driver is asked, beside that of the connection.

        Raises:
            Unavailable, DeadlineExceeded: no driver can be asked, and none ever was.
            ConfigurationError: `MEMBER_NOT_TRUSTED`, the token must not be sent to a member.
            PenstockError: the driver's error.
        """
        if self.may_ask and not self._is_fresh(age_s):
            try:
                is_patient = patient and not or_given
                await self._asking.get((is_patient, *metadata), lambda: self._ask(is_patient, metadata))
            except NOT_ASKED:
                if not or_given:
                    raise
                return [self.given(kind)]
        items = [item for item in self._listed if item.service == kind]
        if len(items) == 1 and await self._is_given(kind, items[0], metadata):
            return [self._member(kind, items[0], self._given[kind])]
        if items or kind not in self._given:
            return [self._member(kind, item) for item in items]
        return [self.given(kind)]

    async def create(
        self, kind: ServiceName, make: Callable[[Member, bool], Awaitable[T]], chosen: str = ""
    ) -> tuple[Member, T]:
        """Makes something new at a member that takes work; returns the member, and what it made.

        One that drains has made nothing, so another one is asked; while all of several drain, for a minute at most.

        Args:
            kind: as for `members`.
            make: sends the request to a member, and repeats it there where that is harmless; not while the member
                drains, if the second argument is false.
            chosen: goes to the same member from every client, such as an id that the client chose; empty = members
                take turns.
        """
        draining: set[str] = set()
        age_s, backoff, loop = _FRESH_FOR_NEW_S, Backoff(), asyncio.get_running_loop()
        until = loop.time() + _ALL_DRAIN_S
        while True:
            members = await self.members(kind, or_given=kind != "driver")
            if len(members) > 1:
                members = await self.members(kind, age_s=age_s, or_given=kind != "driver")
            is_only = len(members) == 1
            taking = [item for item in members if item.takes_work and item.service.address not in draining]
            members = taking or members
            if chosen:
                member = max(members, key=lambda member: rank(member, chosen))
            else:
                self._next += 1
                member = members[self._next % len(members)]
            try:
                return member, await make(member, is_only)
            except Unavailable as error:
                if error.reason != DRAINING or is_only or loop.time() > until:
                    raise
            if member.service.address in draining:  # all drain, as where they are restarted in turn
                draining.clear()
                await asyncio.sleep(backoff.next())
            draining.add(member.service.address)
            age_s = 0.0

    async def home(self, kind: ServiceName, name: str) -> Member:
        """Returns the member that has something: the one that its id names. Of an id without a home, or of one of an
        unknown member, the service of the connection, which may answer HOME_ELSEWHERE.
        """
        home = ids.home_of(name)
        if home is not None and home[0] == kind:
            for age_s in (FRESH_S, 0.0):
                for member in await self.members(kind, age_s=age_s, or_given=True):
                    if member.name == home[1]:
                        return member
        return self.given(kind)

    def given(self, kind: ServiceName) -> Member:
        """Returns the service of the connection."""
        return Member("", self._given[kind])

    async def named(self, kind: ServiceName, name: str) -> Service | None:
        """Returns calls to the one member of this name; None if the driver lists none. Raises as `members` does."""
        return next((member.service for member in await self.members(kind) if name and member.name == name), None)

    async def _is_given(self, kind: ServiceName, only: pb.Member, metadata: Sequence[tuple[str, str]]) -> bool:
        """Whether the only member of a kind is the service at the connection's own address, which then is the way to
        it: the driver's may be of a network that this client is not in.
        """
        given = self._given.get(kind)
        if given is None or not only.name or not self.may_ask:
            return False
        if given.address != only.address and kind not in self._names:
            stub = pb_grpc.OperationsServiceStub(given.channel)
            try:
                answer = await given.call(
                    stub.GetServerInfo, pb.GetServerInfoRequest(), timeout=_ASK_S, metadata=metadata
                )
            except (*NOT_ASKED, Unsupported):
                return False
            self._names[kind] = answer.server.name
        return given.address == only.address or self._names[kind] == only.name

    async def engines(self) -> Sequence[Member]:
        """Returns the engines of the gates' default pool; the inference service of the connection, if no gate has one.

        Raises:
            ConfigurationError: `MEMBER_NOT_TRUSTED`, the token must not be sent to a member.
            PenstockError: a gate's error; one that is away is no error.
        """
        may_ask = self._may_ask_gates()
        for gate in await self.members("interception", patient=False, or_given=True) if may_ask else ():
            stub = pb_grpc.OperationsServiceStub(gate.service.channel)
            try:
                answer = await gate.service.call(stub.GetServerInfo, pb.GetServerInfoRequest(), timeout=_ASK_S)
            except (*NOT_ASKED, Unsupported):
                continue
            self._listed_engines = [item for item in answer.members if item.pool == DEFAULT_POOL]
            break
        found = [self._member("inference", item) for item in self._listed_engines]
        return found or [Member("", self._given["inference"])]

    def _may_ask_gates(self) -> bool:
        address = self._given["interception"].address if "interception" in self._given else ""
        return self._endpoints.discover and may_receive_token(self._endpoints, address, address)

    def _is_fresh(self, age_s: float) -> bool:
        return self._asked_at is not None and asyncio.get_running_loop().time() - self._asked_at < age_s

    async def _ask(self, patient: bool, metadata: Sequence[tuple[str, str]]) -> None:
        """Asks the connection's driver, or another one that is known."""
        is_first = self._asked_at is None
        others = [item for item in self._listed if item.service == "driver"]
        for service in (self._given["driver"], *(self._member("driver", item).service for item in others)):
            stub = pb_grpc.OperationsServiceStub(service.channel)
            try:
                answer = await service.call(
                    stub.GetServerInfo,
                    pb.GetServerInfoRequest(),
                    timeout=_ASK_S,
                    repeatable=patient and is_first,
                    metadata=metadata,
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
        # All are away. The list stays, and who uses a member that is away gets an error that names it. They are asked
        # again as after an answer: else each call would wait for them.
        self._asked_at = asyncio.get_running_loop().time()

    def _take(self, answer: pb.GetServerInfoResponse, asked: Service) -> None:
        drivers = [item for item in answer.members if item.service == "driver"]
        listed = list(answer.members)
        if drivers and not any(item.name == answer.server.name for item in drivers):
            # Its list of drivers lacks itself.
            own = pb.Member(service="driver", name=answer.server.name, address=asked.address)
            listed.append(own)
        self._listed = listed
        self._asked_at = asyncio.get_running_loop().time()

    def _member(self, kind: ServiceName, item: pb.Member, given: Service | None = None) -> Member:
        is_lost = item.state == pb.MEMBER_STATE_LOST
        takes_work = item.state in (pb.MEMBER_STATE_UP, pb.MEMBER_STATE_UNSPECIFIED)
        return Member(item.name, given or self._service(kind, item), is_lost, takes_work)

    def _service(self, kind: ServiceName, item: pb.Member) -> Service:
        given = self._given.get(kind)
        if given is not None and given.address == item.address and not item.certified_name:
            return given
        key = (kind, item.address, item.certified_name)
        if key not in self._opened:
            lister = self._given["interception" if kind == "inference" else "driver"]
            if not may_receive_token(self._endpoints, lister.address, item.address):
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
