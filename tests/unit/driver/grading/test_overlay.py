"""An agent's diff as a layer for a fresh fork: whatever the diff holds, what is safe comes out and nothing else."""

from __future__ import annotations

import io
import posixpath
import tarfile
import tracemalloc
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock_driver.domain.rollout import Changes
from penstock_driver.grading import overlay
from penstock_driver.grading.overlay import WHITEOUT, Copied, layer

ROOTS = ["/work", "/data/set"]
KINDS = (
    tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE,
    tarfile.BLKTYPE,
)  # fmt: skip


@dataclass(frozen=True)
class Item:
    """One member of a diff."""

    name: str
    kind: bytes = tarfile.REGTYPE
    link: str = ""
    content: bytes = b""
    mode: int = 0o644
    mtime: str = ""


def made(items: list[Item], deleted: list[str]) -> tuple[Changes, dict[str, tarfile.TarInfo], list[str]]:
    """What is told, and the layer's members by absolute name, and their order."""
    diff, sink = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=diff, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for item in items:
            info = tarfile.TarInfo(item.name)
            info.type, info.linkname, info.mode = item.kind, item.link, item.mode
            info.size = len(item.content) if item.kind == tarfile.REGTYPE else 0
            info.pax_headers = {"mtime": item.mtime} if item.mtime else {}
            archive.addfile(info, io.BytesIO(item.content))
    diff.seek(0)
    told = layer(diff, deleted, ROOTS, sink)
    sink.seek(0)
    with tarfile.open(fileobj=sink) as archive:
        members = archive.getmembers()
    return told, {f"/{member.name}": member for member in members}, [f"/{member.name}" for member in members]


parts = st.sampled_from(
    ["work", "workshop", "data", "set", "a", "b", "..", ".", ".wh.x", ".wh..wh..opq", "ü", "n\nl", ""]
)
names = st.lists(parts, min_size=1, max_size=4).map("/".join)
targets = st.one_of(names, names.map(lambda name: f"/{name}"), st.just("/etc/passwd"), st.just("../../../etc"))
items = st.builds(Item, names, st.sampled_from(KINDS), targets, st.binary(max_size=20), st.integers(0, 0o7777))


@pytest.mark.requirement("R76")
@example([Item("work/a"), Item("work/b", tarfile.LNKTYPE, "/work/a"), Item("work/c", tarfile.LNKTYPE, "work/a/")], [])
@given(st.lists(items, max_size=12), st.lists(names.map(lambda name: f"/{name}"), max_size=4))
def test_overlay_of_any_diff_stays_below_its_directories(given_items: list[Item], deleted: list[str]) -> None:
    """Kinds, names, links, modes; and everything below the directories is carried or counted as left out."""
    told, members, spec = made(given_items, deleted)
    for path, member in members.items():
        path = path.replace(WHITEOUT, "") if member.isreg() and not member.size else path
        assert any(path == root or path.startswith(f"{root}/") for root in ROOTS), path
        assert ".." not in path.split("/")
        assert member.isdir() or member.isreg() or member.issym() or member.islnk()
        assert member.mode <= 0o3777
        if member.issym():
            assert not member.linkname.startswith("/")
            end = posixpath.normpath(posixpath.join(posixpath.dirname(path), member.linkname))
            assert any(end == root or end.startswith(f"{root}/") for root in ROOTS), (path, member.linkname)
        if member.islnk():
            assert f"/{member.linkname}" in members
    removals = [path for path in spec if path not in ROOTS][: told.removed]
    assert all(WHITEOUT in path for path in removals), "a deletion comes before everything"
    assert told.entries <= len(given_items)
    assert len(told.left_out_paths) <= told.left_out


