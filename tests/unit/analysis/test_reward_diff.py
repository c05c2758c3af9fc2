"""Two grades of the same rollouts: what changed, what one of them lacks, and which grade is the newest."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.unit.analysis.trajectory_cases import sample, trajectory

from penstock.analysis.export import rollouts, sequences, turns
from penstock.analysis.regraded_rows import with_grade
from penstock.analysis.reward_diff import FIRST, grade_names, reward_diff
from penstock.client import Reward, Rollout
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


@pytest.mark.parametrize("rows", [sequences, rollouts])
def test_exported_rows_get_the_reward_of_a_further_grade_as_if_they_were_exported_with_it(rows: Any) -> None:
    """Digests included; without that grade there is none, and the first grade is what they have."""
    given = trajectory("r", [sample("s", [(2, 3, True)])])
    first = list(rows(given))
    assert first and given.reward is not None
    graded = one(given.rollout_id, 1.0, v2=0.25, v3=None)
    assert list(with_grade(first, [graded], "v2")) == list(rows(replace(given, reward=Reward(0.25))))
    unrewarded = list(rows(replace(given, reward=None)))
    assert list(with_grade(first, [graded], "v3")) == list(with_grade(first, [], "v2")) == unrewarded
    assert list(with_grade(first, [graded], FIRST)) == first
    assert list(with_grade(turns(given), [graded], "v2")) == list(turns(given))
