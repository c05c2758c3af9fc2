"""The services of a fleet, each on a host of its own, with TLS and tokens on every hop."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import tomlkit
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.hosts import dns, engine, model
from tests.hosts.network import HUB_ADDRESS, Host, Network
from tests.support.services.stack import disjoint_uids
from tests.support.waiting import eventually_async

from penstock.cli.commands import credentials
from penstock.client.transport.endpoints import Endpoints, Tls
from penstock_chassis.channel import connect
from penstock_chassis.tls import ClientTls

START_S: Final = 120.0
"""Guard on the start of all services, on a busy machine."""
PORTS: Final = {"sandbox": 7701, "driver": 7702, "interception": 7703, "inference": 7704}
_INGRESS_PORT: Final = 7780
_LETTERS: Final = {"sandbox": "n", "driver": "d", "interception": "g", "inference": "e"}
_UIDS: Final = 512
STRANGERS: Final = "strangers"
"""Folder of credentials of another authority, for the same addresses."""
ROOT: Final = Path(__file__).parents[2]
_STOP_S: Final = 20.0


def uids(node: str) -> range:
    """The users that a node gives to its sandboxes."""
    first = disjoint_uids() + _UIDS * int(node[1:])
    return range(first, first + _UIDS)


@dataclass(frozen=True)
class Size:
    """How many hosts of each kind."""

    sandboxes: int = 3
    gates: int = 2
    drivers: int = 2
    engines: int = 1

    def names(self, service: str) -> list[str]:
        """Names of the hosts of one kind of service: n0, n1, ... for sandboxes, g for gates, d for drivers, e."""
        count = {
            "sandbox": self.sandboxes,
            "interception": self.gates,
            "driver": self.drivers,
            "inference": self.engines,
        }[service]
        return [f"{_LETTERS[service]}{number}" for number in range(count)]


@dataclass
class Fleet:
    """All services. `settings` are more of each kind's, or of one host's."""

    network: Network
    folder: Path
    size: Size
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def address(self, name: str) -> str:
        """host:port of a service's gRPC server, by its name."""
        return f"{self.network.hosts[name].address}:{PORTS[self.kind(name)]}"

    def of_letter(self, letter: str) -> list[str]:
        """The hosts of one kind of service, by the first letter of their names."""
        return self.size.names(self.kind(letter))

    def kind(self, name: str) -> str:
        """The kind of service of a host; empty for one that has programs of the test alone."""
        return next((service for service, letter in _LETTERS.items() if name.startswith(letter)), "")

    def ingress(self, gate: str) -> str:
        """host:port of the server of a gate that agents call."""
        return f"{self.network.hosts[gate].address}:{_INGRESS_PORT}"

    def engine_of(self, gate: str) -> str:
        """The one engine that a gate has."""
        return self.size.names("inference")[int(gate[1:]) % self.size.engines]

    def answers(self, lost: Collection[str] = ()) -> dict[str, list[list[int]]]:
        """The token ids of each call that the engines logged, but for those that are lost or whose gates are."""
        names = set(self.size.names("inference")) - {*lost}
        names -= {self.engine_of(name) for name in lost if self.kind(name) == "interception"}
        return engine.read([self.answers_file(name) for name in sorted(names)])

    def answers_file(self, name: str) -> Path:
        """The log of what an engine has answered."""
        return self.folder / f"answers-{name}.jsonl"

    def stop_nodes(self) -> None:
        """End the sandbox services by SIGTERM, with all that their sandboxes have on this machine."""
        nodes = [host for name, host in self.network.hosts.items() if self.kind(name) == "sandbox"]
        processes = [process for host in nodes for process in host.processes]
        for process in processes:
            process.terminate()
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)

    def log(self, name: str) -> str:
        """What a service has logged."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def endpoints(
        self,
        *,
        driver: str = "d0",
        gate: str = "g0",
        sandbox: str = "n0",
        engine: str = "e0",
        discover: bool = True,
    ) -> Endpoints:
        """A trainer's connection to one service of each kind, and to those that the driver lists, if `discover`."""
        token = (self.folder / "credentials" / "trainer.token").read_text().strip()
        return Endpoints(
            sandbox=self.address(sandbox),
            driver=self.address(driver),
            interception=self.address(gate),
            inference=self.address(engine),
            token=token,
            tls=Tls(ca=self.folder / "credentials" / "ca.pem"),
            discover=discover,
        )

    def spawn(self, name: str) -> subprocess.Popen[bytes]:
        """Start one service on its host."""
        service = self.kind(name)
        config = self.folder / f"{name}.toml"
        config.write_text(tomlkit.dumps({service: self._table(name)}))
        config.chmod(0o600)
        env = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
        env["PENSTOCK_CONFIG"] = str(config)
        if service == "inference":
            env["PYTHONPATH"] = f"{self.folder / engine.PLUGINS}{os.pathsep}{ROOT}"
        argv = [sys.executable, "-m", f"penstock_{service}"]
        return self.network.hosts[name].spawn(argv, env, self.folder / f"{name}.log")

    async def serving(self, name: str) -> None:
        """Wait until a service serves. AssertionError with the end of its log, if it ends before that."""
        process = self.network.hosts[name].processes[-1]

        async def is_serving() -> bool:
            if process.poll() is not None:
                raise AssertionError(f"{name} ended:\n{self.log(name)[-3000:]}")
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5, wait_for_ready=True)
            except grpc.aio.AioRpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        tls = ClientTls(self.folder / "credentials" / "ca.pem", None, None)
        async with connect(self.address(name), None, tls) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            await eventually_async(is_serving, f"{name} serves", within=START_S)

    def _table(self, name: str) -> dict[str, Any]:
        """The settings of one service: its kind's credentials, its addresses, and where the others are."""
        service, host = self.kind(name), self.network.hosts[name]
        kept = self.folder / "credentials"
        table: dict[str, Any] = dict(tomlkit.parse((kept / f"{service}.toml").read_text())[service])
        table |= {
            "name": name,
            "peers": {other: self.address(other) for other in self.size.names(service) if other != name},
            "host": host.address,
            "port": PORTS[service],
            "tls_cert": str(kept / f"{service}.pem"),
            "tls_key": str(kept / f"{service}.key"),
            "state_dir": str(self.folder / "state" / name),
            "parent_pid": os.getpid(),
        }
        authority = str(kept / "ca.pem")
        if service == "sandbox":
            gates = self.size.names("interception")
            table |= {
                "allowed_upstreams": [f"tls:{self.ingress(gate)}" for gate in gates],
                "upstream_ca": authority,
                "first_uid": uids(name).start,
                "uid_count": _UIDS,
            }
        elif service == "interception":
            table |= {
                "ingress_host": host.address,
                "ingress_address": f"tls:{self.ingress(name)}",
                "ingress_tls_cert": str(kept / "interception.pem"),
                "ingress_tls_key": str(kept / "interception.key"),
                "inference_address": self.address(self.engine_of(name)),
                "inference_ca": authority,
            }
        elif service == "driver":
            table |= self._driver_reaches() | {"services_ca": authority}
        else:
            directory, script = self.folder / "model", self.folder / "script.yaml"
            table |= {
                "model_dir": str(directory),
                "engine": engine.NAME,
                "engine_options": {"script": str(script), "answers": str(self.answers_file(name))},
            }
        return table | dict(self.settings.get(service, {})) | dict(self.settings.get(name, {}))

    def _driver_reaches(self) -> dict[str, Any]:
        table = {}
        for service in ("sandbox", "interception"):
            members = ",".join(f"{name}={self.address(name)}" for name in self.size.names(service))
            table[f"{service}_members"] = f"static:{members}"
        return table


