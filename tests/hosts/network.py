"""Hosts as network namespaces, joined by a bridge in the namespace of the calling process.

The caller first moves into a network namespace of its own (`enter_hub`), so nothing here is visible on the machine:
all of it goes when the process and its hosts end. A host that is cut sends and receives nothing, as one without power:
its peers see silence and no reset.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from tests.support.services.forking import ON_A_HOST

HUB_ADDRESS: Final = "10.77.0.1"
"""Address of the calling process, where the trainers are."""
_CLONE_NEWNET: Final = 0x40000000
CLONE_NEWNS: Final = 0x20000
_BRIDGE: Final = "hub"
_FIRST: Final = 10


def enter_hub() -> None:
    """Move this process into a new network namespace with a bridge. Call it before any thread is started.

    Raises:
        OSError: this needs root.
    """
    unshare(_CLONE_NEWNET, "a network namespace")
    _ip("link", "set", "lo", "up")
    _ip("link", "add", _BRIDGE, "type", "bridge")
    _ip("addr", "add", f"{HUB_ADDRESS}/24", "dev", _BRIDGE)
    _ip("link", "set", _BRIDGE, "up")


def unshare(kind: int, what: str) -> None:
    """Move this process into a new namespace of a kind. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(kind) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what} cannot be made: {os.strerror(error)}; this needs root")


@dataclass
class Host:
    """One host: a namespace with one address. Its processes are children of the calling process.

    `holder` keeps the namespace; `processes` are what `spawn` started.
    """

    name: str
    address: str
    holder: subprocess.Popen[bytes]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def spawn(self, argv: Sequence[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start a program on this host; it dies with the calling process. Its output goes to `log`."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*ON_A_HOST, f"--net=/proc/{self.holder.pid}/ns/net", "--", *argv],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.processes.append(process)
        return process

    def start_module(self, module: str, arguments: Sequence[str], log: Path, root: Path) -> None:
        """Start `python -m MODULE` of the tests in `root`."""
        env = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
        self.spawn([sys.executable, "-m", module, *arguments], {**env, "PYTHONPATH": str(root)}, log)

    def cut(self) -> None:
        """Pull the cable."""
        _ip("link", "set", self._cable, "down")

    def mend(self) -> None:
        """Plug the cable in again."""
        _ip("link", "set", self._cable, "up")

    def kill(self) -> None:
        """End every process of the host by SIGKILL."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()
        self.processes.clear()

    @property
    def _cable(self) -> str:
        return f"v{self.holder.pid}"


class Network:
    """All hosts, by name. Use as a context: at its end every process of every host is killed."""

    def __init__(self) -> None:
        self.hosts: dict[str, Host] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts.values():
            host.kill()
            host.holder.kill()
            host.holder.wait()

    def add(self, name: str) -> Host:
        """Return a new host, connected."""
        holder = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sh", "-c", "echo; exec sleep infinity"],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
        )
        assert holder.stdout is not None
        holder.stdout.readline()  # it is in its namespace
        host = Host(name, f"10.77.0.{_FIRST + len(self.hosts)}", holder)
        self.hosts[name] = host
        cable = f"v{holder.pid}"
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
        _ip("link", "set", cable, "master", _BRIDGE, "up")
        for command in (
            ("link", "set", "lo", "up"),
            ("addr", "add", f"{host.address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
        ):
            subprocess.run(["nsenter", f"--net=/proc/{holder.pid}/ns/net", "--", "ip", *command], check=True)
        return host


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
