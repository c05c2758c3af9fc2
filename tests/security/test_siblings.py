"""Forks of one snapshot, which have one user on the machine: what one of them can do to another."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import pytest
from tests.conformance.sandbox.conftest import Box, service
from tests.conformance.sandbox.services import Running
from tests.conformance.sandbox.test_sandboxes import fork, prepare
from tests.security.test_sandbox_isolation import processes_of

from penstock.sandbox.v1 import sandbox_service_pb2 as ss

pytestmark = pytest.mark.asyncio(loop_scope="session")
__all__ = ["service"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Sandboxes of this kernel, by a service that is root, and by one that has one user for all."""
    if "service" in metafunc.fixturenames:
        metafunc.parametrize("service", ["local", "local-ordinary-user"], indirect=True, scope="session")


SHARES = r"""
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
libc.shmget(0x5245, 4096, 0o1666), libc.msgget(0x5245, 0o1666), libc.semget(0x5245, 1, 0o1666)
for folder in ("/tmp", "/dev/shm", "/workspace", os.environ["HOME"]):
    open(folder + "/of-a-sibling", "w").close()
listener = socket.socket(socket.AF_UNIX)
listener.bind("\0of-a-sibling")
listener.listen()
listener.set_inheritable(True)
os.execvp("sleep", ["sleep", os.environ["SECONDS_ASLEEP"]])
"""
# Run in both: in the one that shares it finds all, or nothing that it does not find in the other would say anything.
LOOKS = r"""
import ctypes, json, os, signal, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
found, own = [], os.getpid()
shared = {"shm": libc.shmget(0x5245, 0, 0), "queue": libc.msgget(0x5245, 0), "semaphore": libc.semget(0x5245, 0, 0)}
found += [name for name, result in shared.items() if result >= 0]
for folder in ("/tmp", "/dev/shm", "/workspace", os.environ["HOME"]):
    if os.path.exists(folder + "/of-a-sibling"):
        found.append(folder)
with socket.socket(socket.AF_UNIX) as link:
    if link.connect_ex("\0of-a-sibling") == 0:
        found.append("socket")
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if sys.argv[1].encode() in open("/proc/" + pid + "/cmdline", "rb").read().split(b"\0") and int(pid) != own:
            found.append("process")
    except OSError:
        pass
# By the number that it has on the machine, in case that one is worth anything here.
for number in map(int, sys.argv[2:]):
    attempts = {
        "signal": lambda: os.kill(number, signal.SIGCONT),
        "priority": lambda: os.getpriority(os.PRIO_PROCESS, number),
        "memory": lambda: open("/proc/%d/mem" % number, "rb").close(),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
            found.append(name)
        except OSError:
            pass
    if libc.ptrace(0x4206, number, 0, 0) == 0:
        found.append("trace")
print(json.dumps(found))
"""


@pytest.mark.requirement("R14")
async def test_siblings_of_one_user_share_nothing_that_either_can_touch(service: Running) -> None:
    """Processes, memory, queues, sockets and files of a fork, looked for from another of the same host user."""
    asleep = str(10**6 + secrets.randbelow(10**9))
    _, snapshot = await prepare(service)
    one, other = await fork(service, snapshot.snapshot_id, 2)
    try:
        script = f"SECONDS_ASLEEP={asleep} exec python3 -c '{SHARES}'"
        await one.start("shares", shell=script)
        await one.out(f"until pgrep -fx 'sleep {asleep}'; do :; done")
        process, _ = processes_of(asleep)
        seen, looked = [await look(box, asleep, process["Pid"]) for box in (one, other)]
        assert {"shm", "queue", "semaphore", "/tmp", "/dev/shm", "/workspace", "socket", "process"} <= set(seen)
        assert looked == []
        await other.run(shell="kill -KILL -1")  # all that its user may
        assert processes_of(asleep)[0]["Pid"] == process["Pid"]
        # That they do have one user, seen from outside.
        await other.start("sleeps", "sleep", f"{asleep}1")
        await other.out(f"until pgrep -fx 'sleep {asleep}1'; do :; done")
        assert processes_of(f"{asleep}1")[0]["Uid"] == process["Uid"]
    finally:
        for box in (one, other):
            await service.sandboxes.DeleteSandbox(ss.DeleteSandboxRequest(sandbox_id=box.id), timeout=60)
        request = ss.DeleteSnapshotRequest(snapshot_id=snapshot.snapshot_id)
        await service.sandboxes.DeleteSnapshot(request, timeout=60)
    assert not [folder for folder in Path("/proc").glob("[0-9]*") if asleep in _arguments(folder)]


