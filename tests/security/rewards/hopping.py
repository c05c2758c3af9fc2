"""Programs whose processes each make the next and end, so that a listing of processes is old before it is used."""

from __future__ import annotations

import platform
import struct

_PYTHON = b"""#!/usr/bin/env python3
import os
while True:
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        pass  # no room for another one: once more
"""
# x86-64. The maker of the next process exits; that one does the same again, and so does who could make none.
_EXIT = bytes.fromhex("31ff b83c000000 0f05")  # exit(0)
_FORK = bytes.fromhex("b839000000 0f05 85c0 7ef5") + _EXIT
# clone(CLONE_VM | SIGCHLD): both use the same memory, and no stack.
_CLONE_VM = bytes.fromhex("bf11010000 31f6 b838000000 0f05 85c0 7eee") + _EXIT
# vfork, and its child executes this program anew, which lets the parent go on to its end.
_VFORK = (
    bytes.fromhex("b83a000000 0f05 85c0 78f5 7512 488d3d14000000 31f6 31d2 b83b000000 0f05")
    + _EXIT
    + b"/proc/self/exe\0"
)
_BASE = 0x400000
_HEADERS = 64 + 56


def programs() -> dict[str, bytes]:
    """Executable files by name, the fastest that this machine can run."""
    found = {"python": _PYTHON}
    if platform.machine() == "x86_64":
        found |= {name: _elf(code) for name, code in (("fork", _FORK), ("clone", _CLONE_VM), ("vfork", _VFORK))}
    return found


def _elf(code: bytes) -> bytes:
    """A static program of nothing but ``code``."""
    size = _HEADERS + len(code)
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01",
        2,
        62,
        1,
        _BASE + _HEADERS,
        64,
        0,
        0,
        64,
        56,
        1,
        0,
        0,
        0,
    )
    return header + struct.pack("<IIQQQQQQ", 1, 5, 0, _BASE, _BASE, size, size, 0x1000) + code
