"""Tokens and logprobs from the real vLLM, over gRPC."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.integration.vllm.conftest import ON_CPU, Served, first_tokens
from tests.support import vllm_models as models

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.inference.v1 import inference_service_pb2 as pb
from penstock_chassis.errors import PenstockError

pytestmark = pytest.mark.asyncio(loop_scope="session")

Failure = Callable[[grpc.aio.AioRpcError], PenstockError]
TOLERANCE = 5e-3
"""Between a prompt computed at once and a token at a time; vLLM and other engines differ by some 5e-4."""
BASH = chat_pb2.Tool(name="bash", parameters_json_schema='{"type": "object"}')


def logprobs(completion: completion_pb2.Completion) -> Any:
    return np.frombuffer(completion.span.logprobs, "<f4")


async def score(service: Served, prompt: Any, completion: completion_pb2.Completion, **fields: Any) -> Any:
    whole = np.asarray(prompt, "<i4").tobytes() + completion.span.token_ids
    answer = await service.stub.Score(pb.ScoreRequest(token_ids=whole, start=len(prompt), **fields))
    return np.frombuffer(answer.logprobs, "<f4")


def times_given_up(pid: int) -> int:
    """How often a process's main thread has let go of its processor to wait."""
    (line,) = (each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("voluntary"))
    return int(line.split()[1])


@pytest.mark.requirement("R86", "R87")
async def test_declared_features_are_served(service: Served) -> None:
    """The engine says what it is and can, and what its logprobs are."""
    info = await service.stub.GetInfo(pb.GetInfoRequest())
    can = info.capabilities
    assert (info.engine, info.vocabulary_size, info.max_context_tokens) == ("vllm", models.VOCAB, models.CONTEXT)
    assert info.logprobs_mode == completion_pb2.LOGPROBS_MODE_PROCESSED and info.dtype == "float32"
    assert list(info.stop_token_ids) == [models.CONFIG["eos_token_id"]]
    assert can.token_ids and can.logprobs and can.version_spans and can.in_flight_update and can.score
    # A seed repeats a completion only in the same company, which the protocol's promise does not allow for.
    assert not can.seed and "seed" in can.sampling_fields
    if ON_CPU:
        # Without a GPU there is nothing to sleep with, and nothing that NCCL could reach.
        assert can.adapters and not can.sleep and list(can.transfer_backends) == ["files"]
    assert can.structured_output and "response_format_json" in can.sampling_fields


@pytest.mark.requirement("R82")
async def test_a_chat_with_tools_becomes_a_tool_call(service: Served) -> None:
    """Rendered with its tools, sampled as ids, parsed by the ids of the markup."""
    await service.push(models.calling_policy())
    messages = [chat_pb2.Message(role=chat_pb2.ROLE_USER, parts=[chat_pb2.Part(text=chat_pb2.Text(text="look"))])]
    request = pb.GenerateRequest(
        request_id="tools",
        chat=pb.ChatPrompt(messages=messages, tools=[BASH]),
        sampling=chat_pb2.Sampling(temperature=0, max_tokens=20),
    )
    events = [event async for event in service.stub.Generate(request)]
    done = events[-1].done
    parsed = await service.stub.Parse(pb.ParseRequest(token_ids=done.completion.span.token_ids, tools=[BASH]))
    call = parsed.message.parts[0].tool_call
    assert (call.name, json.loads(call.arguments_json)) == ("bash", {"command": "ls"})
    assert parsed.finish_reason == chat_pb2.FINISH_REASON_TOOL_CALLS
    assert done.completion.stop_token_id == models.CONFIG["eos_token_id"]
    assert done.completion.finish_reason == chat_pb2.FINISH_REASON_STOP
    assert len(done.prompt_token_ids) == 4 * done.completion.usage.prompt_tokens


