"""Where the proxy's requests go, whatever a name server answers, how many wait, and what services share."""

from __future__ import annotations

import asyncio
import ipaddress
import shutil
import socket
from collections.abc import AsyncIterator, Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import test_utils, web
from tests.support.endpoints.egress_upstream import Indexes, running

from penstock_sandbox.egress import fetching
from penstock_sandbox.egress.addresses import Addresses
from penstock_sandbox.egress.credentials import Credentials
from penstock_sandbox.egress.errors import Refusal
from penstock_sandbox.egress.fetching import Fetcher
from penstock_sandbox.egress.greeting import Greeting
from penstock_sandbox.egress.recording_stores import Folder
from penstock_sandbox.egress.requests import Origin, Request
from penstock_sandbox.egress.shared_recordings import SharedRecordings
from penstock_sandbox.egress.store import Response, Store


@pytest.fixture
async def indexes(tmp_path: Path) -> AsyncIterator[Indexes]:
    async with running(tmp_path) as started:
        yield started


@asynccontextmanager
async def fetching_in(
    folder: Path, place: Path | None = None, max_object_bytes: int = 1_000_000
) -> AsyncIterator[Fetcher]:
    """Yields one that may connect to 127.0.0.1 and to public addresses."""
    shared = None
    if place is not None:
        shared = SharedRecordings(Folder(place), ThreadPoolExecutor(2), name="n", transfer_s=60)
    made = Fetcher(
        Store(folder, 10_000_000),
        Addresses([ipaddress.ip_network("127.0.0.1/32")]),
        Credentials(None, {}),
        max_object_bytes=max_object_bytes,
        timeout_s=60,
        ca=None,
        shared=shared,
    )
    try:
        yield made
    finally:
        await made.aclose()


@pytest.fixture
async def fetcher(tmp_path: Path) -> AsyncIterator[Fetcher]:
    async with fetching_in(tmp_path / "egress") as made:
        yield made


def request(port: int, path: str, host: str = "rebound.test") -> Request:
    return Request("GET", Origin("http", host, port), path, {}, b"")


def greeting(recording: str = "r", *, recorded_only: bool = False, shared: bool = False) -> Greeting:
    return Greeting("sb", recording, ("*.test",), (), (80,), recorded_only, shared)


