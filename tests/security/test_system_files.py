"""An agent that would change what a sandbox is made of: its programs, its settings, its devices, its top level."""

from __future__ import annotations

import json

import pytest
from tests.conformance.sandbox.conftest import Box, MakeBox, capabilities, make_box, service
from tests.conformance.sandbox.conftest import fresh_box as box

from penstock.sandbox.v1 import sandbox_pb2 as sb
from penstock.sandbox.v1 import sandbox_service_pb2 as ss

pytestmark = pytest.mark.asyncio(loop_scope="session")
__all__ = ["box", "capabilities", "make_box", "service"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """On sandboxes of this kernel, by a service that is root and by one that is not."""
    if "service" in metafunc.fixturenames:
        metafunc.parametrize("service", ["local", "local-ordinary-user"], indirect=True, scope="session")


# Where the sandbox's user may write; everything else that is there is not this user's to change.
OURS = {"home", "workspace", "tmp"}
ATTEMPTS = r"""
import ctypes, json, os, stat, sys
libc = ctypes.CDLL(None, use_errno=True)
AT_FDCWD, EXCHANGE = -100, 2

def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "")

def write(path):
    with open(path, "w") as file:
        file.write("mine")

def attempts(path):
    mine = "/workspace/mine"
    yield "unlink", lambda: os.unlink(path)
    yield "rmdir", lambda: os.rmdir(path)
    yield "rename", lambda: os.rename(path, path + "-moved")
    yield "replace", lambda: os.rename(mine, path)
    yield "exchange", lambda: checked(libc.renameat2(AT_FDCWD, mine.encode(), AT_FDCWD, path.encode(), EXCHANGE))
    yield "link", lambda: os.symlink(mine, path)
    yield "make", lambda: os.mkdir(path)
    yield "chmod", lambda: os.chmod(path, 0o777)
    yield "utime", lambda: os.utime(path, (0, 0))
    yield "setxattr", lambda: os.setxattr(path, "user.x", b"x")
    yield "mount", lambda: checked(libc.mount(b"/workspace", path.encode(), None, 4096, None))
    yield "unmount", lambda: checked(libc.umount2(path.encode(), 2))
    if os.path.isdir(path):
        yield "create", lambda: write(path + "/ld.so.preload")
        yield "mkdir", lambda: os.mkdir(path + "/new")

def identity(path):
    status = os.lstat(path)
    return status.st_dev, status.st_ino, status.st_mode

done = []
os.mkdir("/workspace/mine")
paths = ["/" + name for name in os.listdir("/") if name not in json.loads(sys.argv[1])]
inside = ["/etc/passwd", "/etc/ssl", "/opt/penstock", "/dev/null", "/dev/pts", "/var/log", "/usr/bin"]
inside += ["/lib64/" + name for name in os.listdir("/lib64")[:3]] if os.path.isdir("/lib64") else []
before = {path: identity(path) for path in paths + inside}
for path in paths + inside:
    for name, attempt in attempts(path):
        try:
            attempt()
        except OSError:
            continue
        done.append([path, name])
changed = [path for path in before if identity(path) != before[path]]
open_folders = []
for top in paths:
    if top == "/proc":
        continue
    for folder, folders, files in os.walk(top):
        folders[:] = [name for name in folders if folder.count("/") < 4 and folder + "/" + name != "/dev/shm"]
        writable = [folder] + [folder + "/" + name for name in files]
        plain = [p for p in writable if not os.path.islink(p) and not stat.S_ISCHR(os.stat(p).st_mode)]
        open_folders += [p for p in plain if os.access(p, os.W_OK)]
print(json.dumps({"paths": sorted(paths), "done": done, "changed": changed, "writable": open_folders}))
"""


@pytest.mark.requirement("R90")
async def test_top_level_files_cannot_be_changed_replaced_or_removed(box: Box) -> None:
    """By a service that is root, and by one whose own user the agent's is."""
    result = await box.run("python3", "-I", "-c", ATTEMPTS, json.dumps(sorted(OURS)), output_limit=1_000_000)
    assert result.exit.code == 0, result.stderr.decode()
    found = json.loads(result.stdout)
    assert {"/bin", "/dev", "/etc", "/lib", "/mnt", "/opt", "/proc", "/root", "/run", "/srv", "/usr", "/var"} <= set(
        found["paths"]
    )
    assert (found["done"], found["changed"], found["writable"]) == ([], [], [])


@pytest.mark.requirement("R90")
async def test_a_service_says_whether_its_sandboxes_system_is_read_only(capabilities: sb.Capabilities) -> None:
    """Whoever grades in place may rely on it."""
    assert capabilities.system_read_only


@pytest.mark.requirement("R90")
async def test_agents_own_loader_shell_or_library_never_replaces_the_systems(box: Box) -> None:
    """The ways that made a reward."""
    attack = """
    rm -rf /lib64 /bin /lib /sbin; mkdir /lib64 /bin; mv /opt /opt2; mv /etc /etc2; mv /usr /usr2
    cp /usr/bin/true /lib64/ld-linux-x86-64.so.2; cp /usr/bin/true /bin/bash
    echo /workspace/p.so > /etc/ld.so.preload; echo /workspace > /etc/ld.so.conf
    rm -f /dev/null; touch /dev/null; ln -sf /workspace /dev/fd; :"""
    await box.run(shell=attack)
    assert await box.out("test -c /dev/null && ls /etc/ld.so.preload 2>&1 | tail -c 10; ls / | tr '\\n' ' '") != ""
    assert await box.out("ls -d /opt2 /etc2 /usr2 2>/dev/null || true") == ""
    assert (await box.run("/bin/bash", "-c", "echo $BASH_VERSION")).stdout.strip() != b""
    assert (await box.run("python3", "-I", "-c", "print(6 * 7)")).stdout == b"42\n"


@pytest.mark.requirement("R90")
async def test_new_top_level_names_are_the_users_and_stay_in_snapshots(make_box: MakeBox) -> None:
    """A task may keep its work at /app; what is there by now is protected, what is not may be made."""
    box = await make_box()
    await box.out("mkdir /app /logs && echo kept > /app/file && echo x > /top && rm /top && echo y > /var/tmp/scratch")
    await box.write("/tests/check.sh", b"echo fine")
    assert await box.out("bash /tests/check.sh; cat /app/file") == "fine\nkept"
    deleted: list[str] = []
    async for event in box.service.sandboxes.DiffSandbox(ss.DiffSandboxRequest(sandbox_id=box.id), timeout=60):
        deleted += event.end.deleted_paths
    assert deleted == []
