"""Status of the services: `ps.operations`."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from penstock.client.errors import DeadlineExceeded, FailedPrecondition, NotFound, Unavailable
from penstock.client.transport.cluster import Cluster
from penstock.client.transport.endpoints import ServiceName
from penstock.client.transport.rpc import Service
from penstock.client.wire.chat import duration
from penstock.driver.v1 import (
    rollout_pb2,
    rollout_service_pb2,
    rollout_service_pb2_grpc,
    terminal_service_pb2,
    terminal_service_pb2_grpc,
)
from penstock.ops.v1 import operations_service_pb2 as pb
from penstock.ops.v1 import operations_service_pb2_grpc as pb_grpc
from penstock.sandbox.v1 import sandbox_pb2, sandbox_service_pb2, sandbox_service_pb2_grpc
from penstock.values import ids, reader

T = TypeVar("T")

ROLLOUT_LABEL: Final = "penstock_rollout"
TERMINAL_LABEL: Final = "penstock_terminal"
"""Labels of the sandboxes that the driver creates: the id of their rollout or terminal."""

_CALL_S: Final = 10.0
_WAIT_S: Final = 60.0
"""Longest wait of one call of Drain."""
_AWAY: Final = (Unavailable, DeadlineExceeded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """One diagnostic: a problem, present or imminent. `reason` is stable; docs/guides/operate.md lists them."""

    service: str
    reason: str
    message: str
    advice: str
    grave: bool = True
    """True: something is stuck or lost. False: a warning."""
    subjects: Sequence[str] = ()
    """Ids of the affected resources, at most 20."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """A service's status at one moment. Times in seconds; `clock_skew` is how far its clock is ahead of ours."""

    service: str
    address: str
    version: str
    clock_skew: float
    clock_error: float
    """Maximum error of `clock_skew`: half of the request's round trip."""
    up: float
    loop_lag: float
    resident_bytes: int
    open_files: int
    max_files: int
    gauges: Mapping[str, float]
    """By name, with labels if it has any: `penstock_gate_open_calls{state="queued"}`."""
    troubles: Sequence[Trouble]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftSandbox:
    """A leftover sandbox: its rollout or terminal is over. `known` is whether a driver knows that one."""

    sandbox_id: str
    rollout_id: str
    """Empty for a terminal's."""
    known: bool
    terminal_id: str = ""
    """Empty for a rollout's."""


@dataclass(frozen=True, slots=True)
class _Made:
    """A sandbox that the driver created: its rollout or terminal, and the time in seconds since the epoch."""

    rollout_id: str
    terminal_id: str
    create_time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """Which contract a service serves, and its limits.

    `contract_revision` grows with each release that adds to the protos; `features` are stable names, sorted;
    docs/compatibility.md lists both. Sizes in bytes; `min_ping_interval` in seconds: clients that ping more often are
    disconnected.
    """

    service: str
    version: str
    contract_revision: int
    features: tuple[str, ...]
    max_message_bytes: int
    min_ping_interval: float
    name: str = ""
    """The service's own name, which the ids that it makes have; empty: an older service."""


@dataclass(frozen=True, slots=True)
class DrainState:
    """What still runs at a service that drains. `drained`: nothing does, and nothing can come any more."""

    running: int
    drained: bool


_server_info: Final = reader(ServerInfo, pb.ServerInfo)


@dataclass(frozen=True, slots=True)
class Member:
    """One of several services of a kind, as the driver lists it; an engine, as a gate does.

    `state` is unspecified (not asked yet), up, draining or lost.
    `name` is its own, empty until it has answered. `address` is host:port as the driver reaches it, `certified_name`
    the name in its certificate where that is not its host. `pool`: of an engine, the name of its list, "default" for
    the one without a name; else empty.
    """

    service: str
    name: str
    address: str
    certified_name: str
    state: str
    pool: str = ""


_member: Final = reader(Member, pb.Member)


