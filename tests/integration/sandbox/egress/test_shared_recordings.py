"""Recordings that several sandbox services share (R141): in a folder, with real sandboxes, and on a real S3 server."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import s3fs
from tests.integration.sandbox.egress.test_egress import NPM, PIP, allowlist, box_of, serving
from tests.integration.sandbox.egress.test_egress_proxy import answer, connect, get, inside_tls, options
from tests.support.endpoints import s3
from tests.support.endpoints.egress_upstream import LOGIN, running

from penstock_chassis.errors import FailedPrecondition
from penstock_sandbox.egress import recording_stores
from penstock_sandbox.egress.service import Egress
from penstock_sandbox.egress.shared_recordings import Entry, SharedRecordings
from penstock_sandbox.egress.store import Part

SECRETS = (LOGIN.partition(":")[2].encode(), base64.b64encode(LOGIN.encode()), b"session=secret")
OBJECTS = 6


@pytest.mark.requirement("R141")
async def test_siblings_on_two_services_get_one_response_and_replay_it_without_upstream(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    shared = tmp_path / "shared"
    shared.mkdir()
    async with AsyncExitStack() as stack:
        async with running(tmp_path) as indexes:
            one, two = [
                await stack.enter_async_context(
                    serving(tmp_path / name, indexes, egress_recordings=f"file://{shared}", first_uid=uid)
                )
                for name, uid in (("one", "300000"), ("two", "400000"))
            ]
            siblings = [await box_of(service, allowlist(indexes)) for service in (one, two, one, two)]
            for command in ("count", "files/snail-1.0-py3-none-any.whl | sha256sum", "private/x"):
                got = await asyncio.gather(*(box.out(f"curl -sS {indexes.url}/{command}") for box in siblings))
                assert len(set(got)) == 1
            assert await siblings[0].out(f"curl -sS {indexes.plain_url}/count") == "2"
            assert indexes.asked.pop("GET /count") == 2 and set(indexes.asked.values()) == {1}
        replay = await box_of(two, allowlist(indexes, recorded_only=True))
        assert await replay.out(f"curl -sS {indexes.plain_url}/count") == "2"  # which `one` recorded
        assert "NOT_RECORDED" in await replay.out(f"curl -sS {indexes.plain_url}/big")
    kept = [path.read_bytes() for path in shared.rglob("*") if path.is_file()]
    assert any(b"for readers" in content for content in kept)
    assert not any(secret in content for secret in SECRETS for content in kept)


@pytest.mark.requirement("R141")
@pytest.mark.on_demand(
    "8 sandboxes that install with pip and npm: test_siblings_on_two_services shows the same of four"
)
async def test_a_group_on_two_services_that_installs_asks_for_each_object_once(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    shared = tmp_path / "shared"
    shared.mkdir()
    async with AsyncExitStack() as stack:
        indexes = await stack.enter_async_context(running(tmp_path))
        services = [
            await stack.enter_async_context(
                serving(tmp_path / name, indexes, egress_recordings=f"file://{shared}", first_uid=uid)
            )
            for name, uid in (("one", "300000"), ("two", "400000"))
        ]
        room, began = asyncio.Semaphore(4), time.monotonic()

        async def install(number: int) -> None:
            async with room:
                box = await box_of(services[number % 2], allowlist(indexes))
                await box.out(PIP.format(to="py", url=indexes.url, what="snail"), timeout_s=250)
                await box.out(NPM.format(url=indexes.url), timeout_s=250)

        await asyncio.gather(*map(install, range(8)))
    assert set(indexes.asked.values()) == {1}
    print(f"8 sandboxes, 2 services, {len(indexes.asked)} objects, one request each, {time.monotonic() - began:.0f} s")


@pytest.mark.requirement("R141")
@pytest.mark.on_demand("two proxies on S3 that fails: test_s3_has_one_first_response shows its creation and one proxy")
async def test_services_share_recordings_on_s3_through_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost answer leaves a proxy without knowing whether its response is the first: it looks."""
    with s3.serving(tmp_path / "moto.log") as server:
        async with AsyncExitStack() as stack:
            faulty = await stack.enter_async_context(s3.behind_proxy(server, monkeypatch.setenv))
            indexes = await stack.enter_async_context(running(tmp_path))
            proxies = []
            for name in ("one", "two"):
                (tmp_path / name).mkdir()
                started = Egress(replace(options(tmp_path / name, indexes), recordings="s3://runs/recordings"))
                stack.push_async_callback(started.aclose)
                await started.open()
                proxies.append(started)

            async def asked(egress: Egress, number: int) -> tuple[int, str]:
                sent = get(f"{indexes.plain_url}/count?{number}", f"localhost:{indexes.plain_port}")
                while "RECORDINGS_AWAY" in (got := await answer(await connect(egress, indexes), sent)):
                    pass  # its text says so, and clients try again
                return number, got

            got = Counter(await asyncio.gather(*(asked(egress, n) for n in range(OBJECTS) for egress in proxies)))
            assert set(got.values()) == {2} and len(got) == OBJECTS
            assert min(faulty.seen[fault] for fault in ("error", "lost request", "lost answer", "none")) > 0
            assert (await inside_tls(proxies[0], indexes, "/private/x")).endswith("for readers")
            s3.lead_to(server)
            contents = await asyncio.to_thread(_contents)
            assert not any(secret in content for secret in SECRETS for content in contents)
            hidden = s3.CREDENTIALS["AWS_SECRET_ACCESS_KEY"].encode()
            assert not any(hidden in Path(f"/proc/{egress.pid}/environ").read_bytes() for egress in proxies)


