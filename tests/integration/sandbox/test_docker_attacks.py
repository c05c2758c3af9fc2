"""Attacks of an agent on its own Docker sandbox: on what holds it, on the kernel's other doors, and on its own end."""

from __future__ import annotations

import asyncio
import io
import os
import secrets
import signal
import tarfile
from pathlib import Path
from typing import Any

import pytest
from tests.support.docker import dockerd
from tests.support.docker.backend import BY_THE_ENGINE, REACHES, backend, create, diff, run
from tests.support.hoppers import kill_each_chain
from tests.support.waiting import eventually_async

from penstock_chassis.errors import FailedPrecondition, InvalidArgument, PenstockError
from penstock_sandbox.backends.docker import sandboxes
from penstock_sandbox.backends.docker.backend import DockerBackend
from penstock_sandbox.backends.guest_client import link
from penstock_sandbox.backends.guest_client.sandbox import GuestSandbox
from penstock_sandbox.backends.images import pause_program
from penstock_sandbox.domain.model import Resources, SandboxSpec
from penstock_sandbox.guest.system import ASIDE
from penstock_sandbox.processes.output import Collected

pytestmark = pytest.mark.asyncio

# What makes a process another program: tracing it, or writing its memory. Each line that it prints is a way in.
BECOME_ANOTHER = r"""
import ctypes, os, struct
libc = ctypes.CDLL(None, use_errno=True)
piece = ctypes.create_string_buffer(8)
ours = struct.pack("QQ", ctypes.addressof(piece), 8)
for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
    if pid == os.getpid():
        continue
    name = open(f"/proc/{pid}/comm").read().strip()
    for request in (16, 0x4206):
        if libc.ptrace(request, pid, 0, 0) == 0:
            print(name, "traced", request)
    if libc.process_vm_writev(pid, ours, 1, struct.pack("QQ", 0x400000, 8), 1, 0) > 0:
        print(name, "written")
    for path in ("mem", "exe", "environ"):
        try:
            os.close(os.open(f"/proc/{pid}/{path}", os.O_RDWR if path == "mem" else os.O_RDONLY))
            print(name, path, "opened")
        except OSError:
            pass
    try:
        os.kill(pid, 0)
        print(name, "signalled")
    except PermissionError:
        pass
print("tried")
"""


@pytest.mark.requirement("R91", "R93")
@pytest.mark.parametrize("reach", REACHES)
async def test_an_agent_that_runs_as_nobody_cannot_become_the_first_process(tmp_path: Path, reach: str) -> None:
    """D19 of the second review: the first process had the user `nobody`, whom a spec may name."""
    async with backend(tmp_path, reach) as opened:
        handle = await create(opened, user="nobody")
        assert await run(handle, "id", "-u") == (0, "65534\n")
        assert await run(handle, "python3", "-c", BECOME_ANOTHER) == (0, "tried\n")


@pytest.mark.requirement("R91", "R93")
async def test_the_ids_of_what_serves_a_sandbox_are_no_users(tmp_path: Path) -> None:
    """Refused by number, by a name or a group that the image gives them, and as the image's own `agent`."""
    image = "penstock-test/reserved:1"
    async with backend(tmp_path) as opened:
        dockerd.build(
            image,
            f"FROM {dockerd.BASE}",
            f"RUN echo 'helper:x:{ASIDE}:100::/:/bin/sh' >> /etc/passwd"
            f" && echo 'member:x:1234:{pause_program.USER_ID}::/:/bin/sh' >> /etc/passwd"
            f" && echo 'agent:x:{pause_program.USER_ID}:100::/:/bin/sh' >> /etc/passwd",
        )
        try:
            for user in (str(ASIDE), f"0{pause_program.USER_ID}", "helper", "member"):
                with pytest.raises(InvalidArgument) as refused:
                    await create(opened, image=image, user=user)
                assert refused.value.reason == "USER_RESERVED"
                assert [one.field for one in refused.value.violations] == ["spec.user"]
            with pytest.raises(FailedPrecondition) as unusable:
                await create(opened, image=image)
            assert unusable.value.reason == "IMAGE_UNUSABLE"
        finally:
            dockerd.engine().api.remove_image(image, force=True)


# Answers what each family of sockets got as it was asked for, beside what a socket pair of vsock's got.
FAMILIES = r"""
import errno, socket
for family in range(1, 50):
    try:
        socket.socket(family, socket.SOCK_RAW if family == 16 else socket.SOCK_DGRAM).close()
        print(family, "made")
    except OSError as error:
        if error.errno != errno.EAFNOSUPPORT:
            print(family, error.errno)
try:
    socket.socketpair(40, socket.SOCK_STREAM)
except OSError as error:
    print("pair", errno.errorcode[error.errno])
"""


