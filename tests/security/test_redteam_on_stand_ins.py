"""The attacks of `penstock.redteam` on the backends `e2b` and `hf`, before stand-ins of what they use.

A stand-in's sandboxes are real processes in namespaces of their own, served and ended by our attendant as on the real
service: what an agent leaves running, plants, says and hides meets the product's own code. What keeps a sandbox from
its host is the provider's, and nothing that these show. PENSTOCK_TEST_STAND_INS=all runs, beside what the backends
decide by themselves (half a minute each), all else that can mean something here (two to five minutes each).
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Final

import pytest
import pytest_asyncio
from tests.security.test_redteam import Results, asked, attacked, expect_held, name, on_demand
from tests.support.e2b_cloud.running import stand_in
from tests.support.hf_jobs.client import hf_jobs

from penstock import redteam
from penstock.redteam import Attack, Grading

pytestmark = pytest.mark.timeout(1200)

MEANINGLESS: Final = {
    **dict.fromkeys(
        (
            *("host-files", "host-sockets", "devices", "sysctl-and-cgroups", "mount-table", "internet", "own-routes"),
            *("sandbox-beside", "sandbox-before"),
        ),
        "the provider's machine keeps a sandbox from its host and from others; the stand-in's is bubblewrap",
    ),
    **dict.fromkeys(
        (
            *("disk", "disk-nameless", "disk-files", "inodes", "fork-bomb", "spin", "watches"),
            *("hard-links", "many-files", "oom-the-server", "counted-for-all"),
        ),
        "the provider's machine has disk, memory, processors and a kernel of its own; the stand-in's has this one's",
    ),
    **dict.fromkeys(
        ("first-process-as-nobody", "first-process-as-root", "system-as-root"),
        "its sandboxes have one user; the backend refuses others",
    ),
    "as-what-serves-it": "for docker, whose images can name the user that serves it",
    "unreadable-system-program": "the stand-ins show this machine's programs, and it may have none; `test_survivors`"
    " brings one",
}
"""Attacks that would say nothing, or nothing about our code, and why. Each was run once, and held or was refused."""
BY_DEFAULT: Final = (
    *("daemon", "fork-hopper", "traced-and-stopped", "kernel-calls", "first-process", "planted-reward-files"),
    *("code-that-stays", "kill-all", "hangs-on", "sparse-file", "artifacts", "deep-line"),
)
"""What the way in which a sandbox is served, read and ended decides."""
ALL: Final = os.environ.get("PENSTOCK_TEST_STAND_INS") == "all"
BY_REQUESTS: Final = ("fork-hopper", "kill-all", "planted-reward-files", "sparse-file", "deep-line")
"""Of these, what a request for each piece may decide: one of each class but escapes. In the rest the same attendant
acts inside as on E2B's, which costs half as much."""
# Neither tells what an agent changed, so that nothing is graded in a fork.
JOBS: Final = [
    (attack, grading)
    for attack in redteam.registry().values()
    for grading in attack.grading
    if grading is Grading.IN_PLACE and attack.name not in MEANINGLESS
    if attack.name in BY_DEFAULT or ALL
]


def not_on_hf(attack: Attack, _: Grading) -> str:
    """Why an attack is left out on Hugging Face's Jobs."""
    if ALL or attack.name in BY_REQUESTS:
        return ""
    return "attacks on Hugging Face's Jobs that meet the attendant inside: they run on E2B's"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def on_e2b(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Results]:
    """What came of the attacks on the E2B backend."""
    jobs = asked(request, test_an_attack_on_e2bs_sandboxes_is_held.__name__)
    async with stand_in() as cloud:
        given = cloud.environment().items()
        settings = {key.removeprefix("PENSTOCK_SANDBOX_").lower(): value for key, value in given}
        async with attacked(tmp_path_factory.mktemp("attacked-e2b"), "e2b", jobs, settings) as results:
            yield results


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def on_hf(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Results]:
    """What came of the attacks on the backend of Hugging Face's Jobs."""
    jobs = asked(request, test_an_attack_on_hfs_sandboxes_is_held.__name__)
    async with hf_jobs() as stand_in_of_jobs:
        with pytest.MonkeyPatch.context() as environment:
            for key in ("HF_ENDPOINT", "HF_TOKEN"):
                environment.setenv(key, stand_in_of_jobs.environment[key])
            # As the default backend, it has answered when the service starts.
            settings = {"hf_allow_open_egress": True, "default_backend": "hf"}
            async with attacked(tmp_path_factory.mktemp("attacked-hf"), "hf", jobs, settings) as results:
                yield results


@pytest.mark.requirement("R55", "R72", "R73", "R74", "R75", "R76", "R89", "R91", "R92", "R93", "R96")
@pytest.mark.parametrize("job", JOBS, ids=name)
async def test_an_attack_on_e2bs_sandboxes_is_held(job: tuple[Attack, Grading], on_e2b: Results) -> None:
    """By the unmodified SDK and our attendant inside."""
    expect_held(on_e2b[job[0].name, job[1]])


@pytest.mark.requirement("R55", "R72", "R73", "R74", "R75", "R76", "R89", "R91", "R92", "R93", "R96")
@pytest.mark.parametrize("job", on_demand(JOBS, not_on_hf))
async def test_an_attack_on_hfs_sandboxes_is_held(job: tuple[Attack, Grading], on_hf: Results) -> None:
    """By the unmodified SDK, with a request for each piece."""
    expect_held(on_hf[job[0].name, job[1]])


@pytest.mark.requirement("R72")
def test_every_attack_is_run_before_stand_ins_or_there_is_a_reason() -> None:
    """A new attack is run in full runs by itself; what is named here exists."""
    assert {*MEANINGLESS, *BY_DEFAULT} <= set(redteam.registry())
    assert not set(MEANINGLESS) & set(BY_DEFAULT)
    assert set(BY_REQUESTS) < set(BY_DEFAULT)
