"""The Docker backend on gVisor, for real: served from inside, closed to what runs there, and nothing left behind."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.support.docker import dockerd
from tests.support.docker.backend import backend, create, run
from tests.support.hoppers import kill_each_chain
from tests.support.waiting import eventually_async

from penstock_chassis.errors import FailedPrecondition, InvalidArgument
from penstock_sandbox.backends.docker.backend import DockerBackend
from penstock_sandbox.backends.docker.cleanup import leftovers
from penstock_sandbox.domain.backend import SandboxHandle
from penstock_sandbox.domain.model import ENDED_INSIDE, Resources, SandboxSpec
from penstock_sandbox.processes.output import Collected

pytestmark = pytest.mark.asyncio(loop_scope="module")

MakeSandbox = Callable[..., Awaitable[SandboxHandle]]


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def engine() -> dockerd.Engine:
    """The session's engine, with gVisor."""
    return await asyncio.to_thread(dockerd.gvisor)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def opened(tmp_path_factory: pytest.TempPathFactory, engine: dockerd.Engine) -> AsyncIterator[DockerBackend]:
    """A backend for tests that ask for nothing else; opening one tries a sandbox, which takes gVisor a second."""
    folder = tmp_path_factory.mktemp("gvisor")
    async with backend(folder, "auto", runtime=dockerd.GVISOR, allow_root=True) as made:
        assert made.available, made.unavailable_reason
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def make(opened: DockerBackend) -> AsyncIterator[MakeSandbox]:
    """Makes sandboxes of that backend, which end with the test."""
    made: list[SandboxHandle] = []

    async def one(**spec: Any) -> SandboxHandle:
        made.append(await create(opened, **spec))
        return made[-1]

    yield one
    for handle in made:
        await handle.destroy()


# What an agent of gVisor's may try against those of other users; each line that it prints is a way in.
ATTACK = r"""
import ctypes, os, signal, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
def opens(path, flags):
    try:
        os.close(os.open(path, flags | os.O_NONBLOCK))
        return True
    except OSError:
        return False
ours, tried = os.getuid(), 0
for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
    if os.stat(f"/proc/{pid}").st_uid == ours:
        continue
    tried += 1
    for number in (0, signal.SIGSTOP, signal.SIGKILL):
        try:
            os.kill(pid, number); print(pid, "signalled", number)
        except PermissionError:
            pass
    for request in (16, 0x4206):
        if libc.ptrace(request, pid, 0, 0) == 0: print(pid, "traced")
    for name in ("mem", "comm", "oom_score_adj", "uid_map", "root/etc/shadow", "cwd/socket"):
        for flags in (os.O_RDONLY, os.O_WRONLY):
            if opens(f"/proc/{pid}/{name}", flags) and (name == "mem" or flags == os.O_WRONLY): print(pid, name, flags)
    for name in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{name}"
        if os.readlink(path) != "/dev/null" and (opens(path, os.O_RDONLY) or opens(path, os.O_WRONLY)):
            print(pid, os.readlink(path), "opened")
    buffer = ctypes.create_string_buffer(8)
    piece = struct.pack("QQ", ctypes.addressof(buffer), 8)
    if libc.process_vm_readv(pid, piece, 1, struct.pack("QQ", 0x400000, 8), 1, 0) > 0: print(pid, "memory read")
for place in ("/opt/penstock", "/opt/penstock/inside", "/opt/penstock/attendant"):
    for name in ("new", "hold", "attendant", "filter", "socket", "socket.log"):
        if opens(f"{place}/{name}", os.O_WRONLY | os.O_CREAT): print(place, name, "written")
try:
    socket.socket(socket.AF_UNIX).connect("/opt/penstock/attendant/socket"); print("connected")
except OSError:
    pass
for what, call in {
    "setuid": lambda: os.setuid(0), "setgroups": lambda: os.setgroups([]), "chroot": lambda: os.chroot("/tmp"),
    "mount": lambda: 1 / (libc.mount(b"none", b"/mnt", b"tmpfs", 0, None) + 1),
    "unshare": lambda: 1 / (libc.unshare(0x10000000) + 1), "setns": lambda: 1 / (libc.setns(0, 0) + 1),
}.items():
    try:
        call(); print(what, "allowed")
    except (OSError, ZeroDivisionError):
        pass
print("tried" if tried > 3 else "saw nobody", libc.prctl(39, 0, 0, 0, 0))
"""


