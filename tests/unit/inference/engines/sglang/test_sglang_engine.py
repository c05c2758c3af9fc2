"""The engine `sglang` over the wire of SGLang's own server: ids, logprobs, stops, aborts, refusals, faults."""

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
from hypothesis import given
from hypothesis import strategies as st
from tests.support.endpoints.loopback import event_stream, send_event, unused_port
from tests.support.endpoints.sglang_server import CONTEXT, MASK_TOKENS, STOP, VOCAB, Params, SglangServer, sglang_server
from tests.support.waiting import eventually
from tokenizers import Tokenizer

from penstock_chassis.errors import (
    FailedPrecondition,
    InvalidArgument,
    PenstockError,
    ResourceExhausted,
    Unavailable,
    Unsupported,
)
from penstock_codec import tiny_tokenizer
from penstock_inference.domain.response_format import ResponseFormat
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
from penstock_inference.engines.sglang import open_engine
from penstock_inference.engines.sglang.answers import Asked, read_chunk
from penstock_inference.engines.sglang.engine import SglangEngine
from penstock_inference.engines.sglang.in_flight import SglangFlight
from penstock_inference.engines.sglang.probe import mode_of

PROMPT = np.array([5, 6, 7], np.int32)
KEY = "sk-not-to-be-seen"
Open = Callable[..., Any]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A model directory that states only the number of tokens."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "eos_token_id": STOP}))
    return tmp_path


@pytest.fixture
async def opened(model_dir: Path) -> AsyncIterator[Open]:
    """Opens engines that end with the test: `opened(server or URL, option=...)`."""
    async with AsyncExitStack() as stack:

        async def open_(there: SglangServer | str, *, settings: dict[str, Any] | None = None, **extra: str) -> Any:
            url = there if isinstance(there, str) else there.base_url
            options: dict[str, Any] = {"model_dir": model_dir, "model_name": "ours"} | (settings or {})
            engine = await open_engine(EngineOptions(**options, extra={"base_url": url} | extra))
            stack.push_async_callback(engine.aclose)
            return engine

        yield open_


@pytest.fixture
async def server() -> AsyncIterator[SglangServer]:
    """One that has everything."""
    async with sglang_server() as here:
        yield here


