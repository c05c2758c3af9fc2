"""A diff's bounds hold before anything is read, and its tar is one that others read."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
import tempfile
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from penstock_chassis.errors import FailedPrecondition, ResourceExhausted
from penstock_sandbox.backends.docker.engine.daemon import items
from penstock_sandbox.backends.docker.engine.errors import Refused
from penstock_sandbox.backends.docker.images import changes
from penstock_sandbox.backends.docker.images.changes import Listed, plan
from penstock_sandbox.backends.docker.images.diff_buffer import read_ahead
from penstock_sandbox.backends.host import copying, layers
from penstock_sandbox.domain import diffs
from penstock_sandbox.domain.model import Stream
from penstock_sandbox.processes.output import Collected


def never(_: int) -> bytes:
    raise AssertionError("nothing was to be read")


def sized(name: str, size: int) -> tarfile.TarInfo:
    """A member of some size."""
    member = tarfile.TarInfo(name)
    member.size = size
    return member


@pytest.mark.requirement("R89")
def test_member_is_refused_by_size_before_its_first_byte() -> None:
    writer = diffs.DiffWriter(1 << 20)
    with pytest.raises(ResourceExhausted, match="max_bytes") as caught:
        list(writer.add(sized("x", 8 << 40), never))
    assert caught.value.reason == "TREE_TOO_LARGE"


@pytest.mark.requirement("R89")
def test_file_shrinking_while_read_is_a_typed_error() -> None:
    """Nobody is given zeros for what was not there."""
    source = io.BytesIO(b"x" * 999)
    with pytest.raises(FailedPrecondition) as caught:
        list(diffs.DiffWriter(1 << 20).add(sized("x", 1000), source.read))
    assert caught.value.reason == "FILE_REPLACED"


@pytest.mark.requirement("R89")
def test_entries_and_deletions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty files cost no bytes."""
    monkeypatch.setattr(diffs, "MAX_ENTRIES", 10)
    writer = diffs.DiffWriter(1 << 30)
    for number in range(5):
        list(writer.add(tarfile.TarInfo(str(number))))
        writer.delete(f"/{number}")
    with pytest.raises(ResourceExhausted):
        writer.delete("/one/more")
    with pytest.raises(ResourceExhausted):
        list(writer.add(tarfile.TarInfo("more")))
    monkeypatch.setattr(diffs, "MAX_KEPT", 1000)
    writer = diffs.DiffWriter(1 << 30)
    writer.delete("/" + "a" * 900)
    with pytest.raises(ResourceExhausted):
        writer.delete("/b")


@pytest.mark.requirement("R26", "R44")
def test_any_name_and_size_comes_out_as_it_went_in() -> None:
    """Bytes that are no text, long names, sizes at the edges of blocks and pieces."""
    sizes = [0, 1, 511, 512, 513, diffs.CHUNK - 1, diffs.CHUNK, diffs.CHUNK + 1]
    wanted = {("d/" * (index * 40)) + os.fsdecode(b"n\xff%d" % index): size for index, size in enumerate(sizes)}
    writer = diffs.DiffWriter(1 << 30)
    pieces = [
        piece for name, size in wanted.items() for piece in writer.add(sized(name, size), lambda most: b"z" * most)
    ]
    *rest, deleted = writer.end()
    pieces += [piece for piece in rest if isinstance(piece, bytes)]
    assert deleted == [] and max(map(len, pieces)) <= diffs.CHUNK
    with tarfile.open(fileobj=io.BytesIO(b"".join(pieces)), mode="r:") as archive:
        assert {member.name: member.size for member in archive} == wanted


@pytest.mark.requirement("R89")
async def test_cancellation_between_two_steps_leaves_nothing_open() -> None:
    """Nor does who is cancelled while a step is under way, which is waited for."""
    closed, begun, go_on = threading.Event(), threading.Event(), threading.Event()

    def steps() -> Generator[bytes, None, None]:
        try:
            yield b"first"
            begun.set()
            go_on.wait(60)
            yield b"second"
        finally:
            closed.set()

    async def drain() -> None:
        async for _ in diffs.stepwise(steps(), diffs.in_thread):
            pass

    task = asyncio.create_task(drain())
    await asyncio.to_thread(begun.wait, 60)
    task.cancel()
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=0)
    assert not done and not closed.is_set()
    go_on.set()
    await asyncio.wait([task])
    assert task.cancelled() and closed.is_set()


