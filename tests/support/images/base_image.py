"""The Debian of the Docker tests as an image of a registry on loopback, for services whose sandboxes are made of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from tests.support.docker import base_images
from tests.support.images.registry import registry

NAME = "penstock-test/debian"


_pulled: dict[str, str] = {}
"""The settings, while a registry with the image runs."""


@asynccontextmanager
async def pulled() -> AsyncIterator[Mapping[str, str]]:
    """Run a registry with the image; yields the settings of a service whose sandboxes are made of it.

    A service that is started while there is such a registry shares it.
    """
    if _pulled:
        yield dict(_pulled)
        return
    content = (await asyncio.to_thread(base_images.base)).read_bytes()
    async with registry() as running:
        # Compressing would take seconds, and shows nothing: the image never leaves this machine.
        await running.push(NAME, [content], {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]}, level=0)
        _pulled["PENSTOCK_SANDBOX_LOCAL_IMAGE"] = running.image(NAME)
        _pulled["PENSTOCK_SANDBOX_IMAGE_PLAIN_HTTP"] = json.dumps([running.host])
        try:
            yield dict(_pulled)
        finally:
            _pulled.clear()