def request(name: str = "r", *, stream: bool = False, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(name, PROMPT, Sampling(**({"max_tokens": 4} | sampling)), stream=stream)


async def finished(engine: SglangEngine, wanted: GenerateRequest) -> Done:
    done = [event async for event in engine.generate(wanted)][-1]
    assert isinstance(done, Done)
    return done


async def failed(engine: SglangEngine, wanted: GenerateRequest) -> PenstockError:
    with pytest.raises(PenstockError) as caught:
        await finished(engine, wanted)
    return caught.value


def likeliest(server: SglangServer, tokens: int) -> list[int]:
    tables = [server.table(server.number, n) for n in range(tokens)]
    return [max(table, key=lambda token: table[token]) for table in tables]


@pytest.mark.requirement("R82")
@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_every_token_has_the_servers_id_logprob_and_version(
    opened: Open, incremental: bool, stream: bool
) -> None:
    """The first one included; whether events repeat what came before, or not."""
    async with sglang_server(incremental=incremental) as server:
        engine = await opened(server)
        wanted = request(stream=stream, top_logprobs=2, max_tokens=130, temperature=0.7, ignore_eos=True)
        events = [event async for event in engine.generate(wanted)]
        done = events[-1]
        truth = server.ended[-1]
        assert isinstance(done, Done) and done.token_ids.tolist() == truth.ids == likeliest(server, 130)
        assert done.logprobs.tolist() == np.array(truth.logprobs, np.float32).tolist()
        assert done.logprobs[0] == np.float32(server.table(0, 0, 0.7)[truth.ids[0]])
        assert done.top is not None and done.top.token_ids.tolist() == [[t for _, t, _ in row] for row in truth.top]
        assert done.version_spans == (VersionSpan(0, 0, 130),)
        assert (done.finish_reason, done.prompt_tokens, done.cached_tokens) == (FinishReason.LENGTH, 3, 1)
        deltas = [event for event in events if isinstance(event, Delta)]
        if stream:
            assert isinstance(events[0], Started)
            assert np.concatenate([delta.token_ids for delta in deltas]).tolist() == truth.ids
            assert np.concatenate([delta.logprobs for delta in deltas]).tolist() == done.logprobs.tolist()
        else:
            assert len(events) == 1
        body = server.bodies[-1]
        assert (body["input_ids"], body["cache_salt"]) == (PROMPT.tolist(), "v0") and len(body["rid"]) == 32
        assert engine.stats().sampled_tokens == 130 and engine.stats().finished == 1


@pytest.mark.requirement("R82")
async def test_capabilities_are_those_of_the_servers_start(server: SglangServer, opened: Open) -> None:
    """What it would not do, or would do otherwise, is no field."""
    info = (await opened(server)).info()
    assert (info.engine, info.engine_version, info.max_context_tokens) == ("sglang", "SGLang 0.5.23", CONTEXT)
    assert info.logprobs_mode is LogprobsMode.PROCESSED and info.stop_token_ids == (STOP,)
    can = info.capabilities
    assert can.token_ids and can.version_spans and can.score and can.adapters and can.structured_output
    # There are no weights in model_dir that a push could be compared with.
    assert not can.weight_update and not can.in_flight_update and not can.seed
    assert {"repetition_penalty", "seed"}.isdisjoint(info.sampling_fields) and "top_k" in info.sampling_fields
    async with sglang_server(masks=False, deterministic=True, lora=False, spans=False) as plain:
        info = (await opened(plain)).info()
        assert "seed" in info.sampling_fields and {"top_p", "top_k", "min_p"}.isdisjoint(info.sampling_fields)
        assert info.capabilities.seed and not info.capabilities.adapters and not info.capabilities.version_spans


@pytest.mark.requirement("R82")
async def test_logprobs_are_of_the_filtered_distribution_where_there_are_filters(
    server: SglangServer, opened: Open
) -> None:
    """The server's usual ones would be of the distribution before its filters."""
    engine = await opened(server)
    done = await finished(engine, request(top_k=3, top_p=0.9, temperature=0.8))
    truth = server.ended[-1]
    kept = server.filtered(server.table(0, 0, 0.8), Params(top_k=3, top_p=0.9))
    assert done.logprobs.tolist() == np.array(truth.kept, np.float32).tolist()
    assert done.logprobs[0] == np.float32(kept[truth.ids[0]]) != np.float32(truth.logprobs[0])
    # Greedy sampling has no filters, and the logprobs of the whole distribution.
    greedy = await finished(engine, request(top_k=3, temperature=0.0))
    assert greedy.logprobs[0] == np.float32(server.table(0, 0)[greedy.token_ids[0]])
    for asked, field in (
        ({"top_p": 0.5}, "sampling.top_k"),
        ({"top_k": MASK_TOKENS + 1}, "sampling.top_k"),
        ({"top_k": 3, "top_logprobs": 1}, "sampling.top_logprobs"),
        ({"top_k": 3, "top_p": 0.5, "min_p": 0.1}, "sampling.min_p"),
    ):
        error = await failed(engine, request(**asked))
        assert (error.reason, error.violations[0].field) == ("FIELD_INVALID", field)


@pytest.mark.requirement("R82")
async def test_original_logprobs_are_reported_as_the_models_own(opened: Open) -> None:
    """A server with SGLANG_RETURN_ORIGINAL_LOGPROB; an operator's other statement is refused."""
    async with sglang_server(original_logprobs=True) as server:
        engine = await opened(server)
        assert engine.info().logprobs_mode is LogprobsMode.RAW
        done = await finished(engine, request(temperature=0.5, top_p=0.5))
        assert done.logprobs[0] == np.float32(server.table(0, 0)[done.token_ids[0]])
        with pytest.raises(InvalidArgument, match="logprobs"):
            await opened(server, logprobs="processed")
        none = await opened(server, logprobs="none")
        assert not none.info().capabilities.logprobs and (await finished(none, request())).logprobs.size == 0


@pytest.mark.requirement("R82")
def test_distribution_is_reported_only_when_unambiguous() -> None:
    """Flat and half-moved ones prove nothing."""
    assert mode_of({0: -1.0, 1: -1.0}, {0: -1.0, 1: -1.0}) is None
    assert mode_of({0: -1.0, 1: -2.0}, {0: -1.0, 1: -2.0}) is LogprobsMode.RAW
    assert mode_of({0: -1.0, 1: -2.0}, {0: -1.3, 1: -1.8}) is LogprobsMode.PROCESSED
    assert mode_of({0: -1.0, 1: -2.0}, {0: -1.1, 1: -2.0}) is None
    assert mode_of({0: -1.0, 1: -2.0}, {5: -1.0}) is None


@pytest.mark.requirement("R63")
async def test_stops_are_reported_as_the_server_reports_them(server: SglangServer, opened: Open) -> None:
    """The model's own token, one of the request's, a text; at the last token when a form is complete."""
    engine = await opened(server)
    server.script = {1: STOP}
    done = await finished(engine, request())
    assert (done.finish_reason, done.stop_token_id, done.token_ids.size) == (FinishReason.STOP, STOP, 2)
    server.script = {1: 9}
    done = await finished(engine, request(stop_token_ids=(9,)))
    assert (done.finish_reason, done.stop_token_id, done.stop_text) == (FinishReason.STOP, 9, None)

    async def ends(reason: dict[str, Any]) -> Callable[..., Any]:
        async def fault(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = await event_stream(http)
            await send_event(response, event(finish_reason=reason))
            await response.write(b"data: [DONE]\n\n")
            return response

        return fault

    server.fault = await ends({"type": "stop", "matched": "END"})
    done = await finished(engine, request(stop=("END",)))
    assert (done.stop_token_id, done.stop_text) == (None, "END")
    server.fault = await ends({"type": "stop", "matched": 0})
    form = ResponseFormat.parse('{"type": "json_object"}')
    assert (await finished(engine, request(response_format=form))).stop_token_id is None
    server.fault = await ends({"type": "stop", "matched": "NaN happened"})
    assert (await failed(engine, request())).reason == "LOGITS_NOT_FINITE"


@pytest.mark.requirement("R63")
async def test_a_required_form_becomes_the_servers_grammar(server: SglangServer, opened: Open) -> None:
    """What its compiler refuses is a refusal of the field."""
    engine = await opened(server)
    forms = {
        '{"type": "json_object"}': ("json_schema", '{"type": "object"}'),
        '{"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}': ("json_schema", '{"type": "array"}'),
        '{"type": "regex", "regex": "a+"}': ("regex", "a+"),
        '{"type": "choice", "choice": ["a \\"b\\"", "c"]}': ("ebnf", 'root ::= "a \\"b\\"" | "c"'),
        '{"type": "grammar", "grammar": "root ::= \\"x\\""}': ("ebnf", 'root ::= "x"'),
    }
    for text, (name, value) in forms.items():
        await finished(engine, request(response_format=ResponseFormat.parse(text)))
        assert server.bodies[-1]["sampling_params"][name] == value
    broken = request(response_format=ResponseFormat.parse('{"type": "regex", "regex": "("}'))
    error = await failed(engine, broken)
    assert isinstance(error, InvalidArgument) and error.violations[0].field == "sampling.response_format_json"


@pytest.mark.requirement("R82")
async def test_prompts_are_scored_with_alternatives(server: SglangServer, opened: Open) -> None:
    """One logprob for each token but the first; nothing is sampled."""
    engine = await opened(server)
    scores = await engine.score(PROMPT, top_logprobs=2)
    tables = [server.table(0, n) for n in (1, 2)]
    assert scores.logprobs.tolist() == np.array([tables[0][6], tables[1][7]], np.float32).tolist()
    best = [sorted(table, key=lambda token: -table[token])[:2] for table in tables]
    assert scores.top is not None and scores.top.token_ids.tolist() == best and scores.policy_version == 0
    with pytest.raises(InvalidArgument, match="temperature"):
        await engine.score(PROMPT, temperature=0.5)


@pytest.mark.requirement("R63")
@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"temperature": 1e-7}, "sampling.temperature"),
        ({"presence_penalty": 3.0}, "sampling.presence_penalty"),
        ({"repetition_penalty": 1.1}, "sampling.repetition_penalty"),
        ({"seed": 1}, "sampling.seed"),
        ({"stop_token_ids": (9,), "ignore_eos": True}, "sampling.stop_token_ids"),
        ({"max_tokens": CONTEXT}, "sampling.max_tokens"),
        ({"stop_token_ids": (VOCAB,)}, "sampling.stop_token_ids"),
    ],
)
async def test_a_request_that_the_server_would_not_honour_is_refused_before_it_is_sent(
    server: SglangServer, opened: Open, asked: dict[str, Any], field: str
) -> None:
    """By its field."""
    engine = await opened(server)
    error = await failed(engine, request(**asked))
    assert (error.reason, error.violations[0].field) == ("FIELD_INVALID", field)
    assert server.bodies == []
    foreign = GenerateRequest("f", np.array([1, VOCAB], np.int32), Sampling(max_tokens=1))
    assert (await failed(engine, foreign)).violations[0].field == "prompt_token_ids[1]"


