"""A layer becomes a directory for overlayfs, and a hostile one becomes nothing but a refusal."""

from __future__ import annotations

import gzip
import io
import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zstandard
from tests.support.images.registry import Entry, digest, entry, layer

from penstock_sandbox.backends.images import unpack
from penstock_sandbox.backends.images.unpack import Refused, Unpacked

_MANY = 1_000_000


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _unpack(folder: Path, content: bytes, most_bytes: int = _MANY, most_entries: int = 100) -> Unpacked:
    with _opened(folder) as root:
        return unpack.unpack(io.BytesIO(content), root, most_bytes, most_entries)


def _refused(tmp_path: Path, *entries: Entry) -> Refused:
    with pytest.raises(Refused) as refused:
        _unpack(tmp_path / "layer", layer(entries))
    return refused.value


def test_files_modes_times_and_links_are_those_of_the_layer(tmp_path: Path) -> None:
    content = layer(
        [
            entry("./", mode=0o700),
            entry("a/", mode=0o555, mtime=5),
            entry("a/b", b"hello", mode=0o640, mtime=7.5),
            entry("a/c", kind=tarfile.LNKTYPE, linkname="a/b"),
            entry("a/d", kind=tarfile.SYMTYPE, linkname="/etc/passwd"),
            entry("a/e", kind=tarfile.FIFOTYPE),
            entry("new/deep/file", b""),
        ]
    )
    done = _unpack(tmp_path / "layer", gzip.compress(content))
    root = tmp_path / "layer"
    # With the two directories that have no member of their own.
    assert done == Unpacked(digest(content), 5, 9)
    assert (root / "a/b").read_bytes() == b"hello" and (root / "a/b").stat().st_nlink == 2
    assert (root / "a/b").stat().st_mtime == 7.5 and (root / "a").stat().st_mtime == 5
    assert stat.S_IMODE((root / "a").stat().st_mode) == 0o555 and stat.S_IMODE((root / "a/b").stat().st_mode) == 0o640
    assert (root / "a/d").readlink() == Path("/etc/passwd")
    assert stat.S_ISFIFO((root / "a/e").lstat().st_mode)
    assert stat.S_IMODE(root.stat().st_mode) == 0o755, "others must be able to enter it"


@pytest.mark.requirement("R142")
def test_a_layer_of_zstd_may_be_many_frames_and_notes(tmp_path: Path) -> None:
    """As layers are that can be read in parts: their index is a frame that holds no data."""
    content = layer([entry("a", b"hello"), entry("b", os.urandom(3000))])
    notes = b"\x5a\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"notes"
    frames = [zstandard.compress(content[start : start + 1000]) for start in range(0, len(content), 1000)]
    for number, blob in enumerate((zstandard.compress(content), b"".join([notes, *frames, notes]))):
        done = _unpack(tmp_path / str(number), blob)
        assert done.diff_id == digest(content) and (tmp_path / str(number) / "a").read_bytes() == b"hello"


def test_a_frame_that_asks_for_more_memory_than_others_is_refused(tmp_path: Path) -> None:
    chosen = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=chosen).compressobj()
    blob = compressor.compress(layer([entry("a", b"x")])) + compressor.flush()
    with pytest.raises(Refused) as refused:
        _unpack(tmp_path / "layer", blob)
    assert refused.value.kind == unpack.DAMAGED


def test_deletions_become_whiteouts_and_opaque_directories(tmp_path: Path) -> None:
    root = tmp_path / "layer"
    _unpack(
        root,
        layer(
            [
                entry(".wh.gone", b""),
                entry("own/"),
                entry("own/.wh..wh..opq", b""),
                entry("own/file", b"x"),
                # A deletion is of what the layers below have; what this one has stays, in either order.
                entry("kept", b"y"),
                entry(".wh.kept", b""),
                entry(".wh.again", b""),
                entry("again/"),
                entry(".wh..wh.plnk/1.2", b""),
            ]
        ),
    )
    gone = (root / "gone").lstat()
    assert stat.S_ISCHR(gone.st_mode) and gone.st_rdev == 0
    assert os.getxattr(root / "own", unpack.OPAQUE) == b"y" and (root / "own/file").read_bytes() == b"x"
    assert (root / "kept").read_bytes() == b"y"
    assert os.getxattr(root / "again", unpack.OPAQUE) == b"y"
    assert sorted(path.name for path in root.iterdir()) == ["again", "gone", "kept", "own"]


def test_the_last_of_two_entries_of_a_name_counts(tmp_path: Path) -> None:
    root = tmp_path / "layer"
    _unpack(root, layer([entry("a/"), entry("a/b", b"1"), entry("a", b"2"), entry("c", b"3"), entry("c/")]))
    assert (root / "a").read_bytes() == b"2" and (root / "c").is_dir()


@pytest.mark.requirement("R142")
def test_no_device_set_user_id_bit_owner_or_attribute_is_taken(tmp_path: Path) -> None:
    root = tmp_path / "layer"
    program = entry("program", b"x", mode=0o6755, uid=12345, pax_headers={"SCHILY.xattr.user.overlay.redirect": "/etc"})
    _unpack(
        root,
        layer(
            [
                program,
                entry("null", kind=tarfile.CHRTYPE, devmajor=1, devminor=3),
                entry("disk", kind=tarfile.BLKTYPE, devmajor=8),
            ]
        ),
    )
    assert [path.name for path in root.iterdir()] == ["program"]
    found = (root / "program").stat()
    assert stat.S_IMODE(found.st_mode) == 0o755 and found.st_uid == os.geteuid()
    assert os.listxattr(root / "program") == []


