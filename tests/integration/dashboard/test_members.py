"""The dashboard before several services of a kind: which one a page's call goes to."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2
from tests.support.waiting import eventually

from penstock.client.transport.endpoints import Endpoints
from penstock.dashboard.framing import data_frame
from penstock.dashboard.serving import Place, serve
from penstock.driver.v1 import rollout_pb2, rollout_service_pb2
from penstock.driver.v1 import rollout_service_pb2_grpc as driver_grpc
from penstock.ops.v1 import operations_service_pb2 as pb
from penstock.ops.v1 import operations_service_pb2_grpc as pb_grpc

TOKEN = "the-page's-token"
GET = "penstock.driver.v1.RolloutService/GetRollout"
WATCH = "penstock.driver.v1.RolloutService/WatchRollout"
INFO = "penstock.ops.v1.OperationsService/GetServerInfo"


@dataclass
class Driver(driver_grpc.RolloutServiceServicer, pb_grpc.OperationsServiceServicer):
    """A driver that lists members, and has the rollouts whose ids begin with its name."""

    name: str
    listed: Sequence[tuple[str, str]] = ()
    address: str = ""
    tokens: list[str] = field(default_factory=list)
    lists: int = 0
    """How often it was asked who there is."""
    answers: asyncio.Event | None = None
    """If set, it says who there is only afterwards."""
    names_addresses: bool = True
    """Whether it says where other drivers are; not of those with another name in their certificate."""

    async def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: Any
    ) -> pb.GetServerInfoResponse:
        """Which drivers there are; only with the page's token."""
        await self._admit(context)
        self.lists += 1
        if self.answers is not None:
            await self.answers.wait()
        members = [pb.Member(service="driver", name=name, address=address) for name, address in self.listed]
        return pb.GetServerInfoResponse(server=pb.ServerInfo(service="driver", name=self.name), members=members)

    async def GetRollout(  # noqa: N802
        self, request: rollout_service_pb2.GetRolloutRequest, context: Any
    ) -> rollout_service_pb2.GetRolloutResponse:
        """The rollout, with the driver that gave it as its task."""
        await self._find(request.rollout_id, context)
        rollout = rollout_pb2.Rollout(rollout_id=request.rollout_id, home=rollout_pb2.Home(driver=self.name))
        return rollout_service_pb2.GetRolloutResponse(rollout=rollout)

    async def WatchRollout(  # noqa: N802
        self, request: rollout_service_pb2.WatchRolloutRequest, context: Any
    ) -> AsyncIterator[rollout_service_pb2.WatchRolloutResponse]:
        """Two events."""
        await self._find(request.rollout_id, context)
        for sequence in (1, 2):
            event = rollout_pb2.RolloutEvent(sequence=sequence)
            yield rollout_service_pb2.WatchRolloutResponse(event=event)

    async def _admit(self, context: Any) -> None:
        token = dict(context.invocation_metadata()).get("authorization", "")
        self.tokens.append(token)
        if token != f"Bearer {TOKEN}":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "not this token")

    async def _find(self, rollout_id: str, context: Any) -> None:
        await self._admit(context)
        home = next((item for item in self.listed if rollout_id.startswith(f"r.{item[0]}.")), (self.name, ""))
        if home[0] != self.name:
            info = error_details_pb2.ErrorInfo(reason="HOME_ELSEWHERE", domain="penstock")
            info.metadata.update({"home": home[0]} | ({"address": home[1]} if self.names_addresses else {}))
            packed = AnyMessage()
            packed.Pack(info)
            code = grpc.StatusCode.FAILED_PRECONDITION
            status = status_pb2.Status(code=code.value[0], message="elsewhere", details=[packed])
            context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
            await context.abort(code, "elsewhere")


@dataclass
class Page:
    """A browser's page of a dashboard that was given the first of the drivers."""

    drivers: Sequence[Driver]
    dashboard: str
    http: aiohttp.ClientSession

    async def ask(self, method: str, message: Any, member: str = "", token: str = TOKEN) -> tuple[list[bytes], str]:
        """The messages of an answer, and its trailers."""
        headers = {"content-type": "application/grpc-web+proto", "authorization": f"Bearer {token}"}
        headers |= {"penstock-service": "driver"} | ({"penstock-member": member} if member else {})
        data = data_frame(message.SerializeToString())
        async with self.http.post(f"{self.dashboard}rpc/{method}", data=data, headers=headers) as response:
            body = await response.read()
        messages: list[bytes] = []
        while True:
            flags, length = struct.unpack(">BI", body[:5])
            content, body = body[5 : 5 + length], body[5 + length :]
            if flags & 0x80:
                return messages, content.decode()
            messages.append(content)

    async def driver_of(self, rollout_id: str, member: str = "") -> str:
        """The driver that answers for a rollout."""
        request = rollout_service_pb2.GetRolloutRequest(rollout_id=rollout_id)
        [answer], _ = await self.ask(GET, request, member)
        return rollout_service_pb2.GetRolloutResponse.FromString(answer).rollout.home.driver


