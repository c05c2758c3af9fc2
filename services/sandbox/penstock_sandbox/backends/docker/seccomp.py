"""The system calls of companions, as a daemon's profile: what programs of a sandbox are refused is refused to them.

Purpose: no guest agent sets a filter in the programs of a companion (``guest.confinement``), and the daemon's own
profile leaves what is the whole machine's: vsock, io_uring, and the events of ``io_setup``.

Invariants
- All that ``guest.confinement`` refuses is refused here with the same error, by its own tables; and further calls that
  containers without capabilities have no use for, most of which the kernel refuses them anyway.
- Calls by another architecture's convention end the process.
"""

from __future__ import annotations

import asyncio
import errno
import json
from pathlib import Path
from typing import Any, Final

from penstock_sandbox.backends.docker.engine.daemon import Daemon
from penstock_sandbox.guest import confinement
from penstock_sandbox.guest.common import filters

_FURTHER: Final = (
    "get_mempolicy", "ioperm", "iopl", "lookup_dcookie", "mbind", "migrate_pages", "move_pages", "nfsservctl",
    "pidfd_getfd", "process_madvise", "quotactl_fd", "set_mempolicy", "set_mempolicy_home_node", "setdomainname",
    "sethostname", "sysfs", "uselib", "ustat", "vhangup",
)  # fmt: skip
_FILE = "companions-seccomp.json"


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
    namespaces = [1 << bit for bit in range(32) if confinement.NEW_NAMESPACES >> bit & 1]
    rules = [
        _refusal((*filters.REFUSED, *confinement.REFUSED, *_FURTHER), errno.EPERM),
        _refusal((*filters.ABSENT, *confinement.ABSENT), errno.ENOSYS),
        *(_refusal(("clone",), errno.EPERM, _argument("MASKED_EQ", flag, flag)) for flag in namespaces),
    ]
    # A rule cannot say "none of these": so each other family, and all that are higher.
    others = [family for family in range(max(filters.FAMILIES)) if family not in filters.FAMILIES]
    refused = [*(_argument("EQ", family) for family in others), _argument("GT", max(filters.FAMILIES))]
    rules += [_refusal(("socket", "socketpair"), errno.EAFNOSUPPORT, argument) for argument in refused]
    architectures = [{"architecture": f"SCMP_ARCH_{name}", "subArchitectures": []} for name in ("X86_64", "AARCH64")]
    return json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "archMap": architectures, "syscalls": rules})


def _refusal(names: tuple[str, ...], error: int, argument: dict[str, Any] | None = None) -> dict[str, Any]:
    rule = {"names": list(names), "action": "SCMP_ACT_ERRNO", "errnoRet": error}
    return rule if argument is None else {**rule, "args": [argument]}


def _argument(comparison: str, value: int, value_two: int = 0) -> dict[str, Any]:
    return {"index": 0, "value": value, "valueTwo": value_two, "op": f"SCMP_CMP_{comparison}"}
