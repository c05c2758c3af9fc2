"""Services that die by SIGKILL at a chosen write of their journal, or kill another, each a fork of one warm process.

The seams are SQLite's own connection, through which passes what the journal writes, and the journal's commit of a
group: each writer of a group is committed by itself here, so that every state that its neighbours could leave behind
can be the last one. The service is the real one, its package's `__main__`, and knows nothing of it.

Run as a process with the service's name; it reads one order per line, starts the service, tells its ready line, and
its end:

    {"environment": {...}, "log": "PATH", "writes": "PATH", "die_at": 3, "committed": true, "victim": 0}
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import signal
import sqlite3
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp
import grpc
from tests.support.endpoints.loopback import unused_port

from penstock_chassis.journal import journal

BACK_OFF_S: Final = 0.01
_WRITES: Final = ("INSERT", "UPDATE", "DELETE", "REPLACE")


T = TypeVar("T")


class MortalConnection(sqlite3.Connection):
    """Ends the process at its n-th write: before its commit, or after it and before any caller gets its result.

    Or ends `victim`, another process, before the commit, and goes on.
    """

    die_at = 0
    committed = False
    victim = 0
    log: Path
    _writes = 0
    _group: tuple[str, ...] = ()

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        word = sql.split(None, 1)[0].upper()
        if word == "BEGIN":
            self._group = ()
        elif word in _WRITES:
            self._group = (*self._group, sql)
        elif word == "COMMIT" and self._group:
            return self._commit(sql)
        return super().execute(sql, parameters)

    def _commit(self, sql: str) -> sqlite3.Cursor:
        MortalConnection._writes += 1
        with self.log.open("a") as log:
            log.write(json.dumps([" ".join(sql.split()[:5]) for sql in self._group]) + "\n")
        last = MortalConnection._writes == self.die_at
        if last and not self.committed:
            os.kill(self.victim or os.getpid(), signal.SIGKILL)
        done = super().execute(sql)
        if last and not self.victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return done


def _one_by_one(commit: Callable[[Any, list[Any]], list[Any]], connection: Any, batch: list[Any]) -> list[Any]:
    """Each writer of a batch in a transaction of its own."""
    return [result for job in batch for result in commit(connection, [job])]


def imported(service: str) -> tuple[str, ...]:
    """What a service's `main` imports: here once, and not in each fork."""
    package = f"penstock_{service}"
    return "penstock_chassis.server", f"{package}.app", f"{package}.settings"


