"""Sandboxes of the local backend beside bare bubblewrap and a peer, in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from benchmarks import bare_bwrap, peers, sandbox_service, world
from benchmarks.report import Section
from benchmarks.timing import beside

SIZES: Final = sandbox_service.Sizes(creates=100, runs=300, burst=64, live=300, forks=((1, 20), (8, 5), (64, 3)))


async def measure(place: Path) -> list[Section]:
    """What is compared with first, then the service."""
    alone = place / "bwrap"
    alone.mkdir()
    others = {bare_bwrap.TITLE: await bare_bwrap.rows(alone)}
    peer = await peers.rows("local")
    if peer is not None:
        others[peers.TITLE] = peer
    folder = place / "service"
    folder.mkdir()
    async with world.scripted(folder) as running:
        ours = await sandbox_service.figures(running, SIZES)
    return [
        Section(f"{bare_bwrap.TITLE} alone, with the same root and isolation", others[bare_bwrap.TITLE]),
        *([Section(f"{peers.TITLE}: its server on this machine, without any isolation", peer)] if peer else []),
        Section("Sandboxes: local backend, through gRPC", beside(ours, others)),
    ]
