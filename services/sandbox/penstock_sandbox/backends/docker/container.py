"""The settings of a sandbox's container: everything that isolates it, in one place.

Invariants
- No capability, no new privileges, no log, no network beyond the policy, no swap beyond the memory limit, no core
  dumps. The first process has a user of its own, which no spec may name, and neither it nor the agent is root.
- Nothing of the caller's is passed through: no mount of the host but toolboxes, no option, no environment. The
  environment of processes never passes through the daemon, so ``docker inspect`` shows no secret (R1, R47).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock_sandbox.backends.docker.engine.errors import Json
from penstock_sandbox.backends.docker.images import account_files
from penstock_sandbox.backends.docker.images.account_files import Ids
from penstock_sandbox.backends.docker.images.prepared_images import ReadyImage
from penstock_sandbox.backends.docker.names_files import NOBODY
from penstock_sandbox.backends.images import pause_program
from penstock_sandbox.backends.images.additions import USER, WORKDIR, unwanted
from penstock_sandbox.domain.model import Companion, NetworkKind, Resources

HOSTNAME = "sandbox"

# What a sidecar needs: to enter the sandbox's namespaces, and to become its user there.
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

# What a guest agent in the sandbox needs: to become its user, and to end that user's processes.
_INHABITANT_CAPABILITIES = ("KILL", "SETGID", "SETPCAP", "SETUID")

# What entry points of images need that begin as root: to prepare their directories, and to become and end another user.
_COMPANION_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID")

# The daemon's own, which a list replaces, and the files that it mounts in a container: one hosts file in all containers
# of a network namespace.
_NAMES_READ_ONLY = (
    *("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"),
    *("/etc/hosts", "/etc/hostname", "/etc/resolv.conf"),
)


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
    own_names: Sequence[str] = (),
    joins: str = "",
) -> tuple[Json, Json]:
    """Returns a sandbox's container settings and their host part. ``own_names`` lead to its own 127.0.0.1.

    ``joins`` is the id of a container whose network it shares, with the names that lead there.
    """
    settings: Json = {
        "image": image.name,
        # A bare name removes the image's variable.
        "environment": [name for name in image.env if unwanted(name)],
        "entrypoint": [pause_program.PATH],
        "command": [],
        "user": f"{pause_program.USER_ID}:{pause_program.USER_ID}",
        "hostname": HOSTNAME,
        "working_dir": "/",
        "labels": dict(labels),
        **_unchecked(image.checks_health),
        "stop_signal": "SIGKILL",
    }
    tmpfs = {
        # Mode 1777 as usual; programs are built and run there.
        "/tmp": f"rw,exec,nosuid,nodev,mode=1777,size={tmp_bytes}",  # noqa: S108 - a path in the sandbox
        # Hides the host's, which reveals hardware, other containers' devices and kernel settings.
        "/sys": "ro,noexec,nosuid,nodev,mode=555,size=4096",
    }
    if read_only:
        # Another user's home is the image's, at any path.
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
    if joins:
        # The daemon gives it the other's names, and refuses any of its own.
        del settings["hostname"]
        host["network_mode"] = f"container:{joins}"
    elif network is not NetworkKind.OPEN:
        # Otherwise the daemon copies the host's resolver into the container.
        # Nobody has an address of documentation; at 127.0.0.1 a companion could answer.
        host["dns"] = [NOBODY if own_names else "127.0.0.1"]
        host["dns_search"] = ["."]
    if own_names:
        host["extra_hosts"] = dict.fromkeys(own_names, "127.0.0.1")
    if own_names or joins:
        host["readonly_paths"] = list(_NAMES_READ_ONLY)
    if not read_only and resources.disk_bytes is not None:
        host["storage_opt"] = {"size": str(resources.disk_bytes)}
    if runtime:
        host["runtime"] = runtime
    return settings, host


def inhabit(settings: Json, host: Json, argv: Sequence[str], mount: Mapping[str, Any]) -> None:
    """Changes a sandbox's container so that its first process starts the guest agent, as root of the sandbox's kernel.

    That process has the capabilities that it needs and later drops; the workload's processes get none of them.
    """
    settings.update(entrypoint=list(argv), user="0:0", stdin_open=True, detach=True)
    host["cap_add"] = list(_INHABITANT_CAPABILITIES)
    host["mounts"] = [*host["mounts"], dict(mount)]


def sidecar(
    image: str, labels: Mapping[str, str], sandbox_container: str, argv: Sequence[str], resources: Resources
) -> tuple[Json, Json]:
    """Returns the sidecar that serves a sandbox. Its processes count towards its own limits, which are the same.

    It shares the process and network namespaces of the sandbox and enters the others, for which it has capabilities;
    the processes that it starts in the sandbox have none of them.
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


