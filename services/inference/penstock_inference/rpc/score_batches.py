"""Scores the sequences of a batch, several at once, and gives each answer as it is ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Final

from penstock.inference.v1 import inference_service_pb2 as pb
from penstock_chassis.errors import PenstockError, ResourceExhausted, Unavailable
from penstock_chassis.rpc_status import to_status
from penstock_chassis.validation import invalid_field

MAX_SEQUENCES: Final = 1024
AT_ONCE: Final = 16
"""Sequences of a batch that are scored at the same time, which an engine computes together as far as it can."""


async def scored(
    request: pb.ScoreBatchRequest,
    score: Callable[[pb.ScoreRequest], Awaitable[pb.ScoreResponse]],
    serving: Callable[[], AbstractContextManager[None]],
) -> AsyncGenerator[pb.ScoreBatchResponse, None]:
    """Yields one answer for each sequence.

    Args:
        request: the batch.
        score: scores one sequence. A `PenstockError` is that sequence's failure; any other ends the batch.
        serving: takes a place for one request more, for as long as its context is open. The batch has one of its own,
            and another for each further sequence that is scored at the same time; where there is none, fewer are.

    Raises InvalidArgument for a batch without sequences or with too many, and the errors of `serving`.
    """
    count = len(request.sequences)
    if not 1 <= count <= MAX_SEQUENCES:
        raise invalid_field("sequences", f"has {count}, must have 1 to {MAX_SEQUENCES}")
    left = iter(enumerate(request.sequences))
    # A client that reads slowly stops the scoring, so that no answers pile up.
    ready: asyncio.Queue[pb.ScoreBatchResponse | Exception] = asyncio.Queue(maxsize=AT_ONCE)

    async def work(place: AbstractContextManager[None]) -> None:
        with ExitStack() as stack:
            try:
                stack.enter_context(place)
            except (ResourceExhausted, Unavailable):
                return
            try:
                for index, sequence in left:
                    await ready.put(await _answer(index, sequence, score))
            except Exception as error:  # noqa: BLE001 - raised to the caller of the batch
                await ready.put(error)

    with serving():
        places: list[AbstractContextManager[None]] = [
            nullcontext(),
            *(serving() for _ in range(min(AT_ONCE, count) - 1)),
        ]
        workers = [asyncio.create_task(work(place), name="score-batch") for place in places]
        try:
            for _ in range(count):
                answer = await ready.get()
                if isinstance(answer, Exception):
                    raise answer
                yield answer
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers)


async def _answer(
    index: int, sequence: pb.ScoreRequest, score: Callable[[pb.ScoreRequest], Awaitable[pb.ScoreResponse]]
) -> pb.ScoreBatchResponse:
    try:
        return pb.ScoreBatchResponse(index=index, score=await score(sequence))
    except PenstockError as error:
        status = to_status(error)
        failure = pb.ScoreFailure(
            reason=error.reason,
            message=status.message,
            violations=[f"{item.field}: {item.description}" for item in error.violations],
            code=status.code.value[0],
        )
        return pb.ScoreBatchResponse(index=index, failure=failure)
