"""Recordings of several services: one first response for all, whatever the order of what they do and lose."""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import json
import math
import os
import random
import tempfile
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.waiting import eventually
from tests.unit.sandbox.egress.test_recording_stores import Repeating

from penstock_sandbox.egress.errors import Refusal
from penstock_sandbox.egress.recording_stores import Folder
from penstock_sandbox.egress.shared_recordings import BEAT_S, FRESH_S, LEASE_S, Entry, SharedRecordings
from penstock_sandbox.egress.store import Part

HEADERS = (("Content-Type", "text/plain"), ("X-É".encode().decode("latin-1"), "1"))


def entry_of(body: bytes) -> Entry:
    return Entry(200, "OK", HEADERS[:1], hashlib.sha256(body).hexdigest(), len(body))


class Memory:
    """A place whose calls are each done at once."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def create(self, name: str, data: bytes) -> bool:
        return self.files.setdefault(name, data) is data

    def replace(self, name: str, data: bytes) -> None:
        self.files[name] = data

    def send(self, name: str, file: Path) -> None:
        self.files[name] = file.read_bytes()

    def read(self, name: str, start: int, end: int) -> bytes | None:
        found = self.files.get(name)
        return None if found is None else found[start:end]

    def age_s(self, name: str) -> float | None:
        return 0.0 if name in self.files else None

    def remove(self, name: str) -> None:
        self.files.pop(name, None)


@dataclass
class World:
    """Services with one place, on a clock of their own: what is under way ends in the order of random times."""

    folder: Path
    random: random.Random
    takes_s: tuple[float, ...]
    """What a call of the place may take before it counts, and its answer after that."""
    upstream_s: float
    failing: frozenset[int]
    """Requests upstream that fail, by number."""
    place: Memory = field(default_factory=Memory)
    now: float = 0.0
    asked: int = 0
    """Requests upstream."""
    recorded: int = 0
    """Responses of upstream that may be recorded."""
    _ahead: list[tuple[float, int, Callable[[], object]]] = field(default_factory=list)
    _numbers: count[int] = field(default_factory=count)

    def later(self, seconds: float, work: Callable[[], object]) -> None:
        heapq.heappush(self._ahead, (self.now + seconds, next(self._numbers), work))

    def latency(self) -> float:
        return self.random.choice(self.takes_s)

    async def pause(self, seconds: float) -> None:
        over = asyncio.Event()
        self.later(seconds, over.set)
        await over.wait()

    async def run(self, services: list[Service], losses: dict[int, Service]) -> list[bytes]:
        """Returns what the services answered that were not lost."""
        tasks = {service: asyncio.ensure_future(service.ask()) for service in services}
        try:
            over = math.inf
            for step in range(5000):
                for _ in range(6):
                    await asyncio.sleep(0)
                if over == math.inf and all(task.done() for service, task in tasks.items() if not service.lost):
                    over = self.now + 5.0  # claims are given up after the answer
                if not self._ahead or self._ahead[0][0] > over:
                    break
                if (lost := losses.get(step)) is not None:
                    lost.lost = True
                    tasks[lost].cancel()
                self.now, _, work = heapq.heappop(self._ahead)
                work()
            else:
                raise AssertionError("the services never end")
        finally:
            for service in services:
                tasks[service].cancel()
                await service.shared.aclose()
        await asyncio.gather(*(task for service, task in tasks.items() if not service.lost))
        return [answer for service in services if not service.lost for answer in service.answers]


class Service(Executor):
    """One service, and the threads that its calls of the place run in."""

    def __init__(self, world: World, asks: int) -> None:
        self.world = world
        self.asks = asks
        self.lost = False
        self.answers: list[bytes] = []
        self.shared = SharedRecordings(
            world.place, self, name="n", transfer_s=1e9, pause=world.pause, clock=lambda: world.now
        )

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            if self.lost:
                return
            done = fn(*args, **kwargs)
            self.world.later(self.world.latency(), lambda: future.set_result(done) if not future.done() else None)

        self.world.later(self.world.latency(), work)
        return future

    async def ask(self) -> None:
        """Asks as often as it should; a failure of upstream is asked again."""
        while len(self.answers) < self.asks:
            try:
                async with self.shared.turn("r", "k") as entry:
                    if entry is None:
                        entry = await self._fetched()
            except Refusal as refusal:
                assert refusal.reason == "UPSTREAM_UNREACHABLE"
                continue
            self.answers.append(await received(self.shared, entry, self.world.folder))

    async def _fetched(self) -> Entry:
        world = self.world
        world.asked += 1
        mine = world.asked
        await world.pause(world.upstream_s)
        if mine in world.failing:
            raise Refusal("UPSTREAM_UNREACHABLE", "")
        world.recorded += 1
        body = f"answer {mine}".encode()
        file = world.folder / f"body-{mine}"
        file.write_bytes(body)
        return await self.shared.publish("r", "k", entry_of(body), file)


async def received(shared: SharedRecordings, entry: Entry, folder: Path) -> bytes:
    part = Part(folder, lambda _: None)
    try:
        await shared.receive(entry, part)
        part.finish()
        return part.path.read_bytes()
    finally:
        part.discard()


SERVICES = st.lists(st.integers(1, 2), min_size=2, max_size=3)
"""How often each asks."""
FAILING = st.frozensets(st.integers(1, 4), max_size=3)
UPSTREAM_S = st.sampled_from([0.0, 0.1, 3.0, 45.0])
SOON = (0.0, 0.01, 0.1, 0.5)
LATE = (0.0, 0.1, 0.5, 25.0)
"""Some calls take longer than a claim counts."""


@pytest.mark.requirement("R141")
@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    asks=SERVICES,
    failing=FAILING,
    upstream_s=UPSTREAM_S,
    losses=st.dictionaries(st.integers(0, 40), st.integers(1, 2), max_size=2),
)
def test_all_services_answer_with_the_first_response_whatever_is_lost_or_late(
    seed: int, asks: list[int], failing: frozenset[int], upstream_s: float, losses: dict[int, int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), random.Random(seed), LATE, upstream_s, failing)
        services = [Service(world, many) for many in asks]
        lost = {step: services[index] for step, index in losses.items() if index < len(services)}
        answers = asyncio.run(world.run(services, lost))
    assert len(answers) == sum(service.asks for service in services if not service.lost)
    assert len(set(answers)) == 1


@pytest.mark.requirement("R141")
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), asks=SERVICES, failing=FAILING, upstream_s=UPSTREAM_S)
def test_upstream_is_asked_once_for_all_services_while_none_is_lost(
    seed: int, asks: list[int], failing: frozenset[int], upstream_s: float
) -> None:
    """Failures of upstream are no responses: the next one asks again."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), random.Random(seed), SOON, upstream_s, failing)
        answers = asyncio.run(world.run([Service(world, many) for many in asks], {}))
    assert len(set(answers)) == 1 and world.recorded == 1
    assert world.asked == min(set(range(1, 6)) - failing)
    assert not [name for name in world.place.files if name.startswith("claims/")]


