"""A driver that is killed, or stopped, again and again; the long run is `python -m tests.support.services.restarts`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.services.restarts import Plan, restarts


@pytest.mark.requirement("R127")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stops", [False, True], ids=["killed", "stopped"])
async def test_rollouts_of_a_restarted_driver_end_as_undisturbed(tmp_path: Path, *, stops: bool) -> None:
    """The same rewards, the same calls asked once, the same events, in one attempt."""
    account = await restarts(Plan(count=6 if stops else 9, kills=3 if stops else 5, seed=3, stops=stops), tmp_path)
    assert not account.faults, str(account)
