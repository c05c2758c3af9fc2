"""google-genai against the ingress, a trainer on the stream: Google generateContent as its own SDK reads it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from google import genai
from google.genai import errors, types
from google.protobuf.duration_pb2 import Duration

from penstock.chat.v1 import chat_pb2
from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock.interception.v1 import interception_pb2
from penstock.trajectory.v1 import trajectory_pb2

CALL = '<tool_call>\n{"name": "bash",  "arguments": {"n": 1.0,"command" : "ls"}}\n</tool_call>'
THOUGHT = "<think>\nFirst look.\n</think>\n\n"
BASH = types.Tool(
    function_declarations=[
        types.FunctionDeclaration(
            name="bash",
            description="Run.",
            parameters=types.Schema(
                type=types.Type.OBJECT, properties={"command": types.Schema(type=types.Type.STRING)}
            ),
        )
    ]
)
ASK = "list the files"


def root(rollout: Any) -> str:
    """What the SDK wants for a base URL: it adds the version itself."""
    return str(rollout.base_url).removesuffix("/v1")


def sdk(rollout: Any, **options: Any) -> genai.Client:
    """The real SDK, pointed at the ingress."""
    return genai.Client(api_key=rollout.token, http_options=types.HttpOptions(base_url=root(rollout), **options))


def configured(**options: Any) -> types.GenerateContentConfig:
    """A config; the SDK does not run tools itself."""
    manual = types.AutomaticFunctionCallingConfig(disable=True)
    return types.GenerateContentConfig(automatic_function_calling=manual, **options)


def asking(rollout: Any, contents: Any = ASK, *, http: dict[str, Any] | None = None, **config: Any) -> Any:
    client = sdk(rollout, **(http or {})).aio
    return asyncio.create_task(
        client.models.generate_content(model="m", contents=contents, config=configured(**config))
    )


def streaming(rollout: Any, contents: Any = ASK, **config: Any) -> Any:
    async def read() -> list[types.GenerateContentResponse]:
        client = sdk(rollout).aio
        stream = await client.models.generate_content_stream(model="m", contents=contents, config=configured(**config))
        return [chunk async for chunk in stream]

    return asyncio.create_task(read())


def content_of(chunks: list[types.GenerateContentResponse]) -> list[types.Content]:
    """As the SDK's chats keep what came: each chunk's content by itself."""
    contents = [chunk.candidates[0].content for chunk in chunks if chunk.candidates]
    return [content for content in contents if content is not None]


def parts_of(chunks: list[types.GenerateContentResponse]) -> list[types.Part]:
    return [part for content in content_of(chunks) for part in content.parts or ()]


@pytest.mark.requirement("R30", "R82")
async def test_the_sdk_gets_what_the_trainer_delivered(service: Any) -> None:
    """Text, finish reason, usage and identity of a whole answer; the delivered ids are captured."""
    rollout, trainer = await service.open(), await service.trainer()
    asked = asking(rollout, system_instruction="You are a shell agent.", temperature=0.5, top_k=40, seed=7)
    call = await trainer.answer("hello there")
    answer = await asked
    assert answer.text == "hello there"
    assert answer.candidates[0].finish_reason is types.FinishReason.STOP
    usage = answer.usage_metadata
    assert usage.prompt_token_count == call.prompt_count
    assert usage.total_token_count == usage.prompt_token_count + usage.candidates_token_count
    assert (answer.model_version, answer.response_id) == ("m", call.call_id)
    assert (call.sampling.temperature, call.sampling.top_k, call.sampling.seed) == (0.5, 40, 7)
    await service.close(rollout.rollout_id)
    captured = await service.capture(rollout.rollout_id)
    assert captured.grade == trajectory_pb2.GRADE_EXACT
    assert captured.calls[0].dialect == trajectory_pb2.DIALECT_GENERATE_CONTENT
    assert captured.calls[0].completion.span.token_ids == trainer.completion("hello there").span.token_ids


@pytest.mark.requirement("R63", "R64")
async def test_an_override_turns_the_agents_top_k_off(service: Any) -> None:
    """Unset leaves the agent's own, such as gemini-cli's 64: then every logprob is of another distribution."""
    kept = await service.open(sampling_override=chat_pb2.Sampling(temperature=1.0))
    off = await service.open(sampling_override=chat_pb2.Sampling(temperature=1.0, top_k=0, min_p=0.0))
    trainer = await service.trainer()
    for rollout in (kept, off):
        asked = asking(rollout, temperature=0.5, top_k=64)
        sampling = (await trainer.answer("hello there")).sampling
        await asked
        assert sampling.temperature == 1.0
        assert (sampling.top_k, sampling.HasField("top_k")) == ((64, True) if rollout is kept else (0, False))


@pytest.mark.requirement("R30", "R82", "R85")
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("thoughts", [True, False])
async def test_turn_of_thoughts_text_and_parallel_calls_continues_from_exact_tokens(
    service: Any, streamed: bool, thoughts: bool
) -> None:
    """Whether thoughts are shown or not, the next prompt starts with what was sampled."""
    rollout, trainer = await service.open(), await service.trainer()
    thinking = types.ThinkingConfig(include_thoughts=thoughts)
    config: dict[str, Any] = {"tools": [BASH], "thinking_config": thinking}
    sampled = THOUGHT + "I look.\n" + CALL + "\n" + CALL.replace("ls", "pwd")
    asked = streaming(rollout, **config) if streamed else asking(rollout, **config)
    one = await trainer.answer(sampled)
    chunks = await asked if streamed else [await asked]
    parts = parts_of(chunks)
    assert [part.text for part in parts if part.thought] == (["First look."] if thoughts else [])
    assert [part.text for part in parts if part.text and not part.thought] == ["I look."]
    calls = [part.function_call for part in parts if part.function_call]
    assert [(call.name, call.args) for call in calls] == [
        ("bash", {"n": 1.0, "command": "ls"}),
        ("bash", {"n": 1.0, "command": "pwd"}),
    ]
    assert len({call.id for call in calls}) == 2
    assert [chunk.candidates[0].finish_reason for chunk in chunks if chunk.candidates[0].finish_reason] == [
        types.FinishReason.STOP
    ]
    assert chunks[-1].usage_metadata.prompt_token_count == one.prompt_count
    assert len(chunks) == (1 if not streamed else 3 if thoughts else 2)

    results = [
        types.Part(function_response=types.FunctionResponse(id=call.id, name=call.name, response={"output": "a.txt"}))
        for call in calls
    ]
    history = [types.UserContent(ASK), *content_of(chunks), types.Content(role="user", parts=results)]
    asked = streaming(rollout, history, **config) if streamed else asking(rollout, history, **config)
    two = await trainer.answer("done")
    answer = (await asked)[-1] if streamed else await asked
    assert answer.text == "done"
    before = one.prompt_token_ids + trainer.completion(sampled).span.token_ids
    assert two.prompt_token_ids.startswith(before)
    assert two.parent_call_id == one.call_id
    await service.close(rollout.rollout_id)
    captured = await service.capture(rollout.rollout_id)
    assert captured.grade == trajectory_pb2.GRADE_EXACT
    assert [call.call_class for call in captured.calls] == [trajectory_pb2.CALL_CLASS_MAIN] * 2


@pytest.mark.requirement("R30")
@pytest.mark.parametrize("line_break", ["\n", "\r\n", "\r"])
async def test_streamed_call_whose_sampled_arguments_have_line_breaks_is_whole(service: Any, line_break: str) -> None:
    """Models write indented JSON; an event ends at a line break. Those in texts are escaped, and stay."""
    rollout, trainer = await service.open(), await service.trainer()
    indented = CALL.replace('{"n"', '{\n  "n"').replace(',"command"', ',\n  "command"').replace("ls", "ls\\n")
    asked = streaming(rollout, tools=[BASH])
    await trainer.answer(indented.replace("\n", line_break))
    calls = [part.function_call for part in parts_of(await asked) if part.function_call]
    assert [(call.name, call.args) for call in calls] == [("bash", {"n": 1.0, "command": "ls\n"})]


@pytest.mark.requirement("R82")
async def test_the_sdks_own_chat_runs_tools_over_two_turns(service: Any) -> None:
    """The SDK's automatic function calling, which writes the history itself, stays on the exact tokens."""
    rollout, trainer = await service.open(), await service.trainer()
    ran: list[str] = []

    def bash(command: str) -> str:
        """Runs a command."""
        ran.append(command)
        return "a.txt"

    async def chat() -> str | None:
        chats = sdk(rollout).aio.chats
        session = chats.create(model="m", config=types.GenerateContentConfig(tools=[bash]))
        text: str | None = (await session.send_message(ASK)).text
        return text

    asked = asyncio.create_task(chat())
    call = CALL.replace('"n": 1.0,', "")
    one = await trainer.answer(call)
    two = await trainer.answer("done")
    assert (await asked, ran) == ("done", ["ls"])
    assert two.prompt_token_ids.startswith(one.prompt_token_ids + trainer.completion(call).span.token_ids)