@pytest.fixture
async def shared(tmp_path: Path) -> AsyncIterator[SharedRecordings]:
    (tmp_path / "place").mkdir()
    made = SharedRecordings(Folder(tmp_path / "place"), ThreadPoolExecutor(2), name="n", transfer_s=60.0)
    yield made
    await made.aclose()


async def published(shared: SharedRecordings, folder: Path, body: bytes, recording: str = "r") -> Entry:
    (folder / "body").write_bytes(body)
    return await shared.publish(recording, "k", entry_of(body), folder / "body")


@pytest.mark.requirement("R141")
async def test_the_second_response_gives_way_to_the_first(shared: SharedRecordings, tmp_path: Path) -> None:
    first = await published(shared, tmp_path, b"first")
    assert await published(shared, tmp_path, b"second") == first == await shared.find("r", "k")
    assert await received(shared, first, tmp_path) == b"first"
    empty = await published(shared, tmp_path, b"", "another")
    assert await received(shared, empty, tmp_path) == b"" and await shared.find("third", "k") is None


@pytest.mark.requirement("R141")
async def test_a_service_that_was_held_up_gets_what_another_one_stored_meanwhile(
    shared: SharedRecordings, tmp_path: Path
) -> None:
    """Its claim is not renewed, so another one asks upstream too."""
    now = 0.0

    async def pass_by(seconds: float) -> None:
        nonlocal now
        now += seconds

    other = SharedRecordings(
        Folder(tmp_path / "place"), None, name="n", transfer_s=60.0, pause=pass_by, clock=lambda: now
    )
    async with shared.turn("r", "k") as claimed:
        assert claimed is None
        async with other.turn("r", "k") as taken_over:
            assert taken_over is None and now > LEASE_S
            theirs = await published(other, tmp_path, b"theirs")
        assert await published(shared, tmp_path, b"ours") == theirs
    await other.aclose()


