"""The demo's command line: what it refuses, what its help shows, and what it says to do next."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.cli.test_examples import accepted

from penstock.client import ConfigurationError
from penstock.local.processes import hold
from penstock_demo import command, train
from penstock_demo.display import Metrics

HISTORY = Metrics(
    step=1, policy_version=0, seconds=1.0, elapsed=2.0, loss=0.0, logprob_gap=0.0, success=0.25, reward_mean=0.5,
    rollouts=64, tokens=10, ungraded=0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--agent mini-swe", "there is no agent 'mini-swe'; did you mean mini-swe-agent? there are shell,"),
        ("--agent opencode", "there is no agent 'opencode'; there are shell, mini-swe-agent"),
        ("--credit trun", "there is no credit 'trun'; did you mean turn? there are rollout, turn"),
        ("--agentt x", "unrecognized arguments: --agentt x; did you mean --agent?"),
        ("--xyz", "unrecognized arguments: --xyz\n"),
        ("--agent mini-swe-agent --credit turn", "--credit turn is for --agent shell"),
    ],
)
def test_a_wrong_command_line_is_refused_with_the_similar_name(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a run's directory is made."""
    with pytest.raises(SystemExit, match="2"):
        command.parse(line.split())
    assert said in capsys.readouterr().err


@pytest.mark.requirement("R82", "R144")
@pytest.mark.parametrize("agent", command.DEMOS)
def test_what_the_demo_says_to_do_next_shows_its_own_rollouts(
    agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The services go on in the run's own state directory, and the agent of the demo has a command of its own."""
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs" / "with a blank"
    (runs / "seed-3").mkdir(parents=True)
    train.point_latest(runs / "seed-3")
    command.say_what_next(replace(command.DEMOS[agent], runs=runs), [HISTORY], agent)
    printed = capsys.readouterr().out
    lines = [shlex.split(line) for line in printed.splitlines() if line.strip().startswith(sys.exec_prefix)]
    lines = [["penstock", *words[1:]] for words in lines]
    for words in lines:
        accepted(list(words), tmp_path)
    run = "runs/with a blank/seed-3"
    (up,) = (words for words in lines if words[1] == "up")
    assert up[2:6] == ["--model-dir", f"{run}/model", "--state-dir", f"{run}/services"]
    for setting in up[6:]:
        assert setting == "--set" or Path(setting.removeprefix("sandbox.state_dir=")).is_absolute()
    (own,) = (words for words in lines if words[1] == "rollout" and words[words.index("--agent") + 1].startswith(agent))
    assert f"{run}/model" in own or f"{run}/services" in own


@pytest.mark.requirement("R144")
def test_a_run_is_not_replaced_under_services_that_serve_it(tmp_path: Path) -> None:
    """`penstock up` of an earlier run, which the demo itself prints, keeps its journals."""
    run = train.new_run(3, tmp_path)
    services = run / "services"
    services.mkdir(mode=0o700)
    lock = hold(services, "")
    try:
        with pytest.raises(ConfigurationError, match="another --seed") as refused:
            train.new_run(3, tmp_path)
        assert refused.value.reason == "STATE_DIR_IN_USE" and services.is_dir()
    finally:
        os.close(lock)
    assert train.new_run(3, tmp_path) == run and not services.exists()
