"""The spawner's namespace keeps the mounts that sandboxes need, and loses the others, later ones too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.absent import absent

# In a namespace of its own, which an ordinary user gets too; prints what is mounted below the directory, step by step.
_PROGRAM = """
import os, select, sys
from penstock_sandbox.backends.local.spawner.host_mounts import HostMounts
from penstock_sandbox.guest.common import syscalls

def made(name):
    os.makedirs(name, exist_ok=True)
    syscalls.mount("none", name, "tmpfs", 0)

def show():
    points = [line.split()[4] for line in open("/proc/self/mountinfo")]
    print(*sorted(point[len(place) + 1:] for point in points if point.startswith(place + "/")), flush=True)

place = sys.argv[1]
syscalls.unshare(syscalls.CLONE_NEWNS | (0 if os.geteuid() == 0 else syscalls.CLONE_NEWUSER))
syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_SLAVE)
os.chdir(place)
for name in ("tree", "tree/below", "above", "other", "other/below", "treeless", "a name"):
    made(name)
os.makedirs("above/path")
made("above/path/below")
mounts = HostMounts(["/proc", f"{place}/tree", f"{place}/a name"], [f"{place}/above/path"])
mounts.detach_others()
show()
changes = select.poll()
changes.register(mounts, select.POLLPRI)
changes.poll(0)  # what it did itself
made("later")
made("tree/later")
assert changes.poll(10_000)
mounts.keep(f"{place}/kept")
mounts.detach_others()
show()
made("kept")
mounts.detach_others()
show()
"""


@pytest.mark.requirement("R126")
def test_only_needed_mounts_stay(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM, os.path.realpath(tmp_path)], capture_output=True, text=True, timeout=60
    )
    if "unshare" in ran.stderr:
        absent("namespaces of an ordinary user")
    assert ran.returncode == 0, ran.stderr
    first, second, third = ran.stdout.splitlines()
    assert first.split() == ["a\\040name", "above", "tree", "tree/below"]
    assert second.split() == ["a\\040name", "above", "tree", "tree/below", "tree/later"]
    assert third.split() == ["a\\040name", "above", "kept", "tree", "tree/below", "tree/later"]