@pytest.mark.requirement("R30")
@pytest.mark.parametrize(
    ("finish", "expected"),
    [
        (chat_pb2.FINISH_REASON_LENGTH, types.FinishReason.MAX_TOKENS),
        (chat_pb2.FINISH_REASON_CONTENT_FILTER, types.FinishReason.SAFETY),
    ],
)
async def test_each_finish_reason_has_googles_name(service: Any, finish: Any, expected: types.FinishReason) -> None:
    """Why an answer ended."""
    rollout, trainer = await service.open(), await service.trainer()
    asked = asking(rollout)
    await trainer.answer("hello", finish=finish)
    assert (await asked).candidates[0].finish_reason is expected


@pytest.mark.requirement("R30")
async def test_thoughts_and_cached_tokens_are_counted(service: Any) -> None:
    """An engine's own counts in Google's terms, where thoughts are no part of the candidates."""
    rollout, trainer = await service.open(), await service.trainer()
    asked = asking(rollout)
    call = await trainer.call()
    completion = trainer.completion(THOUGHT + "hello")
    completion.usage.CopyFrom(chat_pb2.Usage(reasoning_tokens=4, cached_tokens=2))
    await trainer.deliver(pb.CallResult(call_id=call.call_id, lease_id=call.lease_id, completion=completion))
    usage = (await asked).usage_metadata
    assert (usage.thoughts_token_count, usage.cached_content_token_count) == (4, 2)
    assert usage.candidates_token_count == completion.span.count - 4
    assert usage.total_token_count == call.prompt_count + completion.span.count


