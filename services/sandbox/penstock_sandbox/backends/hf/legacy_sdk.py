"""The ``hf-sandbox`` SDK, superseded by ``huggingface_hub``: a job with no labels, no streams and no environment.

Invariants
- Hugging Face does not record the owner of such a job: files of this service record the ids of live jobs, so that a
  restart ends what the killed service left. A job whose creation was cut off before its id was known ends by its own
  time limit.
- The token reaches the SDK by this process's environment, the only way that the SDK accepts.
- A command's channel stays open until everything that holds it has ended, so background processes start without it.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from penstock_chassis.times import even_time
from penstock_sandbox.backends.guest_client.pipe import Armoured, Pipe
from penstock_sandbox.backends.hf.client import Client, HfOptions, Jobs, Remote, explain
from penstock_sandbox.backends.hf.pipes import Feed, SplitPipe
from penstock_sandbox.backends.hf.threads import Threads
from penstock_sandbox.backends.remote_machine import bootstrap
from penstock_sandbox.backends.remote_machine.machine import Outcome
from penstock_sandbox.guest import poller

if TYPE_CHECKING:
    from hf_sandbox import Sandbox

_COMMAND_TIMEOUT_S = 60.0
_POLL_S = 20.0
_POLLER = f"{bootstrap.FOLDER}/poller.py"
# Without the command's channel, which would stay open as long as the buffer runs.
_KEEP = 'exec "$0" "$@" </dev/null >/dev/null 2>&1'
_PIECE = 4 * 1024 * 1024
_JOIN = 'set -e; : >"$0"; for piece in "$0".*; do [ ! -e "$piece" ] || { cat "$piece" >>"$0"; rm "$piece"; }; done'
_CUT = 'split -b "$1" -d -a 6 "$0" "$0." && for piece in "$0".*; do echo "$piece"; done'

_log = structlog.get_logger(__name__)


class LegacyClient(Client):
    """See ``Client``. ``folder`` holds a file for each live job."""

    missing = "hf-sandbox is not installed: pip install 'penstock-sandbox[hf-sandbox]'"

    def __init__(self, options: HfOptions, folder: Path, threads: Threads) -> None:
        super().__init__(options, threads)
        self._folder = folder

    async def open(self) -> str:
        if self.options.namespace:
            return "hf-sandbox cannot choose a namespace: unset hf_namespace, or set hf_client to hub"
        return await super().open()

    def load(self) -> None:
        os.environ["HF_TOKEN"] = self.options.token
        import hf_sandbox  # noqa: F401

        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def make(self, sandbox_id: str, image: str) -> Remote:
        from hf_sandbox import Sandbox

        lifetime_s = int(self.options.max_lifetime_s)
        # Before the request: the job's clock starts within it.
        ends_at = even_time() + lifetime_s
        sandbox = Sandbox.create(image, flavor=self.options.flavor, timeout=f"{lifetime_s}s")
        (self._folder / sandbox.job_id).touch()
        return LegacyRemote(sandbox, self.jobs, self.threads, ends_at, self._folder)

    async def abandon(self, making: asyncio.Future[Remote], sandbox_id: str) -> None:
        # The SDK may take half a minute to return the job's id: the caller does not wait for that.
        self.abandoned.start(self._abandon(making))

    async def _abandon(self, making: asyncio.Future[Remote]) -> None:
        try:
            await (await making).kill()
        except Exception as error:  # noqa: BLE001 - no caller waits for this; the job's file and its time limit remain
            _log.error("a job was not ended", error=explain(error, self.options.token))

    async def sweep(self) -> int:
        left = await self.threads.ask(lambda: [file.name for file in self._folder.iterdir()])
        for job_id in left:
            await self.jobs.cancel(job_id)
            (self._folder / job_id).unlink(missing_ok=True)
        return len(left)


class LegacyRemote(Remote):
    def __init__(self, sandbox: Sandbox, jobs: Jobs, threads: Threads, ends_at: float, folder: Path) -> None:
        super().__init__(sandbox.job_id, jobs, threads, ends_at)
        self._sandbox = sandbox
        self._folder = folder

    async def run(self, argv: list[str], stdin: str = "", *, timeout_s: float | None = None) -> Outcome:
        return await self.jobs.ask(
            "a command did not run",
            lambda: self._exec(argv, stdin, timeout_s or _COMMAND_TIMEOUT_S),
            long=timeout_s is not None,
        )

    def _exec(self, argv: list[str], stdin: str = "", timeout_s: float = _COMMAND_TIMEOUT_S) -> Outcome:
        # Through a shell: a missing program exits with 127 instead of breaking the connection, and a program without
        # input does not wait for the server's.
        script = 'exec "$@"' if stdin else 'exec "$@" </dev/null'
        done = self._sandbox.exec(
            "/bin/sh", "-c", script, "sh", *argv, stdin=stdin or None, timeout=math.ceil(timeout_s)
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    async def upload(self, path: str, content: bytes) -> None:
        await self.jobs.ask("an upload failed", lambda: self._sandbox.write_file(path, content))

    async def send(self, source: Path, path: str) -> None:
        await self.jobs.ask("a file was not uploaded", lambda: self._send(source, path), long=True)

    def _send(self, source: Path, path: str) -> None:
        # A request carries a whole file, as text.
        with source.open("rb") as file:
            count = 0
            while piece := file.read(_PIECE):
                self._sandbox.write_file(f"{path}.{count:06d}", piece)
                count += 1
        joined = self._exec(["/bin/sh", "-c", _JOIN, path])
        if joined.code != 0:
            raise OSError(f"the pieces were not joined (exit {joined.code})")

    async def fetch(self, path: str, target: Path) -> None:
        await self.jobs.ask("a file was not downloaded", lambda: self._fetch(path, target), long=True)

    def _fetch(self, path: str, target: Path) -> None:
        cut = self._exec(["/bin/sh", "-c", _CUT, path, str(_PIECE)])
        if cut.code != 0:
            raise OSError(f"the file was not cut into pieces (exit {cut.code})")
        # Not by its suffix: ids have dots, so that two would share one name.
        partial = target.with_name(f"{target.name}.partial")
        try:
            with partial.open("wb") as file:
                for name in cut.stdout.split():
                    piece = self._sandbox.read_file(name, text=False)
                    assert isinstance(piece, bytes)
                    file.write(piece)
            partial.replace(target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    async def attach(self, command: list[str]) -> Pipe:
        await self.upload(_POLLER, await self.threads.ask(Path(poller.__file__).read_bytes))
        python = command[0]

        def stream(argv: list[str], feed: Feed, complain: Feed) -> int | None:
            socket = f"{bootstrap.FOLDER}/run/{secrets.token_hex(8)}.sock"
            kept = self._exec(["/bin/sh", "-c", _KEEP, python, _POLLER, "keep", "--socket", socket, "--", *argv])
            if kept.code != 0:
                complain(kept.stderr)
                return None
            offset, state = 0, poller.MORE
            while state == poller.MORE:
                asked = ["--socket", socket, "--offset", str(offset), "--wait", str(_POLL_S)]
                taken = self._exec([python, _POLLER, "take", *asked])
                state, _, text = taken.stdout.partition("\n")
                if taken.code != 0 or state == poller.LOST:
                    complain(taken.stderr)
                    return None
                feed(text)
                offset += len(text)
            return int(state.removeprefix(poller.END))

        return Armoured(await SplitPipe.open(self, command, stream, self.threads))

    async def touch(self) -> None:
        """Does nothing: these jobs have no idle timeout, and responses to polls show that they are alive."""

    async def kill(self) -> None:
        try:
            # The SDK's own way unregisters it from the SDK's exit handler. After one failure it does nothing more.
            await self.threads.ask(self._sandbox.terminate)
        except Exception as error:  # noqa: BLE001 - whatever it was, the job is ended below or that fails
            _log.debug("the SDK did not end a job", job=self.job_id, error=type(error).__name__)
        await self.jobs.cancel(self.job_id)
        await self.threads.ask((self._folder / self.job_id).unlink, missing_ok=True)
