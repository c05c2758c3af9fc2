"""Creates of Docker sandboxes that come to nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from penstock_sandbox.backends.docker.access.ways import Reach, Reached, Start
from penstock_sandbox.backends.docker.cleanup.reaper import Owner, Reaper
from penstock_sandbox.backends.docker.images.layers import Layers
from penstock_sandbox.backends.docker.images.prepared_images import ReadyImage
from penstock_sandbox.backends.docker.names_files import NamesFiles
from penstock_sandbox.backends.docker.options import DockerOptions
from penstock_sandbox.backends.docker.sandboxes import DockerSandboxes
from penstock_sandbox.backends.guest_client.pipe import Pipe, SandboxGone
from penstock_sandbox.backends.images.additions import Account
from penstock_sandbox.domain.model import SandboxSpec, Stats


class Engine:
    """A daemon's containers."""

    def __init__(self) -> None:
        self.containers: set[str] = set()

    async def create(self, name: str, *_: object) -> str:
        self.containers.add(name)
        return name

    async def remove(self, name: str) -> None:
        self.containers.discard(name)


class Silent(Reach, Reached):
    """An access whose guest agent ended, and which is long in saying why."""

    name = "silent"

    def __init__(self) -> None:
        self.opener = self._gone
        self.died: Callable[[], None] = lambda: None
        self.asked = asyncio.Event()
        self.is_closed = False

    async def _gone(self) -> Pipe:
        self.died()
        raise SandboxGone("ATTENDANT_ENDED")

    async def open(self) -> None:
        return

    async def aclose(self) -> None:
        return

    async def reach(self, name: str, start: Start) -> Reached:
        return self

    async def error_text(self) -> str:
        self.asked.set()
        await asyncio.Event().wait()
        return ""

    async def stats(self) -> Stats:
        return Stats()

    async def close(self) -> None:
        self.is_closed = True


class NoCompanions:
    """There are none."""

    async def remove(self, names: object) -> None:
        return


@pytest.mark.requirement("R49")
async def test_create_that_is_cancelled_while_its_failure_is_explained_leaves_nothing(tmp_path: Path) -> None:
    engine, reach = Engine(), Silent()
    owner = Owner("i", "now")
    reaper = Reaper(cast(Any, engine), owner)
    options = DockerOptions(tmp_path, "image", "sidecar")
    boxes = DockerSandboxes(
        options, cast(Any, engine), owner, reaper, Layers(reaper), cast(Any, NoCompanions()), NamesFiles(None)
    )
    boxes.reach, reach.died = reach, lambda: boxes.died("penstock-s", True)
    account = Account("agent", 1000, 1000, "/home/agent", "/bin/sh")
    image = ReadyImage("image", account, "/workspace", {}, False, "amd64", 0)
    creating = asyncio.create_task(boxes.make("s", image, SandboxSpec(), (), lambda _: None))
    await reach.asked.wait()
    assert engine.containers == {"penstock-s"}
    creating.cancel()
    await asyncio.wait([creating])
    assert creating.cancelled()
    assert not engine.containers
    assert reach.is_closed
    assert not boxes.names()
    await reaper.aclose()