@contextmanager
def fleet(
    folder: Path,
    size: Size,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    later: Sequence[str] = (),
    before: Callable[[Fleet], None] = lambda _: None,
) -> Iterator[Fleet]:
    """A fleet whose files are below `folder`, started. The caller is in a hub (`network.enter_hub`).

    `later` are names of hosts that are connected, and on which nothing is started yet. `before` is called when the
    hosts have their addresses, and nothing is started at all.
    """
    folder.chmod(0o755)
    model.write(folder)
    engine.register(folder / engine.PLUGINS)
    with Network() as network:
        for service in PORTS:
            for name in size.names(service):
                network.add(name)
        for name in later:
            network.add(name)
        addresses = [HUB_ADDRESS, *(host.address for host in network.hosts.values())]
        for kept in ("credentials", STRANGERS):
            credentials.make(folder / kept, [*addresses, dns.NAME], days=1)
        made = Fleet(network, folder, size, settings or {})
        before(made)
        order = ("inference", "sandbox", "interception", "driver")
        asyncio.run(_started(made, [size.names(service) for service in order]))
        try:
            yield made
        finally:
            made.stop_nodes()


async def _started(made: Fleet, waves: Sequence[Sequence[str]]) -> None:
    for names in waves:
        for name in names:
            made.spawn(name)
        for name in names:
            await made.serving(name)


__all__ = ["Fleet", "Host", "Size", "fleet"]
