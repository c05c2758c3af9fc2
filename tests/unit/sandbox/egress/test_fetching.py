"""Where the proxy's requests go, whatever a name server answers, and how many wait."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support.endpoints.egress_upstream import Indexes, running

from penstock_sandbox.egress import fetching
from penstock_sandbox.egress.addresses import Addresses
from penstock_sandbox.egress.credentials import Credentials
from penstock_sandbox.egress.errors import Refusal
from penstock_sandbox.egress.fetching import Fetcher
from penstock_sandbox.egress.greeting import Greeting
from penstock_sandbox.egress.requests import Origin, Request
from penstock_sandbox.egress.store import Store


@pytest.fixture
async def indexes(tmp_path: Path) -> AsyncIterator[Indexes]:
    async with running(tmp_path) as started:
        yield started


@pytest.fixture
async def fetcher(tmp_path: Path) -> AsyncIterator[Fetcher]:
    """One that may connect to 127.0.0.1 and to public addresses."""
    made = Fetcher(
        Store(tmp_path / "egress", 10_000_000),
        Addresses([ipaddress.ip_network("127.0.0.1/32")]),
        Credentials(None, {}),
        max_object_bytes=1_000_000,
        timeout_s=60,
        ca=None,
    )
    yield made
    await made.aclose()


def request(port: int, path: str, host: str = "rebound.test") -> Request:
    return Request("GET", Origin("http", host, port), path, {}, b"")


def greeting(recording: str = "r") -> Greeting:
    return Greeting("sb", recording, ("*.test",), (), (80,), False)


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