class OperationsClient:
    """`ps.operations`."""

    def __init__(self, services: Mapping[str, Service], cluster: Cluster) -> None:
        self._services = {kind: service.briefly() for kind, service in services.items()}
        self._cluster = cluster

    async def status(
        self, service: ServiceName, *, patience: float = 60.0, min_free_bytes: int | None = None
    ) -> ServiceStatus:
        """Returns a service's status and its diagnostics.

        Args:
            service: its name.
            patience: seconds that something may wait before it counts as a problem.
            min_free_bytes: minimum free disk space; None = 1 GiB.

        Raises:
            PenstockError: the service's error; `Unsupported` from a service that is older than this RPC.
            KeyError: there is no such service here.
        """
        of = self._services[service]
        request = pb.GetStatusRequest(patience=duration(patience), min_free_bytes=min_free_bytes)
        stub = pb_grpc.OperationsServiceStub(of.channel)
        # Called twice: the time to connect would distort the clock difference.
        await of.call(stub.GetStatus, request, timeout=_CALL_S, repeatable=True)
        began, since = time.time(), time.monotonic()
        answer = await of.call(stub.GetStatus, request, timeout=_CALL_S)
        took = time.monotonic() - since
        then = answer.server_time.ToNanoseconds() / 1e9
        return ServiceStatus(
            service=answer.service or service,
            address=of.address,
            version=answer.version,
            clock_skew=then - (began + took / 2),
            clock_error=took / 2,
            up=then - answer.start_time.ToNanoseconds() / 1e9,
            loop_lag=answer.loop_lag.ToNanoseconds() / 1e9,
            resident_bytes=answer.resident_bytes,
            open_files=answer.open_files,
            max_files=answer.max_files,
            gauges={_series(item): item.value for item in answer.gauges},
            troubles=tuple(
                Trouble(
                    service=answer.service or service,
                    reason=item.reason,
                    message=item.message,
                    advice=item.advice,
                    grave=item.grave,
                    subjects=tuple(item.subjects),
                )
                for item in answer.troubles
            ),
        )

    async def server_info(self, service: ServiceName) -> ServerInfo:
        """Returns which contract a service serves. Every token may ask.

        Raises:
            Unsupported: a service that is older than this RPC.
            KeyError: there is no such service here.
        """
        of = self._services[service]
        stub = pb_grpc.OperationsServiceStub(of.channel)
        answer = await of.call(stub.GetServerInfo, pb.GetServerInfoRequest(), timeout=_CALL_S, repeatable=True)
        return _server_info(answer.server)

    async def drain(
        self, service: ServiceName, *, name: str = "", wait: bool = False, timeout: float | None = None
    ) -> DrainState:
        """Makes a service take no new work; what runs there goes on. Needs an operator's token.

        Args:
            service: its kind.
            name: the own name of one that the driver lists (`members`); empty = the one of this connection.
            wait: whether to wait until nothing runs there.
            timeout: seconds to wait at most; None = a minute. After it the state so far is returned.

        Raises:
            Unsupported: a service that is older than this RPC.
            NotFound: `MEMBER_UNKNOWN`, the driver lists none of this name.
            ConfigurationError: `MEMBER_NOT_TRUSTED`, the token must not be sent to that one.
            KeyError: there is no such service here.
        """
        of = await self._named(service, name)
        stub = pb_grpc.OperationsServiceStub(of.channel)
        # A service waits for 80 % of the deadline.
        limit = min(timeout or _WAIT_S, _WAIT_S) / 0.8 if wait else _CALL_S
        answer = await of.call(stub.Drain, pb.DrainRequest(wait=wait), timeout=limit, repeatable=True)
        return DrainState(running=answer.running_count, drained=answer.drained)

    async def undrain(self, service: ServiceName, *, name: str = "") -> None:
        """Makes a service take new work again. Needs an operator's token. `name` as in `drain`.

        Raises:
            Unavailable: DRAINING: the service is stopping.
            NotFound, ConfigurationError, KeyError: as `drain`.
        """
        of = await self._named(service, name)
        stub = pb_grpc.OperationsServiceStub(of.channel)
        await of.call(stub.Undrain, pb.UndrainRequest(), timeout=_CALL_S)

    async def members(self, service: ServiceName) -> list[Member]:
        """Returns the services of a kind of which the driver has a list; none = it has none. Every token may ask.

        Raises:
            Unsupported: a driver that is older than this.
            KeyError: there is no driver here.
        """
        of = self._services["driver"]
        stub = pb_grpc.OperationsServiceStub(of.channel)
        answer = await of.call(stub.GetServerInfo, pb.GetServerInfoRequest(), timeout=_CALL_S, repeatable=True)
        return [_member(item) for item in answer.members if item.service == service]

    async def _named(self, kind: ServiceName, name: str) -> Service:
        if not name:
            return self._services[kind]
        if (service := await self._cluster.named(kind, name)) is None:
            raise NotFound(
                f"The driver lists no {kind} service {name!r}: `members` has the names.", reason="MEMBER_UNKNOWN"
            )
        return service.briefly()

    async def left_sandboxes(self, *, patience: float = 0.0) -> list[LeftSandbox]:
        """Returns the sandboxes of rollouts and terminals that are over, as the drivers that have them say.

        A driver ends a rollout only when its sandbox is gone. A terminal's sandbox is removed a moment after the end,
        and exists a moment before the driver lists the terminal.

        Args:
            patience: seconds that either may take.

        Raises:
            PenstockError: the error of the sandbox service or the driver.
        """
        before = await self._sandboxes()
        running = await self._running()
        found = []
        for sandbox_id, made in before.items():
            if made.rollout_id in running:
                continue
            if left := await (
                self._left_of_rollout(sandbox_id, made)
                if made.rollout_id
                else self._left_of_terminal(sandbox_id, made, patience)
            ):
                found.append(left)
        # Only those that existed before their owners were asked for, and still do: no rollout just ended or began.
        still = await self._sandboxes()
        return [left for left in found if left.sandbox_id in still]

    async def _left_of_rollout(self, sandbox_id: str, made: _Made) -> LeftSandbox | None:
        """A rollout's sandbox, where its driver says that it has ended, or no driver has it."""

        async def has_ended(driver: Service) -> bool:
            stub = rollout_service_pb2_grpc.RolloutServiceStub(driver.channel)
            request = rollout_service_pb2.GetRolloutRequest(rollout_id=made.rollout_id)
            answer = await driver.call(stub.GetRollout, request, timeout=_CALL_S, repeatable=True)
            return answer.rollout.phase == rollout_pb2.PHASE_ENDED

        ended = await self._at_home(made.rollout_id, has_ended)
        if ended is False:
            return None
        return LeftSandbox(sandbox_id=sandbox_id, rollout_id=made.rollout_id, known=ended is not None)

    async def _left_of_terminal(self, sandbox_id: str, made: _Made, patience: float) -> LeftSandbox | None:
        """A terminal's sandbox, where it should be gone since `patience` seconds."""

        async def terminal(driver: Service) -> terminal_service_pb2.Terminal:
            stub = terminal_service_pb2_grpc.TerminalServiceStub(driver.channel)
            request = terminal_service_pb2.GetTerminalRequest(terminal_id=made.terminal_id)
            return (await driver.call(stub.GetTerminal, request, timeout=_CALL_S, repeatable=True)).terminal

        found = await self._at_home(made.terminal_id, terminal)
        if found is not None and not found.ended:
            return None
        since = made.create_time if found is None else found.end_time.ToNanoseconds() / 1e9
        if time.time() - since < patience:
            return None
        known = found is not None
        return LeftSandbox(sandbox_id=sandbox_id, rollout_id="", known=known, terminal_id=made.terminal_id)

    async def _at_home(self, name: str, ask: Callable[[Service], Awaitable[T]]) -> T | None:
        """Asks the driver that has a rollout or terminal, each driver where its id names none; None: none has it.

        Raises:
            Unavailable, DeadlineExceeded: no driver that answers has it.
            PenstockError: another error of a driver.
        """
        if ids.home_of(name) is None:
            members = await self._cluster.members("driver")
        else:
            members = [await self._cluster.home("driver", name)]
        away: Unavailable | DeadlineExceeded | None = None
        for member in members:
            try:
                return await ask(member.service.briefly())
            except NotFound:
                continue
            except FailedPrecondition as error:
                if error.reason != "HOME_ELSEWHERE":  # of a driver that is not listed
                    raise
            except _AWAY as error:
                away = error
        if away is not None:
            raise away
        return None

    async def _sandboxes(self) -> dict[str, _Made]:
        """Returns every sandbox that the driver created for a rollout or a terminal."""
        service = self._services["sandbox"]
        stub = sandbox_service_pb2_grpc.SandboxServiceStub(service.channel)
        request = sandbox_service_pb2.ListSandboxesRequest()
        found: dict[str, _Made] = {}
        async for page in service.pages(stub.ListSandboxes, request, timeout=_CALL_S):
            for item in page.sandboxes:
                making = item.state == sandbox_pb2.SANDBOX_STATE_CREATING
                labels = item.spec.labels
                made = _Made(
                    labels.get(ROLLOUT_LABEL, ""),
                    labels.get(TERMINAL_LABEL, ""),
                    item.create_time.ToNanoseconds() / 1e9,
                )
                if not making and (made.rollout_id or made.terminal_id):
                    found[item.sandbox_id] = made
        return found

    async def _running(self) -> set[str]:
        """Returns the rollouts that run at the drivers that answer: most owners, by few requests."""
        found: set[str] = set()
        for member in await self._cluster.members("driver"):
            service = member.service.briefly()
            stub = rollout_service_pb2_grpc.RolloutServiceStub(service.channel)
            request = rollout_service_pb2.ListRolloutsRequest(filter=rollout_service_pb2.RolloutFilter(ended=False))
            try:
                async for page in service.pages(stub.ListRollouts, request, timeout=_CALL_S):
                    found.update(item.rollout_id for item in page.rollouts)
            except _AWAY:  # its sandboxes, if it has any, are asked for one by one
                continue
        return found


def _series(gauge: pb.Gauge) -> str:
    labels = ",".join(f'{name}="{value}"' for name, value in sorted(gauge.labels.items()))
    return f"{gauge.name}{{{labels}}}" if labels else gauge.name
