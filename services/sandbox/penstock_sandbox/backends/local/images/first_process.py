"""The first process of a sandbox: a static program of a few hundred bytes.

Purpose: an image may have no shell, and a shell takes ten times as long to start. It writes a line once the root is
complete, and ends when its input does. It ignores SIGCHLD, so the kernel reaps its orphans.

Invariant: no system call beside rt_sigaction, write, read and exit_group.
"""

from __future__ import annotations

import struct
from typing import Final

from penstock_sandbox.backends.images.pause_program import executable

PATH: Final = "/opt/penstock/first"

# struct sigaction {handler = SIG_IGN, flags, restorer, mask} of both architectures, and the line that it writes.
_DATA = struct.pack("<4Q", 1, 0, 0, 0) + b"\n".ljust(8, b"\0")


def _amd64() -> bytes:
    code = bytes.fromhex(
        "b80d000000"  # mov eax, 13 (rt_sigaction)
        "bf11000000"  # mov edi, 17 (SIGCHLD)
        "488d354f000000"  # lea rsi, [rip + 79] (the action, at 96)
        "31d2"  # xor edx, edx
        "41ba08000000"  # mov r10d, 8
        "0f05"  # syscall
        "b801000000"  # mov eax, 1 (write)
        "bf01000000"  # mov edi, 1
        "488d3554000000"  # lea rsi, [rip + 84] (the line, at 128)
        "ba01000000"  # mov edx, 1
        "0f05"  # syscall
        "31c0"  # xor eax, eax (read): the loop starts here, at 51
        "31ff"  # xor edi, edi
        "488d742480"  # lea rsi, [rsp - 128]
        "ba40000000"  # mov edx, 64
        "0f05"  # syscall
        "4885c0"  # test rax, rax
        "7feb"  # jg to the loop
        "b8e7000000"  # mov eax, 231 (exit_group)
        "31ff"  # xor edi, edi
        "0f05"  # syscall
    )
    return code.ljust(96, b"\x90") + _DATA


def _arm64() -> bytes:
    data = 96
    words = (
        0xD2800000 | 17 << 5,  # mov x0, 17 (SIGCHLD)
        0x10000000 | (data - 4) // 4 << 5 | 1,  # adr x1, the action
        0xD2800002,  # mov x2, 0
        0xD2800103,  # mov x3, 8
        0xD28010C8,  # mov x8, 134 (rt_sigaction)
        0xD4000001,  # svc 0
        0xD2800020,  # mov x0, 1
        0x10000000 | (data + 32 - 28) // 4 << 5 | 1,  # adr x1, the line
        0xD2800022,  # mov x2, 1
        0xD2800808,  # mov x8, 64 (write)
        0xD4000001,  # svc 0
        0xD2800000,  # mov x0, 0: the loop starts here
        0xD10203E1,  # sub x1, sp, 128
        0xD2800802,  # mov x2, 64
        0xD28007E8,  # mov x8, 63 (read)
        0xD4000001,  # svc 0
        0xF100001F,  # cmp x0, 0
        0x54000000 | (-6 & 0x7FFFF) << 5 | 0xC,  # b.gt to the loop
        0xD2800000,  # mov x0, 0
        0xD2800BC8,  # mov x8, 94 (exit_group)
        0xD4000001,  # svc 0
    )
    return struct.pack(f"<{len(words)}I", *words).ljust(data, b"\0") + _DATA


def program(architecture: str) -> bytes | None:
    """Returns the executable for an architecture as images name it; None if there is none."""
    return executable(architecture, {"amd64": _amd64, "arm64": _arm64})
