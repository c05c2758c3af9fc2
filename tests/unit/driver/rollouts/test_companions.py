"""Rollouts with companions: graded beside what the agent did to them, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from google.protobuf.duration_pb2 import Duration
from tests.unit.driver.conftest import Driver

from penstock.driver.v1 import rollout_pb2
from penstock.interception.v1 import interception_pb2
from penstock.sandbox.v1 import sandbox_pb2
from penstock_chassis.errors import FailedPrecondition, InvalidArgument
from penstock_driver.domain.ports import BackendFacts
from penstock_driver.domain.rollout import RolloutSpec
from penstock_driver.rollouts.preflight import check_backend
from penstock_driver.wire.specs import rollout_spec

ABLE = BackendFacts("b", True, "", True, True, True, False, True, True, True, companions=True)


def wanted() -> rollout_pb2.RolloutSpec:
    """A rollout with a database beside its agent, and a verifier."""
    spec = rollout_pb2.RolloutSpec(mode=interception_pb2.MODE_INTERCEPTION_GATE)
    spec.agent.name, spec.task.task_id, spec.task.instruction = "shell", "t", "do it"
    spec.task.verifier.commands.add().shell = "true"
    spec.task.verifier.passed_share.SetInParent()
    spec.sandbox.companions.add(name="db", image="postgres:16")
    return spec


def read(driver: Driver, spec: rollout_pb2.RolloutSpec) -> RolloutSpec:
    return rollout_spec(spec, driver.registry, "default")


@pytest.mark.requirement("R90")
def test_a_rollout_with_companions_is_graded_in_the_agents_sandbox(driver: Driver) -> None:
    """Although the backend can read what the agent changed: it cannot of a database."""
    placed = check_backend(read(driver, wanted()), [ABLE])
    assert placed.task.verifier is not None and placed.task.verifier.fresh_fork is False
    alone = wanted()
    alone.sandbox.ClearField("companions")
    placed = check_backend(read(driver, alone), [ABLE])
    assert placed.task.verifier is not None and placed.task.verifier.fresh_fork is True


@pytest.mark.requirement("R46", "R55")
def test_companions_are_refused_where_the_backend_has_none(driver: Driver) -> None:
    with pytest.raises(FailedPrecondition, match="companions") as refused:
        check_backend(read(driver, wanted()), [replace(ABLE, companions=False)])
    assert refused.value.reason == "CAPABILITY_MISSING"
    limited = wanted()
    limited.sandbox.companions[0].resources.pids = 100
    with pytest.raises(FailedPrecondition, match="a limit of pids of companions"):
        check_backend(read(driver, limited), [ABLE])
    check_backend(read(driver, limited), [replace(ABLE, limits=frozenset({"pids"}))])


def _fresh(spec: rollout_pb2.RolloutSpec) -> None:
    spec.task.verifier.fresh_fork = True


def _below(spec: rollout_pb2.RolloutSpec) -> None:
    spec.task.verifier.changes_below.append("/srv")


def _image(spec: rollout_pb2.RolloutSpec) -> None:
    spec.task.verifier.image = "judge"


def _kept(spec: rollout_pb2.RolloutSpec) -> None:
    spec.keep_end_state = True


def _network(spec: rollout_pb2.RolloutSpec) -> None:
    spec.sandbox.verifier_network.hosts.append("a.test")


def _wrong(spec: rollout_pb2.RolloutSpec) -> None:
    spec.sandbox.companions[0].health_check.timeout.CopyFrom(Duration())


@pytest.mark.requirement("R54", "R90")
@pytest.mark.parametrize(
    ("change", "field"),
    [
        (_fresh, "task.verifier.fresh_fork"),
        (_below, "task.verifier.changes_below"),
        (_image, "task.verifier.image"),
        (_kept, "keep_end_state"),
        (_network, "sandbox.verifier_network"),
        (_wrong, "sandbox.companions[0].health_check.timeout"),
    ],
)
def test_what_needs_a_fork_is_refused_beside_companions(
    driver: Driver, change: Callable[[rollout_pb2.RolloutSpec], None], field: str
) -> None:
    """A fork has them as they are in their images: a verifier there would grade work that it does not see."""
    spec = wanted()
    change(spec)
    with pytest.raises(InvalidArgument) as refused:
        read(driver, spec)
    assert [violation.field for violation in refused.value.violations] == [f"spec.{field}"]


async def test_companions_start_with_the_agents_sandbox_only(driver: Driver) -> None:
    """They are in the spec of the prepared state, whose forks have them, and not where a base is looked at."""
    spec, database = driver.spec(), sandbox_pb2.Companion(name="db", image="postgres:16")
    outcome = await driver.run(replace(spec, sandbox=replace(spec.sandbox, companions=(database,))))
    assert not outcome.HasField("failure"), outcome.failure
    (prepared,) = driver.sandboxes.wanted
    assert prepared.terms.companions == (database,)
    assert [terms.companions for terms in driver.sandboxes.looked_at] == [()]
