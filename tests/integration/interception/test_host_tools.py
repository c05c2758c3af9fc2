"""Host tools: offered on the trainer's stream, reached by agents as an MCP server, by the official SDK's client."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import aiohttp
import grpc
import pytest
from google.protobuf import struct_pb2
from tests.support.endpoints.mcp_agent import HEADERS, connected, post, tool_call
from tests.support.endpoints.sdks import imported_when_used
from tests.support.endpoints.upstream import vendor

from penstock.chat.v1 import chat_pb2
from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock.interception.v1 import interception_pb2
from penstock.interception.v1 import rollout_gate_service_pb2 as gate
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.errors import InvalidArgument, NotFound
from penstock_chassis.rpc_status import from_rpc_error

if TYPE_CHECKING:
    import mcp
else:
    mcp = imported_when_used("mcp")

SCHEMA = {
    "type": "object",
    "properties": {"word": {"type": "string", "pattern": "^[a-z]+$"}, "count": {"type": "integer", "minimum": 1}},
    "required": ["word"],
    "additionalProperties": False,
}


def lookup(name: str = "lookup", schema: Any = SCHEMA) -> chat_pb2.Tool:
    """A tool."""
    return chat_pb2.Tool(name=name, description="Looks a word up.", parameters_json_schema=json.dumps(schema))


async def register(service: Any, trainer: Any, *tools: chat_pb2.Tool, **selector: Any) -> None:
    """Offers tools; without a selector, to what the session selects."""
    request = pb.RegisterToolsRequest(session_id=trainer.session_id, tools=tools or [lookup()])
    if selector:
        request.selector.CopyFrom(pb.CallSelector(**selector))
    await service.intercept.RegisterTools(request)


def url_of(service: Any, rollout: Any) -> str:
    """Where the rollout's agent finds its tools."""
    return f"http://{service.ingress}/rollout/{rollout.rollout_id}/mcp"


def result(call: pb.HostToolCall, content: dict[str, Any], *, is_error: bool = False) -> pb.HostToolResult:
    """What a tool gives back."""
    struct = struct_pb2.Struct()
    struct.update(content)
    return pb.HostToolResult(tool_call_id=call.tool_call_id, result=struct, is_error=is_error)


async def tool_calls(trainer: Any, count: int = 1) -> list[pb.HostToolCall]:
    """The first `count` calls that came, in however many frames."""
    frames = 1
    while True:
        await trainer.frame("tool_calls", frames)
        found = [call for frame in trainer._of("tool_calls") for call in frame.tool_calls.calls]
        if len(found) >= count:
            return found[:count]
        frames += 1


async def answer(trainer: Any, *results: pb.HostToolResult, count: int = 1) -> pb.ToolResultsAcknowledged:
    """Sends results and waits for what became of them."""
    await trainer.send(tool_results=pb.ToolResults(results=results))
    told: pb.ToolResultsAcknowledged = await trainer.frame("tool_results_acknowledged", count)
    return told


def text_of(told: Any) -> str:
    """The text of a tool's result, from the SDK or from JSON."""
    blocks: Iterable[Any] = told["content"] if isinstance(told, dict) else told.content
    return "".join(block["text"] if isinstance(block, dict) else block.text for block in blocks)


@pytest.mark.requirement("R15")
async def test_an_agent_calls_a_tool_of_the_trainers_host(service: Any) -> None:
    """Listed with its schema, called with checked arguments, answered with what the trainer gave, recorded."""
    trainer = await service.trainer()
    await register(service, trainer)
    rollout = await service.open(labels={"kind": "a"}, group_id="g", run_id="r", task_id="t", group_index=2)
    async with connected(url_of(service, rollout), rollout.token) as agent:
        [listed] = (await agent.list_tools()).tools
        assert (listed.name, listed.description) == ("lookup", "Looks a word up.")
        assert listed.input_schema == SCHEMA
        asking = asyncio.create_task(agent.call_tool("lookup", {"word": "gate", "count": 3}))
        [call] = await tool_calls(trainer)
        assert (call.name, call.rollout_id, call.group_id, call.run_id) == ("lookup", rollout.rollout_id, "g", "r")
        assert (call.task_id, call.group_index, dict(call.labels)) == ("t", 2, {"kind": "a"})
        assert dict(call.arguments) == {"word": "gate", "count": 3.0}
        assert json.loads(call.arguments_json) == {"word": "gate", "count": 3}
        acknowledged = await answer(trainer, result(call, {"meaning": "a door", "uses": 4, "share": 0.5}))
        assert list(acknowledged.accepted_tool_call_ids) == [call.tool_call_id]
        told = await asking
    assert not told.is_error
    assert told.structured_content == {"meaning": "a door", "uses": 4, "share": 0.5}
    assert json.loads(text_of(told)) == told.structured_content
    for bodies in (False, True):
        trajectory = await service.capture(rollout.rollout_id, include_bodies=bodies)
        [recorded] = trajectory.host_tool_calls
        assert (recorded.tool_call_id, recorded.name, recorded.index) == (call.tool_call_id, "lookup", 0)
        assert recorded.state == trajectory_pb2.CALL_STATE_DELIVERED
        assert json.loads(recorded.arguments_json) == {"word": "gate", "count": 3}
        assert recorded.end_time.ToNanoseconds() >= recorded.receive_time.ToNanoseconds() > 0
        assert bool(recorded.result_json) is bodies
        if bodies:
            content = recorded.result_json.encode()
            assert recorded.result_sha256 == hashlib.sha256(content).digest()
            assert recorded.result_bytes == len(content)


