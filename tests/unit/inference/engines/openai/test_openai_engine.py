"""The engine `openai`: what it finds out of an endpoint, and every way in which an endpoint fails."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from hypothesis import example, given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tests.support.endpoints.loopback import event_stream, send_event, unused_port
from tests.support.endpoints.token_endpoint import CONTEXT, PLAIN, VOCAB, TokenEndpoint, problem, token_endpoint
from tests.support.waiting import GUARD_S, eventually

from penstock.chat.v1 import chat_pb2
from penstock_chassis.errors import (
    FailedPrecondition,
    InvalidArgument,
    PenstockError,
    ResourceExhausted,
    Unavailable,
    Unsupported,
)
from penstock_codec import tiny_tokenizer
from penstock_inference.engines.base import (
    Delta,
    Done,
    EngineOptions,
    FinishReason,
    GenerateRequest,
    LogprobsMode,
    PauseMode,
    Sampling,
    Started,
    UpdateFormat,
    VersionSpan,
)
from penstock_inference.engines.openai import wire
from penstock_inference.engines.openai.answers import read_choice, read_top_scores
from penstock_inference.engines.openai.engine import OpenAiEngine
from penstock_inference.engines.openai.probe import mode_of
from penstock_inference.engines.openai.wire import Endpoint
from penstock_inference.rpc.convert import sampling

PROMPT = np.array([5, 6, 7], np.int32)
KEY = "sk-not-to-be-seen"
Open = Callable[..., Any]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A model directory that says no more than how many tokens there are."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "eos_token_id": 2}))
    return tmp_path


@pytest.fixture
async def opened(model_dir: Path) -> AsyncIterator[Open]:
    """Opens engines that end with the test: `opened(endpoint or URL, option=...)`."""
    async with AsyncExitStack() as stack:

        async def open_(there: TokenEndpoint | str, *, settings: dict[str, Any] | None = None, **extra: str) -> Any:
            url = there if isinstance(there, str) else there.base_url
            options: dict[str, Any] = {"model_dir": model_dir, "model_name": "ours"} | (settings or {})
            engine = await OpenAiEngine.open(EngineOptions(**options, extra={"base_url": url} | extra))
            stack.push_async_callback(engine.aclose)
            return engine

        yield open_


@pytest.fixture
async def endpoint() -> AsyncIterator[TokenEndpoint]:
    """One that gives all there is."""
    async with token_endpoint() as here:
        yield here


def request(name: str = "r", *, stream: bool = False, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(name, PROMPT, Sampling(**({"max_tokens": 4} | sampling)), stream=stream)


async def finished(engine: OpenAiEngine, wanted: GenerateRequest) -> Done:
    done = [event async for event in engine.generate(wanted)][-1]
    assert isinstance(done, Done)
    return done


async def failed(engine: OpenAiEngine, wanted: GenerateRequest) -> PenstockError:
    with pytest.raises(PenstockError) as caught:
        await finished(engine, wanted)
    return caught.value


@pytest.mark.requirement("R82")
@pytest.mark.parametrize(
    ("mode", "found"),
    [
        ("processed", LogprobsMode.PROCESSED),
        ("raw", LogprobsMode.RAW),
        ("warmed", LogprobsMode.NONE),
        ("none", LogprobsMode.NONE),
    ],
)
async def test_distribution_of_an_endpoints_logprobs_is_measured(
    endpoint: TokenEndpoint, opened: Open, mode: Any, found: LogprobsMode
) -> None:
    """What cannot be told is not passed on, and nothing is made up in its place."""
    endpoint.mode = mode
    engine = await opened(endpoint)
    info = engine.info()
    assert info.logprobs_mode is found and info.capabilities.logprobs == (found is not LogprobsMode.NONE)
    assert info.capabilities.token_ids and info.engine_version == "test 1.2"
    assert ("top_logprobs" in info.sampling_fields) == info.capabilities.logprobs
    done = await finished(engine, request())
    assert done.token_ids.tolist() == [0, 0, 0, 0] and done.token_ids.dtype == np.int32
    assert done.logprobs.size == (4 if info.capabilities.logprobs else 0)


@pytest.mark.requirement("R82")
def test_logprobs_mode_is_reported_only_when_unambiguous() -> None:
    """Flat, certain and half-processed distributions are nobody's proof."""
    flat = {0: -1.0, 1: -1.0}
    assert mode_of(flat, flat, flat) is None
    certain = {0: -0.001, 1: -9.0}
    assert mode_of(certain, {0: -0.1, 1: -4.5}, {0: 0.0}) is None
    plain = {0: -1.0, 1: -2.0}
    assert mode_of(plain, plain, {0: -1.0}) is LogprobsMode.RAW
    assert mode_of(plain, {0: -1.5, 1: -2.0}, {0: 0.0}) is LogprobsMode.PROCESSED
    assert mode_of(plain, {0: -1.5, 1: -2.0}, {0: -1.0}) is None
    assert mode_of(plain, {5: -1.0}, {0: 0.0}) is None