@pytest.mark.requirement("R82", "R83")
@pytest.mark.parametrize("stream", [True, False])
async def test_every_token_has_the_logprob_that_score_gives_it(service: Served, stream: bool) -> None:
    """Ids, logprobs and versions are of one length, finite, not above 0, and the model's own."""
    version = await service.push(models.random_policy(3))
    prompt = range(20, 90)
    events = [
        event async for event in service.stub.Generate(service.request(prompt, stream, max_tokens=48, min_tokens=0))
    ]
    done = events[-1].done.completion
    values = logprobs(done)
    count = done.span.count
    assert count == values.size == len(done.span.token_ids) // 4 > 0
    assert np.isfinite(values).all() and (values <= 0).all()
    assert [(v.policy_version, v.start, v.end) for v in done.span.versions] == [(version, 0, count)]
    assert np.abs(values - await score(service, prompt, done)).max() < TOLERANCE
    if stream:
        assert events[0].started.prompt_tokens == 70
        assert b"".join(event.delta.span.token_ids for event in events[1:-1]) == done.span.token_ids
        assert b"".join(event.delta.span.logprobs for event in events[1:-1]) == done.span.logprobs
    else:
        assert len(events) == 1


@pytest.mark.requirement("R82")
async def test_logprobs_are_of_the_distribution_that_was_sampled_from(service: Served) -> None:
    """After temperature and filters. With one token left to choose, its probability is 1."""
    await service.push(models.random_policy(3))
    one_left = await service.complete(service.request(top_k=1, temperature=0.7))
    assert np.abs(logprobs(one_left)).max() < 1e-6
    top = await service.complete(service.request(top_logprobs=3, temperature=0.7, top_k=8))
    best = np.frombuffer(top.span.top_logprobs, "<f4").reshape(-1, 3)
    chosen = np.frombuffer(top.span.top_token_ids, "<i4").reshape(-1, 3)
    ids = np.frombuffer(top.span.token_ids, "<i4")
    assert (np.diff(best, axis=1) <= 0).all() and (np.exp(best).sum(axis=1) <= 1 + 1e-5).all()
    assert all(len(set(row)) == 3 for row in chosen)
    for n, token in enumerate(ids):
        if token in chosen[n]:
            assert best[n][list(chosen[n]).index(token)] == logprobs(top)[n]


@pytest.mark.requirement("R63")
async def test_the_same_seed_repeats_a_completion(service: Served) -> None:
    """An accepted option takes effect; one that was not given is not made up."""
    await service.push(models.random_policy(3))
    first, second, free = [
        await service.complete(service.request(**seed)) for seed in ({"seed": 7}, {"seed": 7}, dict[str, int]())
    ]
    assert first.span.token_ids == second.span.token_ids and first.sampling_used.seed == 7
    assert not free.sampling_used.HasField("seed")


@pytest.mark.requirement("R63")
async def test_a_stop_text_ends_with_the_token_that_completes_it(service: Served) -> None:
    """Stop texts, which vLLM is not asked for, hold to the token."""
    await service.push(models.calling_policy())
    prompt = (
        await service.stub.Render(
            pb.RenderRequest(
                prompt=pb.ChatPrompt(
                    messages=[
                        chat_pb2.Message(
                            role=chat_pb2.ROLE_USER, parts=[chat_pb2.Part(text=chat_pb2.Text(text="look"))]
                        )
                    ]
                )
            )
        )
    ).token_ids
    request = service.request(temperature=0, max_tokens=20, min_tokens=0, stop=["arguments"])
    request.token_ids = prompt
    done = await service.complete(request)
    assert done.finish_reason == chat_pb2.FINISH_REASON_STOP and done.stop_text == "arguments"
    assert done.span.count == 2 and len(done.span.logprobs) == 8


@pytest.mark.requirement("R87")
async def test_seen_prompt_is_cached_under_the_same_policy_only(service: Served) -> None:
    """No token is computed from what another policy left in the cache."""
    await service.push(models.random_policy(3))
    prompt = np.random.default_rng(0).integers(20, 400, 200)
    usages = [(await service.complete(service.request(prompt))).usage.cached_tokens for _ in range(2)]
    await service.push(models.random_policy(4))
    usages.append((await service.complete(service.request(prompt))).usage.cached_tokens)
    assert usages[0] == 0 and usages[1] >= 128 and usages[2] == 0


