"""Allow-lists of a task by phase, in real rollouts: setup, agent and verifier each reach what theirs names."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from tests.support.endpoints import egress_upstream
from tests.support.endpoints.egress_upstream import Indexes
from tests.support.services.stack import Running, running

from penstock.client import Allowlist, Command, InvalidArgument, SandboxChoice, Task, Verifier
from penstock.tasks.scripts import script
from penstock.tasks.solutions import solving_agent

# Clients leave loopback out by default.
CURL = "curl -sS --noproxy '' "


@pytest_asyncio.fixture(loop_scope="session")
async def indexes(tmp_path: Path) -> AsyncIterator[Indexes]:
    async with egress_upstream.running(tmp_path) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="session")
async def stack(tmp_path: Path, indexes: Indexes) -> AsyncIterator[Running]:
    tmp_path.chmod(0o755)
    (tmp_path / "stack").mkdir()
    settings = {
        "egress_hosts": ["localhost", "127.0.0.1"],
        "egress_private_addresses": ["127.0.0.1/32"],
        "egress_ca": str(indexes.ca),
    }
    async with running(tmp_path / "stack", {"sandbox": settings}, agents=False) as started:
        yield started


def task_of(indexes: Indexes) -> Task:
    """Counts what it asks: setup once, the agents of a group once together, and their verifiers once together."""
    by_name, by_number = f"{indexes.plain_url}/count", f"http://127.0.0.1:{indexes.plain_port}/count"

    def listed(host: str) -> Allowlist:
        return Allowlist(hosts=[host], ports=[indexes.plain_port])

    return Task(
        task_id="networks",
        setup=[Command(shell=f"{CURL} {by_name} > setup.txt && test $(cat setup.txt) = 1")],
        instruction=script(
            [Command(shell=f"{CURL} {by_name} > agent.txt"), Command(shell=f"{CURL} {by_number} > refused.txt")]
        ),
        verifier=Verifier(
            commands=[
                Command(shell="test $(cat setup.txt) = 1"),
                Command(shell="test $(cat agent.txt) = 2"),
                Command(shell="grep -q 'list of denied hosts names 127.0.0.1' refused.txt"),
                Command(shell=f"test $({CURL} {by_number}) = 3"),
                Command(shell=f"{CURL} {by_name} | grep -q 'list of hosts does not name localhost'"),
            ]
        ),
        sandbox=SandboxChoice(
            setup_network=listed("localhost"),
            # All else that the operator allows.
            agent_network=Allowlist(denied_hosts=["127.0.0.0/8"], ports=[indexes.plain_port]),
            verifier_network=listed("127.0.0.1"),
        ),
    )


@pytest.mark.requirement("R141")
async def test_each_phase_reaches_its_own_hosts_and_siblings_get_the_same(stack: Running, indexes: Indexes) -> None:
    group = await stack.ps.groups.create(task_of(indexes), await solving_agent(stack.ps), n=3, mode="transparent_proxy")
    results = await group.results()
    assert [(result.failure, result.reward and result.reward.value) for result in results] == [(None, 1.0)] * 3
    assert indexes.asked == {"GET /count": 3}


@pytest.mark.requirement("R140", "R141")
async def test_a_verifier_that_grades_again_gets_the_same(stack: Running, indexes: Indexes) -> None:
    """From the recording: nothing is asked upstream once more."""
    group = await stack.ps.groups.create(task_of(indexes), await solving_agent(stack.ps), n=1, mode="transparent_proxy")
    await group.results()
    grade = await stack.ps.rollouts.regrade(f"{group.group_id}-0", name="again")
    assert (grade.failure, grade.reward and grade.reward.value) == (None, 1.0)
    assert indexes.asked == {"GET /count": 3}


@pytest.mark.requirement("R141")
async def test_what_cannot_hold_is_refused_before_anything_starts(stack: Running, indexes: Indexes) -> None:
    task = task_of(indexes)
    assert task.verifier is not None
    beside = replace(task, verifier=replace(task.verifier, fresh_fork=False))
    with pytest.raises(InvalidArgument) as caught:
        await stack.ps.rollouts.create(beside, await solving_agent(stack.ps), mode="transparent_proxy")
    (violation,) = caught.value.violations
    assert violation.field == "spec.sandbox.verifier_network" and "fresh fork" in violation.description
    assert not indexes.asked
