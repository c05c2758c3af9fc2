"""A short soak: every kind of kill once among rollouts; the long one is `python -m tests.support.services.soak`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.services.soak import Plan, soak

KINDS = 9


@pytest.mark.requirement("R43", "R49", "R50", "R62", "R74")
@pytest.mark.timeout(1500)
async def test_rollouts_among_kills_are_all_accounted_for_and_leave_nothing(
    tmp_path: Path,
) -> None:
    """Each ends once, by type and party; no zero that the agent did not earn; no leak."""
    account = await soak(Plan(count=36, kills=KINDS, calm=6, seed=7), tmp_path)
    assert not account.faults, str(account)
    assert account.killed.keys() >= {"sandbox", "spawner", "interception", "driver", "inference"}, str(account)
    assert account.ends["completed"] >= 6, str(account)
