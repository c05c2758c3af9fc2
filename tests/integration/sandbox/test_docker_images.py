"""Images of others as sandboxes of the Docker backend: who may write where, as whom, and what stays with the daemon."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.sandbox.test_docker import PROBE
from tests.support.docker import dockerd
from tests.support.docker.backend import BY_THE_ENGINE, REACHES, backend, create, diff, run
from tests.support.waiting import eventually

from penstock_chassis.errors import FailedPrecondition, InvalidArgument, PenstockError
from penstock_sandbox.domain.backend import SandboxHandle
from penstock_sandbox.domain.model import Resources, SandboxSpec, SeedFile, Snapshot, SnapshotSpec
from penstock_sandbox.testing import open_sandboxes

pytestmark = pytest.mark.asyncio

TASK = "penstock-test/task:1"
"""As images of software engineering tasks are: a repository of root's in the directory that the image works in."""

_PROGRAM = "def double(number):\\n    return number + number + 1\\n"
_CHECK = "import program; assert program.double(4) == 8; print('passed')"
_GIT = "git -c user.name=t -c user.email=t@t"


@pytest.fixture(scope="module", autouse=True)
def task() -> Iterator[None]:
    """The image; nothing else stands on it when it goes."""
    dockerd.engine()
    dockerd.build(
        TASK,
        f"FROM {dockerd.BASE}",
        "ENV CONDA_DEFAULT_ENV=testbed",
        "RUN echo 'coder:x:1234:1235::/home/coder:/bin/sh' >> /etc/passwd && mkdir -m 700 /home/coder"
        " && echo 'toor:x:0:0::/:/bin/sh' >> /etc/passwd && chown 1234:1235 /home/coder"
        " && echo root > /etc/owned-by-root",
        "WORKDIR /testbed",
        f"RUN git init -q . && printf '{_PROGRAM}' > program.py && mkdir -p deep/er && echo one > deep/er/file"
        " && ln deep/er/file hard && ln -s /etc/owned-by-root link && printf '#!/bin/sh\\nid -u\\n' > tool"
        f" && chmod 4755 tool && echo mine > coders && git add . && {_GIT} commit -qm first && chown 1234:1235 coders",
    )
    yield
    dockerd.engine().api.remove_image(TASK, force=True)


async def _works(handle: SandboxHandle, user: str) -> None:
    """Edits the repository, runs the program, and sees exactly that in the diff."""
    assert (handle.workdir, handle.user) == ("/testbed", user)
    assert await run(handle, "id", "-un") == (0, f"{user}\n")
    assert await run(handle, "git", "status", "--porcelain") == (0, "")
    assert (await run(handle, "python3", "-Bc", _CHECK))[0] == 1
    assert (await run(handle, "sed", "-i", "s/ + 1$//", "program.py"))[0] == 0
    assert await run(handle, "python3", "-Bc", _CHECK) == (0, "passed\n")
    assert await run(handle, "git", "diff", "--name-only") == (0, "program.py\n")
    async with handle.open_write("/testbed/deep/new", 0o644) as writer:
        await writer.write(b"new\n")
        await writer.commit()
    assert (await run(handle, "rm", "hard"))[0] == 0
    changed, deleted = await diff(handle)
    fixed = _PROGRAM.replace("\\n", "\n").replace(" + 1\n", "\n").encode()
    # Git writes its index when it looks.
    ours = {path: content for path, content in changed.items() if path.startswith("testbed/") and content is not None}
    found = {path: content for path, content in ours.items() if not path.startswith("testbed/.git/")}
    assert found == {"testbed/program.py": fixed, "testbed/deep/new": b"new\n"}
    assert deleted == ["/testbed/hard"]


@pytest.mark.requirement("R44", "R45", "R76")
@pytest.mark.parametrize("reach", BY_THE_ENGINE)
async def test_agent_edits_and_runs_a_repository_that_root_owns_in_the_image(tmp_path: Path, reach: str) -> None:
    """The image's own working directory is the agent's; the rest of the image is not."""
    async with backend(tmp_path, reach) as opened:
        handle = await create(opened, image=TASK)
        assert handle.default_env["CONDA_DEFAULT_ENV"] == "testbed"
        assert await run(handle, "sh", "-c", "find . ! -user agent") == (0, "")
        assert await run(handle, "sh", "-c", "stat -c %h-%i hard deep/er/file | sort -u | wc -l") == (0, "1\n")
        assert await run(handle, "stat", "-c", "%a", "tool") == (0, "755\n")
        for kept in ("/etc/owned-by-root", "link", "/usr/bin/new"):
            assert (await run(handle, "sh", "-c", f"echo x >> {kept}"))[0] != 0
        assert await run(handle, "cat", "link") == (0, "root\n")
        await _works(handle, "agent")


