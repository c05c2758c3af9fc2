"""A real Podman for tests, through its service for Docker's API: rootful, with data of its own, as `dockerd` has.

It ends with the session's other engines (`dockerd.stop`), and leaves nothing but empty control groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final

from tests.support.absent import absent
from tests.support.docker import dockerd
from tests.support.docker.base_images import which

_NEEDED: Final = ("podman", "conmon", "runc", "debootstrap", "busybox")
_ADVICE: Final = "apt-get install -y --no-install-recommends podman runc debootstrap busybox-static"
_CONFIGURATION: Final = """
[containers]
log_driver = "k8s-file"
base_hosts_file = "none"
host_containers_internal_ip = "none"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
runtime = "runc"
[engine.runtimes]
runc = ["{folder}/runc"]
[network]
network_config_dir = "{folder}/networks"
"""
# Podman asks for a million open files and processes for each program, which a root without CAP_SYS_RESOURCE, as on
# some machines of continuous integration, cannot give.
_RUNTIME: Final = r"""#!/bin/bash
lowered() { echo "s#(\"RLIMIT_$1\",\"hard\":)[0-9]+(,\"soft\":)[0-9]+#\1$2\2$2#"; }
for word in "$@"; do
  case $before in --bundle) file=$word/config.json ;; --process) file=$word ;; *) file= ;; esac
  [ "$file" ] && sed -i -E -e "$(lowered NOFILE "$(ulimit -Hn)")" -e "$(lowered NPROC "$(ulimit -Hu)")" "$file"
  before=$word
done
exec runc "$@"
"""


def engine() -> dockerd.Engine:
    """The session's Podman, started where it is not. Skips, or fails where CI is set, when this machine has none."""
    return dockerd.once("podman", _start)


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[Mapping[str, str]]:
    """The session's Podman beside a service, as its settings name it."""
    yield {"PENSTOCK_SANDBOX_DOCKER_HOST": (await asyncio.to_thread(engine)).host}


def _start() -> dockerd.Engine:
    missing = [name for name in _NEEDED if which(name) is None]
    problem = f"no {', '.join(missing)}: {_ADVICE}" if missing else ""
    if os.geteuid() != 0:
        problem = "a Podman of its own needs root"
    if problem:
        absent(f"THE DOCKER BACKEND IS NOT TESTED WITH PODMAN HERE: {problem}")
    folder = Path(tempfile.mkdtemp(prefix="pp-"))
    folder.chmod(0o755)
    (folder / "runc").write_text(_RUNTIME)
    (folder / "runc").chmod(0o755)
    configuration = folder / "containers.conf"
    configuration.write_text(_CONFIGURATION.format(folder=folder))
    places = ["--root", f"{folder}/data", "--runroot", f"{folder}/run", "--tmpdir", f"{folder}/tmp"]
    argv = [which("podman") or "podman", *places, "--storage-driver", "overlay", "system", "service", "--time", "0"]
    return dockerd.begin(folder, [*argv, f"unix://{folder}/docker.sock"], {"CONTAINERS_CONF": str(configuration)})