@pytest.mark.requirement("R15")
@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ({"text": "plain words"}, [{"type": "text", "text": "plain words"}]),
        (
            {"content": [{"type": "text", "text": "see"}, {"type": "image", "data": "aGk=", "mimeType": "image/png"}]},
            [{"type": "text", "text": "see"}, {"type": "image", "data": "aGk=", "mimeType": "image/png"}],
        ),
        ({"content": ["no", "blocks"]}, [{"type": "text", "text": '{"content":["no","blocks"]}'}]),
        ({}, [{"type": "text", "text": "{}"}]),
    ],
)
async def test_a_result_is_shown_as(service: Any, content: dict[str, Any], shown: list[dict[str, Any]]) -> None:
    """Text, MCP's own blocks, or JSON; an error of the tool is marked as one."""
    trainer = await service.trainer()
    await register(service, trainer)
    rollout = await service.open()
    for index, is_error in enumerate((False, True)):
        asking = asyncio.create_task(
            post(url_of(service, rollout), rollout.token, tool_call("lookup", {"word": "a"}, index))
        )
        call = (await tool_calls(trainer, index + 1))[-1]
        await answer(trainer, result(call, content, is_error=is_error), count=index + 1)
        status, told, _ = await asking
        assert status == 200
        assert told["id"] == index
        assert told["result"]["content"] == shown
        assert told["result"]["isError"] is is_error


@pytest.mark.requirement("R22")
async def test_concurrent_tool_calls_each_get_their_own_result(service: Any) -> None:
    """Answered in whatever order."""
    trainer = await service.trainer()
    await register(service, trainer)
    rollout = await service.open()
    words = ["one", "two", "three", "four"]
    async with connected(url_of(service, rollout), rollout.token) as agent:
        asking = [asyncio.create_task(agent.call_tool("lookup", {"word": word})) for word in words]
        calls = await tool_calls(trainer, len(words))
        results = [result(call, {"text": f"{call.arguments['word']}!"}) for call in reversed(calls)]
        await answer(trainer, *results)
        assert [text_of(told) for told in await asyncio.gather(*asking)] == [f"{word}!" for word in words]


@pytest.mark.requirement("R15")
async def test_follower_sees_each_tool_call_until_its_end(service: Any) -> None:
    """By its own position, whichever ends first; calls and host tool calls are counted apart."""
    trainer = await service.trainer()
    await register(service, trainer)
    rollout = await service.open()
    ended = -1

    async def follow() -> list[tuple[int, bool]]:
        nonlocal ended
        read = await service.capture(rollout.rollout_id, after_index=-1, after_tool_call_index=ended)
        for call in read.host_tool_calls:
            if not call.HasField("end_time"):
                break
            ended = call.index
        return [(call.index, call.HasField("end_time")) for call in read.host_tool_calls]

    async with connected(url_of(service, rollout), rollout.token) as agent:
        assert await follow() == []
        asking = []
        for count, word in enumerate(("first", "second"), 1):
            asking.append(asyncio.create_task(agent.call_tool("lookup", {"word": word})))
            await tool_calls(trainer, count)
        assert await follow() == [(0, False), (1, False)]
        first, second = await tool_calls(trainer, 2)
        await answer(trainer, result(second, {"text": "2"}))
        assert await follow() == [(0, False), (1, True)]
        await answer(trainer, result(first, {"text": "1"}), count=2)
        assert await follow() == [(0, True), (1, True)]
        assert await follow() == []
        await asyncio.gather(*asking)
        third = asyncio.create_task(agent.call_tool("lookup", {"word": "third"}))
        await answer(trainer, result((await tool_calls(trainer, 3))[2], {"text": "3"}), count=3)
        await third
        assert await follow() == [(2, True)]
    assert not (await service.capture(rollout.rollout_id, after_index=-1)).host_tool_calls
    assert len((await service.capture(rollout.rollout_id)).host_tool_calls) == 3


@pytest.mark.requirement("R15", "R33")
async def test_invalid_arguments_return_to_the_agent_not_the_trainer(service: Any) -> None:
    """Every wrong field is named, as an error of the tool that a model can read and correct."""
    trainer = await service.trainer()
    await register(service, trainer)
    rollout = await service.open()
    async with connected(url_of(service, rollout), rollout.token) as agent:
        told = await agent.call_tool("lookup", {"word": "NO", "count": 0, "more": 1})
        assert told.is_error
        assert all(part in text_of(told) for part in ("$.word", "$.count", "more"))
        assert (await agent.call_tool("lookup", {})).is_error
        deep: Any = "x"
        for _ in range(60):
            deep = [deep]
        assert "nested" in text_of(await agent.call_tool("lookup", {"word": deep}))
        with pytest.raises(mcp.MCPError) as unknown:
            await agent.call_tool("no_such_tool", {})
        assert unknown.value.error.code == -32602
    assert not trainer._of("tool_calls")
    calls = (await service.capture(rollout.rollout_id)).host_tool_calls
    assert [json.loads(call.arguments_json) for call in calls] == [
        {"word": "NO", "count": 0, "more": 1},
        {},
        {"word": deep},
    ]
    assert {(call.state, call.is_error, call.end_reason) for call in calls} == {
        (trajectory_pb2.CALL_STATE_DELIVERED, True, "ARGUMENTS_INVALID")
    }


