"""A sandbox's connection to a gate whose host vanishes: no reset comes, and TCP alone would wait for hours.

The scenario runs in a process of its own, which moves into a network namespace.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.hosts.network import Network, enter_hub
from tests.support.absent import absent

from penstock_chassis import sockets
from penstock_chassis.aio.retry import Delays, retry
from penstock_sandbox.backends.host.upstream import connect
from penstock_sandbox.domain.model import NetworkKind, NetworkPolicy

ROOT = Path(__file__).parents[3]
_LIMIT_S = 240
_SERVER = """
import socket
with socket.create_server(("0.0.0.0", 7780)) as listener:
    while True:
        connection, _ = listener.accept()
        connection.sendall(b"ready\\n")
        kept = connection
"""


def test_a_connection_to_a_host_that_vanishes_ends_with_an_error() -> None:
    if os.getuid() != 0:
        absent("root, which network namespaces need")
    scenario = [sys.executable, "-m", "tests.faults.hosts.test_cut_links"]
    ended = subprocess.run(scenario, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-2:] == ["it is ready", "it ended with an error"], ended.stderr


async def _scenario(folder: Path) -> None:
    sockets.CUT_S = 4  # type: ignore[misc]  # as long as needed
    with Network() as network:
        gate = network.add("gate")
        gate.spawn([sys.executable, "-c", _SERVER], dict(os.environ), folder / "gate.log")
        policy = NetworkPolicy(NetworkKind.ONE_ENDPOINT, 7780, f"{gate.address}:7780")
        reader, writer = await retry(
            lambda: connect(policy), Delays(0.1, 0.1), patience_s=lambda error: isinstance(error, OSError) * _LIMIT_S
        )
        assert await reader.readline() == b"ready\n"
        print("it is ready")
        gate.cut()
        try:
            async with asyncio.timeout(_LIMIT_S / 2):
                await reader.readline()
        except TimeoutError as error:
            # The kernel's own error is one too, with a number.
            print("it ended with an error" if error.errno else "it hangs")
        except OSError:
            print("it ended with an error")
        writer.transport.abort()


if __name__ == "__main__":
    enter_hub()
    with TemporaryDirectory() as place:
        asyncio.run(_scenario(Path(place)))
