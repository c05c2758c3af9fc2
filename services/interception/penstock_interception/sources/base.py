"""The interface of a model source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final

from penstock_codec import Codec
from penstock_interception.domain.calls import Answerer, ModelFacts
from penstock_interception.domain.completions import Completion
from penstock_interception.domain.state import Call

EXTENDED_SERVERS: Final = frozenset({"vllm", "sglang"})
"""Servers, by what their lists of models say, that take sampling fields and template options beyond OpenAI's API."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A source's properties, determined when a rollout is opened."""

    facts: ModelFacts
    codec: Codec | None
    answers: bool = True
    """False: the source only makes prompts, and the trainer answers."""


class SourceError(Exception):
    """A source could not answer. `reason` is stable and recorded; the agent only learns that the model failed (R8).

    `may_be_the_request`: a request can cause this failure as well as the source can. A failure that says that the
    source is overloaded or slow is not one: a large request fails so where a small one passes, whatever the cause.
    """

    def __init__(
        self, reason: str, message: str = "", *, retriable: bool = True, may_be_the_request: bool = False
    ) -> None:
        super().__init__(message or reason)
        self.reason = reason
        self.retriable = retriable
        self.may_be_the_request = may_be_the_request


class ModelSource(ABC):
    """Answers calls. Implementations own no call: cancelling `complete` aborts the generation."""

    answerer: Answerer

    @abstractmethod
    async def complete(self, call: Call) -> Completion:
        """Answers a call that has its plan and body. Raises SourceError."""

    @abstractmethod
    async def answers_others(self, call: Call) -> bool:
        """Returns whether the source answers the smallest request now; nothing in it is of the call's agent."""

    @abstractmethod
    async def resolve(self, asked_model: str) -> Resolved:
        """Checks that the source is reachable (R27) and returns its properties. Raises PenstockError."""


async def answer(source: ModelSource, call: Call) -> Completion:
    """Answers a call. Raises SourceError, REQUEST_FAILS if the request and not the source is the cause.

    A failure that may be either's is tried: the source is asked the smallest request, then the same one again. An
    agent could otherwise make a request that fails, and its own crash afterwards would count as the source's (R72).
    """
    try:
        return await source.complete(call)
    except SourceError as error:
        if not error.may_be_the_request or not await source.answers_others(call):
            raise
    try:
        return await source.complete(call)
    except SourceError as error:
        if not error.may_be_the_request:
            raise
        raise SourceError("REQUEST_FAILS", f"{error.reason}: {error}", retriable=error.retriable) from error
