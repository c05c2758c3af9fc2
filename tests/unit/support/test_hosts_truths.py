"""Each check of a run on hosts that are lost fails where it should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

import pytest
from tests.hosts import truths
from tests.hosts.losses import How, Loss, drawn
from tests.hosts.records import Attempt, Lost, Seen, Story

Spoil = Callable[[Seen], None]


def _seen() -> Seen:
    """A run that is as it must be: n1 was lost at 10 under attempt 1, and the rollout was rewarded at n0."""
    lost = Attempt(began=5.0, node="n1", gate="g0", failed=14.0, reason="NODE_LOST")
    good = Attempt(began=15.0, node="n0", gate="g1", agent_ended=18.0, graded=19.0)
    story = Story("hosts-0-0", 0, "d0", [lost, good], [("", 1.0)], created=4.0, ended=20.0, calls={"c1": [1, 2]})
    lost_home = Story("hosts-1-0", 1, "d1", [Attempt(began=5.0)], [("HOME_LOST", None)])
    again = Story("hosts-1-1", 1, "d1", [replace(good)], [("", 1.0)], calls={"c2": [3]})
    for one in (lost_home, again):
        one.created, one.ended = 4.0, 20.0
    return Seen(
        max_attempts=3,
        places=("n0", "n1", "g0", "g1", "g2"),
        stories=[story, lost_home, again],
        losses=[Lost("n1", 10.0)],
        listed={one.rollout_id: one.ends[0] for one in (story, lost_home, again)},
        answers={"c1": [[1, 2]], "c2": [[3]]},
        wiped={"d1": 6.0},
    )


def test_a_run_as_it_must_be_has_no_fault() -> None:
    assert truths.faults(_seen(), 1.0) == []


def _ends_twice(seen: Seen) -> None:
    seen.stories[0].ends.append(("", 1.0))


def _is_listed_otherwise(seen: Seen) -> None:
    seen.listed["hosts-0-0"] = ("NODE_LOST", None)


def _is_not_listed(seen: Seen) -> None:
    del seen.listed["hosts-0-0"]


def _is_listed_without_a_client(seen: Seen) -> None:
    seen.listed["hosts-7-0"] = ("", 1.0)


def _was_created_again_after_its_end(seen: Seen) -> None:
    seen.stories[1].ends = [("", 1.0)]
    seen.listed["hosts-1-0"] = ("", 1.0)


def _was_refused(seen: Seen) -> None:
    seen.refused[7] = "no"


def _has_a_false_zero(seen: Seen) -> None:
    seen.stories[0].ends[0] = ("", 0.0)


def _is_rewarded_at_the_lost_node(seen: Seen) -> None:
    seen.stories[0].attempts[-1].node = "n1"


def _is_rewarded_at_a_lost_gate(seen: Seen) -> None:
    seen.losses.append(Lost("g1", 16.0))


def _is_repeated_at_the_lost_gate(seen: Seen) -> None:
    seen.stories[0].attempts.insert(1, Attempt(began=14.5, node="n0", gate="g1", failed=14.9, reason="GATE_LOST"))


def _is_not_repeated(seen: Seen) -> None:
    seen.stories[0].attempts.pop()
    seen.stories[0].ends[0] = ("NODE_LOST", None)


def _has_other_tokens(seen: Seen) -> None:
    seen.answers["c1"] = [[1, 3]]


def _has_a_call_of_another(seen: Seen) -> None:
    seen.stories[0].calls = {"c2": [3]}


def _was_answered_twice(seen: Seen) -> None:
    seen.undisturbed["c1"] = [[1, 2], [1, 2]]


def _is_noticed_late(seen: Seen) -> None:
    seen.stories[0].attempts[0].failed = 18.5


def _waits_for_a_lost_node(seen: Seen) -> None:
    seen.stories[0].attempts[0].failed = 40.5


def _waits_for_the_engine_of_its_gate(seen: Seen) -> None:
    seen.engines = {"g1": "e1"}
    seen.losses.append(Lost("e1", 17.0))
    seen.stories[0].ended = 47.5


def _waits_for_its_driver(seen: Seen) -> None:
    seen.losses.append(Lost("d0", 16.0, 46.5))
    seen.stories[0].ended = 50.0


def _never_ends_after_a_loss(seen: Seen) -> None:
    seen.stories[0].ends = []
    seen.losses.append(Lost("g1", 17.0))


def _leaves_something(seen: Seen) -> None:
    seen.left.append("n0: process 7")


def _had_nothing_while_rollouts_ran(seen: Seen) -> None:
    seen.during = Counter({"open": 3})


def _accepts_an_old_key(seen: Seen) -> None:
    seen.accepted_keys.append("/rollout/hosts-0-0 at g0: 200")


@pytest.mark.parametrize(
    ("truth", "spoil"),
    [
        (truths.ends_once, _ends_twice),
        (truths.ends_once, _is_listed_otherwise),
        (truths.ends_once, _is_not_listed),
        (truths.ends_once, _is_listed_without_a_client),
        (truths.ends_once, _was_created_again_after_its_end),
        (truths.ends_once, _was_refused),
        (truths.earned, _has_a_false_zero),
        (truths.earned, _is_rewarded_at_the_lost_node),
        (truths.earned, _is_rewarded_at_a_lost_gate),
        (truths.repeated_elsewhere, _is_repeated_at_the_lost_gate),
        (truths.repeated_elsewhere, _is_not_repeated),
        (truths.logged_tokens, _has_other_tokens),
        (truths.logged_tokens, _has_a_call_of_another),
        (truths.answered_once, _was_answered_twice),
        (truths.noticed, _is_noticed_late),
        (truths.waited, _waits_for_a_lost_node),
        (truths.waited, _waits_for_the_engine_of_its_gate),
        (truths.waited, _waits_for_its_driver),
        (truths.waited, _never_ends_after_a_loss),
        (truths.nothing_left, _leaves_something),
        (truths.nothing_left, _had_nothing_while_rollouts_ran),
        (truths.keys_refused, _accepts_an_old_key),
    ],
)
def test_a_check_finds_what_must_not_be(truth: Callable[[Seen], Iterator[str]], spoil: Spoil) -> None:
    seen = _seen()
    spoil(seen)
    assert list(truth(seen))
    assert truths.faults(seen, 0.0)


def test_too_few_rewards_are_a_fault() -> None:
    seen = _seen()
    seen.stories[0].ends[0] = ("MODEL_CALL_FAILED", None)
    seen.listed["hosts-0-0"] = ("MODEL_CALL_FAILED", None)
    assert truths.faults(seen, 0.5) == []
    assert truths.faults(seen, 0.95) == ["1 of 2 rollouts have a reward, at least 95% must"]


def test_a_place_may_be_tried_again_where_no_other_is_left() -> None:
    seen = _seen()
    _is_repeated_at_the_lost_gate(seen)
    seen.losses.append(Lost("g2", 9.0))
    assert list(truths.repeated_elsewhere(seen)) == []


@pytest.mark.parametrize(("killed_at", "excused"), [(4.0, False), (16.0, True), (18.5, False)])
def test_a_place_may_be_tried_again_where_the_other_was_killed_meanwhile(killed_at: float, excused: bool) -> None:
    seen = _seen()
    _is_repeated_at_the_lost_gate(seen)
    seen.disturbances.append(Lost("g2", killed_at, killed_at))
    assert (list(truths.repeated_elsewhere(seen)) == []) == excused


def test_a_driver_that_was_away_has_lost_all_places() -> None:
    seen = _seen()
    _is_repeated_at_the_lost_gate(seen)
    seen.disturbances.append(Lost(seen.stories[0].driver, 14.7, 16.0))
    assert list(truths.repeated_elsewhere(seen)) == []


def test_a_driver_that_was_cut_off_as_an_attempt_began_has_lost_all_places() -> None:
    """It is back before the next attempt, which may be anywhere."""
    seen = _seen()
    _is_repeated_at_the_lost_gate(seen)
    story = seen.stories[0]
    began = story.attempts[1].began
    seen.losses.append(Lost(story.driver, began - 0.1, began + 0.1))
    assert list(truths.repeated_elsewhere(seen)) == []


def test_a_reward_before_the_loss_is_earned() -> None:
    seen = _seen()
    seen.losses.append(Lost("n0", 19.5))
    assert list(truths.earned(seen)) == []


def test_a_wait_is_until_the_host_is_back_or_the_attempt_over() -> None:
    seen = _seen()
    seen.losses += [Lost("d0", 5.0, 7.0), Lost("g1", 17.0), Lost("g0", 14.5), Lost("n0", 3.0, 14.0)]
    found = [(seconds, name) for seconds, rollout_id, name in truths.waits(seen) if rollout_id == "hosts-0-0"]
    assert found == [(2.0, "d0"), (3.0, "g1"), (4.0, "n1")]


def test_a_rollout_whose_driver_is_lost_for_good_waits_for_the_driver_alone() -> None:
    seen = _seen()
    seen.stories[1].attempts[0].node = "n1"
    seen.losses += [Lost("d1", 7.0), Lost("n1", 8.0)]
    found = [(seconds, name) for seconds, rollout_id, name in truths.waits(seen) if rollout_id == "hosts-1-0"]
    assert found == [(13.0, "d1")]


@pytest.mark.parametrize(("most", "is_fault"), [(12.5, True), (13.5, False)])
def test_a_wait_for_a_driver_has_a_limit_of_its_own(most: float, is_fault: bool) -> None:
    seen = _seen()
    seen.losses.append(Lost("d1", 7.0))
    seen.waited_s, seen.home_s = 10.0, most
    assert bool(list(truths.waited(seen))) is is_fault


def test_a_wait_ends_when_the_service_serves_not_when_it_may() -> None:
    seen = _seen()
    seen.losses.append(Lost("d1", 7.0, back=7.0, served=19.0))
    assert (12.0, "hosts-1-0", "d1") in truths.waits(seen)


def test_what_a_loss_leaves_open_follows_the_seed() -> None:
    losses = [Loss.parse(text) for text in ("n@0.2-0.8:link=40", "n@0-1", "n1@0.9", "g@0.5")]
    names = {"n": ["n0", "n1", "n2"], "g": ["g0", "g1"]}
    found = {seed: drawn(losses, names.__getitem__, Random(seed)) for seed in range(20)}
    assert found[7] == drawn(losses, names.__getitem__, Random(7))
    assert len({tuple(one) for one in found.values()}) == len(found)
    for one in found.values():
        assert sorted(loss.name for loss in one)[1:] == ["n0", "n1", "n2"]
        assert one == sorted(one, key=lambda loss: loss.share)
        assert [loss.share for loss in one if loss.name == "n1"] == [0.9]
        (cut,) = [loss for loss in one if loss.back_s is not None]
        assert (cut.how, cut.back_s) == (How.LINK, 40.0) and 0.2 <= cut.share <= 0.8
    with pytest.raises(ValueError, match="no host g"):
        drawn([losses[-1]] * 3, names.__getitem__, Random(1))


def test_a_failure_is_measured_from_the_last_loss_of_its_place() -> None:
    seen = _seen()
    seen.losses.insert(0, Lost("n1", 1.0, 2.0))
    assert truths.noticed_s(seen) == [4.0]


def test_a_failure_of_an_attempt_that_began_when_its_place_served_again_is_not_of_the_loss() -> None:
    seen = _seen()
    seen.losses = [Lost("n1", 1.0, back=1.0, served=4.5)]
    assert truths.noticed_s(seen) == []
    seen.losses[0].served = 5.5
    assert truths.noticed_s(seen) == [13.0]


def test_a_lost_driver_comes_back_by_itself() -> None:
    assert Loss.parse("d1@0.6") == Loss("d1", 0.6, How.KILL, 20.0)
    assert Loss.parse("d1@0.6:link=5").back_s == 5.0
    assert Loss.parse("e1@0.7").back_s is None
