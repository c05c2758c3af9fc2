"""Tasks of others with images: built from their Dockerfile, run as root in Docker, as their makers expect."""

from __future__ import annotations

import asyncio
import json
import shutil
from importlib.metadata import distribution
from pathlib import Path

import pytest
from tests.support import foreign_tasks
from tests.support.docker import dockerd
from tests.support.services.stack import running

from penstock.client import FailedPrecondition, Task
from penstock.tasks.images import build_images, contexts_of, image_of, with_image
from penstock.tasks.importers import Choices, import_tasks
from penstock.tasks.solutions import prove

PYTEST = ("iniconfig", "packaging", "pluggy", "pygments", "pytest")
"""Pytest and what it needs, for an image that reaches no package index."""


async def test_tasks_with_images_score_1_with_their_solution_and_0_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 6, point 6: a Harbor task from its Dockerfile, records of three formats with the repository of their image.

    Issue 12, point 6: SWE-smith's is broken by its patch, R2E-Gym's tests are its own. Of one with two containers, the
    verifier sees what the agent put into the other. Harbor's separate verifier has an image of its own with whole
    artifacts of the agent's.
    """
    engine = await asyncio.to_thread(dockerd.engine)
    monkeypatch.setenv("DOCKER_HOST", engine.host)
    told: list[str] = []
    choices = Choices(
        resources=False,
        image_template="penstock-test/{docker_id}:1",
        test_command="env PYTHONPATH=/opt/pytest python3 -m pytest",
    )

    foreign_tasks.harbor(tmp_path / "harbor" / "sum-built", image=dockerd.BASE)
    found = import_tasks("harbor", tmp_path / "harbor", tmp_path / "tasks", choices)

    context = tmp_path / "context"
    base = foreign_tasks.repository(context / "repository", at_base=True)
    for name in PYTEST:
        for file in distribution(name).files or ():
            if ".." not in file.parts:
                (context / "pytest" / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(file.locate()), context / "pytest" / file)
    foreign_tasks.write(
        context,
        {"Dockerfile": f"FROM {dockerd.BASE}\nCOPY pytest /opt/pytest\nWORKDIR /testbed\nCOPY repository ./\n"},
    )
    image = Task(task_id="of-the-record", instruction="x", build=context)
    (tmp_path / "records.json").write_text(json.dumps([foreign_tasks.record(base)]))
    found += import_tasks("swe", tmp_path / "records.json", tmp_path / "tasks", choices)
    for form, record in (("swe-smith", foreign_tasks.smith_record()), ("r2e-gym", foreign_tasks.r2e_record())):
        (tmp_path / f"{form}.json").write_text(json.dumps(record))
        found += import_tasks(form, tmp_path / f"{form}.json", tmp_path / "tasks", choices)

    store = foreign_tasks.stored(tmp_path / "beside" / "sum-stored", image=dockerd.BASE)
    found += import_tasks("harbor", store, tmp_path / "tasks", choices)
    foreign_tasks.harbor_separate(tmp_path / "separate" / "sum-separate", image=dockerd.BASE)
    found += import_tasks("harbor", tmp_path / "separate", tmp_path / "tasks", choices)

    tasks = [with_image(Task.load(item.folder)) for item in found if item.folder is not None]
    for _ in range(2):
        await build_images([image, *tasks], told.append)
    assert told == [
        f"building {image_of(image)} for of-the-record",
        f"building {image_of(tasks[0])} for sum-built",
        *(f"building {name} for sum-separate" for name in contexts_of(tasks[-1])),
    ]
    assert tasks[1].sandbox is not None
    assert tasks[1].sandbox.image == "penstock-test/kiwi_1776_sums-1:1"
    engine.api.tag(image_of(image), *tasks[1].sandbox.image.split(":"))

    sandbox = {
        "default_backend": "docker",
        "docker_host": engine.host,
        "docker_image": dockerd.BASE,
        "docker_sidecar_image": dockerd.BASE,
        "docker_allow_root": True,
    }
    (tmp_path / "stack").mkdir()
    async with running(tmp_path / "stack", {"sandbox": sandbox}) as stack:
        proofs = await prove(stack.ps, tasks)
    assert [(proof.task_id, proof.solution, proof.nothing, proof.holds) for proof in proofs] == [
        ("sum-built", 1.0, 0.0, True),
        ("kiwi__sums-1", 1.0, 0.0, True),
        ("kiwi__sums.0badc0de.lm_rewrite__1", 1.0, 0.0, True),
        ("sums-0123456789ab", 1.0, 0.0, True),
        ("sum-stored", 1.0, 0.0, True),
        ("sum-separate", 1.0, 0.0, True),
    ], [proof.problems for proof in proofs]


@pytest.mark.on_demand("PostgreSQL as a companion, from packages of the network; one that Python serves runs")
async def test_an_agent_writes_a_row_that_its_verifier_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 12, point 6: a real PostgreSQL, in an image that is built from the task's compose file, not run as root."""
    engine = await asyncio.to_thread(dockerd.with_database)
    monkeypatch.setenv("DOCKER_HOST", engine.host)
    foreign_tasks.database(tmp_path / "numbers", image=dockerd.DATABASE)
    (found,) = import_tasks("harbor", tmp_path / "numbers", tmp_path / "tasks", Choices(resources=False, user="agent"))
    assert found.folder is not None, found.problem
    task = Task.load(found.folder)
    await build_images([task], print)
    sandbox = {
        "default_backend": "docker",
        "docker_host": engine.host,
        "docker_image": dockerd.BASE,
        "docker_sidecar_image": dockerd.BASE,
    }
    (tmp_path / "stack").mkdir()
    async with running(tmp_path / "stack", {"sandbox": sandbox}) as stack:
        (proof,) = await prove(stack.ps, [with_image(task)])
    assert (proof.solution, proof.nothing, proof.holds) == (1.0, 0.0, True), proof.problems


async def test_unbuildable_image_shows_the_builds_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 6, point 6: a typed error with the end of the output, before anything runs."""
    engine = await asyncio.to_thread(dockerd.engine)
    monkeypatch.setenv("DOCKER_HOST", engine.host)
    foreign_tasks.write(tmp_path, {"Dockerfile": f"FROM {dockerd.BASE}\nCOPY absent.txt /\n"})
    with pytest.raises(FailedPrecondition, match=r"absent\.txt") as caught:
        await build_images([Task(task_id="broken", instruction="x", build=tmp_path)], print)
    assert caught.value.reason == "IMAGE_BUILD_FAILED"
