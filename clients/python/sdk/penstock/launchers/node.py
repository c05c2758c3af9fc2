"""The service of one machine of a cluster, supervised as on a single machine.

`python -m penstock.launchers.node DIRECTORY` is what a launcher starts on a machine, with the order NAME.json in that
directory, where NAME is what the variable `--by` has, by default the machine's name. It prints a line of JSON when the
service is ready or has failed. Lines on standard input have the members of the stack. Its end stops the service, as
does SIGTERM.
"""

import argparse
import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import orjson

from penstock.client.errors import PenstockError
from penstock.client.transport.endpoints import ServiceName
from penstock.launchers.orders import (
    GATE_NAME,
    MEMBER_FILES,
    WIDE,
    Members,
    Order,
    bracketed,
    load_members,
    member_settings,
    scratch_root,
)
from penstock.local.processes import ServiceProcesses, bound_port
from penstock.local.supervision import ServiceRestart

_LINE_BYTES: Final = 4 << 20
"""The longest line of members: as much as services read of a file of members."""
NODE_VARIABLE: Final = "SLURMD_NODENAME"
"""Environment variable in which Slurm has the machine's name."""


class NodeService(ServiceProcesses):
    """One service by its order, for the time of a block. At the end its state is removed."""

    def __init__(self, order: Order, host: str, on_restart: Callable[[ServiceRestart], None] | None = None) -> None:
        self._scratch = scratch_root(order.scratch)
        super().__init__(
            state_dir=self._scratch,
            log_dir=order.log_dir,
            start_timeout=order.start_timeout,
            max_restarts=order.max_restarts,
            on_restart=on_restart,
        )
        self._order = order
        self._host = host
        self._members = order.members

    @property
    def services(self) -> Sequence[ServiceName]:
        """The one of the order."""
        return (self._order.service,)

    @property
    def stop_timeout(self) -> float:
        """See ServiceProcesses."""
        return self._order.stop_timeout

    @property
    def where(self) -> str:
        """`host:port` at which other machines reach it."""
        return self.address(self._order.service)

    def reached_at(self, listening: str) -> str:
        """See ServiceProcesses."""
        return f"{bracketed(self._host)}:{listening.rpartition(':')[2]}"

    def settings_of(self, service: ServiceName) -> dict[str, Any]:
        """See ServiceProcesses."""
        kept = self.private
        certificate, key, authority = (str(kept / name) for name in ("service.pem", "service.key", "ca.pem"))
        table: dict[str, Any] = {
            "name": self._order.name,
            "host": WIDE,
            "port": bound_port(self._addresses.get(service), 0),
            "tls_cert": certificate,
            "tls_key": key,
            "state_dir": str(self.state_dir / service),
            **member_settings(service, kept, self._members),
        }
        match service:
            case "sandbox":
                table |= {"upstream_ca": authority}
            case "driver":
                table |= {"services_ca": authority}
            case "inference":
                table |= {"pool_ca": authority}
            case "interception":
                table |= {
                    "ingress_host": WIDE,
                    "ingress_port": bound_port(self.ingress_address, 0),
                    "ingress_address": f"tls:{GATE_NAME}@{bracketed(self._host)}:0",
                    "ingress_tls_cert": certificate,
                    "ingress_tls_key": key,
                    "inference_ca": authority,
                }
        return table | dict(self._order.settings)

    def take(self, members: Members) -> None:
        """Records which services the stack has now; the service reads its files again within a second."""
        self._members = members
        if self._private is not None and not self._stopping:
            self._keep_members()

    def _keep_members(self) -> None:
        if self._order.service != "sandbox":
            for kind, listed in self._members.items():
                self.keep(MEMBER_FILES[kind], orjson.dumps(listed))

    def _prepare(self) -> None:
        super()._prepare()
        self.keep("ca.pem", self._order.authority.encode())
        self.keep("service.pem", self._order.certificate.encode())
        self.keep("service.key", self._order.key.encode())
        self._keep_members()

    async def _stop(self) -> None:
        is_ours = self._lock is not None  # else another process's service may run there
        try:
            await super()._stop()
        finally:
            if is_ours:
                await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)


async def _run(order: Order) -> None:
    """Runs a service until standard input ends or SIGTERM comes, also while it starts."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    reader = asyncio.StreamReader(_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    service = NodeService(order, order.hosts[os.environ[NODE_VARIABLE]], _say)
    work = asyncio.create_task(_serve(order, service), name=f"service {order.name}")
    ends = [
        asyncio.create_task(ended.wait(), name="signal"),
        asyncio.create_task(_follow(reader, service), name="input"),
    ]
    try:
        await asyncio.wait([work, *ends], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (work, *ends):
            task.cancel()
        await asyncio.wait([work, *ends])
    for task in (work, *ends):
        if not task.cancelled():
            task.result()


async def _serve(order: Order, service: NodeService) -> None:
    async with service as running:
        _report(event="ready", service=order.service, name=order.name, address=running.where)
        await running.wait()


async def _follow(reader: asyncio.StreamReader, service: NodeService) -> None:
    """Hands on each line of members until the input ends."""
    async for line in reader:
        service.take(load_members(line))


def _report(**line: str) -> None:
    sys.stdout.write(orjson.dumps(line).decode() + "\n")
    sys.stdout.flush()


def _say(restart: ServiceRestart) -> None:
    print(restart, file=sys.stderr, flush=True)  # noqa: T201 - the launcher's log


def main() -> int:
    """Runs the order of this machine."""
    parser = argparse.ArgumentParser(prog="python -m penstock.launchers.node", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--by", default=NODE_VARIABLE)
    given = parser.parse_args()
    file = given.directory / f"{os.environ.get(given.by, '')}.json"
    try:
        order = Order.loads(file.read_bytes())
    except OSError as error:
        print(f"The order {file} cannot be read: {error}", file=sys.stderr)  # noqa: T201
        return 1
    try:
        asyncio.run(_run(order))
    except (PenstockError, OSError) as error:
        _report(event="failed", service=order.service, name=order.name, error=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
