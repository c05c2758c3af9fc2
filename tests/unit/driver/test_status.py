"""What the driver takes for trouble: rollouts that ended and still hold something."""

from __future__ import annotations

import pytest
from tests.support.waiting import eventually
from tests.unit.driver.conftest import Driver

from penstock_chassis.errors import Unavailable
from penstock_driver import metrics
from penstock_driver.status import Health


@pytest.mark.requirement("R50")
async def test_a_rollout_whose_sandbox_cannot_be_deleted_is_owed_until_it_can(driver: Driver) -> None:
    """The rollout is over for its caller; operators are told whose sandbox is left, and by the next driver too."""
    terminals = driver.opened.parts.terminals
    await driver.run(driver.spec())
    assert not list(Health(driver.manager, terminals).troubles(0.0))
    away = driver.sandboxes.fail["delete_labelled"] = [Unavailable("away", reason="X")] * 1000
    driver.sandboxes.fail["delete"] = [Unavailable("away", reason="X")]
    record = await driver.start(driver.spec())
    await driver.outcome(record)
    for _ in range(2):
        look = Health(driver.manager, terminals)
        (trouble,) = look.troubles(0.0)
        assert (trouble.reason, trouble.subjects, trouble.grave) == ("RELEASES_OWED", (record.rollout_id,), True)
        assert "1 rollout ended" in trouble.message and "sandbox and interception services" in trouble.advice
        with look.reported():
            assert metrics.OWED.values() == {(): 1.0}
        await driver.manager.aclose()
        driver.manager = driver.make()
        await driver.manager.recover()
    away.clear()
    look = Health(driver.manager, terminals)
    await eventually(lambda: not list(look.troubles(0.0)), "what was owed is released")
    await terminals.aclose()
