"""The real agents in Docker sandboxes on gVisor: unmodified, on a kernel that is not the machine's."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
from tests.support.copying import WORD, copy_task, finish, training
from tests.support.docker import dockerd
from tests.support.services.stack import Running, running

from penstock.client import AgentChoice, Command


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def on_gvisor(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """Four services whose sandboxes are gVisor's."""
    engine = await asyncio.to_thread(dockerd.gvisor)
    sandbox = {
        "default_backend": "docker",
        "docker_host": engine.host,
        "docker_image": dockerd.BASE,
        "docker_sidecar_image": dockerd.BASE,
        "docker_runtime": dockerd.GVISOR,
    }
    with dockerd.nothing_left():
        async with running(tmp_path_factory.mktemp("stack-gvisor"), {"sandbox": sandbox}) as started:
            yield started


IN_LOCAL_SANDBOXES = pytest.mark.on_demand("opencode and pi on gVisor: they run in local sandboxes, shell here too")


@pytest.mark.requirement("R17", "R18", "R55", "R57", "R82")
@pytest.mark.parametrize(
    ("agent", "count"),
    [
        pytest.param("opencode", 1, marks=IN_LOCAL_SANDBOXES),
        pytest.param("pi", 1, marks=IN_LOCAL_SANDBOXES),
        ("shell", 2),
    ],
)
async def test_agents_at_the_gate_do_the_task_on_another_kernel(on_gvisor: Running, agent: str, count: int) -> None:
    """Prepared once and forked, its model calls answered, its turns exact."""
    label = secrets.token_hex(8)
    setup = [Command(shell=f"test $(uname -r) != {os.uname().release} && echo {WORD} > note.txt")]
    task = copy_task(on_gvisor, setup=setup)
    choice = AgentChoice(name=agent, skip_permissions=agent == "opencode")
    async with training(on_gvisor, label) as trainer:
        create = on_gvisor.ps.rollouts.create
        handles = [await create(task, choice, labels={"test": label, "n": str(n)}) for n in range(count)]
        ended = [await finish(handle) for handle in handles]
    for handle, finished in zip(handles, ended, strict=True):
        assert finished.reward == 1.0, finished.agent_said()
        assert finished.result.failure is None
        trajectory = await handle.trajectory()
        assert trajectory.grade == "exact", trajectory.findings
        for call in trajectory.calls:
            assert call.completion is not None
            np.testing.assert_array_equal(call.completion.token_ids, trainer.answers[call.call_id].token_ids)
