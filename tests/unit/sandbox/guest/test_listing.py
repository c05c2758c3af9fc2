"""Listing a directory costs as many looks as it has entries, whatever the size of its pages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock_sandbox.guest.common import files

ENTRIES = 1_000


class Looks:
    """How often a directory was read, and how many entries were looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scans = self.scanned = self.stats = 0
        scandir, lstat = os.scandir, os.lstat

        @contextmanager
        def scanning(folder: Any) -> Iterator[Iterator[os.DirEntry[str]]]:
            self.scans += 1
            with scandir(folder) as entries:
                yield self._counted(entries)

        def looking(*args: Any, **named: Any) -> os.stat_result:
            self.stats += 1
            return lstat(*args, **named)

        monkeypatch.setattr(os, "scandir", scanning)
        monkeypatch.setattr(os, "lstat", looking)

    def _counted(self, entries: Iterator[os.DirEntry[str]]) -> Iterator[os.DirEntry[str]]:
        for entry in entries:
            self.scanned += 1
            yield entry


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with many entries."""
    for number in range(ENTRIES):
        (tmp_path / f"{number:04}").touch()
    return tmp_path


def page(folder: Path, after: str, limit: int) -> tuple[list[str], str]:
    """The names of a page, and where the next one begins."""
    answer, _ = files.list_directory({"path": str(folder), "after": after, "limit": limit})
    return [entry["name"] for entry in answer["entries"]], answer["last"]


@pytest.mark.requirement("R98")
@pytest.mark.parametrize("limit", [1, 7, 100, 5_000])
def test_a_directory_is_read_once_for_all_its_pages(folder: Path, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand pages of one entry are one reading of the directory, and one look at each entry."""
    looks = Looks(monkeypatch)
    names, after = page(folder, "", limit)
    while after:
        more, after = page(folder, after, limit)
        names += more
    assert names == [f"{number:04}" for number in range(ENTRIES)]
    assert (looks.scans, looks.scanned, looks.stats) == (1, ENTRIES, ENTRIES)


@pytest.mark.requirement("R98")
def test_a_listing_that_was_dropped_goes_on_where_it_was(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What is kept is bounded, and who comes back late is told the rest."""
    first, after = page(folder, "", 400)
    for number in range(10):
        other = tmp_path_factory.mktemp(f"other{number}")
        for name in "abc":
            (other / name).touch()
        assert page(other, "", 1) == (["a"], "a")
    rest, end = page(folder, after, ENTRIES)
    assert (first + rest, end) == ([f"{number:04}" for number in range(ENTRIES)], "")


@pytest.mark.requirement("R26", "R72")
def test_new_listing_shows_the_present_entries(folder: Path) -> None:
    """Never what was kept for somebody else's next page."""
    page(folder, "", 10)
    (folder / "0000").unlink()
    (folder / "0001a").touch()
    assert page(folder, "", 3)[0] == ["0001", "0001a", "0002"]


@pytest.mark.requirement("R13", "R98")
def test_a_directory_beyond_the_bound_is_refused_as_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after all of it is in memory."""
    monkeypatch.setattr(files, "MOST_LISTED", 100)
    looks = Looks(monkeypatch)
    with pytest.raises(files.Refused, match="more than 100 entries"):
        page(folder, "", 10)
    assert looks.scanned == 101
