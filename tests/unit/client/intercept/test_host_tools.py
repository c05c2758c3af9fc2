"""A program's tools against a gate that follows a script: what runs, what is told, how often."""

import asyncio
import json
import logging
import threading
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import MessageToDict
from pydantic import BaseModel
from tests.unit.client.conftest import Fakes, Gate, Refusal

from penstock.client import HostTool, HostToolCall, Image, InvalidArgument, Penstock, Selector, Text, ToolFailed
from penstock.client.intercept.host_tools import Serving
from penstock.interception.v1 import intercept_service_pb2 as icpt

SELECTOR = icpt.CallSelector(run_id="run")


class Query(BaseModel):
    """Arguments."""

    word: str
    count: int = 1


@dataclass
class Found:
    """A result."""

    meaning: str
    uses: int


def message(call_id: str = "c", name: str = "tool", **arguments: Any) -> icpt.HostToolCall:
    """A call as the gate sends it."""
    return icpt.HostToolCall(
        tool_call_id=call_id, name=name, rollout_id="r", group_index=0, arguments_json=json.dumps(arguments)
    )


def serving(function: Any, parameters: Any = None) -> tuple[Serving, asyncio.Event]:
    """A session's tools, one of them."""
    wake = asyncio.Event()
    made = Serving(wake)
    made.offered([HostTool(name="tool", function=function, parameters=parameters)], SELECTOR)
    return made, wake


async def result_of(made: Serving, wake: asyncio.Event) -> icpt.HostToolResult:
    """The next result, once there is one."""
    while (results := made.next_results()) is None:
        wake.clear()
        await wake.wait()
    [only] = results.results
    return only


@pytest.mark.requirement("R15")
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("words", {"text": "words"}),
        (None, {"text": ""}),
        ({"a": 1}, {"a": 1}),
        (Found("a door", 4), {"meaning": "a door", "uses": 4}),
        (Query(word="w"), {"word": "w", "count": 1}),
        ([1, "x"], {"result": [1, "x"]}),
        (0.5, {"result": 0.5}),
        (Text("t"), {"content": [{"type": "text", "text": "t"}]}),
        (
            [Text("t"), Image("image/png", b"hi")],
            {"content": [{"type": "text", "text": "t"}, {"type": "image", "data": "aGk=", "mimeType": "image/png"}]},
        ),
    ],
)
async def test_tool_results_are_converted(given: Any, told: dict[str, Any]) -> None:
    """A text, parts, or JSON."""

    async def tool(call: HostToolCall[dict[str, Any]]) -> Any:
        return given

    made, wake = serving(tool)
    made.called(message())
    result = await result_of(made, wake)
    assert MessageToDict(result.result) == told
    assert not result.is_error


@pytest.mark.requirement("R15")
async def test_call_has_its_facts_and_arguments_as_the_model() -> None:
    """Checked by pydantic once more; what does not hold is told to the agent and runs nothing."""
    seen: list[HostToolCall[Query]] = []

    async def tool(call: HostToolCall[Query]) -> str:
        seen.append(call)
        return call.arguments.word * call.arguments.count

    made, wake = serving(tool, Query)
    made.called(message(word="ab", count=2))
    assert MessageToDict((await result_of(made, wake)).result) == {"text": "abab"}
    [call] = seen
    assert (call.tool_call_id, call.name, call.rollout_id, call.group_index, call.group_id) == (
        "c",
        "tool",
        "r",
        0,
        None,
    )
    made.called(message("d", word=3))
    wrong = await result_of(made, wake)
    assert wrong.is_error
    assert "word" in str(wrong.result["text"])
    assert len(seen) == 1


@pytest.mark.requirement("R8")
async def test_agent_sees_only_the_failure_text_meant_for_it(caplog: Any) -> None:
    """`ToolFailed` speaks to the agent; anything else is in this program's log."""

    async def tool(call: HostToolCall[Any]) -> Any:
        match call.arguments["how"]:
            case "said":
                raise ToolFailed("No such drawer.")
            case "raised":
                raise RuntimeError("the password is hunter2")
            case "huge":
                return 2**60
            case "endless":
                return float("inf")
            case "unsayable":
                raise ToolFailed("half a character: \ud800")
        return object()

    made, wake = serving(tool)
    told = {}
    with caplog.at_level(logging.ERROR):
        for how in ("said", "raised", "huge", "endless", "unsayable", "no JSON"):
            made.called(message(how, how=how))
            result = await result_of(made, wake)
            assert result.is_error
            told[how] = result.result["text"]
    assert told.pop("said") == "No such drawer."
    assert set(told.values()) == {"The tool failed."}
    assert "hunter2" in caplog.text


@pytest.mark.requirement("R32")
async def test_a_plain_function_runs_in_a_thread() -> None:
    """A tool that blocks stalls no call and no heartbeat."""
    made, wake = serving(lambda call: threading.current_thread().name)
    made.called(message())
    result = await result_of(made, wake)
    assert result.result["text"] != threading.current_thread().name


@pytest.mark.requirement("R34")
async def test_repeated_tool_call_runs_once_and_its_result_is_resent() -> None:
    """While it runs, after it ran, and until the gate has the result on disk."""
    runs, let = 0, asyncio.Event()

    async def tool(call: HostToolCall[Any]) -> str:
        nonlocal runs
        runs += 1
        await let.wait()
        return "once"

    made, wake = serving(tool)
    for _ in range(3):
        made.called(message())
    let.set()
    first = await result_of(made, wake)
    made.taken_up(resumed=True)
    assert await result_of(made, wake) == first
    made.called(message())
    assert await result_of(made, wake) == first
    made.acknowledged(icpt.ToolResultsAcknowledged(accepted_tool_call_ids=["c"]))
    made.taken_up(resumed=True)
    assert made.next_results() is None
    assert runs == 1