@pytest.mark.requirement("R92")
@pytest.mark.parametrize("reach", REACHES)
async def test_sockets_are_of_four_families_whatever_the_kernel_has(tmp_path: Path, reach: str) -> None:
    """Vsock is the machine's in every network namespace; refused as the socket is asked for."""
    async with backend(tmp_path, reach) as opened:
        handle = await create(opened)
        assert await run(handle, "python3", "-c", FAMILIES) == (
            0,
            "1 made\n2 made\n10 made\n16 made\npair EAFNOSUPPORT\n",
        )


# What stands in the way of its changes --------------------------------------------------------------------------------


@pytest.mark.requirement("R74", "R76")
async def test_the_diff_holds_links_that_the_daemon_cannot_follow(tmp_path: Path) -> None:
    """In circles, through a file, to a name that is too long; each of them made the whole diff fail."""
    wanted = {"loop": "loop", "there": "back", "back": "there", "through": "file/x", "long": "x" * 300, "up": "../" * 9}
    script = "echo 1 > file; mkdir new; ln -s loop new/loop; " + "".join(
        f"ln -s {target} {name}; " for name, target in wanted.items()
    )
    async with backend(tmp_path) as opened:
        handle = await create(opened)
        assert await run(handle, "sh", "-c", script) == (0, "")
        pieces = [piece async for piece in handle.diff(["/workspace"])]
    content = b"".join(piece for piece in pieces if isinstance(piece, bytes))
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        found = {member.name: member.linkname for member in archive if member.issym()}
    assert found == {"workspace/new/loop": "loop", **{f"workspace/{name}": to for name, to in wanted.items()}}


@pytest.mark.requirement("R74")
async def test_unreadable_path_is_reported_as_the_sandboxs(tmp_path: Path) -> None:
    """A tree that is deeper than a path may be long is no fault of the daemon's."""
    script = "import os\nfor _ in range(200):\n    os.mkdir('d' * 50)\n    os.chdir('d' * 50)"
    async with backend(tmp_path) as opened:
        handle = await create(opened)
        assert await run(handle, "python3", "-c", script) == (0, "")
        with pytest.raises(InvalidArgument) as refused:
            await diff(handle)
    assert refused.value.reason == "PATH_TOO_LONG"


# How an agent ends its own sandbox ------------------------------------------------------------------------------------


Box = tuple[GuestSandbox, asyncio.Future[str]]


async def lost(box: Box) -> tuple[str, PenstockError]:
    """The reason of a sandbox's loss, and what who uses it still is told."""
    handle, reason = box
    told = await reason
    with pytest.raises(PenstockError) as refused:
        await handle.stat("/")
    return told, refused.value


async def make(opened: DockerBackend, **spec: Any) -> Box:
    """A sandbox, and the reason of its loss to come."""
    reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    made = await opened.create(f"sb-{secrets.token_hex(16)}", SandboxSpec(**spec), (), reason.set_result)
    assert isinstance(made, GuestSandbox)
    return made, reason


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon reports a container's end as late as its machine lets it."""
    monkeypatch.setattr(sandboxes, "_EXIT_REPORTED_S", 50.0)
    monkeypatch.setattr(link, "_JUDGE_S", 60.0)


@pytest.mark.requirement("R93")
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("reach", REACHES)
async def test_sandbox_ended_by_the_machine_is_not_blamed_on_its_agent(tmp_path: Path, reach: str) -> None:
    """A container that the daemon was told to kill, whoever tells first; and one that was removed."""
    async with backend(tmp_path, reach) as opened:
        killed, removed = await make(opened), await make(opened)
        engine = dockerd.engine()
        assert dockerd.kill(killed[0].id)
        reason, told = await lost(killed)
        assert reason == "SANDBOX_VANISHED" and "ended_inside" not in told.metadata
        (container,) = engine.api.containers(
            filters={"label": [f"penstock.sandbox={removed[0].id}", "penstock.kind=sandbox"]}
        )
        engine.api.remove_container(container["Id"], force=True)
        assert (await lost(removed))[0] == "SANDBOX_VANISHED"


@pytest.mark.requirement("R93")
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("reach", REACHES)
async def test_first_process_that_dies_by_itself_is_the_agents_end(tmp_path: Path, reach: str) -> None:
    """The memory of a container ends in its first process too, which the kernel then kills."""
    async with backend(tmp_path, reach) as opened:
        ended, other = await make(opened), await make(opened)
        (container,) = dockerd.engine().api.containers(
            filters={"label": [f"penstock.sandbox={ended[0].id}", "penstock.kind=sandbox"]}
        )
        os.kill(dockerd.engine().api.inspect_container(container["Id"])["State"]["Pid"], signal.SIGKILL)
        reason, told = await lost(ended)
        assert reason == "PROCESS_ENDED"
        assert (told.reason, told.metadata["ended_inside"]) == ("SANDBOX_LOST", "true")
        assert await run(other[0], "echo", "alive") == (0, "alive\n")