@pytest.mark.requirement("R30")
async def test_waiting_streams_are_kept_alive_with_what_the_sdk_skips(start: Any) -> None:
    """Empty lines come from the first moment on, and the SDK, sync and async, reads the answer after them."""
    service = await start(first_byte_s=0.0, keep_alive_s=0.01)
    rollout, trainer = await service.open(), await service.trainer()

    def read() -> list[str | None]:
        client = sdk(rollout)  # one that nobody holds closes itself
        return [chunk.text for chunk in client.models.generate_content_stream(model="m", contents=ASK)]

    async def in_a_thread() -> list[str | None]:
        return await asyncio.to_thread(read)

    async def in_the_loop() -> list[str | None]:
        return [chunk.text for chunk in await streaming(rollout)]

    for way in (in_the_loop, in_a_thread):
        asked = asyncio.create_task(way())
        call = await trainer.call()
        async with aiohttp.ClientSession() as http:  # a twin, to see that lines do come while the first one waits
            url, headers = f"{root(rollout)}/v1beta/models/m:streamGenerateContent", {"x-goog-api-key": rollout.token}
            body = {"contents": [{"parts": [{"text": "another"}]}]}
            async with http.post(url, params={"alt": "sse"}, json=body, headers=headers) as twin:
                assert await twin.content.readexactly(3) == b"\n\n\n"
                other = await trainer.call()
                await trainer.deliver(trainer.result(other, "twin"))
                assert b'"twin"' in await twin.read()
        await trainer.deliver(trainer.result(call, "hello"))
        assert await asked == ["hello"]


