"""The Anthropic SDK against the ingress, a trainer on the stream (R30, R33, R34, R36)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web
from tests.support.endpoints.loopback import serving
from tests.support.endpoints.sdks import imported_when_used
from tests.support.waiting import eventually

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock.interception.v1 import interception_pb2
from penstock.trajectory.v1 import trajectory_pb2

if TYPE_CHECKING:
    import anthropic
else:
    anthropic = imported_when_used("anthropic")

ASK: Any = [{"role": "user", "content": "list the files"}]
BASH: Any = {"name": "bash", "description": "Run.", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "bash",  "arguments": {"command": "ls", "n": 1.0}}\n</tool_call>'
THOUGHT = "<think>\nFirst a look.\n</think>\n\nI look."
TEXT = {"type": "text", "text": "go on"}
IMAGE = {"type": "url", "url": "http://x/a.png"}
VERSION = {"anthropic-version": "2023-06-01"}


def client(rollout: Any, **options: Any) -> anthropic.AsyncAnthropic:
    """The real SDK, pointed at the ingress."""
    options.setdefault("max_retries", 0)
    return anthropic.AsyncAnthropic(base_url=root(rollout), api_key=rollout.token, **options)


def root(rollout: Any) -> str:
    """The base URL of this dialect."""
    return str(rollout.base_url).removesuffix("/v1")


def asking(rollout: Any, messages: Any = ASK, **options: Any) -> asyncio.Task[Any]:
    retries = options.pop("max_retries", 0)
    options = {"model": "m", "max_tokens": 100, **options}
    return asyncio.create_task(client(rollout, max_retries=retries).messages.create(messages=messages, **options))


async def streamed(rollout: Any, **options: Any) -> anthropic.types.Message:
    """The message that the SDK puts together from a stream."""
    options = {"model": "m", "max_tokens": 100, "messages": ASK, **options}
    async with client(rollout).messages.stream(**options) as stream:
        return await stream.get_final_message()


async def asked(rollout: Any, *, stream: bool, **options: Any) -> Any:
    """One call, either way, as a message."""
    return await (streamed(rollout, **options) if stream else asking(rollout, **options))


@pytest.mark.requirement("R30", "R82")
@pytest.mark.parametrize("stream", [False, True])
async def test_call_waits_at_the_gate_and_the_sdk_gets_the_trainers_answer(service: Any, stream: bool) -> None:
    """Text, ids, usage and stop reason, streamed or not; the ids delivered are the ids captured."""
    rollout, trainer = await service.open(), await service.trainer()
    task = asyncio.create_task(asked(rollout, stream=stream, system=[{"type": "text", "text": "You are terse."}]))
    call = await trainer.answer("hello there")
    answer = await task
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "hello there"}]
    assert (answer.role, answer.model, answer.stop_reason, answer.stop_sequence) == ("assistant", "m", "end_turn", None)
    assert answer.id == f"msg_{call.call_id}"
    assert answer.usage.input_tokens == call.prompt_count
    await service.close(rollout.rollout_id)
    captured = await service.capture(rollout.rollout_id)
    assert captured.grade == trajectory_pb2.GRADE_EXACT
    assert captured.calls[0].dialect == trajectory_pb2.DIALECT_MESSAGES
    assert captured.samples[0].count == call.prompt_count + answer.usage.output_tokens


@pytest.mark.requirement("R30", "R82", "R85")
@pytest.mark.parametrize("stream", [False, True])
async def test_parallel_tools_and_reasoning_come_back_and_the_next_prompt_is_exact(service: Any, stream: bool) -> None:
    """Thinking with a signature, two tool_use blocks; echoed, their results out of order."""
    rollout, trainer = await service.open(), await service.trainer()
    task = asyncio.create_task(asked(rollout, stream=stream, tools=[BASH]))
    text = THOUGHT + "\n" + CALL + "\n" + CALL.replace("ls", "pwd")
    one = await trainer.answer(text)
    answer = await task
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (answer.content[0].thinking, bool(answer.content[0].signature)) == ("First a look.", True)
    assert [block.input for block in answer.content[2:]] == [{"command": "ls", "n": 1}, {"command": "pwd", "n": 1}]
    assert answer.stop_reason == "tool_use"
    ids = [block.id for block in answer.content[2:]]
    assert len(set(ids)) == 2
    results = [
        {"type": "tool_result", "tool_use_id": ids[1], "content": [{"type": "text", "text": "/tmp"}]},
        {"type": "tool_result", "tool_use_id": ids[0], "content": "no such file", "is_error": True},
    ]
    history = [*ASK, answer.to_param(), {"role": "user", "content": results}]
    task = asyncio.create_task(asked(rollout, stream=stream, tools=[BASH], messages=history))
    two = await trainer.answer("done")
    assert (await task).content[0].text == "done"
    before = one.prompt_token_ids + trainer.completion(text).span.token_ids
    assert two.prompt_token_ids.startswith(before)
    assert two.parent_call_id == one.call_id
    appended = [
        int.from_bytes(two.prompt_token_ids[i : i + 4], "little")
        for i in range(len(before), len(two.prompt_token_ids), 4)
    ]
    shown = service.codec.decode(appended)
    assert shown.index("no such file") < shown.index("/tmp")


@pytest.mark.requirement("R30")
async def test_stream_opens_at_once_stays_alive_and_orders_its_events(start: Any) -> None:
    """Message_start before the answer is known, pings meanwhile, then blocks, delta with usage, stop."""
    service = await start(first_byte_s=0.0, keep_alive_s=0.05)
    rollout, trainer = await service.open(), await service.trainer()
    stream = await asking(rollout, stream=True, tools=[BASH])
    call = await trainer.call()
    first = await anext(aiter(stream))
    assert (first.type, first.message.content, first.message.stop_reason) == ("message_start", [], None)
    await trainer.deliver(trainer.result(call, "I look." + CALL))
    events = [event async for event in stream]
    assert [event.type for event in events] == [
        *["content_block_start", "content_block_delta", "content_block_stop"] * 2,
        "message_delta",
        "message_stop",
    ]
    assert [event.index for event in events[:6]] == [0, 0, 0, 1, 1, 1]
    assert events[-2].delta.stop_reason == "tool_use"
    assert events[-2].usage.input_tokens == call.prompt_count


@pytest.mark.requirement("R30")
async def test_pings_are_sent_from_the_first_moment_until_the_answer(start: Any, http: aiohttp.ClientSession) -> None:
    """What goes over the wire while nobody has answered."""
    service = await start(first_byte_s=0.0, keep_alive_s=0.01)
    rollout, trainer = await service.open(), await service.trainer()
    body = {"model": "m", "max_tokens": 9, "messages": ASK, "stream": True}
    headers = {"x-api-key": rollout.token, **VERSION}
    async with http.post(root(rollout) + "/v1/messages?beta=true", json=body, headers=headers) as answer:
        lines = [await answer.content.readline() for _ in range(9)]
        assert answer.content_type == "text/event-stream"
        await trainer.answer("ok")
        await answer.read()
    assert lines[0] == b"event: message_start\n"
    assert lines[3:9] == [b"event: ping\n", b'data: {"type":"ping"}\n', b"\n"] * 2


@pytest.mark.requirement("R30")
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_reasons_are_those_of_the_dialect(service: Any, stream: bool) -> None:
    """A limit is max_tokens, a matched stop sequence is named, an empty answer has no blocks."""
    rollout, trainer = await service.open(), await service.trainer()

    async def one(text: str, question: str, **change: Any) -> Any:
        options = {"messages": [{"role": "user", "content": question}], "stop_sequences": ["END"]}
        task = asyncio.create_task(asked(rollout, stream=stream, **options))
        call = await trainer.call()
        result = trainer.result(call, text, **change.pop("result", {}))
        for name, value in change.items():
            setattr(result.completion, name, value)
        await trainer.deliver(result)
        return await task

    cut = await one("much", "a", result={"finish": chat_pb2.FINISH_REASON_LENGTH})
    assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "much")
    stopped = await one("so END", "b", stop_text="END")
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "END")
    refused = await one("no", "c", result={"finish": chat_pb2.FINISH_REASON_CONTENT_FILTER})
    assert refused.stop_reason == "refusal"
    assert (await one("", "d")).content == []


@pytest.mark.requirement("R63")
async def test_reasoning_is_hidden_from_a_client_that_wants_to_see_none(service: Any) -> None:
    """Display omitted; the tokens stay exact."""
    rollout, trainer = await service.open(), await service.trainer()
    thinking: Any = {"type": "adaptive", "display": "omitted"}
    task = asking(rollout, thinking=thinking)
    one = await trainer.answer(THOUGHT)
    answer = await task
    assert (answer.content[0].thinking, answer.content[1].text) == ("", "I look.")
    task = asking(rollout, [*ASK, answer.to_param(), {"role": "user", "content": "go on"}], thinking=thinking)
    two = await trainer.answer("ok")
    await task
    assert two.prompt_token_ids.startswith(one.prompt_token_ids + trainer.completion(THOUGHT).span.token_ids)


@pytest.mark.requirement("R21", "R30")
async def test_a_message_that_a_trainer_wrote_is_shown_whatever_its_arguments_are(service: Any) -> None:
    """Arguments that are no object still reach the SDK as one."""
    rollout, trainer = await service.open(), await service.trainer()
    task = asking(rollout, tools=[BASH])
    call = await trainer.call()
    part = chat_pb2.Part(tool_call=chat_pb2.ToolCall(id="t1", name="bash", arguments_json="[1"))
    message = chat_pb2.Message(role=chat_pb2.ROLE_ASSISTANT, parts=[part])
    completion = completion_pb2.Completion(message=message, finish_reason=chat_pb2.FINISH_REASON_TOOL_CALLS)
    await trainer.deliver(pb.CallResult(call_id=call.call_id, lease_id=call.lease_id, completion=completion))
    assert (await task).content[0].input == {"arguments": "[1"}


@pytest.mark.requirement("R82", "R88")
async def test_counting_tokens_counts_the_prompt_and_records_nothing(service: Any) -> None:
    """The count is that of the call that follows; it is no call itself."""
    rollout, trainer = await service.open(), await service.trainer()
    counted = await client(rollout).messages.count_tokens(
        model="m", messages=ASK, tools=[BASH], system="You are terse."
    )
    task = asking(rollout, tools=[BASH], system="You are terse.")
    call = await trainer.answer("ok")
    await task
    assert counted.input_tokens == call.prompt_count
    begun = [*ASK, {"role": "assistant", "content": "It is"}]
    assert (await client(rollout).messages.count_tokens(model="m", messages=begun)).input_tokens > 0
    assert len((await service.capture(rollout.rollout_id)).calls) == 1


@pytest.mark.requirement("R36")
async def test_only_model_is_listed_in_the_callers_dialect(service: Any, http: aiohttp.ClientSession) -> None:
    """The same path for two SDKs, told apart by anthropic-version."""
    rollout = await service.open(model_name="policy")
    models = [model async for model in await client(rollout).models.list()]
    assert [(model.id, model.type) for model in models] == [("policy", "model")]
    assert (await client(rollout).models.retrieve("policy")).display_name == "policy"
    with pytest.raises(anthropic.NotFoundError):
        await client(rollout).models.retrieve("other")
    assert [model.id async for model in rollout.client().models.list()] == ["policy"]


@pytest.mark.requirement("R4", "R5")
async def test_a_wrong_token_and_an_unknown_rollout_look_the_same(service: Any) -> None:
    """Authentication_error for both, with the same body."""
    one, two = await service.open(), await service.open()
    bodies = []
    for url, token in ((root(one), two.token), (root(one).replace("rollout-1", "nobody"), one.token)):
        with pytest.raises(anthropic.AuthenticationError) as caught:
            sdk = anthropic.AsyncAnthropic(base_url=url, api_key=token, max_retries=0)
            await sdk.messages.create(model="m", max_tokens=1, messages=ASK)
        assert caught.value.type == "authentication_error"
        bodies.append(caught.value.response.content)
    assert bodies[0] == bodies[1]


@pytest.mark.requirement("R33", "R36")
async def test_a_bad_body_is_an_invalid_request_that_names_the_field(service: Any) -> None:
    """400 with the path, a prefill and a PDF included; no retry."""
    rollout = await service.open()
    pdf: Any = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}
    for messages, path in (
        ([{"role": "user", "content": [pdf]}], "messages[0].content[0].source"),
        ([*ASK, {"role": "assistant", "content": "It"}], "messages[1]"),
    ):
        with pytest.raises(anthropic.BadRequestError) as caught:
            await asking(rollout, messages, max_retries=3)
        assert caught.value.type == "invalid_request_error"
        assert caught.value.api_message is not None and caught.value.api_message.startswith(path)
    image: Any = {"type": "image", "source": {"type": "url", "url": "http://x/a.png"}}
    with pytest.raises(anthropic.BadRequestError) as caught:
        await asking(rollout, [{"role": "user", "content": [image]}])
    assert caught.value.error_code == "image_unsupported"


@pytest.mark.requirement("R35", "R88")
async def test_used_up_budget_is_a_402_that_no_sdk_repeats(service: Any) -> None:
    """Billing_error with its code."""
    rollout = await service.open(budgets=interception_pb2.Budgets(max_calls=1))
    trainer = await service.trainer()
    task = asking(rollout)
    await trainer.answer("ok")
    await task
    with pytest.raises(anthropic.PaymentRequiredError) as caught:
        await asking(rollout, [{"role": "user", "content": "more"}], max_retries=3)
    assert (caught.value.type, caught.value.error_code) == ("billing_error", "budget_exhausted")


@pytest.mark.requirement("R13", "R26")
async def test_too_much_at_once_is_429_and_too_large_is_413(start: Any) -> None:
    """Back-pressure and the body cap, in the dialect's words."""
    service = await start(max_open_calls=1, max_body_bytes=4096)
    rollout, trainer = await service.open(), await service.trainer()
    task = asking(rollout)
    call = await trainer.call()
    with pytest.raises(anthropic.RateLimitError) as limited:
        await asking(rollout, [{"role": "user", "content": "other"}])
    assert (limited.value.type, limited.value.response.headers["retry-after"]) == ("rate_limit_error", "1")
    with pytest.raises(anthropic.APIStatusError) as large:
        await asking(rollout, [{"role": "user", "content": "x" * 8192}])
    assert (large.value.status_code, large.value.type) == (413, "request_too_large")
    await trainer.deliver(trainer.result(call, "ok"))
    await task