@pytest.mark.requirement("R15")
@pytest.mark.parametrize(
    ("tool", "reason", "field"),
    [
        (lookup("bash"), "TOOL_NAME_RESERVED", "tools[0].name"),
        (lookup("Web-Search"), "TOOL_NAME_RESERVED", "tools[0].name"),
        (lookup("mcp_lookup"), "TOOL_NAME_RESERVED", "tools[0].name"),
        (lookup("penstock_x"), "TOOL_NAME_RESERVED", "tools[0].name"),
        (lookup("secret_tool"), "TOOL_NOT_ALLOWED", "tools[0].name"),
        (lookup("a b"), "FIELD_INVALID", "tools[0].name"),
        (lookup(""), "FIELD_INVALID", "tools[0].name"),
        (lookup("lookup" * 9), "FIELD_INVALID", "tools[0].name"),
        (chat_pb2.Tool(name="lookup", description="x" * 20_000), "FIELD_INVALID", "tools[0].description"),
        (lookup(schema={"type": "array"}), "FIELD_INVALID", "tools[0].parameters_json_schema"),
        (lookup(schema={"type": "nonsense"}), "FIELD_INVALID", "tools[0].parameters_json_schema"),
        (lookup(schema=[]), "FIELD_INVALID", "tools[0].parameters_json_schema"),
        (lookup(schema={"properties": 3}), "FIELD_INVALID", "tools[0].parameters_json_schema"),
        (lookup(schema={"$ref": "https://example.com/x"}), "FIELD_INVALID", "tools[0].parameters_json_schema"),
        (lookup(schema={"$ref": "#/$defs/none"}), "FIELD_INVALID", "tools[0].parameters_json_schema"),
        (lookup(schema={"$ref": "#"}), "FIELD_INVALID", "tools[0].parameters_json_schema"),
        (
            lookup(schema={"properties": {"a": {"pattern": "(?=x)y"}}}),
            "FIELD_INVALID",
            "tools[0].parameters_json_schema",
        ),
        (lookup(schema={"patternProperties": {"a+": {}}}), "FIELD_INVALID", "tools[0].parameters_json_schema"),
        (
            chat_pb2.Tool(name="lookup", parameters_json_schema="{"),
            "FIELD_INVALID",
            "tools[0].parameters_json_schema",
        ),
    ],
)
async def test_an_offer_is_refused_for(start: Any, tool: chat_pb2.Tool, reason: str, field: str) -> None:
    """Names by pattern, reserved names, the operator's list; schemas by what they are; nothing is kept."""
    service = await start(host_tools=["look*", "*earch", "bash", "mcp_*", "penstock_*"])
    trainer = await service.trainer()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await register(service, trainer, tool)
    error = from_rpc_error(refused.value)
    assert isinstance(error, InvalidArgument)
    assert error.reason == reason
    assert [item.field for item in error.violations] == [field]
    rollout = await service.open()
    async with connected(url_of(service, rollout), rollout.token) as agent:
        assert (await agent.list_tools()).tools == []


@pytest.mark.requirement("R23", "R26")
async def test_session_offers_to_64_selectors_then_only_replaces_or_withdraws(service: Any) -> None:
    """Each selector is looked at whenever a rollout is opened, so a session does not heap them up."""
    trainer = await service.trainer()
    for number in range(64):
        await register(service, trainer, group_id=f"g{number}")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await register(service, trainer, group_id="one-more")
    assert from_rpc_error(refused.value).reason == "TOOL_OFFER_LIMIT"
    await register(service, trainer, lookup("other"), group_id="g7")
    withdrawn = pb.RegisterToolsRequest(session_id=trainer.session_id, selector=pb.CallSelector(group_id="g8"))
    await service.intercept.RegisterTools(withdrawn)
    await register(service, trainer, group_id="one-more")


@pytest.mark.requirement("R15")
async def test_tools_of_a_session_that_is_none_are_refused(service: Any) -> None:
    """Tools belong to a session."""
    request = pb.RegisterToolsRequest(session_id="nobody", tools=[lookup()])
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await service.intercept.RegisterTools(request)
    error = from_rpc_error(refused.value)
    assert isinstance(error, NotFound)
    assert error.reason == "SESSION_UNKNOWN"


