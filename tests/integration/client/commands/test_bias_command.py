"""A stream of batches over real services, and what is left of one that a trainer leaves."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from tests.integration.client.conftest import TASK
from tests.integration.client.test_watch import connection
from tests.support.terminal.commands import invoke

from penstock.client import FailureCause, Mode, Paced, Penstock

__all__ = ["connection"]  # a fixture
pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.requirement("R136")
async def test_a_trainer_gets_every_group_of_a_stream_and_the_meter_finds_no_bias(
    ps: Penstock, connection: dict[str, str], tmp_path: Path
) -> None:
    """With samples, rewards and baselines; the command line counts the same rollouts."""
    tasks = [replace(TASK, task_id=f"copy-{number}") for number in range(2)]
    trained = []
    async with (
        ps.stream(
            tasks,
            "shell",
            2,
            pacing=Paced(batch=1, max_staleness=1),
            concurrency=4,
            mode=Mode.TRANSPARENT_PROXY,
            run_id="streamed",
        ) as stream,
        aclosing(stream.batches()) as batches,
    ):
        async for batch in batches:
            (group,) = batch.groups
            assert group.error is None and group.baseline == 0.75 and group.staleness <= 1
            assert all(result.trajectory is not None and result.trajectory.samples for result in group.results)
            trained.append((group.task.task_id, [result.rollout_id for result in group.results]))
    assert sorted(task_id for task_id, _ in trained) == ["copy-0", "copy-1"]
    bias = stream.bias()
    assert (bias.started, bias.running, bias.trained, bias.distance) == (4, 0, 4, 0.0)

    code, out, err = invoke("bias", "streamed", environment=connection)
    assert code == 0 and "distance 0.0000: 4 trained of 4 started" in out, err
    (tmp_path / "ids").write_text("\n".join(trained[0][1]))
    code, out, err = invoke("bias", "streamed", "--trained", str(tmp_path / "ids"), environment=connection)
    assert code == 0 and "distance 0.5000: 2 trained of 4 started" in out, (out, err)


async def test_rollouts_of_a_stream_that_is_left_are_cancelled(ps: Penstock) -> None:
    """They wait for answers that nobody gives any more."""
    async with (
        ps.stream([TASK], "shell", 1, pacing=Paced(batch=1, max_staleness=0), concurrency=1, run_id="left") as stream,
        aclosing(ps.rollouts.watch(run_id="left")) as changes,
    ):
        async for change in changes:
            if change.rollouts:
                break
    ended = [rollout async for rollout in ps.rollouts.list(run_id="left")]
    causes = [rollout.outcome and rollout.outcome.failure and rollout.outcome.failure.cause for rollout in ended]
    assert causes == [FailureCause.CANCELLED] and stream.bias().running == 0
