"""Control groups: limits for all of a sandbox's processes together.

Purpose: finds out which limits this machine can enforce (v1, v2 or both at once, "hybrid") and whether it can freeze
processes, and makes one group per sandbox. Limits that cannot be enforced are not offered; none is silently dropped
(R55). v2 freezes better: it can kill a frozen process, while in v1 the process dies only when thawed.

Invariants: only groups under our own parent, named after this service's state directory, are touched; a group is
removed with its sandbox. An ordinary user gets a v2 group only where one was delegated to it.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock_chassis.validation import invalid_field
from penstock_sandbox.domain.model import Resources, Stats

_CPU_PERIOD_US = 100_000
_V2_CONTROLLERS = ("cpu", "memory", "pids")
FREEZER = "freezer"
_V2_FREEZE = "cgroup.freeze"
_V1_FREEZE = "freezer.state"


@dataclass(frozen=True, slots=True)
class _Hierarchy:
    """One mounted hierarchy in which groups can be made under ``parent``."""

    version: int
    controllers: frozenset[str]
    parent: Path


class Cgroups:
    """The hierarchies usable here. ``detect`` probes them; the constructor does not.

    ``own`` is the file that lists the members of this process's own group in one of them.
    """

    def __init__(self, hierarchies: tuple[_Hierarchy, ...], own: Path | None = None) -> None:
        self._hierarchies = hierarchies
        self._own = own
        self.controllers: frozenset[str] = frozenset().union(*(found.controllers for found in hierarchies))

    @classmethod
    def detect(cls, name: str) -> Cgroups:
        """Finds by trial where groups can be made; ``name`` is our parent group's."""
        own = _own_groups()
        hierarchies: list[_Hierarchy] = []
        members: Path | None = None
        # v2 first: a v2 freezer makes v1's unnecessary.
        for version, controllers, mount in sorted(_mounts(), key=lambda found: -found[0]):
            wanted = {*_V2_CONTROLLERS, FREEZER}
            if version == 1:
                wanted &= controllers
                wanted -= {FREEZER} if any(FREEZER in found.controllers for found in hierarchies) else set()
            if not wanted:
                continue
            # This process's group within this hierarchy, as the mount shows it.
            inside = own.get(frozenset(controllers) if version == 1 else frozenset(), "/")
            best: _Hierarchy | None = None
            for base in dict.fromkeys((mount / inside.lstrip("/"), mount)):
                usable = _usable(version, wanted, base, name)
                # Below a v2 group that holds processes, groups can only freeze; groups further up may offer more.
                if usable and (best is None or len(usable) > len(best.controllers)):
                    if best is not None:
                        best.parent.rmdir()
                    best = _Hierarchy(version, frozenset(usable), base / name)
                elif usable:
                    (base / name).rmdir()
            if best is not None:
                hierarchies.append(best)
                file = mount / inside.lstrip("/") / "cgroup.procs"
                members = members or (file if os.access(file, os.W_OK) else None)
        return cls(tuple(hierarchies), members)

    def hasten(self) -> None:
        """Pays the kernel's delay for the first move of a process, so that moves soon after are fast.

        A move takes a lock of all hierarchies that waits for an RCU grace period on every processor (10 ms and more),
        unless another move has just had it. Joining one's own group counts as a move and changes nothing. Does nothing
        where that is not allowed.
        """
        if self._own is not None:
            with suppress(OSError):
                self._own.write_text("0")

    def create(self, sandbox_id: str, limits: Resources) -> Group:
        """Makes a sandbox's group with its limits. Raises OSError, and then leaves nothing behind."""
        folders: dict[str, Path] = {}
        group = Group(folders, {found.parent / sandbox_id: found.version for found in self._hierarchies})
        try:
            for found in self._hierarchies:
                folder = found.parent / sandbox_id
                folder.mkdir()
                for controller in found.controllers:
                    folders[controller] = folder
                for file, value in _limits(found, limits):
                    (folder / file).write_text(value)
        except BaseException:
            group.remove()
            raise
        return group

    @property
    def parents(self) -> list[Path]:
        """Returns our parent group in each hierarchy; recorded so that a later instance can clean up."""
        return [found.parent for found in self._hierarchies]