def companion(
    image: str,
    spec: Companion,
    labels: Mapping[str, str],
    sandbox_container: str,
    ids: Ids,
    *,
    seccomp_profile: str,
    mounts: Sequence[Json] = (),
    declares_check: bool,
    shm_bytes: int,
    runtime: str,
) -> tuple[Json, Json]:
    """Returns a companion of a sandbox: the image's own program, in the network of the sandbox and no other of its
    namespaces. Its environment passes through the daemon, which is given numbers for its user and groups.
    """
    settings: Json = {
        "image": image,
        "environment": dict(spec.env),
        # Given an empty one, the daemon takes the image's; with another entry point, the image's command is not used.
        "entrypoint": list(spec.entrypoint) or None,
        "command": list(spec.command) or None,
        # A mount, which cannot be moved away: with a pipe in place of its accounts, a health check would never begin,
        # and nothing could remove the container.
        "volumes": [account_files.FOLDER],
        "user": f"{ids.uid}:{ids.gid}",
        "working_dir": spec.workdir or None,
        "labels": dict(labels),
        **_unchecked(declares_check),
        "stop_signal": "SIGKILL",
    }
    host: Json = {
        **_hardening(),
        **_limits(spec.resources),
        "network_mode": f"container:{sandbox_container}",
        "ipc_mode": "private",
        "shm_size": shm_bytes,
        "mounts": [dict(mount) for mount in mounts],
        "readonly_paths": [*_NAMES_READ_ONLY, *account_files.PATHS],
        # Of the last lines, which a failed creation shows.
        "log_driver": "json-file",
        "log_options": {"max-size": "64k", "max-file": "1"},
    }
    host["security_opt"] = [*host["security_opt"], f"seccomp={seccomp_profile}"]
    if ids.groups:
        host["group_add"] = list(map(str, ids.groups))
    if ids.uid == 0:
        host["cap_add"] = list(_COMPANION_CAPABILITIES)
    if spec.resources.disk_bytes is not None:
        host["storage_opt"] = {"size": str(spec.resources.disk_bytes)}
    if runtime:
        host["runtime"] = runtime
    return settings, host


def _unchecked(declared: bool) -> Json:
    """Switches off an image's own health check. Where there is none, Podman would start a timer for this."""
    return {"healthcheck": {"test": ["NONE"]}} if declared else {}


def _hardening() -> Json:
    return {
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "log_driver": "none",
        "restart_policy": {"Name": "no"},
        # The guest agent sets the open files limit of the processes that it starts.
        "ulimits": [{"name": "core", "soft": 0, "hard": 0}],
    }


def _limits(resources: Resources) -> Json:
    limits: Json = {}
    if resources.memory_bytes is not None:
        # No swap, so that the memory limit is not exceeded by swapping.
        limits["mem_limit"] = limits["memswap_limit"] = resources.memory_bytes
    if resources.pids is not None:
        limits["pids_limit"] = resources.pids
    if resources.cpu is not None:
        limits["nano_cpus"] = round(resources.cpu * 1e9)
    return limits
