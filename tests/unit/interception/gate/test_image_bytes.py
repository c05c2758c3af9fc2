"""What images of agents take of a rollout's journal, and of the gate's memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.services.inner_gate import inner_gate

from penstock_chassis.errors import ResourceExhausted
from penstock_codec.chat import ImagePart
from penstock_interception.domain.folded_bodies import FoldedBody, fold
from penstock_interception.gate.context import GateLimits

BODY = b'{"messages":[{"role":"user","content":"a"}]}'
KEPT = GateLimits(max_rollout_bytes=100_000)


def showing(*shades: int) -> FoldedBody:
    """A body out of which the text of these images cannot be cut."""
    folded = fold(BODY, [ImagePart.inline(bytes([shade]) * 30_000, "image/png") for shade in shades])
    assert folded is not None and not folded.cuts
    return folded


@pytest.mark.requirement("R96", "R137")
async def test_images_count_once_towards_a_rollouts_journal_after_a_restart_too(tmp_path: Path) -> None:
    """They are kept beside the bodies, and their text in a body may stay there."""
    async with inner_gate(tmp_path, limits=KEPT) as gate:
        rollout = await gate.open()
        for _ in range(3):
            await gate.ask(rollout, "a", folded=showing(1))
        await gate.ask(rollout, "a", folded=showing(1, 2))
    async with inner_gate(tmp_path, limits=KEPT) as gate:
        rollout = gate.interceptor.registry.rollout("r1")
        await gate.ask(rollout, "a", folded=showing(2, 1))
        with pytest.raises(ResourceExhausted):
            await gate.ask(rollout, "a", folded=showing(3))
        assert rollout.exhausted_budget == "journal_bytes"


@pytest.mark.requirement("R137")
async def test_a_waiting_call_does_not_hold_its_images_twice(tmp_path: Path) -> None:
    """Its body has them; the journal's write has what is stored."""
    async with inner_gate(tmp_path) as gate:
        call = await gate.ask(await gate.open(), "a", folded=showing(1))
        await gate.store.settled()
        assert call.request.folded is None and call.request.body
        assert list(call.rollout.images) == list(showing(1).images)