@asynccontextmanager
async def page(folder: Path, *names: str, listed: bool = True, discover: bool = True) -> AsyncIterator[Page]:
    """Drivers of these names, and a page before the first of them."""
    (folder / "page" / "assets").mkdir(parents=True)
    (folder / "page" / "index.html").write_text("<!doctype html><title>page</title>")
    async with AsyncExitStack() as stack:
        drivers = [Driver(name) for name in names]  # type: ignore[abstract]
        for driver in drivers:
            server = grpc.aio.server()
            driver_grpc.add_RolloutServiceServicer_to_server(driver, server)
            pb_grpc.add_OperationsServiceServicer_to_server(driver, server)
            driver.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            await server.start()
            stack.push_async_callback(server.stop, None)
        for driver in drivers if listed else ():
            driver.listed = [(other.name, other.address) for other in drivers]
        endpoints = Endpoints(
            driver=drivers[0].address, sandbox="", interception="", inference="", token="its own", discover=discover
        )
        dashboard = await stack.enter_async_context(serve(endpoints, Place(port=0), static=folder / "page"))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield Page(drivers, dashboard.address, http)


@pytest.mark.requirement("R118")
async def test_named_member_answers_with_the_pages_token(tmp_path: Path) -> None:
    """The dashboard's own token is sent to nobody, also not to ask which drivers there are."""
    async with page(tmp_path, "d0", "d1") as here:
        assert [await here.driver_of("mine"), await here.driver_of("mine", "d1")] == ["d0", "d1"]
        assert {token for driver in here.drivers for token in driver.tokens} == {f"Bearer {TOKEN}"}


@pytest.mark.requirement("R118")
@pytest.mark.parametrize("names_addresses", [True, False])
async def test_rollout_of_another_driver_is_found_by_its_id(tmp_path: Path, names_addresses: bool) -> None:
    """A page's address has no driver's name: calls and streams follow HOME_ELSEWHERE, by the name if it has no more."""
    async with page(tmp_path, "d0", "d1") as here:
        here.drivers[0].names_addresses = names_addresses
        assert await here.driver_of("r.d1.x") == "d1"
        messages, trailers = await here.ask(WATCH, rollout_service_pb2.WatchRolloutRequest(rollout_id="r.d1.x"))
    assert (len(messages), "grpc-status: 0" in trailers) == (2, True)


async def test_redirect_is_followed_once(tmp_path: Path) -> None:
    """A named driver that sends the page elsewhere is not followed: two that disagree would send it in circles."""
    async with page(tmp_path, "d0", "d1") as here:
        request = rollout_service_pb2.GetRolloutRequest(rollout_id="r.d0.x")
        messages, trailers = await here.ask(GET, request, "d1")
    assert (messages, "grpc-status: 9" in trailers) == ([], True)


async def test_unknown_member_is_refused_by_name(tmp_path: Path) -> None:
    """The names of the others are not in the message, which those without a token get too."""
    async with page(tmp_path, "d0", "d1") as here:
        messages, trailers = await here.ask(INFO, pb.GetServerInfoRequest(), "d7")
        stranger, shown = await here.ask(INFO, pb.GetServerInfoRequest(), "d7", token="wrong")
    assert (messages, "d7" in trailers, "d1" in trailers) == ([], True, False)
    assert (stranger, "d1" in shown) == ([], False)


async def test_members_are_shown_to_none_but_token_holders(tmp_path: Path) -> None:
    """Without a valid token the driver does not say which others there are."""
    async with page(tmp_path, "d0", "d1") as here:
        messages, trailers = await here.ask(INFO, pb.GetServerInfoRequest(), "d1", token="wrong")
    assert (messages, "grpc-status: 16" in trailers) == ([], True)


@pytest.mark.parametrize(("listed", "discover"), [(False, True), (True, False)])
async def test_without_a_list_the_given_driver_answers(tmp_path: Path, listed: bool, discover: bool) -> None:
    """A name is that of the only service: homes of rollouts name it, whether or not anything lists it."""
    async with page(tmp_path, "d0", listed=listed, discover=discover) as here:
        assert await here.driver_of("mine", "d0") == "d0"


async def test_token_is_not_sent_to_a_member_elsewhere(tmp_path: Path) -> None:
    """A list cannot send tokens in clear to another machine."""
    async with page(tmp_path, "d0", "d1") as here:
        here.drivers[0].listed = [("d0", here.drivers[0].address), ("d1", "192.0.2.1:7702")]
        messages, trailers = await here.ask(INFO, pb.GetServerInfoRequest(), "d1")
    assert (messages, "grpc-status: 9" in trailers) == ([], True)


async def test_calls_of_a_page_at_once_ask_for_members_once(tmp_path: Path) -> None:
    """They come together, and all find the list stale."""
    async with page(tmp_path, "d0", "d1") as here:
        first = here.drivers[0]
        first.answers = asyncio.Event()
        async with asyncio.TaskGroup() as calls:
            asked = [calls.create_task(here.driver_of("mine", "d1")) for _ in range(8)]
            await eventually(lambda: first.lists > 0, "the driver is asked")
            first.answers.set()
        assert [call.result() for call in asked] == ["d1"] * 8
        assert first.lists == 1, "and the answer is used by the calls after it"
