"""Starts a guest agent on this machine, for a service that may enter its sandboxes from outside.

Invariants: the program gets an empty environment and none of the service's descriptors. Starting it does not fork this
process (``subprocess`` uses vfork, uvloop's own subprocesses fork): gRPC's threads do not survive a fork.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_TIMEOUT_S = 30.0


class GuestFailed(Exception):
    """The guest agent did not start; the message is its error output."""


def write_program(folder: Path) -> Path:
    """Writes the program into a directory of the service's own; returns its path."""
    from penstock_sandbox.backends.guest_client import program

    path = folder / "attendant.py"
    path.write_text(program.text(), encoding="utf-8")
    return path


async def serve(
    program: Path,
    socket: Path,
    *,
    enter: int,
    user: tuple[int, int] | None,
    cgroups: Sequence[str] = (),
    seccomp: Path | None = None,
) -> None:
    """Starts a guest agent for the sandbox of process ``enter`` and waits until it listens at ``socket``.

    ``user`` is the workload's user and group inside the sandbox (None: this service is not root, and its user is the
    only one); ``cgroups`` are ``cgroup.procs`` files that each of its processes joins. Raises GuestFailed.
    """
    arguments = [sys.executable, "-I", "-S", str(program), "serve", "--socket", str(socket), "--enter", str(enter)]
    if user is not None:
        arguments += ["--user", f"{user[0]}:{user[1]}"]
    for group in cgroups:
        arguments += ["--cgroup", group]
    if seccomp is not None:
        arguments += ["--seccomp", str(seccomp)]
    process = subprocess.Popen(  # noqa: ASYNC220 - 2 ms, see the module
        arguments, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={}, cwd="/"
    )
    try:
        _, errors = await asyncio.to_thread(process.communicate, timeout=_TIMEOUT_S)
    except BaseException as error:
        process.kill()
        if isinstance(error, subprocess.TimeoutExpired):
            raise GuestFailed(f"it did not listen within {_TIMEOUT_S:g} s") from error
        raise
    if process.returncode != 0:
        raise GuestFailed(errors.decode(errors="replace").strip() or f"exit {process.returncode}")