@pytest.mark.requirement("R45", "R51")
async def test_handed_over_files_stay_so_in_forks_and_are_made_once(tmp_path: Path) -> None:
    """The layer is found by what it was made from, by a later start of the service too."""
    async with backend(tmp_path) as opened:
        first = await create(opened, image=TASK)
        assert (await run(first, "sh", "-c", "echo x > ~/prepared"))[0] == 0
        await opened.seal(first, "ss-task")
        child = await create(opened, snapshot_id="ss-task")
        assert child.workdir == "/testbed" and await run(child, "sh", "-c", "cat ~/prepared") == (0, "x\n")
        await _works(child, "agent")
        await opened.remove_layer("ss-task")
    before = _prepared()
    async with backend(tmp_path) as opened:
        await asyncio.gather(*(create(opened, image=TASK) for _ in range(3)))
        assert _prepared() == before


@pytest.mark.requirement("R45", "R63")
@pytest.mark.parametrize(
    "user", ["coder", pytest.param("1234", marks=pytest.mark.on_demand("an image's user by its id: by name it runs"))]
)
async def test_requested_user_of_the_image_becomes_the_sandboxs(tmp_path: Path, user: str) -> None:
    """By name or by id, with his own home and group."""
    async with backend(tmp_path) as opened:
        handle = await create(opened, image=TASK, user=user)
        assert handle.home == "/home/coder"
        assert await run(handle, "id") == (0, "uid=1234(coder) gid=1235 groups=1235\n")
        assert await run(handle, "sh", "-c", "echo x > ~/file; stat -c %u ~/file ../testbed coders") == (
            0,
            "1234\n" * 3,
        )
        await _works(handle, "coder")
        await opened.seal(handle, "ss-user")
        child = await create(opened, snapshot_id="ss-user", user=user)
        assert await run(child, "id", "-un") == (0, "coder\n")
        with pytest.raises(FailedPrecondition) as refused:
            await create(opened, snapshot_id="ss-user", user="agent")
        assert refused.value.reason == "CAPABILITY_MISSING"
        await opened.remove_layer("ss-user")


@pytest.mark.requirement("R45", "R63")
async def test_a_user_that_the_image_lacks_is_refused_by_the_field(tmp_path: Path) -> None:
    """Never another user in his place."""
    async with backend(tmp_path) as opened:
        with pytest.raises(InvalidArgument) as refused:
            await create(opened, image=TASK, user="nobody-here")
        assert refused.value.reason == "USER_UNKNOWN"
        assert [problem.field for problem in refused.value.violations] == ["spec.user"]
        for root in ("root", "0", "00", "toor"):
            with pytest.raises(FailedPrecondition) as forbidden:
                await create(opened, image=TASK, user=root)
            assert forbidden.value.reason == "CAPABILITY_MISSING"


# Root, where the operator offers it -------------------------------------------------------------------------------


@pytest.mark.requirement("R45", "R46", "R55")
@pytest.mark.parametrize("reach", REACHES)
async def test_root_in_the_sandbox_owns_root_files_and_can_do_nothing_else(tmp_path: Path, reach: str) -> None:
    """No capability, no reach to what serves it, although to the kernel both are root's."""
    async with backend(tmp_path, reach, allow_root=True) as opened:
        assert opened.capabilities.root
        for user in ("root", "0"):
            handle = await create(opened, image=TASK, user=user, resources=Resources(pids=100))
            assert (handle.home, handle.user) == ("/root", "root")
            code, text = await run(handle, "python3", "-c", PROBE)
            assert code == 0, text
            seen = json.loads(text)
            assert set("".join(seen["caps"])) == {"0"} and (seen["privileges"], seen["seccomp"]) == ("1", "2")
            assert set(seen["ids"]) == {"0"} and set(seen["groups"]) <= {"0"}
            for refused in ("user namespace", "mount namespace", "mount", "keyring"):
                assert seen[refused] == "Operation not permitted", refused
            assert [name for name, reached in seen["others"] if reached] == []
            assert {"hold", "supervisor"} <= {name for name, _ in seen["others"]}
            assert await run(handle, "sh", "-c", "id -u; echo x > /etc/mine; echo y >> ~/file; ls /etc/mine") == (
                0,
                "0\n/etc/mine\n",
            )
            # What is another user's is his.
            assert (await run(handle, "sh", "-c", "ls /home/coder"))[0] != 0
            with pytest.raises(PenstockError):
                await handle.entries("/home/coder", "", 10)
            assert (await run(handle, "sh", "-c", "chown 1234 /etc/mine"))[0] != 0
            await _works(handle, "root")
            await handle.destroy()


