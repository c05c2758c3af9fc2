"""What the images install, as wheels that are gathered once a machine and set of versions.

`python -m tests.support.wheels` gathers them beforehand. What was installed here by pip comes from pip's own cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from clients.needs import needs

ROOT: Final = Path(__file__).resolve().parents[2]
SERVICES: Final = ("inference", "interception", "sandbox", "driver")

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock-tests" / "wheels"


def gathered() -> Path:
    """The folder with the wheels; who comes while it is filled waits."""
    inputs = [ROOT / "constraints.txt", ROOT / "clients/python/sdk/pyproject.toml"]
    inputs += sorted(ROOT.glob("libs/*/pyproject.toml"))
    inputs += [ROOT / f"services/{name}/pyproject.toml" for name in SERVICES]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in inputs)).hexdigest()[:16]
    kept = _CACHE / digest
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            _gather(kept)
    return kept


def _gather(kept: Path) -> None:
    partial = _CACHE / f".{kept.name}-{os.getpid()}"
    wanted = ["clients/python/stubs", "libs/chassis", "libs/codec", "services/sandbox[docker]"]
    wanted += [f"services/{name}" for name in SERVICES if name != "sandbox"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-build-isolation"]
    named = ["hatchling", *needs(), *(f"./{name}" for name in wanted)]
    argv = [*pip, "-c", "constraints.txt", "-w", str(partial), *named]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, f"{' '.join(argv)}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    for ours in partial.glob("penstock*"):
        ours.unlink()
    partial.rename(kept)


if __name__ == "__main__":
    gathered()
