"""The ``huggingface_hub`` SDK: one job of Hugging Face Jobs for each sandbox, identified by its labels.

Invariants
- Every job carries this service's instance and the sandbox's id from its creation, so that one whose create was cut
  off, or whose service was killed, can be found and ended; it does not matter what ended it.
- A job ends by itself after the idle timeout without a touch: this limits the cost of jobs whose service never returns.
  Commands in the foreground do not count as activity there, so a live sandbox is touched.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from penstock_chassis.times import even_time
from penstock_sandbox.backends.guest_client.pipe import Armoured, Pipe
from penstock_sandbox.backends.hf.client import Client, HfOptions, Jobs, Remote, explain
from penstock_sandbox.backends.hf.pipes import Feed, SplitPipe
from penstock_sandbox.backends.hf.threads import Threads
from penstock_sandbox.backends.remote_machine.machine import Outcome

if TYPE_CHECKING:
    from huggingface_hub import Sandbox

INSTANCE_LABEL = "penstock-instance"
SANDBOX_LABEL = "penstock-sandbox"
LIFETIME_S = 86_400.0
"""The SDK's fixed time limit of every job."""

_API_TIMEOUT_S = 30.0
_COMMAND_TIMEOUT_S = 60.0
_TRANSFER_THREADS = 4
_ABANDON_EVERY_S = 0.5
_RUNNING = ["RUNNING", "SCHEDULING"]

_log = structlog.get_logger(__name__)


class HubClient(Client):
    """See ``Client``. ``instance`` names this service on its state directory, across its restarts."""

    missing = "huggingface_hub 2 or newer is not installed: pip install 'penstock-sandbox[hf]'"

    def __init__(self, options: HfOptions, instance: str, threads: Threads) -> None:
        super().__init__(options, threads)
        self._instance = instance

    def load(self) -> None:
        import httpx2
        import huggingface_hub
        from huggingface_hub import Sandbox  # noqa: F401 - absent before 1.25

        # By default the SDK waits for the Jobs API forever.
        huggingface_hub.set_client_factory(lambda: httpx2.Client(follow_redirects=True, timeout=_API_TIMEOUT_S))

    def make(self, sandbox_id: str, image: str) -> Remote:
        from huggingface_hub import Sandbox

        # Before the request: the job's clock starts within it.
        ends_at = even_time() + LIFETIME_S
        sandbox = Sandbox.create(
            image,
            flavor=self.options.flavor,
            idle_timeout=self.options.idle_timeout_s,
            namespace=self.jobs.namespace,
            labels={INSTANCE_LABEL: self._instance, SANDBOX_LABEL: sandbox_id},
            start_timeout=self.options.start_timeout_s,
            token=self.options.token,
        )
        return HubRemote(sandbox, self.jobs, self.threads, ends_at)

    async def failed(self, sandbox_id: str) -> None:
        await self._end_labelled(SANDBOX_LABEL, sandbox_id)

    async def abandon(self, making: asyncio.Future[Remote], sandbox_id: str) -> None:
        # Owned: the caller may be cancelled again, and the job must be ended all the same.
        await self.abandoned.run(self._abandon(making, sandbox_id))

    async def _abandon(self, making: asyncio.Future[Remote], sandbox_id: str) -> None:
        """Ends the job of a cancelled create; the thread that waits for the job then ends too."""
        while not making.done():
            await self._end_labelled(SANDBOX_LABEL, sandbox_id)
            await asyncio.wait([making], timeout=_ABANDON_EVERY_S)
        if making.exception() is None:
            await self._end_labelled(SANDBOX_LABEL, sandbox_id)
            making.result().close()

    async def sweep(self) -> int:
        return await self.jobs.ask(
            "leftover jobs could not be listed", lambda: self._cancel_labelled(INSTANCE_LABEL, self._instance)
        )

    async def _end_labelled(self, label: str, value: str) -> None:
        try:
            await self.threads.ask(self._cancel_labelled, label, value)
        except Exception as error:  # noqa: BLE001
            # The caller must get the original error; the idle timeout ends what is left.
            _log.error("jobs could not be ended", label=value, error=explain(error, self.options.token))

    def _cancel_labelled(self, label: str, value: str) -> int:
        api, namespace = self.jobs.api, self.jobs.namespace
        found = list(api.list_jobs(status=_RUNNING, labels={label: value}, namespace=namespace))
        for job in found:
            api.cancel_job(job_id=job.id, namespace=namespace)
        return len(found)


class HubRemote(Remote):
    """A dedicated sandbox of the SDK."""

    def __init__(self, sandbox: Sandbox, jobs: Jobs, threads: Threads, ends_at: float) -> None:
        super().__init__(sandbox.id, jobs, threads, ends_at)
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
        await self.jobs.ask("a file was not uploaded", lambda: self._sandbox.files.upload(source, path), long=True)

    async def fetch(self, path: str, target: Path) -> None:
        await self.jobs.ask("a file was not downloaded", lambda: self._sandbox.files.download(path, target), long=True)

    async def attach(self, command: list[str]) -> Pipe:
        def stream(argv: list[str], feed: Feed, complain: Feed) -> int | None:
            done = self._sandbox.run(argv, on_stdout=feed, on_stderr=complain, capture_output=False, check=False)
            return done.exit_code

        return Armoured(await SplitPipe.open(self, command, stream, self.threads))

    async def touch(self) -> None:
        await self.jobs.ask("the sandbox does not answer", self._sandbox.processes)

    async def kill(self) -> None:
        # Not by the SDK's own `kill`, which only logs its failures.
        await self.jobs.cancel(self.job_id)
        self.close()

    def close(self) -> None:
        self._sandbox.close()
