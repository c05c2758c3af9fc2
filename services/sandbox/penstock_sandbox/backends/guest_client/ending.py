"""Programs run beside a guest agent: count the processes that serve, and end the agent before files are kept.

Invariants: each is a Python program that runs as root in the sandbox and prints its result after ``penstock:``, because
a login shell may print too. ``PROGRAM`` and ``LOOK`` take the agent's socket as their argument. When ``PROGRAM`` has
exited with 0, nothing that the agent started runs any more, and all written data is on disk.
"""

from __future__ import annotations

from typing import Final

_SERVING = """
import os, signal, sys, time

def serving():
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open("/proc/%s/cmdline" % name, "rb") as file:
                arguments = file.read().split(b"\\0")
            with open("/proc/%s/stat" % name, "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:
            continue
        if int(name) != os.getpid() and sys.argv[1].encode() in arguments and state != b"Z":
            found[int(name)] = int(parent)
    return found
"""

SYNC: Final = """
import os
os.sync()
disk = os.statvfs("/")
print("\\npenstock:%d" % ((disk.f_blocks - disk.f_bfree) * disk.f_frsize))
"""
"""Syncs the disk; prints the bytes in use on the root's file system."""

LOOK: Final = (
    _SERVING
    + """
print("\\npenstock:%d" % len(serving()))
"""
)
"""Prints how many processes serve."""

# Only the guest agent is killed: each supervisor then kills its tree, which a dead supervisor could not.
PROGRAM: Final = (
    _SERVING
    + """
deadline = time.monotonic() + 20
found = serving()
for pid, parent in found.items():
    if parent not in found:
        os.kill(pid, signal.SIGKILL)
while serving():
    if time.monotonic() > deadline:
        sys.exit(1)
    time.sleep(0.01)
"""
    + SYNC
)
"""Ends a guest agent and all that it started, then does as ``SYNC``."""
