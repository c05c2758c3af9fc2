"""A system call filter for everything in a sandbox: fewer ways to reach the kernel that a coding agent never needs.

Purpose: the sandbox has no capability and no way to a new user namespace; this closes calls that work without either
and have a history of holes (bpf, io_uring, userfaultfd, perf events, kernel keyrings), and foreign calling conventions,
whose numbers would pass for others.

Invariants: refused calls answer EPERM, except io_uring's, which answer ENOSYS, so that programs fall back as they do on
kernels without it. Numbers: Linux's ``unistd_64.h`` (x86-64) and ``asm-generic/unistd.h`` (arm64).
"""

from __future__ import annotations

import errno
import platform
import struct

_LOAD_WORD, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET = 0, 4

# Architecture as seccomp names it, the first number of a foreign convention, refused numbers, io_uring's numbers.
# Refused: add_key, request_key, keyctl, perf_event_open, open_by_handle_at, kcmp, bpf, userfaultfd.
_IO_URING = (425, 426, 427)
_TABLES = {
    "x86_64": (0xC000003E, 0x40000000, (248, 249, 250, 298, 304, 312, 321, 323)),
    "aarch64": (0xC00000B7, None, (217, 218, 219, 241, 265, 272, 280, 282)),
}


def program() -> bytes | None:
    """The filter as an array of ``struct sock_filter``, or None on a machine whose numbers are not known here."""
    table = _TABLES.get(platform.machine())
    if table is None:
        return None
    architecture, foreign, refused = table
    code = [
        _instruction(_LOAD_WORD, _ARCHITECTURE_OFFSET),
        _instruction(_JUMP_EQUAL, architecture, 1, 0),
        _instruction(_RETURN, _ERRNO | errno.EPERM),
        _instruction(_LOAD_WORD, _NUMBER_OFFSET),
    ]
    if foreign is not None:
        code += [_instruction(_JUMP_AT_LEAST, foreign, 0, 1), _instruction(_RETURN, _ERRNO | errno.EPERM)]
    for numbers, answer in ((refused, errno.EPERM), (_IO_URING, errno.ENOSYS)):
        for number in numbers:
            code += [_instruction(_JUMP_EQUAL, number, 0, 1), _instruction(_RETURN, _ERRNO | answer)]
    code.append(_instruction(_RETURN, _ALLOW))
    return b"".join(code)


def _instruction(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)
