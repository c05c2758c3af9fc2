"""The OpenAI SDK's Responses against the ingress, a trainer on the stream; bodies as Codex writes them."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import openai
import orjson
import pytest
from google.protobuf.duration_pb2 import Duration
from tests.support.waiting import limits

from penstock.chat.v1 import chat_pb2
from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock.interception.v1 import interception_pb2
from penstock.trajectory.v1 import trajectory_pb2

ASK: Any = "list the files"
BASH: Any = {"type": "function", "name": "bash", "parameters": {"type": "object", "properties": {}}, "strict": False}
PATCH: Any = {"type": "custom", "name": "apply_patch", "description": "Changes files."}
NOTES: Any = {
    "type": "namespace",
    "name": "mcp__notes",
    "description": "",
    "tools": [{"type": "function", "name": "read", "parameters": {}}],
}
SHELL: Any = {"type": "local_shell"}


def calling(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{orjson.dumps({'name': name, 'arguments': arguments}).decode()}\n</tool_call>"


TWO = "<think>\nwhich files?\n</think>\n\nI look." + calling("bash", command="ls") + calling("bash", command="pwd")


def asking(rollout: Any, **options: Any) -> asyncio.Task[Any]:
    options.setdefault("input", ASK)
    return asyncio.create_task(rollout.client().responses.create(model="m", **options))


async def events_of(task: asyncio.Task[Any]) -> list[Any]:
    return [event async for event in await task]


@pytest.mark.requirement("R30", "R82")
async def test_the_sdk_gets_what_the_trainer_delivered_and_the_ids_are_captured(service: Any) -> None:
    """A whole answer with its text, status and usage; the ids that were delivered are captured."""
    rollout, trainer = await service.open(), await service.trainer()
    asked = asking(rollout, max_output_tokens=50, temperature=0.5)
    call = await trainer.answer("hello there")
    answer = await asked
    assert (answer.output_text, answer.status, answer.model, answer.store) == ("hello there", "completed", "m", False)
    assert answer.id == f"resp_{call.call_id}" and answer.output[0].id == f"msg_{call.call_id}"
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens) == (call.prompt_count, 0)
    assert answer.usage.total_tokens == call.prompt_count + answer.usage.output_tokens
    assert (call.sampling.max_tokens, call.sampling.temperature) == (50, 0.5)
    captured = await _closed(service, rollout)
    assert captured.grade == trajectory_pb2.GRADE_EXACT
    assert captured.calls[0].dialect == trajectory_pb2.DIALECT_RESPONSES
    assert captured.calls[0].completion.span.token_ids == trainer.completion("hello there").span.token_ids


@pytest.mark.requirement("R82", "R85")
@pytest.mark.parametrize("echo", ["whole", "sealed", "bare"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_second_turn_continues_the_exact_tokens_of_the_first(service: Any, stream: bool, echo: str) -> None:
    """Reasoning, text and parallel calls echoed as the SDK has them, sealed, or without reasoning."""
    rollout, trainer = await service.open(), await service.trainer()
    options: dict[str, Any] = {
        "tools": [BASH],
        "reasoning": {"summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "store": False,
    }
    task = asking(rollout, stream=stream, **options)
    one = await trainer.answer(TWO)
    answer = (await events_of(task))[-1].response if stream else await task
    items = [item.model_dump(exclude_none=True) for item in answer.output]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
    assert items[0]["summary"][0]["text"] == items[0]["content"][0]["text"] == "which files?"
    if echo == "sealed":
        items[0] = {"type": "reasoning", "summary": [], "encrypted_content": items[0]["encrypted_content"]}
    elif echo == "bare":
        items = [{name: value for name, value in item.items() if name != "id"} for item in items[1:]]
    results = [_result(item["call_id"], "a.txt") for item in items if item["type"] == "function_call"]
    history = [{"role": "user", "content": ASK}, *items, *results]
    task = asking(rollout, input=history, stream=stream, **options)
    two = await trainer.answer("done")
    answer = (await events_of(task))[-1].response if stream else await task
    assert answer.output[0].content[0].text == "done"
    before = one.prompt_token_ids + trainer.completion(TWO).span.token_ids
    assert two.prompt_token_ids.startswith(before) and two.parent_call_id == one.call_id
    captured = await _closed(service, rollout)
    assert captured.grade == trajectory_pb2.GRADE_EXACT and len(captured.samples) == 1


@pytest.mark.requirement("R30")
async def test_a_stream_has_its_events_in_order_numbered_without_a_gap(start: Any) -> None:
    """Created, in progress (again, as a keep-alive), each item with its parts and deltas, completed."""
    service = await start(first_byte_s=0.0, keep_alive_s=0.01)
    rollout, trainer = await service.open(), await service.trainer()
    task = asking(rollout, tools=[BASH], stream=True, reasoning={"summary": "auto"})
    call = await trainer.call()
    stream = await task
    events = [await anext(stream) for _ in range(4)]
    await trainer.deliver(trainer.result(call, TWO))
    events += [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "in_progress", "in_progress"]
    text = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    call_events = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
    assert kinds[kinds.index("output_item.added") :] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        *text,
        "output_item.done",
        *[*call_events, "output_item.done"] * 2,
        "completed",
    ]
    assert events[0].response.status == "in_progress" and events[0].response.usage is None
    assert {event.response.id for event in events if hasattr(event, "response")} == {f"resp_{call.call_id}"}
    assert [e.delta for e in events if e.type == "response.output_text.delta"] == ["I look."]


@pytest.mark.requirement("R30")
async def test_the_sdks_own_accumulation_of_a_stream_is_the_whole_answer(service: Any) -> None:
    """`responses.stream` follows every event and ends with the response, tools of several kinds among them."""
    rollout, trainer = await service.open(), await service.trainer()
    reply = (
        calling("bash", command="ls")
        + calling("apply_patch", input="*** Begin Patch")
        + calling("mcp__notes__read", which="a")
        + calling("local_shell", command=["ls"], timeout_ms=5)
        + calling("apply_patch", patch="not the argument it has")
    )
    answering = asyncio.create_task(trainer.answer(reply))
    tools = [BASH, PATCH, NOTES, SHELL]
    async with rollout.client().responses.stream(model="m", input=ASK, tools=tools) as stream:
        seen = [event.type async for event in stream]
        final = await stream.get_final_response()
    await answering
    assert "response.custom_tool_call_input.delta" in seen
    plain, patch, note, shell, wrong = final.output
    assert (plain.type, plain.name, plain.arguments) == ("function_call", "bash", '{"command":"ls"}')
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "apply_patch", "*** Begin Patch")
    assert (note.type, note.namespace, note.name) == ("function_call", "mcp__notes", "read")
    assert (shell.type, shell.action.command, shell.action.timeout_ms) == ("local_shell_call", ["ls"], 5)
    assert (wrong.type, wrong.input) == ("custom_tool_call", '{"patch":"not the argument it has"}')
    outputs = [
        _result(plain.call_id, "a"),
        {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "ok"},
        _result(note.call_id, [{"type": "input_text", "text": "b"}]),
        {"type": "local_shell_call_output", "id": shell.call_id, "output": "c"},
        {"type": "custom_tool_call_output", "call_id": wrong.call_id, "output": "no patch"},
    ]
    items = [item.model_dump(exclude_none=True) for item in final.output]
    task = asking(rollout, input=[{"role": "user", "content": ASK}, *items, *outputs], tools=tools)
    call = await trainer.answer("done")
    await task
    assert call.shared_prefix_count > call.prompt_count // 2 and call.parent_call_id
    captured = await _closed(service, rollout)
    assert captured.grade == trajectory_pb2.GRADE_EXACT and len(captured.branches) == 1


@pytest.mark.requirement("R30")
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_was_cut_off_is_incomplete(service: Any, stream: bool) -> None:
    """LENGTH is status incomplete with its reason, as a whole and as the last event."""
    rollout, trainer = await service.open(), await service.trainer()
    task = asking(rollout, stream=stream)
    await trainer.answer("I will", finish=chat_pb2.FINISH_REASON_LENGTH)
    if stream:
        last = (await events_of(task))[-1]
        assert last.type == "response.incomplete"
        answer = last.response
    else:
        answer = await task
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.output[0].status, answer.output_text) == ("incomplete", "I will")


@pytest.mark.requirement("R82")
async def test_a_turn_that_goes_on_after_it_was_cut_off_is_exact(service: Any) -> None:
    """A client that asks again after half an answer has two turns in a row, which are not taken for one."""
    rollout, trainer = await service.open(), await service.trainer()
    task = asking(rollout)
    await trainer.answer("I will", finish=chat_pb2.FINISH_REASON_LENGTH)
    history = [{"role": "user", "content": ASK}, *[i.model_dump(exclude_none=True) for i in (await task).output]]
    task = asking(rollout, input=history, tools=[BASH])
    second = await trainer.answer(calling("bash", command="ls"))
    more = [i.model_dump(exclude_none=True) for i in (await task).output]
    history += [*more, _result(more[0]["call_id"], "a")]
    task = asking(rollout, input=history, tools=[BASH])
    third = await trainer.answer("done")
    await task
    assert third.parent_call_id == second.call_id


@pytest.mark.requirement("R33")
async def test_invalid_request_is_the_dialects_400(service: Any, http: aiohttp.ClientSession) -> None:
    """The field is named; a conversation that the template cannot take names the input."""
    rollout = await service.open()
    image = {"type": "input_image", "image_url": "https://example.com/a.png"}
    for options, param, code in (
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"input": [{"role": "user", "content": [image]}]}, "input", "image_unsupported"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await asking(rollout, **options)
        assert (caught.value.param, caught.value.code) == (param, code)
    headers = {"authorization": f"Bearer {rollout.token}"}
    async with http.post(f"{rollout.base_url}/responses", data=b"{", headers=headers) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (400, "invalid_json")


@pytest.mark.requirement("R4", "R13", "R26", "R88")
async def test_refusals_have_the_statuses_by_which_sdks_decide_to_try_again(start: Any) -> None:
    """401, 400 for a used-up budget, 413, 429 with its delay."""
    service = await start(max_body_bytes=4096, max_open_calls=1)
    rollout = await service.open(budgets=interception_pb2.Budgets(max_calls=1))
    stranger = openai.AsyncOpenAI(base_url=rollout.base_url, api_key="nobody", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        await stranger.responses.create(model="m", input=ASK)
    with pytest.raises(openai.APIStatusError) as large:
        await asking(rollout, input="x" * 5000)
    assert large.value.status_code == 413
    trainer = await service.trainer()
    task = asking(rollout)
    call = await trainer.call()
    with pytest.raises(openai.APIStatusError) as busy:
        await asking(rollout, input="another")
    await trainer.deliver(trainer.result(call, "ok"))
    await task
    with pytest.raises(openai.BadRequestError) as spent:
        await asking(rollout, input="another")
    assert (spent.value.code, spent.value.response.headers["x-should-retry"]) == ("budget_exhausted", "false")
    assert busy.value.status_code in (400, 429)
    other = await service.open()
    task = asking(other)
    call = await trainer.call()
    with pytest.raises(openai.RateLimitError) as later:
        await asking(other, input="another")
    assert later.value.response.headers["retry-after"] == "1"
    await trainer.deliver(trainer.result(call, "ok"))
    await task


@pytest.mark.requirement("R30")
@pytest.mark.parametrize(("retriable", "status"), [(True, 503), (False, 400)])
async def test_a_failure_before_the_stream_has_its_status(start: Any, retriable: bool, status: int) -> None:
    """Until the stream is opened the HTTP status tells whether to try again."""
    service = await start(first_byte_s=60.0)
    rollout, trainer = await service.open(), await service.trainer()
    task = asking(rollout, stream=True)
    await _fail(trainer, await trainer.call(), retriable)
    with pytest.raises(openai.APIStatusError) as caught:
        await task
    assert caught.value.status_code == status
    assert caught.value.response.headers["x-should-retry"] == str(retriable).lower()


@pytest.mark.requirement("R30")
@pytest.mark.parametrize(("retriable", "code"), [(True, "server_error"), (False, "invalid_prompt")])
async def test_failure_within_the_stream_is_an_error_event_and_failed_response(
    start: Any, http: aiohttp.ClientSession, retriable: bool, code: str
) -> None:
    """The SDK raises the first, Codex reads the second and decides by its code; nothing follows."""
    service = await start(first_byte_s=0.0)
    rollout, trainer = await service.open(), await service.trainer()
    task = asking(rollout, stream=True)
    call = await trainer.call()
    stream = await task
    await _fail(trainer, call, retriable)
    with pytest.raises(openai.APIError) as caught:
        [event async for event in stream]
    assert caught.value.code == code
    headers = {"authorization": f"Bearer {rollout.token}"}
    asked = http.post(f"{rollout.base_url}/responses", json={"input": "raw", "stream": True}, headers=headers)
    async with asked as answer:
        await _fail(trainer, await trainer.call(), retriable)
        raw = await answer.text()
    *_, error, failed, rest = raw.split("\n\n")
    assert rest == "" and error.startswith("event: error\n") and failed.startswith("event: response.failed\n")
    last = orjson.loads(failed.partition("data: ")[2])
    assert (last["response"]["status"], last["response"]["error"]["code"]) == ("failed", code)
    assert last["sequence_number"] == raw.count("event: ") - 1


@pytest.mark.requirement("R41", "R88")
async def test_a_call_that_expires_within_a_stream_is_not_asked_for_again(start: Any) -> None:
    """Call_timeout ends the stream too, with a code on which Codex gives up."""
    service = await start(first_byte_s=0.0)
    for limit in limits(0.05):
        call_timeout = Duration()
        call_timeout.FromNanoseconds(int(limit * 1e9))
        rollout = await service.open(f"r{limit}", budgets=interception_pb2.Budgets(call_timeout=call_timeout))
        try:
            stream = await asking(rollout, stream=True)
        except openai.InternalServerError as early:
            assert early.status_code == 504
            continue  # the call expired before its stream began
        break
    else:
        raise AssertionError("no limit was long enough")
    with pytest.raises(openai.APIError) as caught:
        [event async for event in stream]
    assert (caught.value.code, caught.value.message) == ("invalid_prompt", "The model did not answer in time.")


@pytest.mark.requirement("R34")
async def test_a_retry_as_codex_writes_it_joins_the_call_whose_connection_broke(
    service: Any, http: aiohttp.ClientSession
) -> None:
    """Codex says nowhere that it retries, and orders its metadata anew; one call, one generation."""
    rollout, trainer = await service.open(), await service.trainer()
    url, headers = f"{rollout.base_url}/responses", {"authorization": f"Bearer {rollout.token}"}

    async def ask(metadata: dict[str, str]) -> str:
        body = {"input": ASK, "stream": True, "client_metadata": metadata}
        async with http.post(url, json=body, headers=headers) as answer:
            return await answer.text()

    first = asyncio.create_task(ask({"turn_id": "1", "thread_id": "2"}))
    call = await trainer.call()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = asyncio.create_task(ask({"thread_id": "2", "turn_id": "1"}))
    await trainer.deliver(trainer.result(call, "hello"))
    assert "response.completed" in await second
    listed = await service.intercept.ListCalls(pb.ListCallsRequest(rollout_id=rollout.rollout_id))
    assert [c.http_attempts for c in listed.calls] == [2]


@pytest.mark.requirement("R34")
async def test_the_sdks_retry_of_a_finished_call_is_replayed(service: Any) -> None:
    """The same answer, with the same ids."""
    rollout, trainer = await service.open(), await service.trainer()
    task = asking(rollout)
    await trainer.answer("hello")
    again = asking(rollout, extra_headers={"x-stainless-retry-count": "1"})
    assert (await again).to_dict() == (await task).to_dict()


@pytest.mark.requirement("R23", "R32")
async def test_a_client_that_goes_away_cancels_its_call(start: Any) -> None:
    """The trainer is told, and nothing is left waiting."""
    service = await start(rejoin_grace_s=0.0, first_byte_s=0.0)
    rollout, trainer = await service.open(), await service.trainer()
    task = asking(rollout, stream=True)
    call = await trainer.call()
    await (await task).close()
    cancelled = await trainer.frame("cancelled")
    assert (list(cancelled.call_ids), cancelled.reason) == ([call.call_id], "AGENT_GONE")


async def test_tokens_are_counted_as_the_prompt_would_have_them_and_models_listed(service: Any) -> None:
    """The count is what the call then has; an agent that speaks only this dialect finds its model."""
    rollout = await service.open(dialects=[trajectory_pb2.DIALECT_RESPONSES], model_name="policy")
    trainer, client = await service.trainer(), rollout.client()
    counted = await client.responses.input_tokens.count(model="m", input=ASK, tools=[BASH])
    task = asking(rollout, tools=[BASH])
    call = await trainer.answer("ok")
    await task
    assert counted.input_tokens == call.prompt_count
    assert [model.id async for model in client.models.list()] == ["policy"]
    assert (await client.models.retrieve("policy")).id == "policy"
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])


@pytest.mark.requirement("R33")
async def test_hosted_tools_are_left_out_and_that_is_recorded(service: Any) -> None:
    """What would leave the gate is not offered to the model."""
    rollout, trainer = await service.open(), await service.trainer(view=pb.CallView(messages=True))
    task = asking(rollout, tools=[BASH, {"type": "web_search"}])
    call = await trainer.answer("ok")
    await task
    assert [tool.name for tool in call.tools] == ["bash"]
    captured = await service.capture(rollout.rollout_id)
    assert any("web_search" in note for note in captured.calls[0].normalisations)


async def _closed(service: Any, rollout: Any) -> trajectory_pb2.Trajectory:
    """The rollout's capture with its grade."""
    await service.close(rollout.rollout_id)
    captured: trajectory_pb2.Trajectory = await service.capture(rollout.rollout_id)
    return captured


def _result(call_id: str, output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


async def _fail(trainer: Any, call: Any, retriable: bool) -> None:
    failure = pb.CallFailure(reason="NO", retriable=retriable)
    await trainer.deliver(pb.CallResult(call_id=call.call_id, lease_id=call.lease_id, failure=failure))