@pytest.mark.requirement("R82")
async def test_operators_logprobs_mode_must_not_contradict_the_measured_one(
    endpoint: TokenEndpoint, opened: Open
) -> None:
    """A statement fills a gap; it does not overrule a measurement."""
    endpoint.mode = "warmed"
    assert (await opened(endpoint, logprobs="processed")).info().logprobs_mode is LogprobsMode.PROCESSED
    endpoint.mode = "raw"
    with pytest.raises(InvalidArgument) as caught:
        await opened(endpoint, logprobs="processed")
    assert caught.value.violations[0].field == "engine_options.logprobs"
    assert (await opened(endpoint, logprobs="none")).info().logprobs_mode is LogprobsMode.NONE


@pytest.mark.requirement("R82")
async def test_completion_has_ids_logprobs_and_the_operators_version(endpoint: TokenEndpoint, opened: Open) -> None:
    """Each token has its logprob; spans say what was said of the weights."""
    engine = await opened(endpoint, policy_version="12")
    events = [event async for event in engine.generate(request(stream=True, top_logprobs=2, seed=5))]
    assert isinstance(events[0], Started) and events[0].policy_version == 12
    deltas = [event for event in events if isinstance(event, Delta)]
    done = events[-1]
    assert isinstance(done, Done) and done.version_spans == (VersionSpan(12, 0, 4),)
    assert np.concatenate([delta.token_ids for delta in deltas]).tolist() == done.token_ids.tolist()
    assert np.concatenate([delta.logprobs for delta in deltas]).tolist() == done.logprobs.tolist()
    expected = -math.log(sum(math.exp(value) for value in PLAIN))
    assert done.logprobs.tolist() == pytest.approx([expected] * 4)
    assert done.top is not None and done.top.token_ids.shape == (4, 2) and done.top.token_ids[0, 0] == 0
    assert (done.finish_reason, done.prompt_tokens, done.cached_tokens) == (FinishReason.LENGTH, 3, 1)
    asked = endpoint.bodies[0]
    assert (asked["prompt"], asked["model"], asked["seed"], asked["logprobs"]) == (PROMPT.tolist(), "served", 5, 2)
    assert engine.stats().sampled_tokens == 4 and engine.stats().finished == 1


@pytest.mark.requirement("R117")
async def test_a_header_names_the_session_for_a_router(endpoint: TokenEndpoint, opened: Open) -> None:
    """vLLM's, SGLang's and Dynamo's have names of their own; what a client chose as an id stays one value."""
    engine = await opened(endpoint, session_header="X-SMG-Routing-Key")
    for session in ("r.d0.1#2", "odd\r\nx-other: 1", ""):
        await finished(engine, replace(request(), session_id=session))
    sent = [headers.get("x-smg-routing-key") for headers in endpoint.headers]
    assert sent == ["r.d0.1#2", "odd%0D%0Ax-other:%201", None]
    plain = await opened(endpoint)
    await finished(plain, replace(request(), session_id="s"))
    assert "s" not in endpoint.headers[-1].values()
    with pytest.raises(InvalidArgument, match="session_header"):
        await opened(endpoint, session_header="Authorization")


