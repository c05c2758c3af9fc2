"""Two grades of the same rollouts: what changed, what one of them lacks, and which grade is the newest."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from penstock.analysis.reward_diff import FIRST, grade_names, reward_diff
from penstock.client import Rollout
from penstock.client.wire.results import rollout as read
from penstock.driver.v1 import rollout_pb2

pytestmark = pytest.mark.requirement("R140")
START = datetime(2026, 11, 29, tzinfo=UTC)


def one(name: str, first: float | None, **grades: float | None) -> Rollout:
    """An ended rollout: its rewards by grade, each a minute after the last; None = a failure of the verifier."""
    wire = rollout_pb2.Rollout(rollout_id=name, phase=rollout_pb2.PHASE_ENDED)
    wire.outcome.SetInParent()
    _give(wire.outcome, first)
    for minute, (grade, value) in enumerate(grades.items()):
        further = wire.grades.add(name=grade)
        further.time.FromDatetime(START + timedelta(minutes=minute))
        _give(further, value)
    return read(wire)


def _give(graded: rollout_pb2.Outcome | rollout_pb2.Grade, value: float | None) -> None:
    if value is None:
        graded.failure.reason, graded.failure.cause = "REWARD_ABSENT", rollout_pb2.FAILURE_CAUSE_VERIFIER
    else:
        graded.reward.value = value


ROLLOUTS = [
    one("same", 1.0, v2=1.0),
    one("raised", 0.0, v2=1.0),
    one("lowered", 1.0, v2=0.5),
    one("gained", None, v2=0.0),
    one("lost", 0.0, v2=None),
    one("both-without", None, v2=None),
    one("not-graded", 1.0),
]


def test_each_rollout_counts_once_by_how_its_reward_changed() -> None:
    found = reward_diff(ROLLOUTS, FIRST, "v2")
    expected = {"compared": 6, "same": 2, "raised": 1, "lowered": 1, "gained": 1, "lost": 1, "missing": 1}
    assert found.counts() == expected
    assert [pair.rollout_id for pair in found.changed] == ["raised", "lowered", "gained", "lost"]
    assert [pair.reason_before or pair.reason_after for pair in found.changed] == ["", "", *["REWARD_ABSENT"] * 2]
    before, after = found.means()
    assert before is not None and after is not None
    assert before == pytest.approx(2 / 3) and after == pytest.approx(2.5 / 3)


def test_means_need_a_rollout_with_both_rewards() -> None:
    assert reward_diff([one("lost", 0.0, v2=None)], FIRST, "v2").means() == (None, None)


def test_the_newest_grade_is_the_last_name() -> None:
    """Each once, though the rollouts were graded in another order."""
    names = grade_names([one("r1", 0.0, v3=1.0, v2=1.0), one("r2", 0.0, v2=1.0)])
    assert names == ("v3", "v2")
    assert grade_names([one("r1", 0.0)]) == ()