@pytest.mark.requirement("R141")
async def test_a_service_does_not_wait_for_itself_where_an_answer_was_lost(tmp_path: Path) -> None:
    """S3's client repeats the creation then, which fails: of its claim, and of its response."""
    place = tmp_path / "place"
    place.mkdir()

    async def never(seconds: float) -> None:
        assert seconds == BEAT_S, "it waits for a claim"
        await asyncio.Event().wait()

    repeating = SharedRecordings(Repeating(place), None, name="n", transfer_s=60.0, pause=never)
    async with repeating.turn("r", "k") as claimed:
        assert claimed is None
        ours = await published(repeating, tmp_path, b"ours")
    assert ours == entry_of(b"ours")
    await eventually(lambda: not any((place / "claims").iterdir()), "the claim is given up")
    await repeating.aclose()


@pytest.mark.requirement("R141")
async def test_a_claim_is_given_up_where_what_it_is_for_is_damaged(shared: SharedRecordings, tmp_path: Path) -> None:
    class Unlucky(Folder):
        """A response comes, and is damaged, between the first look and the second."""

        def create(self, name: str, data: bytes) -> bool:
            if name.startswith("claims/"):
                asyncio.run_coroutine_threadsafe(published(shared, tmp_path, b"first"), loop).result(60)
                (file,) = (path for path in (tmp_path / "place" / "responses").rglob("*") if path.is_file())
                cut(file)
            return super().create(name, data)

    loop = asyncio.get_running_loop()
    unlucky = SharedRecordings(Unlucky(tmp_path / "place"), None, name="n", transfer_s=60.0)
    with pytest.raises(Refusal) as caught:
        async with unlucky.turn("r", "k"):
            raise AssertionError("the turn of a request whose response is recorded")
    assert caught.value.reason == "RECORDING_DAMAGED"
    await eventually(lambda: not any((tmp_path / "place" / "claims").iterdir()), "the claim is given up")
    await unlucky.aclose()


@pytest.mark.requirement("R141")
async def test_what_could_not_be_read_again_is_not_stored(shared: SharedRecordings, tmp_path: Path) -> None:
    many = replace(entry_of(b""), headers=tuple((f"X-{number}", "x" * 8000) for number in range(200)))
    with pytest.raises(Refusal) as caught:
        await shared.publish("r", "k", many, tmp_path / "body")
    assert caught.value.reason == "RESPONSE_TOO_LARGE" and await shared.find("r", "k") is None


@pytest.mark.requirement("R141")
async def test_headers_with_other_letters_are_found_as_they_were_stored(
    shared: SharedRecordings, tmp_path: Path
) -> None:
    entry = replace(entry_of(b""), headers=(("X-Name", "\xe9t\xe9"), ("X-Other", "été".encode().decode("latin-1"))))
    await shared.publish("r", "k", entry, tmp_path / "body")
    assert await shared.find("r", "k") == entry


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def changed(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"first", b"FIRST").replace(b"200", b"404"))


def gone(file: Path) -> None:
    file.unlink()


