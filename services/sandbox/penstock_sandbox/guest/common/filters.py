"""Parts of the seccomp filters of what runs in sandboxes: refused calls, allowed socket families.

Purpose: local sandboxes (``backends.local.spawner.seccomp``) and guest agents (``guest.confinement``, where this module
is part of a program for Python 3.8) refuse the same kernel interfaces, which a coding agent never needs and which have
a history of vulnerabilities or use up what is the whole machine's; each adds what only it must refuse.

Invariants: each part leaves the call's number loaded for the next one. Refused calls fail with EPERM, except calls that
programs can do without, which fail as on a kernel without them: ENOSYS (io_uring; io_setup, whose events the kernel
counts for the whole machine), EAFNOSUPPORT (sockets). Only socket families that network namespaces isolate are allowed:
vsock, for one, is the machine's in every namespace, so programs could reach the hypervisor and each other through it.
Calls by another architecture's convention, whose numbers mean other calls, are refused. An argument is compared as the
kernel reads it: its low 32 bits. Numbers: Linux's ``unistd_64.h`` (x86-64), ``asm-generic/unistd.h`` (arm64).
"""

from __future__ import annotations

import errno
import socket
import struct
from typing import Dict, List, NamedTuple, Sequence, Tuple

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS, _ARGUMENT_BYTES = 0, 4, 16, 8

_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
_IO_URING = (425, 426, 427)


class Architecture(NamedTuple):
    """Numbers of one architecture: seccomp's own, and those of the calls that every filter decides."""

    number: int
    foreign: int
    """First number of a foreign convention; 0 = it has none."""
    refused: Tuple[int, ...]
    io_setup: int
    sockets: Tuple[int, ...]


# Refused: add_key, request_key, keyctl, perf_event_open, open_by_handle_at, kcmp, bpf, userfaultfd, fanotify_init.
ARCHITECTURES: Dict[str, Architecture] = {
    "x86_64": Architecture(
        0xC000003E, 0x40000000, (248, 249, 250, 298, 304, 312, 321, 323, 300), io_setup=206, sockets=(41, 53)
    ),
    "aarch64": Architecture(
        0xC00000B7, 0, (217, 218, 219, 241, 265, 272, 280, 282, 262), io_setup=0, sockets=(198, 199)
    ),
}
"""By the machine's name (``uname``)."""


def common(architecture: Architecture) -> List[bytes]:
    """Returns the beginning of a filter: what every sandbox refuses."""
    code = [
        instruction(LOAD, _ARCHITECTURE),
        instruction(JUMP_EQUAL, architecture.number, 1, 0),
        instruction(RETURN, ERRNO | errno.EPERM),
        instruction(LOAD, _NUMBER),
    ]
    if architecture.foreign:
        code += [instruction(JUMP_AT_LEAST, architecture.foreign, 0, 1), instruction(RETURN, ERRNO | errno.EPERM)]
    code += refused(architecture.refused, errno.EPERM)
    code += refused((*_IO_URING, architecture.io_setup), errno.ENOSYS)
    for number in architecture.sockets:
        code += by_argument(number, 0, _FAMILIES, ALLOW, ERRNO | errno.EAFNOSUPPORT)
    return code


def refused(numbers: Sequence[int], error: int) -> List[bytes]:
    """Returns code that refuses calls with an errno."""
    code: List[bytes] = []
    for number in numbers:
        code += [instruction(JUMP_EQUAL, number, 0, 1), instruction(RETURN, ERRNO | error)]
    return code


def by_argument(number: int, argument: int, values: Sequence[int], answer: int, otherwise: int) -> List[bytes]:
    """Returns code for call ``number``: ``answer`` if an argument has one of ``values``, else ``otherwise``."""
    block = [load_argument(argument)]
    for value in values:
        block += [instruction(JUMP_EQUAL, value, 0, 1), instruction(RETURN, answer)]
    block.append(instruction(RETURN, otherwise))
    return [instruction(JUMP_EQUAL, number, 0, len(block)), *block]


def load_argument(argument: int) -> bytes:
    """Returns the instruction that loads the low half of an argument, in place of the call's number."""
    return instruction(LOAD, _ARGUMENTS + argument * _ARGUMENT_BYTES)


def instruction(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Returns one ``struct sock_filter``."""
    return struct.pack("=HBBI", code, if_true, if_false, operand)
