"""A pipe to the guest agent from SDK calls: one long call streams the output, short calls send the input.

Invariants
- There is one call for input at a time; the link collects frames meanwhile, so each call takes all there are.
- The streaming thread waits while its data is not consumed; it holds at most a few pieces.
- Any failure ends the pipe; frames are numbered, so the next pipe continues where this one broke.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

import structlog

from penstock_chassis.errors import PenstockError
from penstock_sandbox.backends.guest_client.pipe import SandboxGone
from penstock_sandbox.backends.hf.threads import Threads, call_on_loop
from penstock_sandbox.backends.remote_machine import bootstrap
from penstock_sandbox.guest.handshake import NO_GUEST

if TYPE_CHECKING:
    from penstock_sandbox.backends.hf.client import Remote

Feed = Callable[[str], None]
Streamer = Callable[[list[str], Feed, Feed], int | None]
"""Runs a command and feeds its output and errors as they arrive, in a thread; returns its exit code, if known."""

_HEAR = ("--socket", bootstrap.SOCKET, "--output-only", "--armour")
# Only if the number is still that process's.
_END = 'grep -qs output-only "/proc/$0/cmdline" && kill "$0"'
_PIECES = 64
_ERRORS_KEPT = 500

_log = structlog.get_logger(__name__)


class PipeEnded(Exception):
    """The pipe has ended; also raised into an SDK, to leave a stream that is not read any more."""


class SplitPipe:
    """A ``Pipe``; see the module. Its data is armoured: the SDKs carry text."""

    def __init__(self, remote: Remote, command: Sequence[str]) -> None:
        self._remote = remote
        self._command = list(command)
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[bytes] = asyncio.Queue(_PIECES)
        self._over = asyncio.Event()
        self._closed = False
        self._why = ""
        self._code: int | None = None
        self._errors = ""
        self._pid = ""

    @classmethod
    async def open(cls, remote: Remote, command: Sequence[str], stream: Streamer, threads: Threads) -> SplitPipe:
        """Starts to stream; if no guest agent responds, the pipe ends."""
        pipe = cls(remote, command)
        # Its process id comes first: closing must end it there too, or the SDK's thread would wait for more output.
        argv = ["/bin/sh", "-c", 'echo $$; exec "$@"', "sh", *command, "attach", *_HEAR]

        def run() -> None:
            why, code = "the guest's output ended", None
            try:
                code = stream(argv, pipe._feed, pipe._complain)
            except PipeEnded:
                why = "closed"
            except BaseException as error:  # noqa: BLE001 - any failure ends the pipe, with its reason
                why = f"{type(error).__name__} while streaming"
            call_on_loop(pipe._loop, pipe._ended, why, code)

        await threads.stream(run)
        return pipe

    # On the stream's thread --------------------------------------------------------------------------------------

    def _feed(self, text: str) -> None:
        if self._closed:
            raise PipeEnded
        if not self._pid:
            head, _, text = text.partition("\n")
            self._pid = head.strip()
        if text:
            asyncio.run_coroutine_threadsafe(self._arrived.put(text.encode()), self._loop).result()

    def _complain(self, text: str) -> None:
        self._errors = (self._errors + text)[-_ERRORS_KEPT:]

    # On the loop -------------------------------------------------------------------------------------------------

    async def send(self, data: bytes) -> None:
        """Delivers whole armoured frames. Raises PipeEnded if they were not accepted."""
        if self._over.is_set():
            raise PipeEnded(self._why)
        outcome = await self._remote.run([*self._command, "deliver", bootstrap.SOCKET], data.decode("ascii"))
        if outcome.code == NO_GUEST:
            raise SandboxGone("ATTENDANT_ENDED")
        if outcome.code != 0:
            raise PipeEnded(f"the guest accepted no input (exit {outcome.code}): {outcome.stderr[-_ERRORS_KEPT:]}")

    async def received(self) -> AsyncIterator[bytes]:
        """Yields the guest agent's data, in order, to the pipe's end."""
        over = asyncio.ensure_future(self._over.wait())
        try:
            while True:
                if self._arrived.empty():
                    arriving = asyncio.ensure_future(self._arrived.get())
                    try:
                        await asyncio.wait([arriving, over], return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        taken = arriving.done() or not arriving.cancel()
                    if not taken:
                        break
                    yield arriving.result()
                else:
                    yield self._arrived.get_nowait()
        finally:
            over.cancel()
        if self._code == NO_GUEST:
            raise SandboxGone("ATTENDANT_ENDED")
        if self._why:
            raise PipeEnded(f"{self._why} {self._errors}".strip())

    def _ended(self, why: str, code: int | None = None) -> None:
        self._why = self._why or why
        self._code = code
        self._over.set()

    async def aclose(self) -> None:
        """Ends the stream, here and in the job."""
        if self._closed:
            return
        self._closed = True
        # The thread may wait for room; it then finds the pipe closed.
        while not self._arrived.empty():
            self._arrived.get_nowait()
        if self._over.is_set():
            return
        self._ended("closed")
        if self._pid.isdigit():
            try:
                await self._remote.run(["/bin/sh", "-c", _END, self._pid])
            except PenstockError as error:
                # The stream ends by itself when the job does, or at the silence timeout.
                _log.debug("a stream was not ended at Hugging Face", job=self._remote.job_id, error=error.message)
