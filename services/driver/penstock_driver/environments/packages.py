"""Packages of tasks: their locks become toolboxes of the sandbox service, each installed once.

A toolbox depends on the Python of the task's sandboxes, which only they know: a short-lived one is asked, once for each
base. Invariants: only what a lock names, and whose condition holds there, is installed; nothing of a task reaches the
installer but names, versions and hashes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from packaging.markers import Marker, UndefinedComparison, UndefinedEnvironmentName

from penstock.values.locks import python_lock
from penstock_chassis.aio.single_flight import SingleFlight
from penstock_chassis.errors import FailedPrecondition, PenstockError
from penstock_driver.agents.specs import PythonTarget, Runtime, RuntimeKind, TaskToolbox
from penstock_driver.domain.ports import Command, Packages, PreparedToolbox, Sandboxes, SandboxTerms

TOOLBOX: Final = "task-packages"
"""Name of the toolbox, and so of its directory in sandboxes."""

_LEASE_S: Final = 60.0
_PROBE_S: Final = 30.0
_OUTPUT_BYTES: Final = 4096
_PROBE: Final = """
import json, os, platform, sys
implementation = sys.implementation.version
try:
    libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
except (AttributeError, OSError, ValueError):
    libc = ""
print(json.dumps({
    "libc": libc,
    "implementation_name": sys.implementation.name,
    "implementation_version": "%d.%d.%d" % implementation[:3],
    "os_name": os.name,
    "platform_machine": platform.machine(),
    "platform_python_implementation": platform.python_implementation(),
    "platform_release": platform.release(),
    "platform_system": platform.system(),
    "platform_version": platform.version(),
    "python_full_version": platform.python_version(),
    "python_version": "%d.%d" % sys.version_info[:2],
    "sys_platform": sys.platform,
}))
"""
_MUSL: Final = "1_2"
"""Version of musl, which Python cannot ask for: that of Alpine since 3.13."""


@dataclass(frozen=True, slots=True)
class _Base:
    """What sandboxes of one base have themselves. `python` are the values of markers; None = no usable python3."""

    python: Mapping[str, str] | None
    has_node: bool


_UNASKED: Final = _Base(None, has_node=False)


class TaskPackages:
    """The toolboxes of tasks' packages."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes
        self._bases: SingleFlight[SandboxTerms, _Base] = SingleFlight()
        self._toolboxes: SingleFlight[tuple[str, bytes, SandboxTerms], PreparedToolbox] = SingleFlight(keep=256)

    async def get(
        self,
        packages: Packages,
        terms: SandboxTerms,
        namespace: str,
        on_line: Callable[[str], None],
        *,
        again: bool = False,
    ) -> tuple[str, ...]:
        """Return the ids of the toolboxes of `packages`, installed: none for no packages.

        `on_line` receives the lines of an installation that this call starts. `again` discards the earlier result.

        FailedPrecondition (CAPABILITY_MISSING) where the base lacks the language; the sandbox service's errors.
        """
        if not packages:
            return ()
        # By their digest: locks have megabytes, and the keys are kept.
        key = (namespace, await asyncio.to_thread(_digest, packages), terms)
        if again:
            self._toolboxes.forget(key)
        return ((await self._toolboxes.get(key, lambda: self._install(packages, terms, on_line))).toolbox_id,)

    async def _install(
        self, packages: Packages, terms: SandboxTerms, on_line: Callable[[str], None]
    ) -> PreparedToolbox:
        asks = bool(packages.python or packages.npm)
        base = await self._bases.get(terms, lambda: self._ask(terms)) if asks else _UNASKED
        try:
            wanted = await asyncio.to_thread(toolbox, packages, base)
            return await self._sandboxes.prepare_toolbox(TOOLBOX, wanted, terms.backend, on_line)
        except PenstockError as error:
            raise type(error)(
                f"sandbox.packages: {error.message}",
                reason=error.reason,
                metadata=error.metadata,
                retry_after_s=error.retry_after_s,
            ) from error

    async def _ask(self, terms: SandboxTerms) -> _Base:
        sandbox = await self._sandboxes.create(terms, _LEASE_S, {})
        try:
            python = await self._output(sandbox.sandbox_id, ("python3", "-I", "-c", _PROBE))
            node = await self._output(sandbox.sandbox_id, ("node", "--version"))
        finally:
            await self._sandboxes.delete(sandbox.sandbox_id)
        return _Base(_markers(python), node is not None)

    async def _output(self, sandbox_id: str, argv: tuple[str, ...]) -> bytes | None:
        """The output of a program; None if it is not there, or failed."""
        command = Command(argv=argv, timeout_s=_PROBE_S)
        result = await self._sandboxes.run(sandbox_id, f"probe-{argv[0]}", command, _OUTPUT_BYTES)
        return result.stdout if result.exit.ok else None