@pytest.mark.requirement("R34")
async def test_transient_failure_is_repeated_by_the_sdk_as_a_new_call(service: Any) -> None:
    """503 overloaded_error with x-should-retry; the retry is generated."""
    rollout, trainer = await service.open(), await service.trainer()
    failure = pb.CallFailure(reason="NO", retriable=True)
    task = asking(rollout, max_retries=1)
    call = await trainer.call()
    await trainer.deliver(pb.CallResult(call_id=call.call_id, lease_id=call.lease_id, failure=failure))
    again = await trainer.answer("second try")
    assert again.call_id != call.call_id
    assert (await task).content[0].text == "second try"
    task = asking(rollout, [{"role": "user", "content": "other"}])
    call = await trainer.call()
    await trainer.deliver(pb.CallResult(call_id=call.call_id, lease_id=call.lease_id, failure=failure))
    with pytest.raises(anthropic.APIStatusError) as caught:
        await task
    assert (caught.value.status_code, caught.value.type) == (503, "overloaded_error")
    assert caught.value.response.headers["x-should-retry"] == "true"


@pytest.mark.requirement("R30")
async def test_a_failure_after_the_stream_began_is_an_error_event(start: Any) -> None:
    """The SDK raises what the late event says; nothing follows it."""
    service = await start(first_byte_s=0.0)
    rollout, trainer = await service.open(), await service.trainer()
    task = asking(rollout, stream=True)
    call = await trainer.call()
    stream = await task
    failure = pb.CallFailure(reason="NO", retriable=True)
    await trainer.deliver(pb.CallResult(call_id=call.call_id, lease_id=call.lease_id, failure=failure))
    with pytest.raises(anthropic.APIStatusError) as caught:
        [event async for event in stream]
    assert (caught.value.type, caught.value.error_code) == ("overloaded_error", "model_unavailable")


