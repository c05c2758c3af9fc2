"""Directories that their owner closed to itself, in an overlay whose upper directory is changed from beside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, subprocess, sys
from penstock_sandbox.guest.common import walk

top, user = sys.argv[1], 65534
subprocess.run(["mount", "-t", "tmpfs", "none", top], check=True)
for name in ("lower", "upper", "work", "merged"):
    os.mkdir(f"{top}/{name}")
    os.chown(f"{top}/{name}", user, user)
layers = f"lowerdir={top}/lower,upperdir={top}/upper,workdir={top}/work"
subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, f"{top}/merged"], check=True)
os.setresuid(user, user, user)
for closed in (0, 0o400, 0o600):
    os.makedirs(f"{top}/merged/d/e/f")
    os.chmod(f"{top}/merged/d/e", closed)
    os.chmod(f"{top}/upper/d/e", 0o700)
    assert os.stat(f"{top}/merged/d/e").st_mode & 0o777 == 0o700
    walk.remove(f"{top}/merged/d")
assert os.listdir(f"{top}/merged") == []
"""


@pytest.mark.requirement("R70", "R95")
@pytest.mark.usefixtures("root")
def test_tree_with_a_misleading_overlay_mode_is_removed() -> None:
    """Measuring what a sandbox takes on disk opens closed directories below the overlay, which shows that."""
    top = Path("/mnt")  # other users may pass through it; the mount is in a namespace of its own
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", SCRIPT, str(top)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


MEASURED = """
import os, subprocess, sys
from pathlib import Path
from penstock_sandbox.backends.host import layers
from penstock_sandbox.backends.local.disk import usage

top, user = Path(sys.argv[1]), 65534
subprocess.run(["mount", "-t", "tmpfs", "none", top], check=True)
modes = {"a": 0o000, "a/b": 0o300, "a/b/c": 0o055, "a/b/file": 0o000, "open": 0o755}
for folder in ("a", "a/b", "a/b/c", "open"):
    (top / folder).mkdir()
(top / "a/b/file").write_bytes(b"content")
(top / "a/b/c/below").write_bytes(b"more")
for name in (*modes, "a/b/c/below"):
    os.chown(top / name, user, user)
for name, mode in modes.items():
    os.chmod(top / name, mode)

def check():
    os.seteuid(0)  # nobody else can look in without opening them
    assert {name: (top / name).stat().st_mode & 0o777 for name in modes} == modes
    os.seteuid(user)

os.seteuid(user)
assert usage.measure(top).inodes == 6
check()
told = b"".join(piece for piece in layers.diff(top) if isinstance(piece, bytes))
assert told.count(b"content") == told.count(b"more") == 1
check()
given_up = layers.diff(top)
while b"content" not in next(given_up):
    pass
given_up.close()
check()
"""


@pytest.mark.requirement("R70", "R95")
@pytest.mark.usefixtures("root")
def test_closed_directories_stay_closed_while_measured_and_read() -> None:
    """A service that is not root opens a directory only while it is in it, also where the caller gives up."""
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", MEASURED, "/mnt"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


COPIED = """
import os, subprocess, sys
from pathlib import Path
from penstock_sandbox.backends.host import copying

top, user = Path(sys.argv[1]), 65534
subprocess.run(["mount", "-t", "tmpfs", "none", top], check=True)
source = top / "upper"
modes = {"": 0o000, "a": 0o000, "a/b": 0o300, "a/b/c": 0o055, "y": 0o400, "y/z": 0o000, "open": 0o755}
for folder in modes:
    (source / folder).mkdir()
modes |= {"a/b/file": 0o000, "a/b/c/written": 0o222, "a/first": 0o600}
for name in ("a/b/file", "a/b/c/written", "a/first"):
    (source / name).write_bytes(name.encode())
# Whichever comes first: the others are linked through the closed directories of that one.
for link in ("y/z/first", "open/first"):
    os.link(source / "a/first", source / link)
for name, mode in modes.items():
    os.chown(source / name, user, user)
    os.chmod(source / name, mode)
    os.utime(source / name, ns=(1, 10**18 + len(name)))
os.chown(top, user, user)

def described(folder):
    os.seteuid(0)  # nobody else can look in without opening them
    found = {}
    for parent, folders, names in os.walk(folder):
        for name in (".", *names):
            path = Path(parent, name)
            status = path.stat()
            content = path.read_bytes() if name != "." else b""
            found[str(path.relative_to(folder))] = (oct(status.st_mode), status.st_nlink, status.st_mtime_ns, content)
    os.seteuid(user)
    return found

before = described(source)
os.seteuid(user)
copying.copy(source, top / "copy")
assert described(source) == before
copy = described(top / "copy")
# Its own place is not closed to the service, which moves it.
assert copy.pop(".")[0] == oct(0o40700) and before.pop(".")[0] == oct(0o40000)
assert copy == before, (copy, before)

answers = iter([False] * 5)
try:
    copying.copy(source, top / "stopped", lambda: next(answers, True))
except OSError:
    assert described(source)["a/b"] == before["a/b"] and described(source)["a"] == before["a"]
else:
    raise AssertionError("it was not stopped")
"""


@pytest.mark.requirement("R52", "R70")
@pytest.mark.usefixtures("root")
def test_closed_files_and_directories_are_copied_and_stay_closed() -> None:
    """A live fork by a service that is not root, also one that stops midway."""
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", COPIED, "/mnt"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
