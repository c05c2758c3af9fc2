"""What both SDKs for Hugging Face's sandboxes have in common, and their interface.

Invariants
- Nothing here blocks the event loop, and only idempotent calls are retried.
- Whatever an SDK raises becomes a ``penstock_chassis.errors`` exception without any credential in it (R8).
"""

from __future__ import annotations

import abc
import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.errors import FailedPrecondition, PenstockError, ResourceExhausted, Unavailable
from penstock_sandbox.backends.guest_client.pipe import Pipe
from penstock_sandbox.backends.hf.threads import Threads
from penstock_sandbox.backends.remote_machine.machine import Machine, Outcome

if TYPE_CHECKING:
    from huggingface_hub import HfApi

T = TypeVar("T")

_LONGEST_MESSAGE = 300
_RETRY_S = 5.0
_REFUSED = (401, 402, 403)
_TIMED_OUT = ("timeout", "timed out")
_TERMINAL = ("COMPLETED", "CANCELED", "ERROR", "DELETED")


@dataclass(frozen=True, slots=True)
class HfOptions:
    """The operator's options. ``token`` is the secret itself; ``max_lifetime_s`` limits a job at the provider."""

    token: str = field(default="", repr=False)
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
class JobEnd:
    """How a job ended: its stage and Hugging Face's message; no stage if Hugging Face does not know it any more."""

    stage: str
    message: str = ""

    @property
    def failed(self) -> bool:
        """Whether its program failed: not at a time limit, which has the same stage."""
        return self.stage == "ERROR" and not any(words in self.message.lower() for words in _TIMED_OUT)


class Jobs:
    """The jobs of one namespace, used by both SDKs. Constructed after ``huggingface_hub`` is loaded."""

    def __init__(self, api: HfApi, namespace: str, token: str, threads: Threads) -> None:
        self.api = api
        self.namespace = namespace
        self._token = token
        self._threads = threads

    async def ended(self, job_id: str) -> JobEnd | None:
        """Returns how a job ended, or None while it has not. Raises Unavailable if that cannot be determined."""

        def call() -> JobEnd | None:
            try:
                status = self.api.inspect_job(job_id=job_id, namespace=self.namespace).status
            except Exception as error:
                if status_of(error) == 404:
                    return JobEnd("", "unknown there")
                raise
            stage = str(getattr(status.stage, "value", status.stage))
            return JobEnd(stage, str(status.message or "")) if stage in _TERMINAL else None

        return await self.ask("the job's state is unknown", call)

    async def cancel(self, job_id: str) -> None:
        """Ends a job; harmless if it is over. Raises Unavailable if that is uncertain."""
        try:
            await self._threads.ask(self.api.cancel_job, job_id=job_id, namespace=self.namespace)
        except Exception as error:
            if status_of(error) != 404 and not await self.ended(job_id):
                raise Unavailable(
                    f"the job was not ended: {explain(error, self._token)}", reason="CREATE_FAILED"
                ) from error

    async def ask(self, what: str, call: Callable[[], T], *, long: bool = False) -> T:
        """Makes an SDK call in a thread; ``long`` ones have their own. Raises Unavailable: ``what`` and why."""
        try:
            return await (self._threads.create(call) if long else self._threads.ask(call))
        except Exception as error:
            raise Unavailable(
                f"{what}: {explain(error, self._token)}", reason="CREATE_FAILED", retry_after_s=_RETRY_S
            ) from error


class Remote(Machine, abc.ABC):
    """One sandbox at Hugging Face: a job.

    ``ends_at``: when its time limit ends it at the earliest, by ``even_time``; nothing extends that.
    """

    def __init__(self, job_id: str, jobs: Jobs, threads: Threads, ends_at: float) -> None:
        self.job_id = job_id
        self.ends_at = ends_at
        self.jobs = jobs
        self.threads = threads

    @abc.abstractmethod
    async def run(self, argv: list[str], stdin: str = "", *, timeout_s: float | None = None) -> Outcome:
        """Runs a command to its end, within ``timeout_s`` if given. Raises Unavailable."""

    @abc.abstractmethod
    async def upload(self, path: str, content: bytes) -> None:
        """Writes a small file; its directory exists. Raises Unavailable."""

    @abc.abstractmethod
    async def send(self, source: Path, path: str) -> None:
        """Uploads a file of any size; its directory exists. Raises Unavailable."""

    @abc.abstractmethod
    async def fetch(self, path: str, target: Path) -> None:
        """Downloads a file of any size, which is at ``target`` only when complete. Raises Unavailable."""

    @abc.abstractmethod
    async def attach(self, command: list[str]) -> Pipe:
        """Opens a pipe to the guest agent by ``command`` (its interpreter and its program)."""

    @abc.abstractmethod
    async def touch(self) -> None:
        """Counts as activity. Raises Unavailable."""

    @abc.abstractmethod
    async def kill(self) -> None:
        """Ends the job; harmless if it is over. Raises Unavailable if that is uncertain."""

    def close(self) -> None:
        """Closes the SDK's connections; the job continues."""
        return

    async def ended(self) -> JobEnd | None:
        """Returns how the job ended, or None while it has not. Raises Unavailable if that cannot be determined."""
        return await self.jobs.ended(self.job_id)