@pytest.mark.requirement("R13", "R55", "R60")
async def test_an_agent_reaches_neither_the_machines_kernel_nor_what_serves_it(
    opened: DockerBackend, make: MakeSandbox
) -> None:
    """Own kernel; no signal, trace, memory, descriptor, file or socket of the attendant's is its."""
    assert opened.capabilities.own_kernel and not opened.capabilities.root
    handle = await make(own_kernel=True)
    code, said = await run(handle, "uname", "-r")
    assert code == 0 and said.strip() != os.uname().release
    assert await run(handle, "python3", "-c", ATTACK) == (0, "tried 1\n")
    # What serves it was not stopped either.
    assert await run(handle, "sh", "-c", "id -u; grep ^CapBnd /proc/self/status") == (
        0,
        "1000\nCapBnd:\t" + "0" * 16 + "\n",
    )


@pytest.mark.requirement("R91", "R92")
async def test_an_agent_that_runs_as_nobody_reaches_no_more_than_another(make: MakeSandbox) -> None:
    """The first process and what serves have users of their own here too; vsock is refused when asked for."""
    handle = await make(user="nobody")
    assert await run(handle, "id", "-u") == (0, "65534\n")
    assert await run(handle, "python3", "-c", ATTACK) == (0, "tried 1\n")
    vsock = "import socket\ntry: socket.socket(40)\nexcept OSError as error: print(error.errno)"
    assert await run(handle, "python3", "-c", vsock) == (0, f"{errno.EAFNOSUPPORT}\n")
    for reserved in ("65531", "65533"):
        with pytest.raises(InvalidArgument, match="Penstock's own"):
            await make(user=reserved)


@pytest.mark.requirement("R45", "R53")
async def test_an_image_without_python_or_bash_serves_as_well(tmp_path: Path) -> None:
    """What the attendant runs on is brought in, and cannot be changed."""
    async with backend(tmp_path, "auto", runtime=dockerd.GVISOR, image=dockerd.TINY) as opened:
        assert opened.available, opened.unavailable_reason
        handle = await create(opened)
        assert await run(handle, "sh", "-c", "echo $HOME; id -un; echo x > made; cat made") == (
            0,
            "/home/agent\nagent\nx\n",
        )


@pytest.mark.requirement("R40")
async def test_daemons_are_killed_with_their_process_and_with_no_other(make: MakeSandbox) -> None:
    """This gVisor has no subreapers; a tree is known by a group that its processes cannot leave."""
    handle = await make()
    daemon = (
        "for i in 1 2 3; do setsid sh -c 'setsid sleep 4711 & sleep 4711 & wait' & done; sleep 0.5; exec sleep 4711"
    )
    one, other = Collected(), Collected()
    first = await handle.start(["sh", "-c", daemon], handle.default_env, "/", one, stdin=False, pty=None)
    second = await handle.start(["sh", "-c", daemon], handle.default_env, "/", other, stdin=False, pty=None)
    await _until_sleeping(handle, 14)
    await first.kill()
    await one.ended
    await _until_sleeping(handle, 7)
    await second.kill()
    await _until_sleeping(handle, 0)
    await first.aclose()
    await second.aclose()


# Leaves a process whose first thread has ended; the other writes for as long as it lives.
WITHOUT_LEADER = r"""
import ctypes, os, threading, time
def beat():
    while True:
        os.write(1, b"x")
        time.sleep(0.01)
if os.fork() == 0:
    os.setsid()
    threading.Thread(target=beat).start()
    ctypes.CDLL(None).syscall(60, 0)
"""


@pytest.mark.requirement("R91")
async def test_a_thread_that_its_process_has_left_is_killed_with_its_tree(make: MakeSandbox) -> None:
    """Its process looks as if it were dead; it wrote the reward file of whoever graded beside it."""
    handle = await make()
    script = f"python3 -c '{WITHOUT_LEADER}' > /tmp/beat; exec sleep 4711"
    tree = await handle.start(["sh", "-c", script], handle.default_env, "/", Collected(), stdin=False, pty=None)
    while (await run(handle, "sh", "-c", "test -s /tmp/beat && grep -l Z.*zombie /proc/[0-9]*/status"))[0] != 0:
        pass
    await tree.kill()
    size = (await handle.stat("/tmp/beat")).size
    for _ in range(20):
        assert await run(handle, "true") == (0, "")
    assert (await handle.stat("/tmp/beat")).size == size
    await tree.aclose()


