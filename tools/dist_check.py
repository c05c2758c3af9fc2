"""What takes too long for the suite, on what `make dist` built: `make dist-check`.

    python -m tools.dist_check [FOLDER]        default: dist; over ten minutes on two cores

- Each source archive, and a clone of the repository, build their wheels with pip alone: no Node.js on PATH.
- The commands of docs/install.md do what that page says (tools/install_check.py).
- From the wheels `penstock demo` makes the same first steps as the checkout does, figure by figure.
- From the wheels `penstock demo --agent mini-swe-agent` installs that agent from PyPI and makes a step.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tools import install_check
from tools.names import ROOT

STEPS: Final = 3
_TIMES: Final = {"seconds", "elapsed"}


def main() -> None:
    """Checks; exits with what is wrong."""
    dist = Path(sys.argv[1] if len(sys.argv) > 1 else "dist").resolve()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _builds(dist, folder)
        (folder / "installs").mkdir()
        install_check.check(dist, folder / "installs")
        _trains(dist, folder)


def _builds(dist: Path, folder: Path) -> None:
    plain = folder / "bin"
    plain.mkdir()
    for program in ("git", "sh", "env"):
        found = subprocess.run(["sh", "-c", f"command -v {program}"], capture_output=True, text=True, check=True).stdout
        (plain / program).symlink_to(found.strip())
    environment = {**os.environ, "PATH": str(plain)}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps", "-w"]
    print("source archives", flush=True)
    _run([*pip, str(folder / "wheels"), *map(str, sorted(dist.glob("*.tar.gz")))], folder, environment)
    clone = folder / "clone"
    _run(["git", "clone", "--quiet", str(ROOT), str(clone)], folder, environment)
    print("a clone", flush=True)
    _run([*pip, str(folder / "cloned"), str(clone / "clients" / "python" / "sdk")], folder, environment)
    (wheel,) = (folder / "cloned").glob("*.whl")
    listed = subprocess.run(
        [sys.executable, "-m", "zipfile", "-l", str(wheel)], capture_output=True, text=True, check=True
    )
    if "penstock/dashboard/static/index.html" not in listed.stdout:
        sys.exit("the client's wheel, built in a clone, lacks the dashboard's page")


def _trains(dist: Path, folder: Path) -> None:
    installed = folder / "environment"
    _run([sys.executable, "-m", "venv", str(installed)], folder, os.environ)
    python = str(installed / "bin" / "python")
    wheels = [
        f"{path}[local]" if path.name.startswith("penstock-") else str(path) for path in sorted(dist.glob("*.whl"))
    ]
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    _run([*pip, "-c", str(ROOT / "constraints.txt"), *wheels], folder, os.environ)
    figures = []
    for name, interpreter in (("wheels", python), ("checkout", sys.executable)):
        print(f"the demo, from {name}", flush=True)
        place = folder / f"demo-from-{name}"
        place.mkdir()
        _run([interpreter, "-m", "penstock.cli.main", "demo", "--seed", "1", "--steps", str(STEPS)], place, os.environ)
        figures.append(_figures(place / "runs" / "demo" / "latest" / "metrics.jsonl"))
    if len(figures[0]) != STEPS or figures[0] != figures[1]:
        sys.exit(f"from wheels: {figures[0]}\nfrom the checkout: {figures[1]}")
    print("the same figures:", [line["success"] for line in figures[0]])
    print("the demo with mini-swe-agent, from wheels", flush=True)
    demo = [python, "-m", "penstock.cli.main", "demo", "--agent", "mini-swe-agent", "--steps", "1"]
    _run(demo, folder / "demo-from-wheels", os.environ)
    steps = _figures(folder / "demo-from-wheels" / "runs" / "demo-mini-swe-agent" / "latest" / "metrics.jsonl")
    if len(steps) != 1:
        sys.exit(f"with mini-swe-agent, from wheels: {len(steps)} steps, not 1")


def _figures(path: Path) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [{key: value for key, value in line.items() if key not in _TIMES} for line in lines]


def _run(argv: list[str], folder: Path, environment: Mapping[str, str]) -> None:
    done = subprocess.run(argv, cwd=folder, env=dict(environment), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(argv)} failed:\n{done.stdout[-6000:]}{done.stderr[-6000:]}")


if __name__ == "__main__":
    main()
