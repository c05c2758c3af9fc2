"""Python packages of a toolbox: how pip installs them, and the programs that start them.

Invariants: exactly the named packages are installed, each file by its hash, wheels only, so no package's code runs;
programs start with their own packages and the standard library alone, independent of the sandbox's Python, and do not
pass these on to their children.
"""

from __future__ import annotations

import configparser
import importlib.util
import os
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock_sandbox.domain.model import PythonTarget
from penstock_sandbox.domain.paths import RUNTIMES

FOLDER: Final = "python"
LAYOUT: Final = 1
"""Changes whenever the output of `write_programs` does: earlier installations are then different toolboxes."""

_CERTIFICATE = "make pip trust the index's certificate (PIP_CERT, or `pip config set global.cert`)"
_ABSENT = "check the package, its version, and that it has a wheel with this hash for this Python and platform"
_PERMANENT: Final = (
    (re.compile(r"CERTIFICATE_VERIFY_FAILED|SSLCertVerificationError"), "CERTIFICATE", _CERTIFICATE),
    (re.compile(r"THESE PACKAGES DO NOT MATCH THE HASHES"), "HASH_MISMATCH", "the file is not the one that was pinned"),
    (re.compile(r"Hashes are required in --require-hashes mode"), "HASH_MISSING", "list every package with its hashes"),
    (re.compile(r"No matching distribution found"), "NOT_FOUND", _ABSENT),
    (
        re.compile(r"requires a different Python"),
        "OTHER_PYTHON",
        "set the versions of Python in the toolbox's runtimes",
    ),
    (
        re.compile(r"HTTP error 40[13]|40[13] Client Error"),
        "NOT_ALLOWED",
        "check the index's credentials in pip's settings",
    ),
)
# pip prints this also if it could not reach the index: then it has printed retries before.
_RETRIED = re.compile(r"WARNING: Retrying|Connection broken|Read timed out|Temporary failure in name resolution")
_PASSING = "check the network, the proxy and `pip config list`, then try again"

_START: Final = """\
# Starts a program of this toolbox: FOLDER KIND TARGET NAME, then the program's own arguments.
import os
import sys

libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
if libraries[0] == sys.base_prefix + "/lib":
    del libraries[0], os.environ["LD_LIBRARY_PATH"]
    if libraries:
        os.environ["LD_LIBRARY_PATH"] = ":".join(libraries)
folder, kind, target, sys.argv[:] = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]
sys.path.insert(0, folder)
if kind == "script":
    import runpy

    sys.path.insert(0, target.rpartition("/")[0] or ".")
    runpy.run_path(target, run_name="__main__")
else:
    from importlib import import_module

    module, _, attribute = target.partition(":")
    program = import_module(module)
    for name in attribute.split("."):
        program = getattr(program, name)
    sys.exit(program())
"""

_PLAIN_PROGRAM: Final = """\
#!/usr/bin/env python3
import os
import sys

programs = os.path.dirname(os.path.realpath(__file__))
packages = os.path.dirname(programs)
# Python puts a program's directory first, from which no module is meant to come.
sys.path[:] = [folder for folder in sys.path if folder != programs]
if packages not in sys.path:
    sys.path.insert(0, packages)
from {module} import {first}

if __name__ == "__main__":
    sys.exit({all}())
"""

_LAUNCHER: Final = """\
#!/bin/sh
# The packages are made for Python {minor}: the one that is mounted with them, or the sandbox's own.
here=${{0%/*}}
mounted={runtimes}/python{minor}
check='import sys; sys.exit("%d.%d" % sys.version_info[:2] != "{minor}")'
for python in $mounted/bin/python{minor} python{minor} python3; do
    command -v "$python" >/dev/null 2>&1 || continue
    [ "$python" != python3 ] || python3 -c "$check" || continue
    if [ "$python" = "$mounted/bin/python{minor}" ]; then
        # Its library may be where it was built to be, which is not here. start.py takes this back.
        export LD_LIBRARY_PATH="$mounted/lib${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"
    fi
    {start}
done
echo "$0 needs Python {minor}, and this sandbox has none" >&2
exit 127
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why an installer failed: its error code or "", the line with the cause, a remedy, whether a retry is useless."""

    code: str
    reason: str
    advice: str
    permanent: bool


def pip() -> Path | None:
    """Returns pip as something an interpreter can run: the package beside this service, or Python's bundled wheel."""
    spec = importlib.util.find_spec("pip")
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    bundled = importlib.util.find_spec("ensurepip")
    if bundled is None or not bundled.submodule_search_locations:
        return None
    folder = Path(next(iter(bundled.submodule_search_locations))) / "_bundled"
    return next((wheel / "pip" for wheel in sorted(folder.glob("pip-*.whl"))), None)


