"""One session over two gates that follow scripts."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from tests.support.waiting import eventually
from tests.unit.client.conftest import TOKEN, Gate, Refusal

from penstock.client import CallEnded, Completion, HostTool, connect
from penstock.client.intercept import session as module
from penstock.interception.v1 import intercept_service_pb2 as icpt
from penstock.interception.v1 import intercept_service_pb2_grpc
from penstock.ops.v1 import operations_service_pb2 as ops
from penstock.ops.v1 import operations_service_pb2_grpc

ANSWER = Completion.of_tokens([5, 6], [-0.5, -0.25], policy_version=3)
Script = Callable[[Gate], Awaitable[None]]


class Cluster(operations_service_pb2_grpc.OperationsServiceServicer):
    """A driver that lists gates."""

    def __init__(self) -> None:
        self.gates: dict[str, Any] = {}

    async def GetServerInfo(self, request: Any, context: Any) -> ops.GetServerInfoResponse:  # noqa: N802
        members = [
            ops.Member(service="interception", name=address, address=address, state=state)
            for address, state in self.gates.items()
        ]
        return ops.GetServerInfoResponse(server=ops.ServerInfo(name="d0"), members=members)


class ScriptedGate(intercept_service_pb2_grpc.InterceptServiceServicer):
    """A gate. By session id, `tools` are the names of the offers that it accepted, and `asked` is set by an offer.

    While `answers` is not set it answers none. An offer that the client cancelled may still arrive, at any
    time: only its session distinguishes it from others.
    """

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.tools: dict[str, list[list[str]]] = defaultdict(list)
        self.asked: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.abandoned = asyncio.Event()
        self.answers = asyncio.Event()
        self.answers.set()

    async def Intercept(  # type: ignore[override]  # noqa: N802
        self, requests: Any, context: Any
    ) -> None:
        if not self.scripts:
            await Refusal(grpc.StatusCode.UNAVAILABLE).abort(context)
        await self.scripts.pop(0)(Gate(requests, context))

    async def RegisterTools(self, request: Any, context: Any) -> icpt.RegisterToolsResponse:  # noqa: N802
        self.asked[request.session_id].set()
        try:
            await self.answers.wait()
        except asyncio.CancelledError:
            self.abandoned.set()
            raise
        self.tools[request.session_id].append([tool.name for tool in request.tools])
        return icpt.RegisterToolsResponse()


def listing() -> Cluster:
    return Cluster()  # type: ignore[abstract]  # no other RPC is asked for


def scripted(*scripts: Script) -> ScriptedGate:
    return ScriptedGate(*scripts)  # type: ignore[abstract]  # no other RPC is asked for


@asynccontextmanager
async def served(add: Callable[[Any, Any], None], servicer: Any) -> AsyncIterator[str]:
    server = grpc.aio.server()
    add(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


add_gate = intercept_service_pb2_grpc.add_InterceptServiceServicer_to_server
add_driver = operations_service_pb2_grpc.add_OperationsServiceServicer_to_server


async def stays(stream: Gate) -> None:
    """A gate that answers pauses and resumes until the client leaves."""
    await stream.hello()
    while (frame := await stream.read()) is not None and not frame.HasField("goodbye"):
        if frame.HasField("pause"):
            await stream.send(paused=icpt.CallsPaused())
        elif frame.HasField("resume"):
            await stream.send(resumed=icpt.CallsResumed())


def breaks_when(leaves: asyncio.Event) -> Script:
    """A gate that opens the session "old", whose stream breaks."""

    async def breaks(stream: Gate) -> None:
        await stream.hello("old")
        await leaves.wait()
        await stream.fail(Refusal(grpc.StatusCode.UNAVAILABLE))

    return breaks


@asynccontextmanager
async def session_of_two(
    one: ScriptedGate, two: ScriptedGate, second_is: Any = ops.MEMBER_STATE_UP
) -> AsyncIterator[tuple[Any, Callable[[Any], None]]]:
    """A session over two gates, and what sets the second one's state in the driver's list."""
    cluster = listing()
    async with served(add_gate, one) as first, served(add_gate, two) as second, served(add_driver, cluster) as driver:
        cluster.gates = {first: ops.MEMBER_STATE_UP, second: second_is}
        target = {"driver": driver, "interception": first}
        async with connect(target, TOKEN) as ps, ps.intercept() as session:
            yield session, lambda state: cluster.gates.update({second: state})


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_AGAIN_S", 0.02)
    monkeypatch.setattr(module, "FRESH_S", 0.0)


async def test_each_answer_goes_to_the_gate_of_its_call() -> None:
    """The credits are shared out, and the state goes to both."""
    windows: list[int] = []

    def answering(call_id: str) -> Script:
        async def script(stream: Gate) -> None:
            windows.append((await stream.hello()).credits.calls)
            await stream.calls(call_id)
            while (frame := await stream.read()) is not None and not frame.HasField("goodbye"):
                if frame.HasField("results"):
                    assert [result.call_id for result in frame.results.results] == [call_id]
                    await stream.accept(call_id)
                elif frame.HasField("pause"):
                    await stream.send(paused=icpt.CallsPaused(open_calls=1))

        return script

    cluster, gates = listing(), [scripted(answering("a")), scripted(answering("b"))]
    async with (
        served(add_gate, gates[0]) as first,
        served(add_gate, gates[1]) as second,
        served(add_driver, cluster) as driver,
    ):
        cluster.gates = dict.fromkeys((first, second), ops.MEMBER_STATE_UP)
        target = {"driver": driver, "interception": first}
        async with connect(target, TOKEN) as ps, ps.intercept(credits=8) as session:
            await session.offer_tools([HostTool(name="look_up", function=str)])
            assert await session.pause() == 2
            taken = []
            async for call in session.calls():
                await call.deliver(ANSWER)
                taken.append(call.call_id)
                if len(taken) == 2:
                    break
    assert sorted(taken) == ["a", "b"]
    assert [gate.tools for gate in gates] == [{"s1": [["look_up"]]}] * 2
    assert sum(windows) <= 16


async def test_a_session_outlasts_a_lost_gate_and_takes_in_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lost one's calls end. The new one has tools and pause before its calls are handed out."""
    monkeypatch.setattr(module, "GONE_S", 0.0)
    taken = asyncio.Event()
    new: list[str] = []

    async def breaks(stream: Gate) -> None:
        await stream.hello()
        await stream.calls("a")
        await taken.wait()
        await stream.fail(Refusal(grpc.StatusCode.UNAVAILABLE))

    async def joins(stream: Gate) -> None:
        assert (await stream.hello()).policy_version == 7
        await stream.calls("early")
        while (frame := await stream.read()) is not None and not frame.HasField("goodbye"):
            new.append(frame.WhichOneof("frame") or "")
            if frame.HasField("results"):
                await stream.send(paused=icpt.CallsPaused())
                await stream.calls("late")

    cluster, third = listing(), scripted(joins)
    async with (
        served(add_gate, scripted(stays)) as first,
        served(add_gate, scripted(breaks)) as second,
        served(add_gate, third) as joining,
        served(add_driver, cluster) as driver,
    ):
        cluster.gates = dict.fromkeys((first, second), ops.MEMBER_STATE_UP)
        target = {"driver": driver, "interception": first}
        async with connect(target, TOKEN) as ps, ps.intercept() as session:
            calls = session.calls()
            call = await anext(calls)
            taken.set()
            cluster.gates[second] = ops.MEMBER_STATE_LOST
            await call.wait_ended()
            with pytest.raises(CallEnded):
                await call.deliver(ANSWER)
            await session.pause("weights")
            await session.offer_tools([HostTool(name="look_up", function=str)])
            session.announce(7)
            cluster.gates[joining] = ops.MEMBER_STATE_UP
            assert (await anext(calls)).call_id == "late"
            await calls.aclose()
    assert third.tools == {"s1": [["look_up"]]}
    assert [item for item in new if item in ("pause", "results")] == ["pause", "results"]


