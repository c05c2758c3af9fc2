"""Cleanup of what is held at services that are away."""

from __future__ import annotations

from penstock_chassis.membership.peers import PeerLost
from penstock_driver.environments.cleanup import Cleanups


async def test_a_holder_waits_for_no_lost_peer() -> None:
    tried: list[str] = []

    async def release(holder_id: str) -> None:
        tried.append(holder_id)
        raise PeerLost("g1 does not answer: what it has is released later")

    assert not await Cleanups(release).release("r1")
    assert tried == ["r1"]
