"""Cleanup of what is held at services that are away."""

from __future__ import annotations

import asyncio

from penstock_chassis.membership.peers import PeerLost
from penstock_driver.environments.cleanup import Cleanups, nothing


async def test_a_holder_waits_for_no_lost_peer() -> None:
    tried: list[str] = []

    async def release(holder_id: str) -> None:
        tried.append(holder_id)
        raise PeerLost("g1 does not answer: what it has is released later")

    assert not await Cleanups(release).release("r1")
    assert tried == ["r1"]


async def test_what_a_peer_has_that_is_back_is_released_at_once() -> None:
    """The pause between two attempts grows to a minute: a host that is back must not keep agents' keys for so long."""
    lost, tried = {"g1"}, asyncio.Queue[str]()

    async def release(holder_id: str) -> None:
        tried.put_nowait(holder_id)
        if lost:
            raise PeerLost("g1 does not answer: what it has is released later")

    cleanups = Cleanups(release)
    cleanups.owe("r1", nothing)
    for _ in range(8):  # each look ends the pause before the next attempt
        assert await tried.get() == "r1"
        cleanups.look_again()
    lost.clear()
    cleanups.look_again()
    await tried.get()
    await cleanups.aclose()
    assert not cleanups.owed
