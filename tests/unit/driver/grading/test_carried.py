"""An agent's work between the deletion of its sandbox and its grade."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from penstock_driver.domain.rollout import ArtifactCollected, Cause, Changes, Failure, Phase
from penstock_driver.grading.carried import CarriedWork, Fetched, Work, remove_others

CHANGES = Changes(3, 120, 1, 2, ("/a", "/b"))
ARTIFACTS: list[Fetched] = [
    ArtifactCollected("log", b"\x00text", 9),
    Failure(Cause.AGENT, "ARTIFACT_MISSING", "the agent left no patch", False, Phase.VERIFYING),
]


@pytest.mark.requirement("R127")
@pytest.mark.parametrize("size", [0, 100, 1 << 20])
async def test_carried_work_is_read_as_it_was_written(tmp_path: Path, size: int) -> None:
    """Whatever its size; a second writing replaces the first."""
    layer = bytes(range(256)) * (size // 256) + b"\n" * (size % 256)
    carried = CarriedWork(tmp_path / "carried", "r.d0.1")
    await carried.write(Work(Changes(0, 0, 0, 0), [], io.BytesIO(b"before")), 6)
    await carried.write(Work(CHANGES, ARTIFACTS, io.BytesIO(layer)), len(layer))
    work = carried.read()
    with work.layer:
        assert (work.changes, work.artifacts, work.layer.read()) == (CHANGES, ARTIFACTS, layer)
    await carried.remove()
    await carried.remove()
    with pytest.raises(FileNotFoundError):
        carried.read()


@pytest.mark.requirement("R127")
async def test_files_of_rollouts_that_have_ended_are_removed(tmp_path: Path) -> None:
    """And those that a killed driver had not finished."""
    remove_others(tmp_path / "carried", [])
    kept, gone = CarriedWork(tmp_path, "kept"), CarriedWork(tmp_path, "gone")
    for carried in (kept, gone):
        await carried.write(Work(CHANGES, ARTIFACTS, io.BytesIO(b"")), 0)
    (tmp_path / "half.new").write_bytes(b"")
    remove_others(tmp_path, ["kept"])
    assert len(list(tmp_path.iterdir())) == 1
    kept.read().layer.close()
