"""Rollouts with companions: graded in a fork that joins their network, or in the agent's sandbox, and nowhere else."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from tests.unit.driver.conftest import Driver

from penstock.driver.v1 import rollout_pb2
from penstock.interception.v1 import interception_pb2
from penstock.sandbox.v1 import sandbox_pb2
from penstock_chassis.errors import FailedPrecondition, InvalidArgument
from penstock_driver.domain.ports import BackendFacts
from penstock_driver.domain.rollout import RolloutSpec, Verifier
from penstock_driver.domain.unended import Stage
from penstock_driver.grading import grader
from penstock_driver.rollouts.preflight import check_backend
from penstock_driver.rollouts.recorder import RolloutRecorder
from penstock_driver.store.end_states import EndStates
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
@pytest.mark.parametrize("asked", [None, True, False])
def test_a_rollout_with_companions_is_graded_in_a_fresh_fork_as_any_other(driver: Driver, asked: bool | None) -> None:
    spec = wanted()
    if asked is not None:
        spec.task.verifier.fresh_fork = asked
    placed = check_backend(read(driver, spec), [ABLE])
    assert placed.task.verifier is not None and placed.task.verifier.fresh_fork is (asked is not False)


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


def _judged(spec: rollout_pb2.RolloutSpec) -> None:
    spec.task.verifier.judge.source.upstream.name = "judge"


def _limited(spec: rollout_pb2.RolloutSpec) -> None:
    spec.task.verifier.resources.pids = 100


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
        (_judged, "task.verifier.judge"),
        (_limited, "task.verifier.resources"),
        (_image, "task.verifier.image"),
        (_kept, "keep_end_state"),
        (_network, "sandbox.verifier_network"),
        (_wrong, "sandbox.companions[0].health_check.timeout"),
    ],
)
def test_what_a_verifier_beside_companions_cannot_have_is_refused(
    driver: Driver, change: Callable[[rollout_pb2.RolloutSpec], None], field: str
) -> None:
    """Another sandbox than the agent's, a network that they would share, a grade when they are gone."""
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


@pytest.mark.requirement("R49", "R90")
@pytest.mark.parametrize("beside", [True, False])
async def test_the_agents_sandbox_is_read_then_joined_and_goes_with_its_fork(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    """What holds the companions lives as long as the verifier. No end state is kept, which would not have them.

    The next driver process grades from the agent's sandbox, until a verifier may have begun.
    """
    run, fork, reach = driver.sandboxes.run, driver.sandboxes.fork, RolloutRecorder.reach
    steps: list[str] = []

    async def unchanged(sandbox_id: str, below: Any, sink: Any, max_bytes: int) -> list[str]:
        tarfile.open(fileobj=sink, mode="w").close()
        steps.append(f"read {sandbox_id}")
        return []

    async def seen_run(sandbox_id: str, *args: Any, **options: Any) -> Any:
        if steps:
            steps.append(f"verified beside {sorted(driver.sandboxes.boxes.keys() - {sandbox_id})}")
        return await run(sandbox_id, *args, **options)

    async def seen_fork(*args: Any, **options: Any) -> Any:
        if options["joins"]:
            steps.append(f"joined {options['joins']}")
        return await fork(*args, **options)

    async def seen_reach(recorder: RolloutRecorder, stage: Stage, *args: Any) -> None:
        steps.append(stage.value)
        await reach(recorder, stage, *args)

    async def keep(*_: Any) -> bool:
        steps.append("kept")
        return True

    monkeypatch.setattr(driver.sandboxes, "diff", unchanged)
    monkeypatch.setattr(driver.sandboxes, "run", seen_run)
    monkeypatch.setattr(driver.sandboxes, "fork", seen_fork)
    monkeypatch.setattr(RolloutRecorder, "reach", seen_reach)
    monkeypatch.setattr(EndStates, "keep", keep)
    monkeypatch.setattr(grader, "IN_MEMORY", ())  # where these boxes are
    spec, database = driver.spec(), sandbox_pb2.Companion(name="db", image="postgres:16")
    assert spec.task.verifier is not None
    fresh: Verifier = replace(spec.task.verifier, fresh_fork=True)
    companions = (database,) if beside else ()
    spec = replace(spec, task=replace(spec.task, verifier=fresh), sandbox=replace(spec.sandbox, companions=companions))
    outcome = await driver.run(spec)
    assert outcome.HasField("reward"), outcome.failure
    agents = steps[0].removeprefix("read ")
    if beside:
        graded = [f"joined {agents}", "GRADING", f"verified beside ['{agents}']", "DECIDED"]
        assert steps == [f"read {agents}", *graded]
    else:
        assert {"CARRIED", "kept"} < set(steps) and not [step for step in steps if step.startswith("joined")]
