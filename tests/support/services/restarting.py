"""A stack whose services can be killed and started again on the same state and the same port."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from tests.support.endpoints.loopback import unused_port
from tests.support.services.stack import Running, stack_in

from penstock.client import PenstockError, connect
from penstock.client.errors import NotFound
from penstock.client.transport.endpoints import ServiceName
from penstock.local.processes import _Process
from penstock.local.stack import LocalStack, StackFailed

GUARD_S: Final = 180.0
"""A rollout that has not ended by then, or a service that does not answer, is a fault and not patience."""
_AWAY: Final = frozenset({"UNREACHABLE", "DRAINING", "SANDBOX_UNREACHABLE", "INTERCEPTION_UNREACHABLE"})
_AWAY_CODES: Final = frozenset({"Unavailable", "DeadlineExceeded", "ResourceExhausted"})
_PAUSE_S: Final = 0.05

T = TypeVar("T")


class RestartableStack(LocalStack):
    """As `LocalStack`, but the death of a service ends nothing: the test killed it."""

    def _died(self, name: ServiceName, failure: StackFailed) -> None:
        """The test starts it again, when it wants."""

    def pid(self, service: ServiceName) -> int:
        """The process of a service that runs."""
        return self._item(service).process.pid

    async def kill(self, service: ServiceName) -> None:
        """kill -9, and wait until it is dead."""
        item = self._item(service)
        item.process.send_signal(signal.SIGKILL)
        await item.process.wait()

    async def leave(self, service: ServiceName) -> None:
        """SIGTERM as of a supervisor, and wait until it has stopped."""
        item = self._item(service)
        item.process.send_signal(signal.SIGTERM)
        assert await item.process.wait() == 0

    async def start_again(self, service: ServiceName) -> None:
        """The same service on the same state and ports, after a kill."""
        item = self._item(service)
        assert item.process.returncode is not None, "kill it first"
        await self._start(service)

    async def restart(self, service: ServiceName, *, kill: bool = True) -> None:
        """kill -9, or SIGTERM, and start again."""
        await (self.kill(service) if kill else self.leave(service))
        await self.start_again(service)

    def _item(self, service: ServiceName) -> _Process:
        return next(item for item in self._processes if item.name == service)


@asynccontextmanager
async def restartable(
    folder: Path, settings: Mapping[str, Mapping[str, Any]] | None = None
) -> AsyncIterator[tuple[Running, RestartableStack]]:
    """As `stack.running`, with services that can be killed."""
    names = ("inference", "interception", "sandbox", "driver", "ingress")
    stack = stack_in(folder, settings, kind=RestartableStack, ports={name: unused_port() for name in names})
    assert isinstance(stack, RestartableStack)
    async with stack, connect(stack.endpoints) as ps:
        yield Running(stack, ps, stack.state_dir), stack


class Traces:
    """What the sandboxes of a service show to the host, noted while they live and looked for when they should be gone.

    Processes are known by their process-id namespaces, which no other program shares; so other sandbox services on
    the same machine do not disturb, and neither does who runs the test. A namespace stays open while it is watched:
    the kernel gives the number of a closed one to the next sandbox of anybody.
    """

    def __init__(self, stack: RestartableStack) -> None:
        self._state = stack.state_dir / "sandbox"
        self._namespaces: dict[str, int] = {}
        """Names, and the descriptors that keep the kernel from using a name again."""
        self._own = _namespace("self")
        weakref.finalize(self, _close_all, self._namespaces)

    def note(self, service_pid: int) -> int:
        """Remember the namespaces under a service; how many of its processes live in them now."""
        self._forget_empty()
        inside = 0
        for pid in descendants(service_pid):
            with suppress(OSError):
                descriptor = os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY)
                namespace = str(Path(f"/proc/self/fd/{descriptor}").readlink())
                if namespace == self._own:
                    os.close(descriptor)
                    continue
                inside += 1
                if namespace in self._namespaces:
                    os.close(descriptor)
                else:
                    self._namespaces[namespace] = descriptor
        return inside

    def _forget_empty(self) -> None:
        """Close the namespaces without a process: none can enter one again."""
        alive = set()
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with suppress(OSError):
                    alive.add(_namespace(folder.name))
        for name in self._namespaces.keys() - alive:
            os.close(self._namespaces.pop(name))

    def left(self) -> list[str]:
        """Processes, mounts, control groups and directories that are still there."""
        return [*self._processes(), *self._mounts(), *self._groups(), *self._directories()]

    def _processes(self) -> list[str]:
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with suppress(OSError):
                    if _namespace(folder.name) in self._namespaces:
                        found.append(f"process {folder.name} {(folder / 'cmdline').read_bytes()[:200]!r}")
        return found

    def _mounts(self) -> list[str]:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        return [f"mount {line}" for line in lines if str(self._state) in line]

    def _groups(self) -> list[str]:
        """Control groups of sandboxes; the service's own empty parent may stay while it runs."""
        found = []
        for root, folders, _ in os.walk("/sys/fs/cgroup"):
            for name in folders:
                if name.startswith("penstock-") and name.endswith(self._group_suffix()):
                    with suppress(FileNotFoundError), os.scandir(Path(root, name)) as entries:  # else removed meanwhile
                        found += [f"control group {entry.path}" for entry in entries if entry.is_dir()]
        return found

    def _group_suffix(self) -> str:
        return hashlib.sha256(str(self._state / "local").encode()).hexdigest()[:12]

    def _directories(self) -> list[str]:
        local = self._state / "local"
        return [f"directory {path}" for name in ("sandboxes", "trash") for path in (local / name).glob("*")]


def _namespace(pid: int | str) -> str:
    """A name of the process-id namespace that a process lives in; unique while something keeps it open."""
    return str(Path(f"/proc/{pid}/ns/pid").readlink())


def _close_all(namespaces: dict[str, int]) -> None:
    for descriptor in namespaces.values():
        os.close(descriptor)


def descendants(pid: int) -> list[int]:
    """All processes under `pid`, as the kernel shows them now."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                stat = (folder / "stat").read_text()
                parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(folder.name))
    found, queue = [], [pid]
    while queue:
        children = parents.get(queue.pop(), [])
        found += children
        queue += children
    return found


def spawner_if_any(service_pid: int) -> int | None:
    """The process of a sandbox service that makes its sandboxes; None between a killed one and the next."""
    for pid in descendants(service_pid):
        with suppress(OSError):
            if b"penstock_sandbox.backends.local.spawner.main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return None


def spawner_of(service_pid: int) -> int:
    """The same of a service that has one."""
    found = spawner_if_any(service_pid)
    assert found is not None, "the sandbox service has no spawner"
    return found


async def insisting(work: Callable[[], Awaitable[T]], what: str, seen: Callable[[], int] = lambda: 0) -> T:
    """Does it until the services are there to do it; AssertionError when they are away for too long.

    `seen` counts signs that they are there: the time of absence begins anew where it has grown, since a service that is
    killed many times under one long stream is never away for long.
    """
    until, before = time.monotonic() + GUARD_S, seen()
    while True:
        try:
            return await work()
        except NotFound:
            raise
        except PenstockError as error:
            if type(error).__name__ not in _AWAY_CODES and error.reason not in _AWAY:
                raise
            if seen() != before:
                until, before = time.monotonic() + GUARD_S, seen()
            if time.monotonic() > until:
                raise AssertionError(f"{what}: {error!r}") from error
        await asyncio.sleep(_PAUSE_S)  # the back-off of a client whose server is away
