"""What the backend needs of an SDK for Hugging Face's sandboxes.

Invariants
- Nothing here blocks the event loop, and nothing retries by itself but what is safe to repeat.
- Whatever an SDK raises leaves here as a ``penstock_chassis.errors`` exception without any credential in it (R8).
"""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from penstock_chassis.errors import FailedPrecondition, PenstockError, ResourceExhausted, Unavailable
from penstock_sandbox.backends.attended.pipe import Pipe
from penstock_sandbox.backends.hf.threads import Threads

if TYPE_CHECKING:
    from huggingface_hub import HfApi

T = TypeVar("T")

_LONGEST_MESSAGE = 300
_RETRY_S = 5.0
_REFUSED = (401, 402, 403)
_TERMINAL = ("COMPLETED", "CANCELED", "ERROR", "DELETED")


@dataclass(frozen=True, slots=True)
class HfOptions:
    """The operator's choices. ``token`` is the secret itself; ``max_lifetime_s`` bounds a job at the provider."""

    token: str = ""
    image: str = "python:3.12"
    images: tuple[str, ...] = ()
    flavor: str = "cpu-basic"
    namespace: str = ""
    max_sandboxes: int = 64
    idle_timeout_s: float = 600.0
    start_timeout_s: float = 300.0
    max_lifetime_s: float = 86_400.0
    allow_open_egress: bool = False
    layer_bytes: int = 20 * 1024**3

    def __repr__(self) -> str:
        return f"HfOptions(image={self.image!r}, flavor={self.flavor!r}, namespace={self.namespace!r})"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a short command in a sandbox; ``code`` is -1 where it was killed or never told."""

    code: int
    stdout: str
    stderr: str


class Jobs:
    """The jobs of one namespace, which both SDKs stand on. Made by who has loaded ``huggingface_hub``."""

    def __init__(self, api: HfApi, namespace: str, token: str, threads: Threads) -> None:
        self.api = api
        self.namespace = namespace
        self._token = token
        self._threads = threads

    async def ended(self, job_id: str) -> str:
        """How a job ended, or "" while it has not. Raises Unavailable when that cannot be learned."""

        def call() -> str:
            try:
                status = self.api.inspect_job(job_id=job_id, namespace=self.namespace).status
            except Exception as error:
                if status_of(error) == 404:
                    return "unknown there"
                raise
            stage = str(getattr(status.stage, "value", status.stage))
            return stage if stage in _TERMINAL else ""

        return await self.ask("the job's state is not known", call)

    async def cancel(self, job_id: str) -> None:
        """End a job; harmless when it is over. Raises Unavailable when that cannot be known."""
        try:
            await self._threads.ask(self.api.cancel_job, job_id=job_id, namespace=self.namespace)
        except Exception as error:
            if status_of(error) != 404 and not await self.ended(job_id):
                raise Unavailable(
                    f"the job was not ended: {explain(error, self._token)}", reason="CREATE_FAILED"
                ) from error

    async def ask(self, what: str, call: Callable[[], T], *, long: bool = False) -> T:
        """A call of an SDK, in a thread; ``long`` ones starve no short ones. Raises Unavailable: ``what`` and why."""
        try:
            return await (self._threads.create(call) if long else self._threads.ask(call))
        except Exception as error:
            raise Unavailable(
                f"{what}: {explain(error, self._token)}", reason="CREATE_FAILED", retry_after_s=_RETRY_S
            ) from error


class Remote(abc.ABC):
    """One sandbox at Hugging Face: a job."""

    def __init__(self, job_id: str, jobs: Jobs, threads: Threads) -> None:
        self.job_id = job_id
        self.jobs = jobs
        self.threads = threads

    @abc.abstractmethod
    async def run(self, argv: list[str], stdin: str = "", *, timeout_s: float | None = None) -> Outcome:
        """Run a command to its end: a short one, or one that may take ``timeout_s``. Raises Unavailable."""

    @abc.abstractmethod
    async def upload(self, path: str, content: bytes) -> None:
        """Put a small file into place; its directory exists. Raises Unavailable."""

    @abc.abstractmethod
    async def send(self, source: Path, path: str) -> None:
        """Bring in a file of any size; its directory exists. Raises Unavailable."""

    @abc.abstractmethod
    async def fetch(self, path: str, target: Path) -> None:
        """Bring out a file of any size, which is at ``target`` only once all of it is. Raises Unavailable."""

    @abc.abstractmethod
    async def attach(self, command: list[str]) -> Pipe:
        """Open a pipe to the attendant that ``command`` (its interpreter and its program) leads to."""

    @abc.abstractmethod
    async def touch(self) -> None:
        """Count as activity. Raises Unavailable."""

    @abc.abstractmethod
    async def kill(self) -> None:
        """End the job; harmless when it is over. Raises Unavailable when that cannot be known."""

    async def ended(self) -> str:
        """How the job ended, or "" while it has not. Raises Unavailable when that cannot be learned."""
        return await self.jobs.ended(self.job_id)


class Client(Protocol):
    """An SDK, opened."""

    async def open(self) -> str:
        """Check SDK and token; answers why they can never be used, or "". Raises Unavailable: it may be tried again."""

    async def create(self, sandbox_id: str, image: str) -> Remote:
        """Make a sandbox; when this fails or is cancelled, no job is left."""

    async def sweep(self) -> int:
        """End every job that an earlier run of this service left; answers how many. Raises Unavailable."""


def explain(error: BaseException, token: str) -> str:
    """What an SDK's exception says, short, on one line, and without the token."""
    text = " ".join(str(error).split()) or type(error).__name__
    if token:
        text = text.replace(token, "***")
    return f"{type(error).__name__}: {text[:_LONGEST_MESSAGE]}"


def status_of(error: BaseException) -> int | None:
    """The HTTP status in an SDK's exception, where there is one."""
    for holder in (error, getattr(error, "response", None)):
        status = getattr(holder, "status_code", None)
        if isinstance(status, int):
            return status
    return None


def failed(what: str, error: BaseException, token: str) -> PenstockError:
    """An SDK's exception as ours: ``what`` could not be done."""
    message = f"{what}: {explain(error, token)}"
    status = status_of(error)
    if status in _REFUSED:
        return FailedPrecondition(message, reason="BACKEND_UNAVAILABLE", metadata={"backend": "hf"})
    if status == 429:
        return ResourceExhausted(message, reason="SANDBOX_LIMIT", retry_after_s=_RETRY_S)
    return Unavailable(message, reason="CREATE_FAILED", retry_after_s=_RETRY_S)


async def signed_in(loading: Awaitable[str], token: str) -> str:
    """What is missing to work with ``token``; empty: nothing. ``loading`` loads the SDK and asks whose it is."""
    try:
        return await loading
    except Exception as error:
        problem = failed("the token's name was not told", error, token)
        if isinstance(problem, FailedPrecondition):
            return f"Hugging Face refused the token: {problem.message}"
        raise problem from error