def _serve(main: Callable[[], None], order: Mapping[str, Any]) -> None:
    """In the fork: the service, until its end."""
    os.environ.clear()
    os.environ.update(order["environment"])
    os.dup2(os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    sys.argv = [f"penstock-{sys.argv[1]}"]
    MortalConnection.die_at, MortalConnection.committed = order["die_at"], order["committed"]
    MortalConnection.victim = order["victim"]
    MortalConnection.log = Path(order["writes"])
    vars(journal)["_commit"] = partial(_one_by_one, vars(journal)["_commit"])
    vars(sqlite3)["connect"] = partial(sqlite3.connect, factory=MortalConnection)
    main()


def _take_orders(main: Callable[[], None]) -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _serve(main, json.loads(line))
            return
        os.waitpid(pid, 0)
        sys.stdout.write('{"event":"ended"}\n')
        sys.stdout.flush()


class Warm:
    """The process that forks services, and the one service of it that runs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._events = asyncio.Queue[dict[str, Any] | None]()
        # The only one that reads the pipe, whoever waits for an event and is cancelled meanwhile.
        self._reader = asyncio.create_task(self._read())
        self.ready: dict[str, Any] = {}

    @classmethod
    async def start(cls, service: str = "interception") -> Warm:
        """Starts it; `close` ends it and its service."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.support.services.dying",
            service,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        return cls(process)

    async def serve(self, **order: Any) -> bool:
        """Starts a service; False when it died before it was ready."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        event = await self._event()
        if event["event"] == "ready":
            self.ready = event
        return bool(event["event"] == "ready")

    async def ended(self) -> None:
        """Returns when the service that was started last is dead."""
        while (await self._event())["event"] != "ended":
            pass

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """A signal to the service, wherever it is: kill -9, unless it is to stop by another."""
        with suppress(ProcessLookupError):
            os.kill(self.ready["pid"], number)

    async def close(self) -> None:
        """Ends everything: the service goes with its parent."""
        assert self._process.stdin is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._reader
        self._process.stdin.close()
        await self._process.wait()

    async def _event(self) -> dict[str, Any]:
        event = await self._events.get()
        if event is None:
            self._events.put_nowait(None)
            raise AssertionError("the process that forks services is gone")
        return event

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if line.startswith(b'{"event":'):
                self._events.put_nowait(json.loads(line))
        self._events.put_nowait(None)


class Mortal:
    """A service that dies at its n-th write and is started again, on the same ports and state.

    `settings` are its environment variables without their prefix; its operator's token is `token`.
    """

    def __init__(self, warm: Warm, service: str, directory: Path, token: str, **settings: str) -> None:
        directory.mkdir()
        self._warm = warm
        self._directory = directory
        self._prefix = f"PENSTOCK_{service.upper()}"
        given = {"operator_token": token, "state_dir": str(directory / "state"), "port": str(unused_port()), **settings}
        self._environment = {"PATH": os.environ["PATH"], "PENSTOCK_PARENT_DEATH": "1"}
        self._environment |= {f"{self._prefix}_{name.upper()}": value for name, value in given.items()}
        self.address = ""
        self.endpoints: dict[str, str] = {}
        self.died = False
        self._death: asyncio.Task[None] | None = None
        self._next_life: asyncio.Task[None] | None = None

    async def start(self, die_at: int = 0, *, committed: bool = False, victim: int = 0) -> None:
        """From now on it dies at this write, before its commit or after it; 0 is never.

        With the pid of a `victim` it lives, and kills that one before the commit.
        """
        log = self._directory / "service.log"
        ready = await self._warm.serve(
            environment=self._environment,
            log=str(log),
            writes=str(self._directory / "writes"),
            die_at=die_at,
            committed=committed,
            victim=victim,
        )
        if not ready:  # it died as it opened its journal
            assert die_at, log.read_text()
            self.died = True
            await self.start()
            return
        self.address, self.endpoints = self._warm.ready["address"], self._warm.ready.get("endpoints", {})

    def restart(self) -> None:
        """Watches for its death from now on, and starts it again then; `kill` ends the watch."""
        self._death = asyncio.create_task(self._watch())

    async def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """The end of a scenario: by kill -9, or by another signal."""
        if self._death is not None:
            self._death.cancel()
            await asyncio.wait({self._death})
        if self._next_life is not None:  # it may serve its clients before this process has read that it is ready
            await self._next_life
        self._warm.kill(number)
        await self._warm.ended()

    async def _watch(self) -> None:
        await self._warm.ended()
        self.died = True
        self._next_life = asyncio.create_task(self.start())

    def writes(self) -> list[list[str]]:
        """The statements of each write so far, by their first words."""
        return [json.loads(line) for line in (self._directory / "writes").read_text().splitlines()]


async def insisting(work: Callable[[], Awaitable[T]]) -> T:
    """Does it until the service answers, as an SDK that never gives up."""
    while True:
        try:
            return await work()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
        except (aiohttp.ClientError, ConnectionError):
            pass
        await asyncio.sleep(BACK_OFF_S)  # the back-off of a client whose server is away


if __name__ == "__main__":
    for _name in imported(sys.argv[1]):
        importlib.import_module(_name)
    gc.collect()
    gc.freeze()
    _take_orders(importlib.import_module(f"penstock_{sys.argv[1]}.__main__").main)
