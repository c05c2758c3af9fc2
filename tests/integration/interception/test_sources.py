"""Who answers where the trainer does not: the inference service, an upstream, in every mode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import grpc
import numpy as np
import openai
import pytest
from aiohttp import web
from google.protobuf.duration_pb2 import Duration
from tests.integration.interception import formed_engine
from tests.support.endpoints.loopback import serving
from tests.support.waiting import limits

from penstock.chat.v1 import chat_pb2
from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock.interception.v1 import interception_pb2
from penstock.interception.v1 import rollout_gate_service_pb2 as gate_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.rpc_status import from_rpc_error
from penstock_inference.testing import open_inference

ASK: list[Any] = [{"role": "user", "content": "list the files"}]
PROXY = interception_pb2.MODE_TRANSPARENT_PROXY
SECRET = "sk-test '$(leak)`x`"


@pytest.fixture
async def inference(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[Callable[[dict[str, Any]], Any]]:
    """Starts the real inference service with a script; gives its address."""
    async with AsyncExitStack() as stack:

        async def start_inference(script: dict[str, Any], engine: str = "scripted", **further: Any) -> str:
            file = tmp_path / "script.json"
            file.write_text(json.dumps(script))
            options = {"script": str(file)}
            opening = open_inference(
                tokenizer_dir, tmp_path / "inference", engine=engine, engine_options=options, **further
            )
            return (await stack.enter_async_context(opening)).address

        yield start_inference


@asynccontextmanager
async def upstream(
    answer: Callable[[web.Request, dict[str, Any]], Any], owner: str = "nobody"
) -> AsyncIterator[tuple[str, list[Any]]]:
    """An OpenAI-compatible endpoint that answers as it is told and remembers what it was sent."""
    seen: list[Any] = []

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "owned_by": owner}]})

    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        seen.append((dict(request.headers), body))
        result = answer(request, body)
        return result if isinstance(result, web.StreamResponse) else web.json_response(result)

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_post("/v1/models/{name}", chat)
    async with serving(app) as url:
        yield f"{url}/v1", seen


async def no_models(_: web.Request) -> web.Response:
    return web.json_response({"data": []})


def said(text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    return {"id": "x", "object": "chat.completion", "model": "real", "choices": [choice], "usage": usage}


def from_caller(base_url: str, key: str = "", model: str = "") -> interception_pb2.ModelSource:
    endpoint = interception_pb2.Upstream.CallerEndpoint(base_url=base_url, api_key=key)
    return interception_pb2.ModelSource(upstream=interception_pb2.Upstream(caller=endpoint, model=model))


DEFAULT_INFERENCE = interception_pb2.ModelSource(inference=interception_pb2.ModelSource.Inference())


@pytest.mark.requirement("R82", "R87")
async def test_inference_service_answers_a_proxied_call_and_tokens_are_captured(start: Any, inference: Any) -> None:
    """Transparent proxy: no trainer; every call has the engine's tokens and logprobs (R82, R87)."""
    address = await inference({"turns": [{"reply": "hello"}]})
    service = await start(inference_address=address)
    rollout = await service.open(mode=PROXY, source=DEFAULT_INFERENCE)
    answer = await rollout.client().chat.completions.create(model="m", messages=ASK, stream=False)
    assert answer.choices[0].message.content == "hello"
    await service.close(rollout.rollout_id)
    captured = await service.capture(rollout.rollout_id)
    call = captured.calls[0]
    assert call.answerer == trajectory_pb2.ANSWERER_INFERENCE
    assert call.completion.span.count > 0 and call.completion.engine == "scripted"
    # What a script wrote is never trained on.
    assert captured.grade == trajectory_pb2.GRADE_UNUSABLE
    assert "LOGPROBS_SCRIPTED" in [finding.reason for finding in captured.findings]