@pytest.mark.requirement("R34")
async def test_a_client_that_went_away_finds_its_call_when_it_asks_again(
    service: Any, http: aiohttp.ClientSession
) -> None:
    """One generation for both attempts, the second one answered from the first one's call."""
    rollout, trainer = await service.open(), await service.trainer()
    task = asking(rollout)
    call = await trainer.call()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    held = service.interceptor.registry.call(call.call_id)
    await eventually(lambda: not held.attached, "the connection is gone")
    again = asking(rollout)
    await eventually(lambda: bool(held.attached), "the second attempt has joined")
    await trainer.deliver(trainer.result(call, "once"))
    assert (await again).content[0].text == "once"
    captured = await service.capture(rollout.rollout_id)
    assert [(one.call_id, one.http_attempts) for one in captured.calls] == [(call.call_id, 2)]


@pytest.mark.requirement("R34")
async def test_a_retry_that_says_so_joins_the_call_that_waits(service: Any, http: aiohttp.ClientSession) -> None:
    """X-stainless-retry-count; both connections get the one answer."""
    rollout, trainer = await service.open(), await service.trainer()
    body = {"model": "m", "max_tokens": 9, "messages": ASK}
    headers = {"x-api-key": rollout.token, **VERSION}
    url = root(rollout) + "/v1/messages"

    async def post(attempt: int) -> Any:
        async with http.post(url, json=body, headers={**headers, "x-stainless-retry-count": str(attempt)}) as answer:
            return await answer.json()

    first = asyncio.create_task(post(0))
    call = await trainer.call()
    second = asyncio.create_task(post(1))
    held = service.interceptor.registry.call(call.call_id)
    await eventually(lambda: held.attached == 2, "the retry has joined")
    await trainer.deliver(trainer.result(call, "once"))
    assert (await first) == (await second)


