"""What is sent compressed unfolds piece by piece: neither an agent nor an upstream fills the gate's memory (R23)."""

from __future__ import annotations

import gzip
import tracemalloc

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

UNFOLDED = 256 << 20
LIMIT = 4 << 20
MOST = 64 << 20
PACKED = {"content-encoding": "gzip"}


async def test_a_small_body_that_unfolds_to_a_large_one_is_refused_before_it_has() -> None:
    """R23: an agent's request, and an upstream's answer that is read as the gate reads it."""
    bomb = gzip.compress(bytes(UNFOLDED))
    refused: list[int] = []

    async def take(request: web.Request) -> web.Response:
        try:
            await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            refused.append(error.status)
            raise
        raise AssertionError("it was read")

    async def give(_: web.Request) -> web.Response:
        return web.Response(body=bomb, headers=PACKED)

    app = web.Application(client_max_size=LIMIT)
    app.router.add_post("/", take)
    app.router.add_get("/", give)
    tracemalloc.start()
    try:
        async with TestServer(app) as server, aiohttp.ClientSession() as session:
            url = server.make_url("/")
            async with session.post(url, data=bomb, headers=PACKED) as answer:
                assert answer.status == 413
            async with session.get(url) as answer:
                assert len(await answer.content.read(LIMIT)) <= LIMIT
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refused == [413]
    assert most < MOST