@pytest.mark.requirement("R82")
async def test_completions_of_unnamed_weights_have_no_version_span(endpoint: TokenEndpoint, opened: Open) -> None:
    """An unknown version is no version, and none that is asked for can be promised."""
    engine = await opened(endpoint)
    assert (await finished(engine, request())).version_spans == ()
    plain = GenerateRequest("v", PROMPT, Sampling(max_tokens=1))
    for wanted in (replace(plain, min_policy_version=1), replace(plain, exact_policy_version=0)):
        error = await failed(engine, wanted)
        assert (type(error), error.reason) == (FailedPrecondition, "POLICY_VERSION_UNAVAILABLE")
    with pytest.raises(Unsupported):
        await engine.score(PROMPT)
    for refused in (engine.begin_update(1, "", UpdateFormat.FULL), engine.commit_update(), engine.push_tensors({})):
        with pytest.raises(Unsupported) as caught:
            await refused
        assert caught.value.reason == "CAPABILITY_MISSING"


@pytest.mark.requirement("R63")
async def test_a_version_that_will_never_come_is_refused_at_once(endpoint: TokenEndpoint, opened: Open) -> None:
    """Nobody waits for a version that only a new configuration brings."""
    engine = await opened(endpoint, policy_version="3")
    fine = GenerateRequest("v", PROMPT, Sampling(max_tokens=1), min_policy_version=2)
    assert (await finished(engine, fine)).version_spans == (VersionSpan(3, 0, 1),)
    later = GenerateRequest("v", PROMPT, Sampling(max_tokens=1), min_policy_version=4)
    assert (await failed(engine, later)).reason == "POLICY_VERSION_UNAVAILABLE"


@pytest.mark.requirement("R82")
async def test_prompts_are_scored_when_the_endpoint_returns_their_logprobs(
    endpoint: TokenEndpoint, opened: Open
) -> None:
    """One logprob for each token but the first."""
    engine = await opened(endpoint, policy_version="0")
    assert engine.info().capabilities.score
    scores = await engine.score(PROMPT)
    plain = endpoint.table({"temperature": 1.0})
    assert scores.logprobs.tolist() == pytest.approx([plain[6], plain[7]])
    with pytest.raises(InvalidArgument):
        await engine.score(PROMPT, temperature=0.5)


@pytest.mark.requirement("R82", "R132")
async def test_a_scored_prompt_has_the_likeliest_tokens_of_each_position(endpoint: TokenEndpoint, opened: Open) -> None:
    """The endpoint also lists the prompt's own token, which is left out where it is less likely."""
    engine = await opened(endpoint, policy_version="0")
    plain = endpoint.table({"temperature": 1.0})
    likeliest = sorted(plain, key=lambda token: -plain[token])[:3]
    for prompt in (PROMPT, np.array([likeliest[2], likeliest[0], likeliest[1]], np.int32)):
        scores = await engine.score(prompt, top_logprobs=3)
        assert scores.logprobs.tolist() == pytest.approx([plain[token] for token in prompt.tolist()[1:]])
        assert scores.top is not None and scores.top.token_ids.tolist() == [likeliest] * 2
        assert scores.top.logprobs[0].tolist() == pytest.approx([plain[token] for token in likeliest])
    with pytest.raises(InvalidArgument, match="top_logprobs"):
        await engine.score(PROMPT, top_logprobs=21)


@pytest.mark.requirement("R132")
def test_an_endpoint_that_lists_fewer_tokens_than_asked_for_is_refused() -> None:
    """Rows of unequal length would be read as other tokens' alternatives."""
    row = {"1": {"logprob": -0.5}, "2": {"logprob": -1.0}}
    answer = {"choices": [{"prompt_logprobs": [None, row]}]}
    assert read_top_scores(answer, 2, VOCAB).token_ids.tolist() == [[1, 2]]
    for count, wrong in ((3, row), (1, {"x": {"logprob": -0.5}}), (1, {str(VOCAB): {"logprob": -0.5}}), (1, {"1": {}})):
        with pytest.raises(FailedPrecondition) as caught:
            read_top_scores({"choices": [{"prompt_logprobs": [None, wrong]}]}, count, VOCAB)
        assert caught.value.reason == "UPSTREAM_ANSWER_INVALID"


