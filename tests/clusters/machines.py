"""Machines of a cluster: hosts of `tests.hosts.network`, with names of their own and all their processes."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from tests.hosts.engine import PLUGINS
from tests.hosts.fleet import ROOT
from tests.hosts.network import Host, Network, enter_hub

_CLONE_NEWNS: Final = 0x20000
_MS_REC_PRIVATE: Final = 0x4000 | 0x40000
_MS_BIND: Final = 0x1000


def enter_world(folder: Path) -> None:
    """Move this process into a hub whose mounts are its own, with `folder`/hosts in place of /etc/hosts."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0 or libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"a mount namespace cannot be made: {os.strerror(error)}; this needs root")
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    if libc.mount(str(hosts).encode(), b"/etc/hosts", None, _MS_BIND, None) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"/etc/hosts cannot be replaced: {os.strerror(error)}")
    enter_hub()


def machines(network: Network, folder: Path, names: Sequence[str]) -> dict[str, Host]:
    """Connected machines that find each other by name."""
    made = {name: network.add(name) for name in names}
    lines = [f"{host.address} {name}\n" for name, host in made.items()]
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
    return made


def python_path(folder: Path) -> str:
    """Where the programs of a cluster find this project's code, and the engine that logs."""
    return os.pathsep.join(filter(None, [str(folder / PLUGINS), str(ROOT), os.environ.get("PYTHONPATH")]))


def spawn(host: Host, argv: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a program on a machine, where the host's name is its own."""
    named = ["unshare", "--uts", "sh", "-c", f'hostname {host.name}; exec "$@"', "sh", *argv]
    return host.spawn(named, dict(env), log)


def processes(host: Host) -> Iterator[int]:
    """All processes of a machine but the one that keeps its namespace."""
    own = Path(f"/proc/{host.holder.pid}/ns/net").readlink()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != host.holder.pid:
            with suppress(OSError):
                if folder.joinpath("ns/net").readlink() == own and folder.joinpath("cmdline").read_bytes():
                    yield int(folder.name)  # a zombie has no arguments


def kill(host: Host) -> None:
    """End all processes of a machine by SIGKILL: power off."""
    while found := list(processes(host)):
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in host.processes:
            process.poll()


def command_of(pid: int) -> str:
    """The arguments of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def parent_of(pid: int) -> int:
    """The parent of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("PPid:")))