# Who outlives the kill ------------------------------------------------------------------------------------------------

UNREADABLE = "penstock-test/unreadable:1"
"""With a copy of bash that everybody may run and only root may read: what runs it is hidden from other processes."""

# Each is left behind by its first process: stopped, of an unreadable program, traced, deaf to signals.
LEFT = r"""
setsid sh -c 'kill -STOP $$' &
setsid xbash -c 'while :; do :; done' &
setsid python3 -c '
import ctypes, os, signal, time
libc = ctypes.CDLL(None)
if os.fork() == 0:
    libc.ptrace(0, 0, 0, 0)
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(600)' &
(trap "" TERM HUP INT; setsid sleep 600) &
exec sleep 600
"""


@pytest.mark.requirement("R91")
@pytest.mark.parametrize("reach", REACHES)
async def test_no_chain_of_forks_outlives_the_kill_of_its_tree(tmp_path: Path, reach: str) -> None:
    """Each process is gone before it is looked at, and its successor there; however it makes that one."""
    async with backend(tmp_path, reach) as opened:
        handle = await create(opened, resources=Resources(pids=200))
        await kill_each_chain(handle, (1, 8))


@pytest.mark.requirement("R91")
@pytest.mark.parametrize("reach", REACHES)
async def test_neither_stopped_nor_traced_nor_unreadable_processes_outlive_the_kill(tmp_path: Path, reach: str) -> None:
    """A program that only root may read makes what runs it invisible to all but its tree's supervisor."""
    async with backend(tmp_path, reach) as opened:
        dockerd.build(UNREADABLE, f"FROM {dockerd.BASE}", "RUN install -m 711 /bin/bash /usr/local/bin/xbash")
        try:
            handle = await create(opened, image=UNREADABLE)
            heard = Collected()
            tree = await handle.start(["bash", "-c", LEFT], handle.default_env, "/", heard, stdin=False, pty=None)

            async def all_there() -> bool:
                _, said = await run(handle, "ps", "-u", handle.user, "-o", "stat=,comm=")
                seen = [line.split() for line in said.splitlines()]
                states, names = {state[0] for state, *_ in seen}, [name for _, name, *_ in seen]
                return "xbash" in names and names.count("sleep") == 2 and states >= {"T", "t"}

            await eventually_async(all_there, "all of them are left behind")
            await tree.kill()
            assert await run(handle, "ps", "-u", handle.user, "-o", "comm=") == (0, "ps\n")
            await handle.destroy()
        finally:
            dockerd.engine().api.remove_image(UNREADABLE, force=True)


# The author of an image -----------------------------------------------------------------------------------------------


@pytest.mark.requirement("R150")
@pytest.mark.parametrize("reach", BY_THE_ENGINE)
async def test_an_image_neither_names_penstocks_files_nor_loads_libraries_into_every_program(
    tmp_path: Path, reach: str
) -> None:
    """The rest of what it declares is kept, library paths included."""
    image = "penstock-test/declaring:1"
    async with backend(tmp_path, reach) as opened:
        dockerd.build(
            image,
            f"FROM {dockerd.BASE}",
            "ENV PENSTOCK_REWARD_FILE=/tmp/mine LD_PRELOAD=/tmp/x.so LD_AUDIT=/tmp/y.so LD_LIBRARY_PATH=/opt KEPT=yes",
        )
        try:
            handle = await create(opened, image=image)
            code, said = await run(handle, "env")
            names = {line.partition("=")[0] for line in said.splitlines()}
            assert code == 0 and {"KEPT", "LD_LIBRARY_PATH"} <= names
            assert not names & {"PENSTOCK_REWARD_FILE", "LD_PRELOAD", "LD_AUDIT"}
            (one,) = dockerd.engine().api.containers(filters={"label": ["penstock.kind=sandbox"]})
            declared = dockerd.engine().api.inspect_container(one["Id"])["Config"]["Env"]
            assert "KEPT=yes" in declared
            dropped = ("LD_PRELOAD=", "LD_AUDIT=", "PENSTOCK_REWARD_FILE=")
            assert not [line for line in declared if line.startswith(dropped)]
            await handle.destroy()
        finally:
            dockerd.engine().api.remove_image(image, force=True)
