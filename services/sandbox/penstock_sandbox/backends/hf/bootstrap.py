"""What is done in a fresh job so that it is a sandbox: a user, directories, and the attendant as root beside it.

Invariants
- The workload's user may neither read nor signal the attendant: that runs as root in a directory that only root enters.
- An image that cannot hold an attendant is refused with what it lacks, before anything else is done in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock_chassis.errors import FailedPrecondition, Unavailable

if TYPE_CHECKING:
    from penstock_sandbox.backends.hf.client import Remote

HOME = "/home/agent"
WORKDIR = "/workspace"
USER = "agent"
ROOT_HOME = "/root"
OURS = "/opt/penstock"
FOLDER = f"{OURS}/attendant"
"""Where only root gets; beside it are toolboxes, which everybody may read."""
PROGRAM = f"{FOLDER}/attendant.py"
SOCKET = f"{FOLDER}/run/attendant.sock"

_USER_ID = 10_001
_LACKS = 90
"""Exit codes from here on say what the image lacks."""
_WHAT_IT_LACKS = (
    "python3 (3.8 or newer is needed for the attendant)",
    "a python3 that is 3.8 or newer",
    "root: the image runs as an ordinary user, from whom the attendant could not be kept",
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
class Place:
    """A prepared job: its interpreter, and who the workload runs as there."""

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
        """What `serve`, `attach` and `put` follow; without what the image's site-packages would run at every start."""
        return [self.python, "-I", "-S", PROGRAM]


def environment(place: Place, path: Sequence[str]) -> dict[str, str]:
    """What every process has; of the job's own environment, which holds what is not the workload's, it gets nothing."""
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


async def prepare(remote: Remote, *, as_root: bool) -> Place:
    """Make the user and the directories.

    Raises FailedPrecondition (CAPABILITY_MISSING) for an image that cannot hold an attendant, Unavailable for what
    failed.
    """
    prepared = await remote.run(["/bin/sh", "-c", _PREPARE])
    if 0 <= prepared.code - _LACKS < len(_WHAT_IT_LACKS):
        raise FailedPrecondition(
            f"the image lacks {_WHAT_IT_LACKS[prepared.code - _LACKS]}",
            reason="CAPABILITY_MISSING",
            metadata={"backend": "hf", "capabilities": "image"},
        )
    if prepared.code != 0:
        raise Unavailable(
            f"the sandbox could not be prepared (exit {prepared.code}): {prepared.stderr[-300:].strip()}",
            reason="CREATE_FAILED",
            retry_after_s=1.0,
        )
    uid, gid, python = prepared.stdout.split()
    return Place(python, int(uid), int(gid), as_root)


async def start_attendant(remote: Remote, place: Place, program: bytes) -> None:
    """Start the attendant in a prepared job. Raises Unavailable for what failed."""
    await remote.upload(PROGRAM, program)
    serve = [*place.command, "serve", "--socket", SOCKET, "--home", place.home, "--workdir", WORKDIR]
    if not place.as_root:
        serve += ["--user", f"{place.uid}:{place.gid}", "--confine"]
    started = await remote.run(["/bin/sh", "-c", _START, "sh", *serve])
    if started.code != 0:
        raise Unavailable(
            f"the attendant did not start (exit {started.code})", reason="CREATE_FAILED", retry_after_s=1.0
        )
