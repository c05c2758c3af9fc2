"""Leftovers of an earlier run with a Docker daemon."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from penstock_chassis.errors import Unavailable
from penstock_sandbox.backends.docker.cleanup.reaper import INSTANCE, RUN, Owner, Reaper
from penstock_sandbox.backends.docker.engine.errors import unreachable


class Stuck:
    """A daemon with a container of an earlier run, whose removal it finishes when it may."""

    def __init__(self) -> None:
        self.asked, self.may, self.gone = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def containers(self, label: str) -> list[dict[str, Any]]:
        return [] if self.gone.is_set() else [{"Id": "c", "Labels": {INSTANCE: "i", RUN: "earlier"}}]

    async def images(self, label: str) -> list[dict[str, Any]]:
        return []

    volumes = images

    async def remove(self, container: str) -> None:
        self.asked.set()
        await self.may.wait()
        self.gone.set()


@pytest.mark.requirement("R49", "R50")
async def test_a_container_that_cannot_be_removed_keeps_no_service_from_starting() -> None:
    daemon = Stuck()
    reaper = Reaper(cast(Any, daemon), Owner("i", "now"))
    await reaper.open(wait_s=0)
    await daemon.asked.wait()
    assert not daemon.gone.is_set()
    daemon.may.set()
    await daemon.gone.wait()
    await reaper.aclose()


async def test_a_daemon_that_does_not_answer_fails_the_start() -> None:
    class Away(Stuck):
        async def containers(self, label: str) -> list[dict[str, Any]]:
            raise unreachable("nobody")

    reaper = Reaper(cast(Any, Away()), Owner("i", "now"))
    with pytest.raises(Unavailable):
        await reaper.open()
    await reaper.aclose()
