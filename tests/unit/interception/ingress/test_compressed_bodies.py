"""What an upstream sends compressed unfolds piece by piece and does not fill the gate's memory (R23).

What agents send is in tests/integration/interception/connections/test_encodings.py.
"""

from __future__ import annotations

import gzip
import tracemalloc

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

UNFOLDED = 64 << 20
LIMIT = 4 << 20
MOST = 32 << 20
PACKED = {"content-encoding": "gzip"}


@pytest.mark.requirement("R23")
async def test_small_body_that_decompresses_large_is_read_up_to_the_limit() -> None:
    """As the gate reads an upstream's answer."""
    bomb = gzip.compress(bytes(UNFOLDED))

    async def give(_: web.Request) -> web.Response:
        return web.Response(body=bomb, headers=PACKED)

    app = web.Application()
    app.router.add_get("/", give)
    tracemalloc.start()
    try:
        async with TestServer(app) as server, aiohttp.ClientSession() as session:
            url = server.make_url("/")
            async with session.get(url) as answer:
                assert len(await answer.content.read(LIMIT)) <= LIMIT
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < MOST
