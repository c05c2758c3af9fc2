"""The ingress at its edges: credentials, routes, bodies, limits, late failures, endings (R36)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock.interception.v1 import interception_pb2
from penstock.trajectory.v1 import trajectory_pb2

ASK: list[Any] = [{"role": "user", "content": "list the files"}]


def asking(rollout: Any, **options: Any) -> asyncio.Task[Any]:
    options.setdefault("messages", ASK)
    return asyncio.create_task(rollout.client().chat.completions.create(model="m", **options))


@pytest.mark.requirement("R4", "R5", "R6")
async def test_each_place_of_a_credential_is_accepted_and_none_of_another_rollout(
    service: Any, http: aiohttp.ClientSession
) -> None:
    """Bearer, x-api-key, x-goog-api-key; a neighbour's token, an empty one and none are 401 alike."""
    mine, other = await service.open(), await service.open()
    url = mine.base_url + "/models"
    for headers in (
        {"authorization": f"Bearer {mine.token}"},
        {"authorization": f"bearer  {mine.token} "},
        {"x-api-key": mine.token},
        {"x-goog-api-key": mine.token},
    ):
        async with http.get(url, headers=headers) as answer:
            assert (answer.status, (await answer.json())["data"][0]["id"]) == (200, "default")
    bodies = set()
    for headers in (
        {},
        {"authorization": ""},
        {"authorization": "Bearer "},
        {"authorization": f"Bearer {other.token}"},
        {"authorization": f"Basic {mine.token}"},
        {"x-api-key": "operator-token-1"},
        {"x-api-key": mine.token[:-1]},
        {"x-api-key": mine.token + "é"},
    ):
        async with http.get(url, headers=headers) as answer:
            assert answer.status == 401
            bodies.add(await answer.read())
    assert len(bodies) == 1


@pytest.mark.requirement("R36")
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/embeddings", 404),
        ("POST", "/v1/responses/compact", 404),
        ("GET", "/", 404),
        ("DELETE", "/v1/models", 404),
        ("POST", "/v1/chat%0A/completions", 404),
        ("POST", "/%0D%0A", 404),
    ],
)
async def test_a_route_that_is_not_there_is_the_dialects_404(
    service: Any, http: aiohttp.ClientSession, method: str, path: str, status: int
) -> None:
    """JSON in the dialect's shape, never HTML, never another rollout's."""
    rollout = await service.open()
    url = rollout.base_url.removesuffix("/v1") + path
    async with http.request(method, url, headers={"x-api-key": rollout.token}) as answer:
        assert answer.status == status
        assert (await answer.json())["error"]["type"] == "invalid_request_error"


@pytest.mark.requirement("R7", "R14")
async def test_routes_outside_of_rollouts_reveal_nothing(service: Any, http: aiohttp.ClientSession) -> None:
    """Health says alive; the rest is one 404."""
    async with http.get(f"http://{service.ingress}/health") as answer:
        assert (answer.status, await answer.text()) == (200, "ok\n")
    for path in ("/", "/v1/models", "/rollout", "/metrics", "/rollout/x"):
        async with http.get(f"http://{service.ingress}{path}") as answer:
            assert answer.status == 404


@pytest.mark.requirement("R33")
async def test_arbitrary_bodies_never_cause_an_internal_error(service: Any, http: aiohttp.ClientSession) -> None:
    """Whatever is posted, the answer is the dialect's 4xx with a message."""
    rollout = await service.open()
    url, headers = rollout.base_url + "/chat/completions", {"x-api-key": rollout.token}
    bodies: list[bytes] = []

    @settings(max_examples=60, database=None, suppress_health_check=list(HealthCheck))
    @given(st.binary(max_size=40) | st.sampled_from([b"", b"{}", b"null", b'{"messages": [{}]}', b"[" * 2000]))
    def gather(body: bytes) -> None:
        bodies.append(body)

    gather()
    for body in bodies:
        async with http.post(url, data=body, headers=headers) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["message"]


