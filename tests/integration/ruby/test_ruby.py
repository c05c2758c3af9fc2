"""A trainer in a language that has no client of ours: the Ruby example, by the commands of its guide."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Final

import pytest
from tests.support import ruby
from tests.support.services.stack import Running

from penstock.client.transport.endpoints import write_connection

ROOT: Final = Path(__file__).resolve().parents[3]
WORK: Final = "#!/bin/sh\ncut -d' ' -f4 note.txt | tr -d . >b.txt\n"
"""What the scripted engine's agents run."""


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the guide's command generates."""
    return ruby.stubs(tmp_path_factory.mktemp("ruby"))


def run(stubs: Path, stack: Running, task: Path, count: int) -> str:
    """What the example prints."""
    connection = task.with_name("connection.json")
    write_connection(connection, stack.stack.endpoints, pid=None)
    command = ["ruby", "-W0", f"-I{stubs}", str(ROOT / "examples/ruby/trainer.rb"), str(task), str(count)]
    environment = {**os.environ, "PENSTOCK_CONNECTION": str(connection)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.requirement("R82", "R112")
@pytest.mark.asyncio(loop_scope="session")
async def test_ruby_trainer_answers_a_group_and_reads_its_trajectories(
    stubs: Path, stack: Running, tmp_path: Path
) -> None:
    """Against real services and sandboxes; the Python client reads the same tokens of the same rollouts."""
    task = json.loads((ROOT / "examples/ruby/task.json").read_text())
    task["files"].append({"path": "work.sh", "content": base64.b64encode(WORK.encode()).decode()})
    (tmp_path / "task.json").write_text(json.dumps(task))
    said = await asyncio.to_thread(run, stubs, stack, tmp_path / "task.json", 3)
    rewards = re.findall(r"^(\S+) reward (\S+) GRADE_(\w+)", said, re.MULTILINE)
    assert [reward for _, reward, _ in rewards] == ["1.0"] * 3, said
    calls, sizes = 0, []
    for rollout_id, _, grade in rewards:
        trajectory = await stack.ps.rollouts.trajectory(rollout_id)
        assert trajectory.grade == grade.lower()  # unusable: the logprobs are a script's
        calls += len(trajectory.calls)
        sizes += [(len(one.input_ids), int(one.loss_mask.sum())) for one in trajectory.samples]
    printed = [(int(a), int(b)) for a, b in re.findall(r"sample of (\d+) tokens, (\d+) to train on", said)]
    assert printed == sizes
    assert said.splitlines()[-1] == f"answered {calls}, rejected 0"
