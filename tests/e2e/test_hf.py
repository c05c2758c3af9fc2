"""The real agents on the backend `hf`, whose unmodified SDK talks to a stand-in of Hugging Face's Jobs.

What that does not show stands in `tests/support/hf_jobs/__init__.py`.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np
import pytest
import pytest_asyncio
from tests.support.copying import copy_task, finish, training
from tests.support.hf_jobs.client import HfJobs, hf_jobs
from tests.support.services.stack import Running, running
from tests.support.waiting import eventually_async

from penstock.client import AgentChoice, Command


@dataclass(frozen=True)
class OnHf:
    """A stack whose sandboxes are jobs, and what says of those."""

    stack: Running
    jobs: HfJobs


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def on_hf(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OnHf]:
    """Four services, and the stand-in beside them."""
    async with hf_jobs() as jobs:
        with pytest.MonkeyPatch.context() as environment:
            # Not its proxy: that leads nowhere else, and npm needs its registry.
            for name in ("HF_ENDPOINT", "HF_TOKEN"):
                environment.setenv(name, jobs.environment[name])
            settings = {"sandbox": {"default_backend": "hf", "hf_allow_open_egress": True}}
            async with running(tmp_path_factory.mktemp("stack-hf"), settings) as started:
                yield OnHf(started, jobs)


@pytest.mark.requirement("R17", "R18", "R50", "R57", "R59", "R82")
@pytest.mark.parametrize(
    ("agent", "count"),
    [
        ("shell", 2),
        *(
            pytest.param(
                *(agent, 1),
                marks=pytest.mark.on_demand(
                    "pi and opencode in jobs: they run in local sandboxes, and shell and toolboxes run in jobs"
                ),
            )
            for agent in ("pi", "opencode")
        ),
    ],
)
async def test_agents_finish_the_task_in_jobs_and_leave_nothing(on_hf: OnHf, agent: str, count: int) -> None:
    """What was prepared is in each job, and model calls come back without a tunnel."""
    label = secrets.token_hex(8)
    setup = [
        Command(shell="echo kiwi > note.txt; mkdir -p deep/er; ln -s ../note.txt deep/link; chmod 700 deep"),
        # The runtime came with the toolbox: whatever this machine has, a job has not.
        *([Command(shell="command -v node | grep -x /opt/penstock/runtimes/node/bin/node")] if agent == "pi" else ()),
    ]
    task = copy_task(on_hf.stack, setup=setup)
    choice = AgentChoice(name=agent, skip_permissions=agent == "opencode")
    async with training(on_hf.stack, label) as trainer:
        create = on_hf.stack.ps.rollouts.create
        handles = [await create(task, choice, labels={"test": label, "n": str(n)}) for n in range(count)]
        ended = [await finish(handle) for handle in handles]
    for handle, finished in zip(handles, ended, strict=True):
        assert finished.reward == 1.0, finished.agent_said()
        assert finished.result.failure is None
        trajectory = await handle.trajectory()
        assert trajectory.grade == "exact", trajectory.findings
        assert [call.call_class for call in trajectory.calls].count("main") == 2
        for call in trajectory.calls:
            assert call.completion is not None
            np.testing.assert_array_equal(call.completion.token_ids, trainer.answers[call.call_id].token_ids)

    async def none_runs() -> bool:
        return not await on_hf.jobs.running()

    await eventually_async(none_runs, "every job is ended")
