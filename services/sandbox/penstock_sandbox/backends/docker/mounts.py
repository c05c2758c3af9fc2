"""This machine's directories as mounts: bound if the daemon has the same files, else copied once.

Purpose: a daemon on another machine, or beside this service in a container of its own, does not see this service's
files. The backend tests that by a bind that only the same file system can satisfy.

Invariants: read-only in every sandbox; a copy is filled once, for all callers, and lives as long as this run.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from penstock_chassis.aio.single_flight import SingleFlight
from penstock_sandbox.backends.docker.cleanup.reaper import Owner, Reaper
from penstock_sandbox.backends.docker.engine.daemon import Daemon
from penstock_sandbox.backends.docker.engine.errors import Json
from penstock_sandbox.backends.host.layers import Collector
from penstock_sandbox.domain.backend import MountedToolbox

_FILL = "/fill"

Archives = Callable[[], Iterator[Iterator[bytes]]]
"""Yields tars in chunks; each is read to its end before the next."""


class Mounts:
    """The mounts of one daemon's containers. The probe sets ``same_files`` once."""

    def __init__(self, daemon: Daemon, owner: Owner, reaper: Reaper) -> None:
        self._daemon = daemon
        self._owner = owner
        self._reaper = reaper
        self._fills: SingleFlight[str, None] = SingleFlight(finish=True)
        self._volumes: set[str] = set()
        """Those that exist, or may."""
        self.same_files = False

    async def aclose(self) -> None:
        """Removes the copies; no container may use them any more."""
        await self._fills.aclose()
        for name in self._volumes:
            await self._reaper.volume(name)

    async def of(self, toolboxes: Sequence[MountedToolbox], image: str) -> list[Json]:
        """Returns the mounts of toolboxes and their runtimes; ``image`` is any image that the daemon has."""
        wanted: dict[str, Path] = {}
        for toolbox in toolboxes:
            wanted[toolbox.mount_path] = toolbox.source
            wanted.update(toolbox.runtimes)
        return [await self._mount(source, target, image) for target, source in sorted(wanted.items())]

    async def _mount(self, source: Path, target: str, image: str) -> Json:
        if self.same_files:
            return bind(source, target)
        key = hashlib.sha256(str(source).encode()).hexdigest()[:16]
        return await self.made(key, target, image, lambda: iter([_packed(source)]))

    async def made(self, key: str, target: str, image: str, archives: Archives) -> Json:
        """Returns the mount of a copy filled with ``archives`` (tars, one after another), once per ``key``."""
        name = f"penstock-{self._owner.run}-{key}"
        await self._fills.get(name, lambda: self._fill(name, archives, image))
        return {"type": "volume", "source": name, "target": target, "read_only": True, "no_copy": True}

    async def _fill(self, name: str, archives: Archives, image: str) -> None:
        self._volumes.add(name)
        await self._daemon.create_volume(name, self._owner.labels("toolbox"))
        settings: Json = {"image": image, "command": ["-"], "entrypoint": ["-"], "labels": self._owner.labels("making")}
        mount = {"type": "volume", "source": name, "target": _FILL, "no_copy": True}
        container = await self._daemon.create("", settings, {"network_mode": "none", "mounts": [mount]})
        try:
            for archive in archives():
                await self._daemon.put(container, _FILL, archive)
        finally:
            await self._reaper.container(container)


def bind(source: Path, target: str) -> Json:
    """Returns a read-only mount of a directory that the daemon sees at the same path."""
    return {"type": "bind", "source": str(source), "target": target, "read_only": True, "propagation": "rprivate"}


def _packed(folder: Path) -> Iterator[bytes]:
    """Yields a directory as a tar, in chunks as it is read: never all of it in memory."""
    sink = Collector()
    with tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for parent, folders, files in os.walk(folder):
            for name in sorted((*folders, *files)):
                path = Path(parent, name)
                member = archive.gettarinfo(path, str(path.relative_to(folder)))
                member.uid = member.gid = 0
                member.uname = member.gname = ""
                if member.isreg():
                    with path.open("rb") as content:
                        archive.addfile(member, content)
                else:
                    archive.addfile(member)
                if sink.size:
                    yield sink.take()
    yield sink.take()
