"""Services of one machine as processes: started in order, restarted where they die, stopped in reverse.

Each service gets its settings, tokens included, in a file of its own that only this user can read; nothing secret is in
an argv or an environment. The services end when this process ends, however it ends.

A service that dies is restarted on the same ports, state and tokens, after a pause (`penstock.local.supervision`). The
others go on meanwhile. One that dies too often ends all: the block that uses them is cancelled and `StackFailed` is
raised with the end of the service's log.
"""

import asyncio
import fcntl
import importlib.util
import json
import logging
import os
import shutil
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import orjson

from penstock.client.errors import ConfigurationError, PenstockError
from penstock.client.transport.atomic_files import writing
from penstock.client.transport.background import TaskOwner
from penstock.client.transport.endpoints import ServiceName
from penstock.client.transport.private_files import open_private, private_directory
from penstock.local.supervision import MAX_RESTARTS, WINDOW_S, Deaths, ServiceRestart

_log = logging.getLogger("penstock.stack")

START_TIMEOUT_S: Final = 600.0
"""Seconds for a service to become ready: an engine loads its weights. One that exits is noticed at once."""

DRAIN_S: Final = 5.0
"""Seconds for a service to finish open work when stopped."""

# A daemon may need ten seconds for a container that does not die; a service killed earlier leaves it behind.
_STOP_S: Final = 2 * DRAIN_S + 25.0
_TAIL_LINES: Final = 20
_TAIL_BYTES: Final = 16_384
_REFUSED_TO_START: Final = 2
"""Exit code of a service that explained in one line on standard error why it cannot start."""


class StackFailed(PenstockError):
    """A service could not be started, or died; the message ends with the end of its log."""


@dataclass(slots=True)
class _Process:
    name: ServiceName
    process: asyncio.subprocess.Process
    log: Path
    log_start: int
    """Offset in bytes of this run's part of the log."""
    ready: asyncio.Future[dict[str, Any]]
    reader: asyncio.Task[None] | None = None
    ending: bool = False
    """Whether it was asked to end: then its end is no death."""


