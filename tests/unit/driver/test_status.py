"""What the driver takes for trouble: rollouts that ended and still hold something."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
from tests.support.waiting import eventually
from tests.unit.driver.conftest import Driver

from penstock_chassis.errors import Unavailable
from penstock_chassis.membership.members import Member
from penstock_chassis.membership.peers import Host, Peer, State
from penstock_chassis.membership.reporting import PEER_LOST, PEER_UP
from penstock_driver import metrics
from penstock_driver.domain.rollout import Phase
from penstock_driver.placement.placement import OnePlace
from penstock_driver.status import Health

NOWHERE = OnePlace(cast(Any, None))


@dataclass(frozen=True)
class Members:
    """A placement with these members."""

    sandbox: tuple[Peer, ...]

    def peers(self) -> dict[str, tuple[Peer, ...]]:
        return {"sandbox": self.sandbox, "interception": ()}


async def test_each_lost_host_is_named(driver: Driver) -> None:
    lost, restarting, up = (
        Peer(
            Member(name, f"host-{name}:7701"),
            cast(Any, None),
            state=state,
            host=Host.SILENT if name == "n0" else Host.REFUSING,
        )
        for name, state in (("n0", State.LOST), ("n1", State.LOST), ("n2", State.DRAINING))
    )
    look = Health(driver.manager, driver.opened.parts.terminals, cast(Any, Members((lost, restarting, up))))
    troubles = list(look.troubles(60.0))
    assert [(trouble.reason, trouble.subjects, trouble.grave) for trouble in troubles] == [
        ("MEMBER_LOST", ("n0",), True),
        ("MEMBER_LOST", ("n1",), True),
    ]
    assert "n0 at host-n0:7701" in troubles[0].message and "host is silent" in troubles[0].message
    assert "although its host answers" in troubles[1].message
    with look.reported():
        assert PEER_UP.values() == {("sandbox",): 1.0, ("interception",): 0.0}
        assert PEER_LOST.values() == {("sandbox",): 2.0, ("interception",): 0.0}


@pytest.mark.requirement("R125")
async def test_an_idle_driver_says_that_it_runs_nothing(driver: Driver) -> None:
    """Autoscalers take a gauge without values for an error, and keep the fleet at its peak."""
    look = Health(driver.manager, driver.opened.parts.terminals, NOWHERE)
    with look.reported():
        assert metrics.ROLLOUTS.values() == {(phase.name.lower(),): 0 for phase in Phase if phase is not Phase.ENDED}


@pytest.mark.requirement("R50")
async def test_a_rollout_whose_sandbox_cannot_be_deleted_is_owed_until_it_can(driver: Driver) -> None:
    """The rollout is over for its caller; operators are told whose sandbox is left, and by the next driver too."""
    terminals = driver.opened.parts.terminals
    await driver.run(driver.spec())
    assert not list(Health(driver.manager, terminals, NOWHERE).troubles(0.0))
    away = driver.sandboxes.fail["delete_labelled"] = [Unavailable("away", reason="X")] * 1000
    driver.sandboxes.fail["delete"] = [Unavailable("away", reason="X")]
    record = await driver.start(driver.spec())
    await driver.outcome(record)
    for _ in range(2):
        look = Health(driver.manager, terminals, NOWHERE)
        (trouble,) = look.troubles(0.0)
        assert (trouble.reason, trouble.subjects, trouble.grave) == ("RELEASES_OWED", (record.rollout_id,), True)
        assert "1 rollout ended" in trouble.message and "sandbox and interception services" in trouble.advice
        with look.reported():
            assert metrics.OWED.values() == {(): 1.0}
        await driver.manager.aclose()
        driver.manager = driver.make()
        await driver.manager.recover()
    away.clear()
    look = Health(driver.manager, terminals, NOWHERE)
    await eventually(lambda: not list(look.troubles(0.0)), "what was owed is released")
    await terminals.aclose()


@pytest.mark.requirement("R50")
async def test_sandboxes_of_an_ended_rollout_are_over_with_their_leases(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody renews them; how long they could live is known while the rollout's record is there."""
    over: list[bool] = []

    async def release(_rollout_id: str, _labels: object, *, sandboxes_over: bool) -> None:
        over.append(sandboxes_over)

    record = await driver.start(driver.spec())
    await driver.outcome(record)
    monkeypatch.setattr(driver.manager._placement, "release", release)
    await driver.manager._release(record.rollout_id)
    monkeypatch.setattr("penstock_driver.rollouts.manager.MAKE_S", -driver.spec().limits.sandbox_s)
    await driver.manager._release(record.rollout_id)
    await driver.manager.delete(record.rollout_id)
    await driver.manager._release(record.rollout_id)
    assert over == [False, True, False]
