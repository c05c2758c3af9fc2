"""A real Slurm, each node a namespace: `python -m tests.clusters slurm --help` has longer forms."""

from __future__ import annotations

import pytest
from tests.clusters.suite import LIMIT_S, run

pytestmark = pytest.mark.timeout(LIMIT_S + 60)  # a guard: the cluster's own comes first, and ends it in order


@pytest.mark.requirement("R125")
def test_rollouts_go_on_when_nodes_are_lost_and_their_gate_driver_and_engine_start_elsewhere() -> None:
    said = run("slurm", "--rollouts", "12", "--at-once", "4", "--work", "8")
    for line in ("the sandbox service of n1 is killed", "it is back", "the job is COMPLETED", "nothing is left"):
        assert line in said
    for service, name in (("driver", "d1"), ("interception", "g1"), ("inference", "e1")):
        assert f"which has a {service} service" in said
        assert f"{name} is back at " in said


@pytest.mark.requirement("R125")
def test_a_cancelled_job_with_engines_on_gpus_leaves_nothing() -> None:
    said = run("slurm", "--rollouts", "4", "--at-once", "2", "--work", "5", "--gpus", "1", "--cancel")
    for line in ("the job is CANCELLED", "nothing is left"):
        assert line in said