def leftovers(parents: Iterable[Path], name: str) -> list[Group]:
    """Returns the groups that an earlier instance left below ``parents``; ignores parents not called ``name``."""
    ours = [parent for parent in parents if parent.name == name and parent.is_dir()]
    return [Group({}, {child: 1}) for parent in ours for child in parent.iterdir() if child.is_dir()]


def remove_parents(parents: Iterable[Path], name: str) -> None:
    """Removes our parent groups, which must be empty."""
    for parent in parents:
        if parent.name == name:
            try:
                parent.rmdir()
            except FileNotFoundError:
                continue


def group_name(state_dir: Path) -> str:
    """Returns the name of the parent group of the service with this ``state_dir``."""
    return "penstock-" + hashlib.sha256(str(state_dir).encode()).hexdigest()[:12]


_OOM_KILLS = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)


class Group:
    """One sandbox's group in every hierarchy."""

    def __init__(self, by_controller: Mapping[str, Path], folders: Mapping[Path, int]) -> None:
        self._by_controller = by_controller
        self._folders = folders
        self._memory_events: int | None = None

    @property
    def members_files(self) -> list[str]:
        """Files to which a process writes its id to join."""
        return [str(folder / "cgroup.procs") for folder in self._folders]

    def oom_kills(self) -> int:
        """Returns how often the kernel killed for memory in this group."""
        folder = self._by_controller.get("memory")
        if folder is None:
            return 0
        if self._memory_events is None:
            # Read for each process; kept open, because opening costs as much as all the rest.
            file = folder / ("memory.events" if self._folders[folder] == 2 else "memory.oom_control")
            self._memory_events = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        found = _OOM_KILLS.search(os.pread(self._memory_events, 4096, 0))
        return int(found[1]) if found is not None else 0

    def stats(self) -> Stats:
        """Returns the group's current and peak usage."""
        memory, pids, cpu = (self._by_controller.get(name) for name in ("memory", "pids", "cpu"))
        v2 = memory is not None and self._folders[memory] == 2
        return Stats(
            memory_bytes=_number(memory, "memory.current" if v2 else "memory.usage_in_bytes"),
            memory_peak_bytes=_number(memory, "memory.peak" if v2 else "memory.max_usage_in_bytes"),
            pids=_number(pids, "pids.current"),
            cpu_s=_cpu_seconds(cpu) if cpu is not None and self._folders[cpu] == 2 else None,
        )

    @property
    def can_freeze(self) -> bool:
        """Whether ``freeze`` works."""
        return FREEZER in self._by_controller

    def freeze(self) -> None:
        """Starts to freeze every process of the group; ``frozen`` reports completion."""
        folder = self._by_controller[FREEZER]
        if self._folders[folder] == 2:
            (folder / _V2_FREEZE).write_text("1")
        else:
            (folder / _V1_FREEZE).write_text("FROZEN")

    def frozen(self) -> bool:
        """Whether every process of the group is frozen."""
        folder = self._by_controller[FREEZER]
        if self._folders[folder] == 2:
            return "frozen 1" in (folder / "cgroup.events").read_text().splitlines()
        # Reading the state also makes v1 retry processes that it could not freeze at once.
        return (folder / _V1_FREEZE).read_text().strip() == "FROZEN"

    def thaw(self) -> None:
        """Thaws its processes, however they were frozen; harmless if they were not."""
        for folder in self._folders:
            for file, value in ((_V2_FREEZE, "0"), (_V1_FREEZE, "THAWED")):
                if (folder / file).exists():
                    (folder / file).write_text(value)

    def kill(self, spared: Collection[int] = ()) -> None:
        """Kills every process of a frozen group but the ``spared``; none of them runs or forks again."""
        for pid in self.members().difference(spared):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def kill_and_thaw(self) -> None:
        """Kills every process of a frozen group, and thaws it so that they die without running again."""
        self.kill()
        self.thaw()

    def remove(self) -> None:
        """Removes the group, which must have no processes. Raises OSError (EBUSY) otherwise."""
        if self._memory_events is not None:
            os.close(self._memory_events)
            self._memory_events = None
        for folder in self._folders:
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue

    def members(self) -> set[int]:
        found: set[int] = set()
        for folder in self._folders:
            try:
                found.update(int(line) for line in (folder / "cgroup.procs").read_text().split())
            except FileNotFoundError:
                continue
        return found


