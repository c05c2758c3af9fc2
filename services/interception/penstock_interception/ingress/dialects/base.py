"""The interface of a dialect: parses bytes into a request, and writes an answer as bytes. No I/O, no gate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from penstock_interception.domain.calls import Dialect
from penstock_interception.domain.requests import ChatRequest
from penstock_interception.domain.state import Call

EVENT_STREAM: Final = "text/event-stream; charset=utf-8"


class BadRequest(Exception):
    """A body that breaks the dialect's rules; `param` is the path of the field, None for the whole body."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


CONTEXT_EXCEEDED: Final = "context_length_exceeded"


@dataclass(frozen=True, slots=True)
class Problem:
    """An error answer. `code` is stable; `retry` means that the same request may succeed later."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry: bool = False
    retry_after_s: float | None = None

    def beginning(self, words: str) -> str:
        """Returns the message. One of an exceeded context begins with `words`, those of the dialect's vendor: clients
        look for them and not for the code, and repeat for minutes what they take for any other refusal."""
        return f"{words} {self.message}" if self.code == CONTEXT_EXCEEDED else self.message


class Ask(Enum):
    """The purpose of a request."""

    COMPLETION = auto()
    COUNT = auto()
    MODELS = auto()
    MODEL = auto()


@dataclass(frozen=True, slots=True)
class Route:
    """The information in a request's path, before its body is read. `model` and `stream` are set if the path has them.

    `array`: the stream consists of the items of one JSON array, not of events.
    """

    ask: Ask
    model: str = ""
    stream: bool | None = None
    array: bool = False


class AnswerStream(ABC):
    """One streamed answer: `open` first, `keep_alive` any number of times, then `answer` or `problem`, once."""

    @abstractmethod
    def open(self) -> bytes:
        """Returns the start of the stream, before the answer is known; may be empty."""

    @abstractmethod
    def keep_alive(self) -> bytes:
        """Returns bytes that clients of this dialect ignore but count as activity."""

    @abstractmethod
    def answer(self) -> bytes:
        """Returns the rest of the stream."""

    @abstractmethod
    def problem(self, problem: Problem) -> bytes:
        """Returns the rest of a stream that fails after its start."""


class DialectCodec(ABC):
    """One dialect. Stateless, so that any thread may use it."""

    dialect: Dialect

    @abstractmethod
    def base_path(self, rollout_id: str) -> str:
        """Returns the path that an SDK needs after "http://host:port"."""

    @abstractmethod
    def owns(self, path: str) -> bool:
        """Returns whether a path below /rollout/{id} is in this dialect's family, which then refuses unknown routes."""

    @abstractmethod
    def route(self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> Route | None:
        """Returns the purpose of a request in this dialect, or None. `path` is below /rollout/{id}."""

    @abstractmethod
    def parse(self, body: bytes, route: Route) -> ChatRequest:
        """Parses the body of a COMPLETION or COUNT. Raises only BadRequest, for any bytes.

        A body that is parsed again after a restart has a route with only its purpose: the rest was stored with the
        call.
        """

    def status(self, problem: Problem) -> int:
        """Returns an error's HTTP status; overridden where this dialect's agents expect another one."""
        return problem.status

    @abstractmethod
    def problem(self, problem: Problem) -> bytes:
        """Returns an error's body."""

    @abstractmethod
    def answer(self, call: Call, request: ChatRequest) -> bytes:
        """Returns a whole answer as JSON, for a request without streaming."""

    def stream_type(self, request: ChatRequest) -> str:
        return EVENT_STREAM

    @abstractmethod
    def stream(self, call: Call, request: ChatRequest) -> AnswerStream:
        """Returns the writer of one streamed answer."""

    def essence(self, body: bytes) -> bytes | None:
        """Returns the part of a body that identifies a repeated request (R34); None if every byte counts."""
        return None

    def count(self, tokens: int) -> bytes:
        """Returns the answer to a COUNT, in dialects whose `route` returns COUNT."""
        raise TypeError(f"{self.dialect} does not count tokens")

    @abstractmethod
    def models(self, names: Sequence[str]) -> bytes:
        """Returns the list of models; there is at least one."""

    @abstractmethod
    def model(self, name: str) -> bytes:
        """Returns the description of a model."""


class PlainStreams(DialectCodec):
    """A dialect whose stream events do not depend on the number of earlier events."""

    @abstractmethod
    def stream_open(self, call: Call, request: ChatRequest) -> bytes:
        """As AnswerStream.open."""

    @abstractmethod
    def stream_keep_alive(self) -> bytes:
        """As AnswerStream.keep_alive."""

    @abstractmethod
    def stream_answer(self, call: Call, request: ChatRequest) -> bytes:
        """As AnswerStream.answer."""

    @abstractmethod
    def stream_problem(self, problem: Problem, request: ChatRequest) -> bytes:
        """As AnswerStream.problem."""

    def stream(self, call: Call, request: ChatRequest) -> AnswerStream:
        return _PlainStream(self, call, request)


class _PlainStream(AnswerStream):
    def __init__(self, dialect: PlainStreams, call: Call, request: ChatRequest) -> None:
        self._dialect = dialect
        self._call = call
        self._request = request

    def open(self) -> bytes:
        return self._dialect.stream_open(self._call, self._request)

    def keep_alive(self) -> bytes:
        return self._dialect.stream_keep_alive()

    def answer(self) -> bytes:
        return self._dialect.stream_answer(self._call, self._request)

    def problem(self, problem: Problem) -> bytes:
        return self._dialect.stream_problem(problem, self._request)
