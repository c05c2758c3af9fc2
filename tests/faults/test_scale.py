"""Many rollouts on null sandboxes while services are killed: the short form of `python -m benchmarks scale`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COUNT = 60


@pytest.mark.requirement("R50", "R126")
async def test_rollouts_at_once_survive_kills_of_each_service(tmp_path: Path) -> None:
    """All end with their reward, are listed once with an end, and leave nothing; the command fails otherwise."""
    kept = tmp_path / "figures.json"
    kills = [part for name in ("driver", "interception", "sandbox") for part in ("--kill", name)]
    argv = ["-m", "benchmarks", "scale", "--rollouts", str(COUNT), "--latency", "0.2", *kills, "--out", str(kept)]
    pipe = asyncio.subprocess.PIPE
    command = await asyncio.create_subprocess_exec(sys.executable, *argv, cwd=ROOT, stdout=pipe, stderr=pipe)
    said, errors = await command.communicate()
    assert command.returncode == 0, (said + errors).decode()[-4000:]
    (section,) = json.loads(kept.read_text())["sections"]
    rows = {row["name"]: row for row in section["rows"]}
    assert rows["rollouts that ended with their reward"]["value"] == COUNT
    assert all(f"{name} at" in rows["rollouts that ended with their reward"]["note"] for name in kills[1::2])