@pytest.mark.requirement("R22")
@pytest.mark.parametrize("resumed", [True, False])
async def test_tools_withdrawn_while_a_gate_was_away_are_withdrawn_there_too(resumed: bool) -> None:
    """A session that it resumes has them still; a new one has none."""
    leaves, withdrawn = asyncio.Event(), asyncio.Event()

    async def comes_back(stream: Gate) -> None:
        await stream.hello("new", resumed=resumed, answered=withdrawn)
        await stream.calls("late")
        await _left(stream)

    second = scripted(breaks_when(leaves), comes_back)
    async with session_of_two(scripted(stays), second) as (session, list_second):
        await session.offer_tools([HostTool(name="look_up", function=str)])
        second.answers.clear()
        second.asked["old"].clear()
        withdrawal = asyncio.create_task(session.offer_tools([]))
        await second.asked["old"].wait()
        list_second(ops.MEMBER_STATE_LOST)
        leaves.set()
        await withdrawal
        await second.abandoned.wait()
        assert second.tools == {"old": [["look_up"]]}
        second.answers.set()
        withdrawn.set()
        assert [call.call_id async for call in _first(session)] == ["late"]
    assert second.tools == {"old": [["look_up"]]} | ({"new": [[]]} if resumed else {})


@pytest.mark.requirement("R118", "R122")
async def test_a_pause_that_did_not_wait_for_a_gate_holds_its_calls_when_it_comes_back() -> None:
    """It leases them before it has read that they are to be held: they are put back, and come after the pause."""
    leaves, paused = asyncio.Event(), asyncio.Event()
    put_back: list[str] = []

    async def comes_back(stream: Gate) -> None:
        await stream.hello("old", resumed=True, answered=paused)
        await stream.calls("asked meanwhile")
        while (frame := await stream.read()) is not None and not frame.HasField("goodbye"):
            if frame.HasField("results"):
                put_back.extend(one.call_id for one in frame.results.results if one.HasField("release"))
                await stream.send(paused=icpt.CallsPaused())
            elif frame.HasField("resume"):
                await stream.send(resumed=icpt.CallsResumed())
                await stream.calls("asked meanwhile", lease="l2")

    second = scripted(breaks_when(leaves), comes_back)
    async with session_of_two(scripted(stays), second) as (session, list_second):
        list_second(ops.MEMBER_STATE_LOST)
        leaves.set()
        assert await session.pause("weights") == 0
        paused.set()
        await eventually(lambda: put_back == ["asked meanwhile"], "the call is put back")
        await session.resume()
        assert [call.call_id async for call in _first(session)] == ["asked meanwhile"]
    assert put_back == ["asked meanwhile"]


@pytest.mark.requirement("R22")
async def test_tools_withdrawn_while_they_are_registered_are_withdrawn_there_too() -> None:
    """A gate that has just come back gets the withdrawal before its calls are handed out."""
    joins = asyncio.Event()

    async def comes_late(stream: Gate) -> None:
        await stream.hello("new", answered=joins)
        await stream.calls("late")
        await _left(stream)

    second = scripted(comes_late)
    async with session_of_two(scripted(stays), second, ops.MEMBER_STATE_LOST) as (session, _):
        second.answers.clear()
        await session.offer_tools([HostTool(name="look_up", function=str)])
        joins.set()
        await second.asked["new"].wait()
        await session.offer_tools([])
        second.answers.set()
        assert [call.call_id async for call in _first(session)] == ["late"]
    first_offer, *withdrawals = second.tools["new"]
    assert first_offer == ["look_up"]
    # One or two: that of `offer_tools` itself may be answered before it is cancelled.
    assert withdrawals and not any(withdrawals)


async def _first(session: Any) -> AsyncIterator[Any]:
    async for call in session.calls():
        yield call
        return


async def _left(stream: Gate) -> None:
    while (frame := await stream.read()) is not None and not frame.HasField("goodbye"):
        pass
