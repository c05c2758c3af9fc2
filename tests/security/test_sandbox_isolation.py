"""An agent that looks for a way out of its sandbox, or into what serves it."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import pytest
from tests.conformance.sandbox.conftest import Box, MakeBox, capabilities, make_box, one_endpoint, service
from tests.conformance.sandbox.conftest import fresh_box as box
from tests.conformance.sandbox.services import Running

import penstock_sandbox
from penstock.sandbox.v1 import file_service_pb2 as fs
from penstock.sandbox.v1 import process_service_pb2 as ps

pytestmark = pytest.mark.asyncio(loop_scope="session")
__all__ = ["box", "capabilities", "make_box", "service"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """On sandboxes of this kernel, by a service that is root and by one that is not."""
    if "service" in metafunc.fixturenames:
        metafunc.parametrize("service", ["local", "local-ordinary-user"], indirect=True, scope="session")


def space_of(folder: Path) -> int:
    """The process namespace of a process; 0 for one that has ended or is not ours to look at."""
    try:
        return (folder / "ns/pid").stat().st_ino
    except OSError:
        return 0


def status(folder: Path) -> dict[str, str]:
    """A process's status by name, and its arguments; empty for one that has ended."""
    try:
        lines = (folder / "status").read_text().splitlines()
        arguments = (folder / "cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return {}
    found = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {**found, "arguments": " ".join(arguments).strip()}


def processes_of(argument: str) -> tuple[dict[str, str], dict[str, str]]:
    """From the host: the process `sleep argument` in a sandbox, and the first process of that sandbox."""
    spaces = {folder: space for folder in Path("/proc").glob("[0-9]*") if (space := space_of(folder))}
    (found,) = [folder for folder in spaces if status(folder).get("arguments") == f"sleep {argument}"]
    inside = [status(folder) for folder, space in spaces.items() if space == spaces[found]]
    (first,) = [one for one in inside if one and one["NSpid"].split()[-1] == "1"]
    return status(found), first


@pytest.mark.requirement("R13", "R47")
async def test_a_process_has_no_capability_and_gains_none(box: Box) -> None:
    status = await box.out("grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status")
    values = dict(line.split(":\t") for line in status.splitlines())
    assert {values[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (values["NoNewPrivs"], values["Seccomp"]) == ("1", "2")
    assert (await box.run(shell="su -c id || sudo -n id || mount -t tmpfs none /mnt")).exit.code != 0


@pytest.mark.requirement("R13", "R60", "R91")
async def test_first_process_is_confined_and_cannot_be_traced_or_written(box: Box) -> None:
    """Code put into it would outlive the processes that are killed before a verifier starts."""
    # No other run on this machine sleeps as long.
    seconds = str(10**6 + secrets.randbelow(10**9))
    await box.start("waits", "sleep", seconds)
    other, first = await asyncio.to_thread(processes_of, seconds)
    same = ("NoNewPrivs", "Seccomp", "Uid")
    assert [first[name] for name in same] == [other[name] for name in same]
    # One harmless capability (CAP_WAKE_ALARM): whoever has it not may not trace it.
    assert {value for name, value in first.items() if name.startswith("Cap")} == {f"{1 << 35:016x}"}
    # Its files are those of a process that has none: what it is for the kernel is not theirs to set who share its user.
    assert await box.out("ls -A /proc/1") == ""
    probe = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
for request in (16, 0x4206):  # PTRACE_ATTACH, PTRACE_SEIZE
    assert libc.ptrace(request, 1, 0, 0) == -1, request
    print(errno.errorcode[ctypes.get_errno()])
for name in ("mem", "environ", "ns/uts", "oom_score_adj", "task/1/oom_score_adj"):
    try:
        os.open(f"/proc/1/{name}", os.O_WRONLY)
    except OSError as error:
        print(errno.errorcode[error.errno])
"""
    said = (await box.run("python3", "-c", probe)).stdout.decode().split()
    assert said == ["EPERM", "EPERM", "ENOENT", "ENOENT", "ENOENT", "ENOENT", "ENOENT"]


@pytest.mark.requirement("R93")
async def test_no_limit_priority_or_place_of_the_first_process_can_be_set(box: Box) -> None:
    """Its end is the sandbox's; what programs set for themselves and for each other goes on working."""
    probe = r"""
import ctypes, errno, os, platform, resource, subprocess
libc = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == "x86_64"
numbers = {
    "prlimit64": (302, 261), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "setpriority": (141, 140), "ioprio_set": (251, 30),
}
room = ctypes.create_string_buffer(128)
def call(name, pid):
    number = numbers[name][0 if x86 else 1]
    if name in ("setpriority", "ioprio_set"):
        arguments = (0 if name == "setpriority" else 1, pid, 19)
    elif name == "prlimit64":
        arguments = (pid, resource.RLIMIT_CPU, room, 0)
    else:
        arguments = (pid, 0, room, 0, 0, 0)
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_void_p(a) if isinstance(a, int) else a for a in arguments))
    return errno.errorcode.get(ctypes.get_errno(), "done") if result < 0 else "done"
for name in numbers:
    # The kernel reads 32 bits of a process's number.
    for pid in (1, 1 + 2**32):
        if (said := call(name, pid)) != "EPERM":
            print(name, pid, said)
child = subprocess.Popen(["sleep", "1000000"])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
resource.prlimit(0, resource.RLIMIT_CORE, (0, 0))
resource.prlimit(os.getpid(), resource.RLIMIT_CORE, (0, 0))
resource.prlimit(child.pid, resource.RLIMIT_CORE, (0, 0))
os.sched_setaffinity(0, os.sched_getaffinity(0))
os.sched_setaffinity(child.pid, os.sched_getaffinity(0))
os.setpriority(os.PRIO_PROCESS, 0, 5)
os.setpriority(os.PRIO_PROCESS, child.pid, 5)
child.kill()
print("fine")
"""
    result = await box.run("python3", "-c", probe)
    assert (result.stdout, result.stderr) == (b"fine\n", b"")


@pytest.mark.requirement("R12")
async def test_process_sees_little_of_the_machine(box: Box) -> None:
    for path in ("cmdline", "config.gz", "iomem", "ioports", "kallsyms", "keys", "modules"):
        assert await box.out(f"cat /proc/{path} 2>/dev/null || true") == "", path


@pytest.mark.requirement("R13")
async def test_new_namespaces_and_dangerous_calls_are_refused(box: Box) -> None:
    probe = """
import ctypes, errno, os, platform
libc = ctypes.CDLL(None, use_errno=True)
def refused(result):
    assert result == -1, result
    return errno.errorcode[ctypes.get_errno()]
print(refused(libc.unshare(0x10000000)), refused(libc.unshare(0x20000)))
x86 = platform.machine() == "x86_64"
print(refused(libc.syscall(321 if x86 else 280, 0, 0, 0)))          # bpf
print(refused(libc.syscall(250 if x86 else 219, 0, 0, 0, 0, 0)))    # keyctl
print(refused(libc.syscall(323 if x86 else 282, 0)))                # userfaultfd
print(refused(libc.syscall(425, 8, 0)))                             # io_uring_setup
print(refused(libc.mount(b"none", b"/mnt", b"tmpfs", 0, None)))
print(refused(libc.chroot(b"/")))
"""
    lines = (await box.run("python3", "-c", probe)).stdout.decode().split()
    assert lines[0] in ("ENOSPC", "EPERM") and lines[1] == "EPERM"
    assert lines[2:] == ["EPERM", "EPERM", "EPERM", "ENOSYS", "EPERM", "EPERM"]


@pytest.mark.requirement("R12", "R14")
async def test_serving_processes_are_invisible_in_the_sandbox(box: Box, service: Running) -> None:
    """Neither the door, nor the service, nor the host's processes."""
    look = "cat /proc/[0-9]*/cmdline | tr '\\0' ' '; cat /proc/[0-9]*/environ; ls -la /proc/[0-9]*/fd; :"
    seen = await box.out(look)
    for trace in ("penstock_sandbox", "spawner", "bwrap", str(service.process.pid), str(service.state_dir)):
        assert trace not in seen, trace
    # The mount table shows what is visible anyway, and under which names of the host's.
    assert "sk-host-secret" not in await box.out("cat /proc/self/mountinfo /proc/self/cgroup; env")


@pytest.mark.requirement("R12")
async def test_a_process_inherits_no_descriptor(box: Box) -> None:
    assert await box.out("ls /proc/self/fd | wc -l") == "4"  # three, and the listing's own


@pytest.mark.requirement("R12")
async def test_service_job_in_the_sandbox_cannot_be_read_or_traced(box: Box) -> None:
    """Copying a tree runs a moment inside, with the rights of the sandbox's user and nothing to steal."""
    await box.run(shell="head -c 30000000 /dev/urandom > big")
    script = r"""
import os, sys
seen = set()
print("watching", flush=True)
while not os.path.exists("stop"):
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name in ("environ", "mem", "maps", "fd", "exe", "cwd"):
            try:
                path = f"/proc/{pid}/{name}"
                if name == "fd": os.listdir(path)
                elif name in ("exe", "cwd"): os.readlink(path)
                else: open(path).close()
                comm = open(f"/proc/{pid}/comm").read().strip()
                cmdline = open(f"/proc/{pid}/cmdline", "rb").read()
            except OSError:
                continue
            if b"spawner" in cmdline:
                seen.add(name)
print(sorted(seen))
"""
    await box.write("spy.py", script.encode())
    await box.start("spy", "python3", "spy.py")
    async for event in box.watch("spy"):
        if event.HasField("chunk"):
            break
    for _ in range(5):
        async for _event in box.service.files.ReadTree(fs.ReadTreeRequest(sandbox_id=box.id, path="."), timeout=60):
            pass
    await box.write("stop", b"")
    stdout, stderr, ended = await box.finish("spy")
    assert (stdout, ended.code) == (b"watching\n[]\n", 0), stderr


@pytest.mark.requirement("R13")
async def test_code_planted_where_the_services_packages_are_is_never_run(box: Box) -> None:
    """The door works inside the sandbox's root and must import nothing from it."""
    folder = penstock_sandbox.__path__[0]
    plant = f"mkdir -p {folder}/spawner && for f in {folder}/__init__ {folder}/spawner/door json tarfile encodings; do "
    plant += 'mkdir -p $(dirname $f); echo \'open("/workspace/ran", "w")\' > $f.py; done'
    await box.out(plant)
    for path in ("ran", "absent"):
        await box.run(shell=f"ls {path}")
    await box.write("x/y", b"")
    await box.read("x/y")
    assert await box.out("ls ran 2>/dev/null || echo nothing ran") == "nothing ran"


@pytest.mark.requirement("R4")
async def test_a_sandbox_cannot_use_up_the_connections_of_the_service(make_box: MakeBox) -> None:
    """A rollout's agent cannot starve another's."""
    greedy = await make_box(network=one_endpoint("127.0.0.1:1"))
    flood = "import socket\ns = []\nfor _ in range(600):\n c = socket.socket(); c.settimeout(5)\n"
    flood += " try: c.connect(('127.0.0.1', 4000)); s.append(c)\n except OSError: pass\nprint('done')"
    assert b"done" in (await greedy.run("python3", "-c", flood)).stdout
    other = await make_box()
    assert await other.out("echo fine") == "fine"


@pytest.mark.requirement("R2")
async def test_a_key_with_every_metacharacter_stays_one_value(box: Box) -> None:
    key = "sk-test '$(leak)\"`id`;&|<>\\\n*?[]{}~#!%"
    result = await box.run("printenv", "KEY", secret_env={"KEY": key})
    assert result.stdout == key.encode() + b"\n"
    result = await box.run(shell='printf %s "$KEY"', secret_env={"KEY": key})
    assert result.stdout == key.encode()
    assert result.exit.reason == ps.EXIT_REASON_EXITED