@pytest.mark.requirement("R36")
@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("GET", "/v1/messages/batches", 404, "not_found_error"),
    ],
)
async def test_unknown_route_is_refused_in_the_dialect(
    service: Any, http: aiohttp.ClientSession, method: str, path: str, status: int, kind: str
) -> None:
    """JSON in the dialect's shape."""
    rollout = await service.open()
    headers = {"x-api-key": rollout.token, **VERSION}
    async with http.request(method, root(rollout) + path, headers=headers) as answer:
        body = await answer.json()
    assert (answer.status, body["type"], body["error"]["type"]) == (status, "error", kind)


@pytest.mark.requirement("R11", "R88")
async def test_black_box_sends_the_key_in_the_dialects_header_and_skips_counting(service: Any) -> None:
    """Bearer, and x-api-key for who sent one, are the endpoint's; count_tokens passes and is no call."""
    seen: list[tuple[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.path, request.headers))
        return web.json_response({"input_tokens": 3})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with serving(app) as url:
        endpoint = interception_pb2.Upstream.CallerEndpoint(base_url=f"{url}/v1", api_key="endpoints-key")
        source = interception_pb2.ModelSource(upstream=interception_pb2.Upstream(caller=endpoint))
        rollout = await service.open(mode=interception_pb2.MODE_BLACK_BOX, source=source)
        seen.clear()  # the check at opening
        await client(rollout).messages.count_tokens(model="m", messages=ASK)
        both = client(rollout, default_headers={"x-api-key": rollout.token})  # as Claude Code sends it
        await both.messages.with_raw_response.create(model="m", max_tokens=1, messages=ASK)
    assert [path for path, _ in seen] == ["/v1/messages/count_tokens", "/v1/messages"]
    assert [headers["Authorization"] for _, headers in seen] == ["Bearer endpoints-key"] * 2
    assert [headers.get("x-api-key") for _, headers in seen] == [None, "endpoints-key"]
    assert rollout.token not in str(seen)
    captured = await service.capture(rollout.rollout_id)
    assert [call.dialect for call in captured.calls] == [trajectory_pb2.DIALECT_MESSAGES]


