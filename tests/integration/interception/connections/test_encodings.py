"""What is sent compressed: which encodings the ingress reads, what it says of others, and answers of black boxes."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.integration.interception.conftest import Rollout, Service
from tests.integration.interception.connections.test_connections import client, head
from tests.integration.interception.test_sources import from_caller

from penstock.interception.v1 import interception_pb2

HANGS_S = 60.0
PATHS = ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/mcp"]
CHAT = {"model": "m", "messages": [{"role": "user", "content": "list the files"}]}
BODY = json.dumps(CHAT).encode()
PACKED = gzip.compress(BODY)


def raw_deflate(data: bytes) -> bytes:
    """Without zlib's frame, as some clients send it."""
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


READ = [
    ("gzip", PACKED),
    ("GZip", PACKED),
    ("x-gzip", PACKED),
    ("gzip", gzip.compress(BODY[:20]) + gzip.compress(BODY[20:])),
    ("deflate", zlib.compress(BODY)),
    ("deflate", raw_deflate(BODY)),
    ("identity", BODY),
    ("", BODY),
]
REFUSED = [
    ("br", "br"),
    ("zstd", "zstd"),
    ("compress", "compress"),
    ("foo", "foo"),
    ("gzip, gzip", "gzip, gzip"),
    ("gzip|br", "gzip, br"),
    ("deflate, gzip", "deflate, gzip"),
    ("x" * 900, "x" * 64),
]
BROKEN = [
    ("gzip", PACKED[:-12]),
    ("gzip", PACKED[:-1]),
    ("gzip", PACKED[:-8] + bytes(8)),
    ("gzip", PACKED + b"and more"),
    ("gzip", PACKED + gzip.compress(b"")[:9]),
    ("gzip", zlib.compress(BODY)),
    ("deflate", zlib.compress(BODY)[:-1]),
    ("deflate", raw_deflate(BODY)[:-1]),
    ("deflate", zlib.compress(BODY) + b"more"),
    ("gzip", gzip.compress(b"") * 5000),
]
"""Cut, with another sum, with something behind, in another form, and in thousands of parts."""


def request(rollout: Rollout, path: str, encoding: str, body: bytes, **options: Any) -> bytes:
    """A POST of a compressed body."""
    headers = [f"content-encoding: {name}" for name in encoding.split("|")]
    return head(rollout, path, *headers, f"content-length: {len(body)}", **options) + body


@pytest.mark.requirement("R18")
async def test_supported_encodings_make_ordinary_calls(service: Service) -> None:
    """Gzip, in one part or several, and deflate, with its frame or without."""
    rollout = await service.open()
    trainer = await service.trainer()
    async with client(service.ingress) as agent:
        for encoding, body in READ:
            agent.send(request(rollout, PATHS[0], encoding, body))
            await asyncio.wait_for(trainer.answer("hello"), HANGS_S)
            status, _, told = await agent.answer()
            assert (status, json.loads(told)["choices"][0]["message"]["content"]) == (200, "hello"), encoding
    captured = await service.capture(rollout.rollout_id, include_bodies=True)
    assert [call.request_body for call in captured.calls] == [BODY] * len(READ)


@pytest.mark.requirement("R8", "R33")
@pytest.mark.parametrize("path", PATHS)
async def test_a_body_in_another_encoding_is_refused_by_its_name(service: Service, path: str) -> None:
    """415 in the dialect's form, with what is read instead; what is installed here makes no difference."""
    rollout = await service.open()
    async with client(service.ingress) as agent:
        for encoding, named in REFUSED:
            agent.send(request(rollout, path, encoding, BODY))
            status, headers, told = await agent.answer()
            assert (status, headers.get("accept-encoding")) == (415, "gzip, deflate"), encoding
            assert f"{named} is not supported" in json.loads(told)["error"]["message"]


@pytest.mark.requirement("R33")
async def test_a_compressed_transfer_is_refused_by_its_name(service: Service) -> None:
    """It would be taken for the body itself."""
    rollout = await service.open()
    async with client(service.ingress) as agent:
        chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(PACKED), PACKED)
        agent.send(head(rollout, PATHS[0], "transfer-encoding: gzip, chunked") + chunk)
        status, _, told = await agent.answer()
    assert status == 415 and b"gzip, chunked is not supported" in told


@pytest.mark.requirement("R5")
async def test_missing_credential_hides_refusals_of_encodings(service: Service) -> None:
    """401, whatever the body is; nothing of it is unfolded."""
    rollout = await service.open()
    for encoding in ("br", "zstd", "gzip"):
        async with client(service.ingress) as stranger:
            stranger.send(request(rollout, PATHS[0], encoding, b"xxxx", token="wrong"))
            assert (await stranger.answer())[0] == 401, encoding