def event(**changes: Any) -> dict[str, Any]:
    """A good last event of one token, with changes to its metadata or to itself."""
    meta = {
        "finish_reason": {"type": "length", "length": 1},
        "prompt_tokens": PROMPT.size,
        "completion_tokens": 1,
        "cached_tokens": 0,
        "num_retractions": 0,
        "output_token_logprobs": [[-1.0, 0, None]],
        "weight_versions": [{"version": "0", "start": 0, "end": 1}],
    }
    own = {name: changes.pop(name) for name in ("output_ids",) if name in changes}
    return {"text": "x", "output_ids": [0], "meta_info": meta | changes} | own


def _sends(*events: Any) -> Any:
    async def fault(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await event_stream(http)
        for each in events:
            await send_event(response, each)
        await response.write(b"data: [DONE]\n\n")
        return response

    return fault


def _status(status: int, body: Any, **headers: str) -> Any:
    async def fault(http: web.Request, sent: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(body, status=status, headers=headers)

    return fault


async def _html(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(text="<html>Welcome</html>", content_type="text/html")


def _gives_up(status: int) -> Any:
    return _sends(event(finish_reason={"type": "abort", "message": "no", "status_code": status}))


INVALID = (FailedPrecondition, "UPSTREAM_ANSWER_INVALID")
_NONE = {"finish_reason": None}


@pytest.mark.requirement("R8", "R63", "R82")
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (_html, INVALID),
        (_sends([]), INVALID),
        (_sends({"output_ids": [0]}), INVALID),
        (_sends(event(output_ids="0")), INVALID),
        (_sends(event(output_ids=[VOCAB])), INVALID),
        (_sends(event(output_ids=[True])), INVALID),
        (_sends(event(output_ids=[0, 0])), INVALID),
        (_sends(event(completion_tokens=2)), INVALID),
        (_sends(event(completion_tokens=None)), INVALID),
        (_sends(event(output_token_logprobs=None)), INVALID),
        (_sends(event(output_token_logprobs=[])), INVALID),
        (_sends(event(output_token_logprobs=[[-1.0, 1, None]])), INVALID),
        (_sends(event(output_token_logprobs=[[0.5, 0, None]])), INVALID),
        (_sends(event(output_token_logprobs=[[None, 0, None]])), (PenstockError, "LOGITS_NOT_FINITE")),
        (_sends(event(finish_reason={"type": "content_filter"})), INVALID),
        (_sends(event(finish_reason="length")), INVALID),
        (_sends(event(**_NONE)), (Unavailable, "UPSTREAM_CUT_OFF")),
        (_sends(event(**_NONE), event(output_ids=[1, 0], completion_tokens=2)), INVALID),
        (_sends(event(prompt_tokens=2)), (FailedPrecondition, "UPSTREAM_PROMPT_CHANGED")),
        (_sends(event(weight_versions=None)), INVALID),
        (_sends(event(weight_versions=[])), INVALID),
        (_sends(event(weight_versions=[{"version": "0", "start": 0, "end": 0}])), INVALID),
        (_sends(event(weight_versions=[{"version": "7", "start": 0, "end": 1}])), INVALID),
        (_sends({"error": {"message": "no", "code": 400}}), (InvalidArgument, "FIELD_INVALID")),
        (_sends({"error": {"message": "dead", "code": 500}}), (Unavailable, "UPSTREAM_FAILED")),
        (_gives_up(400), (InvalidArgument, "FIELD_INVALID")),
        (_gives_up(503), (Unavailable, "UPSTREAM_FAILED")),
        (_status(400, {"error": "unknown field"}), (InvalidArgument, "FIELD_INVALID")),
        (_status(401, {"error": "Unauthorized"}), (FailedPrecondition, "UPSTREAM_KEY_REFUSED")),
        (_status(404, {"detail": "Not Found"}), INVALID),
        (_status(429, {}, **{"retry-after": "7"}), (ResourceExhausted, "UPSTREAM_RATE_LIMIT")),
        (_status(503, {}), (Unavailable, "UPSTREAM_FAILED")),
    ],
)
async def test_invalid_answer_is_a_typed_error_and_nothing_is_made_up(
    server: SglangServer, opened: Open, fault: Any, expected: tuple[type[PenstockError], str]
) -> None:
    """Broken events, foreign ids and versions, missing logprobs, refusals; the next request works."""
    engine = await opened(server)
    server.fault = fault
    error = await failed(engine, request())
    assert isinstance(error, expected[0]) and error.reason == expected[1]
    server.fault = None
    await eventually(lambda: not engine._lookout.lost, "the server is probed again where that was worth it")
    assert (await finished(engine, request())).token_ids.size == 4
    assert engine.stats().failed == 1 and engine.stats().running == 0


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, VOCAB + 3) | st.floats() | st.sampled_from(["0", "stop", "abort"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "version", "start", "end", "matched"]), inner, max_size=3)
    ),
    max_leaves=6,
)
_META = (
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "output_token_logprobs",
    "output_top_logprobs",
    "weight_versions",
)