class ServiceProcesses(ABC):
    """The services that `services` names, with the settings of `settings_of`, for the time of a block.

    Args:
        state_dir: their state and settings; one holder at a time.
        log_dir: their logs; None = `logs` in the state directory.
        start_timeout: seconds for each service to become ready.
        max_restarts: how often a service that died is restarted within ten minutes; 0 = a death ends all.
        on_restart: called when a service died and is about to be restarted, and when it is back; absent = logged.
    """

    def __init__(
        self,
        *,
        state_dir: Path | str,
        log_dir: Path | str | None = None,
        start_timeout: float = START_TIMEOUT_S,
        max_restarts: int = MAX_RESTARTS,
        on_restart: Callable[[ServiceRestart], None] | None = None,
    ) -> None:
        self.state_dir = Path(state_dir).absolute()
        self.log_dir = Path(log_dir or self.state_dir / "logs").absolute()
        self.metrics_addresses: dict[ServiceName, str] = {}
        """`host:port` of the metrics of each service that has `metrics_port` set (`/metrics`, with a token)."""
        self.ingress_address = ""
        """`host:port` of the agents' HTTP ingress, once it is ready."""
        self._start_timeout = start_timeout
        self._max_restarts = max_restarts
        self._on_restart = on_restart or (lambda restart: _log.warning("%s", restart))
        self._addresses: dict[ServiceName, str] = {}
        self._processes: list[_Process] = []
        self._deaths: dict[ServiceName, Deaths] = {}
        self._last_end: dict[ServiceName, str] = {}
        self._restarting = TaskOwner()
        self._private: Path | None = None
        self._lock: int | None = None
        self._owner: asyncio.Task[Any] | None = None
        self._stopping = False
        self._failure: StackFailed | None = None

    @property
    @abstractmethod
    def services(self) -> Sequence[ServiceName]:
        """The services, in starting order."""

    @abstractmethod
    def settings_of(self, service: ServiceName) -> dict[str, Any]:
        """Returns the settings of a service that is about to start."""

    def reached_at(self, listening: str) -> str:
        """Returns the address at which others reach a server that listens at this one."""
        return listening

    @property
    def stop_timeout(self) -> float:
        """Seconds after which a service that does not stop is killed."""
        return _STOP_S

    def address(self, service: ServiceName) -> str:
        """Returns `host:port` of a started service. Raises KeyError otherwise."""
        return self._addresses[service]

    @property
    def private(self) -> Path:
        """The directory of the services' settings, which is removed at the end. There is one within the block only."""
        if self._private is None:
            raise AssertionError("prepared before anything is started")
        return self._private

    def keep(self, name: str, content: bytes) -> Path:
        """Writes or replaces a file of `private` at once, readable by this user only; returns its path."""
        path = self.private / name
        partial = path.with_name(f".{name}.partial")
        with writing(path):
            partial.unlink(missing_ok=True)
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(content)
            partial.replace(path)
        return path

    async def __aenter__(self) -> Self:
        self._owner = asyncio.current_task()
        try:
            await self._start_all()
        except BaseException as error:
            await self._stop()
            if isinstance(error, asyncio.CancelledError) and self._failure is not None:
                self._uncancel()
                raise self._failure from None
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure = self._failure
        await self._stop()
        if failure is not None:
            if isinstance(error, asyncio.CancelledError):
                self._uncancel()
            raise failure from None

    async def _start_all(self) -> None:
        self._prepare()
        for name in self.services:
            await self._start(name)

    async def wait(self) -> None:
        """Waits forever; a service that died too often cancels it, as it does everything inside the block."""
        await asyncio.get_running_loop().create_future()

    def _uncancel(self) -> None:
        if self._owner is not None:
            self._owner.uncancel()

    def _prepare(self) -> None:
        missing = [name for name in self.services if importlib.util.find_spec(f"penstock_{name}") is None]
        if missing:
            raise ConfigurationError(
                f"Not installed: {', '.join(missing)}. Install with: pip install 'penstock[local]'",
                reason="SERVICE_NOT_INSTALLED",
            )
        private_directory(self.state_dir)
        private_directory(self.log_dir)
        self._lock = hold(
            self.state_dir,
            "If that is a `penstock up`, its services answer every command without a model of its own: leave out "
            "--model-dir (and, if it is still starting, wait until it shows its addresses). For separate services, "
            "choose another directory: --state-dir DIR on the command line, LocalStack(state_dir=DIR) in Python.",
        )
        self._private = self.state_dir / "private"
        with writing(self.state_dir):
            # A stack that was killed (-9) could not remove its files, and keys are in them; our lock shows that it is
            # gone.
            with suppress(FileNotFoundError):
                shutil.rmtree(self._private)
            self._private.mkdir(mode=0o700)

    async def _start(self, name: ServiceName) -> None:
        lines = (f"{key} = {toml(value)}\n" for key, value in self._settings(name).items())
        config = self.keep(f"{name}.toml", f"[{name}]\n{''.join(lines)}".encode())
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
        environment["PENSTOCK_CONFIG"] = str(config)
        log = self.log_dir / f"{name}.log"
        with os.fdopen(open_private(log, os.O_WRONLY | os.O_APPEND), "ab") as errors:
            log_start = errors.seek(0, os.SEEK_END)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                f"penstock_{name}",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,  # an interrupt at the terminal is ours: we stop them in order
            )
        item = _Process(name, process, log, log_start, asyncio.get_running_loop().create_future())
        self._processes = [*(other for other in self._processes if other.name != name), item]
        item.reader = asyncio.create_task(self._watch(item), name=f"penstock-stack-{name}")
        try:
            async with asyncio.timeout(self._start_timeout):
                ready = await item.ready
        except TimeoutError:
            raise StackFailed(
                f"The {name} service was not ready in {self._start_timeout:.0f} s.{_tail(item)}", reason="SERVICE_SLOW"
            ) from None
        self._addresses[name] = self.reached_at(ready["address"])
        if metrics := ready["endpoints"].get("metrics"):
            self.metrics_addresses[name] = metrics
        if name == "interception":
            self.ingress_address = self.reached_at(ready["endpoints"]["ingress"])

    def _settings(self, name: ServiceName) -> dict[str, Any]:
        """Returns the settings of a service with those that only its supervisor knows."""
        table: dict[str, Any] = {"stop_s": DRAIN_S, "parent_pid": os.getpid()}
        if deaths := self._deaths.get(name):
            table["restarts"] = deaths.total
            table["last_end"] = self._last_end[name]
        return table | self.settings_of(name)

    async def _watch(self, item: _Process) -> None:
        """Reads a service's output until it ends; restarts it if it ends by itself after it was ready."""
        stdout = item.process.stdout
        if stdout is None:
            raise AssertionError("started with a pipe")
        async for line in stdout:
            with suppress(orjson.JSONDecodeError, TypeError):
                entry = orjson.loads(line)
                if entry.get("event") == "ready" and not item.ready.done():
                    item.ready.set_result(entry)
        code = await item.process.wait()
        if self._stopping or self._failure is not None or item not in self._processes:
            return
        if item.ending or item.ready.cancelled():  # it was not ready in time, which `_start` has reported
            return
        failure = _failure(item, code)
        if not item.ready.done():
            item.ready.set_exception(failure)
            return
        self._died(item.name, failure)

    def _died(self, name: ServiceName, failure: StackFailed) -> None:
        """Restarts a service that was ready and has ended, concurrently with everything else."""
        task = self._restarting.start(self._restart(name, failure), f"penstock-restart-{name}")
        task.add_done_callback(self._restarted)

    async def _restart(self, name: ServiceName, failure: StackFailed) -> None:
        """Restarts a service that died until it is ready.

        Raises:
            StackFailed: it has died too often.
        """
        deaths = self._deaths.setdefault(name, Deaths(self._max_restarts))
        while (pause := deaths.pause()) is not None:
            self._last_end[name] = str(failure).partition("\n")[0]
            restart = ServiceRestart(
                service=name, cause=self._last_end[name], number=deaths.recent, limit=deaths.limit, pause=pause
            )
            self._on_restart(restart)
            await asyncio.sleep(pause)
            try:
                await self._start(name)
            except StackFailed as error:
                failure = error
                await _end(next(item for item in self._processes if item.name == name), self.stop_timeout)
            else:
                self._on_restart(replace(restart, ready=True))
                return
        raise _final(failure, deaths, self.state_dir)

    def _restarted(self, task: asyncio.Task[None]) -> None:
        """Handles the end of a restart: the service is back, or the stack ends."""
        if task.cancelled() or (error := task.exception()) is None or self._failure is not None:
            return
        if not isinstance(error, StackFailed):
            error = StackFailed(f"A service that died could not be restarted: {error!r}", reason="SERVICE_DIED")
        self._fail(error)

    def _fail(self, failure: StackFailed) -> None:
        """Ends the block with this failure."""
        self._failure = failure
        if self._owner is not None:
            self._owner.cancel()

    async def _stop(self) -> None:
        self._stopping = True
        try:
            await self._restarting.close()
            order = self.services
            for item in sorted(self._processes, key=lambda item: order.index(item.name), reverse=True):
                await _end(item, self.stop_timeout)
        finally:
            for item in self._processes:  # only processes that an interrupted stop left
                if item.process.returncode is None:
                    item.process.kill()
            if self._private is not None:
                shutil.rmtree(self._private, ignore_errors=True)
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None