@pytest.mark.requirement("R63")
@pytest.mark.parametrize("engine", ["formed", "scripted"])
async def test_a_response_format_reaches_the_engine_or_is_refused_by_its_name(
    start: Any, inference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """What an agent asks for in its dialect is passed on, or the call fails: never dropped."""
    formed_engine.install(tmp_path / "plugins")
    monkeypatch.syspath_prepend(tmp_path / "plugins")
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    script = {"strict": False, "turns": [{"reply": '{"ok": true}'}]}
    service = await start(inference_address=await inference(script, engine))
    rollout = await service.open(mode=PROXY, source=DEFAULT_INFERENCE)
    ask = rollout.client().chat.completions.create(model="m", messages=ASK, response_format=form)
    if engine == "formed":
        assert (await ask).choices[0].message.content == '{"ok": true}'
    else:
        with pytest.raises(openai.APIStatusError):
            await ask
    call = (await service.capture(rollout.rollout_id)).calls[0]
    assert json.loads(call.sampling_requested.response_format_json) == form
    if engine == "formed":
        assert json.loads(call.completion.sampling_used.response_format_json) == form
    else:
        assert call.end_reason == "CAPABILITY_MISSING"


@pytest.mark.requirement("R43", "R72", "R74")
async def test_schema_on_which_an_engine_fails_inside_is_the_requests_doing(
    start: Any, inference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine answers one token of something else in between."""
    formed_engine.install(tmp_path / "plugins")
    monkeypatch.syspath_prepend(tmp_path / "plugins")
    schema = {"type": "object", "description": "fails inside"}
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    service = await start(inference_address=await inference({"strict": False, "turns": [{"reply": "x"}]}, "formed"))
    rollout = await service.open(mode=PROXY, source=DEFAULT_INFERENCE)
    with pytest.raises(openai.APIStatusError):
        await rollout.client().chat.completions.create(model="m", messages=ASK, response_format=form)
    [call] = (await service.capture(rollout.rollout_id)).calls
    assert call.end_reason == "REQUEST_FAILS", call.failure


async def test_a_trainer_delegates_a_call_to_the_inference_service(start: Any, inference: Any) -> None:
    """Gate mode: Delegation is accepted, the credit is free, the model source answers."""
    service = await start(inference_address=await inference({"turns": [{"reply": "from the engine"}]}))
    rollout, trainer = await service.open(source=DEFAULT_INFERENCE), await service.trainer()
    asked = asyncio.create_task(rollout.client().chat.completions.create(model="m", messages=ASK))
    call = await trainer.call()
    override = chat_pb2.Sampling(temperature=0.25)
    delegation = pb.Delegation(sampling_override=override)
    result = pb.CallResult(call_id=call.call_id, lease_id=call.lease_id, delegation=delegation)
    acknowledged = await trainer.deliver(result)
    assert list(acknowledged.accepted_call_ids) == [call.call_id]
    assert (await asked).choices[0].message.content == "from the engine"
    taken = (await service.capture(rollout.rollout_id)).calls[0]
    assert taken.answerer == trajectory_pb2.ANSWERER_INFERENCE and not taken.injected
    assert taken.sampling_requested.temperature == 0.25


@pytest.mark.requirement("R22")
async def test_the_first_rollouts_of_a_fresh_service_may_all_open_at_once(start: Any, inference: Any) -> None:
    """They share the fetching of a tokenizer that is not here yet."""
    service = await start(inference_address=await inference({"strict": False, "turns": [{"reply": "hello"}]}))
    opened = await asyncio.gather(*(service.open(source=DEFAULT_INFERENCE) for _ in range(48)))
    assert len({rollout.rollout_id for rollout in opened}) == 48


@pytest.mark.requirement("R27")
async def test_unreachable_service_is_an_error_when_a_rollout_is_opened(start: Any) -> None:
    """UNAVAILABLE with a reason at OpenRollout, not a refused connection in an agent's log."""
    service = await start(inference_address="127.0.0.1:9")
    for options, reason in (
        ({"source": DEFAULT_INFERENCE}, "INFERENCE_UNREACHABLE"),
        ({"source": from_caller("http://127.0.0.1:9/v1")}, "UPSTREAM_UNREACHABLE"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.open(mode=PROXY, **options)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert from_rpc_error(caught.value).reason == reason


@pytest.mark.requirement("R8", "R59")
async def test_a_conversation_beyond_the_models_context_is_refused_for_good(start: Any, inference: Any) -> None:
    """The agent gets 400 with the two numbers, and the rollout's totals say that no retry helps."""
    service = await start(
        inference_address=await inference({"strict": False, "turns": [{"reply": "hello"}]}, max_context_tokens=8)
    )
    rollout = await service.open(mode=PROXY, source=DEFAULT_INFERENCE)
    with pytest.raises(openai.BadRequestError, match="the model's context is 8"):
        await rollout.client().chat.completions.create(model="m", messages=ASK)
    totals = (await service.close(rollout.rollout_id)).totals
    assert (totals.last_failure_reason, totals.last_failure_retriable) == ("CONTEXT_EXCEEDED", False)


@pytest.mark.requirement("R11", "R18", "R30")
@pytest.mark.parametrize("stream", [False, True])
async def test_an_upstream_answers_a_proxied_call_with_the_callers_key_and_model(service: Any, stream: bool) -> None:
    """The body goes out with the model replaced and the caller's key; a stream is a stream."""
    async with upstream(lambda _request, _body: said("from upstream")) as (url, seen):
        rollout = await service.open(mode=PROXY, source=from_caller(url, SECRET, "real-model"))
        client = rollout.client()
        if stream:
            chunks = await client.chat.completions.create(model="m", messages=ASK, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])
        else:
            text = (await client.chat.completions.create(model="m", messages=ASK)).choices[0].message.content or ""
    assert text == "from upstream"
    headers, body = seen[0]
    assert headers["Authorization"] == f"Bearer {SECRET}"
    assert (body["model"], body["messages"]) == ("real-model", ASK)
    assert rollout.token not in json.dumps(seen)
    captured = await service.capture(rollout.rollout_id)
    assert captured.capture_level == trajectory_pb2.CAPTURE_LEVEL_TEXT
    assert captured.calls[0].completion.usage.prompt_tokens == 5


@pytest.mark.requirement("R8")
async def test_upstream_failure_reaches_the_agent_without_the_upstreams_text(service: Any) -> None:
    """What an upstream says of its own stays inside; whether to retry is told by the status."""

    def refuse(_request: web.Request, _body: dict[str, Any]) -> web.Response:
        return web.Response(status=429, text=f"the key {SECRET} is over its limit")

    async with upstream(refuse) as (url, _):
        rollout = await service.open(mode=PROXY, source=from_caller(url, SECRET))
        with pytest.raises(openai.InternalServerError) as caught:
            await rollout.client().chat.completions.create(model="m", messages=ASK)
    assert caught.value.status_code == 503 and "key" not in caught.value.response.text


@pytest.mark.requirement("R117")
@pytest.mark.parametrize("mode", [PROXY, interception_pb2.MODE_BLACK_BOX])
async def test_a_router_before_an_upstream_hears_the_session(start: Any, mode: interception_pb2.Mode) -> None:
    """Each attempt is one; what the agent itself sends under that name does not count."""
    async with upstream(lambda _request, _body: said("hello")) as (url, seen):
        service = await start(upstreams={"routed": {"base_url": url, "session_header": "X-Session-Id"}})
        source = interception_pb2.ModelSource(upstream=interception_pb2.Upstream(name="routed", model="m"))
        rollout = await service.open("r", mode=mode, source=source, attempt=2)
        client = rollout.client(default_headers={"x-session-id": "mine"})
        await client.chat.completions.create(model="m", messages=ASK)
    ((headers, _),) = seen
    assert [value for name, value in headers.items() if name.lower() == "x-session-id"] == ["r#2"]


async def test_black_box_passes_bytes_through_unread_and_counts(service: Any) -> None:
    """Black box: the bytes reach the agent, hop and credential headers do not travel, nothing is captured."""

    def answer(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.Response(body=b"raw \xff bytes", headers={"x-kept": "1", "set-cookie": "a=b"})

    async with upstream(answer) as (url, seen):
        rollout = await service.open(mode=interception_pb2.MODE_BLACK_BOX, source=from_caller(url, SECRET))
        raw = await rollout.client().chat.completions.with_raw_response.create(model="m", messages=ASK)
    assert (raw.content, raw.headers["x-kept"], raw.headers.get("set-cookie")) == (b"raw \xff bytes", "1", None)
    assert seen[0][0]["Authorization"] == f"Bearer {SECRET}"
    closed = await service.close(rollout.rollout_id)
    assert (closed.totals.calls, closed.totals.delivered) == (1, 1)
    captured = await service.capture(rollout.rollout_id, include_bodies=True)
    assert captured.capture_level == trajectory_pb2.CAPTURE_LEVEL_NONE
    assert captured.grade == trajectory_pb2.GRADE_UNUSABLE and captured.calls[0].request_body == b""


@pytest.mark.requirement("R59", "R72")
@pytest.mark.parametrize("mode", [PROXY, interception_pb2.MODE_BLACK_BOX])
async def test_totals_separate_unreachable_upstreams_from_refusing_ones(
    service: Any, mode: interception_pb2.Mode
) -> None:
    """The driver blames nobody else for a request that no upstream would answer, or for a hung-up line."""
    statuses = iter([400, 503, 401, 400])
    async with upstream(lambda _request, _body: web.Response(status=next(statuses))) as (url, _):
        rollout = await service.open(mode=mode, source=from_caller(url, SECRET))
        for _ in range(4):
            with pytest.raises(openai.APIStatusError):
                await rollout.client().chat.completions.create(model="m", messages=ASK)
    totals = (await service.close(rollout.rollout_id)).totals
    assert [(one.reason, one.calls, one.retriable) for one in totals.failures] == [
        ("UPSTREAM_REFUSED", 2, False),
        ("UPSTREAM_REFUSED", 1, True),
        ("UPSTREAM_KEY_REFUSED", 1, False),
    ]


def fails_inside(body: dict[str, Any]) -> bool:
    return "fails" in body["messages"][-1]["content"]


@pytest.mark.requirement("R43", "R72", "R74")
@pytest.mark.parametrize(
    ("answers", "reason", "lost", "asked"),
    [
        ({"request": 500, "other": 200}, "REQUEST_FAILS", 1, ["fails", ".", "fails"]),
        ({"request": "no completion", "other": 200}, "REQUEST_FAILS", 1, ["fails", ".", "fails"]),
        ({"request": 500, "other": 500}, "UPSTREAM_REFUSED", 1, ["fails", "."]),
        ({"request": 503, "other": 200}, "UPSTREAM_REFUSED", 1, ["fails"]),
        ({"request": 504, "other": 200}, "UPSTREAM_REFUSED", 1, ["fails"]),
        ({"request": 429, "other": 200}, "UPSTREAM_REFUSED", 1, ["fails"]),
    ],
)
async def test_request_is_the_cause_where_the_upstream_answers_another_one(
    service: Any, answers: dict[str, Any], reason: str, lost: int, asked: list[str]
) -> None:
    """An upstream that fails it twice, and a fixed one not, is not down; one that is overloaded may be the cause."""

    def answer(_request: web.Request, body: dict[str, Any]) -> Any:
        given = answers["request" if fails_inside(body) else "other"]
        if isinstance(given, str):
            return {"error": given}
        return said("well") if given == 200 else web.Response(status=given)

    async with upstream(answer) as (url, seen):
        rollout = await service.open(mode=PROXY, source=from_caller(url, SECRET))
        client = rollout.client()
        with pytest.raises(openai.APIStatusError):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "fails"}])
    assert [body["messages"][-1]["content"] for _, body in seen] == asked
    totals = (await service.close(rollout.rollout_id)).totals
    assert [(one.reason, one.calls, one.calls_since_answer, one.retriable) for one in totals.failures] == [
        (reason, 1, lost, True)
    ]


@pytest.mark.requirement("R43")
async def test_request_that_an_upstream_fails_once_is_answered(service: Any) -> None:
    """The second try helps an honest agent, too."""
    left = [500]

    def answer(_request: web.Request, body: dict[str, Any]) -> Any:
        return web.Response(status=left.pop()) if left and fails_inside(body) else said("well")

    async with upstream(answer) as (url, _):
        rollout = await service.open(mode=PROXY, source=from_caller(url, SECRET))
        messages: list[Any] = [{"role": "user", "content": "fails"}]
        answered = await rollout.client().chat.completions.create(model="m", messages=messages)
    assert answered.choices[0].message.content == "well"
    assert (await service.close(rollout.rollout_id)).totals.failed == 0


@pytest.mark.requirement("R72", "R74")
async def test_calls_of_a_flood_that_expire_between_answers_are_not_lost(service: Any) -> None:
    """The upstream holds ten calls and answers the next one; of those that came before it, none counts."""
    released, all_wait = asyncio.Event(), asyncio.Event()
    flooding, waiting = set[str](), set[str]()
    answered: Any = None

    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not fails_inside(body):
            return web.json_response(said("well"))
        waiting.add(body["messages"][-1]["content"])
        if waiting >= flooding:
            all_wait.set()
        await released.wait()
        return web.json_response(said("late"))

    app = web.Application()
    app.router.add_get("/v1/models", no_models)
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        for limit in limits(3.0):
            budgets = interception_pb2.Budgets(call_timeout=Duration(seconds=int(limit)))
            rollout = await service.open(mode=PROXY, source=from_caller(url, SECRET), budgets=budgets)
            client = rollout.client()

            async def ask(text: str, client: openai.AsyncOpenAI = client) -> Any:
                return await client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])

            all_wait.clear()
            flooding = {f"fails after {limit:g} s: {number}" for number in range(10)}
            flood = [asyncio.create_task(ask(text)) for text in flooding]
            everyone = asyncio.create_task(all_wait.wait())
            await asyncio.wait([everyone, *flood], return_when=asyncio.FIRST_COMPLETED)
            (answered,) = await asyncio.gather(ask("the next one"), return_exceptions=True)
            in_time = everyone.done() and not any(one.done() for one in flood)
            everyone.cancel()
            ended = await asyncio.gather(*flood, return_exceptions=True)
            if in_time and not isinstance(answered, BaseException):
                break  # else one of them expired before the next one was answered
        else:
            raise AssertionError(f"no limit was long enough: {answered!r}")
        assert all(isinstance(one, openai.InternalServerError) and one.status_code == 504 for one in ended), ended
        totals = (await service.close(rollout.rollout_id)).totals
        assert (totals.expired, totals.expired_since_answer, totals.delivered) == (10, 0, 1)
    finally:
        released.set()
        await runner.cleanup()