@pytest.mark.requirement("R13")
async def test_a_body_that_is_too_large_is_413(start: Any, http: aiohttp.ClientSession) -> None:
    """The body cap holds before anything is parsed."""
    service = await start(max_body_bytes=2048)
    rollout = await service.open()
    url = rollout.base_url + "/chat/completions"
    async with http.post(url, data=b" " * 4096, headers={"x-api-key": rollout.token}) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (413, "request_too_large")


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
    with pytest.raises(openai.APIError) as caught:
        [chunk async for chunk in stream]
    assert caught.value.code == "model_unavailable"


@pytest.mark.requirement("R30")
async def test_a_failure_within_the_first_second_has_its_status(start: Any) -> None:
    """Until the stream is opened the HTTP status tells, so that an SDK can retry."""
    service = await start(first_byte_s=60.0)
    rollout, trainer = await service.open(), await service.trainer()
    task = asking(rollout, stream=True)
    call = await trainer.call()
    failure = pb.CallFailure(reason="NO", retriable=True)
    await trainer.deliver(pb.CallResult(call_id=call.call_id, lease_id=call.lease_id, failure=failure))
    with pytest.raises(openai.InternalServerError) as caught:
        await task
    assert caught.value.status_code == 503


@pytest.mark.requirement("R34")
async def test_the_sdks_own_retry_after_a_retriable_failure_is_a_new_call(service: Any) -> None:
    """A failed call is not replayed; the retry is generated."""
    rollout, trainer = await service.open(), await service.trainer()
    task = asyncio.create_task(rollout.client(max_retries=1).chat.completions.create(model="m", messages=ASK))
    call = await trainer.call()
    failure = pb.CallFailure(reason="NO", retriable=True)
    await trainer.deliver(pb.CallResult(call_id=call.call_id, lease_id=call.lease_id, failure=failure))
    again = await trainer.answer("second try")
    assert again.call_id != call.call_id
    assert (await task).choices[0].message.content == "second try"


@pytest.mark.requirement("R41", "R88")
async def test_a_call_that_nobody_answers_expires_and_is_not_repeated_by_sdks(service: Any) -> None:
    """Call_timeout ends it; 504 with x-should-retry false."""
    rollout = await service.open(budgets=interception_pb2.Budgets(call_timeout=Duration(nanos=20_000_000)))
    with pytest.raises(openai.InternalServerError) as caught:
        await rollout.client(max_retries=3).chat.completions.create(model="m", messages=ASK)
    assert (caught.value.status_code, caught.value.response.headers["x-should-retry"]) == (504, "false")
    captured = await service.capture(rollout.rollout_id)
    assert [call.state for call in captured.calls] == [trajectory_pb2.CALL_STATE_EXPIRED]


@pytest.mark.requirement("R26")
async def test_too_many_waiting_calls_get_a_retry_time(start: Any) -> None:
    """Back-pressure is 429 with Retry-After, not a silent queue."""
    service = await start(max_open_calls=1)
    rollout, trainer = await service.open(), await service.trainer()
    task = asking(rollout)
    call = await trainer.call()
    with pytest.raises(openai.RateLimitError) as caught:
        await asking(rollout, messages=[{"role": "user", "content": "other"}])
    assert caught.value.response.headers["retry-after"] == "1"
    await trainer.deliver(trainer.result(call, "ok"))
    await task


@pytest.mark.requirement("R33", "R63")
async def test_a_conversation_that_the_template_cannot_take_is_the_agents_own_error(service: Any) -> None:
    """An image for a text model is 400 with a reason, and the call is on record."""
    rollout = await service.open()
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    with pytest.raises(openai.BadRequestError) as caught:
        await asking(rollout, messages=[{"role": "user", "content": [image]}])
    assert caught.value.code == "image_unsupported"
    captured = await service.capture(rollout.rollout_id, include_bodies=True)
    assert captured.calls[0].state == trajectory_pb2.CALL_STATE_FAILED
    assert b"image_url" in captured.calls[0].request_body


