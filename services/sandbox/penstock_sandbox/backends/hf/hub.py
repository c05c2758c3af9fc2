"""The ``huggingface_hub`` SDK: one job of Hugging Face Jobs for each sandbox, found again by its labels.

Invariants
- Every job carries this service's instance and the sandbox's id from the moment it exists, so that one whose creation
  was cut off, or whose service was killed, can be found and ended; who ended it does not matter.
- A job ends by itself once nobody has touched it for the idle timeout: what a service that never returns leaves
  behind costs no more than that. Commands in the foreground do not count as activity there, so a live sandbox is
  touched.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from penstock_sandbox.backends.attended.pipe import Armoured, Pipe
from penstock_sandbox.backends.hf.client import HfOptions, Jobs, Outcome, Remote, explain, failed, signed_in
from penstock_sandbox.backends.hf.pipes import Feed, SplitPipe
from penstock_sandbox.backends.hf.threads import Threads

if TYPE_CHECKING:
    from huggingface_hub import Sandbox

INSTALL = "huggingface_hub 2 or newer is not installed: pip install 'penstock-sandbox[hf]'"
INSTANCE_LABEL = "penstock-instance"
SANDBOX_LABEL = "penstock-sandbox"
LIFETIME_S = 86_400.0
"""The SDK gives every job this long."""

_API_TIMEOUT_S = 30.0
_COMMAND_TIMEOUT_S = 60.0
_TRANSFER_THREADS = 4
_ABANDON_EVERY_S = 0.5
_RUNNING = ["RUNNING", "SCHEDULING"]

_log = structlog.get_logger(__name__)


class HubClient:
    """See ``client.Client``. ``instance`` names this service on its state directory, across its restarts."""

    def __init__(self, options: HfOptions, instance: str, threads: Threads) -> None:
        self._options = options
        self._instance = instance
        self._threads = threads
        self._opened: Jobs | None = None
        self._abandoned: set[asyncio.Task[None]] = set()

    async def open(self) -> str:
        return await signed_in(self._threads.ask(self._load), self._options.token)

    def _load(self) -> str:
        # Read when the SDK is first imported.
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
        try:
            import httpx2
            import huggingface_hub
            from huggingface_hub import HfApi, Sandbox  # noqa: F401 - absent before 1.25
        except ImportError:
            return INSTALL
        # By default the SDK waits for the Jobs API for ever.
        huggingface_hub.set_client_factory(lambda: httpx2.Client(follow_redirects=True, timeout=_API_TIMEOUT_S))
        api = HfApi(token=self._options.token)
        # Asked once: the SDK would ask before each job, and that is rationed.
        namespace = self._options.namespace or str(api.whoami()["name"])
        self._opened = Jobs(api, namespace, self._options.token, self._threads)
        return ""

    @property
    def jobs(self) -> Jobs:
        """The opened namespace."""
        assert self._opened is not None, "opened first"
        return self._opened

    async def create(self, sandbox_id: str, image: str) -> Remote:
        making = self._threads.create(self._create, sandbox_id, image)
        try:
            sandbox = await asyncio.shield(making)
        except asyncio.CancelledError:
            # Held here: whoever cancelled may do so again, and the job must be ended all the same.
            task = asyncio.create_task(self._abandon(making, sandbox_id))
            self._abandoned.add(task)
            task.add_done_callback(self._abandoned.discard)
            await asyncio.shield(task)
            raise
        except Exception as error:
            await self._end_labelled(SANDBOX_LABEL, sandbox_id)
            raise failed("no sandbox was made", error, self._options.token) from error
        return HubRemote(sandbox, self.jobs, self._threads)

    def _create(self, sandbox_id: str, image: str) -> Sandbox:
        from huggingface_hub import Sandbox

        return Sandbox.create(
            image,
            flavor=self._options.flavor,
            idle_timeout=self._options.idle_timeout_s,
            namespace=self.jobs.namespace,
            labels={INSTANCE_LABEL: self._instance, SANDBOX_LABEL: sandbox_id},
            start_timeout=self._options.start_timeout_s,
            token=self._options.token,
        )

    async def _abandon(self, making: asyncio.Future[Sandbox], sandbox_id: str) -> None:
        """Nobody wants it any more: end the job, upon which the thread that waits for it ends too."""
        while not making.done():
            await self._end_labelled(SANDBOX_LABEL, sandbox_id)
            await asyncio.wait([making], timeout=_ABANDON_EVERY_S)
        if making.exception() is None:
            await self._end_labelled(SANDBOX_LABEL, sandbox_id)
            making.result().close()

    async def sweep(self) -> int:
        return await self.jobs.ask(
            "the jobs that were left are not known", lambda: self._cancel_labelled(INSTANCE_LABEL, self._instance)
        )

    async def _end_labelled(self, label: str, value: str) -> None:
        try:
            await self._threads.ask(self._cancel_labelled, label, value)
        except Exception as error:  # noqa: BLE001
            # The cause of the failure is what the caller must hear; the idle timeout ends what is left.
            _log.error("jobs could not be ended", label=value, error=explain(error, self._options.token))

    def _cancel_labelled(self, label: str, value: str) -> int:
        api, namespace = self.jobs.api, self.jobs.namespace
        found = list(api.list_jobs(status=_RUNNING, labels={label: value}, namespace=namespace))
        for job in found:
            api.cancel_job(job_id=job.id, namespace=namespace)
        return len(found)


class HubRemote(Remote):
    """A dedicated sandbox of the SDK."""

    def __init__(self, sandbox: Sandbox, jobs: Jobs, threads: Threads) -> None:
        super().__init__(sandbox.id, jobs, threads)
        self._sandbox = sandbox
        # For each transfer the SDK makes threads of its own.
        sandbox.files.PARALLEL_MAX_WORKERS = _TRANSFER_THREADS

    async def run(self, argv: list[str], stdin: str = "", *, timeout_s: float | None = None) -> Outcome:
        def call() -> Outcome:
            done = self._sandbox.run(argv, stdin=stdin, timeout=timeout_s or _COMMAND_TIMEOUT_S, check=False)
            code = done.exit_code if done.exit_code is not None else -1
            return Outcome(code, done.stdout, done.stderr)

        return await self.jobs.ask("a command did not run", call, long=timeout_s is not None)

    async def upload(self, path: str, content: bytes) -> None:
        await self.jobs.ask("an upload failed", lambda: self._sandbox.files.write(path, content, mode="700"))

    async def send(self, source: Path, path: str) -> None:
        await self.jobs.ask("a file was not brought in", lambda: self._sandbox.files.upload(source, path), long=True)

    async def fetch(self, path: str, target: Path) -> None:
        await self.jobs.ask("a file was not brought out", lambda: self._sandbox.files.download(path, target), long=True)

    async def attach(self, command: list[str]) -> Pipe:
        def stream(argv: list[str], feed: Feed, complain: Feed) -> int | None:
            done = self._sandbox.run(argv, on_stdout=feed, on_stderr=complain, capture_output=False, check=False)
            return done.exit_code

        return Armoured(await SplitPipe.open(self, command, stream, self.threads))

    async def touch(self) -> None:
        await self.jobs.ask("the sandbox does not answer", self._sandbox.processes)

    async def kill(self) -> None:
        # Not by the SDK's own `kill`, which only logs that it failed.
        await self.jobs.cancel(self.job_id)
        self._sandbox.close()