@pytest.mark.requirement("R89")
def test_sparse_file_in_a_large_layer_is_read_in_small_steps(tmp_path: Path) -> None:
    """What is not asked for is looked at in steps as well, so that whoever gives up is heard."""
    for number in range(2_500):
        (tmp_path / str(number)).touch()
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    pieces = list(layers.diff(tmp_path, ["/nothing"]))
    assert pieces.count(b"") >= 2
    with pytest.raises(ResourceExhausted):
        list(layers.diff(tmp_path))


@pytest.mark.requirement("R76", "R89")
def test_second_names_are_links_as_far_as_first_ones_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many there are is the agent's choice; beyond that each is a file of its own."""
    (tmp_path / "a").write_bytes(b"x")
    os.link(tmp_path / "a", tmp_path / "b")
    os.utime(tmp_path / "a", ns=(0, 1_000_000_000_123_456_789))
    for kept, kinds in ((diffs.MAX_KEPT, {tarfile.REGTYPE, tarfile.LNKTYPE}), (0, {tarfile.REGTYPE})):
        monkeypatch.setattr("penstock_sandbox.backends.host.layers.MAX_KEPT", kept)
        *chunks, _ = layers.diff(tmp_path)
        with tarfile.open(fileobj=io.BytesIO(b"".join(piece for piece in chunks if isinstance(piece, bytes)))) as found:
            assert {member.type for member in found} == kinds
            assert {member.pax_headers["mtime"] for member in found} == {"1000000000.123456789"}


# Docker's list --------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R89")
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_the_daemons_list_is_read_however_it_is_cut(size: int) -> None:
    """As it comes, since its length is the sandbox's choice."""
    text = '[{"Path":"/a}{\\"","Kind":1},\n {"Path":"/é","Kind":2}]\n'.encode()
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    assert list(items(chunks)) == [{"Path": '/a}{"', "Kind": 1}, {"Path": "/é", "Kind": 2}]
    assert list(items([b"null\n"])) == list(items([b"[]\n"])) == []


@pytest.mark.requirement("R89")
@pytest.mark.parametrize(
    "text", [b"", b'[{"Path":"/a","Kind":1}', b'[{"Path":"/a","Ki', b'[{"Path":"' + b"a" * (2 << 20)]
)
def test_a_list_that_ends_early_or_never_is_refused(text: bytes) -> None:
    """Half of the changes are never taken for all of them."""
    with pytest.raises(Refused):
        list(items([text[start : start + 65_536] for start in range(0, len(text), 65_536)]))


@pytest.mark.requirement("R89")
def test_entries_of_a_kept_directory_are_dropped_and_the_rest_bounded() -> None:
    """A million new files in a new directory are one path."""
    listed = Listed(["/workspace"])
    listed.take("/workspace", 0)
    listed.take("/workspace/new", 1)
    for number in range(200_000):
        listed.take(f"/workspace/new/{number}", 1)
    listed.take("/workspace/newer", 1)
    listed.take("/elsewhere", 1)
    assert plan(listed.kinds) == (["/workspace/new", "/workspace/newer"], ["/workspace"], [])
    with pytest.raises(ResourceExhausted):
        for number in range(200_000):
            listed.take(f"/workspace/{number}", 1)


@pytest.mark.requirement("R76")
def test_a_deleted_directory_above_a_root_is_that_roots_deletion() -> None:
    """Unless the root itself is told."""
    listed = Listed(["/workspace/d/in", "/workspace/e"])
    for path, kind in (("/workspace/d", 2), ("/workspace/e", 1), ("/workspace", 2)):
        listed.take(path, kind)
    assert listed.kinds == {"/workspace/d/in": 2, "/workspace/e": 1}


