"""What a prepared job differs by is carried into another one of its image: nothing more, nothing less."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_sandbox.guest import change_archive

_NAMES = st.sampled_from(["a", "b", "a/c", "a/d", "a/d/e", "kept", "old", "old/f", "old/g", "\udcff", "ü" * 60])
_MODES = st.sampled_from([0o600, 0o644, 0o755, 0o4711, 0o2775, 0o000])
_WHAT = st.sampled_from(["write", "folder", "symlink", "link", "pipe", "chmod", "remove", "move"])
_CHANGES = st.lists(st.tuples(_WHAT, _NAMES, _NAMES, _MODES, st.binary(max_size=40)), max_size=14)


def image(box: Path) -> None:
    """What every job begins with."""
    (box / "old").mkdir(parents=True)
    (box / "old/f").write_bytes(b"f")
    os.link(box / "old/f", box / "old/g")
    (box / "kept").write_bytes(b"kept")
    (box / "kept").chmod(0o640)
    for path in (*box.rglob("*"), box):
        # An image is older than what is done in it; the clock of files is too coarse for a test.
        os.utime(path, (1_600_000_000, 1_600_000_000))


def change(box: Path, what: str, name: str, other: str, mode: int, content: bytes) -> None:
    """One thing that a setup may do; what cannot be done where it is tried is not."""
    path, more = box / name, box / other
    try:
        match what:
            case "write" if not path.is_fifo():  # where it would wait for a reader
                path.write_bytes(content)
            case "folder":
                path.mkdir(parents=True)
            case "symlink":
                path.symlink_to(other)
            case "link":
                os.link(path, more, follow_symlinks=False)
            case "pipe":
                os.mkfifo(path)
            case "chmod":
                path.chmod(mode | (0o700 if path.is_dir() else 0), follow_symlinks=False)
            case "remove":
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            case "move":
                path.rename(more)
    except (OSError, NotImplementedError):
        return


def described(box: Path) -> dict[str, object]:
    """Everything of a tree that is carried; files by the set of their names, so that links are told."""
    found: dict[str, object] = {}
    same: dict[int, list[str]] = {}
    for path in sorted(box.rglob("*"), key=os.fsencode):
        status = path.lstat()
        name = str(path.relative_to(box))
        kind = stat.S_IFMT(status.st_mode)
        content: object = ""
        if stat.S_ISREG(status.st_mode):
            same.setdefault(status.st_ino, []).append(name)
            content = _read(path)
        elif stat.S_ISLNK(status.st_mode):
            content = path.readlink()
        mode = 0 if stat.S_ISLNK(status.st_mode) else stat.S_IMODE(status.st_mode)
        when = 0.0 if stat.S_ISLNK(status.st_mode) else round(status.st_mtime, 4)
        found[name] = (kind, mode, status.st_uid, status.st_gid, when, content)
    found["links"] = sorted(names for names in same.values() if len(names) > 1)
    return found


def _read(path: Path) -> bytes:
    mode = stat.S_IMODE(path.stat().st_mode)
    path.chmod(mode | 0o400)
    try:
        return path.read_bytes()
    finally:
        path.chmod(mode)


@pytest.mark.requirement("R57", "R76")
@settings(max_examples=50)
@given(_CHANGES)
def test_a_fresh_job_becomes_the_prepared_one_whatever_was_done_to_that(
    changes: list[tuple[str, str, str, int, bytes]],
) -> None:
    """Contents, modes, owners, times, links of both kinds, pipes, and what is gone."""
    if os.geteuid() != 0:
        # As in a job, where it runs as root: what its owner may not read would not be carried.
        changes = [(what, name, other, mode | 0o600, content) for what, name, other, mode, content in changes]
    with tempfile.TemporaryDirectory() as folder:
        # The same path in both, as in two jobs; the second is below another root.
        box, fresh = Path(folder, "box"), Path(folder, "fresh")
        notes, archive = str(Path(folder, "notes")), str(Path(folder, "archive"))
        for root in (box, Path(f"{fresh}{box}")):
            image(root)
        change_archive.remember(notes, [os.fsencode(box)])
        for one in changes:
            change(box, *one)
        change_archive.capture(notes, archive, [os.fsencode(box)], None, 1 << 20)
        change_archive.restore(archive, os.fsencode(fresh))
        assert described(Path(f"{fresh}{box}")) == described(box)


@pytest.mark.requirement("R57")
def test_what_a_directory_had_is_not_deleted_behind_the_link_that_replaced_it(tmp_path: Path) -> None:
    """Restored twice, as by a repeated request; a link to itself is no obstacle either."""
    box, elsewhere = tmp_path / "box", tmp_path / "elsewhere"
    notes, archive = str(tmp_path / "notes"), str(tmp_path / "archive")
    for name in ("one", "two"):
        (box / name).mkdir(parents=True)
        (box / name / "f").write_bytes(b"old")
    change_archive.remember(notes, [os.fsencode(box)])
    for name, target in (("one", elsewhere), ("two", box / "two")):
        (box / name / "f").unlink()
        (box / name).rmdir()
        (box / name).symlink_to(target)
    elsewhere.mkdir()
    (elsewhere / "f").write_bytes(b"kept")
    change_archive.capture(notes, archive, [os.fsencode(box)], None, 1 << 20)
    for _ in range(2):
        change_archive.restore(archive)
    assert (elsewhere / "f").read_bytes() == b"kept"
    assert [(box / name).readlink() for name in ("one", "two")] == [elsewhere, box / "two"]


@pytest.mark.requirement("R57")
@settings(max_examples=50)
@given(_CHANGES, _CHANGES)
def test_capture_of_a_fork_includes_its_snapshots_changes(
    lower: list[tuple[str, str, str, int, bytes]], upper: list[tuple[str, str, str, int, bytes]]
) -> None:
    """A fork is noted before it becomes one, so that its own archive needs no other."""
    if os.geteuid() != 0:
        lower, upper = [], []
    with tempfile.TemporaryDirectory() as folder:
        box = Path(folder, "box")
        second, third = Path(folder, "second"), Path(folder, "third")
        notes, archive = str(Path(folder, "notes")), str(Path(folder, "archive"))
        for root in (box, Path(f"{third}{box}")):
            image(root)
        change_archive.remember(notes, [os.fsencode(box)])
        for one in (*lower, *upper):
            change(box, *one)
        change_archive.capture(notes, archive, [os.fsencode(box)], None, 1 << 20)
        image(Path(f"{second}{box}"))
        for root in (second, third):
            change_archive.restore(archive, os.fsencode(root))
            change_archive.restore(archive, os.fsencode(root))  # nothing of it depends on what is there
        assert described(Path(f"{second}{box}")) == described(Path(f"{third}{box}")) == described(box)


@pytest.mark.requirement("R26")
def test_more_than_is_allowed_is_refused(tmp_path: Path) -> None:
    """By its size before anything is packed, with an exit code of its own."""
    (tmp_path / "box").mkdir()
    box, notes, archive = tmp_path / "box", str(tmp_path / "notes"), tmp_path / "archive"
    change_archive.remember(notes, [os.fsencode(box)])
    os.truncate(os.open(box / "large", os.O_CREAT | os.O_WRONLY), 1 << 40)
    with pytest.raises(change_archive.TooMuch):
        change_archive.capture(notes, str(archive), [os.fsencode(box)], None, 1 << 30)
    assert not archive.exists()


@pytest.mark.requirement("R44")
def test_an_archive_that_is_not_what_was_sent_is_not_unpacked(tmp_path: Path) -> None:
    """Its digest is checked before the first member is."""
    archive = tmp_path / "archive"
    archive.write_bytes(b"cut off")
    command = [sys.executable, "-I", "-S", change_archive.__file__, "restore", str(archive), "--digest", "0" * 64]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "does not match its digest" in done.stderr


_USER = (1000, 1000)


@pytest.mark.requirement("R52")
@pytest.mark.parametrize(
    ("mode", "uid", "gid", "may"),
    [
        (stat.S_IFREG | 0o644, 1000, 0, True),
        (stat.S_IFREG | 0o644, 0, 0, False),
        (stat.S_IFREG | 0o664, 0, 1000, True),
        (stat.S_IFREG | 0o606, 0, 1000, False),
        (stat.S_IFREG | 0o666, 0, 0, True),
        (stat.S_IFLNK | 0o777, 0, 0, False),
        (stat.S_IFLNK | 0o777, 1000, 0, True),
    ],
)
def test_only_what_a_workload_may_write_is_believed_its_own(mode: int, uid: int, gid: int, may: bool) -> None:
    """What changed elsewhere is the machine's, and stays with it."""
    noted = [mode, uid, gid, 0, 0, 0]
    assert change_archive.may_write(noted, _USER) is may
    assert change_archive.may_write(noted, None)


@pytest.mark.requirement("R52")
@pytest.mark.parametrize(
    ("folder", "uid", "may"),
    [
        ([stat.S_IFDIR | 0o755, 0, 0], 1000, False),
        ([stat.S_IFDIR | 0o755, 1000, 0], 0, True),
        ([stat.S_IFDIR | 0o777, 0, 0], 0, True),
        ([stat.S_IFDIR | 0o1777, 0, 0], 0, False),
        ([stat.S_IFDIR | 0o1777, 0, 0], 1000, True),
    ],
)
def test_files_that_the_workload_could_not_delete_stay(folder: list[int], uid: int, may: bool) -> None:
    noted = [stat.S_IFREG | 0o644, uid, 0, 0, 0, 0]
    assert change_archive.may_delete(noted, [*folder, 0, 0, 0], _USER) is may
    assert change_archive.may_delete(noted, [*folder, 0, 0, 0], None)
