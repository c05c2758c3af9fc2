"""Runs the commands of docs/install.md as they are printed, on what `make dist` built: a part of `make dist-check`.

    python -m tools.install_check [FOLDER]        default: dist; some five minutes on two cores

Each section of the page gets an empty directory with `dist` in it, all of them one empty HOME. uv and pipx come from
the package index. `penstock demo` trains one step. What each section installs is printed in MB, for who wants to state
it with a date. Containers, clusters and a clone have checks of their own.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tools.names import ROOT

PAGE: Final = ROOT / "docs" / "install.md"
RUN: Final = ("Try it", "The client alone", "Everything on one machine")
"""The sections whose commands are run."""
_STEPS: Final = 1
_LIMIT_S: Final = 1200.0
_BLOCK: Final = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
_CHANGED: Final = ("PENSTOCK_", "PIP_FIND_LINKS", "PYTHON", "UV_", "VIRTUAL_ENV", "XDG_")


def sections(text: str) -> dict[str, list[str]]:
    """The commands of a page by the heading that they stand under, in order."""
    found: dict[str, list[str]] = {}
    for part in text.split("\n## ")[1:]:
        title, _, body = part.partition("\n")
        lines = [line for block in _BLOCK.findall(body) for line in block.splitlines() if line.strip()]
        found[title.strip()] = lines
    return found


def check(dist: Path, folder: Path) -> None:
    """Runs the page's commands in `folder`, with `dist` as what is installed from.

    Raises:
        SystemExit: a command failed, or did not do what the page promises.
    """
    commands = sections(PAGE.read_text(encoding="utf-8"))
    environment = _environment(folder)
    for title in RUN:
        place = folder / title.replace(" ", "-").lower()
        place.mkdir()
        (place / "dist").symlink_to(dist)
        for command in commands[title]:
            print(f"{title}: {command}", flush=True)
            _run(command.replace("penstock demo", f"penstock demo --steps {_STEPS}"), place, environment)
            if "penstock demo" in command:
                _trained(place)
        for installed in sorted(path for path in place.iterdir() if (path / "pyvenv.cfg").is_file()):
            print(f"{title}: {installed.name} has {megabytes(installed)} MB", flush=True)
        if title == RUN[0]:  # uv and pipx install into caches of their own
            print(f"{title}: the home directory has {megabytes(folder / 'home')} MB", flush=True)
    _has_no_services(folder / "the-client-alone", environment)


def megabytes(folder: Path) -> int:
    """The size of a directory's files in MB (10^6 bytes), each counted once: uv links those of its cache."""
    sizes = dict[tuple[int, int], int]()
    for at, _, names in os.walk(folder):
        for name in names:
            found = (Path(at) / name).lstat()
            sizes[found.st_dev, found.st_ino] = found.st_size
    return round(sum(sizes.values()) / 1e6)


def _environment(folder: Path) -> Mapping[str, str]:
    """A newcomer's: uv, pipx, an empty HOME, nothing of ours."""
    home, tools = folder / "home", folder / "tools"
    home.mkdir()
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_CHANGED)}
    python = f"{sys.executable} -m venv {tools} && {tools}/bin/python -m pip install --quiet uv pipx"
    _run(python, folder, kept)
    # The interpreter that runs this is the reader's python3.
    base = Path(sys.base_prefix) / "bin"
    return {**kept, "HOME": str(home), "PATH": f"{tools / 'bin'}{os.pathsep}{base}{os.pathsep}{kept.get('PATH', '')}"}


def _trained(place: Path) -> None:
    lines = (place / "runs" / "demo" / "latest" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    if len(lines) != _STEPS or not json.loads(lines[0]):
        sys.exit(f"`penstock demo` in {place} left {len(lines)} steps, not {_STEPS}")


def _has_no_services(place: Path, environment: Mapping[str, str]) -> None:
    program = "import importlib.util, sys, penstock.client; sys.exit(bool(importlib.util.find_spec('penstock_driver')))"
    _run(f'client/bin/python -c "{program}"', place, environment)


def _run(command: str, place: Path, environment: Mapping[str, str]) -> None:
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=place,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{command} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        check(Path(sys.argv[1] if len(sys.argv) > 1 else "dist").resolve(), Path(scratch))
    print("the commands of docs/install.md do what it says")