async def _end(item: _Process, timeout: float) -> None:
    """Asks a service to stop, and kills it if it does not."""
    item.ending = True
    if item.process.returncode is None:
        with suppress(ProcessLookupError):
            # SIGTERM would leave the driver's rollouts to its next process, and here nobody starts one.
            item.process.send_signal(signal.SIGINT if item.ready.done() else signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout):
                await item.process.wait()
        except TimeoutError:
            message = "the %s service did not stop within %.0f s and is killed; its next start removes leftovers"
            _log.warning(message, item.name, timeout)
            with suppress(ProcessLookupError):
                item.process.kill()
            await item.process.wait()
    if item.reader is not None:
        await asyncio.wait([item.reader], timeout=1.0)
        item.reader.cancel()
    if item.ready.done() and not item.ready.cancelled():
        item.ready.exception()  # its owner may have been cancelled before it could look


def hold(directory: Path, advice: str) -> int:
    """Takes a private directory for one stack, with its process's id for others to see.

    Args:
        directory: of this user, as `private_directory` leaves it.
        advice: what to do where another stack has it, in whole sentences.

    Returns:
        A descriptor: the directory is held until it is closed.

    Raises:
        ConfigurationError: another stack has it (`STATE_DIR_IN_USE`), or the lock's file cannot be opened or written.
        OSError: the file system has no locks.
    """
    lock = open_private(directory / "stack.lock", os.O_RDWR)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"{directory} is in use by services{_holder(lock)}. {advice}", reason="STATE_DIR_IN_USE"
            ) from None
        with writing(directory):
            os.ftruncate(lock, 0)
            os.write(lock, f"{os.getpid()}\n".encode())
    except BaseException:
        os.close(lock)
        raise
    return lock