def open_to_all(*paths: Path) -> bool:
    """Whether every user of this machine can reach ``paths``."""
    for path in paths:
        real = path.resolve()
        parents = [parent for parent in real.parents if parent.is_dir()]
        if not all(parent.stat().st_mode & stat.S_IXOTH for parent in parents):
            return False
    return True


def arguments(executable: Path, pip: Path, requirements: Path, target: Path) -> list[str]:
    """Returns the command that installs exactly what ``requirements`` names into ``target``."""
    return [
        str(executable),
        "-I",
        str(pip),
        "--disable-pip-version-check",
        "--no-input",
        "install",
        "--target",
        str(target),
        "--only-binary=:all:",
        "--require-hashes",
        "--no-deps",
        "--no-warn-script-location",
        "--quiet",
        "--root-user-action=ignore",
        "--retries=3",
        "-r",
        str(requirements),
    ]


def for_target(target: PythonTarget) -> list[str]:
    """Returns pip's options for another Python than the one that runs it: its version and its wheels' platforms."""
    kind, major, minor, machine = target.platform.split("_", 3)
    platforms = [f"{kind}_{major}_{number}_{machine}" for number in range(int(minor), -1, -1)]
    if kind == "manylinux":
        # The names of before PEP 600.
        platforms += [f"{name}_{machine}" for name in ("manylinux2014", "manylinux2010", "manylinux1")]
    platforms.append(f"linux_{machine}")
    return [
        "--implementation=cp",
        f"--python-version={target.version}",
        *(f"--platform={platform}" for platform in platforms),
    ]


def verdict(lines: Sequence[str]) -> Verdict:
    """Returns the meaning of pip's last lines."""
    text = "\n".join(lines)
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = errors[-1] if errors else next((line for line in reversed(lines) if line.strip()), "pip printed nothing")
    for pattern, code, advice in _PERMANENT:
        if pattern.search(text) and not (code == "NOT_FOUND" and _RETRIED.search(text)):
            return Verdict(code, reason, advice, True)
    return Verdict("", reason, _PASSING, False)


def write_programs(toolbox: Path, minor: str) -> None:
    """Writes ``toolbox``/python/bin: a program for each of the packages' entry points, and `python` for scripts."""
    folder = toolbox / FOLDER
    programs = folder / "bin"
    # pip's own scripts start with the interpreter that ran pip, which is not the sandbox's.
    shutil.rmtree(programs, ignore_errors=True)
    programs.mkdir()
    _write(folder / "start.py", _START, 0o644)
    script_start = """exec "$python" -I -S "$here/../start.py" "$here/.." script "$1" "$@\""""
    _write(programs / "python", _launcher(minor, script_start), 0o755)
    for name, target in _entry_points(folder):
        start = f"""exec "$python" -I -S "$here/../start.py" "$here/.." entry {target} {name} "$@\""""
        _write(programs / name, _launcher(minor, start), 0o755)


def write_plain_programs(toolbox: Path) -> None:
    """Writes ``toolbox``/python/bin: a program for each entry point, which the python3 in the sandbox's PATH runs."""
    folder = toolbox / FOLDER
    programs = folder / "bin"
    # pip's own scripts start with the interpreter that ran pip, which is not the sandbox's.
    shutil.rmtree(programs, ignore_errors=True)
    programs.mkdir()
    for name, target in _entry_points(folder):
        module, _, attribute = target.partition(":")
        text = _PLAIN_PROGRAM.format(module=module, first=attribute.partition(".")[0], all=attribute)
        _write(programs / name, text, 0o755)


def _launcher(minor: str, start: str) -> str:
    return _LAUNCHER.format(minor=minor, runtimes=RUNTIMES, start=start)


def _entry_points(folder: Path) -> Iterator[tuple[str, str]]:
    """Yields names and targets of the packages' programs; skips what may not be a plain name."""
    for file in sorted(folder.glob("*.dist-info/entry_points.txt")):
        parser = configparser.ConfigParser(delimiters=("=",), interpolation=None, strict=False)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string(file.read_text("utf-8"))
        for name, target in parser["console_scripts"].items() if parser.has_section("console_scripts") else ():
            target = target.partition("[")[0].replace(" ", "")
            if (
                re.fullmatch(r"[A-Za-z0-9][\w.-]*", name)
                and re.fullmatch(r"[\w.]+:[\w.]+", target)
                and name != "python"
            ):
                yield name, target


def _write(path: Path, text: str, mode: int) -> None:
    path.write_text(text)
    os.chmod(path, mode)