def tar_of(items: list[Item]) -> io.BytesIO:
    """A tar of these members, at its beginning."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for item in items:
            info = tarfile.TarInfo(item.name)
            info.type, info.linkname, info.mode, info.size = item.kind, item.link, item.mode, len(item.content)
            archive.addfile(info, io.BytesIO(item.content))
    made.seek(0)
    return made


@pytest.mark.requirement("R76")
def test_whole_copies_have_everything_but_what_is_excluded_or_leads_out() -> None:
    """Hard links lead to where the copy is; at its paths no change counts, deletions included."""
    folder = tar_of(
        [
            Item("kept", content=b"ab", mode=0o4755),
            Item("twin", tarfile.LNKTYPE, "kept"),
            Item("in", tarfile.DIRTYPE, mode=0o500),
            Item("in/to-kept", tarfile.SYMTYPE, "../kept"),
            Item("in/out", tarfile.SYMTYPE, "/etc/passwd"),
            Item("in/.git", tarfile.DIRTYPE),
            Item("in/.git/config", content=b"x"),
            Item("in/a.pyc", content=b"x"),
            Item("../up", content=b"x"),
            Item("pipe", tarfile.FIFOTYPE),
        ]
    )
    changes = tar_of([Item("work/copied/changed", content=b"x"), Item("work/other", content=b"x")])
    copies = [
        Copied("/work/copied", folder, is_directory=True, exclude=(".git", "*.py[co]")),
        Copied("/srv/answer", tar_of([Item("answer", content=b"42")])),
        Copied("/srv/absent"),
        Copied("/srv/link", is_left_out=True),
    ]
    sink = io.BytesIO()
    told = layer(changes, ["/work/copied/gone", "/work/gone"], ["/work"], sink, copies)
    sink.seek(0)
    with tarfile.open(fileobj=sink) as archive:
        members = {f"/{member.name}": member for member in archive}
        answer = archive.extractfile("srv/answer")
        assert answer is not None and answer.read() == b"42"
    assert list(members) == [
        *("/work/.wh.gone", "/work/other", "/work/copied", "/work/copied/kept", "/work/copied/twin"),
        *("/work/copied/in", "/work/copied/in/to-kept", "/work/copied/in/.wh.out", "/work/copied/.wh.pipe"),
        *("/srv/answer", "/srv/.wh.absent", "/srv/.wh.link"),
    ]
    assert members["/work/copied/kept"].mode == 0o755
    assert members["/work/copied/twin"].linkname == "work/copied/kept"
    assert members["/work/copied/in/to-kept"].linkname == "../kept"
    assert told == Changes(
        entries=7,
        size_bytes=5,
        removed=1,
        left_out=4,
        left_out_paths=("/work/copied/in/out", "/work/copied/../up", "/work/copied/pipe", "/srv/link"),
    )


@pytest.mark.requirement("R76")
def test_files_directories_modes_and_deletions_are_carried() -> None:
    """In a form that says what was removed; what is outside is not even counted."""
    told, members, _ = made(
        [
            Item("work", tarfile.DIRTYPE, mode=0o755),
            Item("work/run.sh", content=b"#!", mode=0o4755),
            Item("work/name\udcff", content=b"x"),
            Item("home/agent/.bashrc", content=b"x"),
            Item("workshop/x", content=b"x"),
        ],
        ["/work/old", "/work/sub/old", "/etc/passwd"],
    )
    assert set(members) == {"/work", "/work/run.sh", "/work/name\udcff", "/work/.wh.old", "/work/sub/.wh.old"}
    assert members["/work/run.sh"].mode == 0o755
    assert told == Changes(entries=3, size_bytes=3, removed=2, left_out=0)


@pytest.mark.requirement("R76")
@pytest.mark.parametrize(
    ("link", "carried"),
    [
        ("file", "file"),
        ("../b/file", "../b/file"),
        ("/work/b/file", "../b/file"),
        ("/usr/bin/python3", None),
        ("../../etc/passwd", None),
        ("sub/../file", None),  # `sub` may be a link, and then `..` is elsewhere
        ("..", ".."),
        ("../..", None),
    ],
)
def test_link_is_kept_when_its_text_proves_that_it_stays_inside(link: str, carried: str | None) -> None:
    told, members, _ = made([Item("work/a/link", tarfile.SYMTYPE, link)], [])
    if carried is None:
        assert list(members) == ["/work/a/.wh.link"]
        assert (told.entries, told.removed, told.left_out, told.left_out_paths) == (0, 0, 1, ("/work/a/link",))
    else:
        assert members["/work/a/link"].linkname == carried


@pytest.mark.requirement("R76")
def test_a_directory_that_is_taken_over_is_emptied_and_not_lost() -> None:
    """The verifier works in it."""
    _, _, spec = made([], ["/work"])
    assert spec == ["/.wh.work", "/work"]


@pytest.mark.requirement("R72", "R76")
def test_nothing_prepared_is_left_where_something_was_left_out() -> None:
    """An agent that broke a file is not graded with the intact one; a directory's content is not the agent's doing."""
    told, members, spec = made(
        [
            Item("work/file"),
            Item("work/pipe", tarfile.FIFOTYPE),
            Item("work/.wh.name"),
            Item("work/.wh.folder", tarfile.DIRTYPE),
            Item("work/.wh.folder/x"),
            Item("data/set", tarfile.SYMTYPE, "/etc"),
            Item("work/second", tarfile.LNKTYPE, "work/.wh.name"),
        ],
        ["/work/.wh.gone"],
    )
    assert spec == [
        *("/work/.wh..wh.gone", "/work/file", "/work/.wh.pipe", "/work/.wh..wh.name", "/work/.wh.folder/.wh.x"),
        *("/data/.wh.set", "/data/set", "/work/.wh.second"),
    ]
    assert members["/data/set"].isdir(), "the verifier works in it"
    assert (told.entries, told.removed, told.left_out) == (1, 1, 6)


@pytest.mark.requirement("R76")
def test_modes_and_times_are_carried_without_the_set_user_bit() -> None:
    """Nanoseconds, before 1970, and none where none was given."""
    times = ("1700000000.123456789", "-1.500000000", "0.000000000", "")
    given = [Item(f"work/{index}", mode=0o7755, mtime=time) for index, time in enumerate(times)]
    _, members, _ = made([*given, Item("work/d", tarfile.DIRTYPE, mode=0o3775)], [])
    assert [members[f"/work/{index}"].pax_headers.get("mtime", "") for index in range(4)] == list(times)
    assert {member.mode for path, member in members.items() if path != "/work/d"} == {0o3755}
    assert members["/work/d"].mode == 0o3775


@pytest.mark.requirement("R76")
def test_more_entries_than_are_looked_at_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deletions count; empty files have no bytes that would."""
    monkeypatch.setattr(overlay, "MAX_ENTRIES", 3)
    made([Item("work/a"), Item("elsewhere/b")], ["/work/c"])
    with pytest.raises(overlay.TooManyChanges):
        made([Item("work/a"), Item("elsewhere/b")], ["/work/c", "/work/d"])