@pytest.mark.requirement("R63")
@given(_JSON, st.fixed_dictionaries({}, optional=dict.fromkeys(_META, _JSON)))
def test_no_answer_whatever_breaks_the_reading(ids: Any, meta: dict[str, Any]) -> None:
    """What is read holds its rules, or is refused by type."""
    asked = Asked(PROMPT.size, "output_token_logprobs", 1, frozenset(), "sampling")
    try:
        chunk = read_chunk({"output_ids": ids, "meta_info": event()["meta_info"] | meta}, [], VOCAB, asked)
    except PenstockError:
        return
    read = chunk.read
    assert all(0 <= token < VOCAB for token in read.token_ids)
    assert len(read.logprobs) == len(read.token_ids) and all(-9999 < value <= 0 for value in read.logprobs)
    if chunk.spans:
        assert chunk.spans[0][1] == 0 and chunk.spans[-1][2] == len(read.token_ids)


@pytest.mark.requirement("R26", "R27")
async def test_a_server_that_goes_away_in_a_request_is_found_again_with_its_present_features(opened: Open) -> None:
    """The part that came is dropped; calls say why until the server is there again, with other logprobs."""
    port = unused_port()
    async with sglang_server(port, held=True) as server:
        engine = await opened(server)
        running = asyncio.create_task(failed(engine, request()))
        await eventually(lambda: len(server.sequences) == 1, "it runs there")
    error = await running
    assert isinstance(error, Unavailable) and error.reason in ("UPSTREAM_CUT_OFF", "UPSTREAM_UNREACHABLE")
    await eventually(lambda: engine._lookout.lost, "the loss is seen")
    with pytest.raises(Unavailable):
        engine.info()
    assert (await failed(engine, request())).retry_after_s
    async with sglang_server(port, original_logprobs=True) as server:
        await eventually(lambda: not engine._lookout.lost, "it is found")
        assert engine.info().logprobs_mode is LogprobsMode.RAW and server.weight_version == "0"
        assert (await finished(engine, request())).version_spans == (VersionSpan(0, 0, 4),)