@pytest.mark.requirement("R85")
async def test_side_calls_are_labelled_by_the_specs_hints_and_sessions_kept(service: Any) -> None:
    """Titles by the system prompt, sessions by header; nothing is dropped."""
    hints = interception_pb2.CallHints(title_system_prompts=["title generator"], session_headers=["X-Session-Id"])
    rollout = await service.open(hints=hints)
    trainer = await service.trainer()
    title = [{"role": "system", "content": "You are a title generator."}, *ASK]
    client = rollout.client(default_headers={"x-session-id": "s1"})
    for messages in (title, ASK):
        task = asyncio.create_task(client.chat.completions.create(model="m", messages=messages))
        await trainer.answer("ok")
        await task
    captured = await service.capture(rollout.rollout_id)
    assert [call.call_class for call in captured.calls] == [
        trajectory_pb2.CALL_CLASS_TITLE,
        trajectory_pb2.CALL_CLASS_MAIN,
    ]
    assert dict(captured.calls[0].agent_session) == {"x-session-id": "s1"}


@pytest.mark.requirement("R21")
async def test_trainers_own_text_is_marked_as_injected(service: Any) -> None:
    """A message without tokens, or other than its tokens say, is recorded and never trained on."""
    rollout, trainer = await service.open(), await service.trainer()
    task = asking(rollout)
    call = await trainer.call()
    completion = trainer.completion("what was sampled")
    text = chat_pb2.Part(text=chat_pb2.Text(text="what was written"))
    completion.message.CopyFrom(chat_pb2.Message(role=chat_pb2.ROLE_ASSISTANT, parts=[text]))
    await trainer.deliver(pb.CallResult(call_id=call.call_id, lease_id=call.lease_id, completion=completion))
    assert (await task).choices[0].message.content == "what was written"
    captured = await service.capture(rollout.rollout_id)
    assert captured.calls[0].injected
    assert not any(captured.samples[0].loss_mask)


@pytest.mark.requirement("R63", "R86")
async def test_the_rollouts_sampling_replaces_the_agents_and_that_is_recorded(service: Any) -> None:
    """The override reaches the engine and the record."""
    rollout = await service.open(sampling_override=chat_pb2.Sampling(temperature=1.0, seed=7))
    trainer = await service.trainer()
    task = asking(rollout, temperature=0.2, top_p=0.5)
    call = await trainer.answer("ok")
    await task
    assert (call.sampling.temperature, call.sampling.seed, call.sampling.top_p) == (1.0, 7, 0.5)
    captured = await service.capture(rollout.rollout_id)
    assert any("sampling" in note for note in captured.calls[0].normalisations)


async def test_a_text_source_at_the_gate_gives_messages_instead_of_tokens(service: Any) -> None:
    """Gate mode over an upstream: no tokens, messages and tools always; what is captured is text."""
    from aiohttp import web

    app = web.Application()
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    endpoint = interception_pb2.Upstream.CallerEndpoint(base_url=url)
    source = interception_pb2.ModelSource(upstream=interception_pb2.Upstream(caller=endpoint))
    rollout, trainer = await service.open(source=source), await service.trainer()
    task = asking(rollout)
    call = await trainer.call()
    assert call.prompt_count == 0 and call.messages[0].parts[0].text.text == "list the files"
    part = chat_pb2.Part(text=chat_pb2.Text(text="by hand"))
    message = chat_pb2.Message(role=chat_pb2.ROLE_ASSISTANT, parts=[part])
    completion = completion_pb2.Completion(message=message, finish_reason=chat_pb2.FINISH_REASON_STOP)
    await trainer.deliver(pb.CallResult(call_id=call.call_id, lease_id=call.lease_id, completion=completion))
    assert (await task).choices[0].message.content == "by hand"
    await runner.cleanup()


@pytest.mark.requirement("R32")
async def test_large_conversation_is_tokenised_off_the_loop_with_equal_result(service: Any) -> None:
    """A body of 600 kB goes the slow path; what comes out is what a short one gives."""
    rollout, trainer = await service.open(), await service.trainer()
    task = asking(rollout, messages=[{"role": "user", "content": "list the files " * 40_000}])
    call = await trainer.call()
    assert call.prompt_count > 100_000
    await trainer.deliver(trainer.result(call, "many"))
    assert (await task).choices[0].message.content == "many"


