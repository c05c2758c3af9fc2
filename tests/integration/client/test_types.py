"""What a type checker sees of the Python distributions: of built wheels, installed outside of the repository."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
USES = Path(__file__).parent / "typed_uses"
DISTRIBUTIONS = ("clients/python/stubs", "clients/python/sdk")
IGNORE = re.compile(r"  # type: ignore\[([a-z,-]+)\]")


def ran(*argv: str | Path, cwd: Path) -> str:
    """The output of a command that succeeds."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, f"{argv}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an environment of the built wheels; what they depend on is this environment's."""
    folder = tmp_path_factory.mktemp("elsewhere")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    for name in DISTRIBUTIONS:
        source = folder / "sources" / name
        shutil.copytree(ROOT / name, source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "static"))
        page = source / "penstock" / "dashboard" / "static" / "index.html"
        if page.parent.parent.is_dir():  # built, so that no Node is needed
            page.parent.mkdir()
            page.write_text("<p>")
        wheel = [*pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", str(folder / "wheels")]
        ran(*wheel, str(source), cwd=folder)
    venv.create(folder / "venv", with_pip=False)
    wheels = sorted((folder / "wheels").glob("*.whl"))
    assert len(wheels) == len(DISTRIBUTIONS)
    python = folder / "venv" / "bin" / "python"
    ran(*pip, "--python", python, "install", "--no-deps", "--no-index", *wheels, cwd=folder)
    # A path in a .pth does not bring the .pth files that it has: no editable install of the repository is seen.
    (inside,) = (folder / "venv" / "lib").glob("python3*/site-packages")
    (inside / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    where = ran(python, "-c", "import penstock.client as c; print(c.__file__)", cwd=folder).strip()
    assert Path(where).is_relative_to(folder)
    return folder


def checked(elsewhere: Path, text: str) -> list[str]:
    """The errors that mypy finds in a program outside of the repository."""
    program = elsewhere / "program.py"
    program.write_text(text)
    python = elsewhere / "venv" / "bin" / "python"
    options = ["--strict", "--no-error-summary", "--config-file=", "--python-executable", str(python)]
    argv = [sys.executable, "-m", "mypy", *options, "--cache-dir", str(elsewhere / "cache"), program.name]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=elsewhere)
    assert not done.stderr and done.returncode in (0, 1), done.stderr
    return done.stdout.splitlines()


def test_type_checker_sees_the_types_of_every_installed_package(elsewhere: Path) -> None:
    """And accepts programs that are right."""
    assert checked(elsewhere, (USES / "right_uses.py").read_text()) == []


def test_type_checker_finds_each_misuse(elsewhere: Path) -> None:
    """Each line is an error, of the kind that it names, and no other line is."""
    lines = (USES / "misuses.py").read_text().splitlines()
    expected = {
        (number, kind)
        for number, line in enumerate(lines, 1)
        for named in IGNORE.findall(line)
        for kind in named.split(",")
    }
    errors = checked(elsewhere, "\n".join(IGNORE.sub("", line) for line in lines))
    found = {(int(line.split(":")[1]), line.rpartition("[")[2][:-1]) for line in errors if ": error: " in line}
    assert found == expected


def test_each_package_of_the_distributions_is_typed() -> None:
    """A directory of modules without its marker is Any to a user's type checker."""
    packages = [
        package
        for area in ("clients/python/sdk/penstock", "clients/python/stubs/penstock", "libs/*", "services/*")
        for parent in ROOT.glob(area)
        for package in parent.iterdir()
        if any(package.glob("*.py")) and "tests" not in package.name
    ]
    assert len(packages) > 20
    assert [str(package) for package in packages if not (package / "py.typed").exists()] == []


def test_types_of_the_synchronous_client_are_those_of_its_sources() -> None:
    """`make lint` checks it too."""
    ran(sys.executable, "-m", "clients.sync_client", "--check", cwd=ROOT)
