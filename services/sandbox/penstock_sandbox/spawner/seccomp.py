"""A system call filter for everything in a sandbox: fewer ways to reach the kernel that a coding agent never needs.

Purpose: the sandbox has no capability and no way to a new user namespace; this closes calls that work without either
and have a history of holes (bpf, io_uring, userfaultfd, perf events, kernel keyrings), families of sockets that network
namespaces do not hold (AF_VSOCK leads to the hypervisor and to other sandboxes), calls that would end or starve the
first process, which has the same user as all others, and foreign calling conventions, whose numbers would pass for
others.

Invariants: refused calls answer EPERM, except io_uring's, which answer ENOSYS, sockets of other families, which answer
EAFNOSUPPORT, and fallocate, which answers EOPNOTSUPP, so that programs fall back as they do on kernels and file systems
without them. An argument is compared as the kernel reads it: its low 32 bits. Numbers: Linux's ``unistd_64.h``
(x86-64), ``asm-generic/unistd.h`` (arm64).
"""

from __future__ import annotations

import errno
import platform
import struct

_LOAD_WORD, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET = 0, 4

_ARGUMENTS_OFFSET, _ARGUMENT_BYTES = 16, 8
_FIRST_PROCESS = 1
# AF_UNIX, AF_INET, AF_INET6, AF_NETLINK: what the network namespace holds, and programs use.
_FAMILIES = (1, 2, 10, 16)

# Architecture as seccomp names it, the first number of a foreign convention, refused numbers, io_uring's numbers.
# Refused: add_key, request_key, keyctl, perf_event_open, open_by_handle_at, kcmp, bpf, userfaultfd.
_IO_URING = (425, 426, 427)
_TABLES = {
    "x86_64": (0xC000003E, 0x40000000, (248, 249, 250, 298, 304, 312, 321, 323)),
    "aarch64": (0xC00000B7, None, (217, 218, 219, 241, 265, 272, 280, 282)),
}
# Number, and which argument names the family: socket, socketpair.
_SOCKETS = {"x86_64": ((41, 0), (53, 0)), "aarch64": ((198, 0), (199, 0))}
# Number, and which argument names a process: prlimit64, sched_setparam, sched_setscheduler, sched_setaffinity,
# sched_setattr, migrate_pages, move_pages, setpriority, ioprio_set.
_ON_PROCESSES = {
    "x86_64": ((302, 0), (142, 0), (144, 0), (203, 0), (314, 0), (256, 0), (279, 0), (141, 1), (251, 1)),
    "aarch64": ((261, 0), (118, 0), (119, 0), (122, 0), (274, 0), (238, 0), (239, 0), (140, 1), (30, 1)),
}

# Number, and which argument is its mode; of these the two that make holes and take no space.
_FALLOCATE = {"x86_64": (285, 1), "aarch64": (47, 1)}
_GIVES_BACK = (0x02 | 0x01, 0x08)


def program(*, allocates: bool) -> bytes | None:
    """The filter as an array of ``struct sock_filter``, or None on a machine whose numbers are not known here.

    ``allocates``: whether space may be taken without writing to it, as fast as the file system can note it down.
    """
    machine = platform.machine()
    table = _TABLES.get(machine)
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
    for number, argument in _SOCKETS[machine]:
        code += _by_argument(number, argument, _FAMILIES, _ALLOW, _ERRNO | errno.EAFNOSUPPORT)
    for number, argument in _ON_PROCESSES[machine]:
        code += _by_argument(number, argument, (_FIRST_PROCESS,), _ERRNO | errno.EPERM, _ALLOW)
    if not allocates:
        number, argument = _FALLOCATE[machine]
        code += _by_argument(number, argument, _GIVES_BACK, _ALLOW, _ERRNO | errno.EOPNOTSUPP)
    code.append(_instruction(_RETURN, _ALLOW))
    return b"".join(code)


def _by_argument(number: int, argument: int, values: tuple[int, ...], answer: int, otherwise: int) -> list[bytes]:
    """For call ``number``: ``answer`` where an argument has one of ``values``, else ``otherwise``."""
    block = [_instruction(_LOAD_WORD, _ARGUMENTS_OFFSET + argument * _ARGUMENT_BYTES)]
    for value in values:
        block += [_instruction(_JUMP_EQUAL, value, 0, 1), _instruction(_RETURN, answer)]
    block.append(_instruction(_RETURN, otherwise))
    return [_instruction(_JUMP_EQUAL, number, 0, len(block)), *block]


def _instruction(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)
