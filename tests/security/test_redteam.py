"""The attacks of `penstock.redteam` on deployments of their own: one test for each attack, grading and backend.

All of a backend run at once, on one deployment, when its first test asks. Local sandboxes are attacked in every way.
Docker's, which cost twice as much, in those that the engine decides and that no test of its backend tries; gVisor's,
which take seconds each, in those that its own kernel and its way of being served decide. `--full`, or the name of this
file, runs the others there too.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, cast

import pytest
import pytest_asyncio
from tests.support.absent import absent
from tests.support.docker import dockerd
from tests.support.services.stack import running

from penstock import redteam
from penstock.redteam import Attack, Grading, Result, Verdict
from penstock.redteam.agents import spec_of

JOBS: Final = [(attack, grading) for attack in redteam.registry().values() for grading in attack.grading]
ON_GVISOR: Final = ("host-files", "first-process", "gain-rights", "sandbox-beside", "unreadable-system-program")
SHOWN_BY_THE_BACKEND: Final = ("fork-hopper", "dead-leader", "kill-all", "memory", "vsock")
"""Of gVisor's, those that tests/integration/sandbox/test_gvisor.py and its sandbox conformance suite try too."""
ON_GVISOR_IN_FULL: Final = (
    *(*ON_GVISOR, *SHOWN_BY_THE_BACKEND),
    *("first-process-as-nobody", "loader", "locked-files", "other-keys", "deep-line"),
)
SAME_ON_DOCKER: Final = (redteam.AttackClass.FLOOD, redteam.AttackClass.FORGE_REWARD, redteam.AttackClass.INGRESS)
AT_THE_GATE: Final = (
    *("refused-request", "refused-request-black-box", "failing-request", "expired-flood"),
    *("late-call", "odd-output", "artifacts"),
)
"""What gate and driver decide, whatever the sandbox is; rewards are forged on Docker by `rewards` too."""
SHOWN_BY_DOCKERS_TESTS: Final = (
    # The sandbox conformance suite, which runs whole on Docker.
    *("internet", "loopback", "raw-sockets", "socket-families", "vsock"),
    *("memory", "fork-bomb", "many-files", "dead-leader", "hangs-on"),
    # tests/integration/sandbox/test_docker_attacks.py, with each of its two ways to reach a sandbox.
    *("fork-hopper", "vfork-hopper", "shared-memory-hopper", "traced-and-stopped", "unreadable-program"),
    # test_docker.py beside it: the limits are the container's own, and the kernel that keeps them is the same.
    "spin",
)
"""Of Docker's, those whose way is tried on its sandboxes by tests without a rollout."""
NOT_ON_LOCAL: Final = (
    *("first-process-as-nobody", "first-process-as-root", "as-what-serves-it", "system-as-root"),  # it has one user
    "unreadable-system-program",  # where the machine has none; `test_survivors` brings one
)
BESIDE_OTHERS: Final = ("oom-the-server", "disk", "disk-nameless", "disk-files", "inodes", "watches")
"""Attacks that a user's deployment meets alone, for its other work's sake. Each ends at its own sandbox's limits and
must leave its neighbour's reward alone, and all at once must as well."""
# The first test of a deployment waits for all of its attacks.
pytestmark = pytest.mark.timeout(1200)

Results = Mapping[tuple[str, Grading], Result]


@asynccontextmanager
async def attacked(
    folder: Path, backend: str, jobs: list[tuple[Attack, Grading]], settings: dict[str, Any] | None = None
) -> AsyncIterator[Results]:
    """What came of the attacks that are asked for, all on one deployment."""
    chosen = [
        attack.model_copy(
            update={
                "grading": tuple(grading for other, grading in jobs if other.name == attack.name),
                "alone": attack.alone and attack.name not in BESIDE_OTHERS,
            }
        )
        for attack in redteam.registry().values()
        if any(other.name == attack.name for other, _ in jobs)
    ]
    async with running(folder, {"sandbox": settings or {}}, agents=False) as stack:
        report = await redteam.run(stack.ps, chosen, backend=backend, concurrency=4)
        yield {(result.attack.name, result.grading): result for result in report.results}


