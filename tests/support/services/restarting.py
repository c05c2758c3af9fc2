"""A stack whose services can be killed and started again on the same state and the same port."""

from __future__ import annotations

import hashlib
import os
import signal
import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.services.stack import Running, stack_in

from penstock.client import connect
from penstock.client.transport.endpoints import ServiceName
from penstock.local.stack import LocalStack, StackFailed, _Process


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

    async def start_again(self, service: ServiceName) -> None:
        """The same service on the same state and ports, after a kill."""
        item = self._item(service)
        assert item.process.returncode is not None, "kill it first"
        await self._start(service)

    async def restart(self, service: ServiceName) -> None:
        """kill -9 and start again."""
        await self.kill(service)
        await self.start_again(service)

    def _item(self, service: ServiceName) -> _Process:
        return next(item for item in self._processes if item.name == service)


@asynccontextmanager
async def restartable(
    folder: Path, settings: Mapping[str, Mapping[str, Any]] | None = None
) -> AsyncIterator[tuple[Running, RestartableStack]]:
    """As `stack.running`, with services that can be killed."""
    stack = stack_in(folder, settings, kind=RestartableStack)
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
                    with os.scandir(Path(root, name)) as entries:
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


def spawner_of(service_pid: int) -> int:
    """The process of a sandbox service that makes its sandboxes."""
    for pid in descendants(service_pid):
        with suppress(OSError):
            if b"penstock_sandbox.backends.local.spawner.main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    raise AssertionError("the sandbox service has no spawner")