@pytest.mark.requirement("R4", "R15")
async def test_tools_reach_only_matching_rollouts_opened_later(service: Any) -> None:
    """A rollout keeps what it was opened with; a tool of another selector does not exist for it."""
    trainer = await service.trainer()
    before = await service.open(group_id="g1")
    await register(service, trainer, lookup("lookup"), group_id="g1")
    await register(service, trainer, lookup("other"), group_id="g2")
    mine, others = await service.open(group_id="g1"), await service.open(group_id="g2")
    await register(service, trainer, lookup("replaced"), group_id="g1")
    later = await service.open(group_id="g1")
    names = []
    for rollout in (before, mine, others, later):
        async with connected(url_of(service, rollout), rollout.token) as agent:
            names.append([tool.name for tool in (await agent.list_tools()).tools])
    assert names == [[], ["lookup"], ["other"], ["replaced"]]
    status, told, _ = await post(url_of(service, mine), mine.token, tool_call("other", {"word": "a"}))
    assert status == 200
    assert told["error"]["message"] == "Unknown tool: other"
    answered = await service.gate.CheckSource(
        gate.CheckSourceRequest(
            mode=interception_pb2.MODE_INTERCEPTION_GATE,
            source=interception_pb2.ModelSource(tokenizer=interception_pb2.ModelSource.Tokenizer(name="tiny")),
            group_id="g2",
        )
    )
    assert list(answered.host_tools) == ["other"]


@pytest.mark.requirement("R69")
async def test_opened_rollout_lists_its_tools_and_their_address(service: Any) -> None:
    """Whoever configures an agent needs the names and the path, and gets the same when he asks again."""
    trainer = await service.trainer()
    await register(service, trainer)
    request = gate.OpenRolloutRequest(
        request_id="q",
        rollout_id="mine",
        mode=interception_pb2.MODE_INTERCEPTION_GATE,
        source=interception_pb2.ModelSource(tokenizer=interception_pb2.ModelSource.Tokenizer(name="tiny")),
    )
    for _ in range(2):
        opened = await service.gate.OpenRollout(request)
        assert list(opened.host_tools) == ["lookup"]
        assert opened.mcp_path == "/rollout/mine/mcp"


@pytest.mark.requirement("R30", "R31")
async def test_slow_tool_call_is_kept_alive_with_progress(start: Any) -> None:
    """An event stream from `first_byte_s` on, with progress for who asked for it, then the result."""
    service = await start(first_byte_s=0.0, keep_alive_s=0.01)
    trainer = await service.trainer()
    await register(service, trainer)
    rollout = await service.open()
    seen: list[float] = []
    twice = asyncio.Event()

    async def progress(progress: float, total: float | None, message: str | None) -> None:
        seen.append(progress)
        if len(seen) == 2:
            twice.set()

    async with connected(url_of(service, rollout), rollout.token) as agent:
        asking = asyncio.create_task(agent.call_tool("lookup", {"word": "a"}, progress_callback=progress))
        [call] = await tool_calls(trainer)
        await twice.wait()
        await answer(trainer, result(call, {"text": "done"}))
        assert text_of(await asking) == "done"
    assert seen == sorted(set(seen))


@pytest.mark.requirement("R30")
async def test_a_client_that_takes_no_stream_gets_json(start: Any) -> None:
    """However long it takes."""
    service = await start(first_byte_s=0.0, keep_alive_s=0.01)
    trainer = await service.trainer()
    await register(service, trainer)
    rollout = await service.open()
    message = tool_call("lookup", {"word": "a"})
    asking = asyncio.create_task(
        post(url_of(service, rollout), rollout.token, message, headers={"accept": "application/json"})
    )
    [call] = await tool_calls(trainer)
    await answer(trainer, result(call, {"text": "done"}))
    status, told, headers = await asking
    assert (status, headers["content-type"]) == (200, "application/json")
    assert text_of(told["result"]) == "done"


@pytest.mark.requirement("R34")
async def test_a_request_that_is_sent_again_joins_its_call(service: Any) -> None:
    """One id and body is one call, while it is under way; another id, or another MCP session, is another call."""
    trainer = await service.trainer()
    await register(service, trainer)
    rollout = await service.open()
    url, message = url_of(service, rollout), tool_call("lookup", {"word": "a"}, "x")
    session = {"mcp-session-id": "one"}
    twins = [asyncio.create_task(post(url, rollout.token, message, headers=session)) for _ in range(3)]
    other = asyncio.create_task(post(url, rollout.token, message, headers={"mcp-session-id": "two"}))
    calls = await tool_calls(trainer, 2)
    await answer(trainer, *(result(call, {"text": f"result {n}"}) for n, call in enumerate(calls)))
    told = [text_of((await asking)[1]["result"]) for asking in (*twins, other)]
    assert len(set(told[:3])) == 1
    assert set(told) == {"result 0", "result 1"}
    assert len((await service.capture(rollout.rollout_id)).host_tool_calls) == 2
    again = asyncio.create_task(post(url, rollout.token, message, headers=session))
    third = (await tool_calls(trainer, 3))[-1]
    await answer(trainer, result(third, {"text": "anew"}), count=2)
    assert text_of((await again)[1]["result"]) == "anew"


