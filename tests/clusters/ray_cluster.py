"""A real Ray cluster on machines of `tests.clusters.machines`: a head and workers, each with a raylet of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import yaml
from tests.clusters import machines, ray_provider
from tests.hosts.network import Host, Network
from tests.support.waiting import eventually

HEAD: Final = "r0"
_PORT: Final = 6379
_PORTS: Final = {
    "metrics-export": 6380,
    "dashboard-agent-grpc": 6381,
    "dashboard-agent-listen": 6382,
    "runtime-env-agent": 6383,
}
"""Fixed, so that the raylet need not wait for what its agents choose."""
_CPUS: Final = 3
"""Of a worker, enough for a sandbox service and two others. The head has room for the first only."""
PLACE: Final[Mapping[str, float]] = {"sandboxes": 1}
"""A resource of each worker, which has one."""
_UP_S: Final = 240.0
_TRIES: Final = 6
_ASKED: Final = "asked"
"""The folder of `ray_provider`, below that of the cluster."""
_STORE_BYTES: Final = 80_000_000
"""Ray's least."""


@dataclass
class Ray:
    """A running cluster. `env` is what its programs need."""

    folder: Path
    hosts: Mapping[str, Host]
    env: Mapping[str, str]
    gpus: Mapping[str, int]
    autoscaler: Path | None = None
    """The configuration of Ray's autoscaler; None = it adds no machines."""
    _starts: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _tries: Counter[str] = field(default_factory=Counter)

    @property
    def address(self) -> str:
        """host:port of the head."""
        return f"{self.hosts[HEAD].address}:{_PORT}"

    def start(self, name: str) -> None:
        """Start Ray on a machine."""
        self._tries[name] = 0
        self._try(name)

    def start_asked(self) -> None:
        """Start Ray on the machines that the autoscaler asks for."""
        for name in ray_provider.asked(self.folder / _ASKED):
            if name not in self._starts:
                self.start(name)

    def _try(self, name: str) -> None:
        host = self.hosts[name]
        where = ["--head", f"--port={_PORT}"] if name == HEAD else [f"--address={self.address}"]
        argv = [
            # A raylet aborts where its agent takes more than 15 s to start, as beside other tests.
            *("nice", "-n", "-10"),
            *(sys.executable, "-m", "ray.scripts.scripts", "start", *where, f"--node-ip-address={host.address}"),
            *(
                f"--num-cpus={_CPUS if name != HEAD else 1}",
                f"--num-gpus={self.gpus.get(name, 0)}",
                f"--object-store-memory={_STORE_BYTES}",
                f"--resources={json.dumps({} if name == HEAD else PLACE)}",
            ),
            # The trainer is on the head, whose log it writes to: what workers print is read by nobody.
            *("--disable-usage-stats", "--block", f"--include-log-monitor={name == HEAD}"),
            *(f"--{name}-port={port}" for name, port in _PORTS.items()),
            *(["--include-dashboard=false", f"--temp-dir={self.folder / 'ray'}"] if name == HEAD else []),
            # The monitor is the autoscaler.
            *(["--no-monitor"] if name == HEAD and self.autoscaler is None else []),
            *([f"--autoscaling-config={self.autoscaler}"] if name == HEAD and self.autoscaler else []),
        ]
        self._tries[name] += 1
        self._starts[name] = machines.spawn(host, argv, self.env, self.folder / f"{name}.log")

    async def up(self, count: int) -> None:
        """Wait until so many machines are alive."""
        await self.until(lambda: self.alive() == count, f"{count} are up")

    async def until(self, check: Callable[[], bool], what: str) -> None:
        """Wait for what comes after `start`. Ray gives up a start after 30 s, which a busy machine exceeds."""

        def checked() -> bool:
            self._try_again()
            return check()

        await eventually(checked, what, within=_UP_S)

    def _try_again(self) -> None:
        for name, process in list(self._starts.items()):
            if process.poll() is not None and self._tries[name] < _TRIES:
                machines.kill(self.hosts[name])
                self._try(name)
                if name == HEAD:
                    self.watch()

    def raylet(self, name: str) -> int:
        """The process of a machine's raylet; 0 = none runs."""
        return next((pid for pid in machines.processes(self.hosts[name]) if _program(pid) == "raylet"), 0)

    def watch(self) -> None:
        """Start a program on the head that `alive` reads."""
        env = {**self.env, "RAY_ADDRESS": self.address}
        argv = [sys.executable, "-m", "tests.clusters.ray_watch", str(self._seen)]
        machines.spawn(self.hosts[HEAD], argv, env, self.folder / "watch.log")

    def alive(self) -> int:
        """How many machines the head takes to be alive."""
        return int(self._seen.read_text()) if self._seen.exists() else 0

    @property
    def _seen(self) -> Path:
        return self.folder / "alive"


@asynccontextmanager
async def ray_cluster(
    folder: Path, gpus: Mapping[str, int], names: Sequence[str], *, first: int, scaled: bool = False
) -> AsyncIterator[Ray]:
    """Machines, of which the `first` form a cluster. The caller is in a world (`enter_world`).

    Its files are below `folder`, whose path must be short. `scaled`: Ray's autoscaler asks for the others.
    """
    with Network() as network:
        hosts = machines.machines(network, folder, names)
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "RAY_"))}
        # A busy machine starts Ray slowly; a lost machine is noticed in a quarter of the default time.
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # Ray starts many interpreters, which would compile it anew
        env |= {
            "PYTHONPATH": machines.python_path(folder),
            "RAY_health_check_period_ms": "2000",
            "RAY_health_check_timeout_ms": "3000",
            "RAY_health_check_failure_threshold": "4",
            # Else each raylet starts an interpreter for each of its processors, which nobody uses.
            "RAY_enable_worker_prestart": "0",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_prestart_worker_first_driver": "0",
        }
        made = Ray(folder, hosts, env, gpus)
        if scaled:
            made.autoscaler = folder / "autoscaler.yaml"
            addresses = {name: host.address for name, host in hosts.items()}
            configured = ray_provider.configured(
                folder / _ASKED, addresses, HEAD, {"CPU": _CPUS, **PLACE}, names[1:first]
            )
            made.autoscaler.write_text(yaml.safe_dump(configured))
        try:
            made.start(HEAD)
            made.watch()
            await made.up(1)
            for name in names[1:first]:
                made.start(name)
            await made.up(first)
            yield made
        finally:
            for host in hosts.values():
                machines.kill(host)


def _program(pid: int) -> str:
    return machines.command_of(pid).partition(" ")[0].rpartition("/")[2]
