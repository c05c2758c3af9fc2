"""Starts guest agents by forking a process with all imports done: milliseconds each, and shared memory.

Purpose: a service that enters many sandboxes of this machine would start an interpreter for each. Instead it starts one
forkserver, which reads requests from standard input, one line of JSON each: ``{"order": N, "serve": [arguments]}``,
and writes replies to standard output, ``{"order": N, "code": C, "errors": TEXT}``, in the order of completion.

Invariants: one thread, so that it may fork; it ends with its standard input, and its children live on; a child keeps
nothing of the forkserver's but its imports.
"""

from __future__ import annotations

import json
import os
import select
import sys
from typing import Callable, Dict, List, Tuple

from penstock_sandbox.guest.common import children

_READ = 64 * 1024
_ERRORS_KEPT = 4096


def serve_requests(serve: Callable[[List[str]], int]) -> int:
    """Reads requests until the input ends; ``serve`` runs one in a child and returns its exit code."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    pending = b""
    children: Dict[int, Tuple[int, int, bytes]] = {}
    while True:
        for descriptor, _ in poll.poll():
            data = os.read(descriptor, _READ)
            if descriptor == 0:
                if not data:
                    return 0
                *orders, pending = (pending + data).split(b"\n")
                for order in orders:
                    read, pid, number = _fork_child(json.loads(order), serve)
                    children[read] = (pid, number, b"")
                    poll.register(read, select.POLLIN)
                continue
            pid, number, errors = children[descriptor]
            if data:
                children[descriptor] = (pid, number, (errors + data)[-_ERRORS_KEPT:])
                continue
            poll.unregister(descriptor)
            os.close(descriptor)
            del children[descriptor]
            _, status = os.waitpid(pid, 0)
            code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
            _answer({"order": number, "code": code, "errors": errors.decode(errors="replace")})


def _fork_child(order: Dict[str, object], serve: Callable[[List[str]], int]) -> Tuple[int, int, int]:
    """Forks a child that handles a request: returns the pipe with its errors, its id, and the request's number."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            null = os.open(os.devnull, os.O_RDWR)
            for standard, descriptor in enumerate((null, null, write)):
                os.dup2(descriptor, standard)
            children.close_others({0, 1, 2})
            arguments = order["serve"]
            assert isinstance(arguments, list)
            code = serve(arguments)
        except BaseException as error:  # noqa: BLE001
            os.write(2, repr(error).encode())
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(write)
    number = order["order"]
    assert isinstance(number, int)
    return read, pid, number


def _answer(message: Dict[str, object]) -> None:
    view = memoryview(json.dumps(message).encode() + b"\n")
    while view:
        view = view[os.write(1, view) :]