@pytest.mark.requirement("R72", "R76")
def test_directory_closed_to_its_owner_is_open_in_the_fork() -> None:
    """The verifier is the same user; a file stays as locked as it was left."""
    _, members, _ = made([Item("work", tarfile.DIRTYPE, mode=0), Item("work/f", mode=0)], [])
    assert (members["/work"].mode, members["/work/f"].mode) == (0o700, 0)


@pytest.mark.requirement("R76")
def test_omissions_are_counted_and_named_up_to_a_bound() -> None:
    told, _, _ = made([Item(f"work/{n}", tarfile.FIFOTYPE) for n in range(50)], [])
    assert (told.left_out, len(told.left_out_paths)) == (50, 32)


@pytest.mark.requirement("R23", "R76")
def test_many_empty_files_take_little_memory() -> None:
    """How many there are is the agent's choice."""
    count, diff = 5_000, io.BytesIO()
    with tarfile.open(fileobj=diff, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for index in range(count):
            archive.addfile(tarfile.TarInfo(f"work/{index}"))
            archive.members.clear()  # type: ignore[attr-defined]
    diff.seek(0)
    sink = io.BytesIO()
    sink.write(bytes(count * 1100))
    sink.seek(0)
    tracemalloc.start()
    try:
        made = layer(diff, [], ["/work"], sink)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert made.entries == count
    assert most < count * 400
    sink.truncate()
    sink.seek(0)
    with tarfile.open(fileobj=sink) as archive:
        assert len(archive.getmembers()) == count
