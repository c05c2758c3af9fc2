"""What a dialect is to the ingress: bytes in, a request; an answer, bytes out. No I/O, no gate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from penstock_interception.calls import Call, Dialect
from penstock_interception.requests import ChatRequest


class BadRequest(Exception):
    """A body that breaks the dialect's rules; `param` is the path of the field, None when it is the body itself."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


@dataclass(frozen=True, slots=True)
class Problem:
    """An answer that is an error. `code` is stable; `retry` says whether the same request may succeed later."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry: bool = False
    retry_after_s: float | None = None


class DialectCodec(ABC):
    """One dialect."""

    dialect: Dialect
    # Paths below /rollout/{id} of what asks for a completion.
    completion_path: str

    @abstractmethod
    def base_path(self, rollout_id: str) -> str:
        """What an SDK wants behind "http://host:port"."""

    @abstractmethod
    def parse(self, body: bytes) -> ChatRequest:
        """Reads a body. Raises BadRequest and nothing else, whatever the bytes."""

    @abstractmethod
    def problem(self, problem: Problem) -> bytes:
        """An error's body."""

    @abstractmethod
    def answer(self, call: Call, request: ChatRequest) -> bytes:
        """A whole answer as JSON, for a request that asked for no stream."""

    @abstractmethod
    def stream_open(self, call: Call, request: ChatRequest) -> bytes:
        """What a stream starts with, before the answer is known; may be empty."""

    @abstractmethod
    def stream_keep_alive(self) -> bytes:
        """What clients of this dialect ignore."""

    @abstractmethod
    def stream_answer(self, call: Call, request: ChatRequest) -> bytes:
        """The rest of a stream."""

    @abstractmethod
    def stream_problem(self, problem: Problem) -> bytes:
        """The rest of a stream that fails after it has begun."""

    @abstractmethod
    def models(self, name: str) -> bytes:
        """The list of models, which is the one."""
