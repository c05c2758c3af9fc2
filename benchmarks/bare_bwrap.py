"""bubblewrap by itself, with the isolation and the root that the local backend gives a sandbox, and nothing around it.

`rows` runs this module as a small program of its own, so that what is measured is bubblewrap and not the forking of a
large process; as an ordinary user when the caller is root, as the service does it.

A sandbox is bubblewrap with a shell that says that it is there and then waits. There is no way into a running one,
so a command is a bubblewrap of its own on the same files.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import processes
from benchmarks import sandbox_service as service
from benchmarks.report import Row
from benchmarks.timing import milliseconds
from penstock_sandbox.backends.host import layers
from penstock_sandbox.backends.local import bubblewrap, rootfs

TITLE: Final = "bwrap"
CREATES: Final = 100
RUNS: Final = 300
BURST: Final = 64
_USER: Final = 199_000
_WAITS: Final = ("/bin/bash", "--norc", "--noprofile", "-c", "echo; read -r _")


async def rows(place: Path) -> list[Row]:
    """What a program that runs bubblewrap itself would see; `place` is an empty directory."""
    found = await asyncio.to_thread(bubblewrap.find)
    if found is None:
        raise RuntimeError("there is no bubblewrap")
    # A copy where an ordinary user finds it.
    for folder in found.folders:
        await asyncio.to_thread(shutil.copytree, folder, place / folder.name)
    binary = place / found.binary.relative_to(found.folders[0].parent) if found.folders else found.binary
    binds = rootfs.host_binds(())
    rootfs.write_skeleton(place / "base", binds)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, str(place), str(binary), stdout=asyncio.subprocess.PIPE
    )
    answer, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError("bubblewrap alone could not be measured")
    found_times: dict[str, list[float]] = json.loads(answer)
    return [
        *milliseconds(service.CREATE, found_times["create"], f"until its shell answers, {CREATES} in turn"),
        *milliseconds(service.DELETE, found_times["delete"]),
        *milliseconds(service.RUN, found_times["run"], f"a bubblewrap for each, {RUNS} in turn"),
        Row(service.RATE, BURST / found_times["burst"][0], "/s", f"{BURST} at once"),
        Row(service.MEMORY, found_times["memory"][0] / 2**20, "MiB", "PSS"),
        Row(service.FORKS, 1e3 * found_times["forks"][0], "ms", "a layer more"),
        *service.throughput(found_times["in"], found_times["out"], "cat through a pipe"),
    ]


class _Sandbox:
    """Files, and a bubblewrap on them while it is open."""

    def __init__(self, place: Path, binary: str, number: int, below: Sequence[str]) -> None:
        self._folder = place / "sandboxes" / str(number)
        upper, work = self._folder / "upper", self._folder / "work"
        rootfs.prepare_upper(upper, work, None, below=place / "base", fresh=True)
        binds = rootfs.host_binds(())
        self._argv = [
            binary,
            *rootfs.bubblewrap_arguments(
                layers=[str(place / "base"), *below],
                upper=str(upper),
                work=str(work),
                binds=binds,
                mounts=(),
                tmp_bytes=1 << 30,
                share_network=False,
                own_first_process=False,
            ),
            "--",
        ]
        self.pid = 0

    def open(self) -> None:
        """Start a shell in it; it is there after `ready`."""
        theirs, self._life = os.pipe()
        self._said, says = os.pipe()
        self.pid = self._spawn(_WAITS, theirs, says)
        os.close(theirs)
        os.close(says)

    def ready(self) -> None:
        """Wait until its shell answers."""
        if not os.read(self._said, 1):
            raise RuntimeError("a bubblewrap did not start")

    def run(self, command: Sequence[str], given: int | None = None, into: int | None = None) -> None:
        """A command from start to end; its input and output are these files."""
        _, status = os.waitpid(self._spawn(command, given, into), 0)
        if status:
            raise RuntimeError(f"{command[0]} in a bubblewrap ended with {status}")

    def _spawn(self, command: Sequence[str], given: int | None, into: int | None) -> int:
        actions = [(os.POSIX_SPAWN_DUP2, file, number) for number, file in enumerate((given, into)) if file is not None]
        return os.posix_spawn(self._argv[0], [*self._argv, *command], {}, file_actions=actions)

    def close(self) -> None:
        """End what runs in it; its files stay."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._life)
        os.close(self._said)

    def delete(self) -> None:
        """End it and remove its files."""
        self.close()
        layers.remove(self._folder)


def _measure(place: Path, binary: str) -> dict[str, list[float]]:
    numbers = iter(range(1_000_000))

    def made(count: int, below: Sequence[str] = ()) -> list[_Sandbox]:
        found = []
        for _ in range(count):
            found.append(_Sandbox(place, binary, next(numbers), below))
            found[-1].open()
        for sandbox in found:
            sandbox.ready()
        return found

    times: dict[str, list[float]] = {}
    for _ in range(CREATES):
        (sandbox,) = _timed(times, "create", lambda: made(1))
        _timed(times, "delete", sandbox.delete)
    burst = _timed(times, "burst", lambda: made(BURST))
    times["memory"] = [processes.tree_pss_bytes([sandbox.pid for sandbox in burst]) / BURST]
    for sandbox in burst:
        sandbox.delete()
    (sandbox,) = made(1)
    sandbox.close()
    for _ in range(RUNS):
        _timed(times, "run", lambda: sandbox.run(("/bin/true",)))
    _files(place, sandbox, times)
    _write_tree(place / "tree")
    children = _timed(times, "forks", lambda: made(service.TREE_FORKS, [str(place / "tree")]))
    for child in children:
        child.delete()
    return times


def _timed(times: dict[str, list[float]], name: str, work: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    result = work()
    times.setdefault(name, []).append(time.perf_counter() - began)
    return result


def _files(place: Path, sandbox: _Sandbox, times: dict[str, list[float]]) -> None:
    source, target = place / "in", place / "out"
    source.write_bytes(os.urandom(service.FILE_BYTES))
    write, read = ("/bin/sh", "-c", "cat | cat > /workspace/large"), ("/bin/sh", "-c", "cat /workspace/large | cat")
    for _ in range(service.FILE_TIMES):
        with source.open("rb") as given, target.open("wb") as into:
            _timed(times, "in", lambda: sandbox.run(write, given=given.fileno()))
            _timed(times, "out", lambda: sandbox.run(read, into=into.fileno()))
    if target.stat().st_size != service.FILE_BYTES:
        raise RuntimeError("a file came back shorter")


def _write_tree(folder: Path) -> None:
    (folder / "workspace").mkdir(parents=True)
    for number in range(service.TREE_FILES):
        (folder / "workspace" / str(number)).write_bytes(os.urandom(service.TREE_BYTES // service.TREE_FILES))


def main() -> None:
    """Measures in the directory and with the binary that it is given; prints seconds by name as JSON."""
    place, binary = Path(sys.argv[1]), sys.argv[2]
    (place / "sandboxes").mkdir()
    if os.geteuid() == 0:
        for folder in (place, place / "sandboxes"):
            os.chown(folder, _USER, _USER)
        os.setgroups([])
        os.setresgid(_USER, _USER, _USER)
        os.setresuid(_USER, _USER, _USER)
    print(json.dumps(_measure(place, binary)))


if __name__ == "__main__":
    main()