class Client(abc.ABC):
    """An SDK. ``make`` and ``load`` are called in threads."""

    missing: str
    """What to say if the SDK is not installed."""

    def __init__(self, options: HfOptions, threads: Threads) -> None:
        self.options = options
        self.threads = threads
        self._jobs: Jobs | None = None
        self.abandoned = TaskOwner()

    @property
    def jobs(self) -> Jobs:
        """The opened namespace."""
        assert self._jobs is not None, "opened first"
        return self._jobs

    async def open(self) -> str:
        """Checks SDK and token; returns why they can never work, or "". Raises Unavailable: a retry may help."""
        try:
            return await self.threads.ask(self._open)
        except Exception as error:
            problem = failed("the token's owner is unknown", error, self.options.token)
            if isinstance(problem, FailedPrecondition):
                return f"Hugging Face refused the token: {problem.message}"
            raise problem from error

    def _open(self) -> str:
        # Read when the SDK is first imported.
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
        try:
            self.load()
            from huggingface_hub import HfApi
        except ImportError:
            return self.missing
        api = HfApi(token=self.options.token)
        # Asked once: an SDK would ask before each job, and these requests are rate-limited.
        namespace = self.options.namespace or str(api.whoami()["name"])
        self._jobs = Jobs(api, namespace, self.options.token, self.threads)
        return ""

    async def create(self, sandbox_id: str, image: str) -> Remote:
        """Creates a sandbox; on failure or cancellation, leaves no job."""
        making = self.threads.create(self.make, sandbox_id, image)
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            await self.abandon(making, sandbox_id)
            raise
        except Exception as error:
            await self.failed(sandbox_id)
            raise failed("no sandbox was made", error, self.options.token) from error

    @abc.abstractmethod
    def load(self) -> None:
        """Imports the SDK and prepares it. Raises ImportError."""

    @abc.abstractmethod
    def make(self, sandbox_id: str, image: str) -> Remote:
        """Creates a sandbox, and waits until it answers."""

    @abc.abstractmethod
    async def abandon(self, making: asyncio.Future[Remote], sandbox_id: str) -> None:
        """Ends the job of a cancelled ``make``, now or as one of ``abandoned``."""

    async def failed(self, sandbox_id: str) -> None:
        """Ends the job of a failed ``make``, if it is known."""
        return

    @abc.abstractmethod
    async def sweep(self) -> int:
        """Ends every job that an earlier run of this service left; returns how many. Raises Unavailable."""


def explain(error: BaseException, token: str) -> str:
    """Returns an SDK exception's message, short, on one line, and without the token."""
    text = " ".join(str(error).split()) or type(error).__name__
    if token:
        text = text.replace(token, "***")
    return f"{type(error).__name__}: {text[:_LONGEST_MESSAGE]}"


def status_of(error: BaseException) -> int | None:
    """Returns the HTTP status in an SDK's exception, if there is one."""
    for holder in (error, getattr(error, "response", None)):
        status = getattr(holder, "status_code", None)
        if isinstance(status, int):
            return status
    return None


def failed(what: str, error: BaseException, token: str) -> PenstockError:
    """Converts an SDK's exception: ``what`` could not be done."""
    message = f"{what}: {explain(error, token)}"
    status = status_of(error)
    if status in _REFUSED:
        return FailedPrecondition(message, reason="BACKEND_UNAVAILABLE", metadata={"backend": "hf"})
    if status == 429:
        return ResourceExhausted(message, reason="SANDBOX_LIMIT", retry_after_s=_RETRY_S)
    return Unavailable(message, reason="CREATE_FAILED", retry_after_s=_RETRY_S)
