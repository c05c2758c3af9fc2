"""What a model source is to the gate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from penstock_codec import Codec
from penstock_interception.calls import Answerer, Call, ModelFacts
from penstock_interception.completions import Completion


@dataclass(frozen=True, slots=True)
class Resolved:
    """What opening a rollout found out about its source."""

    facts: ModelFacts
    codec: Codec | None
    answers: bool = True
    """Whether it can answer calls; False: it makes prompts and the trainer answers."""


class SourceError(Exception):
    """A source could not answer. `reason` is stable and recorded; the agent is told only that the model failed (R8)."""

    def __init__(self, reason: str, message: str = "", *, retriable: bool = True) -> None:
        super().__init__(message or reason)
        self.reason = reason
        self.retriable = retriable


class ModelSource(ABC):
    """Answers calls. Implementations own no call: cancelling `complete` aborts the generation."""

    answerer: Answerer

    @abstractmethod
    async def complete(self, call: Call) -> Completion:
        """The answer to a call, whose plan and body are there. Raises SourceError."""

    @abstractmethod
    async def resolve(self, asked_model: str) -> Resolved:
        """Checks that the source can be reached (R27) and says what it serves. Raises PenstockError."""