@pytest.mark.requirement("R63")
async def test_a_request_that_cannot_fit_is_refused_before_it_is_sent(endpoint: TokenEndpoint, opened: Open) -> None:
    """Ids outside the vocabulary and prompts beyond the context are named by their field."""
    engine = await opened(endpoint)
    foreign = GenerateRequest("f", np.array([1, VOCAB], np.int32), Sampling(max_tokens=1))
    long = GenerateRequest("l", np.ones(CONTEXT, np.int32), Sampling(max_tokens=1))
    for wanted, field in ((foreign, "prompt_token_ids[1]"), (long, "prompt_token_ids")):
        error = await failed(engine, wanted)
        assert (error.reason, error.violations[0].field) == ("FIELD_INVALID", field)
    assert endpoint.bodies == []


async def _html(request: web.Request, body: Any) -> web.StreamResponse:
    return web.Response(text="<html>Welcome</html>", content_type="text/html")


async def _html_as_json(request: web.Request, body: Any) -> web.StreamResponse:
    return web.Response(text="<html>Welcome</html>", content_type="application/json")


async def _redirect(request: web.Request, body: Any) -> web.StreamResponse:
    return web.Response(status=307, headers={"location": "http://127.0.0.1:1/v1/completions"})


async def _garbage(request: web.Request, body: Any) -> web.StreamResponse:
    response = await event_stream(request)
    await response.write(b"data: {nonsense\n\n")
    return response


async def _inside(request: web.Request, body: Any) -> web.StreamResponse:
    response = await event_stream(request)
    await send_event(response, {"error": {"message": "engine dead", "code": 500}})
    return response


def _with(**changes: Any) -> Any:
    """Otherwise good events, each with these changes."""

    async def fault(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await event_stream(request)
        choice = TokenEndpoint().choice(body, 0) | {"finish_reason": "stop"} | changes
        await send_event(response, {"choices": [choice]})
        await response.write(b"data: [DONE]\n\n")
        return response

    return fault


def _status(status: int, **headers: str) -> Any:
    async def fault(request: web.Request, body: Any) -> web.StreamResponse:
        return problem(status, f"no, {KEY}", "top_p" if status == 400 else None, **headers)

    return fault


def _logprobs(values: list[Any], tokens: list[str] | None = None) -> dict[str, Any]:
    return {"logprobs": {"tokens": tokens or ["token_id:0"] * len(values), "token_logprobs": values}}


INVALID = (FailedPrecondition, "UPSTREAM_ANSWER_INVALID")


@pytest.mark.requirement("R8", "R63", "R82")
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (_html, INVALID),
        (_html_as_json, INVALID),
        (_redirect, INVALID),
        (_garbage, INVALID),
        (_inside, (Unavailable, "UPSTREAM_FAILED")),
        (_with(token_ids=[VOCAB]), INVALID),
        (_with(token_ids=[-1]), INVALID),
        (_with(token_ids=[True]), INVALID),
        (_with(token_ids="0"), INVALID),
        (_with(token_ids=[0, 1]), INVALID),
        (_with(token_ids=[], logprobs=None), INVALID),
        (_with(logprobs=None), INVALID),
        (_with(**_logprobs([-1.0, -1.0])), INVALID),
        (_with(**_logprobs([-1.0], ["token_id:5"])), INVALID),
        (_with(**_logprobs([0.5])), INVALID),
        (_with(**_logprobs(["-1"])), (PenstockError, "LOGITS_NOT_FINITE")),
        (_with(**_logprobs([None])), (PenstockError, "LOGITS_NOT_FINITE")),
        (_with(**_logprobs([-9999.0])), (PenstockError, "LOGITS_NOT_FINITE")),
        (_with(token_ids=[0] * 5, **_logprobs([-1.0] * 5)), INVALID),
        (_with(finish_reason="content_filter"), INVALID),
        (_with(finish_reason=None), (Unavailable, "UPSTREAM_CUT_OFF")),
        (_with(prompt_token_ids=[5, 6]), (FailedPrecondition, "UPSTREAM_PROMPT_CHANGED")),
        (_status(400), (InvalidArgument, "FIELD_INVALID")),
        (_status(401), (FailedPrecondition, "UPSTREAM_KEY_REFUSED")),
        (_status(404), INVALID),
        (_status(418), INVALID),
        (_status(429, **{"retry-after": "7"}), (ResourceExhausted, "UPSTREAM_RATE_LIMIT")),
        (_status(503), (Unavailable, "UPSTREAM_FAILED")),
    ],
)
async def test_invalid_answer_is_a_typed_error_and_nothing_is_made_up(
    opened: Open, fault: Any, expected: tuple[type[PenstockError], str]
) -> None:
    """HTML, broken streams, foreign ids, missing logprobs, refusals; the key is in no message."""
    async with token_endpoint(key=KEY) as endpoint:
        engine = await opened(endpoint, settings={"upstream_api_key": KEY})
        endpoint.fault = fault
        with capture_logs() as logs:
            error = await failed(engine, request())
        assert isinstance(error, expected[0]) and error.reason == expected[1]
        assert KEY not in f"{error.message} {error.violations} {logs}"
        if error.reason == "UPSTREAM_RATE_LIMIT":
            assert error.retry_after_s == 7.0
        if error.reason == "FIELD_INVALID":
            assert error.violations[0].field == "sampling.top_p"
        if error.reason == "UPSTREAM_KEY_REFUSED":
            # Found out in the midst: it is asked again, and works as soon as it is taken.
            endpoint.fault = None
            await eventually(lambda: not engine._lookout.lost, "the key is taken again")
        endpoint.fault = None
        await eventually(lambda: not engine._lookout.lost, "it is asked again where that was worth it")
        assert (await finished(engine, request())).token_ids.size == 4
        assert engine.stats().failed == 1 and engine.stats().running == 0


