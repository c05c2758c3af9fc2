"""Request ids are names in a namespace: two teams choose the same ones, and never notice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.services.inner_gate import inner_gate

from penstock_chassis.errors import AlreadyExists
from penstock_interception.testing import SPEC, OpenGate

OURS = replace(SPEC, request_id="open-1", rollout_id="ours", namespace="team-a")
THEIRS = replace(SPEC, request_id="open-1", rollout_id="theirs", namespace="team-b")


async def check(gate: OpenGate) -> None:
    """Each namespace's request is its own rollout, and another one with its id is refused."""
    for spec in (OURS, THEIRS):
        assert (await gate.open(spec)).id == spec.rollout_id
        with pytest.raises(AlreadyExists) as caught:
            await gate.open(spec, rollout_id="other")
        assert caught.value.reason == "REQUEST_ID_REUSED"


@pytest.mark.requirement("R107")
async def test_two_namespaces_open_rollouts_with_one_request_id(tmp_path: Path) -> None:
    """The second one beside the first, after a restart too, and again once one is deleted."""
    async with inner_gate(tmp_path) as gate:
        await gate.open(OURS)
        await check(gate)
    async with inner_gate(tmp_path) as gate:
        assert {rollout.id for rollout in gate.interceptor.registry.rollouts()} == {"ours", "theirs"}
        await check(gate)
        await gate.interceptor.rollouts.delete("ours")
    async with inner_gate(tmp_path) as gate:
        assert [rollout.id for rollout in gate.interceptor.registry.rollouts()] == ["theirs"]
        await check(gate)


@pytest.mark.requirement("R107")
async def test_a_rollout_from_before_a_restart_takes_no_request_id_of_another_namespace(tmp_path: Path) -> None:
    """The first one is read from the journal before the second one comes."""
    async with inner_gate(tmp_path) as gate:
        await gate.open(OURS)
    async with inner_gate(tmp_path) as gate:
        await check(gate)