@pytest.mark.requirement("R59", "R72")
async def test_agent_leaving_mid_answer_is_not_an_upstream_failure(
    service: Any,
) -> None:
    """The call counts as cancelled: else an agent could have its own failure told as the upstream's."""
    ended = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"data: " + b"x" * 60_000 + b"\n\n")
        finally:
            ended.set()

    app = web.Application()
    app.router.add_get("/v1/models", no_models)
    app.router.add_post("/v1/chat/completions", endless)
    async with serving(app) as url:
        rollout = await service.open(mode=interception_pb2.MODE_BLACK_BOX, source=from_caller(f"{url}/v1", SECRET))
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {rollout.token}"}) as http:
            answer = await http.post(f"{rollout.base_url}/chat/completions", json={"messages": ASK})
            assert await answer.content.readexactly(6) == b"data: "
            answer.close()
        await ended.wait()
    totals = (await service.close(rollout.rollout_id)).totals
    assert (totals.calls, totals.failed, totals.cancelled) == (1, 0, 1)


@pytest.mark.requirement("R18")
async def test_broken_black_box_answer_breaks_off_for_the_agent(service: Any) -> None:
    """Nothing is added to what came of it, which a client would take for the rest of the answer."""

    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        assert request.transport is not None
        request.transport.close()
        return response

    app = web.Application()
    app.router.add_get("/v1/models", no_models)
    app.router.add_post("/v1/chat/completions", half)
    async with serving(app) as url:
        rollout = await service.open(mode=interception_pb2.MODE_BLACK_BOX, source=from_caller(f"{url}/v1", SECRET))
        where = urlsplit(f"{rollout.base_url}/chat/completions")
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        body = json.dumps({"messages": ASK}).encode()
        head = f"POST {where.path} HTTP/1.0\r\nauthorization: Bearer {rollout.token}\r\ncontent-length: {len(body)}"
        writer.write(head.encode() + b"\r\ncontent-type: application/json\r\n\r\n" + body)
        answer = await reader.read()
        writer.close()
    assert answer.partition(b"\r\n\r\n")[2] == b"half"
    totals = (await service.close(rollout.rollout_id)).totals
    assert [(one.reason, one.retriable) for one in totals.failures] == [("UPSTREAM_UNREACHABLE", True)]