def refuse_beyond_machine(asked: Resources) -> None:
    """Raises InvalidArgument (FIELD_INVALID) for more memory than the machine has: that would not be a limit."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if asked.memory_bytes is not None and asked.memory_bytes > there:
        problem = f"{asked.memory_bytes} is more than this machine's {there}"
        raise invalid_field("spec.resources.memory_bytes", problem)


def _limits(found: _Hierarchy, limits: Resources) -> list[tuple[str, str]]:
    writes: list[tuple[str, str]] = []
    if "memory" in found.controllers and limits.memory_bytes is not None:
        value = str(limits.memory_bytes)
        if found.version == 2:
            # No swap, so that the memory limit is not exceeded by swapping.
            writes += [("memory.max", value), ("memory.swap.max", "0")]
        else:
            writes.append(("memory.limit_in_bytes", value))
            if (found.parent / "memory.memsw.limit_in_bytes").exists():
                writes.append(("memory.memsw.limit_in_bytes", value))
    if "pids" in found.controllers and limits.pids is not None:
        writes.append(("pids.max", str(limits.pids)))
    if "cpu" in found.controllers and limits.cpu is not None:
        quota = max(1000, round(limits.cpu * _CPU_PERIOD_US))
        if found.version == 2:
            writes.append(("cpu.max", f"{quota} {_CPU_PERIOD_US}"))
        else:
            writes += [("cpu.cfs_period_us", str(_CPU_PERIOD_US)), ("cpu.cfs_quota_us", str(quota))]
    return writes


def _usable(version: int, wanted: set[str], base: Path, name: str) -> set[str]:
    """Returns the controllers whose groups can be made and entered under ``base``; makes our parent group there."""
    parent = base / name
    trial = parent / "probe"
    offered: set[str] = set()
    try:
        if version == 2:
            offered = _enabled(base, wanted)
        parent.mkdir(exist_ok=True)
        if version == 2:
            _enable(parent, offered)
        trial.mkdir(exist_ok=True)
        try:
            files = {"cpu": ("cpu.max", "cpu.cfs_quota_us"), "memory": ("memory.max", "memory.limit_in_bytes")}
            files["pids"] = ("pids.max", "pids.max")
            files[FREEZER] = (_V2_FREEZE, _V1_FREEZE)
            able = {name for name in wanted if os.access(trial / files[name][0 if version == 2 else 1], os.W_OK)}
            usable = able if os.access(trial / "cgroup.procs", os.W_OK) else set()
        finally:
            trial.rmdir()
        if not usable:
            parent.rmdir()
    except OSError:
        # Read-only or not delegated.
        return set()
    return usable


def _enabled(base: Path, wanted: set[str]) -> set[str]:
    """Returns the v2 controllers of groups below ``base``; none if ``base`` has processes and cannot delegate."""
    offered = set((base / "cgroup.controllers").read_text().split()) & wanted
    try:
        _enable(base, offered)
    except OSError:
        return set()
    return offered


def _enable(folder: Path, controllers: set[str]) -> None:
    control = folder / "cgroup.subtree_control"
    missing = controllers - set(control.read_text().split()) if controllers else set()
    if missing:
        control.write_text(" ".join(f"+{name}" for name in sorted(missing)))


def _mounts() -> list[tuple[int, set[str], Path]]:
    """Returns mounted hierarchies: version, v1 controllers, mount point."""
    found: list[tuple[int, set[str], Path]] = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, options, *_ = line.split(" ")
        if kind == "cgroup":
            found.append((1, set(options.split(",")) & {"cpu", "cpuacct", "memory", "pids", FREEZER}, Path(point)))
        elif kind == "cgroup2":
            found.append((2, set(), Path(point)))
    return found


def _own_groups() -> dict[frozenset[str], str]:
    """Returns this process's group by set of v1 controllers; the empty set is v2."""
    groups: dict[frozenset[str], str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        groups[frozenset(filter(None, controllers.split(",")))] = path
    return groups


def _number(folder: Path | None, file: str) -> int | None:
    if folder is None:
        return None
    try:
        return int((folder / file).read_text())
    except (OSError, ValueError):
        return None


def _cpu_seconds(folder: Path) -> float | None:
    try:
        lines = (folder / "cpu.stat").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(" ")
        if key == "usage_usec":
            return int(value) / 1e6
    return None