@pytest.mark.requirement("R63", "R86")
async def test_an_upstream_of_another_dialect_is_asked_in_its_own(service: Any) -> None:
    """Behind a Chat Completions endpoint the request is written anew; the answer is the agent's dialect."""
    bodies: list[dict[str, Any]] = []

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": []})

    async def answer(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        function = {"name": "bash", "arguments": '{"command": "pwd"}'}
        message = {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        }
        usage = {"prompt_tokens": 5, "completion_tokens": 2}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        return web.json_response({"model": "real", "choices": [choice], "usage": usage})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", answer)
    async with serving(app) as url:
        endpoint = interception_pb2.Upstream.CallerEndpoint(base_url=f"{url}/v1")
        source = interception_pb2.ModelSource(upstream=interception_pb2.Upstream(caller=endpoint, model="real"))
        rollout = await service.open(mode=interception_pb2.MODE_TRANSPARENT_PROXY, source=source)
        history = [
            {"role": "user", "content": [{"type": "text", "text": "list"}, {"type": "image", "source": IMAGE}]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t1", "name": "bash", "input": {"command": "ls"}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "a"}, TEXT]},
        ]
        options = {"system": "rules", "tools": [BASH], "tool_choice": {"type": "any"}, "stop_sequences": ["END"]}
        for stream in (False, True):
            said = await asked(rollout, stream=stream, messages=history, **options)
            assert [block.type for block in said.content] == ["thinking", "text", "tool_use"]
            assert (said.content[2].input, said.stop_reason) == ({"command": "pwd"}, "tool_use")
    call = {"id": "t1", "type": "function", "function": {"name": "bash", "arguments": '{"command":"ls"}'}}
    image = {"type": "image_url", "image_url": {"url": IMAGE["url"]}}
    function = {"name": "bash", "description": "Run.", "parameters": BASH["input_schema"]}
    assert bodies[0] == bodies[1]
    assert bodies[0] == {
        "model": "real",
        "messages": [
            {"role": "system", "content": "rules"},
            {"role": "user", "content": [{"type": "text", "text": "list"}, image]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "t1", "content": "a"},
            {"role": "user", "content": "go on"},
        ],
        "max_tokens": 100,
        "stop": ["END"],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
    }
