"""The file with what an attempt replays: whole, or not loaded at all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.chat.v1 import completion_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock_driver.grading.carried import remove_others
from penstock_driver.rollouts.recovery import replayed_answers
from penstock_driver.rollouts.recovery.replayed_answers import RecordingFile


def calls(count: int) -> list[trajectory_pb2.Call]:
    """Calls with completions, and one without."""
    answered = [
        trajectory_pb2.Call(call_id=f"c{number}", completion=completion_pb2.Completion(engine="x" * 50))
        for number in range(count)
    ]
    return [*answered, trajectory_pb2.Call(call_id="open")]


async def captured(count: int) -> AsyncIterator[trajectory_pb2.Trajectory]:
    for call in calls(count):
        yield trajectory_pb2.Trajectory(calls=[call])


async def test_a_recording_is_read_as_it_was_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replayed_answers, "PART_BYTES", 200)
    file = RecordingFile(tmp_path / "recordings", "r1")
    await file.write(captured(10), 2, exact=True)
    parts = list(file.parts())
    assert len(parts) > 1 and {part.exact for part in parts} == {True}
    assert [call.call_id for part in parts for call in part.calls] == [f"c{number}" for number in range(10)]
    assert {(part.rollout_id, part.recorded_rollout_id, part.recorded_attempt) for part in parts} == {("r1", "r1", 2)}
    assert await file.count() == 10
    file.remove()
    assert not file.is_there


async def test_a_shorter_attempt_leaves_the_recording_as_it_is(tmp_path: Path) -> None:
    file = RecordingFile(tmp_path, "r1")
    await file.write(captured(3), 1, exact=False)
    await file.write(captured(0), 2, exact=False)
    await file.write(captured(2), 3, exact=False)
    assert await file.count() == 3
    await file.write(captured(3), 4, exact=False)
    assert {part.recorded_attempt for part in file.parts()} == {4}


@pytest.mark.parametrize("damage", ["cut", "garbage"])
async def test_a_damaged_recording_is_not_read_in_part(tmp_path: Path, damage: str) -> None:
    file = RecordingFile(tmp_path, "r1")
    await file.write(captured(3), 1, exact=False)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    path.write_bytes(data[:-5] if damage == "cut" else data[:4] + b"\xff" * (len(data) - 4))
    with pytest.raises(ValueError, match="recording is"):
        await file.count()
    await file.write(captured(1), 2, exact=False)
    assert await file.count() == 1, "a damaged file is no reason to keep it"


async def test_a_start_removes_the_recordings_of_ended_rollouts(tmp_path: Path) -> None:
    for name in ("r1", "r2"):
        await RecordingFile(tmp_path, name).write(captured(1), 1, exact=False)
    remove_others(tmp_path, ["r2"])
    assert not RecordingFile(tmp_path, "r1").is_there and RecordingFile(tmp_path, "r2").is_there


async def test_results_of_host_tools_are_recorded_beside_the_calls(tmp_path: Path) -> None:
    """They are read only of an attempt that has some."""
    asked: list[str] = []

    async def results() -> AsyncIterator[trajectory_pb2.HostToolCall]:
        asked.append("results")
        for number in range(3):
            yield trajectory_pb2.HostToolCall(tool_call_id=f"t{number}", result_json='{"text": "done"}')

    async def with_tools() -> AsyncIterator[trajectory_pb2.Trajectory]:
        yield trajectory_pb2.Trajectory(calls=calls(2))
        yield trajectory_pb2.Trajectory(host_tool_calls=[trajectory_pb2.HostToolCall(tool_call_id="t0")])

    file = RecordingFile(tmp_path, "r1")
    assert await file.attempt() == 0
    await file.write(captured(2), 1, exact=False, results=results)
    assert asked == [] and await file.attempt() == 1
    await file.write(with_tools(), 2, exact=False, results=results)
    assert asked == ["results"] and await file.attempt() == 2
    assert [one.tool_call_id for part in file.parts() for one in part.host_tool_calls] == ["t0", "t1", "t2"]
    assert await file.count() == 2
