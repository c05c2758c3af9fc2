"""The Docker backend on a real engine: what holds a container, what it is made of, and what is refused."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.integration.sandbox.registry import registry
from tests.support.docker import dockerd
from tests.support.docker.backend import BY_THE_ENGINE, REACHES, backend, create, diff, run
from tests.support.waiting import eventually

from penstock_chassis.errors import DeadlineExceeded, FailedPrecondition, NotFound, PenstockError, Unavailable
from penstock_sandbox.backends.docker.backend import DockerBackend
from penstock_sandbox.backends.docker.cleanup.reaper import INSTANCE, KIND, RUN
from penstock_sandbox.backends.docker.engine.errors import Missing
from penstock_sandbox.backends.docker.options import DockerOptions
from penstock_sandbox.domain.backend import MountedToolbox, StartFailed
from penstock_sandbox.domain.model import Companion, ForkKind, NetworkKind, Resources, SandboxSpec
from penstock_sandbox.guest.system import ASIDE
from penstock_sandbox.processes.output import Collected

pytestmark = pytest.mark.asyncio


async def failure(awaitable: Any) -> PenstockError:
    """The error of what must fail."""
    with pytest.raises(PenstockError) as raised:
        await awaitable
    return raised.value


# When the daemon is away ----------------------------------------------------------------------------------------------


@pytest.mark.requirement("R44", "R50")
async def test_a_daemon_that_is_away_at_the_start_is_tried_until_it_answers(tmp_path: Path) -> None:
    """Until then what an earlier run left counts as there; afterwards it is removed, without a restart."""
    engine, instance, socket = await asyncio.to_thread(dockerd.engine), secrets.token_hex(16), tmp_path / "docker.sock"
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "instance").write_text(instance)
    left = engine.api.create_container(dockerd.BASE, "-", labels={INSTANCE: instance, RUN: "earlier", KIND: "sandbox"})
    async with backend(tmp_path, host=f"unix://{socket}") as opened:
        assert not opened.available and "there is no" in opened.unavailable_reason
        await opened.reconcile([])
        for unfinished in (opened.reconcile(["sb-left"]), opened.adopt_layers(["ss-left"])):
            error = await failure(unfinished)
            assert isinstance(error, Unavailable) and error.reason == "DOCKER_UNREACHABLE"
        socket.symlink_to(engine.host.removeprefix("unix://"))
        await eventually(lambda: opened.available, "the daemon is tried again")
        await opened.reconcile(["sb-left"])
        assert await opened.adopt_layers(["ss-left"]) == frozenset()
        assert left["Id"] not in [one["Id"] for one in engine.api.containers(all=True)]
        assert await run(await create(opened), "echo", "works") == (0, "works\n")


async def test_the_search_for_a_daemon_ends_with_the_service(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    async with backend(tmp_path, host=f"unix://{tmp_path}/docker.sock"):
        assert asyncio.all_tasks() > before
    assert asyncio.all_tasks() == before


# What holds a container ----------------------------------------------------------------------------------------------

PROBE = r"""
import ctypes, json, os, pathlib
libc = ctypes.CDLL(None, use_errno=True)
def attempt(call):
    ctypes.set_errno(0)
    return "allowed" if call() == 0 else os.strerror(ctypes.get_errno())