@pytest.mark.requirement("R11", "R18")
async def test_black_box_passes_generate_content_with_googles_key_header(service: Any) -> None:
    """The version is the base URL's, path and query arrive as they were, the agent's own key does not."""
    async with upstream(lambda request, _body: web.json_response({"asked": request.raw_path})) as (url, seen):
        rollout = await service.open(mode=interception_pb2.MODE_BLACK_BOX, source=from_caller(url, SECRET))
        path = "/v1beta/models/m:streamGenerateContent?alt=sse"
        async with aiohttp.ClientSession(headers={"x-goog-api-key": rollout.token}) as http:
            root = rollout.base_url.removesuffix("/v1")
            async with http.post(root + path, json={"contents": ASK}) as answer:
                assert await answer.json() == {"asked": path.replace("/v1beta/", "/v1/")}
            async with http.post(f"{root}/v1beta/files", json={}) as answer:
                assert (answer.status, (await answer.json())["error"]["status"]) == (400, "INVALID_ARGUMENT")
    headers, body = seen[0]
    assert (headers["x-goog-api-key"], body) == (SECRET, {"contents": ASK})
    assert "Authorization" not in headers
    captured = await service.capture(rollout.rollout_id)
    assert [call.dialect for call in captured.calls] == [trajectory_pb2.DIALECT_GENERATE_CONTENT]


