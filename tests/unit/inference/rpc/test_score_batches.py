"""Batches of sequences to score: how many at once, and what ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import pytest

from penstock.inference.v1 import inference_service_pb2 as pb
from penstock_chassis.errors import FailedPrecondition, ResourceExhausted
from penstock_inference.rpc.score_batches import AT_ONCE, scored


class Engine:
    """Scores when it is released, and notes what runs; `places` are free for requests."""

    def __init__(self, places: int = 1000) -> None:
        self.places = places
        self.released = asyncio.Event()
        self.begun: list[int] = []
        self.running = self.most = 0

    @contextmanager
    def serving(self) -> Iterator[None]:
        if not self.places:
            raise ResourceExhausted("no place", reason="NAMESPACE_QUOTA")
        self.places -= 1
        try:
            yield
        finally:
            self.places += 1

    async def score(self, request: pb.ScoreRequest) -> pb.ScoreResponse:
        """Fails for odd starts from 101 on, and in an unexpected way for 200."""
        self.begun.append(request.start)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.released.wait()
        finally:
            self.running -= 1
        if request.start == 200:
            raise RuntimeError("a fault")
        if request.start > 100 and request.start % 2:
            raise FailedPrecondition("odd", reason="POLICY_VERSION_UNAVAILABLE")
        return pb.ScoreResponse(policy_version=request.start)

    def batch(self, *starts: int) -> Any:
        """Their answers."""
        request = pb.ScoreBatchRequest(sequences=[pb.ScoreRequest(start=start) for start in starts])
        return scored(request, self.score, self.serving)


async def until_still(engine: Engine) -> None:
    """Until nothing new begins."""
    before = -1
    while before != len(engine.begun):
        before = len(engine.begun)
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.mark.requirement("R132")
async def test_each_sequence_has_its_own_answer_and_no_more_than_so_many_run_at_once() -> None:
    engine = Engine()
    engine.released.set()
    starts = range(90, 90 + 3 * AT_ONCE)
    answers = {answer.index: answer async for answer in engine.batch(*starts)}
    assert sorted(answers) == list(range(len(starts))) and engine.most <= AT_ONCE
    for index, start in enumerate(starts):
        failed = start > 100 and start % 2 == 1
        assert answers[index].WhichOneof("outcome") == ("failure" if failed else "score")
        assert failed or answers[index].score.policy_version == start
    assert (answers[11].failure.reason, answers[11].failure.code) == ("POLICY_VERSION_UNAVAILABLE", 9)


@pytest.mark.requirement("R132")
async def test_a_slow_reader_stops_the_scoring() -> None:
    """No more answers wait than twice what runs at once."""
    engine = Engine()
    engine.released.set()
    async with aclosing(engine.batch(*range(1, 101))) as answers:
        await anext(answers)
        await until_still(engine)
        assert len(engine.begun) <= 2 * AT_ONCE + 1


@pytest.mark.requirement("R32", "R132")
async def test_a_batch_that_nobody_reads_any_more_scores_nothing_further() -> None:
    """What runs is cancelled, and its places are free again."""
    engine = Engine(places=40)
    answers = engine.batch(*range(1, 101))
    reading = asyncio.ensure_future(anext(answers))
    await until_still(engine)
    assert engine.running == AT_ONCE and engine.places == 40 - AT_ONCE
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await answers.aclose()
    assert (engine.running, engine.places, len(engine.begun)) == (0, 40, AT_ONCE)


@pytest.mark.requirement("R132")
async def test_a_batch_takes_the_places_that_there_are() -> None:
    """With one place it goes on, one by one; without any it is refused, and nothing is scored."""
    for places in (1, 3):
        engine = Engine(places)
        engine.released.set()
        assert len([answer async for answer in engine.batch(*range(1, 31))]) == 30
        assert engine.most <= places == engine.places
    full = Engine(0)
    with pytest.raises(ResourceExhausted):
        await anext(full.batch(1, 2))
    assert not full.begun


@pytest.mark.requirement("R132")
async def test_a_fault_ends_the_batch() -> None:
    """It is no sequence's failure: the caller gets it once, and nothing runs on."""
    engine = Engine()
    engine.released.set()
    with pytest.raises(RuntimeError):
        _ = [answer async for answer in engine.batch(200, *range(1, 100))]
    await until_still(engine)
    assert engine.running == 0 and engine.places == 1000