def _holder(lock: int) -> str:
    """Returns a description of the lock's holder, if known."""
    pid = os.pread(lock, 20, 0).strip()
    return f" of process {pid.decode()}" if pid.isdigit() else ""


def bound_port(bound: str | None, wanted: int) -> int:
    """Returns the port of an address that a service had before it died, or the configured one."""
    return int(bound.rpartition(":")[2]) if bound else wanted


def _final(failure: StackFailed, deaths: Deaths, state_dir: Path) -> StackFailed:
    """Returns the failure of a service that is not restarted."""
    how, newline, log = str(failure).partition("\n")
    often = f" It died {deaths.recent} times in {WINDOW_S / 60:g} minutes." if deaths.recent > 1 else ""
    advice = f" All services are stopped; start them again to continue with their state in {state_dir}."
    return StackFailed(how + often + advice + newline + log, reason=failure.reason)


def _failure(item: _Process, code: int) -> StackFailed:
    """Describes why a service ended: its own message if it refused to start, the end of its log if it ended by itself.

    One that was killed had no time to log why.
    """
    refusal = f"penstock-{item.name}: "
    lines = _log_of(item)
    if code == _REFUSED_TO_START and not item.ready.done():
        for number in reversed(range(len(lines))):
            if lines[number].startswith(refusal):
                reason_text = "\n".join([lines[number].removeprefix(refusal), *lines[number + 1 :]])
                taken = "cannot listen" in reason_text
                message = f"The {item.name} service: {reason_text}"
                if taken:
                    return StackFailed(message, reason="PORT_IN_USE")
                return StackFailed(message, reason="SERVICE_REFUSED")
    if code < 0:
        how = f"The {item.name} service was killed by {_signal(-code)}. Its log is {item.log}."
        return StackFailed(how, reason="SERVICE_DIED")
    how = f"The {item.name} service ended with exit code {code}."
    return StackFailed(how + _tail(item), reason="SERVICE_DIED")


def _signal(number: int) -> str:
    """Returns a signal's name, with its usual sender if nobody sent it on purpose."""
    name = signal.Signals(number).name
    return f"{name} (by a user, or by the kernel for lack of memory)" if number == signal.SIGKILL else name


def _tail(item: _Process) -> str:
    """Returns the end of a log, for an error; empty if there is none."""
    lines = _log_of(item)[-_TAIL_LINES:]
    return f" Its log ({item.log}) ends with:\n" + "\n".join(f"    {line[:400]}" for line in lines) if lines else ""


def _log_of(item: _Process) -> list[str]:
    """Returns the last lines of the log of this run of a service."""
    try:
        with item.log.open("rb") as stream:
            stream.seek(max(item.log_start, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return stream.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []


def toml(value: Any) -> str:
    """Returns a value in TOML, on one line. JSON strings are TOML's except for one character that only TOML escapes."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml(str(key))} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
