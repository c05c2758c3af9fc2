"""Measures SWE-ReX; run by the interpreter of an environment that has it and nothing of ours.

`swerex_program.py local|docker FILE_BYTES [IMAGE]` prints one line of JSON: seconds by name. In Docker the image needs
Python of the same version as this one: the package is mounted into it instead of installed by a registry. The host's
network is used, since the server is reached by a port.
"""

import asyncio
import contextlib
import json
import secrets
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from swerex.deployment.docker import DockerDeployment  # type: ignore[import-not-found]
from swerex.runtime.abstract import (  # type: ignore[import-not-found]
    Command,
    ReadFileRequest,
    UploadRequest,
)
from swerex.runtime.remote import RemoteRuntime  # type: ignore[import-not-found]

CREATES: Final = 8
RUNS: Final = 200
BURST: Final = 4
FILE_TIMES: Final = 2
_PACKAGES: Final = "/opt/swerex"
_LAUNCHER: Final = f"""#!/usr/bin/env python3
import sys
sys.path[:0] = ["{_PACKAGES}"]
from swerex.server import main
main()
"""


_servers: list[subprocess.Popen[bytes]] = []
"""Servers that were started; whatever happens, none outlives the program."""


class Server:
    """Its server as a process of this machine: what it also runs in each container."""

    async def start(self) -> None:
        """Start it and wait until it answers."""
        port, token = free_port(), secrets.token_hex(16)
        program = Path(sys.executable).with_name("swerex-remote")
        self.process = subprocess.Popen(
            [program, "--auth-token", token, "--port", str(port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _servers.append(self.process)
        self.runtime = RemoteRuntime(auth_token=token, port=port, timeout=1.0)
        await self.runtime.wait_until_alive(timeout=60.0)

    async def stop(self) -> None:
        """End it."""
        self.process.kill()
        await asyncio.to_thread(self.process.wait)

    def memory(self) -> int:
        """Bytes of it, shared pages divided."""
        lines = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text("utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def free_port() -> int:
    """A port that nobody had a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def container(image: str, launcher: Path) -> Any:
    """Its own way of running a container, with its package mounted."""
    packages = sysconfig.get_path("purelib")
    return DockerDeployment(
        image=image,
        pull="never",
        port=8000,
        docker_args=[
            "--network",
            "host",
            "--volume",
            f"{packages}:{_PACKAGES}:ro",
            "--volume",
            f"{launcher}:/usr/local/bin/swerex-remote:ro",
        ],
    )


async def measure(make: Callable[[], Any], size: int, burst: int) -> dict[str, list[float]]:
    """Seconds by name; `burst` has how many and how long all of them took."""
    times: dict[str, list[float]] = {"create": [], "delete": [], "run": [], "in": [], "out": []}
    for _ in range(CREATES):
        one = make()
        async with took(times["create"]):
            await one.start()
        async with took(times["delete"]):
            await one.stop()
    together: list[float] = []
    many = [make() for _ in range(burst)]
    async with took(together):
        # Each in a thread of its own: while it waits for its server, it sleeps without letting the loop run.
        await asyncio.gather(*(asyncio.to_thread(asyncio.run, one.start()) for one in many))
    times["burst"] = [burst, together[0]]
    one, *others = many
    for other in others:
        await other.stop()
    if isinstance(one, Server):
        times["memory"] = [one.memory()]
    await one.runtime.execute(Command(command=["/bin/true"]))
    for _ in range(RUNS):
        async with took(times["run"]):
            await one.runtime.execute(Command(command=["/bin/true"]))
    with tempfile.NamedTemporaryFile() as file:
        # Text: its way of reading a file knows nothing else.
        file.write(secrets.token_hex(size // 2).encode())
        file.flush()
        for _ in range(FILE_TIMES):
            async with took(times["in"]):
                await one.runtime.upload(UploadRequest(source_path=file.name, target_path="/tmp/swerex-large"))
            async with took(times["out"]):
                answer = await one.runtime.read_file(ReadFileRequest(path="/tmp/swerex-large"))
            if len(answer.content) != size:
                raise RuntimeError("a file came back shorter")
        await one.runtime.execute(Command(command=["/bin/rm", "/tmp/swerex-large"]))
    await one.stop()
    return times


@contextlib.asynccontextmanager
async def took(times: list[float]) -> AsyncIterator[None]:
    """Adds the seconds that the block takes."""
    began = time.perf_counter()
    yield
    times.append(time.perf_counter() - began)


def main() -> None:
    """Reads what to measure from the command line."""
    kind, size = sys.argv[1], int(sys.argv[2])
    work: Awaitable[dict[str, list[float]]]
    with tempfile.TemporaryDirectory() as folder:
        if kind == "local":
            work = measure(Server, size, BURST)
        else:
            launcher = Path(folder) / "swerex-remote"
            launcher.write_text(_LAUNCHER, "utf-8")
            launcher.chmod(0o755)
            # One at a time: each takes the same port of the host.
            work = measure(lambda: container(sys.argv[3], launcher), size, 1)
        try:
            times = asyncio.run(_finished(work))
        finally:
            for server in _servers:
                server.kill()
    print(json.dumps(times))


async def _finished(work: Awaitable[dict[str, list[float]]]) -> dict[str, list[float]]:
    return await work


if __name__ == "__main__":
    main()