@pytest.mark.requirement("R141")
async def test_s3_has_one_first_response(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many creations of a name one succeeds; a body of several parts comes back as it was."""
    monkeypatch.setattr(recording_stores, "_PART_BYTES", 5 * 1024 * 1024)  # S3 takes no less
    body = random.Random(7).randbytes(2 * recording_stores._PART_BYTES + 1)
    (tmp_path / "body").write_bytes(body)
    with s3.serving(tmp_path / "moto.log") as server:
        async with s3.behind_proxy(server, monkeypatch.setenv):
            s3.lead_to(server)
            with ThreadPoolExecutor(8) as pool:
                one, other = (recording_stores.opened("s3://runs/recordings") for _ in range(2))
                contents = [f"{number}".encode() for number in range(8)]
                created = list(pool.map(lambda place, data: place.create("a/b", data), (one, other) * 4, contents))
                assert created.count(True) == 1
                assert other.read("a/b", 0, 9) == contents[created.index(True)] and other.read("a/b", 9, 12) == b""
                one.replace("empty", b"")
                assert other.read("empty", 0, 9) == b"" and other.read("absent", 0, 9) is None
                one.remove("empty")
                one.remove("empty")
                assert other.age_s("empty") is None and -60 < (other.age_s("a/b") or 99) < 60
                elsewhere = recording_stores.opened("s3://nosuch/recordings")
                for call in (partial(elsewhere.read, "a", 0, 9), partial(recording_stores.check, elsewhere)):
                    with pytest.raises(FileNotFoundError):
                        call()
                shared = [SharedRecordings(place, None, name="n", transfer_s=60.0) for place in (one, other)]
                ours = Entry(200, "OK", (), hashlib.sha256(body).hexdigest(), len(body))
                assert await shared[0].publish("r", "k", ours, tmp_path / "body") == ours
                assert await shared[1].publish("r", "k", replace(ours, status=404), tmp_path / "body") == ours
                part = Part(tmp_path, lambda _: None)
                await shared[1].receive(ours, part)
                part.finish()
                assert part.path.read_bytes() == body


def _contents() -> list[bytes]:
    bucket = s3fs.S3FileSystem(skip_instance_cache=True)
    return [bucket.cat_file(name) for name in bucket.find("runs/recordings")]


@pytest.mark.requirement("R141")
async def test_a_place_that_is_not_there_is_named_before_the_service_serves(tmp_path: Path) -> None:
    async with running(tmp_path) as indexes:
        absent = Egress(replace(options(tmp_path, indexes), recordings=f"file://{tmp_path}/absent"))
        with pytest.raises(FailedPrecondition, match=r"egress_recordings: file:.*absent cannot be used") as caught:
            await absent.open()
        await absent.aclose()
    assert caught.value.reason == "EGRESS_RECORDINGS_UNUSABLE"