# What the kernel counts for a user or for the machine: each kind is taken to its end, or a few of it are asked for.
COUNTED = r"""
import ctypes, json, os, signal, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
held = []

def watchers():
    if libc.inotify_init() < 0:
        raise OSError

def timers():
    if libc.timer_create(1, None, ctypes.create_string_buffer(8)) != 0:
        raise OSError

def terminals():
    held.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))

def descriptors():
    pair = socket.socketpair()
    pair[0].setblocking(False)
    held.append(pair)
    socket.send_fds(pair[0], [b"x"], [0] * 250)

counts = {}
for kind, most in json.loads(sys.argv[1]).items():
    counts[kind] = 0
    try:
        while counts[kind] < most:
            globals()[kind]()
            counts[kind] += 1
    except OSError:
        pass
print(json.dumps(counts), flush=True)
if sys.argv[2:]:
    signal.pause()
"""
ALL = {"watchers": 100_000, "timers": 100_000, "terminals": 10_000}
A_FEW = {"watchers": 8, "timers": 100, "terminals": 8}


@pytest.mark.requirement("R14", "R76", "R95")
async def test_greedy_fork_leaves_its_siblings_and_the_service_their_share(
    service: Running,
) -> None:
    """Watchers, timers and terminals; and with as many descriptors under way as its user may have, for
    which the service of an ordinary user was once refused to start anything in any sandbox."""
    _, snapshot = await prepare(service)
    greedy, other = await fork(service, snapshot.snapshot_id, 2)
    try:
        wanted = json.dumps({"descriptors": 100_000, **ALL})
        await greedy.start("takes", "python3", "-c", COUNTED, wanted, "stay")
        taken = await counts(greedy, "takes")
        assert all(A_FEW.get(kind, 0) < number < 100_000 for kind, number in taken.items()), taken
        found = await other.run("python3", "-c", COUNTED, json.dumps(A_FEW))
        assert json.loads(found.stdout) == A_FEW
        refused = await greedy.run("python3", "-c", COUNTED, json.dumps({"descriptors": 1}))
        assert json.loads(refused.stdout) == {"descriptors": 0}, "its user has none left, and both commands ran"
    finally:
        for box in (greedy, other):
            await service.sandboxes.DeleteSandbox(ss.DeleteSandboxRequest(sandbox_id=box.id), timeout=60)
        request = ss.DeleteSnapshotRequest(snapshot_id=snapshot.snapshot_id)
        await service.sandboxes.DeleteSnapshot(request, timeout=60)


async def counts(box: Box, process_id: str) -> dict[str, int]:
    """What a process that stays says that it took."""
    said = b""
    async for event in box.watch(process_id):
        said += event.chunk.data
        if event.HasField("exit") or said.endswith(b"\n"):
            break
    found: dict[str, int] = json.loads(said)
    return found


async def look(box: Box, asleep: str, number: str) -> list[str]:
    """What a sandbox finds of the one that shares."""
    found: list[str] = json.loads(await box.out(f"python3 -c '{LOOKS}' {asleep} {number}"))
    return found


def _arguments(folder: Path) -> str:
    try:
        return (folder / "cmdline").read_text(errors="replace")
    except OSError:
        return ""
