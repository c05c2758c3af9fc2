"""R105 through a sandbox's one endpoint: what the relay took is not what the agent took."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.integration.interception.connections.test_delivery import SIZES, Peer, attempts
from tests.integration.interception.test_flow import WIRES
from tests.support.waiting import eventually

from penstock_sandbox.testing import open_endpoint


@pytest.fixture
async def door(service: Any) -> AsyncIterator[tuple[str, int]]:
    """The listener of a sandbox whose one endpoint is the ingress."""
    async with open_endpoint(service.ingress) as address:
        yield address


@pytest.mark.requirement("R34", "R105")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dialect", WIRES)
async def test_answer_lost_behind_the_relay_is_given_to_the_same_request(
    service: Any, door: tuple[str, int], dialect: str, size: int, stream: bool
) -> None:
    """The agent's end broke off after 60 bytes; all of it was in the relay's hands."""
    rollout, trainer = await service.open(), await service.trainer()

    def peer() -> Peer:
        made = Peer(service, rollout, dialect, stream=stream)
        made.address = door
        return made

    first = peer()
    await first.ask()
    await trainer.answer("x" * size)
    await first.read(60)
    first.sock.close()
    again = peer()
    await again.ask()
    assert len(await again.read()) > size
    assert await attempts(service, rollout) == [2]
    again.sock.close()
    call = service.interceptor.registry.rollout(rollout.rollout_id).calls[0]
    await eventually(lambda: call.answer_sent, "taken")
    third = peer()
    await third.ask()
    await trainer.answer("another")
    await third.read()
    assert await attempts(service, rollout) == [2, 1]


@pytest.mark.requirement("R105")
async def test_an_endpoint_that_is_closed_has_not_delivered_what_it_carried(service: Any) -> None:
    """The sandbox's network was cut while its agent had not read: the call is not told."""
    rollout, trainer = await service.open(), await service.trainer()
    peer = Peer(service, rollout, "chat", stream=False)
    async with open_endpoint(service.ingress) as peer.address:
        await peer.ask()
        await trainer.answer("x" * 6000)
        await peer.read(60)
    again = Peer(service, rollout, "chat", stream=False)
    await again.ask()
    assert len(await again.read()) > 6000
    assert await attempts(service, rollout) == [2]
