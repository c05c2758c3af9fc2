"""Toolboxes as sandboxes see them: there, first in PATH, and read-only."""

from __future__ import annotations

import pytest
from tests.conformance.sandbox.conftest import MakeBox, failure
from tests.conformance.sandbox.needs import needs
from tests.conformance.sandbox.services import Running

from penstock.sandbox.v1 import toolbox_service_pb2 as tb

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def prepare(service: Running, spec: tb.ToolboxSpec) -> tb.Toolbox:
    request = tb.PrepareToolboxRequest(spec=spec)
    events = [event async for event in service.toolboxes.PrepareToolbox(request, timeout=120)]
    toolbox: tb.Toolbox = events[-1].toolbox
    return toolbox


def script(text: str) -> tb.ToolboxFile:
    return tb.ToolboxFile(path="bin/tool", content=text.encode())


@pytest.mark.requirement("R52")
@needs("toolboxes")
async def test_a_toolboxs_programs_come_first_and_cannot_be_changed(service: Running, make_box: MakeBox) -> None:
    """A rollout never installs anything, and shares nothing that it can write."""
    first = await prepare(service, tb.ToolboxSpec(name="first", files=[script("#!/bin/sh\necho first")]))
    second = await prepare(service, tb.ToolboxSpec(name="second", files=[script("#!/bin/sh\necho second")]))
    box = await make_box(toolbox_ids=[first.toolbox_id, second.toolbox_id])
    assert await box.out("tool; command -v tool") == f"first\n{first.mount_path}/bin/tool"
    assert await box.out("/opt/penstock/toolboxes/second/bin/tool") == "second"
    for path in (f"{first.mount_path}/bin/tool", f"{first.mount_path}/new", "/opt/penstock/new"):
        assert (await box.run(shell=f": > {path}")).exit.code != 0, path
    error = await failure(service.toolboxes.DeleteToolbox(tb.DeleteToolboxRequest(toolbox_id=first.toolbox_id)))
    assert error.reason == "TOOLBOX_IN_USE"


@pytest.mark.requirement("R48")
@needs("toolboxes")
async def test_a_python_that_a_toolbox_asks_for_runs(service: Running, make_box: MakeBox) -> None:
    runtime = tb.Runtime(kind=tb.RUNTIME_KIND_PYTHON, min_version="3.9")
    spec = tb.ToolboxSpec(
        name="python", runtimes=[runtime], files=[script("#!/usr/bin/env python3\nimport json, socket; print(6*7)")]
    )
    box = await make_box(toolbox_ids=[(await prepare(service, spec)).toolbox_id])
    assert await box.out("tool") == "42"


@pytest.mark.requirement("R151")
@needs("toolboxes")
async def test_packages_for_the_sandboxs_python_are_found_and_cannot_be_changed(
    service: Running, make_box: MakeBox
) -> None:
    """By every python3 of the sandbox, behind what a command sets itself; programs are in PATH."""
    spec = tb.ToolboxSpec(
        name="packages",
        files=[
            tb.ToolboxFile(path="python/packaged.py", content=b"print('packaged')\n"),
            tb.ToolboxFile(path="python/bin/packaged-program", content=b"#!/bin/sh\necho program\n", mode=0o755),
        ],
        python_target=tb.PythonTarget(version="3.12", platform="manylinux_2_36_x86_64"),
    )
    toolbox = await prepare(service, spec)
    box = await make_box(toolbox_ids=[toolbox.toolbox_id])
    assert await box.out("packaged-program; python3 -m packaged") == "program\npackaged"
    mine = await box.run(shell="echo $PYTHONPATH; python3 -m packaged", env={"PYTHONPATH": "src"})
    assert mine.stdout == f"src:{toolbox.mount_path}/python\npackaged\n".encode()
    for attack in ("echo > PLACE/packaged.py", "rm -f PLACE/packaged.py", "touch PLACE/json.py", "mv PLACE PLACE.gone"):
        assert (await box.run(shell=attack.replace("PLACE", f"{toolbox.mount_path}/python"))).exit.code != 0, attack


@pytest.mark.requirement("R66")
async def test_toolboxes_are_listed_with_what_they_are(service: Running) -> None:
    made = await prepare(service, tb.ToolboxSpec(name="listed", files=[script("#!/bin/sh\n")]))
    listed = await service.toolboxes.ListToolboxes(tb.ListToolboxesRequest(page_size=1000), timeout=30)
    (found,) = [box for box in listed.toolboxes if box.toolbox_id == made.toolbox_id]
    assert (found.name, found.mount_path, found.size_bytes) == ("listed", "/opt/penstock/toolboxes/listed", 10)
    for _ in range(2):
        await service.toolboxes.DeleteToolbox(tb.DeleteToolboxRequest(toolbox_id=made.toolbox_id), timeout=30)
