"""A sandbox's container as the daemon is asked for it: everything that isolates it, in one place.

Invariants
- No capability, no new privileges, no log, no network but what the policy says, no swap beyond the memory limit, no
  core dumps. The first process has a user of its own, which no spec may name, and neither it nor the agent is root.
- Nothing of the caller's is passed through: no mount of the host's but toolboxes, no option, no environment. What
  processes get in their environment never passes the daemon, so ``docker inspect`` shows no secret (R1, R47).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock_sandbox.backends.docker import hold
from penstock_sandbox.backends.docker.additions import USER
from penstock_sandbox.backends.docker.daemon import Json
from penstock_sandbox.backends.docker.places import WORKDIR
from penstock_sandbox.backends.docker.prepared import ReadyImage
from penstock_sandbox.model import NetworkKind, Resources

# What a sidecar needs beyond nothing: to enter the sandbox's namespaces, and to become its user there.
_SIDECAR_CAPABILITIES = (
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "KILL",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_ADMIN",
    "SYS_CHROOT",
    "SYS_PTRACE",
)

# What an attendant needs that lives in the sandbox: to become its user, and to end what is his.
_INHABITANT_CAPABILITIES = ("KILL", "SETGID", "SETPCAP", "SETUID")


def sandbox(
    image: ReadyImage,
    labels: Mapping[str, str],
    resources: Resources,
    network: NetworkKind,
    *,
    mounts: Sequence[Mapping[str, Any]],
    tmp_bytes: int,
    read_only: bool,
    runtime: str,
) -> tuple[Json, Json]:
    """The container of a sandbox: its own settings, and those of its host part."""
    settings: Json = {
        "image": image.name,
        # A name alone takes it out of what the image declares.
        "environment": [name for name in image.env if unwanted(name)],
        "entrypoint": [hold.PATH],
        "command": [],
        "user": f"{hold.USER_ID}:{hold.USER_ID}",
        "hostname": "sandbox",
        "working_dir": "/",
        "labels": dict(labels),
        "healthcheck": {"test": ["NONE"]},
        "stop_signal": "SIGKILL",
    }
    tmpfs = {
        # 1777 as everywhere; programs are built and run there.
        "/tmp": f"rw,exec,nosuid,nodev,mode=1777,size={tmp_bytes}",  # noqa: S108 - a path in the sandbox
        # In the place of the host's: it tells of hardware, of other containers' devices and of the kernel's tuning.
        "/sys": "ro,noexec,nosuid,nodev,mode=555,size=4096",
    }
    if read_only:
        # Another user's home is where the image has it, which may be anywhere.
        account = image.account
        for folder in (WORKDIR, *([account.home] if account.name == USER else [])):
            tmpfs[folder] = (
                f"rw,exec,nosuid,nodev,mode=755,uid={account.uid},gid={account.gid},size="
                f"{min(resources.disk_bytes or tmp_bytes, tmp_bytes)}"
            )
    host: Json = {
        **_hardening(),
        **_limits(resources),
        "network_mode": "bridge" if network is NetworkKind.OPEN else "none",
        "ipc_mode": "private",
        "shm_size": tmp_bytes,
        "tmpfs": tmpfs,
        "read_only": read_only,
        "mounts": [dict(mount) for mount in mounts],
    }
    if network is not NetworkKind.OPEN:
        # Else the daemon copies the host's resolver into the container.
        host["dns"] = ["127.0.0.1"]
        host["dns_search"] = ["."]
    if not read_only and resources.disk_bytes is not None:
        host["storage_opt"] = {"size": str(resources.disk_bytes)}
    if runtime:
        host["runtime"] = runtime
    return settings, host


def unwanted(name: str) -> bool:
    """Whether nothing gets a variable of an image's: names that are Penstock's, libraries put into every program."""
    return name.startswith("PENSTOCK_") or name in ("LD_PRELOAD", "LD_AUDIT")


def inhabit(settings: Json, host: Json, argv: Sequence[str], mount: Mapping[str, Any]) -> None:
    """Change a sandbox's container to one whose first process starts what serves it, as root of the sandbox's kernel.

    It has what that process needs and gives up; what it starts for others has none of it.
    """
    settings.update(entrypoint=list(argv), user="0:0", stdin_open=True, detach=True)
    host["cap_add"] = list(_INHABITANT_CAPABILITIES)
    host["mounts"] = [*host["mounts"], dict(mount)]


def sidecar(
    image: str, labels: Mapping[str, str], sandbox_container: str, argv: Sequence[str], resources: Resources
) -> tuple[Json, Json]:
    """The container beside a sandbox that serves it. What it starts counts towards its own limits, which are the same.

    It shares the process and network namespaces of the sandbox and enters the others, for which it has capabilities;
    what it starts in the sandbox has none of them.
    """
    settings: Json = {
        "image": image,
        "entrypoint": list(argv),
        "command": [],
        "user": "0:0",
        # Kept open when nobody is attached: its first process is the first end of the link.
        "stdin_open": True,
        "detach": True,
        "working_dir": "/",
        "labels": dict(labels),
        "healthcheck": {"test": ["NONE"]},
        "stop_signal": "SIGKILL",
    }
    host: Json = {
        **_hardening(),
        **_limits(resources),
        "cap_add": list(_SIDECAR_CAPABILITIES),
        "pid_mode": f"container:{sandbox_container}",
        "network_mode": f"container:{sandbox_container}",
        "ipc_mode": "private",
        "tmpfs": {"/run": "rw,noexec,nosuid,nodev,mode=700,size=16777216"},
        "read_only": True,
    }
    return settings, host


def _hardening() -> Json:
    return {
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "log_driver": "none",
        "restart_policy": {"Name": "no"},
        # How many files may be open is the attendant's business: what it starts has its limits.
        "ulimits": [{"name": "core", "soft": 0, "hard": 0}],
    }


def _limits(resources: Resources) -> Json:
    limits: Json = {}
    if resources.memory_bytes is not None:
        # Without swap the limit is the limit.
        limits["mem_limit"] = limits["memswap_limit"] = resources.memory_bytes
    if resources.pids is not None:
        limits["pids_limit"] = resources.pids
    if resources.cpu is not None:
        limits["nano_cpus"] = round(resources.cpu * 1e9)
    return limits