def _digest(packages: Packages) -> bytes:
    return hashlib.sha256(repr((packages.python, packages.npm, packages.debian)).encode()).digest()


def toolbox(packages: Packages, base: _Base) -> TaskToolbox:
    """What is installed of `packages` for sandboxes of `base`. FailedPrecondition (CAPABILITY_MISSING)."""
    lines: list[str] = []
    target = None
    if packages.python:
        if base.python is None:
            raise _refused("python: needs CPython 3.8 or newer on Linux as python3, which the sandbox's image lacks")
        lines = _requirements(packages.python, base.python)
        target = PythonTarget(version=base.python["python_version"], platform=_platform(base.python))
    needs_node = bool(packages.npm) and not base.has_node
    return TaskToolbox(
        runtimes=[Runtime(kind=RuntimeKind.NODE)] if needs_node else [],
        python_packages=lines,
        python_target=target if lines else None,
        npm_lock=packages.npm,
        debian_lock=packages.debian,
    )


def _requirements(lock: str, markers: Mapping[str, str]) -> list[str]:
    chosen = []
    for package in python_lock(lock):
        try:
            if package.marker and not Marker(package.marker).evaluate({**markers, "extra": ""}):
                continue
        except (UndefinedComparison, UndefinedEnvironmentName) as error:
            raise _refused(f"python: the condition of {package.name} cannot be decided: {error}") from None
        chosen.append(package)
    counted = Counter(re.sub(r"[-_.]+", "-", package.name).lower() for package in chosen)
    twice = [name for name, count in counted.items() if count > 1]
    if twice:
        raise _refused(f"python: {twice[0]} is named more than once for Python {markers['python_version']}")
    return [package.line for package in chosen]


def _refused(message: str) -> FailedPrecondition:
    return FailedPrecondition(f"sandbox.packages.{message}", reason="CAPABILITY_MISSING")


def _markers(output: bytes | None) -> Mapping[str, str] | None:
    """The values of markers that a sandbox's Python printed. An image is a stranger's, so they are checked."""
    try:
        found = json.loads(output or b"null")
    except ValueError:
        return None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        return None
    usable = (
        found.get("implementation_name") == "cpython"
        and found.get("sys_platform") == "linux"
        and re.fullmatch(r"3\.([89]|[1-9][0-9])", found.get("python_version", ""))
        and re.fullmatch(r"[a-z0-9_]{1,32}", found.get("platform_machine", ""))
    )
    return found if usable else None


def _platform(markers: Mapping[str, str]) -> str:
    """The newest platform of wheels, by the version of the C library (PEP 600, PEP 656)."""
    glibc = re.fullmatch(r"glibc ([0-9]{1,3})\.([0-9]{1,3})(\..*)?", markers.get("libc", ""))
    kind = f"manylinux_{glibc[1]}_{glibc[2]}" if glibc else f"musllinux_{_MUSL}"
    return f"{kind}_{markers['platform_machine']}"