@pytest.mark.requirement("R8", "R33")
@pytest.mark.parametrize("path", PATHS)
async def test_truncated_or_overlong_body_is_a_400(service: Service, path: str) -> None:
    """What was cut off may be the end of an agent's words; nothing is made of the rest."""
    rollout = await service.open()
    for encoding, body in BROKEN:
        async with client(service.ingress) as agent:
            agent.send(request(rollout, path, encoding, body))
            status, _, told = await agent.answer()
        assert status == 400, (encoding, body)
        assert "does not match its headers" in json.loads(told)["error"]["message"]


@pytest.mark.requirement("R23")
async def test_a_small_body_that_unfolds_to_a_large_one_is_a_413(start: Any) -> None:
    """It is unfolded up to the limit, and not beyond; the service's memory grows by no more than twice that."""
    service = await start(max_body_bytes=1 << 20, max_tool_bytes=1 << 20)
    rollout = await service.open()
    tracemalloc.start()
    try:
        for encoding, pack in (("gzip", gzip.compress), ("deflate", zlib.compress), ("deflate", raw_deflate)):
            bomb = request(rollout, "", encoding, pack(bytes(16 << 20)))
            for path in PATHS:
                tracemalloc.reset_peak()
                before, _ = tracemalloc.get_traced_memory()
                async with client(service.ingress) as agent:
                    agent.send(bomb.replace(b" HTTP/1.1", f"{path} HTTP/1.1".encode(), 1))
                    assert (await agent.answer())[0] == 413, path
                assert tracemalloc.get_traced_memory()[1] - before < 8 << 20
    finally:
        tracemalloc.stop()


@asynccontextmanager
async def saying(answer: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """An endpoint that answers each POST with these bytes and ends the connection; what it was asked."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer if asked[-1].startswith(b"POST") else answering("content-length: 2", body=b"{}"))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", asked


def answering(*headers: str, body: bytes) -> bytes:
    """An HTTP answer."""
    return "\r\n".join(("HTTP/1.1 200 OK", *headers, "", "")).encode() + body


async def forwarded(service: Service, answer: bytes, *headers: str) -> tuple[bytes, bytes, Any]:
    """What an agent gets of such an answer, as bytes up to the connection's end; what was asked; the closed rollout."""
    async with saying(answer) as (url, asked):
        rollout = await service.open(mode=interception_pb2.MODE_BLACK_BOX, source=from_caller(url, "sk-1"))
        async with client(service.ingress) as agent:
            length = f"content-length: {len(BODY)}"
            agent.send(head(rollout, PATHS[0], length, "connection: close", *headers) + BODY)
            got = await agent.ended()
        return got, asked[-1].lower(), await service.close(rollout.rollout_id)


@pytest.mark.requirement("R18")
@pytest.mark.parametrize("encoding", ["gzip", "br", "foo"])
async def test_a_black_boxs_compressed_answer_goes_on_as_it_came(service: Service, encoding: str) -> None:
    """Its bytes and the name of their encoding, which the agent asked for; the gate unfolds nothing."""
    headers = (f"content-encoding: {encoding}", f"content-length: {len(PACKED)}")
    answer = answering(*headers, body=PACKED)
    got, asked, closed = await forwarded(service, answer, f"accept-encoding: {encoding}")
    assert PACKED in got and f"content-encoding: {encoding}".encode() in got.lower()
    assert f"accept-encoding: {encoding}\r\n".encode() in asked
    assert closed.totals.delivered == 1


@pytest.mark.requirement("R18")
async def test_an_agent_that_reads_no_compression_gets_none(service: Service) -> None:
    """The endpoint is asked for what the agent can read, which is nothing where it says nothing."""
    _, asked, _ = await forwarded(service, answering("content-length: 2", body=b"{}"))
    assert b"accept-encoding: identity\r\n" in asked


@pytest.mark.requirement("R18", "R33")
@pytest.mark.parametrize(
    ("header", "body"), [("content-length: 100", b"{}"), ("transfer-encoding: chunked", b"2\r\n{}\r\n5\r\nab")]
)
async def test_an_answer_that_breaks_off_is_none_for_the_agent_either(
    service: Service, header: str, body: bytes
) -> None:
    """Its connection ends without the end of an answer, nothing of ours is written into it, and it failed."""
    got, _, closed = await forwarded(service, answering(header, body=body))
    assert got.count(b"HTTP/1.1") == 1 and not got.endswith(b"0\r\n\r\n")
    assert (closed.totals.calls, closed.totals.delivered, closed.totals.failed) == (1, 0, 1)