@pytest.mark.requirement("R32")
async def test_many_short_messages_are_read_off_the_loop_with_equal_result(service: Any) -> None:
    """It is its 3,000 messages that make a body of 150 kB slow to read, not its bytes."""
    rollout, trainer = await service.open(), await service.trainer()
    turns = [ASK[0], {"role": "assistant", "content": "ok"}] * 1500
    task = asking(rollout, messages=[*turns, *ASK])
    await trainer.answer("many")
    assert (await task).choices[0].message.content == "many"


async def test_watch_reports_each_change_in_order_and_resumes(service: Any) -> None:
    """Each state is an event; a watch taken up at a position misses nothing and ends with its rollout."""
    from penstock.interception.v1 import rollout_gate_service_pb2 as gate

    rollout, trainer = await service.open(), await service.trainer()
    first = service.gate.WatchCalls(gate.WatchCallsRequest(rollout_ids=[rollout.rollout_id]))
    start = (await first.read()).started.sequence
    task = asking(rollout)
    await trainer.answer("ok")
    await task
    await service.close(rollout.rollout_id)
    states, last = [], None
    watching = gate.WatchCallsRequest(rollout_ids=[rollout.rollout_id], after_sequence=start)
    async for event in service.gate.WatchCalls(watching):
        last = event.WhichOneof("event")
        if last == "changed":
            states.append(event.changed.call.state)
    assert states == [
        trajectory_pb2.CALL_STATE_QUEUED,
        trajectory_pb2.CALL_STATE_LEASED,
        trajectory_pb2.CALL_STATE_DELIVERED,
    ]
    assert last == "closed"

    watching.ended_only = True
    events = [event async for event in service.gate.WatchCalls(watching)]
    assert [event.WhichOneof("event") for event in events] == ["started", "changed", "closed"]
    assert events[1].changed.call.state == trajectory_pb2.CALL_STATE_DELIVERED


@pytest.mark.requirement("R34", "R146")
async def test_a_header_that_is_not_utf8_is_refused_and_makes_no_call(service: Any) -> None:
    """B2. Neither the journal nor a trainer's message can hold it."""
    rollout = await service.open()
    body = b'{"model":"m","messages":[{"role":"user","content":"list"}]}'
    host, port = service.ingress.rsplit(":", 1)
    path = rollout.base_url.removeprefix(f"http://{service.ingress}")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        f"POST {path}/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {rollout.token}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n".encode()
        + b"idempotency-key: \xff\xfe\r\n\r\n"
        + body
    )
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 400") and b"invalid_header" in answer
    assert not (await service.capture(rollout.rollout_id)).calls


@pytest.mark.requirement("R80", "R83")
async def test_call_with_an_undecodable_tool_name_is_text_and_stays_readable(service: Any) -> None:
    """JSON can spell half a character; in a name it made all of the rollout's capture unreadable."""
    trainer = await service.trainer()
    rollout = await service.open()
    asked = asyncio.create_task(rollout.client().chat.completions.create(model="m", messages=ASK))
    said = '<tool_call>\n{"name": "\\ud800", "arguments": {}}\n</tool_call>'
    await trainer.answer(said)
    message = (await asked).choices[0].message
    assert (message.content, message.tool_calls) == (said, None)
    captured = await service.capture(rollout.rollout_id)
    assert [call.state for call in captured.calls] == [trajectory_pb2.CALL_STATE_DELIVERED]


@pytest.mark.requirement("R60", "R146")
async def test_a_request_whose_body_comes_after_the_close_is_refused(service: Any) -> None:
    """Its key was good as it began; the verifier may run by now, and the id may be another rollout's."""
    rollout = await service.open()
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "late"}]}).encode()
    host, _, port = service.ingress.rpartition(":")
    path = rollout.base_url.partition(service.ingress)[2]
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        head = f"POST {path}/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {rollout.token}\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\nexpect: 100-continue\r\n\r\n".encode())
        # Sent by the route's handler: the key is checked.
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body[:10])
        await service.close(rollout.rollout_id)
        writer.write(body[10:])
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
    finally:
        writer.close()
    assert not (await service.capture(rollout.rollout_id)).calls