@pytest.mark.requirement("R30")
async def test_a_stream_without_alt_sse_is_one_json_array(start: Any, http: aiohttp.ClientSession) -> None:
    """The array is valid JSON with white space for keep-alives, an error an item of it."""
    service = await start(first_byte_s=0.0, keep_alive_s=0.01)
    rollout, trainer = await service.open(), await service.trainer()
    url, headers = f"{root(rollout)}/v1beta/models/m:streamGenerateContent", {"x-goog-api-key": rollout.token}
    config = {"thinkingConfig": {"includeThoughts": True}}
    for number, problem in enumerate((False, True)):
        body = {"contents": [{"parts": [{"text": f"{ASK} {number}"}]}], "generationConfig": config}
        async with http.post(url, json=body, headers=headers) as answer:
            assert answer.content_type == "application/json"
            assert await answer.content.readexactly(3) == b"[\n\n"
            call = await trainer.call()
            if problem:
                failure = pb.CallFailure(reason="NO", retriable=True)
                await trainer.deliver(pb.CallResult(call_id=call.call_id, lease_id=call.lease_id, failure=failure))
            else:
                await trainer.deliver(trainer.result(call, THOUGHT + "hello"))
            items = json.loads(b"[" + await answer.read())
        if problem:
            assert [item["error"]["status"] for item in items] == ["UNAVAILABLE"]
        else:
            assert [item["candidates"][0]["content"]["parts"][0]["text"] for item in items] == ["First look.", "hello"]
            assert "finishReason" not in items[0]["candidates"][0]


async def test_tokens_are_counted_as_the_prompt_would_be(service: Any) -> None:
    """countTokens says what the call will have, and is no call."""
    rollout, trainer = await service.open(), await service.trainer()
    counted = await sdk(rollout).aio.models.count_tokens(model="m", contents=ASK)
    asked = asking(rollout)
    call = await trainer.answer("ok")
    await asked
    assert counted.total_tokens == call.prompt_count
    assert (await service.capture(rollout.rollout_id)).calls[0].index == 0


@pytest.mark.requirement("R30")
async def test_the_model_is_listed_and_described(service: Any) -> None:
    """The one model, by list and by name; another is 404."""
    rollout = await service.open(model_name="policy", dialects=[trajectory_pb2.DIALECT_GENERATE_CONTENT])
    client = sdk(rollout).aio
    assert [model.name async for model in await client.models.list()] == ["models/policy"]
    assert (await client.models.get(model="policy")).supported_actions == [
        "generateContent",
        "streamGenerateContent",
        "countTokens",
    ]
    with pytest.raises(errors.ClientError) as caught:
        await client.models.get(model="other")
    assert (caught.value.code, caught.value.status) == (404, "NOT_FOUND")


@pytest.mark.requirement("R4", "R5")
async def test_a_wrong_key_is_unauthenticated_wherever_it_is_sent(service: Any, http: aiohttp.ClientSession) -> None:
    """401 in the dialect's shape; a key in the query is no credential, for queries end up in logs."""
    one, two = await service.open(), await service.open()
    stranger = genai.Client(api_key=two.token, http_options=types.HttpOptions(base_url=root(one)))
    with pytest.raises(errors.ClientError) as caught:
        await stranger.aio.models.generate_content(model="m", contents=ASK)
    assert (caught.value.code, caught.value.status) == (401, "UNAUTHENTICATED")
    for version in ("v1", "v1beta"):
        url = f"{root(one)}/{version}/models/m:generateContent"
        async with http.post(url, params={"key": one.token}, json={}) as answer:
            assert (answer.status, (await answer.json())["error"]["status"]) == (401, "UNAUTHENTICATED")