@pytest.mark.requirement("R8")
async def test_shortened_refusal_shows_no_part_of_the_key(opened: Open) -> None:
    """Wherever a server repeats it."""
    async with token_endpoint(key=KEY) as endpoint:
        engine = await opened(endpoint, settings={"upstream_api_key": KEY})

        async def refuse(request: web.Request, body: Any) -> web.StreamResponse:
            return problem(400, "x" * 288 + KEY + "y" * 100)

        endpoint.fault = refuse
        error = await failed(engine, request())
        assert "[key]" in error.message and KEY[:4] not in f"{error.message} {error.violations}"


@pytest.mark.requirement("R82")
async def test_a_stream_that_just_ends_is_no_completion(endpoint: TokenEndpoint, opened: Open) -> None:
    """What came before the break is dropped, and the caller may try again."""
    engine = await opened(endpoint)
    endpoint.fault = lambda request, body: endpoint.stream(request, body, events=2)
    error = await failed(engine, request())
    assert (type(error), error.reason, error.retry_after_s) == (Unavailable, "UPSTREAM_CUT_OFF", 1.0)


@pytest.mark.requirement("R38")
async def test_an_endpoint_that_falls_silent_is_given_up(endpoint: TokenEndpoint, opened: Open) -> None:
    """Silence has a limit, after which the error is typed; never a hang."""
    engine = await opened(endpoint, idle_timeout_s="0.2")

    async def silent(request: web.Request, body: Any) -> web.StreamResponse:
        await event_stream(request)
        await asyncio.Event().wait()
        raise AssertionError

    endpoint.fault = silent
    error = await failed(engine, request())
    assert (type(error), error.reason) == (Unavailable, "UPSTREAM_SILENT")


