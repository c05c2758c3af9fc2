"""The repository's docker-compose.yml on a real engine of the tests': images built from an imported base, one project.

The engine reaches no registry and no package index: the base is the one that `dockerd` imports, and what pip needs
comes from wheels that are gathered once a machine (`make wheels` does the same). So the base's Python must be this one.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from tests.support import wheels
from tests.support.absent import absent
from tests.support.docker import dockerd
from tests.support.policy import FILES
from tests.support.wheels import ROOT, SERVICES

_CONTEXT = (
    "docker-compose.yml",
    ".dockerignore",
    "constraints.txt",
    "clients/python/stubs",
    "clients/python/sdk",
    "libs",
    *(f"services/{name}" for name in SERVICES),
)
CONTAINERS = (*SERVICES, "door", "dashboard")
_BASE_PYTHON = (3, 11)
_HEALTHY_S = 180.0


@dataclass(frozen=True)
class Composed:
    """A project that is up."""

    engine: dockerd.Engine
    name: str
    address: str
    """Where its ports are, on this machine alone."""
    folder: Path
    """A copy of the repository, as far as images need it."""
    credentials: Path
    environment: Mapping[str, str]

    def compose(self, *argv: str) -> str:
        """Runs Compose in the project; answers its output."""
        return _run([*_program(), "--project-name", self.name, *argv], self.environment, self.folder)

    def containers(self, service: str) -> list[dict[str, Any]]:
        """What the engine says of a service's containers."""
        labels = [f"com.docker.compose.project={self.name}", f"com.docker.compose.service={service}"]
        found = self.engine.api.containers(all=True, filters={"label": labels})
        return [self.engine.api.inspect_container(one["Id"]) for one in found]

    async def scale(self, counts: Mapping[str, int]) -> None:
        """Runs so many containers of each service; returns when all are healthy."""
        scales = [word for name, count in counts.items() for word in ("--scale", f"{name}={count}")]
        await asyncio.to_thread(self.compose, "up", "--detach", "--no-build", *scales)
        await _healthy(self, counts)

    def logs(self) -> str:
        """The ends of all services' logs."""
        return self.compose("logs", "--no-color", "--tail", "40")

    @property
    def client(self) -> dict[str, str]:
        """The environment of a client of it."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
        return {**kept, "PENSTOCK_CONNECTION": str(self.credentials / "connection.json")}


@asynccontextmanager
async def composed(place: Path, script: Mapping[str, Any]) -> AsyncIterator[Composed]:
    """The four services and the dashboard as containers, healthy; taken down with all they made."""
    project = await asyncio.to_thread(_prepare, place, script)
    try:
        await asyncio.to_thread(project.compose, "build", "--quiet")
        await asyncio.to_thread(project.compose, "up", "--detach", "--no-build")
        await _healthy(project)
        yield project
    finally:
        await asyncio.to_thread(project.compose, "down", "--volumes", "--timeout", "30")


def _program() -> list[str]:
    """Compose as this machine has it: the program, or the Docker command's plugin; empty = not at all."""
    if shutil.which("docker-compose") is not None:
        return ["docker-compose"]
    asked = ["docker", "compose", "version"]
    if shutil.which("docker") is not None and subprocess.run(asked, capture_output=True, check=False).returncode == 0:
        return ["docker", "compose"]
    return []


def _prepare(place: Path, script: Mapping[str, Any]) -> Composed:
    if not _program():
        absent("DOCKER-COMPOSE.YML IS NOT TESTED HERE: apt-get install -y --no-install-recommends docker-compose")
    assert sys.version_info[:2] == _BASE_PYTHON, (
        f"the images' base has Python {_BASE_PYTHON}, and its wheels are gathered by the Python that runs the tests"
    )
    engine = dockerd.engine()
    # No other test's port, and no other project's name.
    address = f"127.{100 + os.getpid() % 100}.{os.getpid() // 256 % 256}.{os.getpid() % 254 + 1}"
    folder = place / "repository"
    for name in _CONTEXT:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(source, target)
    shutil.copytree(wheels.gathered(), folder / "wheels")
    model = place / "model"
    FILES.write(model)
    (model / "script.yaml").write_text(yaml.safe_dump(dict(script), sort_keys=False))
    for path in (place, model, *model.iterdir()):
        path.chmod(path.stat().st_mode | 0o055)
    credentials = place / "credentials"
    _run([sys.executable, "-m", "penstock.cli.main", "credentials", str(credentials), "--host", address], os.environ)
    socket = engine.folder / "docker.sock"
    environment = {
        **os.environ,
        "DOCKER_HOST": engine.host,
        "DOCKER_BUILDKIT": "0",
        "COMPOSE_HTTP_TIMEOUT": "300",
        "COMPOSE_PROFILES": "dashboard",
        "PENSTOCK_AGENT_IMAGE": dockerd.BASE,
        "PENSTOCK_BASE_IMAGE": dockerd.BASE,
        "PENSTOCK_BIND": address,
        "PENSTOCK_CREDENTIALS": str(credentials),
        "PENSTOCK_DOCKER_GID": str(socket.stat().st_gid),
        "PENSTOCK_DOCKER_SOCKET": str(socket),
        "PENSTOCK_INFERENCE_ENGINE": "scripted",
        "PENSTOCK_INFERENCE_ENGINE_OPTIONS": '{"script": "/model/script.yaml"}',
        "PENSTOCK_MODEL_DIR": str(model),
        "PENSTOCK_EXTRAS": "docker",
        "PENSTOCK_EXPORT_EXTRAS": "export",
        "PENSTOCK_EXPORT_URL": "file:///var/lib/penstock/exports",
        "PENSTOCK_VERSION": f"test-{os.getpid()}",
    }
    return Composed(engine, f"penstock-test-{os.getpid()}", address, folder, credentials, environment)


async def _healthy(project: Composed, counts: Mapping[str, int] = MappingProxyType({})) -> None:
    deadline = time.monotonic() + _HEALTHY_S
    while True:
        states = {name: [one["State"] for one in project.containers(name)] for name in CONTAINERS}
        health = {
            name: [state.get("Health", {}).get("Status", state["Status"]) for state in found]
            for name, found in states.items()
        }
        if all(health[name] == ["healthy"] * counts.get(name, 1) for name in CONTAINERS):
            return
        assert time.monotonic() < deadline, f"{health}\n{project.logs()}"
        await asyncio.sleep(0.5)


def _run(argv: Sequence[str], environment: Mapping[str, str], folder: Path = ROOT) -> str:
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=environment, cwd=folder
    )
    assert done.returncode == 0, f"{' '.join(argv)}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout
