"""Wheels: what the images install, gathered once a machine and set of versions; and this repository's own.

`python -m tests.support.wheels` gathers the first beforehand. What pip installed here comes from its own cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from clients.needs import needs
from tools import checkout

ROOT: Final = Path(__file__).resolve().parents[2]
SERVICES: Final = ("inference", "interception", "sandbox", "driver")

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock-tests" / "wheels"


def gathered() -> Path:
    """The folder with the wheels; who comes while it is filled waits."""
    inputs = [ROOT / "constraints.txt", ROOT / "clients/python/sdk/pyproject.toml"]
    inputs += sorted(ROOT.glob("libs/*/pyproject.toml"))
    inputs += [ROOT / f"services/{name}/pyproject.toml" for name in SERVICES]
    inputs.append(Path(__file__))  # which extras there are
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in inputs)).hexdigest()[:16]
    kept = _CACHE / digest
    with _alone():
        if not kept.exists():
            _gather(kept)
    return kept


def of_commit(commit: str) -> Path:
    """The folder with this repository's wheels as of a commit, but for the demo's; AssertionError where it is missing.

    Built once a machine.
    """
    kept = _CACHE / f"commit-{commit}"
    with _alone():
        if not kept.exists():
            archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=False)
            advice = f"{archive.stderr.decode().strip()}\nIn a shallow clone, run: git fetch --unshallow"
            assert archive.returncode == 0, f"commit {commit} is not here: {advice}"
            with tempfile.TemporaryDirectory() as scratch, tarfile.open(fileobj=io.BytesIO(archive.stdout)) as content:
                content.extraction_filter = getattr(tarfile, "data_filter", None)  # since Python 3.11.4
                content.extractall(scratch)
                _build(Path(scratch), kept)
    return kept


def of_checkout(folder: Path) -> Path:
    """Builds this repository's wheels, but for the demo's, as the files are now; `folder` must not exist yet."""
    with tempfile.TemporaryDirectory() as scratch:
        for name in checkout.files("clients/python", "libs", "services"):
            target = Path(scratch, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)
        _build(Path(scratch), folder)
    return folder


def install(wheels: Path, folder: Path) -> Path:
    """Makes a virtual environment with these wheels, and with what else is installed here; returns its interpreter."""
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], ROOT)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    # The directory alone, whose .pth files lead to the checkout, is not looked at: what is installed comes first.
    (packages / "third-parties.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    given = [str(path) for path in sorted(wheels.glob("*.whl"))]
    _run([*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-compile", *given], ROOT)
    return python


@contextmanager
def _alone() -> Iterator[None]:
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(tree: Path, folder: Path) -> None:
    """Builds the wheels of a tree that nobody else uses, whose dashboard has a page without content."""
    page = tree / "clients/python/sdk/penstock/dashboard/static/index.html"
    page.parent.mkdir(exist_ok=True)
    page.touch()
    partial = folder.with_name(f".{folder.name}-{os.getpid()}")
    for project in sorted(tree.glob("*/**/pyproject.toml")):
        name = project.parent.relative_to(tree).as_posix()
        if name.startswith(("clients/python/", "libs/", "services/")) and name != "clients/python/demo":
            _run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(partial)], project.parent)
    partial.rename(folder)


def _run(argv: list[str], folder: Path) -> None:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, f"{' '.join(argv)}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"


def _gather(kept: Path) -> None:
    partial = _CACHE / f".{kept.name}-{os.getpid()}"
    wanted = [
        "clients/python/stubs",
        "libs/chassis",
        "libs/codec",
        "services/sandbox[docker]",
        "services/driver[export]",
    ]
    wanted += [f"services/{name}" for name in SERVICES if name not in ("sandbox", "driver")]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-build-isolation"]
    named = ["hatchling", *needs(), *(f"./{name}" for name in wanted)]
    argv = [*pip, "-c", "constraints.txt", "-w", str(partial), *named]
    _run(argv, ROOT)
    for ours in partial.glob("penstock*"):
        ours.unlink()
    partial.rename(kept)


if __name__ == "__main__":
    gathered()
