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

FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
"""Socket families that programs may have; for others there is EAFNOSUPPORT."""


class Architecture(NamedTuple):
    """Numbers of one architecture: seccomp's own, and those of the calls that every filter decides."""

    number: int
    foreign: int
    """First number of a foreign convention; 0 = it has none."""
    sockets: Tuple[int, ...]
    column: int
    """Its place in a table of calls."""

    def numbers(self, calls: Dict[str, Tuple[int, int]]) -> List[int]:
        """Returns the numbers of a table's calls."""
        return [numbers[self.column] for numbers in calls.values()]


ARCHITECTURES: Dict[str, Architecture] = {
    "x86_64": Architecture(0xC000003E, 0x40000000, sockets=(41, 53), column=0),
    "aarch64": Architecture(0xC00000B7, 0, sockets=(198, 199), column=1),
}
"""By the machine's name (``uname``)."""

REFUSED: Dict[str, Tuple[int, int]] = {
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "perf_event_open": (298, 241),
    "open_by_handle_at": (304, 265),
    "kcmp": (312, 272),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "fanotify_init": (300, 262),
}
"""Calls that fail with EPERM, by name: their numbers on x86-64 and arm64."""
ABSENT: Dict[str, Tuple[int, int]] = {
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_setup": (206, 0),
}
"""Calls that fail with ENOSYS."""


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
    code += refused(architecture.numbers(REFUSED), errno.EPERM)
    code += refused(architecture.numbers(ABSENT), errno.ENOSYS)
    for number in architecture.sockets:
        code += by_argument(number, 0, FAMILIES, ALLOW, ERRNO | errno.EAFNOSUPPORT)
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
