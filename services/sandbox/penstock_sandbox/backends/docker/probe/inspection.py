"""Checks a trial sandbox before the backend claims anything (R55).

Invariants: the trial is checked from inside, over the same access as every sandbox; the image needs nothing but a
shell's builtins; each failed check is reported in words, and then the backend claims nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock_chassis.errors import PenstockError
from penstock_sandbox.backends.host.trial import RIGHTS
from penstock_sandbox.domain.backend import SandboxHandle, StartFailed
from penstock_sandbox.domain.model import Stream
from penstock_sandbox.processes.output import Collected

_DEADLINE_S = 30.0

# Each line printed is a violated claim. Shell builtins only: an image may have few other commands.
_LOOK = (
    f"cd /{RIGHTS}"
    + r"""[ "$(status Seccomp)" = 2 ] || echo "system calls are not filtered"
[ -n "$AS_ROOT" ] || case "$(status Uid)" in 0*|*[!0-9]0*|unknown) echo "it runs as root";; esac
set -- /proc/[0-9]*
[ $# -lt 12 ] || echo "processes of the host are visible"
set --
interfaces=0
while read -r line; do case "$line" in *:*) interfaces=$((interfaces + 1));; esac; done < /proc/net/dev
[ $interfaces -le 1 ] || echo "network interfaces beside loopback"
for path in "$PWD_GIVEN" "$HOME" /tmp; do
  (: > "$path/trial") 2>/dev/null || echo "$path cannot be written"
done
[ -n "$AS_ROOT" ] || set -- /usr/trial /etc/passwd /opt/penstock/trial
for path in "$@" /proc/sys/kernel/core_pattern /proc/sysrq-trigger; do
  (: >> "$path") 2>/dev/null && echo "$path can be written"
done
for process in /proc/[0-9]*; do
  number=${process#/proc/}
  [ "$number" = $$ ] && continue
  (kill -0 $number) 2>/dev/null && echo "process $number can be signalled"
  (: < $process/mem) 2>/dev/null && echo "process $number can be read"
  [ -n "$OWN_KERNEL" ] || ! (: < $process/environ) 2>/dev/null || echo "process $number's environment can be read"
done
echo looked
read -r line
exit 0
"""
)

# Checks that a shell cannot do, and values that kernels of their own do not show in /proc. Prints JSON.
_LOOK_CLOSER = r"""
import ctypes, json, os, socket, stat, sys
problems = []
if ctypes.CDLL(None).prctl(39, 0, 0, 0, 0) != 1:
    problems.append("privileges can be gained")
if 0 in os.getresuid() + os.getresgid():
    problems.append("it runs as root")
for process in filter(str.isdigit, os.listdir("/proc")):
    try:
        if os.stat("/proc/" + process).st_uid == os.getuid():
            continue
        held = os.listdir("/proc/%s/fd" % process)
    except OSError:
        continue
    for name in held:
        path = "/proc/%s/fd/%s" % (process, name)
        for flags in (os.O_RDONLY, os.O_WRONLY):
            try:
                opened = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
            except OSError:
                continue
            if not stat.S_ISCHR(os.fstat(opened).st_mode):
                problems.append("what process %s holds can be opened: %s" % (process, os.readlink(path)))
            os.close(opened)
        try:
            socket.socket(socket.AF_UNIX).connect(path)
        except OSError:
            continue
        problems.append("process %s can be spoken to" % process)
limit, made, gate = int(sys.argv[1]), [], os.pipe()
try:
    while limit and len(made) <= limit:
        made.append(os.fork())
        if made[-1] == 0:
            os.close(gate[1])
            os.read(gate[0], 1)
            os._exit(0)
    if limit:
        problems.append("more processes run than its limit allows")
except BlockingIOError:
    pass
os.close(gate[1])
for child in made:
    os.waitpid(child, 0)
print(json.dumps({"problems": problems, "kernel": os.uname().release}))
"""


async def look(
    handle: SandboxHandle, shell: str, *, as_root: bool = False, own_kernel: bool = False
) -> tuple[str, int | None]:
    """Returns the isolation failures of a sandbox that should be closed (empty: none), and its number of processes.

    A root sandbox, ``as_root``, may write where the image's files are root's, and has no other extra rights. For one
    with a kernel of its own, ``look_closer`` checks the rest.
    """
    given = {"PWD_GIVEN": handle.workdir, "AS_ROOT": "yes" * as_root, "OWN_KERNEL": "yes" * own_kernel}
    sink = _Probe()
    try:
        process = await handle.start(
            [shell, "-c", _LOOK], {**handle.default_env, **given}, handle.workdir, sink, stdin=True, pty=None
        )
    except StartFailed as error:
        return f"{shell} cannot be run in the image: {error}", None
    async with asyncio.timeout(_DEADLINE_S):
        await sink.closed_output.wait()
        running = (await handle.stats()).pids
        await process.close_stdin()
        ended = await sink.ended
    await process.aclose()
    if ended is None or not sink.text.endswith(b"looked\n"):
        return f"the trial process did not finish: {sink.shown}", None
    return sink.text.decode(errors="replace").removesuffix("looked\n").strip().replace("\n", "; "), running


@dataclass(frozen=True, slots=True)
class Closer:
    """Result of ``look_closer``: failed checks (empty: none), and the release of the kernel inside."""

    problem: str
    kernel: str = ""


async def look_closer(handle: SandboxHandle, python: Sequence[str], most_processes: int | None) -> Closer:
    """Runs the Python checks as the workload; ``python`` is the argv that starts a program."""
    sink = _Probe()
    try:
        argv = [*python, "-c", _LOOK_CLOSER, str(most_processes or 0)]
        process = await handle.start(argv, handle.default_env, handle.workdir, sink, stdin=False, pty=None)
    except StartFailed as error:
        return Closer(f"its Python cannot be run: {error}")
    async with asyncio.timeout(_DEADLINE_S):
        await sink.ended
        await sink.closed_output.wait()
    await process.aclose()
    try:
        report = json.loads(sink.text)
    except ValueError:
        return Closer(f"the trial process did not finish: {sink.shown}")
    return Closer("; ".join(report["problems"]), str(report["kernel"]))


class _Probe(Collected):
    """Waits until the trial process has finished its checks, or its output ends."""

    @property
    def shown(self) -> str:
        """Returns the end of its output."""
        return self.text[-500:].decode(errors="replace")

    def output(self, stream: Stream, data: bytes) -> None:
        super().output(stream, data)
        if b"looked\n" in self.text:
            self.closed_output.set()


def write_nonce(folder: Path, nonce: str) -> None:
    """Writes a secret into a directory, which only a container with the same files can read."""
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    file = folder / "nonce"
    file.write_text(nonce)
    file.chmod(0o644)


async def reads(handle: SandboxHandle, path: str, expected: str) -> bool:
    """Whether a file in a sandbox has the content written outside."""
    try:
        async with handle.open_read(path, follow_symlink=False) as (_, reader):
            return await reader.read(0, 256) == expected.encode()
    except PenstockError:
        return False
