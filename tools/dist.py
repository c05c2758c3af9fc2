"""Builds everything that is published, into a folder: `make dist`.

    python -m tools.dist [FOLDER]          default: dist

Wheels and source archives, the npm package, the Go module as its proxy protocol has it, the protos for every other
language, a bill of materials (CycloneDX) and SHA256SUMS. The small model of `penstock-demo` is trained on the way, from
one seed; build/ keeps it. Times in the archives are those of the last commit, so that two builds of one commit differ
in nothing but what compilers make of it.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from clients import nodejs
from tools import checkout, sbom
from tools.names import PYTHON, ROOT, names

SUMS: Final = "SHA256SUMS"
BILL: Final = "penstock.cdx.json"
MODEL: Final = ROOT / "build" / "tiny-model"


def build(folder: Path) -> None:
    """Makes the folder anew.

    Raises:
        SystemExit: a builder failed; it printed why.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = {**os.environ, "SOURCE_DATE_EPOCH": _commit_time()}
    shutil.rmtree(MODEL, ignore_errors=True)
    cache = MODEL.with_name("tiny-model-cache")
    _run([sys.executable, "-m", "penstock_demo.tiny_model", str(MODEL), "--cache", str(cache)], ROOT, environment)
    for place in PYTHON:
        argv = [sys.executable, "-m", "hatchling", "build", "-d", str(folder), "-t", "sdist", "-t", "wheel"]
        _run(argv, ROOT / place, environment)
    _npm_package(folder)
    go_module(folder)
    protos(folder)
    (folder / BILL).write_text(json.dumps(sbom.bill(folder), indent=2) + "\n", encoding="utf-8")
    made = sorted(path for path in folder.iterdir() if path.name != SUMS)
    (folder / SUMS).write_text("".join(f"{digest(path)}  {path.name}\n" for path in made), encoding="utf-8")


def _npm_package(folder: Path) -> None:
    """Packs a copy of the TypeScript client: its build overwrites what others may be reading."""
    source = ROOT / "clients" / "typescript"
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "client"
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("node_modules", "dist", ".*.ts"))
        (copy / "node_modules").symlink_to(source / "node_modules")
        _run(["npm", "pack", "--silent", "--pack-destination", str(folder)], copy, nodejs.environment())


def go_module(folder: Path) -> Path:
    """Writes `penstock-go-VERSION.zip`: the Go client as a module proxy serves it; returns it."""
    version = f"v{sbom.version()}"
    target = folder / f"penstock-go-{version}.zip"
    inside = f"{names()['go']}@{version}"
    client = ROOT / "clients" / "go"
    files = [ROOT / name for name in checkout.files("clients/go")]
    _zip(target, {f"{inside}/{path.relative_to(client).as_posix()}": path for path in files})
    return target


def protos(folder: Path) -> Path:
    """Writes `penstock-proto-files-VERSION.zip`: what a language without a client generates its stubs from."""
    target = folder / f"penstock-proto-files-v{sbom.version()}.zip"
    files = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "protos").rglob("*.proto")}
    _zip(target, {**files, "LICENSE": ROOT / "LICENSE"})
    return target


def _zip(target: Path, files: Mapping[str, Path]) -> None:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name)  # its time is 1980's, for all
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, files[name].read_bytes())


def digest(path: Path) -> str:
    """Returns a file's SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _commit_time() -> str:
    argv = ["git", "log", "-1", "--format=%ct"]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _run(argv: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
    """Runs a builder, whose output is shown where it failed."""
    command = [shutil.which(argv[0], path=environment.get("PATH")) or argv[0], *argv[1:]]
    done = subprocess.run(command, cwd=folder, env=dict(environment), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(argv)} failed in {folder}:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    place = Path(sys.argv[1] if len(sys.argv) > 1 else "dist").resolve()
    build(place)
    for path in sorted(place.iterdir()):
        print(f"{path.stat().st_size:>10,}  {path.name}")
