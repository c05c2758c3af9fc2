"""A copied layer is the layer: whatever overlayfs reads of it is the same."""

from __future__ import annotations

import errno
import io
import os
import resource
import stat
import tarfile
from pathlib import Path

import pytest
from tests.support.services.processes import descriptors

from penstock_sandbox.backends.host import layers
from penstock_sandbox.backends.host.copying import copy
from penstock_sandbox.guest.common import files as guest_files
from penstock_sandbox.guest.common import walk


def described(folder: Path) -> dict[str, tuple[object, ...]]:
    """Every path below `folder`, with all that must be kept."""
    found: dict[str, tuple[object, ...]] = {}
    for parent, folders, files, opened in os.fwalk(folder):
        found[os.path.relpath(parent, folder)] = _facts(os.fstat(opened), sorted(os.listxattr(opened)))
        for name in (*folders, *files):
            status = os.lstat(name, dir_fd=opened)
            content: object = None
            if stat.S_ISREG(status.st_mode):
                content = Path(parent, name).read_bytes()
            elif stat.S_ISLNK(status.st_mode):
                content = os.readlink(name, dir_fd=opened)
            found[os.path.relpath(Path(parent, name), folder)] = (*_facts(status, content),)
    return found


def _facts(status: os.stat_result, content: object) -> tuple[object, ...]:
    links = status.st_nlink if stat.S_ISREG(status.st_mode) else 0
    return status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, status.st_rdev, links, content


@pytest.mark.requirement("R52")
def test_owners_modes_times_links_whiteouts_and_opaque_directories_are_kept(tmp_path: Path) -> None:
    source = tmp_path / "upper"
    (source / "opaque/below").mkdir(parents=True)
    os.setxattr(source / "opaque", "user.overlay.opaque", b"y")
    (source / "opaque/file").write_bytes(b"content")
    os.link(source / "opaque/file", source / "opaque/below/hard")
    (source / "opaque/file").chmod(0o4711)
    (source / "soft").symlink_to("/etc/passwd")
    (source / "dangling").symlink_to("nowhere")
    os.mknod(source / "whiteout", stat.S_IFCHR, 0)
    os.mkfifo(source / "pipe", 0o620)
    (source / os.fsdecode(b"odd \xff\n name")).write_bytes(b"")
    if os.geteuid() == 0:
        os.chown(source / "opaque/file", 61234, 61235)
        os.chown(source / "soft", 61234, 61235, follow_symlinks=False)
    os.utime(source / "opaque", ns=(1, 1_000_000_007))
    before = described(source)
    assert copy(source, tmp_path / "copy") == len(b"content")
    assert described(tmp_path / "copy") == before == described(source)


@pytest.mark.requirement("R44", "R52")
def test_holes_stay_holes_and_large_files_are_whole(tmp_path: Path) -> None:
    source = tmp_path / "upper"
    source.mkdir()
    with (source / "holes").open("wb") as file:
        file.write(os.urandom(5000))
        file.seek(50 << 20)
        file.write(b"end")
        file.truncate(100 << 20)
    (source / "large").write_bytes(content := os.urandom(20 << 20))
    assert copy(source, tmp_path / "copy") == (100 << 20) + len(content)
    assert (tmp_path / "copy/large").read_bytes() == content
    assert (tmp_path / "copy/holes").read_bytes() == (source / "holes").read_bytes()
    assert (tmp_path / "copy/holes").stat().st_blocks <= 64


@pytest.mark.requirement("R80")
def test_a_tree_deeper_than_any_path_can_say_is_copied_and_removed(tmp_path: Path) -> None:
    """An agent makes such trees in a second."""
    source = tmp_path / "upper"
    source.mkdir()
    opened = os.open(source, os.O_RDONLY)
    for _ in range(300):
        os.mkdir("d" * 100, dir_fd=opened)
        below = os.open("d" * 100, os.O_RDONLY, dir_fd=opened)
        os.close(opened)
        opened = below
    os.close(os.open("last", os.O_CREAT | os.O_WRONLY, dir_fd=opened))
    os.close(opened)
    open_at_once: list[int] = []

    def count() -> bool:
        open_at_once.append(len(list(Path("/proc/self/fd").iterdir())))
        return False

    copy(source, tmp_path / "copy", count)
    assert len(open_at_once) == 301 and max(open_at_once) == open_at_once[0]
    opened, depth = os.open(tmp_path / "copy", os.O_RDONLY), 0
    while (name := next(os.scandir(opened)).name) != "last":
        below = os.open(name, os.O_RDONLY, dir_fd=opened)
        os.close(opened)
        opened, depth = below, depth + 1
    os.close(opened)
    assert depth == 300
    for folder in (source, tmp_path / "copy"):
        layers.remove(folder)
        assert not folder.exists()