@pytest.mark.requirement("R26")
@pytest.mark.parametrize(("dead", "asked"), [(1, 2), (9, 2)])
async def test_a_connection_that_died_in_the_pool_is_replaced_once(
    endpoint: TokenEndpoint, opened: Open, dead: int, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing came back, so nothing is generated twice; whoever never answers is not asked for ever."""
    monkeypatch.setattr(wire, "KEEPALIVE_S", 3600.0)  # the connection of the probes stays in the pool
    engine = await opened(endpoint)

    async def dying(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(endpoint.bodies) <= dead and request.transport is not None:
            request.transport.abort()
        return await endpoint.stream(request, body)

    endpoint.fault = dying
    if dead == 1:
        assert (await finished(engine, request())).token_ids.size == 4
    else:
        assert (await failed(engine, request())).reason == "UPSTREAM_UNREACHABLE"
    assert len(endpoint.bodies) == asked


@pytest.mark.requirement("R26")
async def test_a_prompt_is_not_sent_again_when_a_new_connection_breaks(endpoint: TokenEndpoint) -> None:
    """The server may have it, and would generate twice; the caller decides."""

    async def dying(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionError

    endpoint.fault = dying
    there = Endpoint(endpoint.base_url, None, connections=1, connect_s=GUARD_S, idle_s=GUARD_S)
    with pytest.raises(Unavailable) as caught:
        await anext(there.events("/completions", {"model": "served", "prompt": [1], "stream": True, "max_tokens": 1}))
    await there.aclose()
    assert (caught.value.reason, len(endpoint.bodies)) == ("UPSTREAM_UNREACHABLE", 1)


async def _endless(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await event_stream(request)
    await send_event(response, {"choices": [TokenEndpoint().choice(body, 0)]})
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.requirement("R23")
async def test_an_abort_ends_the_request_over_there_and_keeps_what_came(endpoint: TokenEndpoint, opened: Open) -> None:
    """By request, by session, or all; closing the connection is what aborts."""
    engine = await opened(endpoint)
    endpoint.fault = _endless
    events = engine.generate(request(stream=True))
    async with aclosing(events):
        assert isinstance(await anext(events), Started) and isinstance(await anext(events), Delta)
        assert await engine.abort(request_ids=["other"]) == 0
        assert await engine.abort(request_ids=["r"]) == 1
        done = await anext(events)
    assert isinstance(done, Done) and done.finish_reason is FinishReason.ABORT and done.token_ids.tolist() == [0]
    await asyncio.wait_for(endpoint.left.wait(), 60)
    assert engine.stats().aborted == 1


@pytest.mark.requirement("R23")
async def test_cancelled_caller_ends_the_upstream_request(endpoint: TokenEndpoint, opened: Open) -> None:
    """A cancelled call leaves nothing running."""
    engine = await opened(endpoint)
    endpoint.fault = _endless
    async with aclosing(engine.generate(request(stream=True))) as events:
        await anext(events)
    await asyncio.wait_for(endpoint.left.wait(), 60)
    assert engine.stats().running == 0


@pytest.mark.requirement("R63")
async def test_pause_holds_new_requests_and_is_refused_when_it_must_freeze(
    endpoint: TokenEndpoint, opened: Open
) -> None:
    """WAIT and ABORT are ours to keep, KEEP is not."""
    engine = await opened(endpoint)
    with pytest.raises(Unsupported) as caught:
        await engine.pause(PauseMode.KEEP)
    assert caught.value.reason == "CAPABILITY_MISSING"
    await engine.pause(PauseMode.WAIT)
    held = asyncio.create_task(finished(engine, request()))
    await eventually(lambda: engine.stats().waiting == 1, "it waits")
    assert engine.info().paused and (await failed(engine, request())).reason == "REQUEST_IN_FLIGHT"
    await engine.resume()
    assert (await held).finish_reason is FinishReason.LENGTH
    endpoint.fault = _endless
    running = asyncio.create_task(finished(engine, request()))
    await eventually(lambda: engine.stats().running == 1, "it runs")
    await engine.pause(PauseMode.ABORT)
    assert (await running).finish_reason is FinishReason.ABORT


@pytest.mark.requirement("R26")
async def test_waiting_requests_are_bounded(endpoint: TokenEndpoint, opened: Open) -> None:
    """The rest is refused with a delay, and no connection is opened for it."""
    engine = await opened(endpoint, settings={"max_concurrency": 1, "max_waiting": 0})
    endpoint.fault = _endless
    running = asyncio.create_task(finished(engine, request("a")))
    await eventually(lambda: engine.stats().running == 1 and len(endpoint.bodies) == 1, "it runs")
    error = await failed(engine, request("b"))
    assert (error.reason, len(endpoint.bodies)) == ("QUEUE_FULL", 1) and error.retry_after_s
    await engine.abort(everything=True)
    await running


@pytest.mark.requirement("R27")
async def test_absent_endpoint_is_awaited_and_every_call_reports_it(opened: Open) -> None:
    """UNAVAILABLE with its reason and a delay until it answers; then what it gives is found out."""
    port = unused_port()
    engine = await opened(f"http://127.0.0.1:{port}/v1")
    with pytest.raises(Unavailable) as caught:
        engine.info()
    for error in (caught.value, await failed(engine, request())):
        assert error.reason == "UPSTREAM_UNREACHABLE" and error.retry_after_s
    async with token_endpoint(port):
        await eventually(lambda: not engine._lookout.lost, "it is found")
        assert (await finished(engine, request())).token_ids.size == 4


@pytest.mark.requirement("R27")
async def test_returned_endpoint_is_found_with_its_present_features(opened: Open) -> None:
    """Another server may have come up at the same address, with other logprobs."""
    port = unused_port()
    async with token_endpoint(port) as endpoint:
        engine = await opened(endpoint)
    error = await failed(engine, request())
    assert (type(error), error.reason) == (Unavailable, "UPSTREAM_UNREACHABLE")
    with pytest.raises(Unavailable):
        engine.info()
    async with token_endpoint(port, mode="raw"):
        await eventually(lambda: not engine._lookout.lost, "it is found")
        assert engine.info().logprobs_mode is LogprobsMode.RAW


@pytest.mark.requirement("R27", "R82")
async def test_endpoint_replaced_mid_stream_is_probed_again(endpoint: TokenEndpoint, opened: Open) -> None:
    """A connection that breaks is all that is seen of it, and what was known of the other does not hold."""
    engine = await opened(endpoint)

    async def replaced(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await endpoint.stream(request, body, events=2)
        endpoint.mode, endpoint.fault = "raw", None
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionError

    endpoint.fault = replaced
    assert (await failed(engine, request())).reason == "UPSTREAM_CUT_OFF"
    await eventually(lambda: not engine._lookout.lost, "it is asked again")
    assert engine.info().logprobs_mode is LogprobsMode.RAW


@pytest.mark.requirement("R3", "R8")
@pytest.mark.parametrize(
    ("there", "extra", "settings", "reason"),
    [
        ({"models": ("a", "b")}, {}, {}, "UPSTREAM_MODEL_UNKNOWN"),
        ({}, {"model": "other"}, {}, "UPSTREAM_MODEL_UNKNOWN"),
        ({"key": KEY}, {}, {}, "UPSTREAM_KEY_REFUSED"),
        ({"key": KEY}, {}, {"upstream_api_key": "sk-wrong"}, "UPSTREAM_KEY_REFUSED"),
        ({"context": None}, {}, {}, "ENGINE_OPTIONS_INVALID"),
        ({}, {"base_url": "ftp://x"}, {}, "ENGINE_OPTIONS_INVALID"),
        ({}, {"base_url": "http://u:p@127.0.0.1/v1"}, {}, "ENGINE_OPTIONS_INVALID"),
        ({}, {"policy_version": "-1"}, {}, "ENGINE_OPTIONS_INVALID"),
        ({}, {"api_key": KEY}, {}, "ENGINE_OPTIONS_INVALID"),
        ({}, {"api_key_file": "/nowhere"}, {}, "ENGINE_OPTIONS_INVALID"),
        ({}, {"ca_file": "/nowhere"}, {}, "ENGINE_OPTIONS_INVALID"),
    ],
)
async def test_permanent_problem_stops_the_start(
    opened: Open, there: dict[str, Any], extra: dict[str, str], settings: dict[str, Any], reason: str
) -> None:
    """A wrong key, model or option says so at once, and shows no key."""
    async with token_endpoint(**there) as endpoint:
        with pytest.raises(PenstockError) as caught:
            await opened(endpoint, settings=settings, **extra)
    assert caught.value.reason == reason
    assert KEY not in f"{caught.value.message} {caught.value.violations}" and "u:p" not in caught.value.message


@pytest.mark.requirement("R1", "R3")
async def test_the_key_may_stand_in_a_file_and_is_shown_nowhere(opened: Open, tmp_path: Path) -> None:
    """Neither in what is printed of the options nor in a log."""
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    async with token_endpoint(key=KEY) as endpoint:
        with capture_logs() as logs:
            engine = await opened(endpoint, api_key_file=str(file))
        assert (await finished(engine, request())).token_ids.size == 4 and KEY not in str(logs)
        assert KEY not in repr(EngineOptions(tmp_path, "m", upstream_api_key=KEY))
        with pytest.raises(InvalidArgument):
            await opened(endpoint, api_key_file=str(file), settings={"upstream_api_key": KEY})


@pytest.mark.requirement("R82")
async def test_a_tokenizer_that_is_not_the_endpoint_s_stops_the_start(opened: Open, model_dir: Path) -> None:
    """Otherwise every prompt would be nonsense, and nobody would notice."""
    files = tiny_tokenizer.build(["some text"])
    files.write(model_dir)
    (model_dir / "config.json").write_text(json.dumps({"vocab_size": 4096}))
    async with token_endpoint(prompt_of_text=lambda text: [1, 2, 3]) as endpoint:
        with pytest.raises(FailedPrecondition) as caught:
            await opened(endpoint)
    assert caught.value.reason == "UPSTREAM_TOKENIZER_DIFFERS"


@pytest.mark.requirement("R82")
@pytest.mark.parametrize("mode", ["processed", "warmed"])
async def test_ids_may_come_as_the_names_of_tokens(endpoint: TokenEndpoint, opened: Open, mode: Any) -> None:
    """As older servers tell them (`return_tokens_as_token_ids`), also where the logprobs are not passed on."""
    endpoint.ids, endpoint.mode = False, mode
    done = await finished(await opened(endpoint), request())
    assert done.token_ids.tolist() == [0] * 4 and done.logprobs.size == (4 if mode == "processed" else 0)


@pytest.mark.requirement("R82")
async def test_an_endpoint_without_token_ids_takes_only_conversations(endpoint: TokenEndpoint, opened: Open) -> None:
    """Ids are never made from text."""
    endpoint.ids, endpoint.mode = False, "none"
    engine = await opened(endpoint)
    info = engine.info()
    assert not info.capabilities.token_ids and not info.capabilities.logprobs and "top_k" not in info.sampling_fields
    error = await failed(engine, request())
    assert isinstance(error, Unsupported) and error.metadata["capability"] == "token_ids"


@pytest.mark.requirement("R63")
async def test_stop_tokens_are_refused_where_there_are_no_token_ids(endpoint: TokenEndpoint, opened: Open) -> None:
    """By their field, never silently dropped; where there are, they are taken."""
    wanted = chat_pb2.Sampling(stop_token_ids=[5])
    assert sampling(wanted, (await opened(endpoint)).info(), 1).stop_token_ids == (5,)
    endpoint.ids, endpoint.mode = False, "none"
    with pytest.raises(InvalidArgument) as caught:
        sampling(wanted, (await opened(endpoint)).info(), 1)
    assert caught.value.violations[0].field == "sampling.stop_token_ids"


@pytest.mark.requirement("R24")
async def test_a_closed_engine_says_so(endpoint: TokenEndpoint, opened: Open) -> None:
    """What waits and what comes hears that the service stops."""
    engine = await opened(endpoint)
    await engine.pause(PauseMode.WAIT)
    held = asyncio.create_task(failed(engine, request()))
    await eventually(lambda: engine.stats().waiting == 1, "it waits")
    await engine.aclose()
    assert (await held).reason == "ENGINE_CLOSED"
    assert (await failed(engine, request("b"))).reason == "ENGINE_CLOSED"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, VOCAB + 3) | st.floats() | st.sampled_from(["token_id:3", "stop", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["token_id:1", "y"]), inner, max_size=2)
    ),
    max_leaves=6,
)
_NAMES = ("token_ids", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids")
_LOGPROBS = st.fixed_dictionaries({}, optional=dict.fromkeys(("tokens", "token_logprobs", "top_logprobs"), _JSON))


@pytest.mark.requirement("R63")
@example({"logprobs": {"tokens": True}})
@example({"token_ids": [0], "logprobs": {"token_logprobs": True}})
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(_NAMES, _JSON) | {"logprobs": _LOGPROBS | _JSON}))
def test_no_answer_whatever_breaks_the_reading(choice: dict[str, Any]) -> None:
    """What is read holds its rules, or is refused by type."""
    try:
        read = read_choice(choice, VOCAB)
    except PenstockError:
        return
    assert all(0 <= token < VOCAB for token in read.token_ids)
    assert len(read.logprobs) in (0, len(read.token_ids)) and all(-9999 < value <= 0 for value in read.logprobs)
    assert len(read.top) in (0, len(read.token_ids))