@pytest.mark.requirement("R34")
async def test_unread_result_is_there_for_the_next_request(service: Any) -> None:
    """The connection broke, the tool went on, the repeated request gets the result and runs nothing."""
    trainer = await service.trainer()
    await register(service, trainer)
    rollout = await service.open()
    url, message = url_of(service, rollout), tool_call("lookup", {"word": "a"})
    breaking = asyncio.create_task(post(url, rollout.token, message))
    [call] = await tool_calls(trainer)
    breaking.cancel()
    await asyncio.gather(breaking, return_exceptions=True)
    await answer(trainer, result(call, {"text": "late"}))
    status, told, _ = await post(url, rollout.token, message)
    assert (status, text_of(told["result"])) == (200, "late")
    assert len(trainer._of("tool_calls")) == 1


@pytest.mark.requirement("R32")
async def test_an_agent_that_cancels_is_not_waited_for(service: Any) -> None:
    """By MCP's own notification, by the end of its MCP session; the trainer is told, a result comes too late."""
    trainer = await service.trainer()
    await register(service, trainer)
    rollout = await service.open()
    url, session = url_of(service, rollout), {"mcp-session-id": "one"}
    first = asyncio.create_task(post(url, rollout.token, tool_call("lookup", {"word": "a"}, 7), headers=session))
    [call] = await tool_calls(trainer)
    for other in ("7", 8):  # not these
        await post(url, rollout.token, cancellation(other), headers=session)
    status, *_ = await post(url, rollout.token, cancellation(7), headers=session)
    assert status == 202
    cancelled = await trainer.frame("tool_calls_cancelled")
    assert (list(cancelled.tool_call_ids), cancelled.reason) == ([call.tool_call_id], "AGENT_CANCELLED")
    assert (await first)[1]["result"]["isError"]
    late = await answer(trainer, result(call, {"text": "late"}))
    assert [item.reason for item in late.rejected] == [pb.ResultRejected.REASON_UNKNOWN_CALL]
    second = asyncio.create_task(post(url, rollout.token, tool_call("lookup", {"word": "b"}, 9), headers=session))
    again = (await tool_calls(trainer, 2))[-1]
    headers = {"authorization": f"Bearer {rollout.token}", **session}
    async with aiohttp.ClientSession() as http, http.delete(url, headers=headers) as ended:
        assert ended.status == 204
    assert (await trainer.frame("tool_calls_cancelled", 2)).tool_call_ids == [again.tool_call_id]
    assert (await second)[1]["result"]["isError"]


