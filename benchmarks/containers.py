"""Sandboxes of the Docker backend beside bare docker and a peer, in one run: entered directly, and through sidecars.

The daemon is DOCKER_HOST's, or the local one; the image is `PENSTOCK_BENCH_IMAGE` (default the service's own), which
must be there. Direct needs root on the daemon's machine; the sidecar works anywhere.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from benchmarks import bare_docker, peers, sandbox_service, world
from benchmarks.report import Section
from benchmarks.timing import beside

SIZES: Final = sandbox_service.Sizes(creates=20, runs=200, burst=16, live=16, forks=((1, 10), (8, 3)))
IMAGE: Final = os.environ.get("PENSTOCK_BENCH_IMAGE", "python:3.13-slim-bookworm")


async def measure(place: Path) -> list[Section]:
    """What is compared with first, then both ways of the service."""
    alone = place / "docker"
    alone.mkdir()
    others = {bare_docker.TITLE: await bare_docker.rows(alone, IMAGE)}
    sections = [Section("The docker command alone", others[bare_docker.TITLE])]
    peer = await peers.rows("docker", IMAGE)
    if peer is not None:
        others[peers.TITLE] = peer
        sections.append(Section(f"{peers.TITLE}: its Docker deployment, on the host's network", peer))
    for reach in ("direct", "sidecar"):
        folder = place / reach
        folder.mkdir()
        settings = {
            "default_backend": "docker",
            "docker_reach": reach,
            "docker_image": IMAGE,
            "docker_sidecar_image": IMAGE,
            "docker_host": os.environ.get("DOCKER_HOST", ""),
        }
        async with world.scripted(folder, settings) as running:
            rows = await sandbox_service.figures(running, SIZES)
        sections.append(Section(f"Sandboxes: docker backend ({reach}), through gRPC", beside(rows, others)))
    return sections
