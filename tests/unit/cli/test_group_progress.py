"""The table and the summary of a group that `penstock rollout -n` runs."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import cast

import pytest
from tests.unit.analysis.test_credit import call
from tests.unit.cli.test_watch_replay_diff import HOSTILE, NOW, drawn, foreign

from penstock.cli.views import group_progress
from penstock.cli.views.group_progress import GroupProgress
from penstock.client.types.chat import Completion
from penstock.client.types.results import (
    AttemptFailed,
    CallFinished,
    Ended,
    EventPayload,
    Failure,
    FailureCause,
    Outcome,
    Phase,
    PhaseChanged,
    Rollout,
    RolloutEvent,
    RolloutPaused,
)
from penstock.client.types.trajectories import Reward
from penstock.evaluation.statistics import wilson

LOST = Failure(FailureCause.INFRASTRUCTURE, "SANDBOX_LOST", "the sandbox is gone", False, None)


def progress(count: int, name: str = "g") -> GroupProgress:
    """A group of which nothing has begun."""
    rollout = Rollout("", name, 0, Phase.QUEUED, None, "shell", "", "copy", {}, NOW, None, {}, 0)
    items = [replace(rollout, rollout_id=f"{name}-{index}", index=index) for index in range(count)]
    return GroupProgress(items, run_id="run-7")


def event(rollout_id: str, payload: EventPayload) -> RolloutEvent:
    return RolloutEvent(1, rollout_id, NOW + timedelta(seconds=5), payload)


def finished(version: int) -> CallFinished:
    """A call of 7 and 2 tokens that a policy of this version answered."""
    completion = cast(Completion, SimpleNamespace(policy_version=version))
    one = replace(call("g-0", 0, [3]), completion=completion, prompt_count=7, sampled_count=2)
    return CallFinished(one)


def test_events_keep_a_groups_rollouts_up_to_date() -> None:
    """Only a change of state is a line in a pipe; calls, tokens and versions add up in the table."""
    group = progress(3)
    lines = [
        group.apply(event("g-1", payload))
        for payload in (PhaseChanged(Phase.RUNNING), finished(4), finished(5), RolloutPaused("", None))
    ]
    assert [line is not None for line in lines] == [True, False, False, True]
    again = group.apply(event("g-1", AttemptFailed(1, LOST)))
    assert again is not None and again.attempts == 2
    assert group.apply(event("g-1", PhaseChanged(Phase.ENDED))) is None, "how it ended is the next event"
    ended = group.apply(event("g-1", Ended(Outcome(reward=Reward(0.25)))))
    assert ended is not None and ended.ended and not ended.paused and ended.end_time == NOW + timedelta(seconds=5)
    assert (ended.calls, ended.prompt_tokens, ended.completion_tokens) == (2, 14, 4)
    assert (ended.min_version, ended.max_version, ended.run_id) == (4, 5, "run-7")
    assert group.apply(event("another", PhaseChanged(Phase.RUNNING))) is None
    shown = drawn([group.table(160)], 160)
    assert "1/3" in shown and "4-5" in shown and "0.25" in shown
    assert [row.split()[0] for row in shown.splitlines()[-3:]] == ["g-0", "g-1", "g-2"]


def test_a_group_higher_than_the_screen_shows_what_runs() -> None:
    group = progress(50)
    group.apply(event("g-0", Ended(Outcome(reward=Reward(1.0)))))
    shown = drawn([group.table(100, most=10)], 100)
    assert "g-0 " not in shown and "... 41 more" in shown


def test_the_summary_of_a_group_has_the_mean_reward_and_its_interval() -> None:
    """Wilson's, over the graded rollouts; a rollout that failed counts nowhere."""
    group = progress(4)
    for index, reward in enumerate((1.0, 0.0, 1.0)):
        group.apply(event(f"g-{index}", Ended(Outcome(reward=Reward(reward)))))
    group.apply(event("g-3", Ended(Outcome(LOST))))
    first, second = (line.plain for line in group_progress.summary(group.group))
    low, high = wilson(2 / 3, 3)
    assert first == "group g  4 rollouts: 3 completed, 1 failed"
    assert second == f"reward 0.667  95 % {low:.3f} to {high:.3f}  (3 graded rollouts of one task)"
    failure = drawn(
        group_progress.failures({"g-0": Outcome(reward=Reward(1.0)), "g-3": Outcome(LOST, agent_stderr=b"x")})
    )
    assert "g-3\n  failed: SANDBOX_LOST" in failure and "standard error" in failure and "g-0" not in failure


def test_a_group_without_a_grade_has_no_mean() -> None:
    group = progress(2)
    group.apply(event("g-0", Ended(Outcome(replace(LOST, cause=FailureCause.CANCELLED)))))
    first, second = (line.plain for line in group_progress.summary(group.group))
    assert first == "group g  2 rollouts: 0 completed, 1 cancelled, 1 not ended"
    assert second == "reward none: no rollout was graded"


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_group_drives_the_terminal(text: str) -> None:
    """A failure's message and the agent's standard error are anybody's."""
    group = progress(2, text)
    raw = text.encode("utf-8", "replace")
    outcome = Outcome(Failure(FailureCause.AGENT, text, text, False, None), agent_stderr=raw)
    group.apply(event(f"{text}-0", Ended(outcome)))
    parts = [group.table(80), *group_progress.failures({text: outcome}), *group_progress.summary(group.group)]
    assert not foreign(drawn(parts))
