"""Places of shared recordings: one creation of a name succeeds, and a place without that is refused."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pydantic import ValidationError

from penstock_sandbox.egress.open_shared_recordings import Unusable, opened_recordings
from penstock_sandbox.egress.recording_stores import Folder, Unfit, check, opened
from penstock_sandbox.settings import SandboxSettings

MANY = 16


@pytest.mark.requirement("R141")
def test_of_many_creations_of_one_name_one_succeeds_and_stays(tmp_path: Path) -> None:
    contents = [os.urandom(20_000) for _ in range(MANY)]
    places = [opened(f"file://{tmp_path}") for _ in range(MANY)]
    with ThreadPoolExecutor(MANY) as pool:
        for name in ("a/b/c", "a/b/d", "e"):
            created = list(pool.map(lambda place, data, name=name: place.create(name, data), places, contents))
            assert created.count(True) == 1
            first = contents[created.index(True)]
            assert places[0].read(name, 0, 30_000) == first and places[1].read(name, 9, 12) == first[9:12]
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["c", "d", "e"]


@pytest.mark.requirement("R141")
def test_readers_never_see_a_part_of_a_file(tmp_path: Path) -> None:
    place = Folder(tmp_path)
    bodies = [bytes([number]) * 1_000_000 for number in range(8)]
    for number, body in enumerate(bodies):
        (tmp_path / f"{number}").write_bytes(body)
    place.send("body", tmp_path / "0")
    with ThreadPoolExecutor(4) as pool:
        sent = [pool.submit(place.send, "body", tmp_path / str(number)) for number in range(8)]
        seen = [pool.submit(place.read, "body", 0, 2_000_000) for _ in range(32)]
    assert not any(one.exception() for one in sent) and {one.result() for one in seen} <= set(bodies)


class Careless(Folder):
    """A store that ignores the condition, as S3's imitations may."""

    def create(self, name: str, data: bytes) -> bool:
        self.replace(name, data)
        return True


class Forgetful(Folder):
    """A file system whose creations are refused after the fact."""

    def create(self, name: str, data: bytes) -> bool:
        there = (self._root / name).exists()
        self.replace(name, data)
        return not there


@pytest.mark.requirement("R141")
@pytest.mark.parametrize("kind", [Careless, Forgetful])
def test_a_place_that_replaces_is_unfit(tmp_path: Path, kind: type[Folder]) -> None:
    with pytest.raises(Unfit, match="although its name is taken"):
        check(kind(tmp_path))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    check(Folder(tmp_path))


class Repeating(Folder):
    """A store whose first answer is lost each time, so that its client asks again."""

    def create(self, name: str, data: bytes) -> bool:
        super().create(name, data)
        return super().create(name, data)


@pytest.mark.requirement("R141")
def test_a_creation_that_finds_itself_makes_no_place_unfit(tmp_path: Path) -> None:
    check(Repeating(tmp_path))


@pytest.mark.requirement("R141")
async def test_an_absent_place_is_refused_at_the_first_start_and_awaited_at_later_ones(tmp_path: Path) -> None:
    own, root = tmp_path / "own", tmp_path / "mounted"
    own.mkdir()
    with pytest.raises(Unusable, match="FileNotFoundError"):
        await opened_recordings(f"file://{root}", own, 60.0)
    assert not root.exists()
    root.mkdir()
    for _ in range(2):
        there = await opened_recordings(f"file://{root}", own, 60.0)
        assert there is not None
        await there.aclose()
    assert not [path for path in root.rglob("*") if path.is_file()]
    root.rename(tmp_path / "away")
    away = await opened_recordings(f"file://{root}", own, 60.0)
    assert away is not None
    await away.aclose()
    with pytest.raises(Unusable, match="other"):
        await opened_recordings(f"file://{root}/other", own, 60.0)
    assert await opened_recordings("", own, 60.0) is None


@pytest.mark.requirement("R141")
@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("gs://bucket/x", "begins with file:// or s3://"),
        ("s3://key:secret@bucket/x", "credentials come from the environment of the sandbox service"),
        ("file://relative", "an absolute path"),
        ("file:///opt/seen/recordings", "within reach of sandboxes"),
        ("file:///opt/x/../seen", "within reach of sandboxes"),
        ("file:///opt", "within reach of sandboxes"),
    ],
)
def test_a_setting_that_cannot_hold_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        SandboxSettings(egress_recordings=url, extra_read_only=(Path("/opt/seen"),), operator_token="t" * 32)