@pytest.mark.requirement("R11", "R54")
async def test_a_callers_endpoint_is_refused_where_the_operator_says_so(start: Any) -> None:
    """UPSTREAM_NOT_ALLOWED before anything is asked."""
    service = await start(caller_endpoints=False)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.open(mode=PROXY, source=from_caller("http://127.0.0.1:9/v1"))
    assert from_rpc_error(caught.value).reason == "UPSTREAM_NOT_ALLOWED"


@pytest.mark.requirement("R11")
async def test_an_operators_key_goes_to_the_operators_address_only(start: Any) -> None:
    """A caller who names the same address gets no key; the named endpoint does."""
    async with upstream(lambda _request, _body: said("ok")) as (url, seen):
        service = await start(upstreams={"main": {"base_url": url, "api_key": "operators-key"}})
        named = interception_pb2.ModelSource(upstream=interception_pb2.Upstream(name="main"))
        for source in (named, from_caller(url)):
            rollout = await service.open(mode=PROXY, source=source)
            await rollout.client().chat.completions.create(model="m", messages=ASK)
    assert [headers.get("Authorization") for headers, _ in seen] == ["Bearer operators-key", None]


@pytest.mark.requirement("R82")
async def test_upstream_with_token_ids_is_captured_exactly(service: Any) -> None:
    """A server that returns token ids is asked for them; the second turn continues the first one's ids."""
    prompts = [[1, 2, 3], [1, 2, 3, 10, 11, 4, 5]]

    def answer(_request: web.Request, body: dict[str, Any]) -> dict[str, Any]:
        assert body["return_token_ids"] and body["logprobs"]
        value = said("one")
        value["prompt_token_ids"] = prompts[(len(body["messages"]) - 1) // 2]
        value["choices"][0]["token_ids"] = [10, 11]
        value["choices"][0]["logprobs"] = {"content": [{"token": "x", "logprob": number} for number in (-0.25, 1.2e-7)]}
        return value

    async with upstream(answer, owner="vllm") as (url, _):
        rollout = await service.open(mode=PROXY, source=from_caller(url))
        client = rollout.client()
        await client.chat.completions.create(model="m", messages=ASK)
        more = [*ASK, {"role": "assistant", "content": "one"}, {"role": "user", "content": "go on"}]
        await client.chat.completions.create(model="m", messages=more)
    await service.close(rollout.rollout_id)
    captured = await service.capture(rollout.rollout_id)
    assert captured.grade == trajectory_pb2.GRADE_EXACT
    (sample,) = captured.samples
    assert list(np.frombuffer(sample.input_ids, "<i4")) == [1, 2, 3, 10, 11, 4, 5, 10, 11]
    assert list(sample.loss_mask) == [0, 0, 0, 1, 1, 0, 0, 1, 1]


@pytest.mark.requirement("R88", "R82")
@pytest.mark.parametrize(
    "change",
    [
        {"usage": {"prompt_tokens": 1e30}},
        {"usage": {"prompt_tokens": 1, "completion_tokens": -5}},
        {"prompt_token_ids": [[1, 2], [3, 4]]},
        {"prompt_token_ids": [-5, 1]},
        {"prompt_token_ids": "12"},
        {"token_ids": [1.5, 2]},
        {"logprob": 1e300},
        {"logprob": -1e300},
    ],
    ids=str,
)
async def test_numbers_that_cannot_be_are_no_answer(service: Any, change: dict[str, Any]) -> None:
    """An endpoint's counts and ids are its own; nobody else's rollouts, and no budget, may suffer from them."""

    def answer(_request: web.Request, _body: dict[str, Any]) -> dict[str, Any]:
        choice = {**said("one")["choices"][0], "token_ids": change.get("token_ids", [10, 11])}
        choice["logprobs"] = {"content": [{"token": "x", "logprob": change.get("logprob", -1)}] * 2}
        return {**said("one"), "prompt_token_ids": [1, 2, 3], **change, "choices": [choice]}

    async with upstream(answer, owner="vllm") as (url, _):
        rollout = await service.open(mode=PROXY, source=from_caller(url))
        with pytest.raises(openai.APIStatusError):
            await rollout.client().chat.completions.create(model="m", messages=ASK)
    (listed,) = (await service.gate.ListRollouts(gate_pb2.ListRolloutsRequest())).rollouts
    assert (listed.totals.prompt_tokens, listed.totals.completion_tokens) == (0, 0)
    captured = await service.capture(rollout.rollout_id)
    assert [call.end_reason for call in captured.calls] == ["UPSTREAM_ANSWER_INVALID"]