def asked(request: pytest.FixtureRequest, test: str) -> list[tuple[Attack, Grading]]:
    """The attacks of the tests that this session runs."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.originalname == test]
    return [cast("tuple[Attack, Grading]", item.callspec.params["job"]) for item in items]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def on_local(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Results]:
    """What came of the attacks on the local backend."""
    jobs = asked(request, test_an_attack_on_local_sandboxes_is_held.__name__)
    async with attacked(tmp_path_factory.mktemp("attacked"), "local", jobs) as results:
        yield results


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def on_docker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Results]:
    """What came of the attacks on Docker sandboxes of the machine's own kernel."""
    engine = await asyncio.to_thread(dockerd.engine)
    jobs = asked(request, test_an_attack_on_docker_sandboxes_is_held.__name__)
    settings = {**on(engine), "docker_allow_root": True}
    with dockerd.nothing_left():
        async with attacked(tmp_path_factory.mktemp("attacked-docker"), "docker", jobs, settings) as results:
            yield results


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def on_gvisor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Results]:
    """What came of the attacks on gVisor's sandboxes."""
    engine = await asyncio.to_thread(dockerd.gvisor)
    jobs = asked(request, test_an_attack_on_gvisors_sandboxes_is_held.__name__)
    settings = {**on(engine), "docker_runtime": dockerd.GVISOR}
    with dockerd.nothing_left():
        async with attacked(tmp_path_factory.mktemp("attacked-gvisor"), "docker", jobs, settings) as results:
            yield results


def on(engine: dockerd.Engine) -> dict[str, Any]:
    """The settings of a service whose sandboxes are the engine's."""
    return {"docker_host": engine.host, "docker_image": dockerd.BASE, "docker_sidecar_image": dockerd.BASE}


def on_demand(jobs: Sequence[tuple[Attack, Grading]], why_not: Callable[[Attack, Grading], str]) -> list[Any]:
    """Parameters of a test, of which those with a reason are left out unless they are asked for."""
    reasons = [why_not(*job) for job in jobs]
    return [
        pytest.param(job, marks=pytest.mark.on_demand(why) if why else (), id=name(job))
        for job, why in zip(jobs, reasons, strict=True)
    ]


def not_on_docker(attack: Attack, grading: Grading) -> str:
    """Why an attack is left out on Docker."""
    if attack.name in AT_THE_GATE or (attack.attack_class in SAME_ON_DOCKER and attack.name not in NOT_ON_LOCAL):
        return "attacks on Docker that gate and driver meet: they run on local"
    if attack.name in SHOWN_BY_DOCKERS_TESTS:
        return "attacks on Docker that its sandbox conformance suite and its own tests try; they run on local"
    if grading is Grading.IN_PLACE and Grading.FORK in attack.grading:
        return "attacks on Docker that are graded in place, where they are graded in a fork too: both run on local"
    return ""


def not_on_gvisor(attack: Attack, _: Grading) -> str:
    """Why an attack is left out on gVisor."""
    if attack.name in ON_GVISOR:
        return ""
    return (
        "attacks on gVisor that its kernel does not decide, or that its backend's own tests try: the former run on"
        " local or Docker"
    )


def name(job: object) -> str:
    """Of a test."""
    assert isinstance(job, tuple)
    return f"{job[0].attack_class}-{job[0].name}-{job[1]}"


def expect_held(result: Result, cannot: tuple[str, ...] = ()) -> None:
    """An attack that was not tried is no proof: it fails, unless it is known that it cannot be tried there."""
    if result.verdict is Verdict.NOT_APPLICABLE:
        if result.attack.name in cannot:
            pytest.skip(f"{result.name}: {'; '.join(result.reasons)}")
        if shutil.which("cc") is None:
            absent(f"{result.name} needs a compiler (cc): {'; '.join(result.reasons)}")
    assert result.verdict is Verdict.HELD, f"{result.attack.tries}\n{result.reasons}\n{result.failure}"


