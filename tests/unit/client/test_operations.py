"""Sandboxes whose owners are over, with several drivers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2
from tests.unit.client.conftest import TOKEN, Refusal

from penstock.client import Endpoints, Penstock, Unavailable, connect
from penstock.client.operations import ROLLOUT_LABEL, TERMINAL_LABEL, LeftSandbox
from penstock.driver.v1 import (
    rollout_pb2,
    rollout_service_pb2,
    rollout_service_pb2_grpc,
    terminal_service_pb2,
    terminal_service_pb2_grpc,
)
from penstock.ops.v1 import operations_service_pb2, operations_service_pb2_grpc
from penstock.sandbox.v1 import sandbox_pb2, sandbox_service_pb2, sandbox_service_pb2_grpc
from penstock.values import ids


@dataclass
class Driver(
    rollout_service_pb2_grpc.RolloutServiceServicer,
    terminal_service_pb2_grpc.TerminalServiceServicer,
    operations_service_pb2_grpc.OperationsServiceServicer,
):
    """A driver that lists all `addresses`, and says in a redirect where the others are only if it `names_addresses`."""

    name: str
    addresses: Mapping[str, str]
    names_addresses: bool
    rollouts: dict[str, rollout_pb2.Phase.ValueType] = field(default_factory=dict)
    terminals: dict[str, bool] = field(default_factory=dict)
    """Whether each has ended."""

    async def GetServerInfo(  # noqa: N802
        self, request: Any, context: Any
    ) -> operations_service_pb2.GetServerInfoResponse:
        """All drivers."""
        members = [
            operations_service_pb2.Member(service="driver", name=name, address=address)
            for name, address in self.addresses.items()
        ]
        server = operations_service_pb2.ServerInfo(service="driver", name=self.name)
        return operations_service_pb2.GetServerInfoResponse(server=server, members=members)

    async def ListRollouts(self, request: Any, context: Any) -> rollout_service_pb2.ListRolloutsResponse:  # noqa: N802
        """Its own that have not ended."""
        running = [name for name, phase in self.rollouts.items() if phase != rollout_pb2.PHASE_ENDED]
        rollouts = [rollout_pb2.Rollout(rollout_id=name) for name in running]
        return rollout_service_pb2.ListRolloutsResponse(rollouts=rollouts)

    async def GetRollout(self, request: Any, context: Any) -> rollout_service_pb2.GetRolloutResponse:  # noqa: N802
        """Id and phase."""
        await self._find(request.rollout_id, self.rollouts, context)
        phase = self.rollouts[request.rollout_id]
        rollout = rollout_pb2.Rollout(rollout_id=request.rollout_id, phase=phase)
        return rollout_service_pb2.GetRolloutResponse(rollout=rollout)

    async def GetTerminal(self, request: Any, context: Any) -> terminal_service_pb2.GetTerminalResponse:  # noqa: N802
        """Id and end."""
        await self._find(request.terminal_id, self.terminals, context)
        ended = self.terminals[request.terminal_id]
        terminal = terminal_service_pb2.Terminal(terminal_id=request.terminal_id, ended=ended)
        return terminal_service_pb2.GetTerminalResponse(terminal=terminal)

    async def _find(self, name: str, among: Mapping[str, object], context: Any) -> None:
        home = ids.home_of(name)
        if home is not None and home[1] != self.name:
            address = self.addresses.get(home[1], "") if self.names_addresses else ""
            info = error_details_pb2.ErrorInfo(reason="HOME_ELSEWHERE", domain="penstock")
            info.metadata.update({"home": home[1]} | ({"address": address} if address else {}))
            packed = AnyMessage()
            packed.Pack(info)
            code = grpc.StatusCode.FAILED_PRECONDITION
            status = status_pb2.Status(code=code.value[0], message="elsewhere", details=[packed])
            context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
            await context.abort(code, "elsewhere")
        if name not in among:
            await Refusal(grpc.StatusCode.NOT_FOUND, "UNKNOWN").abort(context)


@dataclass
class Sandboxes(sandbox_service_pb2_grpc.SandboxServiceServicer):
    """A sandbox service with sandboxes of these labels, by id."""

    labels: dict[str, tuple[str, str]] = field(default_factory=dict)

    async def ListSandboxes(self, request: Any, context: Any) -> sandbox_service_pb2.ListSandboxesResponse:  # noqa: N802
        """All of them."""
        sandboxes = [
            sandbox_pb2.Sandbox(
                sandbox_id=name,
                state=sandbox_pb2.SANDBOX_STATE_READY,
                spec=sandbox_pb2.SandboxSpec(labels=dict([label])),
            )
            for name, label in self.labels.items()
        ]
        return sandbox_service_pb2.ListSandboxesResponse(sandboxes=sandboxes)


@dataclass
class Place:
    """A client at the first of two drivers."""

    ps: Penstock
    d0: Driver
    d1: Driver
    sandboxes: Sandboxes
    servers: dict[str, Any]

    async def left(self) -> dict[str, LeftSandbox]:
        """Those that the client calls left, by id."""
        return {item.sandbox_id: item for item in await self.ps.operations.left_sandboxes()}


@asynccontextmanager
async def two_drivers(names_addresses: bool = True, discover: bool = True) -> AsyncIterator[Place]:
    """Drivers d0 and d1 with one sandbox service, and a client."""
    addresses: dict[str, str] = {}
    d0, d1 = (Driver(name, addresses, names_addresses) for name in ("d0", "d1"))  # type: ignore[abstract]
    sandboxes = Sandboxes()  # type: ignore[abstract]
    servers: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        for driver in (d0, d1):
            server = servers[driver.name] = grpc.aio.server()
            rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server(driver, server)
            terminal_service_pb2_grpc.add_TerminalServiceServicer_to_server(driver, server)
            operations_service_pb2_grpc.add_OperationsServiceServicer_to_server(driver, server)
            sandbox_service_pb2_grpc.add_SandboxServiceServicer_to_server(sandboxes, server)
            addresses[driver.name] = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            await server.start()
            stack.push_async_callback(server.stop, None)
        endpoints = Endpoints(driver=addresses["d0"], sandbox=addresses["d0"], token=TOKEN, discover=discover)
        yield Place(await stack.enter_async_context(connect(endpoints)), d0, d1, sandboxes, servers)


def new_id(kind: str, home: str, number: int = 0) -> str:
    """An id that a driver made."""
    return ids.make(kind, home, f"{number:032x}")


@pytest.mark.requirement("R118")
@pytest.mark.parametrize("names_addresses", [True, False])
async def test_sandbox_of_a_rollout_that_runs_at_another_driver_is_not_left(names_addresses: bool) -> None:
    """Its own driver says whether it has ended, also where a redirect has no address: members with certificates."""
    async with two_drivers(names_addresses) as place:
        mine, theirs, over, gone = (new_id("r", home, n) for n, home in enumerate(("d0", "d1", "d1", "d1")))
        place.d0.rollouts[mine] = place.d1.rollouts[theirs] = rollout_pb2.PHASE_RUNNING
        place.d1.rollouts["chosen-by-a-client"] = rollout_pb2.PHASE_VERIFYING
        place.d1.rollouts[over] = rollout_pb2.PHASE_ENDED
        owners = {"mine": mine, "theirs": theirs, "chosen": "chosen-by-a-client", "over": over, "gone": gone}
        place.sandboxes.labels = {name: (ROLLOUT_LABEL, rollout) for name, rollout in owners.items()}
        found = await place.left()
    assert {name: item.known for name, item in found.items()} == {"over": True, "gone": False}


@pytest.mark.requirement("R118")
@pytest.mark.parametrize("names_addresses", [True, False])
async def test_sandbox_of_a_terminal_of_another_driver_is_left_when_that_has_ended(names_addresses: bool) -> None:
    """As of rollouts."""
    async with two_drivers(names_addresses) as place:
        place.d1.terminals = {new_id("t", "d1", 1): False, new_id("t", "d1", 2): True, "chosen": False}
        place.sandboxes.labels = {name: (TERMINAL_LABEL, name) for name in place.d1.terminals}
        found = await place.left()
    assert {name: item.known for name, item in found.items()} == {new_id("t", "d1", 2): True}


@pytest.mark.requirement("R118")
@pytest.mark.parametrize("discover", [True, False])
async def test_sandbox_of_a_driver_that_nobody_lists_is_of_an_unknown_rollout(discover: bool) -> None:
    """As that of another driver, where a client uses its own address alone. The others are judged all the same."""
    async with two_drivers(names_addresses=False, discover=discover) as place:
        owners = {"over": new_id("r", "d0"), "strange": new_id("r", "d9" if discover else "d1")}
        place.d0.rollouts[owners["over"]] = rollout_pb2.PHASE_ENDED
        place.sandboxes.labels = {name: (ROLLOUT_LABEL, rollout) for name, rollout in owners.items()}
        found = await place.left()
    assert {name: item.known for name, item in found.items()} == {"over": True, "strange": False}


@pytest.mark.requirement("R118")
async def test_driver_that_is_away_hides_its_own_sandboxes_only() -> None:
    """Where it has any, nobody can say whether they are left, and the error says so."""
    async with two_drivers() as place:
        over = new_id("r", "d0")
        place.d0.rollouts[over] = rollout_pb2.PHASE_ENDED
        place.sandboxes.labels = {"over": (ROLLOUT_LABEL, over)}
        await place.servers["d1"].stop(None)
        assert (await place.left()).keys() == {"over"}
        place.sandboxes.labels["theirs"] = (ROLLOUT_LABEL, new_id("r", "d1"))
        with pytest.raises(Unavailable, match="d1"):
            await place.left()
