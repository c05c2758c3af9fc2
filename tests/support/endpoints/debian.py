"""Debian packages that dpkg-deb builds here, and their lines in a lock. A mirror is any server of files by paths."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping
from pathlib import Path

MACHINE = subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True, check=True).stdout.strip()


def package(folder: Path, name: str, files: Mapping[str, str], *, scripts: Mapping[str, str] | None = None) -> bytes:
    """A package of version 1.0. Files below bin directories are programs; a text "-> X" makes a link to X."""
    root = folder / name
    for path, text in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("-> "):
            file.symlink_to(text.removeprefix("-> "))
            continue
        file.write_text(text)
        file.chmod(0o4755 if "bin/" in path else 0o644)
    control = root / "DEBIAN"
    control.mkdir(parents=True)
    fields = {"Package": name, "Version": "1.0", "Architecture": "all", "Maintainer": "T <t@example.com>"}
    (control / "control").write_text(
        "".join(f"{field}: {value}\n" for field, value in fields.items()) + "Description: of a test\n"
    )
    for script, text in (scripts or {}).items():
        (control / script).write_text(text)
        (control / script).chmod(0o755)
    made = folder / f"{name}.deb"
    argv = ["dpkg-deb", "--root-owner-group", "-Zxz", "--build", str(root), str(made)]
    subprocess.run(argv, capture_output=True, check=True)
    return made.read_bytes()


def path_of(name: str) -> str:
    """Its path below a mirror."""
    return f"pool/main/{name[0]}/{name}/{name}_1.0_all.deb"


def line(name: str, content: bytes) -> str:
    """Its line in a lock."""
    return f"{name}=1.0 {path_of(name)} --hash=sha256:{hashlib.sha256(content).hexdigest()}\n"