def written_anew(file: Path, **fields: object) -> None:
    content = json.loads(file.read_bytes().partition(b"\n")[2])
    data = json.dumps({**content, **fields}).encode()
    file.write_bytes(hashlib.sha256(data).hexdigest().encode() + b"\n" + data)


def of_another_request(file: Path) -> None:
    """A whole entry, at the wrong place."""
    written_anew(file, key="other")


def of_no_whole_size(file: Path) -> None:
    written_anew(file, size=5.0)


def of_no_bytes(file: Path) -> None:
    """With a header of a letter that no byte stands for."""
    written_anew(file, headers=[["X-Name", "\u20ac"]])


@pytest.mark.requirement("R141")
@pytest.mark.parametrize(
    ("kind", "harm"),
    [
        *(("responses", harm) for harm in (cut, emptied, changed, of_another_request, of_no_whole_size, of_no_bytes)),
        *(("bodies", harm) for harm in (cut, emptied, changed, gone)),
    ],
)
async def test_what_is_not_what_was_stored_is_refused(
    shared: SharedRecordings, tmp_path: Path, kind: str, harm: Callable[[Path], None]
) -> None:
    await published(shared, tmp_path, b"first")
    (file,) = (path for path in (tmp_path / "place" / kind).rglob("*") if path.is_file())
    harm(file)
    with pytest.raises(Refusal) as caught:
        found = await shared.find("r", "k")
        assert found is not None
        await received(shared, found, tmp_path)
    assert caught.value.reason == "RECORDING_DAMAGED" and caught.value.status == 403


@pytest.mark.requirement("R141")
async def test_a_place_that_is_away_is_named_and_nothing_is_asked_upstream(
    shared: SharedRecordings, tmp_path: Path
) -> None:
    (tmp_path / "place").rmdir()
    with pytest.raises(Refusal) as caught:
        async with shared.turn("r", "k"):
            raise AssertionError("the turn of a request whose response cannot be recorded")
    assert caught.value.reason == "RECORDINGS_AWAY" and caught.value.status == 503
    assert not (tmp_path / "place").exists()


@pytest.mark.requirement("R141")
async def test_a_body_stays_as_young_as_the_responses_that_have_it(shared: SharedRecordings, tmp_path: Path) -> None:
    """Operators delete by age; a body that goes before its response would make it damaged."""
    entry = await published(shared, tmp_path, b"first")
    (body,) = (path for path in (tmp_path / "place" / "bodies").rglob("*") if path.is_file())
    old = body.stat().st_mtime - FRESH_S - 1
    os.utime(body, (old, old))
    assert await published(shared, tmp_path, b"first", "later") == entry
    assert body.stat().st_mtime > old + FRESH_S


def body_file(folder: Path) -> Path:
    (body,) = (path for path in (folder / "place" / "bodies").rglob("*") if path.is_file())
    return body


@pytest.mark.requirement("R141")
@pytest.mark.parametrize("harm", [cut, emptied, changed, gone])
async def test_a_damaged_body_is_stored_again_under_another_name(
    shared: SharedRecordings, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    entry = await published(shared, tmp_path, b"first")
    harm(body_file(tmp_path))
    with pytest.raises(Refusal):
        await received(shared, entry, tmp_path)
    assert await published(shared, tmp_path, b"first", "another") == entry
    assert await received(shared, entry, tmp_path) == b"first"
    stored = body_file(tmp_path).stat().st_ino
    await published(shared, tmp_path, b"first", "third")
    assert body_file(tmp_path).stat().st_ino == stored  # it is whole again: once is enough


@pytest.mark.requirement("R141")
@pytest.mark.parametrize("harm", [cut, emptied])
async def test_a_body_of_another_length_is_stored_again_before_anyone_read_it(
    shared: SharedRecordings, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    entry = await published(shared, tmp_path, b"first")
    harm(body_file(tmp_path))
    await published(shared, tmp_path, b"first", "another")
    assert await received(shared, entry, tmp_path) == b"first"