@pytest.mark.requirement("R32")
@pytest.mark.parametrize("how", ["cancelled", "forgotten", "ended"])
async def test_a_call_that_needs_no_result_is_stopped(how: str) -> None:
    """The agent took it back, the gate forgot the session, or the session is over."""
    begun, stopped = asyncio.Event(), asyncio.Event()

    async def tool(call: HostToolCall[Any]) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    made, _ = serving(tool)
    made.called(message())
    await begun.wait()
    match how:
        case "cancelled":
            made.cancelled(["c"])
        case "forgotten":
            made.taken_up(resumed=False)
        case _:
            made.end()
            await made.ended()
    await stopped.wait()
    assert made.next_results() is None


@pytest.mark.requirement("R26")
async def test_result_refused_by_the_gate_becomes_a_readable_failure() -> None:
    """Too large, for example; the call does not hang."""

    async def tool(call: HostToolCall[Any]) -> str:
        return "x" * 100

    made, wake = serving(tool)
    made.called(message())
    await result_of(made, wake)
    refusal = icpt.ResultRejected(call_id="c", reason=icpt.ResultRejected.REASON_INVALID, violations=["result: large"])
    made.acknowledged(icpt.ToolResultsAcknowledged(rejected=[refusal]))
    again = await result_of(made, wake)
    assert (again.is_error, again.result["text"]) == (True, "The tool failed.")
    made.acknowledged(icpt.ToolResultsAcknowledged(rejected=[refusal]))
    assert made.next_results() is None


@pytest.mark.requirement("R15")
async def test_tools_are_registered_with_their_schemas_and_their_calls_answered(fakes: Fakes, ps: Penstock) -> None:
    """For the session's own selector or another; one name is one tool of a session."""
    calls = asyncio.Event()

    async def gate(stream: Gate) -> None:
        await stream.hello()
        await calls.wait()
        await stream.send(tool_calls=icpt.ToolCalls(calls=[message(word="w")]))
        frame = await stream.read()
        assert frame is not None
        [result] = frame.tool_results.results
        assert (result.tool_call_id, result.result["text"]) == ("c", "w")
        await stream.send(
            tool_results_acknowledged=icpt.ToolResultsAcknowledged(accepted_tool_call_ids=[result.tool_call_id])
        )
        await stream.goodbye()

    async def tool(call: HostToolCall[Query]) -> str:
        return call.arguments.word

    async def other(call: HostToolCall[Any]) -> None: ...

    fakes.converse(gate)
    fakes.queue("RegisterTools", icpt.RegisterToolsResponse(), icpt.RegisterToolsResponse())
    async with ps.intercept(run_id="run") as session:
        await session.offer_tools([HostTool(name="tool", function=tool, description="d", parameters=Query)])
        await session.offer_tools([HostTool(name="raw", function=other)], selector=Selector(group_id="g"))
        with pytest.raises(InvalidArgument) as taken:
            await session.offer_tools([HostTool(name="tool", function=other)], selector=Selector(group_id="g"))
        assert taken.value.reason == "HOST_TOOL"
        calls.set()
    first, second = fakes.requests["RegisterTools"]
    assert (first.session_id, first.selector.run_id, second.selector.group_id) == ("s1", "run", "g")
    [sent] = first.tools
    assert (sent.name, sent.description) == ("tool", "d")
    assert json.loads(sent.parameters_json_schema) == Query.model_json_schema()
    assert second.tools[0].parameters_json_schema == ""


@pytest.mark.requirement("R15")
async def test_tools_that_the_gate_refuses_are_not_offered(fakes: Fakes, ps: Penstock) -> None:
    """The error comes to whoever offered them, and a later session does not offer them again."""

    async def gate(stream: Gate) -> None:
        await stream.hello()
        await stream.goodbye()

    async def tool(call: HostToolCall[Any]) -> None: ...

    fakes.converse(gate)
    fakes.queue("RegisterTools", Refusal(grpc.StatusCode.INVALID_ARGUMENT, "TOOL_NAME_RESERVED"))
    async with ps.intercept() as session:
        with pytest.raises(InvalidArgument) as refused:
            await session.offer_tools([HostTool(name="bash", function=tool)])
        assert refused.value.reason == "TOOL_NAME_RESERVED"
        assert next(iter(session._gates.values())).stream.tools.registrations("s") == []


@pytest.mark.requirement("R22")
@pytest.mark.parametrize("resumed", [True, False])
async def test_a_session_that_begins_anew_offers_its_tools_again(fakes: Fakes, ps: Penstock, resumed: bool) -> None:
    """What was resumed has them still."""
    back = asyncio.Event()

    async def breaks(stream: Gate) -> None:
        await stream.hello()
        await offered.wait()
        await stream.fail(Refusal(grpc.StatusCode.UNAVAILABLE, "DRAINING"))

    async def goes_on(stream: Gate) -> None:
        await stream.hello("s2", resumed=resumed)
        back.set()
        await stream.goodbye()

    async def tool(call: HostToolCall[Any]) -> None: ...

    offered = asyncio.Event()
    fakes.converse(breaks, goes_on)
    fakes.queue("RegisterTools", *[icpt.RegisterToolsResponse()] * (1 if resumed else 2))
    async with ps.intercept() as session:
        await session.offer_tools([HostTool(name="tool", function=tool)])
        offered.set()
        await back.wait()
    assert [request.session_id for request in fakes.requests["RegisterTools"]] == ["s1"] + ["s2"] * (not resumed)