@pytest.mark.requirement("R49")
def test_failed_copy_leaves_no_descriptor_open(tmp_path: Path) -> None:
    source = tmp_path / "upper"
    (source / "a").mkdir(parents=True)
    (tmp_path / "copy").mkdir()
    with pytest.raises(FileExistsError):
        copy(source, tmp_path / "copy")
    with pytest.raises(FileNotFoundError):
        copy(tmp_path / "absent", tmp_path / "other")
    assert not [path for path in descriptors() if path.is_relative_to(tmp_path)]


@pytest.mark.requirement("R49")
def test_copy_without_enough_descriptors_fails_and_keeps_none(tmp_path: Path) -> None:
    source = tmp_path / "upper"
    (source / "a").mkdir(parents=True)
    (source / "a/file").touch()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    failures = 0
    try:
        for limit in range(3, highest + 20):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
            try:
                copy(source, tmp_path / f"copy{limit}")
            except OSError as error:
                assert error.errno == errno.EMFILE
                failures += 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (tmp_path / f"copy{highest + 19}/a/file").exists() and failures > 3
    assert not [path for path in descriptors() if path.is_relative_to(tmp_path)]


@pytest.mark.requirement("R80")
def test_hard_links_at_any_depth_are_kept_if_a_path_can_say_the_first(tmp_path: Path) -> None:
    source = tmp_path / "upper"
    source.mkdir()
    (source / "first").write_bytes(b"content")
    (tmp_path / "other").write_bytes(b"other")
    opened = os.open(source, os.O_RDONLY)
    for depth in range(60):
        os.link(source / "first", "name", dst_dir_fd=opened)
        if depth in (50, 55):
            os.link(tmp_path / "other", "deep", dst_dir_fd=opened)
        os.mkdir("d" * 100, dir_fd=opened)
        below = os.open("d" * 100, os.O_RDONLY, dir_fd=opened)
        os.close(opened)
        opened = below
    os.close(opened)
    assert copy(source, tmp_path / "copy") == len(b"content") + 2 * len(b"other")
    assert (tmp_path / "copy/first").stat().st_nlink == 61


@pytest.mark.requirement("R44", "R52")
def test_what_another_walk_has_opened_for_a_while_is_copied_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while the sandbox is measured: what is closed to its owner is open to both, until the last has left it."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    source = tmp_path / "source"
    closed, file = source / "closed", source / "closed/file"
    closed.mkdir(parents=True)
    file.write_bytes(b"x")
    file.chmod(0o000)
    closed.chmod(0o000)

    def modes(top: Path) -> tuple[int, int]:
        return mode(top / "closed"), mode(top / "closed/file")

    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    measuring = walk.walk(str(source), unlocks=True)
    assert [next(measuring)[1] for _ in range(2)] == ["closed", "file"]
    folder = os.open(closed, os.O_RDONLY)
    reading = guest_files.unlocked(folder, "file")
    assert reading is not None and modes(source) == (0o700, 0o700)
    copy(source, tmp_path / "copy")
    assert modes(tmp_path / "copy") == (0, 0)
    # Those that began before still need them open.
    assert modes(source) == (0o700, 0o700)
    described = [piece for piece in layers.diff(source) if isinstance(piece, bytes)]
    with tarfile.open(fileobj=io.BytesIO(b"".join(described))) as archive:
        assert {member.name: member.mode for member in archive} == {"closed": 0, "closed/file": 0}
    reading.lock(folder, "file")
    os.close(folder)
    assert list(measuring) == []
    assert modes(source) == (0, 0) and not guest_files._unlocked


@pytest.mark.requirement("R44", "R67")
def test_a_directory_that_is_moved_while_it_is_open_for_a_while_is_forgotten(tmp_path: Path) -> None:
    closed = tmp_path / "source/closed"
    closed.mkdir(parents=True)
    (closed / "file").write_bytes(b"x")
    closed.chmod(0o000)
    walking = walk.walk(str(tmp_path / "source"), unlocks=True)
    assert [next(walking)[1] for _ in range(2)] == ["closed", "file"]
    assert guest_files._unlocked
    closed.rename(tmp_path / "moved")
    assert list(walking) == [] and not guest_files._unlocked
