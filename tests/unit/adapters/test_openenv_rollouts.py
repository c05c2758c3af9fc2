"""What `run_rollout` tells of a rollout, by its events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.adapters.openenv.rollout_arguments import Defaults, RunRollout
from penstock.adapters.openenv.rollouts import run_rollout
from penstock.client import CommandFinished, Ended, Penstock, Phase
from penstock.client.types.results import Exit, Outcome


def finished(phase: Phase, index: int, code: int) -> CommandFinished:
    ended = Exit("exited", code, None, "", 0.1)
    return CommandFinished(phase, index, "shown", ended, b"", b"")


@pytest.mark.requirement("R57", "R71")
async def test_commands_that_a_restarted_driver_repeats_are_told_once() -> None:
    """Setup and verifier begin anew with their first command; the last run of each command is the one that counted."""
    setting_up, verifying = Phase.SETTING_UP, Phase.VERIFYING
    ran = [(setting_up, 0, 0), (setting_up, 0, 0), (setting_up, 1, 0)]
    graded = [(verifying, 0, 1), (verifying, 1, 1), (verifying, 0, 0), (verifying, 1, 2), (verifying, 2, 0)]

    async def events() -> AsyncIterator[Any]:
        for phase, index, code in [*ran, *graded]:
            yield SimpleNamespace(payload=finished(phase, index, code))
        yield SimpleNamespace(payload=Ended(Outcome()))

    async def create(*_: object, **__: object) -> Any:
        return SimpleNamespace(events=events, rollout_id="r1")

    ps = cast(Penstock, SimpleNamespace(rollouts=SimpleNamespace(create=create)))
    given = RunRollout(
        instruction="go", endpoint="inference", mode="black_box", setup=["a", "b"], verify=["c", "d", "e"]
    )
    result = await run_rollout(ps, given, Defaults(), seed=None, labels={})
    assert [(item.cmd, item.exit_code) for item in result.setup_results] == [("a", 0), ("b", 0)]
    assert [(item.cmd, item.exit_code) for item in result.verify_results] == [("c", 0), ("d", 2), ("e", 0)]
