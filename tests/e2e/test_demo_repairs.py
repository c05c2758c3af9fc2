"""The demo with mini-SWE-agent from PyPI, against four real services: two steps of a few rollouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support import toolboxes

from penstock_demo import learner
from penstock_demo.display import Display
from penstock_demo.repairs import tasks, train


@pytest.mark.requirement("R144", "R82")
@pytest.mark.on_demand("the demo with mini-swe-agent: with the shell agent it runs, and mini-swe-agent alone")
@pytest.mark.timeout(900)
def test_a_real_agents_rollouts_are_the_conversations_of_the_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompt and what its commands print have the examples' tokens; each rollout is one exact sequence."""
    monkeypatch.setattr(learner, "WARM_STEPS", 4 * learner.WARM_CHUNK)
    monkeypatch.setattr(train, "PROMPTS", 2)
    monkeypatch.setattr(train, "GROUP_SIZE", 2)
    run = tmp_path / "seed"
    run.mkdir()
    with toolboxes.brought(tmp_path / "cache" / "sandbox"), Display("test") as display:
        history = train.learn(5, 2, run, display)
    assert [(step["policy_version"], step["rollouts"], step["ungraded"]) for step in history] == [(0, 4, 0), (1, 4, 0)]
    assert all(0.0 <= step["logprob_gap"] < 1e-4 for step in history)

    codec = tasks.build_codec()
    prompt = codec.render(tasks.prompt()).tolist()
    files = sorted((run / "trajectories").iterdir())
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert len({row["rollout_id"] for row in rows}) == len(rows) == 8
    assert all(row["input_ids"][: len(prompt)] == prompt for row in rows)
    complaints = {task.complaint(task.wrong) for task in tasks.TASKS}
    texts = [codec.decode(row["input_ids"]) for row in rows]
    assert any(f"<|im_start|>user\n{complaint}<|im_end|>" in text for complaint in complaints for text in texts)
