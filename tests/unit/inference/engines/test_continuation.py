"""A request that outlives the engine that began it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.values.token_tensors import TokenTensor
from penstock_chassis.errors import Unavailable
from penstock_inference.domain.response_format import ResponseFormat
from penstock_inference.engines.base import (
    Delta,
    Done,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    Sampling,
    Started,
    Timings,
    TopLogprobs,
    VersionSpan,
)
from penstock_inference.engines.continuation import MAX_DEATHS, Continuation, unbroken

PROMPT = np.array([3, 1, 4], np.int32)
STOP = 0


def follows(context: np.ndarray[tuple[int], np.dtype[np.int32]]) -> int:
    """The one token that comes after a context."""
    return int(context.astype(np.int64) @ np.arange(1, context.size + 1)) % 11


def logprob(token: int, version: int) -> float:
    """One that tells who sampled it."""
    return -(token + 100.0 * version)


class Mortal:
    """An engine whose answer is a function of the context, and which dies where it is told to.

    `deaths` are the tokens after which each attempt ends, and the version of each attempt is its number; `lost` keeps
    the last event of each attempt from the caller.
    """

    def __init__(self, deaths: list[int], chunk: int = 2) -> None:
        self.deaths = deaths
        self.chunk = chunk
        self.asked: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """Greedy."""
        version = len(self.asked)
        self.asked.append(request)
        dies = self.deaths[version] if version < len(self.deaths) else None
        context, ids, sent = request.prompt_token_ids, list[int](), 0
        if request.stream and dies != 0:
            yield Started(version, 1)
        while True:
            ends = bool(ids) and ids[-1] == STOP and len(ids) >= request.sampling.min_tokens
            over = ends or len(ids) == request.sampling.max_tokens
            if request.stream and len(ids) > sent and (over or len(ids) == dies or len(ids) - sent == self.chunk):
                yield Delta(*self._tokens(ids[sent:], version), version, self._top(ids[sent:]))
                sent = len(ids)
            if len(ids) == dies:
                raise Unavailable("gone", reason="ENGINE_DIED", retry_after_s=1.0)
            if over:
                break
            ids.append(follows(context))
            context = np.append(context, np.int32(ids[-1]))
        yield Done(
            FinishReason.STOP if ends else FinishReason.LENGTH,
            *self._tokens(ids, version),
            (VersionSpan(version, 0, len(ids)),),
            STOP if ends else None,
            request.prompt_token_ids.size,
            1,
            Timings(0, 0, 0),
            7 if request.sampling.seed is None else request.sampling.seed,
            self._top(ids),
        )

    def _tokens(self, ids: list[int], version: int) -> tuple[Any, Any]:
        return np.array(ids, np.int32), np.array([logprob(token, version) for token in ids], np.float32)

    def _top(self, ids: list[int]) -> TopLogprobs:
        column = np.array(ids, np.int32)[:, None]
        return TopLogprobs(column, -column.astype(np.float32))


def request(stream: bool = True, **sampling: Any) -> GenerateRequest:
    """A generation."""
    return GenerateRequest("r", PROMPT, Sampling(**({"max_tokens": 12} | sampling)), stream=stream)


async def always() -> bool:
    """Whether to try again."""
    return True


async def run(engine: Mortal, wanted: GenerateRequest) -> list[GenerateEvent]:
    """All that the caller hears."""
    return [event async for event in unbroken(wanted, (STOP,), engine.generate, always)]


@pytest.mark.requirement("R22", "R43")
@given(st.lists(st.integers(0, 8), max_size=MAX_DEATHS - 1), st.integers(1, 14), st.integers(0, 4), st.booleans())
async def test_caller_gets_one_completion_wherever_engines_die(
    deaths: list[int], most: int, least: int, stream: bool
) -> None:
    """The tokens are those of an engine that lives; each once, in order, with the version that sampled it."""
    wanted = request(stream, max_tokens=most, min_tokens=min(least, most))
    alive = (await run(Mortal([]), wanted))[-1]
    engine = Mortal(deaths)
    events = await run(engine, wanted)
    done = events[-1]
    assert isinstance(done, Done) and isinstance(alive, Done)
    assert done.token_ids.tolist() == alive.token_ids.tolist()
    assert (done.finish_reason, done.stop_token_id) == (alive.finish_reason, alive.stop_token_id)
    assert done.prompt_tokens == PROMPT.size
    assert [span.start for span in done.version_spans] == [0, *(span.end for span in done.version_spans[:-1])]
    assert done.version_spans[-1].end == done.token_ids.size
    for span in done.version_spans:
        for n in range(span.start, span.end):
            assert done.logprobs[n] == np.float32(logprob(int(done.token_ids[n]), span.policy_version))
    assert done.top is not None and done.top.token_ids[:, 0].tolist() == done.token_ids.tolist()
    assert [isinstance(event, Done) for event in events] == [False] * (len(events) - 1) + [True]
    deltas = [event for event in events if isinstance(event, Delta)]
    if stream:
        assert sum(isinstance(event, Started) for event in events) <= 1
        assert [token for delta in deltas for token in delta.token_ids.tolist()] == done.token_ids.tolist()
    else:
        assert all(asked is wanted for asked in engine.asked)


@pytest.mark.requirement("R43")
async def test_a_completion_of_two_engines_claims_no_seed_that_would_repeat_it() -> None:
    """An engine's own seed is not the caller's."""
    (done,) = [event for event in await run(Mortal([4]), request()) if isinstance(event, Done)]
    assert done.seed is None and len(done.version_spans) == 2


@pytest.mark.requirement("R43", "R63")
@pytest.mark.parametrize(
    "sampling",
    [
        {"seed": 1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"stop": ("x",)},
        {"response_format": ResponseFormat.parse('{"type": "json_object"}')},
    ],
)
async def test_features_that_depend_on_the_prompts_end_are_not_continued(
    sampling: dict[str, Any],
) -> None:
    """It fails by type with a delay; with nothing told it is made again as it was."""
    engine = Mortal([4])
    with pytest.raises(Unavailable) as caught:
        await run(engine, request(**sampling))
    assert caught.value.reason == "ENGINE_DIED" and caught.value.retry_after_s
    assert len(engine.asked) == 1
    again = Mortal([0])
    assert isinstance((await run(again, request(**sampling)))[-1], Done)
    assert again.asked[0] is again.asked[1]


@pytest.mark.requirement("R22")
async def test_a_request_under_which_engines_die_again_and_again_is_given_up() -> None:
    """It may be what kills them."""
    engine = Mortal([0] * 10)
    with pytest.raises(Unavailable):
        await run(engine, request())
    assert len(engine.asked) == MAX_DEATHS


@pytest.mark.requirement("R22")
async def test_abort_between_two_engines_ends_with_the_sent_tokens() -> None:
    """Nobody waits for an engine on behalf of a request that is not wanted any more."""
    answers = iter([True, False])

    async def ready() -> bool:
        return next(answers)

    events = [event async for event in unbroken(request(), (STOP,), Mortal([5]).generate, ready)]
    done = events[-1]
    assert isinstance(done, Done)
    assert done.finish_reason is FinishReason.ABORT and done.token_ids.size == 5


@pytest.mark.requirement("R43")
async def test_an_adapters_completion_goes_on_by_the_version_that_it_began_with() -> None:
    """Or not at all."""
    wanted = GenerateRequest("r", PROMPT, Sampling(max_tokens=12), adapter="a", min_policy_version=0)
    engine = Mortal([3])
    await run(engine, wanted)
    assert engine.asked[1].exact_policy_version == 0
    assert engine.asked[1].min_policy_version is None


@pytest.mark.requirement("R132")
def test_routes_that_chose_the_tokens_of_a_dead_engine_are_a_gap() -> None:
    """Another engine's pass over them is not the one that sampled them; of the prompt either is."""
    asked = GenerateRequest("r", PROMPT, Sampling(max_tokens=4, token_tensors=("routed_experts",)))
    journey = Continuation(asked, (STOP,))
    ids, logprobs = np.array([5, 6], np.int32), np.zeros(2, np.float32)
    journey.take(Delta(ids, logprobs, 0))
    assert journey.next().prompt_token_ids.tolist() == [*PROMPT, 5, 6]
    whole = TokenTensor("routed_experts", "uint8", 0, (6, 1, 1), bytes(range(6)))
    done = Done(
        finish_reason=FinishReason.LENGTH,
        token_ids=np.array([7, 8], np.int32),
        logprobs=logprobs,
        version_spans=(VersionSpan(1, 0, 2),),
        stop_token_id=None,
        prompt_tokens=5,
        cached_tokens=0,
        timings=Timings(0.0, 0.0, 0.0),
        seed=None,
        tensors=(whole,),
    )
    joined = journey.take(done)
    assert isinstance(joined, Done) and joined.token_ids.tolist() == [5, 6, 7, 8]
    assert [(one.start, one.data) for one in joined.tensors] == [(0, bytes([0, 1])), (4, bytes([4, 5]))]
