"""The distance between what is started and what is trained."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.analysis.trajectory_cases import failed, sample, trajectory

from penstock.client import Bias, BiasMeter, FailureCause, Reward
from penstock.client.pacing.meter import Facts, is_trainable


def metered(started: list[Facts], trained: list[Facts]) -> Bias:
    meter = BiasMeter()
    for facts in started:
        meter.start(facts.task_id)
    for facts in started:
        meter.end(facts)
    for facts in trained:
        meter.train(facts)
    return meter.report()


def distances(bias: Bias) -> dict[str, float]:
    return {one.name: one.distance for one in bias.distributions}


FACTS = st.builds(
    Facts,
    task_id=st.sampled_from("abc"),
    tokens=st.none() | st.integers(0, 1 << 20),
    seconds=st.none() | st.floats(0, 1e6),
    reward=st.none() | st.builds(Reward, st.floats(0, 1)),
)


@pytest.mark.requirement("R136")
def test_training_only_the_quick_ones_is_a_distance_of_their_share() -> None:
    """Four tasks of equal rewards, of which one takes long and is never trained."""
    facts = [Facts("quick", 100, 10.0, Reward(1.0))] * 3 + [Facts("slow", 100, 1000.0, Reward(1.0))]
    bias = metered(facts, facts[:3])
    assert distances(bias) == {"task": 0.25, "length": 0.0, "duration": 0.25, "reward": 0.0}
    assert bias.distance == 0.25 and (bias.started, bias.running, bias.trained) == (4, 0, 3)
    (quick, slow) = bias.distributions[2].classes
    assert (quick.name, quick.started, quick.trained) == ("8s-16s", 0.75, 1.0)
    assert (slow.name, slow.started, slow.trained) == ("512s-1024s", 0.25, 0.0)


@settings(max_examples=50)
@given(st.lists(FACTS, min_size=1, max_size=30), st.data())
def test_a_distance_is_a_metric_of_shares(facts: list[Facts], data: st.DataObject) -> None:
    """0 for what is trained whole or in equal parts; at most the share of what is left out, and never more than 1."""
    assert set(distances(metered(facts, facts)).values()) == {0.0}
    assert all(math.isclose(one, 0.0, abs_tol=1e-12) for one in distances(metered(facts * 2, facts)).values())
    kept = data.draw(st.lists(st.sampled_from(range(len(facts))), min_size=1, unique=True))
    bias = metered(facts, [facts[index] for index in kept])
    left_out = 1 - len(kept) / len(facts)
    for one in bias.distributions:
        assert 0 <= one.distance <= left_out + 1e-9 and one.by_chance >= 0
        assert math.isclose(sum(share.started for share in one.classes), 1.0)
        assert math.isclose(sum(share.trained for share in one.classes), 1.0)


def test_what_runs_is_a_class_of_its_own_and_moves_when_it_ends() -> None:
    """Rollouts that run for long are seen before they end."""
    meter = BiasMeter()
    meter.start("t", 4)
    for _ in range(3):
        meter.end(Facts("t", 8, 1.0, Reward(1.0)))
    meter.train(Facts("t", 8, 1.0, Reward(1.0)))
    bias = meter.report()
    assert bias.running == 1 and distances(bias) == {"task": 0.0, "length": 0.25, "duration": 0.25, "reward": 0.25}
    meter.end(Facts("t", 8, 1.0, Reward(1.0)))
    assert meter.report().distance == 0.0


def test_nothing_trained_has_no_distance_yet() -> None:
    """Before the first batch."""
    bias = metered([Facts("t")], [])
    assert bias.distributions == () and bias.distance == 0.0


@pytest.mark.parametrize(
    ("facts", "classes"),
    [
        (Facts("t", 0, 0.0, Reward(0.0)), ("t", "0", "<0.125s", "0.0-0.1")),
        (Facts("t", 1, 0.125, Reward(1.0)), ("t", "1", "0.125s-0.25s", "0.9-1.0")),
        (Facts("t", 1024, 90.0, Reward(0.0, -1.0, 1.0)), ("t", "1024-2047", "64s-128s", "0.5-0.6")),
        (Facts("t", 7, 64.0, None), ("t", "4-7", "64s-128s", "none")),
        (Facts("t", is_ended=False), ("t", "unknown", "unknown", "unknown")),
    ],
)
def test_classes_have_fixed_edges(facts: Facts, classes: tuple[str, ...]) -> None:
    """So that two runs can be compared."""
    assert facts.classes == classes


def test_facts_are_those_of_results_and_of_exported_trajectories() -> None:
    """Both are counted alike; what has no trajectory has no length."""
    exported = Facts.of(trajectory("r", [sample("s", [(3, 4, True), (1, 2, False)])], reward=0.5))
    assert (exported.task_id, exported.tokens, exported.reward) == ("task", 4, Reward(0.5))
    broken = failed("r", FailureCause.INFRASTRUCTURE)
    assert Facts.of(broken) == Facts("task") and not is_trainable(broken)


def test_a_report_is_json(tmp_path: Path) -> None:
    """For dashboards and logs."""
    bias = metered([Facts("a", 4, 2.0, Reward(1.0)), Facts("b", 4, 2.0, None)], [Facts("a", 4, 2.0, Reward(1.0))])
    bias.write(tmp_path / "bias.json")
    read = json.loads((tmp_path / "bias.json").read_text("utf-8"))
    assert read == bias.as_dict() | {"distributions": read["distributions"]} and read["distance"] == 0.5
    assert read["distributions"][3]["classes"][1] == {"name": "none", "started": 0.5, "trained": 0.0}