class LargeDirectory:
    """A daemon whose sandbox has a new name that is not UTF-8 beside a prepared file of some size."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.sent = 0

    def changes(self, container: str) -> Generator[tuple[str, int], None, None]:
        """The one new name, as the daemon writes it."""
        yield "/workspace/new-\ufffd", 1

    def fetch_stream(self, container: str, path: str) -> tuple[dict[str, int], Generator[bytes, None, None]]:
        """The whole directory."""
        return {"mode": 1 << 31}, self._tar()

    def _tar(self) -> Generator[bytes, None, None]:
        self.sent += 512
        yield sized("workspace/prepared", self._size).tobuf()
        for _ in range(-(-self._size // 512)):
            self.sent += 512
            yield bytes(512)
        yield sized("workspace/new-\udcff", 0).tobuf() + bytes(1024)


@pytest.mark.requirement("R89")
def test_directory_is_searched_for_names_only_within_the_callers_limit() -> None:
    """It may hold a prepared file of any size, which no limit of the diff itself counts."""
    daemon: Any = LargeDirectory(10_000)
    *chunks, _ = changes._pieces(daemon, "c", ["/workspace"], 20_000)
    with tarfile.open(fileobj=io.BytesIO(b"".join(chunk for chunk in chunks if isinstance(chunk, bytes)))) as archive:
        assert archive.getnames() == ["workspace/new-\udcff"]
    endless: Any = LargeDirectory(8 << 30)
    with pytest.raises(ResourceExhausted) as caught:
        list(changes._pieces(endless, "c", ["/workspace"], 20_000))
    assert caught.value.reason == "TREE_TOO_LARGE" and "UTF-8" in caught.value.message
    assert endless.sent <= 2 * diffs.CHUNK


# Copies, and what programs say ----------------------------------------------------------------------------------------


@pytest.mark.requirement("R89")
def test_a_copy_that_nobody_waits_for_stops_between_two_pieces(tmp_path: Path) -> None:
    """A cancelled fork of a live sandbox does not keep it frozen until all is copied."""
    source = tmp_path / "upper"
    source.mkdir()
    for number in range(100):
        (source / str(number)).touch()
    answers = iter([False] * 10)
    with pytest.raises(OSError, match="have cancelled"):
        copying.copy(source, tmp_path / "copy", lambda: next(answers, True))
    assert len(list((tmp_path / "copy").iterdir())) == 10


@pytest.mark.requirement("R89")
def test_names_of_one_file_are_kept_within_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million files of two names each are an agent's to make."""
    monkeypatch.setattr(copying, "_MOST_LINKED", 2_000)
    source = tmp_path / "upper"
    source.mkdir()
    for number in range(20):
        (source / f"a{number}").touch()
        os.link(source / f"a{number}", source / f"b{number}")
    with pytest.raises(OSError, match="hard links"):
        copying.copy(source, tmp_path / "copy")


@pytest.mark.requirement("R89")
async def test_output_of_a_trial_program_is_bounded() -> None:
    """It runs in an image of somebody else's."""
    heard = Collected()
    for _ in range(100):
        heard.output(Stream.STDOUT, b"x" * 100_000)
    assert heard.text == b"x" * (1 << 20)


@pytest.mark.requirement("R4", "R89")
async def test_read_ahead_needs_no_consumer_and_keeps_order(tmp_path: Path) -> None:
    """Then the error that ended it."""
    read = asyncio.Event()

    async def pieces() -> AsyncGenerator[diffs.Piece, None]:
        for number in range(100):
            yield bytes([number]) * diffs.CHUNK
        yield ["/gone"]
        read.set()
        raise Refused(500, "the daemon ended")

    taken: list[diffs.Piece] = []
    async with aclosing(read_ahead(pieces(), tmp_path)) as ahead:
        taken.append(await anext(ahead))
        await read.wait()
        for _ in range(100):
            taken.append(await anext(ahead))  # noqa: PERF401 - so that those before the error are kept
        with pytest.raises(Refused):
            await anext(ahead)
    assert taken == [*(bytes([number]) * diffs.CHUNK for number in range(100)), ["/gone"]]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.requirement("R13", "R89")
async def test_leaving_consumer_ends_the_read_ahead(tmp_path: Path) -> None:
    ended = asyncio.Event()

    async def pieces() -> AsyncGenerator[diffs.Piece, None]:
        try:
            yield b"x"
            await asyncio.Event().wait()
        finally:
            ended.set()

    ahead = read_ahead(pieces(), tmp_path)
    assert await anext(ahead) == b"x"
    await ahead.aclose()
    assert ended.is_set()


@pytest.mark.requirement("R89", "R95")
async def test_a_full_disk_ends_what_is_read_ahead_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/full takes nothing, as a full disk does."""

    async def pieces() -> AsyncGenerator[diffs.Piece, None]:
        yield b"x"

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: Path("/dev/full").open("r+b", buffering=0))  # noqa: SIM115
    async with aclosing(read_ahead(pieces(), tmp_path)) as ahead:
        with pytest.raises(ResourceExhausted) as refused:
            await anext(ahead)
    assert refused.value.reason == "DISK_LOW"