@pytest.mark.requirement("R29")
@pytest.mark.parametrize("stream", [True, False])
async def test_abort_ends_a_generation_with_its_tokens_so_far(service: Served, stream: bool) -> None:
    """By our id, at once, and what was sampled is exact."""
    request = service.endless()
    request.stream, request.session_id = stream, "to-be-aborted"
    call = asyncio.ensure_future(service.complete(request))
    await running(service, 1)
    answer = await service.stub.Abort(pb.AbortRequest(session_id="to-be-aborted"))
    done = await call
    assert answer.aborted_count == 1
    assert done.finish_reason == chat_pb2.FINISH_REASON_ABORT and 0 < done.span.count < models.ENDLESS
    assert len(done.span.logprobs) == 4 * done.span.count
    assert sum(v.end - v.start for v in done.span.versions) == done.span.count


@pytest.mark.requirement("R32")
async def test_a_call_that_is_cancelled_leaves_nothing_behind(service: Served) -> None:
    """VLLM computes for nobody who has gone."""
    call = service.stub.Generate(service.endless())
    await call.read()
    call.cancel()
    await running(service, 0)


async def running(service: Served, count: int) -> None:
    """Until this many generations run."""
    await service.until(lambda stats: stats.running == count)


@pytest.mark.requirement("R26")
async def test_a_pause_freezes_and_new_requests_wait(service: Served) -> None:
    """Kept generations go on where they stood, what came meanwhile runs afterwards, nothing is lost."""
    events = aiter(service.stub.Generate(service.request(stream=True, max_tokens=2000, min_tokens=2000)))
    await first_tokens(events)
    await service.stub.Pause(pb.PauseRequest(mode=pb.PAUSE_MODE_KEEP))
    late = asyncio.ensure_future(service.complete(service.request()))
    before = await stats(service, waiting=1)
    after = await stats(service, waiting=1)
    assert before.sampled_tokens == after.sampled_tokens and (await info(service)).paused
    # Told by vLLM itself, as each request's times are.
    assert before.cache_use > 0
    await service.stub.Resume(pb.ResumeRequest())
    kept = [event async for event in events][-1].done.completion
    assert kept.span.count == 2000 and (await late).span.count == 16
    times = (await late).timings
    assert times.prefill.ToNanoseconds() > 0 and times.decode.ToNanoseconds() > 0 and times.queued.ToNanoseconds() > 0
    assert not (await info(service)).paused


async def stats(service: Served, waiting: int) -> Any:
    return await service.until(lambda found: found.waiting == waiting)


async def info(service: Served) -> pb.GetInfoResponse:
    answer: pb.GetInfoResponse = await service.stub.GetInfo(pb.GetInfoRequest())
    return answer


@pytest.mark.requirement("R26")
async def test_a_pause_may_let_what_runs_finish_or_end_it(service: Served) -> None:
    """WAIT and ABORT, and the way back."""
    ending = service.request(stream=True, max_tokens=600, min_tokens=600)
    for mode, request, reason in (
        (pb.PAUSE_MODE_WAIT, ending, chat_pb2.FINISH_REASON_LENGTH),
        (pb.PAUSE_MODE_ABORT, service.endless(), chat_pb2.FINISH_REASON_ABORT),
    ):
        events = aiter(service.stub.Generate(request))
        await first_tokens(events)
        await service.stub.Pause(pb.PauseRequest(mode=mode))
        assert [event async for event in events][-1].done.completion.finish_reason == reason
        await service.stub.Resume(pb.ResumeRequest())
        assert (await service.complete(service.request())).span.count == 16


@pytest.mark.requirement("R31")
async def test_many_at_once_are_all_answered(service: Served) -> None:
    """More than may run at once; each has its own tokens and logprobs."""
    await service.push(models.random_policy(3))
    done = await asyncio.gather(*(service.complete(service.request(range(20, 21 + n % 50))) for n in range(48)))
    assert all(completion.span.count == 16 for completion in done)
    assert len({completion.span.token_ids for completion in done}) > 40


