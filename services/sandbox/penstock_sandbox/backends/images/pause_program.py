"""The first process of every container: a program of a few hundred bytes that reaps orphans and waits to be killed.

Purpose: an image may have neither a shell nor ``sleep``, and the daemon may have no init of its own; this needs
neither. It ignores SIGCHLD, so that the kernel reaps its orphans, and then waits forever.

Invariants
- Static, one page of memory, no system call beside the two named here.
- It is a root file in the image that no other user may read: the kernel then lets no process trace it, nor read or
  write its memory. It runs as a user that no spec may name (``additions.RESERVED``).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Final

PATH: Final = "/opt/penstock/hold"
MODE: Final = 0o111
"""The mode of its file: executable by all, readable by root alone."""
USER_ID: Final = 65531
"""Its user and group. Below 65536, the limit of a daemon with user namespaces."""

_BASE = 0x400000
_HEADERS = 64 + 56
_SIGCHLD = 17

# struct sigaction {handler = SIG_IGN, flags, restorer, mask} of both architectures.
_IGNORE = struct.pack("<4Q", 1, 0, 0, 0)


def _amd64() -> bytes:
    code = bytes.fromhex(
        "b80d000000"  # mov eax, 13 (rt_sigaction)
        "bf11000000"  # mov edi, 17 (SIGCHLD)
        "488d3517000000"  # lea rsi, [rip + 23] (the action, at 40)
        "31d2"  # xor edx, edx
        "41ba08000000"  # mov r10d, 8
        "0f05"  # syscall
        "b822000000"  # mov eax, 34 (pause)
        "0f05"  # syscall
        "ebf7"  # jmp to the second mov eax
    )
    return code.ljust(40, b"\x90") + _IGNORE


def _arm64() -> bytes:
    words = (
        0xD2800000 | _SIGCHLD << 5,  # mov x0, 17
        0x10000000 | (56 - 4) // 4 << 5 | 1,  # adr x1, the action (at 56)
        0xD2800002,  # mov x2, 0
        0xD2800103,  # mov x3, 8
        0xD28010C8,  # mov x8, 134 (rt_sigaction)
        0xD4000001,  # svc 0
        0xD2800000,  # mov x0, 0: the loop starts here
        0xD2800001,  # mov x1, 0
        0xD2800002,  # mov x2, 0
        0xD2800003,  # mov x3, 0
        0xD2800928,  # mov x8, 73 (ppoll)
        0xD4000001,  # svc 0
        0x14000000 | -6 & 0x3FFFFFF,  # b to the loop
        0xD503201F,  # nop
    )
    return struct.pack(f"<{len(words)}I", *words) + _IGNORE


_MACHINES: Final = {"amd64": 62, "arm64": 183}


def program(architecture: str) -> bytes | None:
    """Returns the executable for an architecture as named by Docker; None if there is none."""
    return executable(architecture, {"amd64": _amd64, "arm64": _arm64})


def executable(architecture: str, assembled: Mapping[str, Callable[[], bytes]]) -> bytes | None:
    """Returns an executable of the code that ``assembled`` has for an architecture; None if there is none."""
    machine, assemble = _MACHINES.get(architecture), assembled.get(architecture)
    if machine is None or assemble is None:
        return None
    code = assemble()
    size = _HEADERS + len(code)
    identification = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    file_header = identification + struct.pack(
        "<HHIQQQIHHHHHH", 2, machine, 1, _BASE + _HEADERS, 64, 0, 0, 64, 56, 1, 0, 0, 0
    )
    # One segment, readable and executable: the headers, the code and its action.
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, _BASE, _BASE, size, size, 0x1000)
    return file_header + segment + code