status = dict(line.split(":\t", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
others = []
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    uid = folder.stat().st_uid
    if uid != os.getuid():
        pid = int(folder.name)
        traced = libc.ptrace(16, pid, 0, 0) == 0
        try:
            os.kill(pid, 0); signalled = True
        except PermissionError:
            signalled = False
        readable = False
        for reading in (folder.joinpath("environ").read_bytes, folder.joinpath("root", ".").stat):
            try:
                reading(); readable = True
            except PermissionError:
                pass
        others.append((folder.joinpath("comm").read_text().strip(), traced or signalled or readable))
print(json.dumps({
    "caps": [status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")],
    "privileges": status["NoNewPrivs"], "seccomp": status["Seccomp"],
    "ids": status["Uid"].split() + status["Gid"].split(),
    "groups": status["Groups"].split(),
    "user namespace": attempt(lambda: libc.unshare(0x10000000)),
    "mount namespace": attempt(lambda: libc.unshare(0x20000)),
    "mount": attempt(lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)),
    "keyring": attempt(lambda: min(0, libc.syscall(250, 0, -3, 1))),
    "others": others, "sys": os.listdir("/sys"),
    "core": __import__("resource").getrlimit(__import__("resource").RLIMIT_CORE),
    "descriptors": len(os.listdir("/proc/self/fd")),
}))
"""


@pytest.mark.requirement("R13", "R55")
@pytest.mark.parametrize("reach", REACHES)
async def test_container_has_no_privilege_and_reaches_no_other(tmp_path: Path, reach: str) -> None:
    """Seen from inside."""
    async with backend(tmp_path, reach) as opened:
        handle = await create(opened, resources=Resources(pids=100))
        code, text = await run(handle, "python3", "-c", PROBE)
        assert code == 0, text
        seen = json.loads(text)
        assert set("".join(seen["caps"])) == {"0"}
        assert (seen["privileges"], seen["seccomp"]) == ("1", "2")
        assert set(seen["ids"]) == {"1000"} and set(seen["groups"]) <= {"1000"}
        for refused in ("user namespace", "mount namespace", "mount", "keyring"):
            assert seen[refused] == "Operation not permitted", refused
        # The first process and the supervisor; beside a sidecar its processes too. None can be touched.
        assert [name for name, reached in seen["others"] if reached] == []
        assert {"hold", "supervisor"} <= {name for name, _ in seen["others"]}
        assert seen["sys"] == [] and seen["core"] == [0, 0] and seen["descriptors"] == 4


@pytest.mark.requirement("R1", "R2", "R47")
@pytest.mark.parametrize("reach", REACHES)
async def test_daemons_answers_hold_no_secret_and_no_host_setting(tmp_path: Path, reach: str) -> None:
    """Docker inspect shows neither environments nor commands; nothing of the host is mounted."""
    secret = "sk-test '$(leak)"
    async with backend(tmp_path, reach) as opened:
        handle = await create(opened, env={"KEY": secret})
        assert await run(handle, "printenv", "KEY", env={"KEY": secret}) == (0, f"{secret}\n")
        api = dockerd.engine().api
        found = api.containers(filters={"label": ["penstock.sandbox"]})
        assert len(found) == (2 if reach == "sidecar" else 1)
        for one in found:
            told = api.inspect_container(one["Id"])
            assert secret not in json.dumps(told)
            host = told["HostConfig"]
            assert not host["Privileged"] and host["CapDrop"] == ["ALL"] and not host["Binds"]
            assert "no-new-privileges" in host["SecurityOpt"] and host["LogConfig"]["Type"] == "none"
            assert [mount for mount in told["Mounts"] if mount["Type"] == "bind"] == []
            if told["Name"].endswith("-sidecar"):
                assert host["ReadonlyRootfs"] and host["NetworkMode"].startswith("container:")
            else:
                assert host["NetworkMode"] == "none" and not host["CapAdd"]


@pytest.mark.requirement("R55")
async def test_limits_are_those_of_the_container_and_the_swap_is_none(tmp_path: Path) -> None:
    async with backend(tmp_path) as opened:
        await create(opened, resources=Resources(cpu=0.5, memory_bytes=96 << 20, pids=50))
        (one,) = dockerd.engine().api.containers(filters={"label": ["penstock.sandbox"]})
        host = dockerd.engine().api.inspect_container(one["Id"])["HostConfig"]
        assert (host["Memory"], host["MemorySwap"], host["PidsLimit"]) == (96 << 20, 96 << 20, 50)
        assert host["NanoCpus"] == 500_000_000


@pytest.mark.requirement("R55")
async def test_a_read_only_root_is_one_and_then_nothing_can_be_kept(tmp_path: Path) -> None:
    """Bounded memory for what is written; forks and diffs are not declared, and refused."""
    async with backend(tmp_path, read_only=True) as opened:
        assert opened.capabilities.fork is ForkKind.NONE and not opened.capabilities.diff
        assert opened.capabilities.limit_disk
        handle = await create(opened, resources=Resources(disk_bytes=8 << 20))
        assert (await run(handle, "sh", "-c", "echo x > /new"))[0] != 0
        assert await run(handle, "sh", "-c", "echo x > file; echo y > ~/file; cat file ~/file") == (0, "x\ny\n")
        assert (await run(handle, "dd", "if=/dev/zero", "of=big", "bs=1M", "count=9"))[0] != 0
        with pytest.raises(FailedPrecondition):
            opened.refuse_unsupported(SandboxSpec(snapshot_id="any"))


@pytest.mark.requirement("R26")
async def test_broken_pipe_to_a_sidecar_loses_no_process_and_no_byte(tmp_path: Path) -> None:
    """What carries the link may be killed; the attendant and all that it serves live on."""
    async with backend(tmp_path, "sidecar") as opened:
        handle = await create(opened)
        sink = Collected()
        script = "echo one; until [ -e go ]; do sleep 0.05; done; echo two"
        process = await handle.start(
            ["sh", "-c", script], handle.default_env, handle.workdir, sink, stdin=False, pty=None
        )
        for _ in range(2):
            # The first pipe is the container's own, the next one a command's.
            assert await asyncio.to_thread(_kill_carriers) == 1
            assert (await handle.stat("/tmp")).name == "tmp"
        async with handle.open_write(f"{handle.workdir}/go", 0o644) as writer:
            await writer.commit()
        ended = await sink.ended
        await sink.closed_output.wait()
        await process.aclose()
        assert ended is not None and ended.code == 0 and sink.text == b"one\ntwo\n"


def _kill_carriers() -> int:
    """Kill what carries links in the engine's sidecars; answers how many those were."""
    sidecars = {one["Id"] for one in dockerd.engine().api.containers(filters={"label": ["penstock.kind=sidecar"]})}
    carriers = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            user, arguments = folder.stat().st_uid, (folder / "cmdline").read_bytes().split(b"\0")
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            groups = (folder / "cgroup").read_text()
        except OSError:
            continue
        ours = any(sidecar in groups for sidecar in sidecars)
        if ours and user == ASIDE and b"/opt/penstock/attendant" in arguments:
            carriers[folder.name] = parent
    # The first one's parent waits for it, as the same user.
    carrying = set(carriers) - set(carriers.values())
    for process in carrying:
        os.kill(int(process), signal.SIGKILL)
    return len(carrying)


# What it is made of --------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R45")
@pytest.mark.parametrize("reach", REACHES)
async def test_an_image_needs_neither_python_nor_a_shell_of_ours(tmp_path: Path, reach: str) -> None:
    """One static program is enough; files, processes and snapshots are as everywhere."""
    async with backend(tmp_path, reach) as opened:
        handle = await create(opened, image=dockerd.TINY)
        with pytest.raises(StartFailed):
            await run(handle, "/bin/bash", "-c", "true")
        async with handle.open_write(f"{handle.workdir}/kept", 0o644) as writer:
            await writer.write(b"kept\n")
            await writer.commit()
        assert await run(handle, "cat", "kept") == (0, "kept\n")
        assert await run(handle, "id", "-un") == (0, "agent\n")
        await opened.seal(handle, "ss-tiny")
        child = await create(opened, snapshot_id="ss-tiny")
        assert await run(child, "cat", "kept") == (0, "kept\n")
        # It goes with who stands on it.
        await opened.remove_layer("ss-tiny")


@pytest.mark.requirement("R51")
async def test_image_is_pulled_once_for_all_callers(tmp_path: Path) -> None:
    """Single-flight; even an image that holds one empty file is a sandbox."""
    marker = secrets.token_hex(8)
    async with registry(marker) as served, backend(tmp_path) as opened:
        made = await asyncio.gather(*(create(opened, image=served.image) for _ in range(3)))
        for handle in made:
            assert (await handle.stat(f"/{marker}")).size == 0
            assert handle.default_env["FROM_IMAGE"] == "yes"
        assert sum(count for asked, count in served.asked.items() if "/blobs/" in asked) == 2


@pytest.mark.requirement("R41", "R51")
async def test_pull_has_its_own_deadline_and_can_be_cancelled(tmp_path: Path) -> None:
    async with registry("x", answering=False) as served, backend(tmp_path, pull_timeout_s=0.5) as opened:
        error = await failure(create(opened, image=served.image))
        assert isinstance(error, DeadlineExceeded) and error.reason == "IMAGE_PULL_TIMEOUT"
        assert served.image in error.message


@pytest.mark.requirement("R54", "R63")
async def test_absent_or_forbidden_image_is_refused_by_name(tmp_path: Path) -> None:
    allowed: dict[str, Any] = {"allowed_images": ("127.0.0.1:*",), "registries": ("127.0.0.1:*",)}
    async with registry("x") as served, backend(tmp_path, **allowed) as opened:
        missing = f"{served.address}/imaginary:7"
        error = await failure(create(opened, image=missing))
        assert isinstance(error, NotFound) and error.reason == "IMAGE_UNKNOWN" and missing in error.message
        error = await failure(create(opened, image="docker.io/library/debian"))
        assert isinstance(error, FailedPrecondition) and error.reason == "IMAGE_NOT_ALLOWED"
        error = await failure(create(opened, image="127.0.0.1:not a name"))
        assert error.reason == "FIELD_INVALID"


@pytest.mark.requirement("R54", "R55")
async def test_a_registry_that_the_operator_did_not_name_is_not_asked(tmp_path: Path) -> None:
    async with registry("x") as served, backend(tmp_path, registries=("docker.io",)) as opened:
        for spec in ({"image": served.image}, {"companions": (Companion("x", served.image, user="1000"),)}):
            error = await failure(create(opened, **spec))
            assert error.reason == "IMAGE_NOT_ALLOWED" and "docker_registries" in error.message
        assert not served.asked


@pytest.mark.requirement("R54", "R55")
async def test_no_name_of_an_image_leads_to_a_snapshot(tmp_path: Path) -> None:
    """The engine takes ids, and what they begin with, for names: of a sandbox's image and of a companion's."""
    async with backend(tmp_path, registries=()) as opened:
        await opened.seal(await create(opened), "ss-of-another")
        (found,) = dockerd.engine().api.images(name="penstock-snapshot:ss-of-another")
        digest = found["Id"].removeprefix("sha256:")
        names = [
            "penstock-snapshot:ss-of-another",
            found["Id"],
            digest,
            digest[:12],
            digest[:8],
            f"sha256:{digest[:12]}",
        ]
        for name in names:
            for spec in ({"image": name}, {"companions": (Companion("x", name, user="1000"),)}):
                error = await failure(create(opened, **spec))
                assert error.reason in ("IMAGE_NOT_ALLOWED", "FIELD_INVALID"), name
        await opened.remove_layer("ss-of-another")


@pytest.mark.requirement("R52")
async def test_toolboxes_are_copied_once_to_a_remote_daemon(tmp_path: Path) -> None:
    """Read-only in every sandbox, and gone with the service."""
    source = tmp_path / "tools"
    (source / "bin").mkdir(parents=True)
    tool = source / "bin" / "tool"
    tool.write_text("#!/bin/sh\necho from the toolbox\n")
    tool.chmod(0o755)
    (source / "bin" / "link").symlink_to("tool")
    box = MountedToolbox("tools", source, "/opt/penstock/toolboxes/tools", ("/opt/penstock/toolboxes/tools/bin",), {})
    async with backend(tmp_path) as opened:
        assert opened._mounts.same_files
        bound = await create(opened, toolboxes=[box])
        opened._mounts.same_files = False
        copied = [await create(opened, toolboxes=[box]) for _ in range(2)]
        for handle in (bound, *copied):
            assert await run(handle, "tool") == (0, "from the toolbox\n")
            assert await run(handle, "link") == (0, "from the toolbox\n")
            assert (await run(handle, "sh", "-c", ": > /opt/penstock/toolboxes/tools/new"))[0] != 0
        # The engine has those of other tests as well.
        ours = f"volume penstock-{opened._mounts._owner.run}-"
        assert len([one for one in dockerd.engine().remains() if one.startswith(ours)]) == 1


@pytest.mark.requirement("R76")
@pytest.mark.parametrize("reach", BY_THE_ENGINE)
async def test_the_diff_holds_what_was_changed_whatever_its_name_and_mode(tmp_path: Path, reach: str) -> None:
    script = (
        "mkdir -p new/deep 'a b'; echo 1 > new/deep/file; echo 2 > 'a b/c'; chmod 000 'a b/c'; mkdir empty;"
        "ln new/deep/file hard; ln -s /etc/shadow link; mkfifo pipe; chmod 700 ~; rm -rf gone; mkdir gone"
    )
    async with backend(tmp_path, reach) as opened:
        base = await create(opened)
        assert (await run(base, "sh", "-c", "mkdir gone; echo x > gone/x"))[0] == 0
        await opened.seal(base, "ss-base")
        handle = await create(opened, snapshot_id="ss-base")
        assert (await run(handle, "sh", "-c", script)) == (0, "")
        names, deleted = await diff(handle)
        await opened.remove_layer("ss-base")
    wanted = {"new", "new/deep", "new/deep/file", "a b", "a b/c", "empty", "hard", "link", "pipe", "gone"}
    # Directories that hold changes, and the one whose mode changed.
    assert set(names) == {"workspace", "home", "home/agent", *(f"workspace/{name}" for name in wanted)}
    assert deleted in (["/workspace/gone"], ["/workspace/gone/x"])


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R27", "R48")
async def test_absent_daemon_is_reported_with_the_fix(tmp_path: Path) -> None:
    options = DockerOptions(
        state_dir=tmp_path / "docker", image="any", sidecar_image="any", host=f"unix://{tmp_path}/nobody.sock"
    )
    opened = DockerBackend(options)
    await opened.open()
    assert not opened.available and "docker_host" in opened.unavailable_reason
    with pytest.raises(FailedPrecondition) as refused:
        opened.refuse_unsupported(SandboxSpec())
    assert refused.value.reason == "BACKEND_UNAVAILABLE"
    await opened.aclose()


@pytest.mark.requirement("R48")
async def test_service_without_a_daemon_starts_without_the_sdk(tmp_path: Path) -> None:
    """Their imports are a quarter of its start."""
    script = f"""
import asyncio, sys
from pathlib import Path
from penstock_sandbox.backends.docker import DockerBackend, DockerOptions
host = "unix://{tmp_path}/nobody.sock"
opened = DockerBackend(DockerOptions(state_dir=Path({str(tmp_path)!r}), image="any", sidecar_image="any", host=host))
asyncio.run(opened.open())
print(opened.unavailable_reason, sorted({{"docker", "requests", "aiohttp"}} & sys.modules.keys()))
"""
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "docker_host" in done.stdout and done.stdout.endswith(" []\n"), done.stdout


@pytest.mark.requirement("R48", "R53")
async def test_missing_sdk_is_reported_with_the_package_to_install(tmp_path: Path) -> None:
    (tmp_path / "socket").touch()
    script = f"""
import asyncio, sys
sys.modules["docker"] = None
from pathlib import Path
from penstock_sandbox.backends.docker.backend import DockerBackend
from penstock_sandbox.backends.docker.engine.errors import Missing
from penstock_sandbox.backends.docker.options import DockerOptions
host = "unix://{tmp_path}/socket"
opened = DockerBackend(DockerOptions(state_dir=Path({str(tmp_path)!r}), image="any", sidecar_image="any", host=host))
asyncio.run(opened.open())
print(opened.unavailable_reason)
"""
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "pip install 'penstock-sandbox[docker]'" in done.stdout


@pytest.mark.requirement("R55")
async def test_a_runtime_that_the_daemon_lacks_makes_the_backend_unavailable(tmp_path: Path) -> None:
    """Never a silent downgrade."""
    async with backend(tmp_path, runtime="imaginary") as opened:
        assert "imaginary" in opened.unavailable_reason


@pytest.mark.requirement("R55")
@pytest.mark.parametrize("reach", REACHES)
async def test_a_chosen_runtime_runs_the_sandboxes_and_nothing_else(tmp_path: Path, reach: str) -> None:
    """What the operator chose for sandboxes is asked for them and for nothing else."""
    async with backend(tmp_path, reach, runtime=dockerd.NOTED) as opened:
        assert opened.available, opened.unavailable_reason
        handle = await create(opened)
        assert await run(handle, "id", "-un") == (0, "agent\n")
        api = dockerd.engine().api
        for one in api.containers(filters={"label": ["penstock.sandbox"]}):
            sandbox = not one["Names"][0].endswith("-sidecar")
            assert (api.inspect_container(one["Id"])["HostConfig"]["Runtime"] == dockerd.NOTED) is sandbox
            created = [line for line in dockerd.engine().runtime_log.splitlines() if one["Id"] in line.split()]
            assert any("create" in line.split() for line in created) is sandbox


@pytest.mark.requirement("R55")
@pytest.mark.parametrize("reach", BY_THE_ENGINE)
async def test_a_runtime_that_keeps_its_processes_elsewhere_is_refused(tmp_path: Path, reach: str) -> None:
    """Entering what such a runtime shows of a container would run the agent outside of it."""
    async with backend(tmp_path, reach, runtime=dockerd.ELSEWHERE) as opened:
        assert "its runtime keeps its processes elsewhere" in opened.unavailable_reason
        with pytest.raises(FailedPrecondition) as refused:
            opened.refuse_unsupported(SandboxSpec())
        assert refused.value.reason == "BACKEND_UNAVAILABLE"


# What is removed ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R49", "R50")
async def test_twice_cancelled_create_is_cleaned_up_before_the_service_ends(tmp_path: Path) -> None:
    """By its caller, and by the service that stops as the container is being removed."""
    engine = await asyncio.to_thread(dockerd.engine)
    async with backend(tmp_path, runtime=dockerd.NOTED) as opened:
        for _ in range(3):
            making = asyncio.create_task(create(opened))
            await eventually(lambda: _containers(engine) != [], "its container")
            making.cancel()
            await asyncio.sleep(0)
            making.cancel()
            with pytest.raises(asyncio.CancelledError):
                await making


def _containers(engine: dockerd.Engine) -> list[str]:
    return [one for one in engine.remains() if one.startswith("container ")]


@pytest.mark.requirement("R50")
async def test_closing_backend_retries_removals_for_a_while(tmp_path: Path) -> None:
    """A volume goes once its container does, though the service stops in between."""
    async with backend(tmp_path) as opened:
        labels = opened._boxes._owner.labels("toolbox")
        await opened._daemon.create_volume("in-use", labels)
        mount = {"type": "volume", "source": "in-use", "target": "/mnt"}
        settings = {"image": dockerd.BASE, "command": ["-"], "labels": labels}
        user = await opened._daemon.create("user", settings, {"network_mode": "none", "mounts": [mount]})
        await opened._reaper.volume("in-use")
        assert "volume in-use" in dockerd.engine().remains()
        await opened._reaper.container(user)


@pytest.mark.requirement("R50")
async def test_a_removal_that_another_began_is_waited_for(tmp_path: Path) -> None:
    """Where the daemon says that one is in progress, it is not done."""
    async with backend(tmp_path) as opened:
        for _ in range(3):
            handle = await create(opened)
            (name,) = opened._boxes.names()
            ends = [asyncio.create_task(opened._daemon.remove(name)) for _ in range(4)]
            for end in asyncio.as_completed(ends):
                await end
                with pytest.raises(Missing):
                    await opened._daemon.inspect(name)
            await handle.destroy()


@pytest.mark.requirement("R54")
async def test_an_image_is_not_pulled_for_a_backend_that_nobody_chose(tmp_path: Path) -> None:
    async with registry("x") as served, backend(tmp_path, image=served.image, may_pull=False) as opened:
        assert served.image in opened.unavailable_reason and not served.asked


@pytest.mark.requirement("R14", "R55")
async def test_networks_that_are_not_offered_are_refused(tmp_path: Path) -> None:
    async with backend(tmp_path) as opened:
        assert opened.capabilities.networks == {NetworkKind.NONE, NetworkKind.ONE_ENDPOINT}