def cancellation(number: int | str) -> dict[str, Any]:
    """The notification that cancels a request."""
    return {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": number}}


@pytest.mark.requirement("R23", "R32")
async def test_departed_agent_is_reported_to_the_trainer(start: Any) -> None:
    """Its connection broke, and no request joined the call in time."""
    service = await start(rejoin_grace_s=0.0)
    trainer = await service.trainer()
    await register(service, trainer)
    rollout = await service.open()
    asking = asyncio.create_task(post(url_of(service, rollout), rollout.token, tool_call("lookup", {"word": "a"})))
    [call] = await tool_calls(trainer)
    asking.cancel()
    cancelled = await trainer.frame("tool_calls_cancelled")
    assert (list(cancelled.tool_call_ids), cancelled.reason) == ([call.tool_call_id], "AGENT_GONE")
    [recorded] = (await service.capture(rollout.rollout_id)).host_tool_calls
    assert (recorded.state, recorded.end_reason) == (trajectory_pb2.CALL_STATE_CANCELLED, "AGENT_GONE")


@pytest.mark.requirement("R41")
async def test_a_call_that_takes_too_long_is_given_up(start: Any) -> None:
    """The agent reads it as an error of the tool, the trainer is told to stop."""
    service = await start(tool_timeout_s=0.05)
    trainer = await service.trainer()
    await register(service, trainer)
    rollout = await service.open()
    _, told, _ = await post(url_of(service, rollout), rollout.token, tool_call("lookup", {"word": "a"}))
    assert told["result"]["isError"]
    assert "timed out" in text_of(told["result"])
    assert (await trainer.frame("tool_calls_cancelled")).reason == "EXPIRED"


@pytest.mark.requirement("R24", "R36")
async def test_a_rollout_that_is_closed_has_no_tools_and_its_calls_end(service: Any) -> None:
    """The token is void, what was open is cancelled on both sides."""
    trainer = await service.trainer()
    await register(service, trainer)
    rollout = await service.open()
    url = url_of(service, rollout)
    asking = asyncio.create_task(post(url, rollout.token, tool_call("lookup", {"word": "a"})))
    [call] = await tool_calls(trainer)
    await service.close(rollout.rollout_id)
    assert (await asking)[1]["result"]["isError"]
    cancelled = await trainer.frame("tool_calls_cancelled")
    assert (list(cancelled.tool_call_ids), cancelled.reason) == ([call.tool_call_id], "ROLLOUT_CLOSED")
    status, *_ = await post(url, rollout.token, tool_call("lookup", {"word": "a"}))
    assert status == 401
    [recorded] = (await service.capture(rollout.rollout_id)).host_tool_calls
    assert recorded.end_reason == "ROLLOUT_CLOSED"
    broker = service.interceptor.tools
    assert not (broker._calls or broker._waiting or broker._rollouts or len(broker._deadlines))


@pytest.mark.requirement("R4", "R36", "R60")
@pytest.mark.parametrize("again", [False, True], ids=["closed", "id given again"])
@pytest.mark.parametrize(
    "message",
    [
        {"jsonrpc": "2.0", "id": 1, "method": "tools/list"},
        tool_call("lookup", {"word": "a"}),
        tool_call("lookup", {"word": 1}),
        {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}},
    ],
    ids=["list", "call", "refused call", "cancellation"],
)
async def test_mcp_request_whose_body_comes_after_the_close_is_refused(
    service: Any, message: dict[str, Any], again: bool
) -> None:
    """It sees and touches nothing of the next rollout of its id, whose tools are others; nor does its credential."""
    trainer = await service.trainer()
    await register(service, trainer)
    rollout = await service.open("r1")
    body = json.dumps(message).encode()
    host, _, port = service.ingress.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    asking = None
    try:
        head = f"POST /rollout/r1/mcp HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {rollout.token}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\nexpect: 100-continue\r\n\r\n"
        writer.write(head.encode())
        # Sent by the route's handler: the key is checked.
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body[:10])
        await service.close("r1")
        if again:
            await service.gate.DeleteRollout(gate.DeleteRolloutRequest(rollout_id="r1"))
            await register(service, trainer, lookup(), lookup("secret"))
            following = await service.open("r1", request_id="again")
            url = url_of(service, following)
            asking = asyncio.create_task(post(url, following.token, tool_call("lookup", {"word": "a"})))
            await tool_calls(trainer)
            status, told, _ = await post(url, rollout.token, {"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
            assert status == 401 and "secret" not in str(told)
        writer.write(body[10:])
        answered = await reader.readuntil(b"\r\n\r\n")
        assert answered.startswith(b"HTTP/1.1 401 "), answered
    finally:
        writer.close()
    if asking is not None:
        [call] = await tool_calls(trainer)
        await answer(trainer, result(call, {"text": "the new one's"}))
        assert text_of((await asking)[1]["result"]) == "the new one's"
    assert len((await service.capture("r1")).host_tool_calls) == (asking is not None)


@pytest.mark.requirement("R26", "R88")
async def test_budgets_bound_how_often_and_how_many_at_once(start: Any) -> None:
    """Refused in words for the model; model calls go on and the rollout is not marked."""
    service = await start(max_open_tool_calls=1)
    trainer = await service.trainer()
    await register(service, trainer)
    rollout = await service.open(budgets=interception_pb2.Budgets(max_tool_calls=2))
    url = url_of(service, rollout)
    for turn in range(2):
        asking = asyncio.create_task(post(url, rollout.token, tool_call("lookup", {"word": "a"}, turn)))
        call = (await tool_calls(trainer, turn + 1))[-1]
        _, busy, _ = await post(url, rollout.token, tool_call("lookup", {"word": "b"}, "busy"))
        assert busy["result"]["isError"]
        await answer(trainer, result(call, {"text": "ok"}), count=turn + 1)
        assert not (await asking)[1]["result"]["isError"]
    _, spent, _ = await post(url, rollout.token, tool_call("lookup", {"word": "c"}, "spent"))
    assert spent["result"]["isError"]
    assert "budget" in text_of(spent["result"])
    closed = await service.close(rollout.rollout_id)
    assert closed.exhausted_budget == ""


@pytest.mark.requirement("R13", "R26")
async def test_bodies_and_results_are_bounded(start: Any) -> None:
    """A body beyond the bound is refused unread; such a result is refused, and another may come."""
    service = await start(max_tool_bytes=2048)
    trainer = await service.trainer()
    await register(service, trainer)
    rollout = await service.open()
    url = url_of(service, rollout)
    status, told, _ = await post(url, rollout.token, tool_call("lookup", {"word": "a" * 50_000}))
    assert (status, told["error"]["code"]) == (413, -32600)
    asking = asyncio.create_task(post(url, rollout.token, tool_call("lookup", {"word": "a"})))
    [call] = await tool_calls(trainer)
    large = await answer(trainer, result(call, {"text": "x" * 4096}))
    assert [item.reason for item in large.rejected] == [pb.ResultRejected.REASON_INVALID]
    infinite = await answer(trainer, result(call, {"n": float("nan")}), count=2)
    assert [item.reason for item in infinite.rejected] == [pb.ResultRejected.REASON_INVALID]
    good = await answer(trainer, result(call, {"text": "small"}), count=3)
    assert list(good.accepted_tool_call_ids) == [call.tool_call_id]
    same = await answer(trainer, result(call, {"text": "small"}), count=4)
    assert list(same.accepted_tool_call_ids) == [call.tool_call_id]
    other = await answer(trainer, result(call, {"text": "other"}), count=5)
    assert [item.reason for item in other.rejected] == [pb.ResultRejected.REASON_ALREADY_DELIVERED]
    assert text_of((await asking)[1]["result"]) == "small"


@pytest.mark.requirement("R22")
async def test_departed_trainer_fails_its_tool_calls_with_a_readable_reason(service: Any) -> None:
    """With Goodbye at once; a tool may have had its effect, so nobody else is asked to run it."""
    trainer, other = await service.trainer(), await service.trainer()
    for one in (trainer, other):
        await register(service, one)
    rollout = await service.open()
    url = url_of(service, rollout)
    asking = asyncio.create_task(post(url, rollout.token, tool_call("lookup", {"word": "a"})))
    held = [one for one in (trainer, other) if await has_call(one, trainer, other)]
    [holder] = held
    await holder.goodbye()
    _, told, _ = await asking
    assert told["result"]["isError"]
    assert "no longer available" in text_of(told["result"])
    survivor = other if holder is trainer else trainer
    asking = asyncio.create_task(post(url, rollout.token, tool_call("lookup", {"word": "a"}, 2)))
    [call] = await tool_calls(survivor)
    await answer(survivor, result(call, {"text": "still here"}))
    assert text_of((await asking)[1]["result"]) == "still here"


async def has_call(one: Any, *sessions: Any) -> bool:
    """Whether it is this session that got the call, once one of them has."""
    waiting = [asyncio.create_task(session.frame("tool_calls")) for session in sessions]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    return bool(one._of("tool_calls"))


@pytest.mark.requirement("R22", "R32")
async def test_tool_call_waits_for_the_resume_window_then_fails(start: Any) -> None:
    """Nobody serves the tool any more."""
    service = await start(resume_window_s=0.0)
    trainer = await service.trainer()
    await register(service, trainer)
    rollout = await service.open()
    await trainer.goodbye()
    _, told, _ = await post(url_of(service, rollout), rollout.token, tool_call("lookup", {"word": "a"}))
    assert told["result"]["isError"]
    assert "no longer available" in text_of(told["result"])


@pytest.mark.requirement("R22")
async def test_new_session_with_the_same_tools_serves_their_rollouts(service: Any) -> None:
    """Another session, an equal definition; a call that waited goes to it, another definition serves nobody."""
    trainer = await service.trainer()
    await register(service, trainer)
    rollout = await service.open()
    await trainer.goodbye()
    asking = asyncio.create_task(post(url_of(service, rollout), rollout.token, tool_call("lookup", {"word": "a"})))
    different = await service.trainer()
    await register(service, different, lookup(schema={"type": "object"}))
    anew = await service.trainer()
    await register(service, anew)
    [call] = await tool_calls(anew)
    await answer(anew, result(call, {"text": "back"}))
    assert text_of((await asking)[1]["result"]) == "back"
    assert not different._of("tool_calls")


@pytest.mark.requirement("R22")
async def test_a_resumed_session_has_its_tools_and_gets_its_open_calls_again(service: Any) -> None:
    """R22, decision 7: under the same ids, by which the trainer knows what it runs already."""
    lost = await service.trainer()
    await register(service, lost)
    rollout = await service.open()
    url = url_of(service, rollout)
    asking = asyncio.create_task(post(url, rollout.token, tool_call("lookup", {"word": "a"})))
    [call] = await tool_calls(lost)
    lost.cut()
    await lost.over.wait()
    meanwhile = asyncio.create_task(post(url, rollout.token, tool_call("lookup", {"word": "b"}, 2)))
    back = await service.trainer(resume_session_id=lost.session_id)
    assert back.frames[0].welcome.resumed
    calls = await tool_calls(back, 2)
    assert call.tool_call_id in [item.tool_call_id for item in calls]
    await answer(back, *(result(item, {"text": item.arguments["word"]}) for item in calls))
    assert [text_of((await task)[1]["result"]) for task in (asking, meanwhile)] == ["a", "b"]
    later = await service.open()
    async with connected(url_of(service, later), later.token) as agent:
        assert [tool.name for tool in (await agent.list_tools()).tools] == ["lookup"]


@pytest.mark.requirement("R33")
async def test_invalid_mcp_request_gets_its_error(service: Any) -> None:
    """As the transport and JSON-RPC have it, whatever was sent."""
    rollout = await service.open()
    url = url_of(service, rollout)
    ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    for message, headers, status, code in (
        (ping, {}, 200, None),
        (ping, {"content-type": "text/plain"}, 415, -32600),
        (ping, {"origin": "https://evil.example"}, 403, -32600),
        (ping, {"origin": "http://localhost:4000"}, 200, None),
        (ping, {"mcp-session-id": "x" * 200}, 400, -32600),
        ([ping], {}, 400, -32600),
        ({"id": 1, "method": "ping"}, {}, 400, -32600),
        ({**ping, "id": None}, {}, 400, -32600),
        ({**ping, "id": True}, {}, 400, -32600),
        ({**ping, "params": []}, {}, 400, -32602),
        ({**ping, "method": 3}, {}, 400, -32600),
        ({**ping, "method": "resources/list"}, {}, 200, -32601),
        (tool_call("lookup", []), {}, 200, -32602),
        ({**ping, "method": "tools/call"}, {}, 200, -32602),
        ({"jsonrpc": "2.0", "method": "notifications/initialized"}, {}, 202, None),
        ({"jsonrpc": "2.0", "id": 4, "result": {}}, {}, 202, None),
        (b"{", {}, 400, -32700),
        (b"[" * 5000, {}, 400, -32700),
        (b"", {}, 400, -32700),
        (ping, {"origin": "http://["}, 403, -32600),
        ({**ping, "id": "x\x00"}, {}, 200, None),
        ({**ping, "id": 2**64}, {}, 400, -32600),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "ping", "method": "tools/list"}', {}, 400, -32600),
        (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{"a":1,"b":{"c":1,"\\u0063":2}}}', {}, 400, -32600),
        (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{"a":' + b"[" * 400 + b"]" * 400 + b"}}", {}, 400, -32600),
        (b'{"jsonrpc":"2.0","id":"\\ud800","method":"ping"}', {}, 400, -32700),
    ):
        seen, told, _ = await post(url, rollout.token, message, headers=headers)
        assert seen == status, (message, told)
        assert (told or {}).get("error", {}).get("code") == code, (message, told)
    async with aiohttp.ClientSession() as http:
        for method in ("GET", "PUT", "OPTIONS"):
            given = {**HEADERS, "authorization": f"Bearer {rollout.token}"}
            async with http.request(method, url, headers=given) as answered:
                assert (answered.status, answered.headers["allow"]) == (405, "POST, DELETE")


@pytest.mark.requirement("R33")
@pytest.mark.parametrize(
    ("asked", "agreed"),
    [("2025-03-26", "2025-03-26"), ("2025-06-18", "2025-06-18"), ("2024-11-05", "2025-11-25"), (7, "2025-11-25")],
)
async def test_the_handshake_agrees_on_a_revision_that_both_may_speak(service: Any, asked: Any, agreed: str) -> None:
    """The client's if it is served here, else the newest, for the client to accept or leave."""
    rollout = await service.open()
    hello = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {"protocolVersion": asked}}
    status, told, headers = await post(url_of(service, rollout), rollout.token, hello)
    assert status == 200
    assert told["result"]["protocolVersion"] == agreed
    assert told["result"]["capabilities"] == {"tools": {"listChanged": False}}
    assert headers["mcp-session-id"]


@pytest.mark.requirement("R4", "R5", "R36")
async def test_only_the_rollouts_own_token_opens_its_tools(service: Any) -> None:
    """No token, another rollout's, a trainer's; and an unknown rollout look the same."""
    trainer = await service.trainer()
    await register(service, trainer)
    rollout, other = await service.open(), await service.open()
    call = tool_call("lookup", {"word": "a"})
    unknown = f"http://{service.ingress}/rollout/none/mcp"
    told = []
    for url, token in (
        (url_of(service, rollout), None),
        (url_of(service, rollout), ""),
        (url_of(service, rollout), other.token),
        (url_of(service, rollout), "trainer-token-1"),
        (unknown, rollout.token),
    ):
        status, body, headers = await post(url, token, call)
        told.append((status, str(body), headers["www-authenticate"]))
    assert set(told) == {(401, told[0][1], "Bearer")}
    assert not trainer._of("tool_calls")


@pytest.mark.requirement("R15")
async def test_a_transparent_rollout_has_tools_too(service: Any) -> None:
    """Whoever answers its model calls, a trainer or an environment may offer it tools."""
    async with vendor() as upstream:
        trainer = await service.trainer()
        await register(service, trainer)
        endpoint = interception_pb2.Upstream.CallerEndpoint(base_url=upstream.base_url)
        source = interception_pb2.ModelSource(upstream=interception_pb2.Upstream(caller=endpoint, model="m"))
        rollout = await service.open(mode=interception_pb2.MODE_TRANSPARENT_PROXY, source=source)
        asking = asyncio.create_task(post(url_of(service, rollout), rollout.token, tool_call("lookup", {"word": "a"})))
        [call] = await tool_calls(trainer)
        await answer(trainer, result(call, {"text": "ok"}))
        assert text_of((await asking)[1]["result"]) == "ok"


@pytest.mark.requirement("R4", "R13", "R15", "R145")
async def test_a_small_call_that_takes_much_checking_holds_up_nobody(service: Any) -> None:
    """What takes more than a few steps is checked in a thread, and given up in words."""
    branches = {"anyOf": [*[{"type": "integer"}] * 900, {"type": "array"}]}
    wide = {"type": "object", "properties": {"a": {"type": "array", "items": branches}}}
    trainer = await service.trainer()
    await register(service, trainer, lookup(schema=wide))
    rollout = await service.open()
    async with connected(url_of(service, rollout), rollout.token) as agent:
        arguments: list[list[Any]] = [[None], [[]] * 300]
        few, many = [await agent.call_tool("lookup", {"a": items}) for items in arguments]
        assert "$.a[0]: None is not valid under any" in text_of(few)
        assert "the arguments are too complex to check" in text_of(many)
        assert few.is_error and many.is_error
        asking = asyncio.create_task(agent.call_tool("lookup", {"a": [1]}))
        [call] = await tool_calls(trainer)
        await answer(trainer, result(call, {"text": "ok"}))
        assert text_of(await asking) == "ok"
