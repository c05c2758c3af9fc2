"""Sets up a fresh machine as a sandbox: a user, directories, and the guest agent as root beside it.

Invariants
- The workload's user can neither read nor signal the guest agent, which runs as root in a directory closed to others.
- An image that cannot run a guest agent is refused with what it lacks, before anything else is done in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock_chassis.errors import FailedPrecondition, Unavailable
from penstock_sandbox.backends.remote_machine.machine import Machine

HOME = "/home/agent"
WORKDIR = "/workspace"
USER = "agent"
ROOT_HOME = "/root"
OURS = "/opt/penstock"
FOLDER = f"{OURS}/attendant"
"""A directory for root alone; beside it are toolboxes, which all may read."""
PROGRAM = f"{FOLDER}/attendant.py"
SOCKET = f"{FOLDER}/run/attendant.sock"

_USER_ID = 10_001
_LACKS = 90
"""Exit codes from here on mean a missing feature of the image."""
_WHAT_IT_LACKS = (
    "python3 (3.8 or newer, for the guest)",
    "a python3 that is 3.8 or newer",
    "root: the image runs as an ordinary user, who could end the guest",
)

# The user's number may be another's only if the image has one of ours: names in /etc/passwd are the image's own.
_PREPARE = f"""
[ "$(id -u)" = 0 ] || exit {_LACKS + 2}
command -v python3 >/dev/null || exit {_LACKS}
python3 -c 'import sys; sys.exit(sys.version_info < (3, 8))' || exit {_LACKS + 1}
set -e
umask 022
grep -q '^{USER}:' /etc/passwd || {{
  echo '{USER}:x:{_USER_ID}:{_USER_ID}::{HOME}:/bin/sh' >>/etc/passwd
  grep -q '^{USER}:' /etc/group || echo '{USER}:x:{_USER_ID}:' >>/etc/group
}}
mkdir -p {HOME} {WORKDIR}
chown {USER}: {HOME} {WORKDIR}
chmod 755 {HOME} {WORKDIR}
mkdir -p {FOLDER}/run
chmod 755 {OURS}
chmod 700 {FOLDER} {FOLDER}/run
id -u {USER}; id -g {USER}; command -v python3
"""
_START = """
cd /
exec "$@" </dev/null >/dev/null 2>&1
"""

_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"


@dataclass(frozen=True, slots=True)
class PreparedMachine:
    """A prepared machine: its interpreter, and the workload's user there."""

    python: str
    uid: int
    gid: int
    as_root: bool

    @property
    def user(self) -> str:
        """The workload's name."""
        return "root" if self.as_root else USER

    @property
    def home(self) -> str:
        """The workload's home."""
        return ROOT_HOME if self.as_root else HOME

    @property
    def command(self) -> list[str]:
        """The argv before `serve`, `attach` and `deliver`; it keeps the image's site-packages from running at start."""
        return [self.python, "-I", "-S", PROGRAM]


def environment(place: PreparedMachine, path: Sequence[str]) -> dict[str, str]:
    """Returns every process's environment; it contains nothing of the machine's own, which is not the workload's."""
    return {
        "PATH": ":".join((*path, _PATH)),
        "HOME": place.home,
        "USER": place.user,
        "LOGNAME": place.user,
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "TMPDIR": "/tmp",  # noqa: S108 - the sandbox's own
    }


async def prepare(machine: Machine, *, as_root: bool, backend: str) -> PreparedMachine:
    """Makes the user and the directories.

    Raises FailedPrecondition (CAPABILITY_MISSING) for an image that cannot run a guest agent, Unavailable for other
    failures.
    """
    prepared = await machine.run(["/bin/sh", "-c", _PREPARE])
    if 0 <= prepared.code - _LACKS < len(_WHAT_IT_LACKS):
        raise FailedPrecondition(
            f"the image lacks {_WHAT_IT_LACKS[prepared.code - _LACKS]}",
            reason="CAPABILITY_MISSING",
            metadata={"backend": backend, "capabilities": "image"},
        )
    if prepared.code != 0:
        raise Unavailable(
            f"the sandbox could not be prepared (exit {prepared.code}): {prepared.stderr[-300:].strip()}",
            reason="CREATE_FAILED",
            retry_after_s=1.0,
        )
    uid, gid, python = prepared.stdout.split()
    return PreparedMachine(python, int(uid), int(gid), as_root)


async def start_guest(machine: Machine, place: PreparedMachine, program: bytes) -> None:
    """Starts the guest agent in a prepared machine. Raises Unavailable on failure."""
    await machine.upload(PROGRAM, program)
    serve = [*place.command, "serve", "--socket", SOCKET, "--home", place.home, "--workdir", WORKDIR]
    if not place.as_root:
        serve += ["--user", f"{place.uid}:{place.gid}", "--confine"]
    started = await machine.run(["/bin/sh", "-c", _START, "sh", *serve])
    if started.code != 0:
        raise Unavailable(f"the guest did not start (exit {started.code})", reason="CREATE_FAILED", retry_after_s=1.0)
