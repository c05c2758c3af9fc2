"""Installed agents kept between runs, outside the clone: npm and pip are asked once a machine, not once a run.

The store is optional: without it, or when it cannot be used, the service installs from nothing. Root mounts what is
there read-only, since agents are 70,000 files; others link the files, or copy them where the file system has no links.
The service and its sandboxes only read them.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

STORE: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock-tests" / "toolboxes"
_CONTENT: Final = "content"
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MNT_DETACH = 1, 32, 4096, 2


@contextmanager
def brought(state_dir: Path) -> Iterator[None]:
    """What is in the store is under a sandbox service's state directory, which starts and ends inside the block.

    At the end, what the service installed from a registry is put into the store.
    """
    target = _folder(state_dir)
    mounts = list[Path]()
    try:
        for kept in STORE.glob("[!.]*"):  # what begins with a dot is another run's, and becomes or goes at any time
            if not (kept / "toolbox.json").is_file():
                continue
            place = target / kept.name
            if _mounted(kept / _CONTENT, place / _CONTENT):
                mounts.append(place / _CONTENT)
                shutil.copy2(kept / "toolbox.json", place)
            else:
                _clone(kept, place)
        yield
    finally:
        for mount in mounts:
            ctypes.CDLL(None).umount2(os.fsencode(mount), _MNT_DETACH)
        _keep(state_dir)


def _mounted(source: Path, target: Path) -> bool:
    """Mounts a directory read-only where this process may."""
    if os.geteuid() != 0:
        return False
    libc, where = ctypes.CDLL(None), os.fsencode(target)
    target.mkdir(parents=True)
    if libc.mount(os.fsencode(source), where, None, _MS_BIND, None) == 0:
        if libc.mount(None, where, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY, None) == 0:
            return True
        libc.umount2(where, _MNT_DETACH)
    shutil.rmtree(target.parent)
    return False


def _keep(state_dir: Path) -> None:
    """Put what the service installed from a registry into the store, after it ended."""
    folder = _folder(state_dir)
    for installed in folder.glob("[!.]*"):
        kept = STORE / installed.name
        content = installed / _CONTENT
        if any((content / name).is_dir() for name in ("node_modules", "python")) and not kept.exists():
            STORE.mkdir(parents=True, exist_ok=True)
            partial = STORE / f".partial-{secrets.token_hex(4)}"
            _clone(installed, partial)
            try:
                partial.rename(kept)
            except OSError:  # another run was faster
                shutil.rmtree(partial)


def _folder(state_dir: Path) -> Path:
    return state_dir / "local" / "toolboxes"


def _clone(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, target, symlinks=True, copy_function=_link)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
