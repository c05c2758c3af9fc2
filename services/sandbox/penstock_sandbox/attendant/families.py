"""The families of sockets that a sandbox's programs may make, as part of a system call filter, or as one by itself.

Invariants: what is allowed is kept apart by network namespaces; anything else is refused as the call is made, with
EAFNOSUPPORT, as by a kernel without it. Vsock, for one, is the machine's in every namespace: by it programs would speak
to what runs the machine, and to each other.
"""

from __future__ import annotations

import errno
import socket
import struct
from typing import Dict, List, Tuple

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16

_ALLOWED = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
# The architecture as seccomp names it, the first number of a foreign convention, socket and socketpair.
_MACHINES: Dict[str, Tuple[int, int, Tuple[int, int]]] = {
    "x86_64": (0xC000003E, 0x40000000, (41, 53)),
    "aarch64": (0xC00000B7, 0, (198, 199)),
}


def instruction(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One ``struct sock_filter``."""
    return struct.pack("=HBBI", code, if_true, if_false, operand)


def judged(numbers: Tuple[int, ...]) -> List[bytes]:
    """Instructions, where the call's number is loaded, that decide the calls of these numbers and no others.

    The family is the first argument, of which the kernel reads the low half only.
    """
    verdict = [instruction(LOAD, FIRST_ARGUMENT)]
    verdict += [instruction(JUMP_EQUAL, family, len(_ALLOWED) - at, 0) for at, family in enumerate(_ALLOWED)]
    verdict += [instruction(RETURN, ERRNO | errno.EAFNOSUPPORT), instruction(RETURN, ALLOW)]
    code: List[bytes] = []
    for number in numbers:
        code += [instruction(JUMP_EQUAL, number, 0, len(verdict)), *verdict]
    return code


def program(machine: str) -> bytes:
    """The filter by itself, for a machine as ``uname`` calls it; empty for one that is not known here.

    Other conventions than the machine's own are refused: their sockets are made by calls of other numbers.
    """
    known = _MACHINES.get(machine)
    if known is None:
        return b""
    architecture, foreign, numbers = known
    code = [
        instruction(LOAD, ARCHITECTURE),
        instruction(JUMP_EQUAL, architecture, 1, 0),
        instruction(RETURN, ERRNO | errno.EPERM),
        instruction(LOAD, NUMBER),
    ]
    if foreign:
        code += [instruction(JUMP_AT_LEAST, foreign, 0, 1), instruction(RETURN, ERRNO | errno.EPERM)]
    return b"".join([*code, *judged(numbers), instruction(RETURN, ALLOW)])
