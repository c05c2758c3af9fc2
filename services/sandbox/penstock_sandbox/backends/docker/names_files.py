"""Files of names for a sandbox with companions, where the daemon gives none to the containers that join its network.

Purpose: Podman gives no hosts file of a container without a network to those that join it, takes no names for them, and
no list of read-only paths. So there the service makes these files, and all of them get read-only mounts of the same.

Invariants: a file is named after its content and never changes. There are at most ``MOST``, since callers choose names:
those used last stay. A mount keeps its file when that is removed; a container that comes later gets a new one.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from penstock_sandbox.backends.docker.engine.errors import Json
from penstock_sandbox.backends.docker.mounts import bind

_HOSTS: Final = "/etc/hosts"
_RESOLVER: Final = "/etc/resolv.conf"
MOST: Final = 1024
NOBODY: Final = "192.0.2.1"
"""An address for documentation (RFC 5737): no name server answers there."""


class NamesFiles:
    """The files of one daemon's sandboxes, in ``folder``; None: the daemon makes them."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    async def mounts(self, names: Sequence[str], *, resolver: bool) -> tuple[Json, ...]:
        """Returns the mounts for ``names``, which lead to 127.0.0.1; with ``resolver``, of a name server as well."""
        if self._folder is None or not names:
            return ()
        return await asyncio.to_thread(self._made, self._folder, names, resolver)

    def _made(self, folder: Path, names: Sequence[str], resolver: bool) -> tuple[Json, ...]:
        hosts = "".join(f"127.0.0.1\t{name}\n" for name in ("localhost", *names)) + "::1\tlocalhost\n"
        with self._lock:
            folder.mkdir(mode=0o755, exist_ok=True)
            made = [bind(_file(folder, hosts), _HOSTS)]
            if resolver:
                made.append(bind(_file(folder, f"nameserver {NOBODY}\nsearch .\n"), _RESOLVER))
            _remove_oldest(folder)
        return tuple(made)


def _file(folder: Path, content: str) -> Path:
    path = folder / hashlib.sha256(content.encode()).hexdigest()[:32]
    if path.exists():
        path.touch()
    else:
        new = folder / f"new-{secrets.token_hex(8)}"
        new.write_text(content)
        new.chmod(0o644)
        new.replace(path)
    return path


def _remove_oldest(folder: Path) -> None:
    files = list(folder.iterdir())
    if len(files) > MOST:
        for old in sorted(files, key=lambda file: file.stat().st_mtime_ns)[: MOST // 2]:
            old.unlink(missing_ok=True)