@pytest.mark.requirement("R142")
@pytest.mark.parametrize("path", ["../out", "a/../../out", "/../out", "a/.."])
def test_a_path_that_leads_up_is_refused(tmp_path: Path, path: str) -> None:
    assert _refused(tmp_path, entry("a/"), entry(path, b"x")).kind == unpack.UNSAFE
    assert not (tmp_path / "out").exists()


@pytest.mark.requirement("R142")
@pytest.mark.parametrize("target", ["/", "..", "/etc", "b"])
def test_a_path_through_a_link_is_refused(tmp_path: Path, target: str) -> None:
    attack = (entry("b/"), entry("a", kind=tarfile.SYMTYPE, linkname=target), entry("a/planted", b"x"))
    assert _refused(tmp_path, *attack).kind == unpack.UNSAFE
    assert not (tmp_path / "planted").exists() and not Path("/planted").exists()


@pytest.mark.requirement("R142")
def test_a_file_replaces_a_link_and_is_not_written_through_it(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    _unpack(
        tmp_path / "layer",
        layer([entry("a", kind=tarfile.SYMTYPE, linkname=str(victim)), entry("a", b"planted")]),
    )
    assert victim.read_text() == "mine" and (tmp_path / "layer/a").read_bytes() == b"planted"


@pytest.mark.requirement("R142")
@pytest.mark.parametrize("target", ["../victim", "link/victim", "folder", "", "absent"])
def test_a_hard_link_out_of_the_layer_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "victim").write_text("mine")
    attack = (
        entry("folder/"),
        entry("link", kind=tarfile.SYMTYPE, linkname=".."),
        entry("a", kind=tarfile.LNKTYPE, linkname=target),
    )
    assert _refused(tmp_path, *attack).kind in (unpack.UNSAFE, unpack.DAMAGED)
    assert (tmp_path / "victim").stat().st_nlink == 1


@pytest.mark.parametrize("name", [".wh.", ".wh...", ".wh.."])
def test_a_deletion_of_no_name_is_refused(tmp_path: Path, name: str) -> None:
    assert _refused(tmp_path, entry(name, b"")).kind == unpack.UNSAFE


@pytest.mark.requirement("R142")
@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_a_bomb_is_refused_before_it_is_written(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    bomb = compress(layer([entry("zeros", b"\0" * 4 * _MANY)]))
    assert len(bomb) < _MANY
    with pytest.raises(Refused) as refused:
        _unpack(tmp_path / "layer", bomb)
    assert refused.value.kind == unpack.LARGE
    assert not any((tmp_path / "layer").iterdir())


@pytest.mark.requirement("R142")
def test_a_file_with_holes_counts_with_its_length(tmp_path: Path) -> None:
    member = tarfile.TarInfo("holes")
    member.size = 512
    member.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "holes",
        "GNU.sparse.realsize": str(10**12),
    }
    content = layer([(member, b"1\n0\n0\n".ljust(512, b"\0"))])
    with pytest.raises(Refused) as refused:
        _unpack(tmp_path / "layer", content)
    assert refused.value.kind == unpack.LARGE


def test_entries_and_lengths_of_paths_are_bounded(tmp_path: Path) -> None:
    with pytest.raises(Refused) as refused:
        _unpack(tmp_path / "layer", layer([entry(f"f{number}", b"") for number in range(6)]), most_entries=5)
    assert refused.value.kind == unpack.LARGE
    # Directories that are no members count before they are made.
    with pytest.raises(Refused) as refused:
        _unpack(
            tmp_path / "deep",
            layer([entry(f"{number}/" + "d/" * 4 + "f", b"") for number in range(3)]),
            most_entries=16,
        )
    assert refused.value.kind == unpack.LARGE
    assert _unpack(tmp_path / "all", layer([entry("a/b/f", b""), entry("a/c/f", b"")])).entries == 5
    assert _refused(tmp_path, entry("d/" * 3000, b"x")).kind == unpack.UNSAFE


@pytest.mark.parametrize(
    "content",
    [
        gzip.compress(layer([entry("a", b"x" * 100)]))[:-20],
        layer([entry("a", b"x" * 5000)])[:2000],
        b"no tar at all",
        b"\x28\xb5\x2f\xfd zstd",
        zstandard.compress(layer([entry("a", os.urandom(5000))]))[:-2000],
    ],
    ids=["gzip cut", "tar cut", "no tar", "no zstd", "zstd cut"],
)
def test_a_damaged_layer_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(Refused) as refused:
        _unpack(tmp_path / "layer", content)
    assert refused.value.kind == unpack.DAMAGED


@pytest.mark.requirement("R142")
@pytest.mark.parametrize(
    "headers",
    [
        {"GNU.sparse.realsize": str(-(10**15))},
        {"GNU.sparse.map": f"{64 << 20},0", "GNU.sparse.size": str(64 << 20)},
    ],
    ids=["a negative size", "a hole that no size counts"],
)
def test_what_is_written_is_counted_whatever_extended_headers_say(tmp_path: Path, headers: dict[str, str]) -> None:
    """A few hundred bytes would otherwise become as many zeros as their author likes."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("big")
        member.pax_headers = headers
        archive.addfile(member)
    with pytest.raises(Refused) as refused:
        _unpack(tmp_path / "layer", content.getvalue())
    assert refused.value.kind in (unpack.DAMAGED, unpack.LARGE)
    assert sum(one.stat().st_blocks * 512 for one in (tmp_path / "layer").iterdir()) <= _MANY