@pytest.mark.requirement("R44")
@pytest.mark.parametrize("reach", REACHES)
async def test_links_into_a_service_process_lead_root_nowhere(tmp_path: Path, reach: str) -> None:
    """File work is done with the workload's rights, a root's too: links into what serves it lead nowhere."""
    async with backend(tmp_path, reach, allow_root=True) as opened:
        handle = await create(opened, user="root")
        # Who may open such a file is told by opening it: its owner and mode say root for what nobody may look into.
        script = "for p in /proc/[0-9]*; do cat $p/environ >/tmp/e 2>&1 || { [ -e $p ] && echo $p && exit; }; done"
        code, supervisor = await run(handle, "sh", "-c", script)
        assert code == 0 and supervisor
        for name in ("environ", "fd/0", "root/etc/passwd"):
            assert (await run(handle, "ln", "-sf", f"{supervisor.strip()}/{name}", "link"))[0] == 0
            with pytest.raises(PenstockError):
                async with handle.open_read(f"{handle.workdir}/link", follow_symlink=True):
                    pass


# What stays with the daemon -------------------------------------------------------------------------------------------


def _prepared() -> set[str]:
    """The names of the prepared images that the engine has."""
    images = dockerd.engine().api.images(filters={"label": ["penstock.kind=prepared"]})
    return {name for image in images for name in image["RepoTags"] or () if name != "<none>:<none>"}


@pytest.mark.requirement("R23", "R50")
async def test_surplus_prepared_images_are_removed_unless_in_use(tmp_path: Path) -> None:
    """A cache is bounded; what a sandbox or a snapshot stands on works on, and goes with it."""
    later = [0.0]
    async with backend(tmp_path, prepared_bytes=0) as opened:
        cache = opened._prepared
        cache._clock = lambda: time.time() + later[0]
        used = await create(opened, image=TASK)
        snapshot = await create(opened, image=TASK, user="coder")
        await opened.seal(snapshot, "ss-kept")
        later[0] = 3600.0
        await cache.trim()
        # The one that the sandbox is made of; what the snapshot stands on has lost its name.
        assert len(_prepared()) == 1
        child = await create(opened, snapshot_id="ss-kept")
        assert await run(child, "id", "-un") == (0, "coder\n")
        assert await run(used, "id", "-un") == (0, "agent\n")
        await used.destroy()
        await cache.trim()
        assert _prepared() == set()
        # It is made again for who wants it.
        assert await run(await create(opened, image=TASK), "id", "-un") == (0, "agent\n")
        later[0] = 7200.0
        await opened.remove_layer("ss-kept")
    async with backend(tmp_path, prepared_bytes=0) as opened:
        opened._prepared._clock = lambda: time.time() + later[0]
        await opened._prepared.trim()
        assert _prepared() == set()
    layers = dockerd.engine().api.images(all=True, filters={"label": ["penstock.kind=prepared"]})
    assert layers == []


def _snapshots() -> set[str]:
    """The ids of the snapshots that the engine has as images, named or not."""
    images = dockerd.engine().api.images(all=True, filters={"label": ["penstock.kind=snapshot"]})
    assert all(image["RepoTags"] for image in images), "an image of a snapshot has lost its name and stays"
    return {name.rpartition(":")[2] for image in images for name in image["RepoTags"]}


@pytest.mark.requirement("R23", "R50")
async def test_snapshots_that_leave_the_services_cache_leave_the_daemon(tmp_path: Path) -> None:
    """Their images go, those in use when they are not any more, and all with the service."""
    engine = await asyncio.to_thread(dockerd.engine)
    opening = open_sandboxes(
        tmp_path,
        default_backend="docker",
        docker_host=engine.host,
        docker_image=dockerd.BASE,
        docker_sidecar_image=dockerd.BASE,
        snapshot_cache_bytes=5 << 20,
    )
    async with opening as opened:
        app = opened.app
        minutes = [0]
        app.snapshots._clock = lambda: time.time() + 60.0 * minutes[0]

        async def prepared(below: str = "") -> str:
            minutes[0] += 2
            seed = SeedFile("file", os.urandom(2 << 20), 0o644)
            spec = SnapshotSpec(SandboxSpec(snapshot_id=below), (seed,))
            made = [event async for event in app.snapshots.prepare(spec)]
            assert isinstance(made[-1], Snapshot)
            return made[-1].id

        async def only(*wanted: str) -> None:
            # Removal is in the background.
            await eventually(lambda: _snapshots() == set(wanted), "the snapshots that are wanted, alone")

        first, second = await prepared(), await prepared()
        await only(first, second)
        third = await prepared()
        await only(second, third)
        above = await prepared(third)
        await only(third, above)
        fork = dataclasses.replace(app.snapshots.sandbox_spec(above), snapshot_id=above)
        sandbox = await app.sandboxes.create("", fork)
        await prepared()
        last = await prepared()
        # A sandbox stands on one, and that on another.
        await only(third, above, last)
        await app.sandboxes.delete(sandbox.id)
        await only(third, last)
        await only(last, await prepared())
    assert _snapshots() == set() and engine.remains() == []
