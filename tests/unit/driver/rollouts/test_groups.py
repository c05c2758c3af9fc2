"""Groups: results, spares, quorum and stragglers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.driver.conftest import Driver

from penstock.driver.v1 import rollout_pb2
from penstock_driver.domain.ports import GateClosing
from penstock_driver.domain.records import GroupPlan, GroupRecord
from penstock_driver.rollouts.groups import GroupPolicy, Verdict
from penstock_driver.wire.to_proto import group_to_proto


@pytest.mark.requirement("R70")
@given(size=st.integers(1, 20), data=st.data())
def test_group_is_cancelled_only_when_the_quorum_has_results(size: int, data: st.DataObject) -> None:
    """The policy, for every size, quorum and number of results."""
    quorum, results = data.draw(st.integers(1, size)), data.draw(st.integers(0, 2 * size))
    patient, hasty = GroupPolicy(size, quorum), GroupPolicy(size, quorum, 1.0)
    assert (patient.verdict(results) is Verdict.CANCEL_REST) == (results >= size)
    assert (hasty.verdict(results) is Verdict.WAIT) == (results < quorum)


async def start_group(driver: Driver, size: int, spares: int, quorum: int, grace_s: float | None) -> GroupRecord:
    spec = replace(driver.spec(), choice=replace(driver.spec().choice, seed=100))
    return await driver.start_group(spec, GroupPlan(size, spares, quorum, grace_s))


async def ended(driver: Driver, group: GroupRecord) -> rollout_pb2.Group:
    for rollout_id in group.rollout_ids:
        await driver.manager.wait(rollout_id, 60)
    is_over = not await driver.records.without_end(group.rollout_ids)
    return group_to_proto(group, await driver.records.group_ended(group.group_id), is_over=is_over)


@pytest.mark.requirement("R70")
async def test_surplus_rollouts_are_cancelled_when_the_results_are_there(driver: Driver) -> None:
    """Five of eight are held at the gate for ever, and the group of two with six spares completes."""
    driver.gate.hold, driver.gate.holds = asyncio.Event(), lambda body: body["seed"] > 102
    group = await start_group(driver, size=2, spares=6, quorum=2, grace_s=None)
    shown = await ended(driver, group)
    assert shown.complete
    assert shown.ended
    assert set(shown.result_rollout_ids) <= set(group.rollout_ids[:3])
    assert len(shown.result_rollout_ids) == 2
    reasons = [(await driver.outcome(await driver.manager.get(item))).failure.reason for item in group.rollout_ids[3:]]
    assert reasons == ["GROUP_COMPLETE"] * 5
    assert {body["seed"] for _, _, body in driver.gate.requests} <= set(range(100, 108)), "seed plus index"


@pytest.mark.requirement("R70")
async def test_stragglers_are_cancelled_after_the_grace(driver: Driver) -> None:
    """One of three is held for ever; two are the quorum."""
    driver.gate.hold, driver.gate.holds = asyncio.Event(), lambda body: body["seed"] == 101
    group = await start_group(driver, size=3, spares=0, quorum=2, grace_s=0.01)
    shown = await ended(driver, group)
    assert shown.complete
    assert shown.result_rollout_ids and group.rollout_ids[1] not in shown.result_rollout_ids
    outcome = await driver.outcome(await driver.manager.get(group.rollout_ids[1]))
    assert outcome.failure.reason == "STRAGGLER"


@pytest.mark.requirement("R74")
async def test_a_group_that_gets_no_results_ends_and_is_not_complete(driver: Driver) -> None:
    """Failures of the task are no results."""
    driver.gate.script = lambda _: 400
    driver.gate.closing = GateClosing("", 1, 1)
    shown = await ended(driver, await start_group(driver, size=2, spares=1, quorum=1, grace_s=None))
    assert (shown.ended, shown.complete, list(shown.result_rollout_ids)) == (True, False, [])