@pytest.mark.requirement("R36")
@pytest.mark.parametrize(
    ("method", "path", "status", "name"),
    [
        ("POST", "/v1beta/models/m:embedContent", 404, "NOT_FOUND"),
        ("POST", "/v1beta/files", 404, "NOT_FOUND"),
        ("GET", "/v1beta/models/m:generateContent", 405, "UNIMPLEMENTED"),
    ],
)
async def test_unserved_route_is_the_dialects_own_error(
    service: Any, http: aiohttp.ClientSession, method: str, path: str, status: int, name: str
) -> None:
    """Google's error object, never another dialect's."""
    rollout = await service.open()
    async with http.request(method, root(rollout) + path, headers={"x-goog-api-key": rollout.token}) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["code"], error["status"]) == (status, status, name)


@pytest.mark.requirement("R33")
async def test_a_bad_field_is_named_in_the_details(service: Any) -> None:
    """400 INVALID_ARGUMENT with the field's path, as Google's clients look for it."""
    rollout = await service.open()
    with pytest.raises(errors.ClientError) as caught:
        await asking(rollout, candidate_count=2)
    assert (caught.value.code, caught.value.status) == (400, "INVALID_ARGUMENT")
    details = caught.value.details["error"]["details"]
    assert details[0]["reason"] == "UNSUPPORTED_VALUE"
    assert details[1]["fieldViolations"][0]["field"] == "generationConfig.candidateCount"


@pytest.mark.requirement("R13")
async def test_a_body_that_is_too_large_is_413(start: Any) -> None:
    """The body cap holds before anything is parsed."""
    service = await start(max_body_bytes=2048)
    rollout = await service.open()
    with pytest.raises(errors.ClientError) as caught:
        await asking(rollout, "x" * 4096)
    assert caught.value.code == 413


@pytest.mark.requirement("R88")
async def test_a_budget_that_is_used_up_is_a_refusal_that_nobody_repeats(service: Any) -> None:
    """403 PERMISSION_DENIED, which neither the SDK nor Gemini CLI tries again."""
    rollout = await service.open(budgets=interception_pb2.Budgets(max_calls=1))
    trainer = await service.trainer()
    asked = asking(rollout)
    await trainer.answer("the only one")
    await asked
    patient = {"retry_options": types.HttpRetryOptions(attempts=3, initial_delay=0.0)}
    with pytest.raises(errors.ClientError) as caught:
        await asking(rollout, "more", http=patient)
    assert (caught.value.code, caught.value.status) == (403, "PERMISSION_DENIED")
    assert caught.value.details["error"]["details"][0]["reason"] == "BUDGET_EXHAUSTED"


@pytest.mark.requirement("R26")
async def test_too_many_waiting_calls_get_a_retry_time(start: Any) -> None:
    """429 RESOURCE_EXHAUSTED with RetryInfo, which Google's clients wait for."""
    service = await start(max_open_calls=1)
    rollout, trainer = await service.open(), await service.trainer()
    asked = asking(rollout)
    call = await trainer.call()
    with pytest.raises(errors.ClientError) as caught:
        await asking(rollout, "other")
    assert (caught.value.code, caught.value.status) == (429, "RESOURCE_EXHAUSTED")
    assert caught.value.details["error"]["details"][-1]["retryDelay"] == "1s"
    await trainer.deliver(trainer.result(call, "ok"))
    await asked


