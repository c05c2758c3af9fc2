"""The course of a rollout, with the real shell agent."""

from __future__ import annotations

from tests.unit.driver.conftest import Driver


async def test_a_rollout_of_the_shell_agent_is_rewarded_by_its_verifier(driver: Driver) -> None:
    """R57, R59, R79."""
    record = await driver.start(driver.order())
    outcome = await driver.outcome(record)
    for e in await driver.events(record.rollout_id):
        print(e)
    assert not outcome.HasField("failure"), outcome
    assert outcome.reward.value == 1.0