@pytest.mark.requirement("R23")
async def test_an_abort_keeps_every_token_that_the_server_sampled(opened: Open) -> None:
    """By request or session; the server ends it, and its end has the last tokens and their version."""
    async with sglang_server(held=True) as server:
        engine = await opened(server)
        wanted = replace(request(stream=True, max_tokens=40), session_id="s")
        async with aclosing(engine.generate(wanted)) as events:
            server.permit(2)
            assert isinstance(await anext(events), Started)
            await eventually(lambda: len(next(iter(server.sequences.values())).ids) == 2, "two tokens are sampled")
            assert await engine.abort(request_ids=["other"]) == 0
            assert await engine.abort(session_id="s") == 1
            assert await engine.abort(session_id="s") == 0
            done = [event async for event in events][-1]
        assert isinstance(done, Done) and done.finish_reason is FinishReason.ABORT
        assert done.token_ids.tolist() == server.ended[-1].ids and done.token_ids.size >= 2
        assert done.version_spans == (VersionSpan(0, 0, done.token_ids.size),)
        assert engine.stats().aborted == 1


@pytest.mark.requirement("R23")
async def test_an_abort_that_the_server_does_not_take_closes_the_connection(
    server: SglangServer, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came is kept."""
    engine = await opened(server)

    async def endless(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await event_stream(http)
        await send_event(response, event(finish_reason=None))
        await asyncio.Event().wait()
        raise AssertionError

    server.fault = endless
    monkeypatch.setattr(server, "_post_abort_request", _status(503, {}))
    events = engine.generate(request(stream=True))
    async with aclosing(events):
        assert isinstance(await anext(events), Started) and isinstance(await anext(events), Delta)
        assert await engine.abort(everything=True) == 1
        done = await anext(events)
    assert isinstance(done, Done) and (done.finish_reason, done.token_ids.tolist()) == (FinishReason.ABORT, [0])
    await asyncio.wait_for(server.left.wait(), 60)


@pytest.mark.requirement("R23")
async def test_an_abort_of_what_waits_for_its_grammar_is_no_refusal() -> None:
    """The server ends it with the status of a bad request, which it is for a request that nobody aborted."""
    asked = Asked(PROMPT.size, "output_token_logprobs", 0, frozenset(), "sampling")
    refused = event(finish_reason={"type": "abort", "message": "Aborted by AbortReq.", "status_code": 400})
    flight = SglangFlight(request(), VOCAB, True, 0, frozenset(), 0.0, asked=asked, pinned=False)
    with pytest.raises(InvalidArgument):
        flight.take(refused)
    flight.aborting = True
    flight.take(refused)
    flight.end()
    assert flight.done().finish_reason is FinishReason.ABORT and flight.done().token_ids.size == 0


@pytest.mark.requirement("R49", "R82")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("spans", "problem"),
    [
        ([(5, 0, 2), (6, 2, 3), (7, 3, 4)], ""),
        ([(5, 0, 4)], ""),
        ([(5, 0, 3), (7, 3, 4)], ""),
        ([(6, 0, 4)], "weights that came after"),
        ([(5, 0, 1), (6, 1, 4)], "weights that came after"),
        ([(5, 0, 2), (7, 2, 4)], "weights that came after"),
        ([(5, 0, 3), (7, 3, 4), (6, 4, 5)], "not in the order"),
        ([(5, 0, 3), (6, 3, 4), (5, 4, 5)], "not in the order"),
    ],
)
async def test_spans_agree_with_what_had_arrived_when_the_weights_changed(
    spans: list[tuple[int, int, int]], problem: str, stream: bool
) -> None:
    """Of version 5: two tokens came before 6, a third before 7. Each token is of weights that were there before it."""
    total = spans[-1][2]

    def so_far(count: int, **more: Any) -> dict[str, Any]:
        rows = [[-0.5, 3, None]] * count
        return event(completion_tokens=count, output_token_logprobs=rows, **more) | {"output_ids": [3] * count}

    asked = Asked(PROMPT.size, "output_token_logprobs", 0, frozenset(), "sampling")
    wanted = request(stream=stream, max_tokens=total)
    flight = SglangFlight(wanted, VOCAB, True, 5, frozenset(), 0.0, asked=asked, pinned=False)
    for version, arrived in ((6, 2), (7, 3)):
        flight.take(so_far(arrived, finish_reason=None))
        if stream:
            flight.deltas()
        flight.weights_change(version)
    named = [{"version": str(version), "start": start, "end": end} for version, start, end in spans]
    end = so_far(total, finish_reason={"type": "length", "length": total}, weight_versions=named)
    if problem:
        with pytest.raises(FailedPrecondition, match=problem) as caught:
            flight.take(end)
        assert caught.value.reason == "UPSTREAM_ANSWER_INVALID"
    else:
        flight.take(end)
        flight.end()
        assert flight.done().version_spans == tuple(VersionSpan(*span) for span in spans)


@pytest.mark.requirement("R23")
async def test_cancelled_caller_ends_the_request_there(opened: Open) -> None:
    """A call that was left keeps nothing running."""
    async with sglang_server(held=True) as server:
        engine = await opened(server)
        async with aclosing(engine.generate(request(stream=True))) as events:
            server.permit(1)
            await anext(events)
        await asyncio.wait_for(server.left.wait(), 60)
        assert engine.stats().running == 0


@pytest.mark.requirement("R117")
async def test_a_router_gets_the_session_and_no_commands(server: SglangServer, opened: Open) -> None:
    """It stands for several servers, and would give weights to one of them."""
    with pytest.raises(InvalidArgument, match="control=false"):
        await opened(server, session_header="X-SMG-Routing-Key")
    engine = await opened(server, session_header="X-SMG-Routing-Key", control="false", policy_version="3")
    for session in ("r.d0.1#2", "odd\r\nx-other: 1", ""):
        done = await finished(engine, replace(request(), session_id=session))
        assert done.version_spans == (VersionSpan(3, 0, 4),)
    sent = [headers.get("x-smg-routing-key") for headers in server.headers]
    assert sent == ["r.d0.1#2", "odd%0D%0Ax-other:%201", None]
    assert server.commands == [] and server.weight_version == "default" and "cache_salt" not in server.bodies[-1]
    assert not engine.info().capabilities.version_spans
    assert (await failed(engine, replace(request(), min_policy_version=4))).reason == "POLICY_VERSION_UNAVAILABLE"
    for refused in (engine.pause(PauseMode.KEEP), engine.begin_update(4, "", UpdateFormat.FULL)):
        with pytest.raises(Unsupported):
            await refused


@pytest.mark.requirement("R3", "R8")
@pytest.mark.parametrize(
    ("there", "extra", "reason"),
    [
        ({"key": KEY}, {}, "UPSTREAM_KEY_REFUSED"),
        ({}, {"base_url": "ftp://x"}, "ENGINE_OPTIONS_INVALID"),
        ({}, {"max_adapters": "0"}, "ENGINE_OPTIONS_INVALID"),
        ({}, {"model": "x"}, "ENGINE_OPTIONS_INVALID"),
        ({}, {"api_key_file": "/nowhere"}, "ENGINE_OPTIONS_INVALID"),
    ],
)
async def test_permanent_problem_stops_the_start(
    opened: Open, there: dict[str, Any], extra: dict[str, str], reason: str
) -> None:
    """A wrong key or option is an error at once."""
    async with sglang_server(**there) as server:
        with pytest.raises(PenstockError) as caught:
            await opened(server, **extra)
    assert caught.value.reason == reason


@pytest.mark.requirement("R82")
async def test_a_tokenizer_that_is_not_the_servers_stops_the_start(opened: Open, model_dir: Path) -> None:
    """Otherwise every prompt would be nonsense, and no check would notice. A token in front is no difference."""
    tiny_tokenizer.build(["some text"]).write(model_dir)
    (model_dir / "config.json").write_text(json.dumps({"vocab_size": 4096}))
    async with sglang_server(tokens_of_text=lambda text: [1, 2, 3]) as server:
        with pytest.raises(FailedPrecondition) as caught:
            await opened(server)
        assert caught.value.reason == "UPSTREAM_TOKENIZER_DIFFERS"
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        server.tokens_of_text = lambda text: [0, *tokenizer.encode(text, add_special_tokens=False).ids]
        assert (await opened(server)).info().capabilities.token_ids


@pytest.mark.requirement("R24")
async def test_a_closed_engine_ends_what_waits_and_what_runs(opened: Open) -> None:
    """Each call gets an error or its end."""
    async with sglang_server(held=True) as server:
        engine = await opened(server, settings={"max_concurrency": 1})
        running = asyncio.create_task(finished(engine, request()))
        await eventually(lambda: len(server.sequences) == 1, "it runs there")
        waiting = asyncio.create_task(failed(engine, request("w")))
        await eventually(lambda: engine.stats().waiting == 1, "it waits")
        await engine.aclose()
        assert (await waiting).reason == "ENGINE_CLOSED" and (await running).finish_reason is FinishReason.ABORT
        assert (await failed(engine, request("b"))).reason == "ENGINE_CLOSED"


def test_the_stand_in_filters_as_its_formula_says() -> None:
    """What the tests compare with is a distribution."""
    table = SglangServer().table(1, 2, 0.7)
    assert math.isclose(sum(map(math.exp, table.values())), 1.0)
    kept = SglangServer().filtered(table, Params(top_k=5, top_p=0.8))
    assert math.isclose(sum(map(math.exp, kept.values())), 1.0) and len(kept) <= 5
