"""A real Ray cluster, each machine a namespace: `python -m tests.clusters ray --help` has longer forms."""

from __future__ import annotations

import pytest
from tests.clusters.suite import LIMIT_S, run

pytestmark = pytest.mark.timeout(LIMIT_S + 60)  # a guard: the cluster's own comes first, and ends it in order


@pytest.mark.requirement("R125")
def test_services_of_all_kinds_return_after_their_machines_are_lost() -> None:
    said = run("ray", "--rollouts", "12", "--at-once", "4", "--work", "8")
    for line in (" is killed, which has ['d1'", "mended: the old raylet has ended", "nothing is left"):
        assert line in said
    for name in ("d1", "g1", "e1"):
        assert f"{name} is back at " in said


@pytest.mark.on_demand("a second Ray cluster: services return on the first one, too")
@pytest.mark.requirement("R125")
def test_the_autoscaler_adds_a_machine_for_full_services_and_a_killed_engine_returns() -> None:
    said = run("ray", "--rollouts", "6", "--at-once", "5", "--work", "4", "--late", "--gpus", "1")
    for line in ("a rollout ran on n1", "the engine is back", "nothing is left"):
        assert line in said