@pytest.mark.requirement("R141")
async def test_each_connection_goes_to_an_address_that_was_checked(
    fetcher: Fetcher, indexes: Indexes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name server that answers with another address each time; an allowed one opens the way to itself alone."""
    answers: Iterator[str] = iter(["127.0.0.2", "::1", "169.254.169.254", "127.0.0.1"])
    asked: list[str] = []

    def resolve(host: str, port: int, *_: object, **__: object) -> list[object]:
        asked.append(host)
        found = next(answers)
        family = socket.AF_INET6 if ":" in found else socket.AF_INET
        return [(family, socket.SOCK_STREAM, 6, "", (found, port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for path in ("/count?2", "/count?3", "/count?4"):
        with pytest.raises(Refusal) as caught:
            await fetcher.answer(request(indexes.plain_port, path), greeting())
        assert caught.value.reason == "ADDRESS_NOT_ALLOWED"
    assert (await fetcher.answer(request(indexes.plain_port, "/count"), greeting())).status == 200
    assert len(asked) == 4 and indexes.asked == {"GET /count": 1}


@pytest.mark.requirement("R141")
async def test_requests_of_one_recording_that_wait_are_bounded(
    fetcher: Fetcher, indexes: Indexes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "_MOST_FETCHES", 1)
    held = asyncio.ensure_future(fetcher.answer(request(indexes.plain_port, "/held", "localhost"), greeting()))
    await indexes.holds.wait()
    with pytest.raises(Refusal) as caught:
        await fetcher.answer(request(indexes.plain_port, "/count", "localhost"), greeting())
    assert caught.value.reason == "PROXY_BUSY"
    assert (await fetcher.answer(request(indexes.plain_port, "/count", "localhost"), greeting("other"))).status == 200
    indexes.go_on.set()
    assert (await held).status == 200


@pytest.mark.requirement("R141")
async def test_a_client_does_not_choose_by_its_name_what_siblings_get(fetcher: Fetcher, indexes: Indexes) -> None:
    await fetcher.answer(request(indexes.plain_port, "/count", "localhost"), greeting())
    assert indexes.headers[-1]["User-Agent"] == "Penstock-egress/1"


@pytest.mark.requirement("R141")
@pytest.mark.parametrize(("size", "kept"), [(3_000, 3_000), (150_000, 64 * 1024)])
async def test_a_response_that_is_not_recorded_is_whole_up_to_its_bound(fetcher: Fetcher, size: int, kept: int) -> None:
    """In whatever pieces it comes: the second is sent once the first was read."""
    content = bytes(number % 251 for number in range(size))
    first_read = asyncio.Event()

    async def answer(asked: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=403)
        await response.prepare(asked)
        await response.write(content[:10])
        await first_read.wait()
        await response.write(content[10:])
        return response

    async def read(stream: aiohttp.StreamReader, most: int = -1) -> bytes:
        piece = await unchanged(stream, most)
        first_read.set()
        return piece

    unchanged = aiohttp.StreamReader.read
    app = web.Application()
    app.router.add_get("/", answer)
    async with test_utils.TestServer(app) as server:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(aiohttp.StreamReader, "read", read)
            response = await fetcher.answer(request(server.port or 0, "/", "127.0.0.1"), greeting())
        assert response.status == 403 and response.body is not None
        assert len(response.body) == response.size == kept and content.startswith(response.body)


def body_of(response: Response) -> bytes:
    assert response.path is not None
    return response.path.read_bytes()


async def refusal_of(answer: Awaitable[Response]) -> str:
    with pytest.raises(Refusal) as caught:
        await answer
    return caught.value.reason


@pytest.mark.requirement("R141")
async def test_services_take_the_first_response_of_another_one(tmp_path: Path, indexes: Indexes) -> None:
    """Where the recording has a name; a sandbox's own is of its service alone."""
    (tmp_path / "place").mkdir()
    asked = request(indexes.plain_port, "/count", "localhost")
    named, own = greeting("named", shared=True), greeting("own")
    async with (
        fetching_in(tmp_path / "one", tmp_path / "place") as one,
        fetching_in(tmp_path / "two", tmp_path / "place") as two,
    ):
        replay = greeting("named", recorded_only=True, shared=True)
        assert await refusal_of(two.answer(asked, replay)) == "NOT_RECORDED" and not indexes.asked
        both = await asyncio.gather(one.answer(asked, named), two.answer(asked, named))
        assert [body_of(answer) for answer in both] == [b"1", b"1"] and indexes.asked == {"GET /count": 1}
        assert body_of(await two.answer(asked, replay)) == b"1"
        assert [body_of(await each.answer(asked, own)) for each in (one, two)] == [b"2", b"3"]
    async with fetching_in(tmp_path / "three", tmp_path / "place", max_object_bytes=0) as strict:
        assert await refusal_of(strict.answer(asked, named)) == "RESPONSE_TOO_LARGE"


@pytest.mark.requirement("R141")
async def test_what_a_service_has_needs_no_place_and_no_second_transfer(tmp_path: Path, indexes: Indexes) -> None:
    place = tmp_path / "place"
    place.mkdir()
    asked = request(indexes.plain_port, "/simple/snail/", "localhost")
    first, later = greeting("first", shared=True), greeting("later", shared=True)
    async with fetching_in(tmp_path / "one", place) as one, fetching_in(tmp_path / "two", place) as two:
        page = body_of(await one.answer(asked, first))
        assert body_of(await two.answer(asked, first)) == body_of(await two.answer(asked, later)) == page
        shutil.rmtree(place / "bodies")
        assert body_of(await one.answer(asked, later)) == page  # the entry is two's, the body its own
        place.rename(tmp_path / "away")
        before = indexes.asked.copy()
        assert body_of(await one.answer(asked, later)) == page
        for unknown in (greeting("new", shared=True), greeting("new", recorded_only=True, shared=True)):
            assert await refusal_of(one.answer(asked, unknown)) == "RECORDINGS_AWAY"
        assert indexes.asked == before