@pytest.mark.requirement(
    "R4", "R13", "R14", "R43", "R60", "R72", "R73", "R74", "R75", "R76", "R89", "R90", "R91", "R92", "R93", "R95", "R96"
)
@pytest.mark.parametrize("job", JOBS, ids=name)
async def test_an_attack_on_local_sandboxes_is_held(job: tuple[Attack, Grading], on_local: Results) -> None:
    """It gains no reward and no retry, and harms nobody."""
    expect_held(on_local[job[0].name, job[1]], NOT_ON_LOCAL)


@pytest.mark.requirement(
    "R4", "R13", "R14", "R43", "R60", "R72", "R73", "R74", "R75", "R76", "R89", "R90", "R91", "R92", "R93", "R95", "R96"
)
@pytest.mark.parametrize("job", on_demand(JOBS, not_on_docker))
async def test_an_attack_on_docker_sandboxes_is_held(job: tuple[Attack, Grading], on_docker: Results) -> None:
    """As on local sandboxes; as root and nobody as well."""
    expect_held(on_docker[job[0].name, job[1]])


@pytest.mark.requirement("R14", "R72", "R73", "R74", "R75", "R76", "R91", "R92", "R93")
@pytest.mark.parametrize("job", on_demand([job for job in JOBS if job[0].name in ON_GVISOR_IN_FULL], not_on_gvisor))
async def test_an_attack_on_gvisors_sandboxes_is_held(job: tuple[Attack, Grading], on_gvisor: Results) -> None:
    """On a kernel of the sandbox's own, with what serves it inside."""
    expect_held(on_gvisor[job[0].name, job[1]])


@pytest.mark.requirement("R72")
def test_every_program_can_be_made_where_there_is_a_compiler() -> None:
    """One that cannot would count as not applicable everywhere."""
    if shutil.which("cc") is None:
        absent("the attacks' programs need a compiler (cc)")
    made = [spec_of(attack) for attack in redteam.registry().values()]
    assert len({spec.name for spec in made}) == len(made)


@pytest.mark.requirement("R13", "R72")
def test_attacks_cover_every_class_with_unique_names() -> None:
    """What a policy could learn is tried in every way that it could want."""
    attacks = redteam.registry()
    assert {attack.attack_class for attack in attacks.values()} == set(redteam.AttackClass)
    assert len(attacks) >= 60
    assert all(attack.name == name for name, attack in attacks.items())


@pytest.mark.requirement("R13", "R72")
def test_every_attack_runs_by_default_where_it_can_succeed() -> None:
    """On local sandboxes, or on Docker's where those have no such user; what is named here exists."""
    named = (ON_GVISOR_IN_FULL, AT_THE_GATE, SHOWN_BY_DOCKERS_TESTS, NOT_ON_LOCAL, BESIDE_OTHERS)
    assert set[str]().union(*named) <= set(redteam.registry())
    on_docker = {job[0].name for job in JOBS if not not_on_docker(*job)}
    assert set(NOT_ON_LOCAL) <= on_docker
    assert {job[0].attack_class for job in JOBS if job[0].name in on_docker} == (
        set(redteam.AttackClass) - set(SAME_ON_DOCKER) | {redteam.AttackClass.FORGE_REWARD}
    )


@pytest.mark.requirement("R72")
@pytest.mark.parametrize("name", BESIDE_OTHERS)
def test_concurrent_attack_is_not_judged_by_a_services_memory(name: str) -> None:
    """That is one attack's doing only while it runs alone."""
    assert redteam.registry()[name].alone
    assert redteam.registry()[name].expected.max_growth_bytes is None
