"""The system calls of companions, as a daemon's profile: what programs of a sandbox are refused is refused to them.

Purpose: no guest agent sets a filter in the programs of a companion (``guest.confinement``), and the daemon's own
profile leaves what is the whole machine's: vsock, io_uring, and the events of ``io_setup``.

Invariants
- All that ``guest.confinement`` refuses is refused here with the same error, and further calls that containers without
  capabilities have no use for, most of which the kernel refuses them anyway.
- Calls by another architecture's convention end the process.
"""

from __future__ import annotations

import asyncio
import errno
import json
import socket
from pathlib import Path
from typing import Any, Final

from penstock_sandbox.backends.docker.engine.daemon import Daemon

REFUSED: Final = (
    "acct", "add_key", "bpf", "chroot", "clock_settime", "delete_module", "fanotify_init", "finit_module", "fsconfig",
    "fsmount", "fsopen", "fspick", "init_module", "kcmp", "kexec_file_load", "kexec_load", "keyctl", "mount",
    "mount_setattr", "move_mount", "open_by_handle_at", "open_tree", "perf_event_open", "pivot_root", "quotactl",
    "reboot", "request_key", "setns", "settimeofday", "swapoff", "swapon", "syslog", "umount2", "unshare",
    "userfaultfd",
)  # fmt: skip
"""As ``guest.confinement``."""
ABSENT: Final = ("clone3", "io_setup", "io_uring_enter", "io_uring_register", "io_uring_setup")
"""As ``guest.confinement``: programs can do without them."""
_FURTHER: Final = (
    "get_mempolicy", "ioperm", "iopl", "lookup_dcookie", "mbind", "migrate_pages", "move_pages", "nfsservctl",
    "pidfd_getfd", "process_madvise", "quotactl_fd", "set_mempolicy", "set_mempolicy_home_node", "setdomainname",
    "sethostname", "sysfs", "uselib", "ustat", "vhangup",
)  # fmt: skip
FAMILIES: Final = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
_FILE = "companions-seccomp.json"
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
_NEW_NAMESPACES: Final = tuple(1 << bit for bit in (17, 25, 26, 27, 28, 29, 30))


async def offered(daemon: Daemon, folder: Path) -> str:
    """Returns the profile as a daemon takes it: Docker its text, Podman the path of a file, made in ``folder``."""
    text = profile()
    if not await daemon.is_podman():
        return text
    path = folder.absolute() / _FILE
    await asyncio.to_thread(path.write_text, text)
    return str(path)


def profile() -> str:
    """Returns the profile in the daemon's format, JSON."""
    rules = [
        _refusal((*REFUSED, *_FURTHER), errno.EPERM),
        _refusal(ABSENT, errno.ENOSYS),
        *(_refusal(("clone",), errno.EPERM, _argument("MASKED_EQ", flag, flag)) for flag in _NEW_NAMESPACES),
    ]
    # A rule cannot say "none of these": so each other family, and all that are higher.
    others = [family for family in range(max(FAMILIES)) if family not in FAMILIES]
    refused = [*(_argument("EQ", family) for family in others), _argument("GT", max(FAMILIES))]
    rules += [_refusal(("socket", "socketpair"), errno.EAFNOSUPPORT, argument) for argument in refused]
    architectures = [{"architecture": f"SCMP_ARCH_{name}", "subArchitectures": []} for name in ("X86_64", "AARCH64")]
    return json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "archMap": architectures, "syscalls": rules})


def _refusal(names: tuple[str, ...], error: int, argument: dict[str, Any] | None = None) -> dict[str, Any]:
    rule = {"names": list(names), "action": "SCMP_ACT_ERRNO", "errnoRet": error}
    return rule if argument is None else {**rule, "args": [argument]}


def _argument(comparison: str, value: int, value_two: int = 0) -> dict[str, Any]:
    return {"index": 0, "value": value, "valueTwo": value_two, "op": f"SCMP_CMP_{comparison}"}
