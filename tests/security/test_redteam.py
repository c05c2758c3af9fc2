"""The attacks of `penstock.redteam` on deployments of their own: one test for each attack, grading and backend."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, cast

import pytest
import pytest_asyncio
from tests.support.stack import running

from penstock import redteam
from penstock.redteam import Attack, Grading, Result, Verdict

JOBS: Final = [(attack, grading) for attack in redteam.registry().values() for grading in attack.grading]
# The first test of a deployment waits for all of its attacks.
pytestmark = pytest.mark.timeout(1200)

Results = Mapping[tuple[str, Grading], Result]


@asynccontextmanager
async def attacked(folder: Path, backend: str, jobs: list[tuple[Attack, Grading]]) -> AsyncIterator[Results]:
    """What came of the attacks that are asked for, all on one deployment."""
    chosen = [
        attack.model_copy(update={"grading": tuple(grading for other, grading in jobs if other.name == attack.name)})
        for attack in redteam.registry().values()
        if any(other.name == attack.name for other, _ in jobs)
    ]
    async with running(folder) as stack:
        report = await redteam.run(stack.ps, chosen, backend=backend)
        yield {(result.attack.name, result.grading): result for result in report.results}


def asked(request: pytest.FixtureRequest, test: str) -> list[tuple[Attack, Grading]]:
    """The attacks of the tests that this session runs."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.originalname == test]
    return [cast("tuple[Attack, Grading]", item.callspec.params["job"]) for item in items]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def on_local(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Results]:
    """What came of the attacks on the local backend."""
    jobs = asked(request, test_an_attack_on_local_sandboxes_is_held.__name__)
    async with attacked(tmp_path_factory.mktemp("attacked"), "local", jobs) as results:
        yield results


def name(job: object) -> str:
    """Of a test."""
    assert isinstance(job, tuple)
    return f"{job[0].attack_class}-{job[0].name}-{job[1]}"


def expect_held(result: Result) -> None:
    """An attack that was not tried is no proof: it fails, unless its reason is that it cannot be tried there."""
    if result.verdict is Verdict.NOT_APPLICABLE:
        pytest.skip(f"{result.name}: {'; '.join(result.reasons)}")
    assert result.verdict is Verdict.HELD, f"{result.attack.tries}\n{result.reasons}\n{result.failure}"


@pytest.mark.parametrize("job", JOBS, ids=name)
async def test_an_attack_on_local_sandboxes_is_held(job: tuple[Attack, Grading], on_local: Results) -> None:
    """R4, R13, R14, R43, R60, R72-R76, R89-R93, R95, R96: it gains no reward and no retry, and harms nobody."""
    expect_held(on_local[job[0].name, job[1]])


def test_there_are_attacks_of_every_class_and_each_has_a_name_of_its_own() -> None:
    """R13, R72: what a policy could learn is tried in every way that it could want."""
    attacks = redteam.registry()
    assert {attack.attack_class for attack in attacks.values()} == set(redteam.AttackClass)
    assert len(attacks) >= 60
    assert all(attack.name == name for name, attack in attacks.items())
