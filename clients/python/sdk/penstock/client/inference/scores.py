"""Sequences to score, and their scores: logprobs of given tokens, and of the likeliest ones at each position."""

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.client.errors import Internal, PenstockError, Violation, of_code
from penstock.client.transport.rpc import Service
from penstock.client.types import chat
from penstock.client.wire import chat as wire
from penstock.inference.v1 import inference_service_pb2 as pb
from penstock.inference.v1 import inference_service_pb2_grpc as pb_grpc


@dataclass(frozen=True, slots=True, eq=False)
class ToScore:
    """A sequence to score.

    Attributes:
        token_ids: the whole sequence (any array-like), at least 2 tokens.
        start: the first token that is scored, at least 1.
        top_logprobs: how many of the likeliest tokens to return at each position, 0 to 20.
        adapter: a loaded adapter; empty = the base weights.
        temperature: of the distribution; None = 1.
        exact_version: refuse unless exactly these weights score; None = those that are in force.
    """

    token_ids: ArrayLike
    start: int = 1
    top_logprobs: int = 0
    adapter: str = ""
    temperature: float | None = None
    exact_version: int | None = None

    def to_proto(self) -> pb.ScoreRequest:
        """Returns the request."""
        return pb.ScoreRequest(
            token_ids=wire.token_bytes(self.token_ids),
            start=self.start,
            top_logprobs=self.top_logprobs or None,
            adapter=self.adapter,
            temperature=self.temperature,
            exact_version=self.exact_version,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """Logprobs of the tokens from `ToScore.start` on.

    Attributes:
        logprobs: float32, shape (n,), read-only.
        policy_version: of the weights that scored.
        top_token_ids, top_logprobs: the likeliest tokens at each position, int32 and float32 of shape (n, k), likeliest
            first; None = they were not asked for.
    """

    logprobs: chat.Logprobs
    policy_version: int
    top_token_ids: NDArray[np.int32] | None = None
    top_logprobs: NDArray[np.float32] | None = None


def score_from(message: pb.ScoreResponse) -> Score:
    """Converts a score."""
    return Score(
        wire.logprobs(message.logprobs), message.policy_version, wire.top_ids(message), wire.top_logprobs(message)
    )


async def each(
    service: Service, stub: "pb_grpc.InferenceServiceAsyncStub", sequences: Iterable[ToScore], timeout: float | None
) -> AsyncGenerator[tuple[int, Score | PenstockError], None]:
    """Yields the position of each sequence, and its score or its failure, as they are ready."""
    request = pb.ScoreBatchRequest(sequences=[one.to_proto() for one in sequences])
    async with aclosing(service.stream(stub.ScoreBatch, request, timeout=timeout)) as answers:
        async for answer in answers:
            yield answer.index, _failure(answer.failure) if answer.HasField("failure") else score_from(answer.score)


async def together(answers: AsyncGenerator[tuple[int, Score | PenstockError], None], count: int) -> list[Score]:
    """Returns the scores in the order of their sequences. Raises the first failure."""
    found: dict[int, Score] = {}
    async with aclosing(answers):
        async for index, answer in answers:
            if isinstance(answer, PenstockError):
                raise answer
            found[index] = answer
    if len(found) != count:
        raise Internal(f"The batch ended with {len(found)} of {count} scores", reason="STREAM_CUT")
    return [found[index] for index in range(count)]


def _failure(message: pb.ScoreFailure) -> PenstockError:
    split = (text.partition(": ") for text in message.violations)
    violations = tuple(Violation(field, text) for field, _, text in split)
    return of_code(message.code, message.message, reason=message.reason, violations=violations)
