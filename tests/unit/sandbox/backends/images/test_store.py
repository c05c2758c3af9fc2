"""Images of this machine: what a pull that fails says, what it may take of the disk, and whom it asks."""

from __future__ import annotations

import errno
import gzip
import json
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.support.endpoints.loopback import serving
from tests.support.images.registry import MACHINE, digest, entry, layer

from penstock_chassis.errors import PenstockError
from penstock_sandbox.backends.images import store as images
from penstock_sandbox.backends.images.registry import RegistryOptions
from penstock_sandbox.backends.images.store import ImageOptions, ImageStore


@dataclass
class Wire:
    """A registry of some images, which counts the blobs and manifests that are asked of it."""

    host: str = ""
    content: dict[str, bytes] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, *tars: bytes) -> str:
        """Adds an image of these layers; returns how a spec names it."""
        packed = [gzip.compress(one, mtime=0) for one in tars]
        described = {"os": "linux", "architecture": MACHINE, "rootfs": {"diff_ids": [digest(one) for one in tars]}}
        config = json.dumps(described).encode()
        named = [{"mediaType": "x.tar+gzip", "digest": digest(one), "size": len(one)} for one in packed]
        manifest = {"config": {"digest": digest(config), "size": len(config)}, "layers": named}
        self.content[f"/v2/{name}/manifests/1"] = json.dumps(manifest).encode()
        for blob in (config, *packed):
            self.content[f"/v2/{name}/blobs/{digest(blob)}"] = blob
        return f"{self.host}/{name}:1"


@asynccontextmanager
async def wire() -> AsyncIterator[Wire]:
    """Serves a registry."""
    made = Wire()

    async def answer(request: web.Request) -> web.Response:
        made.asked[request.path] += 1
        found = made.content.get(request.path)
        return web.Response(status=404 if found is None else 200, body=found)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with serving(app) as url:
        made.host = url.removeprefix("http://")
        yield made


@asynccontextmanager
async def opened(folder: Path, *hosts: str, **more: Any) -> AsyncIterator[ImageStore]:
    """A store that asks these hosts, and tries again at once."""

    async def pause(_: float) -> None:
        pass

    options = ImageOptions(RegistryOptions(plain_http=frozenset(hosts)), **more)
    store = ImageStore(folder / "images", options, pause=pause)
    await store.open()
    try:
        yield store
    finally:
        await store.aclose()


async def refusal(work: Any) -> PenstockError:
    with pytest.raises(PenstockError) as refused:
        await work
    return refused.value


@pytest.mark.requirement("R142")
async def test_a_layer_that_this_disk_cannot_hold_is_the_images_fault(tmp_path: Path) -> None:
    """A name may have 255 bytes: no space that becomes free helps."""
    async with wire() as registry, opened(tmp_path, registry.host) as store:
        refused = await refusal(store.get(registry.add("long", layer([entry("n" * 256, b"")]))))
        assert refused.reason == "IMAGE_UNUSABLE" and refused.retry_after_s is None
        assert os.strerror(errno.ENAMETOOLONG) in refused.message and "nnn" not in refused.message


@pytest.mark.requirement("R142", "R95")
@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, "DISK_LOW"),
        (errno.EDQUOT, "DISK_LOW"),
        (errno.EMFILE, "IMAGE_PULL_FAILED"),
        (errno.ENFILE, "IMAGE_PULL_FAILED"),
        (errno.ENOMEM, "IMAGE_PULL_FAILED"),
        (errno.EOPNOTSUPP, "IMAGE_UNUSABLE"),
    ],
)
async def test_what_the_system_refuses_has_the_reason_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: str
) -> None:
    async def fail(*_: Any) -> dict[str, Any]:
        raise OSError(number, "x")

    monkeypatch.setattr(images, "unpacked", fail)
    async with wire() as registry, opened(tmp_path, registry.host) as store:
        refused = await refusal(store.get(registry.add("task", layer([entry("x", b"")]))))
        assert (refused.reason, bool(refused.retry_after_s)) == (reason, reason != "IMAGE_UNUSABLE")
        assert os.strerror(number) in refused.message
