"""One process of a replica, as the service sees it: start, calls, death or end."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Self

import structlog

from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.errors import FailedPrecondition, Unavailable
from penstock_inference.domain.engine_info import EngineInfo, EngineStats
from penstock_inference.domain.generation import Done, GenerateEvent, GenerateRequest
from penstock_inference.replicas import wire

RETRY_AFTER_S = 2.0
END_S = 20.0
"""A process that has not ended this long after it was asked to is killed."""

LATE_S = 1.0
"""If our own timer fires this late, this process was stalled; do not count it as replica silence."""

_log = structlog.get_logger("penstock.inference")


def replica_died(name: str = "") -> Unavailable:
    """The error of a call to a replica's dead process."""
    return Unavailable(
        f"replica {name} died and is restarting" if name else "every replica is restarting",
        reason="ENGINE_DIED",
        retry_after_s=RETRY_AFTER_S,
        metadata={"replica": name} if name else None,
    )


class ReplicaProcess:
    """A running replica. Every method belongs to the event loop that called `start`.

    Every call raises Unavailable (ENGINE_DIED) when the process ends first, so none waits forever.
    """

    def __init__(
        self,
        name: str,
        process: Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        info: EngineInfo,
        silence_s: float,
    ) -> None:
        self.name = name
        self.info = info
        self.stats = EngineStats()
        self._process = process
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Queue[Any]] = {}
        self._dead = asyncio.Event()
        self._silence_s = silence_s
        self._last_message_at = time.monotonic()
        self._listener = asyncio.create_task(self._listen(), name=f"replica-{name}")
        self._watch = asyncio.create_task(self._end_when_silent(), name=f"replica-watch-{name}")

    @classmethod
    async def start(cls, name: str, order: wire.Open, environment: Mapping[str, str], silence_s: float) -> Self:
        """Start a process and wait until its engine is open.

        Args:
            name: of the replica.
            order: its spec.
            environment: variables in addition to this process's own.
            silence_s: after this many seconds without a message, the open process counts as hung and is killed.

        Raises the engine's error, or FailedPrecondition (ENGINE_NOT_STARTED) when the process ends instead.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "penstock_inference.replicas.child",
                str(theirs.fileno()),
                name,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **environment},
                stdin=asyncio.subprocess.DEVNULL,
                # Terminal signals to the process group must reach only the service, which ends its replicas itself. But
                # no separate session: kernels share the processor among sessions first, and vLLM's processes may yield
                # in a loop.
                process_group=0,
            )
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
            wire.send(writer, order)
            first = await wire.receive(reader)
            if isinstance(first, wire.Failed):
                raise first.error()
            if not isinstance(first, wire.Ready):
                raise FailedPrecondition(
                    f"replica {name} ended before its engine was open", reason="ENGINE_NOT_STARTED"
                )
        except BaseException:
            ours.close()
            await _ended(process)
            raise
        return cls(name, process, reader, writer, first.info, silence_s)

    @property
    def alive(self) -> bool:
        """Whether it can be called, as far as known."""
        return not self._dead.is_set()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def died(self) -> None:
        """Wait until it can no longer be called."""
        await self._dead.wait()

    def kill(self) -> None:
        """Kill it at once."""
        _kill(self._process)

    async def aclose(self) -> None:
        """End it and the processes that it started. Idempotent."""
        self._writer.close()
        try:
            async with asyncio.timeout(END_S):
                await self._process.wait()
        except TimeoutError:
            _log.warning("a replica did not end and is killed", replica=self.name)
        finally:
            self._listener.cancel()
            self._watch.cancel()
            await _ended(self._process)
            await asyncio.wait((self._listener, self._watch))

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of `child.Host`; return its result or raise its error."""
        number, answers = self._call(method, arguments)
        try:
            message = await answers.get()
        except BaseException:
            self._cancel(number)
            raise
        finally:
            del self._answers[number]
        return self._result(message)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """See `Engine.generate`."""
        number, answers = self._call("generate", (request,))
        over = False
        try:
            while not over:
                message = await answers.get()
                over = not isinstance(message, wire.Answer)
                event = self._result(message)
                over = isinstance(event, Done)
                yield event
        finally:
            del self._answers[number]
            if not over:
                self._cancel(number)

    def _call(self, method: str, arguments: tuple[Any, ...]) -> tuple[int, asyncio.Queue[Any]]:
        if self._dead.is_set():
            raise replica_died(self.name)
        number = next(self._numbers)
        answers = self._answers[number] = asyncio.Queue()
        wire.send(self._writer, wire.Call(number, method, arguments))
        return number, answers

    def _cancel(self, number: int) -> None:
        if not self._dead.is_set():
            wire.send(self._writer, wire.Cancel(number))

    def _result(self, message: Any) -> Any:
        if isinstance(message, wire.Failed):
            raise message.error()
        if message is None:
            raise replica_died(self.name)
        return message.result

    async def _listen(self) -> None:
        try:
            while (message := await wire.receive(self._reader)) is not None:
                self._last_message_at = time.monotonic()
                if isinstance(message, wire.Stats):
                    self.stats = message.stats
                elif (answers := self._answers.get(message.number)) is not None:
                    answers.put_nowait(message)
        finally:
            self._watch.cancel()
            self._dead.set()
            for answers in self._answers.values():
                answers.put_nowait(None)

    async def _end_when_silent(self) -> None:
        """Kill a hung process, which would block its requests, and every update, forever."""
        while (left := self._last_message_at + self._silence_s - time.monotonic()) > 0:
            wakes_at = time.monotonic() + left
            await asyncio.sleep(left)
            if time.monotonic() > wakes_at + LATE_S:
                self._last_message_at = time.monotonic()
        _log.error("a replica hangs and is killed", replica=self.name, silent_s=self._silence_s)
        _kill(self._process)


async def _ended(process: Process) -> None:
    """Kills it if it runs, and returns when it is no more, even if this call is cancelled meanwhile, once."""
    _kill(process)
    await TaskOwner().finish(process.wait(), "replica-reaped")


def _kill(process: Process) -> None:
    if process.returncode is None:
        try:
            process.kill()
        except ProcessLookupError:
            return
