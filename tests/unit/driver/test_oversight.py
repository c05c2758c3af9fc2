"""What the driver takes for trouble: rollouts that ended and still hold something."""

from __future__ import annotations

from tests.support.waiting import eventually
from tests.unit.driver.conftest import Driver

from penstock_chassis.errors import Unavailable
from penstock_driver import metrics
from penstock_driver.oversight import Oversight
from penstock_driver.preflight import Preflight
from penstock_driver.rpc.terminal_forms import TerminalForms
from penstock_driver.terminals.fleet import Terminals
from penstock_driver.terminals.records import TerminalRecords


async def test_a_rollout_whose_sandbox_cannot_be_deleted_is_owed_until_it_can(driver: Driver) -> None:
    """R50: the rollout is over for its caller; operators are told whose sandbox is left, and by the next driver too."""
    terminals = Terminals(
        driver.records,
        TerminalRecords(driver.journal),
        driver.sandboxes,
        Preflight(driver.sandboxes, driver.gate),
        TerminalForms(),
        instance_id="d1",
        max_open=1,
    )
    await driver.run(driver.order())
    assert not list(Oversight(driver.fleet, terminals).troubles(0.0))
    away = driver.sandboxes.fail["delete_labelled"] = [Unavailable("away", reason="X")] * 1000
    driver.sandboxes.fail["delete"] = [Unavailable("away", reason="X")]
    record = await driver.start(driver.order())
    await driver.outcome(record)
    for _ in range(2):
        look = Oversight(driver.fleet, terminals)
        (trouble,) = look.troubles(0.0)
        assert (trouble.reason, trouble.subjects, trouble.grave) == ("RELEASES_OWED", (record.rollout_id,), True)
        assert "1 rollout ended" in trouble.message and "sandbox and interception services" in trouble.advice
        with look.told():
            assert metrics.OWED.values() == {(): 1.0}
        await driver.fleet.aclose()
        driver.fleet = driver.make()
        await driver.fleet.recover()
    away.clear()
    look = Oversight(driver.fleet, terminals)
    await eventually(lambda: not list(look.troubles(0.0)), "what was owed is released")
    await terminals.aclose()
