"""Sandboxes of the Docker backend beside bare docker and a peer, in one run: entered directly, through sidecars, and
with gVisor as the runtime where our own engine has it.

The daemon is DOCKER_HOST's, or the local one, and the image `PENSTOCK_BENCH_IMAGE`, which must be there. Where there is
neither, an engine of our own is started for the run, as for the tests, with a Debian that debootstrap makes (root, and
Debian's docker.io, needed). Direct needs root on the daemon's machine; the sidecar works anywhere.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks import bare_docker, peers, sandbox_service, world
from benchmarks.report import Row, Section
from benchmarks.timing import beside, milliseconds, timed
from penstock.client import Companion, HealthCheck, SandboxSpec

SIZES: Final = sandbox_service.Sizes(creates=20, runs=200, burst=16, live=16, forks=((1, 10), (8, 3)))
GVISOR_SIZES: Final = sandbox_service.Sizes(creates=8, runs=100, burst=8, live=8, forks=((1, 4), (8, 1)), tree_forks=8)
COMPANION_CREATES: Final = 10
DEFAULT_IMAGE: Final = "python:3.13-slim-bookworm"
LOCAL: Final = "/var/run/docker.sock"


@dataclass(frozen=True, slots=True)
class Daemon:
    """Where containers are made, and of what."""

    host: str
    image: str
    gvisor: Mapping[str, str]
    """The settings of a service with gVisor; empty where it is not there."""


async def measure(place: Path) -> list[Section]:
    """What is compared with first, then the ways of the service."""
    async with _daemon() as daemon:
        os.environ["DOCKER_HOST"] = daemon.host  # for the docker command, the peer and its SDK
        alone = place / "docker"
        alone.mkdir()
        others = {bare_docker.TITLE: await bare_docker.rows(alone, daemon.image)}
        sections = [Section("The docker command alone", others[bare_docker.TITLE])]
        peer = await peers.rows("docker", daemon.image)
        if peer is not None:
            others[peers.TITLE] = peer
            sections.append(Section(f"{peers.TITLE}: its Docker deployment, on the host's network", peer))
        images = {"docker_image": daemon.image, "docker_sidecar_image": daemon.image}
        ways = [(reach, {**images, "docker_reach": reach}, SIZES) for reach in ("direct", "sidecar")]
        if daemon.gvisor:
            ways.append(("gvisor", {**images, **daemon.gvisor}, GVISOR_SIZES))
        for name, settings, sizes in ways:
            folder = place / name
            folder.mkdir()
            here = {"default_backend": "docker", "docker_host": daemon.host, **settings}
            async with world.scripted(folder, here) as running:
                rows = await sandbox_service.figures(running, sizes)
            sections.append(Section(f"Sandboxes: docker backend ({name}), through gRPC", beside(rows, others)))
        return sections


async def measure_companions(place: Path) -> list[Section]:
    """Sandboxes alone, and with companions whose check holds at once: what these add, but for their own programs."""
    async with _daemon() as daemon:
        sections = []
        for reach in ("direct", "sidecar"):
            folder = place / reach
            folder.mkdir()
            images = {"docker_image": daemon.image, "docker_sidecar_image": daemon.image}
            here = {"default_backend": "docker", "docker_host": daemon.host, "docker_reach": reach, **images}
            async with world.scripted(folder, here) as running:
                # The first one pays for what is made once.
                await (await running.ps.sandboxes.create()).delete()
                rows = [row for count in (0, 1, 2) for row in await _beside(running, daemon.image, count)]
            sections.append(Section(f"Companions: docker backend ({reach}), through gRPC", rows))
        return sections


async def _beside(running: world.World, image: str, count: int) -> list[Row]:
    companions = [
        Companion(
            name=f"beside-{number}",
            image=image,
            entrypoint=["sleep", "1000"],
            user="65534",
            health_check=HealthCheck(argv=["true"]),
        )
        for number in range(count)
    ]
    made: list[float] = []
    deleted: list[float] = []
    for _ in range(COMPANION_CREATES):
        sandbox = await timed(made, partial(running.ps.sandboxes.create, SandboxSpec(companions=companions)))
        await timed(deleted, sandbox.delete)
    return [
        *milliseconds(f"create with {count}", made, f"{COMPANION_CREATES} in turn"),
        *milliseconds(f"delete with {count}", deleted),
    ]


@asynccontextmanager
async def _daemon() -> AsyncIterator[Daemon]:
    image = os.environ.get("PENSTOCK_BENCH_IMAGE", "")
    host = os.environ.get("DOCKER_HOST", "")
    if not host and Path(LOCAL).exists():
        host = f"unix://{LOCAL}"
    if host:
        yield Daemon(host, image or DEFAULT_IMAGE, {})
        return
    from tests.support.docker import base_images, dockerd

    try:
        if base_images.which(dockerd.GVISOR) is None:
            yield Daemon((await asyncio.to_thread(dockerd.engine)).host, dockerd.BASE, {})
        else:
            prefix = "PENSTOCK_SANDBOX_"
            chosen = {key.removeprefix(prefix).lower(): value for key, value in dockerd.gvisor_settings().items()}
            yield Daemon((await asyncio.to_thread(dockerd.gvisor)).host, dockerd.BASE, chosen)
    finally:
        await asyncio.to_thread(dockerd.stop)
