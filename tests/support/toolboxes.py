"""Installed agents kept between runs, outside the clone: npm and pip are asked once a machine, not once a run.

The store is optional: without it, or when it cannot be used, the service installs from nothing. Files are linked, not
copied, where the file system allows; the service and its sandboxes only read them.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import Final

STORE: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock-tests" / "toolboxes"


def bring(state_dir: Path) -> None:
    """Put what is in the store under a sandbox service's state directory, before it starts."""
    target = _folder(state_dir)
    for kept in STORE.glob("[!.]*"):  # what begins with a dot is another run's, and becomes or goes at any time
        if (kept / "toolbox.json").is_file():
            _clone(kept, target / kept.name)


def keep(state_dir: Path) -> None:
    """Put what the service installed from a registry into the store, after it ended."""
    folder = _folder(state_dir)
    for installed in folder.glob("[!.]*"):
        kept = STORE / installed.name
        content = installed / "content"
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