@pytest.mark.requirement("R33", "R63")
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"token_ids": b"abc"}, "token_ids"),
        ({"token_ids": b""}, "prompt_token_ids"),
        ({"token_ids": np.array([models.VOCAB], "<i4").tobytes()}, "prompt_token_ids[0]"),
        ({"token_ids": np.array([5, -1], "<i4").tobytes()}, "prompt_token_ids[1]"),
        ({"token_ids": np.full(models.CONTEXT, 20, "<i4").tobytes()}, "prompt_token_ids"),
        ({"request_id": ""}, "request_id"),
        ({"adapter": "nobody"}, "adapter"),
        ({"sampling": {"max_tokens": models.CONTEXT}}, "sampling.max_tokens"),
        ({"sampling": {"max_tokens": 4, "min_tokens": 5}}, "sampling.min_tokens"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature"),
        ({"sampling": {"temperature": 0.001}}, "sampling.temperature"),
        ({"sampling": {"top_p": 0}}, "sampling.top_p"),
        ({"sampling": {"presence_penalty": 3}}, "sampling.presence_penalty"),
        ({"sampling": {"stop_token_ids": [models.VOCAB]}}, "sampling.stop_token_ids"),
        ({"sampling": {"thinking": True}}, "sampling.thinking"),
        ({"sampling": {"response_format_json": "{}"}}, "sampling.response_format_json"),
        ({"version": {"min_version": 1, "exact_version": 1}}, "min_policy_version"),
    ],
)
async def test_a_bad_request_is_refused_by_its_field(
    service: Served, failure: Failure, change: dict[str, Any], field: str
) -> None:
    """Over-long, out of the vocabulary, contradictory, unknown: before anything starts."""
    fields: dict[str, Any] = {
        "request_id": "bad",
        "token_ids": np.array([20, 21], "<i4").tobytes(),
        "sampling": {"max_tokens": 4},
    }
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.complete(pb.GenerateRequest(**(fields | change)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert failure(caught.value).violations[0].field == field


@pytest.mark.requirement("R33")
async def test_a_template_that_fails_is_the_callers_error(service: Served, failure: Failure) -> None:
    """With the field that it is about."""
    lone = pb.ChatPrompt(messages=[chat_pb2.Message(role=chat_pb2.ROLE_USER)], template_options_json='{"tools": 5}')
    request = pb.GenerateRequest(request_id="template", chat=lone, sampling=chat_pb2.Sampling(max_tokens=4))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.complete(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert failure(caught.value).violations[0].field == "chat"


@pytest.mark.requirement("R87")
async def test_unavailable_version_is_refused_and_a_future_one_awaited(service: Served, failure: Failure) -> None:
    """FAILED_PRECONDITION for another version than the one in force; `min_version` waits for its push."""
    version = await service.push(models.random_policy(3))
    exact = service.request()
    exact.version.exact_version = version + 5
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.complete(exact)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert failure(caught.value).reason == "POLICY_VERSION_UNAVAILABLE"
    early = service.request()
    early.version.min_version = version + 1
    waiting = asyncio.ensure_future(service.complete(early))
    await stats(service, waiting=1)
    assert await service.push(models.random_policy(4)) == version + 1
    assert [v.policy_version for v in (await waiting).span.versions] == [version + 1]


@pytest.mark.requirement("R132")
async def test_scores_have_the_alternatives_that_were_sampled_with(service: Served) -> None:
    """vLLM lists the prompt's own token too, first or by its rank; it is not counted."""
    await service.push(models.random_policy(3))
    # `min_tokens` takes the end of a turn out of what is sampled from; a score has it.
    request = service.request(top_logprobs=5, temperature=1.0, min_tokens=0)
    done = await service.complete(request)
    whole = request.token_ids + done.span.token_ids
    wanted = pb.ScoreRequest(token_ids=whole, start=len(request.token_ids) // 4, top_logprobs=5)
    short = pb.ScoreRequest(token_ids=whole, start=1)
    batch = {
        answer.index: answer.score
        async for answer in service.stub.ScoreBatch(pb.ScoreBatchRequest(sequences=[wanted, short]))
    }
    sampled, scored = (np.frombuffer(each.top_logprobs, "<f4") for each in (done.span, batch[0]))
    assert (batch[0].top_count, batch[1].top_count) == (5, 0)
    assert scored.shape == sampled.shape and sampled.size == 5 * done.span.count
    # A prompt's step rounds otherwise than a sampled token's, most for alternatives: 0.0064 was seen.
    np.testing.assert_allclose(scored, sampled, atol=4 * TOLERANCE)
    # Tokens that are nearly as likely may change places, also with the sixth.
    ids = [np.frombuffer(each.top_token_ids, "<i4").reshape(-1, 5) for each in (done.span, batch[0])]
    for row, own, found in zip(sampled.reshape(-1, 5), *ids, strict=True):
        assert set(own[row > row[-1] + 4 * TOLERANCE]) <= set(found)
    np.testing.assert_array_equal(
        np.frombuffer(batch[1].logprobs, "<f4")[-done.span.count :], np.frombuffer(batch[0].logprobs, "<f4")
    )


@pytest.mark.requirement("R49", "R132")
async def test_scores_beside_completions_leave_the_engine_alive(service: Served) -> None:
    """With adapters, vLLM for CPUs ends its process when a prompt is scored beside another request."""
    await service.push(models.random_policy(3))
    request = service.request()
    alone = await service.complete(request)
    whole = request.token_ids + alone.span.token_ids
    asked = pb.ScoreRequest(token_ids=whole, start=1, top_logprobs=2)
    values = np.frombuffer((await service.stub.Score(asked)).logprobs, "<f4")
    lasting = service.endless()
    events = aiter(service.stub.Generate(lasting))
    await first_tokens(events)
    scores = [asyncio.ensure_future(service.stub.Score(asked)) for _ in range(3)]
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await service.stub.Score(asked, timeout=0.2)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    behind = [asyncio.ensure_future(service.complete(service.request())) for _ in range(3)]
    assert not any(score.done() for score in scores)
    assert await service.abort(lasting) == 1
    for score in await asyncio.gather(*scores):
        assert np.abs(np.frombuffer(score.logprobs, "<f4") - values).max() < TOLERANCE
    assert all(done.span.count == 16 for done in await asyncio.gather(*behind))


@pytest.mark.requirement("R63")
async def test_scoring_refuses_what_it_cannot_score(service: Served, failure: Failure) -> None:
    """A temperature that vLLM does not compute is not silently taken for another."""
    two = np.array([20, 21], "<i4").tobytes()
    for request, field in (
        (pb.ScoreRequest(token_ids=two, start=1, temperature=0.5), "temperature"),
        (pb.ScoreRequest(token_ids=two, start=2), "start"),
        (pb.ScoreRequest(token_ids=two, start=1, adapter="nobody"), "adapter"),
        (pb.ScoreRequest(token_ids=np.array([20, 9999], "<i4").tobytes(), start=1), "token_ids[1]"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.stub.Score(request)
        assert failure(caught.value).violations[0].field == field


@pytest.mark.skipif(not ON_CPU, reason="its processes poll on a CPU alone")
@pytest.mark.requirement("R87")
async def test_waiting_vllm_yields_the_processor(service: Served) -> None:
    """Its processes sleep now and then, waiting for each other; yielding alone they starve other sessions."""
    (core,) = [child for child in multiprocessing.active_children() if "EngineCore" in child.name]
    assert core.pid is not None
    children = Path(f"/proc/{core.pid}/task/{core.pid}/children").read_text().split()
    (worker,) = (int(pid) for pid in children if "Worker" in Path(f"/proc/{pid}/comm").read_text())
    before = {pid: times_given_up(pid) for pid in (core.pid, worker)}
    slept: dict[int, int] = {}
    # How often one generation polls depends on what else runs: on a busy machine each yield takes long, and few sleep
    # (a worker once in a generation). A worker that only yields slept twice in 15 generations.
    for _ in range(32):
        await service.complete(service.request(max_tokens=256, min_tokens=256))
        slept = {pid: times_given_up(pid) - count for pid, count in before.items()}
        if min(slept.values()) > 12:
            return
    pytest.fail(f"of {core.pid}, the engine core, and {worker}, its worker, one hardly ever slept: {slept}")