@pytest.mark.requirement("R91")
async def test_no_chain_of_forks_outlives_the_kill_of_its_tree_on_gvisor(make: MakeSandbox) -> None:
    """Without subreapers a tree is all that has its group, and who cannot be looked at may be one of it."""
    handle = await make(resources=Resources(pids=64))
    await kill_each_chain(handle, (1, 4))


async def _until_sleeping(handle: SandboxHandle, count: int) -> None:
    async def sleep() -> bool:
        return (await run(handle, "pgrep", "-cx", "sleep"))[1].split() == [str(count)]

    await eventually_async(sleep, f"{count} processes sleep")


@pytest.mark.requirement("R43", "R55", "R93")
async def test_a_sandbox_over_the_operators_memory_is_lost_and_others_live(tmp_path: Path) -> None:
    """Held to no limit of a spec's, which is refused, but to the operator's; it is the agent's end."""
    async with backend(tmp_path, "auto", runtime=dockerd.GVISOR, memory_bytes=384 << 20) as opened:
        assert opened.available, opened.unavailable_reason
        with pytest.raises(FailedPrecondition, match="limit_memory"):
            opened.refuse_unsupported(SandboxSpec(resources=Resources(memory_bytes=1 << 28)))
        reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        greedy = await opened.create(f"sb-{secrets.token_hex(16)}", SandboxSpec(), (), reason.set_result)
        other = await create(opened)
        assert await run(greedy, "python3", "-c", "x = bytearray(1 << 30)") == (None, "")
        assert await reason in ENDED_INSIDE
        assert await run(other, "echo", "alive") == (0, "alive\n")


@pytest.mark.requirement("R55")
async def test_processes_over_their_limit_are_refused(make: MakeSandbox) -> None:
    """By a limit of the workload's user, which does not count what serves it."""
    handle = await make(resources=Resources(pids=16))
    program = """
import os, sys, time
made = 0
try:
    while made < 40:
        if os.fork() == 0:
            time.sleep(600)
        made += 1
except BlockingIOError:
    pass
print(made)
"""
    sink = Collected()
    process = await handle.start(["python3", "-c", program], handle.default_env, "/", sink, stdin=False, pty=None)
    assert (await sink.ended) is not None
    # Itself is one of them; gVisor allows one more than its limit says.
    assert int(sink.text) in (15, 16)
    await process.kill()
    await process.aclose()
    assert await run(handle, "echo", "free again") == (0, "free again\n")


@pytest.mark.requirement("R49", "R50")
async def test_leftovers_of_a_failed_gvisor_start_are_ended(tmp_path: Path, engine: dockerd.Engine) -> None:
    """Its kernel, its file server and its supervisor outlive their container, but for the service."""
    with engine.watched() as made:
        async with backend(tmp_path, "auto", runtime=dockerd.GVISOR_BROKEN) as opened:
            assert "root network namespace" in opened.unavailable_reason
    assert made
    assert [leftovers.find(container) for container in made] == [[] for _ in made]
    assert engine.traces(made) == []


@pytest.mark.requirement("R48", "R55")
async def test_unknown_gvisor_runtime_is_refused_with_the_package_to_install(tmp_path: Path) -> None:
    async with backend(tmp_path, runtime="runsc-of-somebody-else") as opened:
        assert "apt-get install runsc" in opened.unavailable_reason
        with pytest.raises(FailedPrecondition) as refused:
            opened.refuse_unsupported(SandboxSpec(own_kernel=True))
        assert refused.value.reason == "BACKEND_UNAVAILABLE"


@pytest.mark.requirement("R55")
async def test_guests_are_not_served_from_inside_on_the_machines_kernel(tmp_path: Path) -> None:
    """Who asked for another kernel gets no lesser isolation, whatever the runtime is called."""
    async with backend(tmp_path, "inside") as opened:
        assert "it shares the machine's kernel" in opened.unavailable_reason
    async with backend(tmp_path, "direct") as opened:
        with pytest.raises(FailedPrecondition) as refused:
            opened.refuse_unsupported(SandboxSpec(own_kernel=True))
        assert refused.value.metadata["capabilities"] == "own_kernel"