@pytest.mark.requirement("R34")
async def test_the_sdks_own_retry_after_a_failure_is_a_new_call(service: Any) -> None:
    """503 before a byte was written is repeated by the SDK, and generated anew."""
    rollout, trainer = await service.open(), await service.trainer()
    patient = {"retry_options": types.HttpRetryOptions(attempts=2, initial_delay=0.0, jitter=0.0)}
    asked = asking(rollout, http=patient)
    call = await trainer.call()
    failure = pb.CallFailure(reason="NO", retriable=True)
    await trainer.deliver(pb.CallResult(call_id=call.call_id, lease_id=call.lease_id, failure=failure))
    again = await trainer.answer("second try")
    assert again.call_id != call.call_id
    assert (await asked).text == "second try"


@pytest.mark.requirement("R30")
async def test_a_failure_after_the_stream_began_is_raised_by_the_sdk(start: Any) -> None:
    """The late error is the bare object that both SDKs look for; nothing follows it."""
    service = await start(first_byte_s=0.0)
    rollout, trainer = await service.open(), await service.trainer()
    asked = streaming(rollout)
    call = await trainer.call()
    failure = pb.CallFailure(reason="NO", retriable=True)
    await trainer.deliver(pb.CallResult(call_id=call.call_id, lease_id=call.lease_id, failure=failure))
    with pytest.raises(errors.ServerError) as caught:
        await asked
    assert (caught.value.code, caught.value.status) == (503, "UNAVAILABLE")


@pytest.mark.requirement("R41")
async def test_a_call_that_nobody_answers_is_a_deadline(service: Any) -> None:
    """504 DEADLINE_EXCEEDED."""
    rollout = await service.open(budgets=interception_pb2.Budgets(call_timeout=Duration(nanos=20_000_000)))
    with pytest.raises(errors.ServerError) as caught:
        await asking(rollout)
    assert (caught.value.code, caught.value.status) == (504, "DEADLINE_EXCEEDED")


@pytest.mark.requirement("R34")
async def test_a_retry_joins_the_call_whose_connection_broke(service: Any) -> None:
    """Google's clients say of no request that it is a retry; the same body is the same call: one generation."""
    rollout, trainer = await service.open(), await service.trainer()
    first = streaming(rollout)
    call = await trainer.call()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = streaming(rollout)
    await trainer.deliver(trainer.result(call, "hello"))
    assert [chunk.text for chunk in await second] == ["hello"]
    listed = await service.intercept.ListCalls(pb.ListCallsRequest(rollout_id=rollout.rollout_id))
    assert [item.http_attempts for item in listed.calls] == [2]


@pytest.mark.requirement("R23", "R32")
async def test_a_client_that_goes_away_frees_its_call(start: Any) -> None:
    """After the grace the call is CANCELLED and the trainer told."""
    service = await start(rejoin_grace_s=0.0)
    rollout, trainer = await service.open(), await service.trainer()
    asked = streaming(rollout)
    call = await trainer.call()
    asked.cancel()
    cancelled = await trainer.frame("cancelled")
    assert (list(cancelled.call_ids), cancelled.reason) == ([call.call_id], "AGENT_GONE")


@pytest.mark.requirement("R34", "R87")
async def test_open_call_survives_a_restart_with_its_model_from_the_path(serving: Any) -> None:
    """The body alone is read again; the agent's retry gets the answer of its call."""
    async with serving() as service:
        rollout, trainer = await service.open(), await service.trainer()
        asked = asking(rollout, tools=[BASH])
        call = await trainer.call()
    with pytest.raises((errors.APIError, aiohttp.ClientError)):
        await asked
    async with serving() as service:
        rollout.base_url = f"http://{service.ingress}/rollout/{rollout.rollout_id}/v1"
        again, trainer = asking(rollout, tools=[BASH]), await service.trainer()
        assert (await trainer.answer("hello")).prompt_token_ids == call.prompt_token_ids
        answer = await again
        assert (answer.text, answer.model_version, answer.response_id) == ("hello", "m", call.call_id)
