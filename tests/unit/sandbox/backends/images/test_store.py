"""Images of this machine: what a pull that fails says, what it may take of the disk, and whom it asks."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
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
from penstock_sandbox.domain.free_space import Free, Watermark


@dataclass
class Wire:
    """A registry of some images, which counts the blobs and manifests that are asked of it."""

    host: str = ""
    content: dict[str, bytes] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)
    on_asked: Callable[[str], Awaitable[None]] | None = None

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
        if made.on_asked is not None:
            await made.on_asked(request.path)
        found = made.content.get(request.path)
        return web.Response(status=404 if found is None else 200, body=found)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with serving(app) as url:
        made.host = url.removeprefix("http://")
        yield made


@asynccontextmanager
async def opened(
    folder: Path,
    *hosts: str,
    space: Watermark | None = None,
    clock: Callable[[], float] = time.time,
    mirrors: Mapping[str, str] | None = None,
    credentials: Mapping[str, str] | None = None,
    **more: Any,
) -> AsyncIterator[ImageStore]:
    """A store that asks these hosts, and tries again at once."""

    async def pause(_: float) -> None:
        pass

    options = ImageOptions(RegistryOptions(mirrors or {}, credentials or {}, frozenset(hosts)), **more)
    store = ImageStore(folder / "images", options, space=space, clock=clock, pause=pause)
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


def big(name: str) -> bytes:
    """A layer that cannot be packed, of some 100,000 bytes."""
    return layer([entry(name, os.urandom(100_000))])


@pytest.mark.requirement("R142", "R95")
async def test_an_image_that_leaves_too_little_space_is_refused_before_its_layers(tmp_path: Path) -> None:
    free = 1_050_000
    space = Watermark(tmp_path, 1_000_000, free=lambda _: Free(free, None))
    async with wire() as registry, opened(tmp_path, registry.host, space=space) as store:
        refused = await refusal(store.get(registry.add("task", big("x"))))
        assert refused.reason == "DISK_LOW" and refused.retry_after_s and "min_free_bytes" in refused.message
        assert sum(registry.asked.values()) == 2, "its manifest and its configuration"
        free = 2_000_000
        assert (await store.get(f"{registry.host}/task:1")).layers


@pytest.mark.requirement("R142", "R95")
async def test_images_that_nobody_uses_give_way_to_a_pull_and_layers_that_it_needs_stay(tmp_path: Path) -> None:
    """The least recently used first, and no more than are in the way."""
    now, base = 0.0, big("base")

    def free(_: Path) -> Free:
        return Free(1_200_000 - 100_000 * len(list((tmp_path / "images/layers").iterdir())), None)

    space = Watermark(tmp_path, 300_000, free=free)
    async with wire() as registry, opened(tmp_path, registry.host, space=space, clock=lambda: now) as store:
        held = await store.get(registry.add("held", big("held")))
        for name in ("first", "second", "third"):
            now += 1000
            store.release(await store.get(registry.add(name, *([base] if name == "first" else []), big(name))))
        now += 1000
        evicted: list[str] = []
        store.on_evicted = lambda image: evicted.append(image.id)
        registry.asked.clear()
        made = await store.get(registry.add("new", base, big("new")))
        assert len(evicted) == 1 and held.id not in evicted and len(made.layers) == 2
        assert all(any(store.folder(one).iterdir()) for one in (*made.layers, *held.layers))
        assert sum("blobs" in path for path in registry.asked) == 2, "the configuration and the layer that was not here"


@pytest.mark.requirement("R142", "R95")
async def test_a_pull_stops_when_the_disk_gets_low_and_leaves_nothing(tmp_path: Path) -> None:
    free, looks = 2_000_000, asyncio.Event()

    async def pause(_: float) -> None:
        await looks.wait()

    space = Watermark(tmp_path, 1_000_000, free=lambda _: Free(free, None), pause=pause)
    async with wire() as registry, opened(tmp_path, registry.host, space=space) as store:
        name, layers = registry.add("task", big("x"), big("y")), set(registry.content) - {"/v2/task/manifests/1"}

        async def stuck(path: str) -> None:
            nonlocal free
            if path in layers and sum(registry.asked.values()) == 4:
                free = 999_999
                looks.set()
                await asyncio.Event().wait()

        registry.on_asked = stuck
        refused = await refusal(store.get(name))
        assert refused.reason == "DISK_LOW" and "999999 bytes left" in refused.message
    assert not any(any((tmp_path / "images" / kind).iterdir()) for kind in ("layers", "images", "drafts"))


@pytest.mark.requirement("R54", "R142")
async def test_a_registry_that_the_operator_names_anywhere_is_asked(tmp_path: Path) -> None:
    """In the list, for a mirror, for a login, as one without TLS, or in an image of the settings."""
    async with wire() as registry:
        host, name = registry.host, registry.add("task", layer([entry("x", b"")]))
        async with opened(tmp_path / "plain", host, registries=()) as store:
            assert (await store.get(name)).layers
        mirrors = {"a.example": f"http://{host}"}
        async with opened(tmp_path / "mirror", registries=("other.example",), mirrors=mirrors) as store:
            assert (await store.get("a.example/task:1")).layers
        # These are asked by TLS, which the registry does not speak.
        named: list[dict[str, Any]] = [{"registries": ("127.0.0.*",)}, {"credentials": {host: "user:password"}}]
        named += [{"prefetch": (name, "No Image")}, {"own": (name,)}]
        for number, more in enumerate(named):
            async with opened(tmp_path / str(number), **{"registries": (), **more}) as store:
                assert (await refusal(store.get(name))).reason == "IMAGE_PULL_FAILED"
                if {"prefetch", "own"} & more.keys():
                    assert (await refusal(store.get(f"{host}/other"))).reason == "IMAGE_NOT_ALLOWED"


@pytest.mark.requirement("R54", "R142")
async def test_an_image_that_is_here_needs_no_registry(tmp_path: Path) -> None:
    async with wire() as registry:
        name = registry.add("task", layer([entry("x", b"")]))
        async with opened(tmp_path, registry.host) as store:
            await store.get(name)
        async with opened(tmp_path, registries=()) as store:
            assert (await store.get(name)).layers
