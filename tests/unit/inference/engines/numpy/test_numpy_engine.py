"""The numpy engine as its callers see it: what it promises in `engines.base`."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.support.waiting import GUARD_S, eventually

from penstock_chassis.errors import (
    Aborted,
    AlreadyExists,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    PenstockError,
    ResourceExhausted,
    Unavailable,
)
from penstock_inference.engines.base import (
    Delta,
    Done,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    PauseMode,
    Sampling,
    Started,
    TokenIds,
    UpdateFormat,
    VersionSpan,
)
from penstock_inference.engines.numpy import NumpyEngine
from penstock_inference.testing import FAMILIES, random_config, random_tensors

OpenEngine = Callable[..., Awaitable[NumpyEngine]]


def prompt(length: int, seed: int = 0) -> TokenIds:
    return np.random.default_rng(seed).integers(3, 101, length).astype(np.int32)


def request(name: str, ids: TokenIds, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(name, ids, Sampling(**({"max_tokens": 24, "ignore_eos": True, "seed": 7} | sampling)))


async def complete(engine: NumpyEngine, wanted: GenerateRequest) -> Done:
    done = [event async for event in engine.generate(wanted)][-1]
    assert isinstance(done, Done)
    return done


async def first_token(events: Any) -> None:
    async for event in events:
        if isinstance(event, Delta):
            return


LONG: dict[str, Any] = {"config": {"max_position_embeddings": 8192}, "max_context_tokens": 8192}
"""For requests that have to be still running when something is done to them."""


def assert_same(one: Done, other: Done) -> None:
    np.testing.assert_array_equal(one.token_ids, other.token_ids)
    np.testing.assert_array_equal(one.logprobs, other.logprobs)


async def push(engine: NumpyEngine, version: int, tensors: Any, mode: PauseMode = PauseMode.KEEP) -> None:
    await engine.begin_update(version, "", UpdateFormat.FULL)
    await engine.push_tensors(tensors)
    await engine.commit_update(mode)


@pytest.mark.requirement("R82")
@pytest.mark.parametrize("family", FAMILIES)
async def test_seeded_tokens_are_the_same_alone_and_among_32_requests(open_engine: OpenEngine, family: str) -> None:
    """A result does not depend on who else is served, to the last bit."""
    wanted = [
        request("plain", prompt(70, 1)),
        request("hot", prompt(10, 2), temperature=1.7),
        request("filtered", prompt(140, 3), top_p=0.8, top_k=20, min_p=0.01),
        request("greedy", prompt(33, 4), temperature=0.0),
        request("penalised", prompt(5, 5), repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.1),
    ]
    alone = []
    for each in wanted:
        engine = await open_engine(family)
        alone.append(await complete(engine, each))
        await engine.aclose()
    engine = await open_engine(family, max_concurrency=33)
    mates = [request(f"mate{n}", prompt(1 + 9 * n, 100 + n), seed=n, max_tokens=30 + n) for n in range(32)]
    async with asyncio.TaskGroup() as group:
        for mate in mates:
            group.create_task(complete(engine, mate))
        together = [group.create_task(complete(engine, each)) for each in wanted]
    for single, batched in zip(alone, together, strict=True):
        assert_same(single, batched.result())


@pytest.mark.requirement("R82", "R83")
async def test_scoring_a_completion_gives_exactly_the_logprobs_it_was_sampled_with(open_engine: OpenEngine) -> None:
    """Logprobs are finite, at most 0, and those of the model."""
    engine = await open_engine()
    for temperature in (1.0, 0.7):
        ids = prompt(40)
        done = await complete(engine, request("r", ids, temperature=temperature, max_tokens=100))
        scores = await engine.score(np.concatenate([ids, done.token_ids]), temperature)
        assert np.isfinite(done.logprobs).all() and (done.logprobs <= 0).all()
        np.testing.assert_array_equal(scores.logprobs[ids.size - 1 :], done.logprobs)


@pytest.mark.requirement("R132")
async def test_a_scores_alternatives_are_those_that_were_sampled_with(open_engine: OpenEngine) -> None:
    """Over the whole sequence, whatever pieces it is computed in; a token among them has its own logprob."""
    engine = await open_engine(**LONG)
    for length, temperature in ((40, 1.0), (700, 0.7)):
        ids = prompt(length)
        done = await complete(engine, request("r", ids, temperature=temperature, max_tokens=30, top_logprobs=5))
        whole = np.concatenate([ids, done.token_ids])
        scores = await engine.score(whole, temperature, top_logprobs=5)
        assert done.top is not None and scores.top is not None and scores.top.token_ids.shape == (whole.size - 1, 5)
        np.testing.assert_array_equal(scores.top.token_ids[length - 1 :], done.top.token_ids)
        np.testing.assert_array_equal(scores.top.logprobs[length - 1 :], done.top.logprobs)
        among = scores.top.token_ids == whole[1:, None]
        np.testing.assert_array_equal(scores.top.logprobs[among], scores.logprobs[among.any(axis=1)])


@pytest.mark.requirement("R132")
async def test_all_alternatives_together_are_the_whole_distribution(open_engine: OpenEngine) -> None:
    """A vocabulary smaller than what was asked for is listed whole, in falling order."""
    engine = await open_engine(config={"vocab_size": 12, "eos_token_id": None})
    scores = await engine.score(np.arange(3, 10, dtype=np.int32), top_logprobs=20)
    assert scores.top is not None and scores.top.token_ids.shape == (6, 12)
    assert all(sorted(row) == list(range(12)) for row in scores.top.token_ids.tolist())
    assert (np.diff(scores.top.logprobs) <= 0).all()
    np.testing.assert_allclose(np.exp(scores.top.logprobs.astype(np.float64)).sum(axis=1), 1.0, rtol=1e-6)
    for top in (-1, 21):
        with pytest.raises(InvalidArgument) as caught:
            await engine.score(np.arange(3, 10, dtype=np.int32), top_logprobs=top)
        assert caught.value.violations[0].field == "top_logprobs"


@pytest.mark.requirement("R132")
async def test_routed_experts_are_those_of_the_pass_that_computed_each_token(open_engine: OpenEngine) -> None:
    """From the wanted position on; of a cached prefix too, and under newer weights theirs."""
    moe = random_config("qwen3_moe", eos_token_id=None)
    engine = await open_engine("qwen3_moe")
    ids = prompt(70)
    asks = {"token_tensors": ("routed_experts",), "max_tokens": 5}
    whole = await complete(engine, request("whole", ids, **asks))
    (experts,) = whole.tensors
    assert (experts.name, experts.start, experts.shape) == ("routed_experts", 0, (74, 2, 2))
    again = await complete(engine, replace(request("later", ids, **asks), tensor_start=69))
    assert again.cached_tokens == 69 and again.tensors == (experts.cut(69, 74),)
    assert not (await complete(engine, request("plain", ids))).tensors
    await push(engine, 1, random_tensors(moe, seed=9))
    newer = await complete(engine, request("newer", ids, **asks))
    assert newer.tensors[0].shape == experts.shape and newer.tensors[0].data != experts.data


@pytest.mark.requirement("R82")
async def test_a_reused_prefix_gives_the_same_result_and_is_counted(open_engine: OpenEngine) -> None:
    """The cache saves work and changes nothing."""
    engine = await open_engine()
    first = await complete(engine, request("first", prompt(100)))
    again = await complete(engine, request("again", prompt(100)))
    assert (first.cached_tokens, again.cached_tokens) == (0, 99)
    assert_same(first, again)
    longer = np.concatenate([prompt(100), first.token_ids, prompt(20, 9)])
    turn = await complete(engine, request("turn", longer))
    # The last sampled token was never fed back, so its key is not cached.
    assert turn.cached_tokens == 100 + first.token_ids.size - 1
    assert_same(turn, await complete(await open_engine(), request("turn", longer)))


async def test_a_group_prefills_its_shared_prompt_once(open_engine: OpenEngine) -> None:
    """Eight rollouts of one task cost one prompt."""
    engine = await open_engine()
    async with asyncio.TaskGroup() as group:
        for n in range(8):
            group.create_task(complete(engine, request(f"r{n}", prompt(300), seed=n, max_tokens=4)))
    assert engine.stats().prompt_tokens == 300 + 7
    assert engine.stats().cached_tokens == 7 * 299


@pytest.mark.requirement("R26")
async def test_more_requests_than_slots_all_finish(open_engine: OpenEngine) -> None:
    """Nothing is dropped, only queued."""
    engine = await open_engine(max_concurrency=3)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(complete(engine, request(f"r{n}", prompt(20, n), seed=n))) for n in range(20)]
    for n, task in enumerate(tasks):
        assert_same(task.result(), await complete(engine, request("alone", prompt(20, n), seed=n)))


@pytest.mark.requirement("R26")
async def test_a_full_queue_refuses_with_a_delay(open_engine: OpenEngine) -> None:
    """Back-pressure is visible."""
    engine = await open_engine(max_concurrency=1, max_waiting=1)
    await engine.pause(PauseMode.KEEP)
    async with asyncio.TaskGroup() as group:
        held = [group.create_task(complete(engine, request(f"r{n}", prompt(4)))) for n in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ResourceExhausted) as caught:
            await complete(engine, request("third", prompt(4)))
        assert caught.value.reason == "QUEUE_FULL" and caught.value.retry_after_s
        await engine.resume()
    assert all(task.result().finish_reason is FinishReason.LENGTH for task in held)


@pytest.mark.requirement("R82")
async def test_deltas_and_the_end_tell_the_same_tokens(open_engine: OpenEngine) -> None:
    engine = await open_engine()
    events: Sequence[GenerateEvent] = [e async for e in engine.generate(request("r", prompt(9), top_logprobs=3))]
    started, deltas, done = events[0], [e for e in events if isinstance(e, Delta)], events[-1]
    assert isinstance(started, Started) and isinstance(done, Done)
    np.testing.assert_array_equal(np.concatenate([d.token_ids for d in deltas]), done.token_ids)
    np.testing.assert_array_equal(np.concatenate([d.logprobs for d in deltas]), done.logprobs)
    assert done.top is not None and done.top.token_ids.shape == (24, 3)
    assert (np.diff(done.top.logprobs, axis=1) <= 0).all()
    quiet = [e async for e in engine.generate(replace(request("q", prompt(9)), stream=False))]
    assert len(quiet) == 1 and isinstance(quiet[0], Done)
    assert_same(done, quiet[0])


@pytest.mark.requirement("R87")
async def test_a_stop_token_ends_a_completion_and_belongs_to_it(open_engine: OpenEngine) -> None:
    """The finish reason is recorded."""
    engine = await open_engine()
    free = await complete(engine, request("free", prompt(9)))
    stop = int(free.token_ids[5])
    at = free.token_ids.tolist().index(stop)
    stopped = await complete(engine, request("stopped", prompt(9), stop_token_ids=(stop,)))
    assert (stopped.finish_reason, stopped.stop_token_id) == (FinishReason.STOP, stop)
    np.testing.assert_array_equal(stopped.token_ids, free.token_ids[: at + 1])
    later = await complete(engine, request("later", prompt(9), stop_token_ids=(stop,), min_tokens=at + 2))
    assert stop not in later.token_ids[: at + 1]


@pytest.mark.requirement("R63")
async def test_the_models_own_stop_token_counts_unless_ignored(open_engine: OpenEngine) -> None:
    """Both ways take effect."""
    engine = await open_engine(config={"eos_token_id": [2, *range(40, 101)]})
    done = await complete(engine, request("r", prompt(9), ignore_eos=False, max_tokens=200))
    assert done.finish_reason is FinishReason.STOP and done.stop_token_id == done.token_ids[-1]
    assert (await complete(engine, request("i", prompt(9)))).finish_reason is FinishReason.LENGTH


@pytest.mark.requirement("R82")
async def test_greedy_takes_the_likeliest_and_reports_its_probability(open_engine: OpenEngine) -> None:
    engine = await open_engine()
    done = await complete(engine, request("r", prompt(9), temperature=0.0, top_logprobs=1))
    assert done.top is not None
    np.testing.assert_array_equal(done.token_ids, done.top.token_ids[:, 0])
    np.testing.assert_array_equal(done.logprobs, done.top.logprobs[:, 0])


@pytest.mark.requirement("R86")
async def test_completions_without_a_seed_differ_and_report_one_that_repeats_them(open_engine: OpenEngine) -> None:
    """What was used is recorded."""
    engine = await open_engine()
    one, two = [await complete(engine, request("r", prompt(9), seed=None)) for _ in range(2)]
    assert one.seed != two.seed and one.token_ids.tolist() != two.token_ids.tolist()
    assert_same(one, await complete(engine, request("r", prompt(9), seed=one.seed)))


@pytest.mark.requirement("R23")
async def test_abort_ends_the_named_generations_with_what_they_have(open_engine: OpenEngine) -> None:
    """Nothing is left behind."""
    engine = await open_engine(max_concurrency=2, **LONG)
    endless = {"max_tokens": 8000}
    async with asyncio.TaskGroup() as group:
        streams = [engine.generate(replace(request(f"r{n}", prompt(9, n), **endless), session_id="s")) for n in (0, 1)]
        for stream in streams:
            await first_token(stream)
        queued = group.create_task(complete(engine, request("queued", prompt(9), **endless)))
        rest = [group.create_task(_last(stream)) for stream in streams]
        await asyncio.sleep(0)
        assert await engine.abort(request_ids=["queued", "unknown"]) == 1
        assert await engine.abort(session_id="s") == 2
    assert queued.result().finish_reason is FinishReason.ABORT and queued.result().token_ids.size == 0
    for task in rest:
        done = task.result()
        assert done.finish_reason is FinishReason.ABORT and 0 < done.token_ids.size < 8000
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)
    assert await engine.abort(everything=True) == 0


async def _last(stream: Any) -> Done:
    done = [event async for event in stream][-1]
    assert isinstance(done, Done)
    return done


@pytest.mark.requirement("R23", "R107")
async def test_an_abort_of_the_empty_id_ends_no_score(open_engine: OpenEngine) -> None:
    """Scores have no id, and any caller of the engine may have asked for one."""
    engine = await open_engine()
    await engine.pause(PauseMode.KEEP)
    score = asyncio.create_task(engine.score(prompt(9)))
    await asyncio.sleep(0)
    assert await engine.abort(request_ids=["", "unknown"]) == 0
    await engine.resume()
    assert (await score).logprobs.size == 8


@pytest.mark.requirement("R23", "R32")
async def test_leaving_a_generation_frees_its_slot_and_its_id(open_engine: OpenEngine) -> None:
    """A cancelled wait releases what it held."""
    engine = await open_engine(max_concurrency=1, **LONG)
    stream = engine.generate(request("r", prompt(9), max_tokens=8000))
    await first_token(stream)
    with pytest.raises(AlreadyExists):
        await complete(engine, request("r", prompt(9)))
    await stream.aclose()
    assert (await complete(engine, request("r", prompt(9)))).finish_reason is FinishReason.LENGTH


@pytest.mark.requirement("R87")
async def test_version_spans_are_exact_across_a_swap_in_flight(open_engine: OpenEngine) -> None:
    """Each token has the version that sampled it."""
    engine = await open_engine(**LONG)
    deltas: list[Delta] = []
    done: Done | None = None
    async for event in engine.generate(request("r", prompt(9), max_tokens=8000)):
        if isinstance(event, Delta):
            deltas.append(event)
            if len(deltas) == 1:
                await push(engine, 5, random_tensors(random_config(), seed=2))
            if event.policy_version == 5:
                await engine.abort(request_ids=["r"])
        elif isinstance(event, Done):
            done = event
    assert done is not None
    versions = [d.policy_version for d in deltas for _ in d.token_ids]
    cut, count = versions.index(5), len(versions)
    assert versions == [0] * cut + [5] * (count - cut)
    assert done.version_spans == (VersionSpan(0, 0, cut), VersionSpan(5, cut, count))
    # Up to the swap these are the old policy's tokens.
    old = await complete(await open_engine(**LONG), request("o", prompt(9), max_tokens=cut))
    np.testing.assert_array_equal(done.token_ids[:cut], old.token_ids)
    assert (engine.info().policy_version, engine.stats().tokens_by_version) == (5, {0: cut, 5: count - cut})


@pytest.mark.requirement("R82", "R87")
async def test_after_an_update_nothing_of_the_old_policy_is_reused(open_engine: OpenEngine) -> None:
    engine = await open_engine()
    await complete(engine, request("warm", prompt(100)))
    await push(engine, 1, random_tensors(random_config(), seed=2))
    done = await complete(engine, request("r", prompt(100)))
    assert done.cached_tokens == 0
    assert_same(done, await complete(await open_engine(seed=2), request("r", prompt(100))))


@pytest.mark.requirement("R63")
@pytest.mark.parametrize("flaw", ["missing", "shape", "nan", "unknown"])
async def test_a_push_that_fails_leaves_weights_and_version(open_engine: OpenEngine, flaw: str) -> None:
    """An update is whole or nothing."""
    engine = await open_engine()
    before = await complete(engine, request("r", prompt(30)))
    tensors = random_tensors(random_config(), seed=2)
    name = "model.layers.0.mlp.up_proj.weight"
    if flaw == "missing":
        del tensors[name]
    elif flaw == "unknown":
        tensors["model.layers.9.mlp.up_proj.weight"] = tensors[name]
    else:
        tensors[name] = tensors[name].T if flaw == "shape" else tensors[name] * np.float32(np.nan)
    with pytest.raises(PenstockError) as caught:
        await push(engine, 1, tensors)
    assert caught.value.reason.startswith("TENSOR_")
    assert engine.info().policy_version == 0
    assert_same(before, await complete(engine, request("r", prompt(30))))
    await push(engine, 1, random_tensors(random_config(), seed=2))
    assert engine.info().policy_version == 1


@pytest.mark.requirement("R22")
async def test_updates_are_one_at_a_time_and_only_forward(open_engine: OpenEngine) -> None:
    engine = await open_engine()
    tensors = random_tensors(random_config(), seed=2)
    with pytest.raises(FailedPrecondition):
        await engine.commit_update()
    await engine.begin_update(3, "", UpdateFormat.FULL)
    with pytest.raises(Aborted):
        await engine.begin_update(4, "", UpdateFormat.FULL)
    await engine.abort_update()
    await push(engine, 3, tensors)
    for version in (0, 3):
        with pytest.raises(FailedPrecondition) as caught:
            await push(engine, version, tensors)
        assert caught.value.reason == "POLICY_VERSION_NOT_NEWER"


@pytest.mark.requirement("R63")
async def test_a_delta_replaces_the_tensors_that_it_names(open_engine: OpenEngine) -> None:
    engine = await open_engine()
    old, new = random_tensors(random_config(), seed=0), random_tensors(random_config(), seed=2)
    name = "model.layers.1.mlp.down_proj.weight"
    await engine.begin_update(1, "partial", UpdateFormat.DELTA)
    await engine.push_tensors({name: new[name]})
    await engine.commit_update()
    other = await open_engine()
    await push(other, 1, old | {name: new[name]})
    assert_same(await complete(engine, request("r", prompt(30))), await complete(other, request("r", prompt(30))))


@pytest.mark.requirement("R22")
@pytest.mark.parametrize("mode", list(PauseMode))
async def test_pause_does_to_generations_what_its_mode_says(open_engine: OpenEngine, mode: PauseMode) -> None:
    """Requests that come during a pause wait and are answered after it."""
    engine = await open_engine(**LONG)
    stream = engine.generate(request("r", prompt(9), max_tokens=8000 if mode is PauseMode.ABORT else 500))
    await first_token(stream)
    await engine.pause(mode)
    assert engine.info().paused
    async with asyncio.TaskGroup() as group:
        running = group.create_task(_last(stream))
        late = group.create_task(complete(engine, request("late", prompt(9))))
        sampled = engine.stats().sampled_tokens
        await asyncio.sleep(0)
        if mode is not PauseMode.KEEP:
            reason = FinishReason.ABORT if mode is PauseMode.ABORT else FinishReason.LENGTH
            assert (await running).finish_reason is reason
        assert not late.done() and engine.stats().sampled_tokens == sampled
        await engine.resume()
    assert not engine.info().paused
    assert late.result().finish_reason is FinishReason.LENGTH
    if mode is PauseMode.KEEP:
        whole = await complete(await open_engine(), request("o", prompt(9), max_tokens=400))
        np.testing.assert_array_equal(running.result().token_ids[:400], whole.token_ids)


async def waits_for(engine: NumpyEngine, name: str) -> tuple[asyncio.Task[Done], asyncio.Task[None]]:
    """A generation that has begun and lasts until it is aborted, and an update that waits for it."""
    stream = engine.generate(request(name, prompt(9), max_tokens=8000))
    await first_token(stream)
    running = asyncio.create_task(_last(stream))
    pushing = asyncio.create_task(push(engine, 1, random_tensors(random_config(), seed=2), PauseMode.WAIT))
    await eventually(lambda: bool(engine._worker._idle_waits), "the update waits")
    return running, pushing


async def steps(engine: NumpyEngine) -> None:
    """More than an update takes that waits for nothing."""
    for _ in range(10):
        await engine._worker.between_steps(lambda: None)


@pytest.mark.requirement("R22", "R87")
async def test_a_pause_during_an_update_that_waits_outlives_it(open_engine: OpenEngine) -> None:
    """What it froze would not end before a resume, so the update comes at once, as in a pause that came before."""
    engine = await open_engine(**LONG)
    running, pushing = await waits_for(engine, "r")
    await engine.pause(PauseMode.KEEP)
    await pushing
    assert engine.info().paused and engine.info().policy_version == 1
    sampled = engine.stats().sampled_tokens
    await steps(engine)
    assert engine.stats().sampled_tokens == sampled and not running.done()
    await engine.abort(everything=True)
    assert [span.policy_version for span in (await running).version_spans] == [0]
    await engine.resume()


@pytest.mark.requirement("R22", "R87")
@pytest.mark.parametrize("paused", [False, True])
async def test_an_update_that_waits_still_waits_after_a_resume(open_engine: OpenEngine, paused: bool) -> None:
    """No completion is of both policies, whoever paused and resumed meanwhile; what comes later has the new one."""
    engine = await open_engine(**LONG)
    running, pushing = await waits_for(engine, "r")
    async with asyncio.TaskGroup() as group:
        if paused:
            group.create_task(engine.pause(PauseMode.WAIT))
            await eventually(lambda: len(engine._worker._idle_waits) == 2, "the pause waits, too")
        await engine.resume()
    late = asyncio.create_task(complete(engine, request("late", prompt(9))))
    await steps(engine)
    assert not pushing.done() and not late.done()
    await engine.abort(request_ids=["r"])
    await pushing
    assert [span.policy_version for span in (await running).version_spans] == [0]
    assert [span.policy_version for span in (await late).version_spans] == [1]


@pytest.mark.requirement("R22", "R87")
async def test_an_update_that_is_given_up_while_it_waits_holds_no_request(open_engine: OpenEngine) -> None:
    engine = await open_engine(**LONG)
    running, pushing = await waits_for(engine, "r")
    pushing.cancel()
    await asyncio.gather(pushing, return_exceptions=True)
    late = await complete(engine, request("late", prompt(9)))
    assert [span.policy_version for span in late.version_spans] == [0]
    await engine.abort(everything=True)
    await running


@pytest.mark.requirement("R22")
async def test_a_pause_that_waits_does_not_wait_for_what_another_froze(open_engine: OpenEngine) -> None:
    """It waited for the resume, after which it reported an engine that runs as paused."""
    engine = await open_engine(**LONG)
    stream = engine.generate(request("r", prompt(9), max_tokens=8000))
    await first_token(stream)
    await engine.pause(PauseMode.KEEP)
    async with asyncio.timeout(GUARD_S):
        await engine.pause(PauseMode.WAIT)
    assert engine.info().paused and engine.stats().running == 1
    await engine.resume()
    await stream.aclose()


@pytest.mark.requirement("R87")
async def test_request_waits_for_its_minimum_version_and_refuses_another_exact_one(
    open_engine: OpenEngine,
) -> None:
    """A trainer may bound staleness."""
    engine = await open_engine()
    async with asyncio.TaskGroup() as group:
        early = group.create_task(complete(engine, replace(request("e", prompt(9)), min_policy_version=1)))
        await complete(engine, replace(request("now", prompt(9)), exact_policy_version=0))
        assert not early.done() and engine.stats().waiting == 1
        await push(engine, 1, random_tensors(random_config(), seed=2))
    assert early.result().version_spans == (VersionSpan(1, 0, 24),)
    with pytest.raises(FailedPrecondition) as caught:
        await complete(engine, replace(request("old", prompt(9)), exact_policy_version=0))
    assert caught.value.reason == "POLICY_VERSION_UNAVAILABLE"


@pytest.mark.requirement("R63", "R83")
@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        (request("r", np.empty(0, np.int32)), "prompt_token_ids"),
        (request("r", np.array([5, 101], np.int32)), "prompt_token_ids[1]"),
        (request("r", np.array([-1], np.int32)), "prompt_token_ids[0]"),
        (request("r", prompt(500)), "sampling.max_tokens"),
        (request("r", prompt(600)), "prompt_token_ids"),
        (request("r", prompt(5), max_tokens=0), "sampling.max_tokens"),
        (request("r", prompt(5), temperature=-0.1), "sampling.temperature"),
        (request("r", prompt(5), temperature=float("nan")), "sampling.temperature"),
        (request("r", prompt(5), top_p=0.0), "sampling.top_p"),
        (request("r", prompt(5), top_k=-1), "sampling.top_k"),
        (request("r", prompt(5), min_p=1.5), "sampling.min_p"),
        (request("r", prompt(5), stop_token_ids=(101,)), "sampling.stop_token_ids"),
        (request("r", prompt(5), seed=-1), "sampling.seed"),
        (request("r", prompt(5), min_tokens=30), "sampling.min_tokens"),
        (request("r", prompt(5), repetition_penalty=0.0), "sampling.repetition_penalty"),
        (request("r", prompt(5), top_logprobs=21), "sampling.top_logprobs"),
    ],
)
async def test_a_request_out_of_range_is_refused_before_it_starts(
    open_engine: OpenEngine, wanted: GenerateRequest, field: str
) -> None:
    """With the field named."""
    engine = await open_engine()
    with pytest.raises(InvalidArgument) as caught:
        await complete(engine, wanted)
    assert caught.value.violations[0].field == field
    assert engine.stats().steps == 0


@pytest.mark.requirement("R82")
async def test_diverged_weights_fail_their_requests_and_poison_nothing(open_engine: OpenEngine) -> None:
    """Nothing is filled in."""
    engine = await open_engine(max_concurrency=2)
    healthy = random_tensors(random_config(), seed=0)
    before = await complete(engine, request("r", prompt(30)))
    diverged = {name: tensor * np.float32(1e37) for name, tensor in healthy.items() if "mlp" in name}
    await push(engine, 1, healthy | diverged)
    with pytest.raises(Internal) as caught:
        await complete(engine, request("bad", prompt(30)))
    assert caught.value.reason == "LOGITS_NOT_FINITE"
    await push(engine, 2, healthy)
    assert_same(before, await complete(engine, request("r", prompt(30))))


@pytest.mark.requirement("R24")
async def test_closing_ends_what_is_in_flight_and_refuses_what_comes(open_engine: OpenEngine) -> None:
    """A typed end."""
    engine = await open_engine(max_concurrency=1, **LONG)
    stream = engine.generate(request("r", prompt(9), max_tokens=8000))
    await first_token(stream)
    await engine.aclose()
    done = await _last(stream)
    assert done.finish_reason is FinishReason.ABORT
    with pytest.raises(Unavailable):
        await complete(engine, request("late", prompt(9)))
    await engine.aclose()
