"""The interface of a model source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from penstock_codec import Codec
from penstock_interception.domain.calls import Answerer, ModelFacts
from penstock_interception.domain.completions import Completion
from penstock_interception.domain.state import Call


@dataclass(frozen=True, slots=True)
class Resolved:
    """A source's properties, determined when a rollout is opened."""

    facts: ModelFacts
    codec: Codec | None
    answers: bool = True
    """False: the source only makes prompts, and the trainer answers."""


class SourceError(Exception):
    """A source could not answer. `reason` is stable and recorded; the agent only learns that the model failed (R8)."""

    def __init__(self, reason: str, message: str = "", *, retriable: bool = True) -> None:
        super().__init__(message or reason)
        self.reason = reason
        self.retriable = retriable


class ModelSource(ABC):
    """Answers calls. Implementations own no call: cancelling `complete` aborts the generation."""

    answerer: Answerer

    @abstractmethod
    async def complete(self, call: Call) -> Completion:
        """Answers a call that has its plan and body. Raises SourceError."""

    @abstractmethod
    async def resolve(self, asked_model: str) -> Resolved:
        """Checks that the source is reachable (R27) and returns its properties. Raises PenstockError."""
