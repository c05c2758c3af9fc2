"""Unpacking a tree, which somebody else made: as much work as there is in it, wherever it lies (R89)."""

from __future__ import annotations

import io
import json
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock_sandbox.guest.common import trees


def _archive(place: Path, *members: tuple[str, int, bytes | None]) -> Path:
    """An archive of directories (no content) and files, by name, mode and content."""
    with tarfile.open(place, "w") as archive:
        for name, mode, content in members:
            member = tarfile.TarInfo(name)
            member.mode, member.type = mode, tarfile.DIRTYPE if content is None else tarfile.REGTYPE
            member.size = len(content or b"")
            archive.addfile(member, io.BytesIO(content or b""))
    return place


def _unpacked(archive: Path, target: Path, *, layer: bool = False) -> dict[str, int]:
    source, (result, told) = os.open(archive, os.O_RDONLY), os.pipe()
    request = {
        "job": "write_tree",
        "path": str(target),
        "layer": layer,
        "max_bytes": 1 << 20,
        "max_entries": 100_000,
    }
    try:
        trees.run_job(request, [told, source])
        answer: dict[str, int] = json.loads(os.read(result, 4096))
        return answer
    finally:
        for descriptor in (source, result, told):
            os.close(descriptor)


def _chain(depth: int, mode: int) -> list[tuple[str, int, bytes | None]]:
    return [("/".join("d" * level), mode, None) for level in range(1, depth + 1)]


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many files and directories were opened since it was last asked."""
    counted = 0
    real = os.open

    def counting(*arguments: object, **named: object) -> int:
        nonlocal counted
        counted += 1
        return real(*arguments, **named)  # type: ignore[arg-type]

    def told() -> int:
        nonlocal counted
        answer, counted = counted, 0
        return answer

    monkeypatch.setattr(os, "open", counting)
    return told


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_twice_as_deep_a_tree_is_twice_the_work(
    tmp_path: Path, opens: Callable[[], int], mode: int, *, layer: bool
) -> None:
    """Each directory was reached from the top: a tree of depth 2,000 took two million steps."""
    work = []
    for depth in (100, 200):
        archive, target = _archive(tmp_path / f"{depth}.tar", *_chain(depth, mode)), tmp_path / str(depth)
        opens()
        assert _unpacked(archive, target, layer=layer)["entries"] == depth
        work.append(opens())
        assert (target / "/".join("d" * depth)).stat().st_mode & 0o777 == mode
    assert work[1] < 2.2 * work[0]


@pytest.mark.parametrize("layer", [False, True])
def test_members_in_any_order_land_where_they_belong(tmp_path: Path, *, layer: bool) -> None:
    """The way from one member to the next goes up, down and across."""
    members: list[tuple[str, int, bytes | None]] = [
        ("a/b/c", 0o755, None),
        ("a/b/c/deep", 0o600, b"1"),
        ("a/x", 0o644, b"2"),
        ("e/f/g", 0o644, b"3"),
        ("a/b/y", 0o644, b"4"),
        ("top", 0o644, b"5"),
        ("a/b", 0o700, None),
    ]
    assert _unpacked(_archive(tmp_path / "tar", *members), tmp_path / "to", layer=layer)["entries"] == len(members)
    found = {str(path.relative_to(tmp_path / "to")) for path in (tmp_path / "to").rglob("*") if path.is_file()}
    assert found == {name for name, _, content in members if content is not None}
    for name, mode, content in members:
        assert stat.S_IMODE((tmp_path / "to" / name).stat().st_mode) == mode
        assert content is None or (tmp_path / "to" / name).read_bytes() == content


def test_a_directory_that_is_removed_and_made_anew_is_gone_into_anew(tmp_path: Path) -> None:
    """A layer that removes what was just unpacked leaves nothing of it, and what comes after lands in the new one."""
    members: list[tuple[str, int, bytes | None]] = [
        ("a/b/old", 0o644, b"1"),
        ("a/.wh.b", 0o644, b""),
        ("a/b/new", 0o644, b"2"),
    ]
    _unpacked(_archive(tmp_path / "tar", *members), tmp_path / "to", layer=True)
    assert [path.name for path in (tmp_path / "to/a/b").iterdir()] == ["new"]


def test_a_directory_closed_by_its_archive_is_closed(tmp_path: Path) -> None:
    """Its mode comes last, and the way on from there is found all the same."""
    members: list[tuple[str, int, bytes | None]] = [
        ("a", 0o755, None),
        ("a/closed", 0o000, None),
        ("a/closed/file", 0o644, b"1"),
        ("z", 0o700, None),
    ]
    assert "errno" not in _unpacked(_archive(tmp_path / "tar", *members), tmp_path / "to")
    assert [stat.S_IMODE((tmp_path / "to" / name).stat().st_mode) for name in ("a", "a/closed", "z")] == [
        0o755,
        0o000,
        0o700,
    ]
