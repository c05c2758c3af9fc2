"""Sets up a fresh E2B sandbox: a working directory, the guest agent, and toolboxes.

Purpose: everything that needs root inside happens here, once; afterwards everything goes through the guest agent. The
installed files are root's, so that the workload, the template's own user, cannot change them.

Invariants: no secret is in any command; files are uploaded, never put into an argument; a template that lacks a
requirement is refused with its name. A sandbox records its user and the toolboxes in it, and its snapshots with it: one
made from a snapshot gets only those that it lacks, so that nothing is installed for a rollout. It asks nothing of the
user's shell, whose start files an agent may have written.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock_chassis.errors import FailedPrecondition
from penstock_sandbox.backends.e2b.errors import asked
from penstock_sandbox.backends.guest_client import ending, program
from penstock_sandbox.backends.guest_client.program import folders, pack
from penstock_sandbox.domain.backend import MountedToolbox

if TYPE_CHECKING:
    from e2b import AsyncSandbox

OURS: Final = "/opt/penstock"
WORKDIR: Final = "/workspace"
_FOLDER = f"{OURS}/attendant"
_PROGRAM = f"{_FOLDER}/program.py"
_ARCHIVE = f"{_FOLDER}/toolboxes.tar.gz"
# Lines of a path inside and a digest of what was unpacked there.
_HELD = f"{_FOLDER}/toolboxes"
# The line of `_WHO`.
_USER = f"{_FOLDER}/user"
_QUICK_S = 60.0
_UNPACK_S = 600.0
_UPLOAD_S = 600.0
# With a marker, since a login shell may print first.
_WHO = 'printf "\\npenstock:%s:%s:%s:%s\\n" "$(id -u)" "$(id -g)" "$(id -un)" "$HOME"'
_REPORT = re.compile(r"^penstock:(\d+):(\d+):([^:\n]*):(/.*)$", re.MULTILINE)
_MARK = re.compile(r"^(/\S+) ([0-9a-f]{64})$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Workload:
    """The template's user, as which all processes run."""

    uid: int
    gid: int
    name: str
    home: str


def attach_command(sandbox_id: str) -> str:
    """Returns the command that connects its standard input and output with the guest agent."""
    return f"exec python3 -I -S {_PROGRAM} attach --socket {_socket(sandbox_id)} --armour"


def _socket(sandbox_id: str) -> str:
    # Named for the sandbox: in a fork the original's socket exists beside its own.
    return f"{_FOLDER}/{sandbox_id}/socket"


def longest_s(toolboxes: Sequence[MountedToolbox]) -> float:
    """Returns how long E2B must keep a sandbox for ``equip`` to end, in seconds."""
    return _UPLOAD_S + _UNPACK_S if toolboxes else 2 * _QUICK_S


async def equip(
    sandbox: AsyncSandbox, sandbox_id: str, toolboxes: Sequence[MountedToolbox], *, fresh: bool
) -> Workload:
    """Installs everything and starts the guest agent. Raises PenstockError, Gone or Denied.

    ``fresh``: it was not made from a snapshot, which may hold toolboxes.
    """
    try:
        # Concurrently: E2B's latency is their cost.
        async with asyncio.TaskGroup() as group:
            who = group.create_task(_who(sandbox, fresh=fresh))
            group.create_task(_upload_program(sandbox))
            unpacking = group.create_task(_upload_toolboxes(sandbox, toolboxes, fresh=fresh))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    workload = who.result()
    lines = [
        "set -e",
        f"mkdir -p {WORKDIR} && chown {workload.uid}:{workload.gid} {WORKDIR}",
        f"chown -R 0:0 {OURS} && chmod 755 {OURS} {_FOLDER}",
        f"printf '%s\\n' {shlex.quote(_line(workload))} >{_USER}",
    ]
    lines += unpacking.result()
    serve = f"python3 -I -S {_PROGRAM} serve --socket {_socket(sandbox_id)} --user {workload.uid}:{workload.gid}"
    lines.append(f"exec {serve} --home {shlex.quote(workload.home)} --workdir {WORKDIR} --confine")
    code, _ = await run(sandbox, "\n".join(lines), _UNPACK_S if unpacking.result() else _QUICK_S, user="root")
    if code != 0:
        raise FailedPrecondition(
            f"the guest did not start in the template (exit code {code}): it needs Python 3.8 or newer as python3,"
            " and tar for toolboxes",
            reason="TEMPLATE_UNSUITABLE",
        )
    return workload


