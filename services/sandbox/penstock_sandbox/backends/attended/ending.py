"""Programs about an attendant, run beside it: what serves there, and its end before a sandbox's files are kept.

Invariants: each is a Python program that is run as root in the sandbox and says what it found behind ``penstock:``,
for a login shell may speak too. ``PROGRAM`` and ``LOOK`` have the attendant's socket as their argument. When
``PROGRAM`` ended with 0, nothing that the attendant started runs any more, and all that was written is on disk.
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
"""Writes all to disk; the bytes of the root's file system in use."""

LOOK: Final = (
    _SERVING
    + """
print("\\npenstock:%d" % len(serving()))
"""
)
"""How many processes serve."""

# Only the attendant is killed: each keeper then kills its tree, which none could once the keepers are dead.
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
"""Ends an attendant and all that it started, then does as ``SYNC``."""