async def end_workload(sandbox: AsyncSandbox, sandbox_id: str) -> int:
    """Ends the guest agent with all that it started, and syncs the disk; returns the bytes in use there.

    Raises FailedPrecondition (SEAL_FAILED), PenstockError, Gone or Denied.
    """
    code, out = await run(sandbox, _program(ending.PROGRAM, _socket(sandbox_id)), _QUICK_S, user="root")
    for line in out.splitlines():
        if code == 0 and line.startswith("penstock:"):
            return int(line.removeprefix("penstock:"))
    raise FailedPrecondition(f"the sandbox's processes could not be ended (exit code {code})", reason="SEAL_FAILED")


async def serves(sandbox: AsyncSandbox, sandbox_id: str) -> bool:
    """Whether the guest agent of the sandbox of this id runs in this one. Raises PenstockError, Gone or Denied."""
    code, out = await run(sandbox, _program(ending.LOOK, _socket(sandbox_id)), _QUICK_S, user="root")
    return code != 0 or "penstock:0" not in out.split()


async def used_bytes(sandbox: AsyncSandbox) -> int:
    """Syncs the disk; returns the bytes in use there. Raises PenstockError, Gone or Denied."""
    _, out = await run(sandbox, _program(ending.SYNC), _QUICK_S, user="root")
    return next((int(line.removeprefix("penstock:")) for line in out.splitlines() if line.startswith("penstock:")), 0)


def _program(text: str, *arguments: str) -> str:
    return " ".join(["exec python3 -I -S -c", shlex.quote(text), *arguments])


async def _upload_toolboxes(
    sandbox: AsyncSandbox, toolboxes: Sequence[MountedToolbox], *, fresh: bool
) -> Sequence[str]:
    """Uploads the toolboxes and runtimes that are not there; returns the commands that unpack them at their paths."""
    held = {} if fresh or not toolboxes else await _held(sandbox)
    missing = [toolbox for toolbox in toolboxes if not _marks([toolbox]).items() <= held.items()]
    if not missing:
        return ()
    with tempfile.TemporaryFile() as archive:
        await asyncio.to_thread(pack, missing, archive)
        await asked("upload", sandbox.files.write(_ARCHIVE, archive, user="root", request_timeout=_UPLOAD_S))
    marks = _marks(missing)
    record = shlex.join(f"{target} {digest}" for target, digest in {**held, **marks}.items())
    return (
        # Another toolbox of the same name may be there.
        f"rm -rf {shlex.join(marks)}",
        # Each in a line of its own, whose failure ends the script: what was not unpacked must not be recorded.
        f"tar -xzf {_ARCHIVE} -C / --no-same-owner",
        f"rm -f {_ARCHIVE}",
        f"printf '%s\\n' {record} >{_HELD}",
    )


async def _held(sandbox: AsyncSandbox) -> Mapping[str, str]:
    """Returns the record of the toolboxes in a sandbox; empty for a snapshot of an earlier version, which has none."""
    _, out = await run(sandbox, f"cat {_HELD} 2>/dev/null", _QUICK_S, user="root")
    return dict(_MARK.findall(out))


def _marks(toolboxes: Sequence[MountedToolbox]) -> Mapping[str, str]:
    """Maps paths inside to digests of the host's directories, whose names stand for what is in them."""
    return {target: hashlib.sha256(str(source).encode()).hexdigest() for target, source in folders(toolboxes).items()}


async def _upload_program(sandbox: AsyncSandbox) -> None:
    await asked("upload", sandbox.files.write(_PROGRAM, program.text(), user="root"))


def _line(user: Workload) -> str:
    return f"penstock:{user.uid}:{user.gid}:{user.name}:{user.home}"


async def _who(sandbox: AsyncSandbox, *, fresh: bool) -> Workload:
    """Returns the template's user; in a sandbox made from a snapshot, as its record has it.

    In a snapshot of an earlier version, which has none, the user's own shell is asked.
    """
    code, out, found = 0, "", None
    if not fresh:
        code, out = await run(sandbox, f"cat {_USER} 2>/dev/null", _QUICK_S, user="root")
        found = _REPORT.search(out)
    if found is None:
        code, out = await run(sandbox, _WHO, _QUICK_S)
        found = _REPORT.search(out)
    if code != 0 or found is None:
        raise FailedPrecondition(
            f"the template's user could not be determined (exit code {code})", reason="TEMPLATE_UNSUITABLE"
        )
    return Workload(int(found[1]), int(found[2]), found[3], found[4])


async def run(sandbox: AsyncSandbox, text: str, timeout_s: float, user: str | None = None) -> tuple[int, str]:
    """Runs a small command; returns its exit code and its output."""
    from e2b import CommandExitException

    try:
        result = await asked("run", sandbox.commands.run(text, user=user, timeout=timeout_s))
    except CommandExitException as ended:
        return ended.exit_code, ended.stdout
    return result.exit_code, result.stdout
